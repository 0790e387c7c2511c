"""How many threads a rank's kernels may use: what its framework was given, and no more than its share of the host."""

from __future__ import annotations

import os

__all__ = ["num_threads"]

_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")  # set by horovodrun, and by mpirun


def num_threads(framework: int | None = None) -> int:
    """Threads for the kernels of this process, at least 1. Results don't depend on it.

    `OMP_NUM_THREADS`, where it's set, is the rank's own budget. Otherwise the ranks that a launcher put on this host
    share the cores that the process may run on.

    Args:
        framework: the framework's own setting, which is never exceeded; None if there is none.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = _positive(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
    share = min(asked, cores) if asked else cores // _ranks_here()
    return max(1, share if framework is None else min(share, framework))


def _ranks_here() -> int:
    return max(_positive(os.environ.get(name, "")) for name in _LOCAL_SIZES) or 1


def _positive(text: str) -> int:
    """The number that `text` says, 0 if it's none."""
    return int(text) if text.strip().isdecimal() else 0
