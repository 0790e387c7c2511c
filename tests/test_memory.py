"""What the C library keeps between steps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource
import numpy as np
from hvd_onebit.memory import keep_freed_blocks

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    messages = [np.ones(1 << 20, np.uint8) for _ in range(40)]
    del messages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

faults()
before = faults()
keep_freed_blocks()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's way of keeping memory")
def test_messages_of_one_step_serve_the_next_without_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    counted = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, counted.stdout.split())
    assert before > 2000, "40 MB in pages of 4 KiB are 10240, of which a process may keep some anyway"
    assert after < before / 20
