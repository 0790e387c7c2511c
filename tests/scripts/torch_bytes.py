"""Counts what the loopback interface carries in torch's compression stage: python torch_bytes.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from loopback import measure
from torch_training import gradient, parameters

import hvd_onebit.torch as onebit

NUM_ELEMENTS = 2_000_000


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    params = parameters([(NUM_ELEMENTS // 2000, 1000), (NUM_ELEMENTS // 2000, 1000)])
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(params),
        named_parameters=[("a", params[0]), ("b", params[1])],
        freeze_step=1,
        check_every=0,
        measure=False,
    )
    grads = [gradient(0, hvd.rank(), i, p) for i, p in enumerate(params)]

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum().backward()
        optimizer.step()

    measure(step, hvd.barrier, hvd, optimizer.stats, NUM_ELEMENTS, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
