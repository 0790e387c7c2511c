"""What this process holds: for tests that make much and drop it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["resident_kilobytes"]


def resident_kilobytes() -> int:
    """Memory that the process really has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4
