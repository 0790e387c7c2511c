"""Child processes: logged, with a time limit, and ended as a whole group."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

__all__ = ["CommandError", "launch_environment", "run_logged", "sigterm_unwinds", "which"]

_GRACE_SECONDS = 10.0


class CommandError(RuntimeError):
    """A command failed or ran past its limit; its output stands in the log.

    Attributes:
        log: file that holds everything the command wrote.
        returncode: exit status, or None when the command was ended for taking too long.
    """

    def __init__(self, message: str, *, log: Path, returncode: int | None) -> None:
        super().__init__(message)
        self.log = log
        self.returncode = returncode


def _script_dirs() -> list[str]:
    """Where pip puts commands for this interpreter, the likeliest first."""
    dirs = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    with contextlib.suppress(KeyError):
        dirs.append(sysconfig.get_path("scripts", f"{os.name}_user"))
    return dirs


def launch_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment in which ``horovodrun`` and ``mpirun`` work on this host.

    Commands of the running interpreter's own environment come first on ``PATH``, so that Horovod finds the MPI it was
    built with even where the virtual environment was never activated. As root, Open MPI is told that this is meant:
    it refuses to start otherwise.

    Args:
        base: environment to start from; ``os.environ`` if None.
    """
    environment = dict(os.environ if base is None else base)
    path = [*_script_dirs(), *environment.get("PATH", os.defpath).split(os.pathsep)]
    environment["PATH"] = os.pathsep.join(dict.fromkeys(entry for entry in path if entry))
    if os.geteuid() == 0:
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    # Two ranks must start on a host with one core too. The names are Open MPI 4's and 5's.
    environment.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    environment.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    return environment


def which(command: str, environment: Mapping[str, str]) -> Path | None:
    """Returns where `environment`'s PATH finds `command`, or None."""
    found = shutil.which(command, path=environment.get("PATH", os.defpath))
    return None if found is None else Path(found)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """While open, SIGTERM raises SystemExit, so that children are ended and temporary folders removed.

    Does nothing in any thread but the main one, which alone may set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_logged(
    command: Sequence[str | os.PathLike[str]],
    *,
    log: Path,
    environment: Mapping[str, str],
    cwd: Path,
    timeout_seconds: float | None = None,
    on_line: Callable[[str], None] | None = None,
    on_tick: Callable[[], None] | None = None,
) -> None:
    """Runs `command` to its end and appends its output, stdout and stderr together, to `log`.

    The command gets a process group of its own. Whatever of it is left is ended when this returns or raises: on
    success, on failure, past the limit, and on Ctrl-C.

    Args:
        command: program and arguments; no shell is involved.
        log: file to append to.
        environment: the whole environment of the command.
        cwd: folder to run in.
        timeout_seconds: limit, or None for none.
        on_line: called with each line of output, its line end removed.
        on_tick: called about once a second, for progress displays.

    Raises:
        CommandError: the command could not be started, its exit status was not 0, or it ran past the limit.
    """
    name = Path(command[0]).name
    with log.open("ab") as log_file:
        log_file.write(f"$ {' '.join(os.fspath(part) for part in command)}\n".encode())
        log_file.flush()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{name} could not be started: {error}", log=log, returncode=None) from error
        try:
            for chunk in _chunks(process, timeout_seconds, on_tick):
                log_file.write(chunk)
                log_file.flush()
                if on_line is not None:
                    on_line(chunk.decode(errors="replace").rstrip("\r\n"))
            # It may have closed its output and go on working.
            returncode = process.wait(None if timeout_seconds is None else _GRACE_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            message = f"{name} did not finish within {timeout_seconds or 0:g} s and was ended"
            raise CommandError(message, log=log, returncode=None) from None
        finally:
            _end_group(process)
    if returncode != 0:
        raise CommandError(f"{name} failed with exit status {returncode}", log=log, returncode=returncode)


def _chunks(
    process: subprocess.Popen[bytes], timeout_seconds: float | None, on_tick: Callable[[], None] | None
) -> Iterator[bytes]:
    """Yields the output line by line until it ends; raises TimeoutError at the limit."""
    assert process.stdout is not None
    start = time.monotonic()
    ended: float | None = None
    next_tick = start + 1.0
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(timeout=0.5)
            now = time.monotonic()
            if on_tick is not None and now >= next_tick:
                on_tick()
                next_tick = now + 1.0
            if timeout_seconds is not None and now - start > timeout_seconds:
                raise TimeoutError
            if ready:
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    yield line + b"\n"
            elif process.poll() is not None:
                # A daemon that the command left behind may hold the pipe open for ever.
                ended = now if ended is None else ended
                if now - ended > _GRACE_SECONDS:
                    break
    if pending:
        yield pending + b"\n"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the process and its group, gently first.

    Gently matters: mpirun starts its ranks in groups of their own, and ends them when it is told to end. So all of the
    group gets its time, not the first process alone, which may be a shell that ends at once.
    """
    for signum in (signal.SIGTERM, signal.SIGKILL):
        give_up = time.monotonic() + _GRACE_SECONDS
        try:
            os.killpg(process.pid, signum)
            while time.monotonic() < give_up:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        except (ProcessLookupError, PermissionError):
            break
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
