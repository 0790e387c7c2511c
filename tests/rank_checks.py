"""What scripts of checks under a real launcher share: python SCRIPT FOLDER CHECK...

Every rank runs the checks in the order given, and writes FOLDER/rank.json with what came of each. A check that fails
ends this rank, as its peers might wait for it otherwise.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "check", "heard", "run_checks"]

FOLDER = Path(sys.argv[1])

_checks: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Decorates a check; `launch.checks_in` finds it by that."""
    _checks[function.__name__] = function
    return function


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What this rank says in the log meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvd_onebit")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def run_checks(rank: int) -> int:
    """Runs the checks that the command line names; this process's exit status."""
    results: dict[str, str] = {}
    for name in sys.argv[2:]:
        start = time.monotonic()
        try:
            _checks[name]()
            results[name] = "passed"
        except BaseException:
            results[name] = traceback.format_exc()
        (FOLDER / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
        print(f"{name}: {results[name]}, {time.monotonic() - start:.2f} s", flush=True)
        if results[name] != "passed":
            return 1
    return 0
