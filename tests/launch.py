"""Runs a script on several ranks under the real launchers, with a time limit and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_onebit.netlab import NetworkLab, parse_rate

__all__ = [
    "LAUNCHERS",
    "Completed",
    "Launches",
    "checks_in",
    "interruptible",
    "on_two_hosts",
    "rank_environment",
    "run_horovod",
]

LAUNCHERS = ("gloo", "mpi", "mpirun")
"""horovodrun --gloo, horovodrun --mpi, and Open MPI's own mpirun."""

_MARK = "HVD_ONEBIT_TEST_RUN"  # in the environment of everything that a launcher starts
_RANK_LINE = re.compile(r"\[(?:1,)?(\d+)\]<(stdout|stderr)>: ?(.*)")
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Completed:
    """What a launch left.

    Attributes:
        args: the whole command.
        returncode: the launcher's exit status; None when it was ended for taking too long.
        output: all that the launcher and the ranks wrote.
        ranks: each rank's own lines, standard output and error together, without the launcher's prefix.
        seconds: how long it took.
    """

    args: tuple[str, ...]
    returncode: int | None
    output: str
    ranks: tuple[str, ...]
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def check(self) -> Completed:
        """This, if every rank ended well; else AssertionError with the output."""
        if self.returncode != 0:
            how = "ran past its time limit" if self.timed_out else f"ended with status {self.returncode}"
            raise AssertionError(f"{' '.join(self.args)} {how}:\n{self.output[-20000:]}")
        return self


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for ranks: this interpreter's commands first on PATH, one thread a rank.

    Open MPI asks root twice whether this is meant; and two ranks must start on a machine with one core.
    """
    environment = dict(os.environ)
    commands = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([commands, environment.get("PATH", os.defpath)])
    if os.geteuid() == 0:
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    environment["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"  # where ptrace is forbidden it only warns
    environment["OMP_NUM_THREADS"] = "1"
    environment.update(extra or {})
    return environment


def run_horovod(
    script: str | Path,
    np: int,
    *args: str,
    launcher: str = "gloo",
    timeout: float = 60.0,
    cwd: str | Path,
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Completed:
    """Runs `python script args...` on `np` ranks of this machine.

    Whatever of it is left when this returns or raises was ended: launchers give ranks sessions of their own, so all
    processes that carry this run's mark in their environment are.

    Args:
        script: the Python file.
        np: number of ranks.
        *args: the script's arguments.
        launcher: one of `LAUNCHERS`.
        timeout: seconds until everything is ended.
        cwd: folder to run in.
        env: variables on top of `rank_environment()`.
        prefix: a command to run the launcher under, such as ("unshare", "-n").
        options: more of the launcher's own options.
    """
    commands = {
        "gloo": ["horovodrun", "-np", str(np), "--gloo"],
        "mpi": ["horovodrun", "-np", str(np), "--mpi"],
        "mpirun": ["mpirun", "--oversubscribe", "--tag-output", "-np", str(np)],
    }
    command = (*prefix, *commands[launcher], *options, sys.executable, str(script), *args)
    mark = uuid.uuid4().hex
    environment = {**rank_environment(env), _MARK: mark}
    start = time.monotonic()
    returncode: int | None = None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        try:
            written, _ = process.communicate(timeout=timeout)
            returncode = process.returncode
        except subprocess.TimeoutExpired:
            _end(process, mark)
            written, _ = process.communicate()
    finally:
        _end(process, mark)
    output = written.decode(errors="replace").replace("\r\n", "\n")
    return Completed(command, returncode, output, _by_rank(output, np), time.monotonic() - start)


def checks_in(script: Path) -> list[str]:
    """The names of the functions that are decorated with `check` there."""
    return re.findall(r"^@check\ndef (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)


class Launches:
    """Many checks in one launch each, as starting one costs seconds; made once, when the first test asks for it.

    The script is called with a folder and the names of its checks, and writes what came of each to {rank}.json there.

    Args:
        script: holds the checks.
        plans: by name: the launcher, the number of ranks, and the checks.
        root: a folder for the launches' own.
        timeout: seconds until a launch is ended.
        env: variables on top of `rank_environment()`.
    """

    def __init__(
        self,
        script: Path,
        plans: Mapping[str, tuple[str, int, list[str]]],
        root: Path,
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._script = script
        self._plans = plans
        self._root = root
        self._timeout = timeout
        own = {"PYTHONPATH": str(Path(__file__).parent), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
        self._environment = {**own, **(env or {})}
        self._done: dict[str, Completed] = {}

    def folder(self, name: str) -> Path:
        return self._root / name

    def __call__(self, name: str) -> Completed:
        if name not in self._done:
            launcher, size, checks = self._plans[name]
            folder = self.folder(name)
            folder.mkdir()
            self._done[name] = run_horovod(
                self._script,
                size,
                str(folder),
                *checks,
                launcher=launcher,
                timeout=self._timeout,
                cwd=folder,
                env=self._environment,
            )
        return self._done[name]

    def assert_passed(self, name: str, check: str) -> None:
        """Raises AssertionError unless the check held on every rank."""
        completed = self(name)
        for rank in range(self._plans[name][1]):
            path = self.folder(name) / f"{rank}.json"
            results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            failed = [each for each, result in results.items() if result != "passed"]
            why = results.get(check, f"never came to it; not passed before: {', '.join(failed) or 'none'}")
            assert why == "passed", f"rank {rank}: {why}\n{completed.output[-8000:]}"


def _by_rank(output: str, size: int) -> tuple[str, ...]:
    lines: list[list[str]] = [[] for _ in range(size)]
    for line in output.splitlines():
        match = _RANK_LINE.match(line)
        if match and int(match.group(1)) < size:
            lines[int(match.group(1))].append(match.group(3))
    return tuple("\n".join(each) for each in lines)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends the launcher's group, gently first, and then all that carries the mark."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    for _ in range(50):
        left = _marked(mark)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """Live processes with this run's mark in their environment."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def interruptible() -> None:
    """For a child before it starts: what runs in the background of a script is started with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def on_two_hosts(
    script: Path, folder: Path, *, timeout: float, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Runs `script FOLDER` with two ranks on each of two network hosts; each rank's RANK.json there, and the log."""
    log = folder / "log"
    log.touch()
    with NetworkLab(2, rate=parse_rate("1gbit")) as lab:
        lab.horovodrun(
            [sys.executable, str(script), str(folder)],
            ranks_per_host=2,
            log=log,
            cwd=folder,
            environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent.parent), **(environment or {})},
            timeout_seconds=timeout,
        )
    found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    return found, log.read_text(encoding="utf-8")
