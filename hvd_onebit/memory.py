"""Has the C library keep a step's messages for the next one, instead of taking new memory for them in every step."""

from __future__ import annotations

from functools import cache

import numpy as np

__all__ = ["keep_freed_blocks"]

_MOST_BYTES = 31 << 20  # glibc adapts to blocks of up to 32 MiB


@cache
def keep_freed_blocks() -> None:
    """Frees one large block, once a process; its memory is never touched.

    glibc gives blocks of more than 128 KiB back to the system when they are freed, until it has seen a larger one
    freed; from then on it keeps blocks up to that size, and up to twice that size of free memory at the end of a heap
    (mallopt(3), M_MMAP_THRESHOLD). What is given back costs a page fault for every 4 KiB when it is needed again: a
    step's messages are a megabyte for 4 million parameters. Whoever has set MALLOC_MMAP_THRESHOLD_ or
    MALLOC_TRIM_THRESHOLD_ keeps that setting, and other C libraries are not affected.
    """
    np.empty(_MOST_BYTES, np.uint8)
