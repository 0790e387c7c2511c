"""What every test shares: one thread a rank, and the order of the files."""

from __future__ import annotations

import atexit
import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read when a framework is imported

# they wait for launched ranks: first, so that no worker of `pytest -n` is left alone with one of them
_LONGEST = (
    "test_tf_horovod",
    "test_torch_horovod",
    "test_elastic",
    "test_tf_elastic",
    "test_faults",
    "test_examples",
    "test_wire_bytes",
    "test_experiments",
)


def pytest_sessionfinish() -> None:
    """Tests end in warm-up as they like."""
    from hvd_onebit import notices

    atexit.unregister(notices.never_compressed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a file's tests together; the longest files come first."""
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(_LONGEST)))
