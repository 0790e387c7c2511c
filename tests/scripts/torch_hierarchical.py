"""Trains on two hosts with two ranks each, hierarchically and flat: python torch_hierarchical.py FOLDER."""

from __future__ import annotations

import json
import logging
import sys
import zlib
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_onebit.torch as onebit
from hvd_onebit.transport.local import LocalTransport, run_ranks

SHAPES = ((300, 1000), (1000,), (100, 1000), (7,))
FREEZE, STEPS = 2, 8


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """Exact when averaged over two or four ranks, in whatever order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(8 * torch.randn(shape, generator=generator)).round() / 8 for shape in SHAPES]


def train(optimizer: Any, ps: list[torch.nn.Parameter], steps: range, rank: int) -> float:
    loss = 0.0
    for step in steps:
        optimizer.zero_grad()
        total = sum((p * g).sum() for p, g in zip(ps, gradients(step, rank), strict=True))
        total.backward()
        optimizer.step()
        loss = float(total)
    return loss


def checksum(ps: list[torch.nn.Parameter]) -> int:
    crc = 0
    for p in ps:
        crc = zlib.crc32(p.detach().numpy().tobytes(), crc)
    return crc


def wrap(ps: list[torch.nn.Parameter], **options: Any) -> Any:
    names = [(f"p{i}", p) for i, p in enumerate(ps)]
    adam = torch.optim.Adam(ps, lr=0.01, betas=(0.9, 0.95))
    return onebit.DistributedOptimizer(
        adam, named_parameters=names, freeze_step=FREEZE, bucket_elements=150_000, check_every=1, **options
    )


def run_on_hosts(hierarchical: bool | str) -> tuple[Any, list[torch.nn.Parameter], float]:
    ps = parameters()
    optimizer = wrap(ps, hierarchical=hierarchical)
    loss = train(optimizer, ps, range(STEPS), hvd.rank())
    return optimizer, ps, loss


def run_on_threads(transport: LocalTransport) -> int:
    ps = parameters()
    train(wrap(ps, transport=transport, hierarchical=True), ps, range(STEPS), transport.rank)
    return checksum(ps)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    hvd.init()
    optimizer, ps, loss = run_on_hosts(True)
    _, flat, _ = run_on_hosts(False)
    engine, stats = optimizer._onebit, optimizer.stats
    place = engine._place
    found = {
        "rank": hvd.rank(),
        "place": [place.host, place.num_hosts, place.local_rank, place.local_size],
        "memory": engine._groups.inside._memory is not None,
        "checksum": checksum(ps),
        # on one rank: the others are compared with it
        "threads": run_ranks(4, run_on_threads, ranks_per_host=2) if hvd.rank() == 0 else None,
        "flat": checksum(flat),
        "loss": loss,
        "num_elements": stats.compressed_elements,
        "sent to other hosts": stats.bytes_per_step["compression"] - stats.inside_bytes_per_step["compression"],
    }
    (Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main()
