"""Trains on two hosts with two ranks each, hierarchically and flat: python torch_hierarchical.py FOLDER."""

from __future__ import annotations

import json
import logging
import math
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


def backward(ps: list[torch.nn.Parameter], given: list[torch.Tensor]) -> None:
    sum((p * g).sum() for p, g in zip(ps, given, strict=True)).backward()  # type: ignore[union-attr]


def undoes_a_step(optimizer: Any, ps: list[torch.nn.Parameter], *, is_finite: bool) -> bool:
    """Whether parameters and errors, to rounding, are as they were after a step with NaN on one rank.

    Or, if finite, after one that was synchronised, whose gradients were then overwritten, and which was not used.
    """
    exchanges = [bucket.exchange for bucket in optimizer._onebit._all_buckets()]
    errors = [error for each in exchanges for error in (each.worker_error, each.server_error) if error is not None]
    before, was, skipped = [each.clone() for each in errors], checksum(ps), optimizer.stats.steps_skipped
    given = gradients(STEPS, hvd.rank())
    if is_finite:
        optimizer.zero_grad()
        backward(ps, given)
        optimizer.synchronize()
        for p in ps:
            p.grad = None
        given = [torch.zeros_like(each) for each in given]
    if hvd.rank() == 2:
        given[2][99, 999] = math.nan
    optimizer.zero_grad()
    backward(ps, given)
    optimizer.step()
    same = all(torch.allclose(now, old, rtol=1e-5, atol=1e-5) for now, old in zip(errors, before, strict=True))
    skips = optimizer.stats.steps_skipped - skipped
    return same and all(bool(old.any()) for old in before) and checksum(ps) == was and skips == 1 + is_finite


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
    undone = [undoes_a_step(optimizer, ps, is_finite=is_finite) for is_finite in (False, True)]
    found = {
        "undone": undone,
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
