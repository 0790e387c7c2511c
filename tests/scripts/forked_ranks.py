"""The parent of ranks to which things happen: it reads a line of JSON on standard input for each scenario.

A line says {"name", "size", "timeout", "never_ends": [ranks], "environment": [of each rank]}. This process imports
everything once and forks the ranks of each scenario; it writes a line of JSON with what became of each: {"status",
"said", "seconds"}, where a status below 0 is a signal's and None is a rank that had to be ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["die", "scenario", "serve"]

SCENARIOS: dict[str, Callable[[], str]] = {}


def scenario(function: Callable[[], str]) -> Callable[[], str]:
    """Registers what each rank of a scenario does; it returns what it has to say."""
    SCENARIOS[function.__name__] = function
    return function


def die(*_: Any, **__: Any) -> Any:
    """Ends this rank as the system does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(name: str, environment: dict[str, str], start: float, file: Path, begin: Callable[[], Any]) -> None:
    """A rank, from its birth on."""
    os.environ.update(environment)
    begin()
    try:
        said, status = SCENARIOS[name](), 0
    except BaseException:
        said, status = traceback.format_exc(), 1
    file.write_text(json.dumps({"said": said, "seconds": time.monotonic() - start}), encoding="utf-8")
    os._exit(status)


def watch(pids: list[int], awaited: set[int], deadline: float) -> list[int | None]:
    statuses: dict[int, int] = {}
    while not awaited <= statuses.keys() and time.monotonic() < deadline:
        for pid in pids:
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in pids:
        if pid not in statuses:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [statuses.get(pid) for pid in pids]


def serve(folder: Path, begin: Callable[[], Any]) -> None:
    """Runs scenarios until standard input ends; every rank begins with `begin()`."""
    for line in sys.stdin:
        order = json.loads(line)
        name, start = order["name"], time.monotonic()
        files = [folder / f"{name}.{rank}.json" for rank in range(order["size"])]
        pids = []
        for file, environment in zip(files, order["environment"], strict=True):
            pid = os.fork()
            if not pid:
                run(name, environment, start, file, begin)
            pids.append(pid)
        awaited = {pid for rank, pid in enumerate(pids) if rank not in order["never_ends"]}
        statuses = watch(pids, awaited, start + order["timeout"])
        results = []
        for file, status in zip(files, statuses, strict=True):
            left = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"said": "", "seconds": None}
            results.append({"status": status, **left})
        print("RESULT " + json.dumps(results), flush=True)
