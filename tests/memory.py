"""What this process holds: for tests that make much and drop it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvd_onebit.transport.local import LocalTransport

__all__ = ["count_while_all_hold", "resident_kilobytes"]


def count_while_all_hold(transport: LocalTransport, count: Callable[[], int]) -> list[int]:
    """Collective: what rank 0, which counts for all threads, found; nothing on other ranks."""
    transport.allgather_bytes(b"", name="all here").wait()
    counted = [count()] if transport.rank == 0 else []
    transport.allgather_bytes(b"", name="counted").wait()
    return counted


def resident_kilobytes() -> int:
    """Memory that the process really has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4
