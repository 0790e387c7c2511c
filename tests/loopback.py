"""Counts what the loopback interface carries while steps run: shared by the frameworks' scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["measure"]

STEPS = 6


def loopback_bytes() -> int:
    """Bytes sent over lo so far, by everybody."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError("no loopback interface")


def measure(
    step: Callable[[], Any], barrier: Callable[[], Any], hvd: Any, stats: Any, num_elements: int, folder: Path
) -> None:
    """Runs a warm-up step and compressed ones; rank 0 writes FOLDER/bytes.json.

    Between two barriers nothing runs but the steps that are counted; Horovod's own idle chatter is measured beside
    them, for as long as they took.
    """
    before_warm_up = loopback_bytes()
    step()
    barrier()
    warm_up = loopback_bytes() - before_warm_up
    for _ in range(2):
        step()
    barrier()
    start, before = time.monotonic(), loopback_bytes()
    for _ in range(STEPS):
        step()
    barrier()
    counted, seconds = loopback_bytes() - before, time.monotonic() - start
    before = loopback_bytes()
    time.sleep(seconds)
    barrier()
    idle = loopback_bytes() - before
    if hvd.rank() == 0:
        found = {
            "size": hvd.size(),
            "stage": stats.stage,
            "num_elements": num_elements,
            "warm_up": warm_up,
            "counted_per_step": counted / STEPS,
            "idle_per_step": idle / STEPS,
            "stats_per_step": stats.bytes_per_step["compression"],
        }
        (folder / "bytes.json").write_text(json.dumps(found), encoding="utf-8")
