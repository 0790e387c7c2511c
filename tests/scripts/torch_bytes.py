"""Counts what the loopback interface carries in the compression stage: python torch_bytes.py FOLDER.

Rank 0 writes FOLDER/bytes.json. Between two barriers nothing runs but the steps that are counted; Horovod's own idle
chatter is measured beside them, for as long as they took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch_training import gradient, parameters

import hvd_onebit.torch as onebit

STEPS = 6
NUM_ELEMENTS = 2_000_000


def loopback_bytes() -> int:
    """Bytes sent over lo so far, by everybody."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError("no loopback interface")


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    params = parameters([(NUM_ELEMENTS // 2000, 1000), (NUM_ELEMENTS // 2000, 1000)])
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(params), named_parameters=[("a", params[0]), ("b", params[1])], freeze_step=1, check_every=0
    )
    grads = [gradient(0, hvd.rank(), i, p) for i, p in enumerate(params)]

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum().backward()
        optimizer.step()

    before_warm_up = loopback_bytes()
    step()
    hvd.barrier()
    warm_up = loopback_bytes() - before_warm_up
    for _ in range(2):
        step()
    hvd.barrier()
    start, before = time.monotonic(), loopback_bytes()
    for _ in range(STEPS):
        step()
    hvd.barrier()
    counted, seconds = loopback_bytes() - before, time.monotonic() - start
    before = loopback_bytes()
    time.sleep(seconds)
    hvd.barrier()
    idle = loopback_bytes() - before
    if hvd.rank() == 0:
        found = {
            "size": hvd.size(),
            "stage": optimizer.stats.stage,
            "num_elements": NUM_ELEMENTS,
            "warm_up": warm_up,
            "counted_per_step": counted / STEPS,
            "idle_per_step": idle / STEPS,
            "stats_per_step": optimizer.stats.bytes_per_step["compression"],
        }
        (Path(sys.argv[1]) / "bytes.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
