"""Trains on two hosts with two ranks each, hierarchically: python tf_hierarchical.py FOLDER."""

from __future__ import annotations

import json
import logging
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tf_training import on_ranks, variables

import hvd_onebit.tensorflow as onebit
from hvd_onebit.transport.local import LocalTransport
from hvd_onebit.transport.shared import SharedMemory

SHAPES = ((300, 1000), (1000,), (100, 1000), (7,))
FREEZE, STEPS = 2, 6


def gradients(step: int, rank: int) -> list[tf.Tensor]:
    """Exact when averaged over two or four ranks, in whatever order."""
    rng = np.random.default_rng(1000 * step + rank)
    return [tf.constant((np.round(8 * rng.standard_normal(shape)) / 8).astype(np.float32)) for shape in SHAPES]


def train(**options: Any) -> tuple[Any, list[Any]]:
    trained = variables(SHAPES)
    optimizer = onebit.DistributedOptimizer(
        keras.optimizers.Adam(0.01, beta_2=0.95),
        hierarchical=True,
        freeze_step=FREEZE,
        bucket_elements=150_000,
        check_every=1,
        **options,
    )
    transport = options.get("transport")
    rank = hvd.rank() if transport is None else transport.rank
    for step in range(STEPS):
        optimizer.apply(gradients(step, rank), trained)
    return optimizer, trained


def checksum(trained: list[Any]) -> int:
    crc = 0
    for v in trained:
        crc = zlib.crc32(v.numpy().tobytes(), crc)
    return crc


def run_on_threads(transport: LocalTransport) -> int:
    return checksum(train(transport=transport)[1])


def shares_memory(optimizer: Any) -> bool:
    return bool(optimizer._engine.value._groups.inside.shares_memory)


def undoes_a_step(optimizer: Any, trained: list[Any]) -> bool:
    """Whether a step with NaN on one rank leaves parameters and errors, to rounding, as they were."""
    parts = [part for bucket in optimizer._engine.value._buckets for part in bucket.errors().values()]
    errors = [part for part in parts if part is not None]
    before, parameters, skipped = [each.copy() for each in errors], checksum(trained), optimizer.stats.steps_skipped
    given = gradients(STEPS, hvd.rank())
    if hvd.rank() == 2:
        given[2] = tf.tensor_scatter_nd_update(given[2], [[99, 999]], [np.nan])
    optimizer.apply(given, trained)
    same = all(np.allclose(now, old, rtol=1e-5, atol=1e-5) for now, old in zip(errors, before, strict=True))
    was_owed = all(old.any() for old in before)
    return same and was_owed and checksum(trained) == parameters and optimizer.stats.steps_skipped == skipped + 1


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    hvd.init()
    optimizer, trained = train()
    with mock.patch.object(SharedMemory, "open_peers", return_value=hvd.rank() != 3):
        other, without_memory = train()
    undone = [undoes_a_step(*each) for each in ((optimizer, trained), (other, without_memory))]
    optimizer.synchronize_for_checkpoint()
    saved: dict[str, Any] = {}
    optimizer.save_own_variables(saved)
    whole = [array for key, array in saved.items() if key.endswith("worker_error")]
    everyones = hvd.allgather_object(checksum([tf.constant(each) for each in whole]))
    stats = optimizer.stats
    found = {
        "memory": [shares_memory(optimizer), shares_memory(other)],
        "parameters": checksum(trained),
        "without memory": checksum(without_memory),
        "undone": undone,
        # on one rank: the others are compared with it
        "threads": on_ranks(4, run_on_threads, ranks_per_host=2)[0] if hvd.rank() == 0 else None,
        "errors kept": len(set(everyones)) == 1 and sum(map(len, whole)) == stats.compressed_elements,
        "num_elements": stats.compressed_elements,
        "sent to other hosts": stats.bytes_per_step["compression"] - stats.inside_bytes_per_step["compression"],
    }
    (Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main()
