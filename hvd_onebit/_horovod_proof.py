"""The proof that an installed Horovod works: two ranks add their numbers under the real launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hvd_onebit._build_needs import Mpi
from hvd_onebit._horovod_source import InstallError
from hvd_onebit._processes import which

__all__ = ["launchers", "prove", "sayings"]

_TIMEOUT_SECONDS = 600.0

_SCRIPT = """\
import {framework} as framework
import horovod.{framework} as hvd

hvd.init()
value = framework.ones([4]) * float(hvd.rank() + 1)
total = hvd.allreduce(value, op=hvd.Sum, name="hvd_onebit_proof")
controller = "mpi" if hvd.mpi_enabled() else "gloo" if hvd.gloo_enabled() else "no controller"
sums = sorted(set(total.numpy().tolist()))
print(f"proof: rank {{hvd.rank()}} of {{hvd.size()}} over {{controller}}: sum {{sums}}", flush=True)
hvd.shutdown()
"""


class _Run(Protocol):
    """Runs a command in its own folder, with its own environment and log."""

    cwd: Path

    def __call__(
        self, command: Sequence[str], *, timeout_seconds: float, on_line: Callable[[str], None] | None = None
    ) -> None: ...


def launchers(mpi: Mpi | None, environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the command that starts two ranks, for each controller that Horovod was built with.

    Raises:
        InstallError: there is no horovodrun.
    """
    horovodrun = which("horovodrun", environment)
    if horovodrun is None:
        raise InstallError("Horovod is installed, but no horovodrun lies on PATH or beside the Python interpreter")
    commands = {"gloo": [str(horovodrun), "-np", "2", "--gloo"]}
    if mpi is not None:
        by_horovodrun = [str(horovodrun), "-np", "2", "--mpi"]
        commands["mpi"] = by_horovodrun if mpi.serves_horovodrun else [str(mpi.mpirun), "-np", "2"]
    return commands


def sayings(line: str) -> list[str]:
    """What ranks said in a line of the launcher's output, where mpirun may have run two of theirs together."""
    return re.findall(r"proof: (rank \d+ of \d+ over [a-z ]+: sum \[[^\]]*\])", line)


def prove(framework: str, launcher: Sequence[str], controller: str, *, run: _Run) -> None:
    """Lets two ranks add 1 and 2 under `launcher`.

    Raises:
        InstallError: they did not both arrive at 3 over the controller asked for.
        CommandError: they ended badly, or not at all.
    """
    script = run.cwd / f"proof_{framework}.py"
    script.write_text(_SCRIPT.format(framework=framework), encoding="utf-8")
    said: list[str] = []

    def keep(line: str) -> None:
        said.extend(sayings(line))

    run([*launcher, sys.executable, str(script)], timeout_seconds=_TIMEOUT_SECONDS, on_line=keep)
    expected = [f"rank {rank} of 2 over {controller}: sum [3.0]" for rank in range(2)]
    if sorted(said) != expected:
        raise InstallError(f"two ranks with {framework} should have said {expected} and said {sorted(said)}")
