"""How often Python's threads take turns: for tests that want it rarely, or all the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["switch_interval"]


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """A thread that does not wait for anything gives the interpreter up after so long, if others want it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
