"""What the TensorFlow tests share: a few variables with gradients given by hand, trained on ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from interpreter import switch_interval

import hvd_onebit.tensorflow as onebit
from hvd_onebit.transport.local import LocalTransport, run_ranks

__all__ = [
    "SHAPES",
    "assert_bit_equal",
    "assert_replicas_equal",
    "buckets_of",
    "distribute",
    "gradient",
    "mean_gradients",
    "on_ranks",
    "restore",
    "save",
    "snapshot",
    "train",
    "variables",
]

Result = TypeVar("Result")
Array = np.ndarray[Any, Any]

SHAPES = ((8, 5), (5,), (40, 5), (1,), (3, 3, 3))


def on_ranks(
    size: int,
    work: Callable[[LocalTransport], Result],
    *,
    ranks_per_host: int | None = None,
    timeout_seconds: float = 60.0,
) -> list[Result]:
    """`work` on `size` ranks of one process; whatever hangs ends with an error.

    A rank gives the interpreter up where it waits, not in the middle of TensorFlow's own code: its dispatcher keeps
    borrowed references to one call's arguments at a place that all threads share, and asks types about themselves
    in between (PythonAPIDispatcher::Dispatch of 2.21). With the usual 5 ms, two first steps at the same time crashed
    once in a run of all tests; four threads that call tf.reshape under PYTHONMALLOC=debug do without any of this.
    """
    with switch_interval(2 * timeout_seconds):
        return run_ranks(size, work, ranks_per_host=ranks_per_host, timeout_seconds=timeout_seconds)


def variables(
    shapes: Sequence[tuple[int, ...]] = SHAPES, *, seed: int = 0, dtype: str = "float32"
) -> list[keras.Variable]:
    """The same variables on every rank."""
    rng = np.random.default_rng(seed)
    return [
        keras.Variable(rng.standard_normal(shape).astype(np.float32), dtype=dtype, name=f"p{i}")
        for i, shape in enumerate(shapes)
    ]


def gradient(step: int, rank: int, index: int, shape: tuple[int, ...], *, noise: float = 0.5) -> Array:
    """A gradient of variable `index` with a part that all ranks share and a part of the rank's own."""

    def normal(*key: int) -> Array:
        return np.random.default_rng([each + 1 for each in key]).standard_normal(shape).astype(np.float32)

    shared = normal(1, index) + np.float32(0.5) * normal(2, index, step)
    return np.asarray(shared + np.float32(noise) * normal(3, index, step, rank), np.float32)


def gradients(step: int, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    return [gradient(step, rank, index, tuple(shape)) for index, shape in enumerate(shapes)]


def mean_gradients(step: int, size: int, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The means over ranks, rounded as the local transport rounds them: a sum in rank order, then a division."""
    every = [gradients(step, rank, shapes) for rank in range(size)]
    totals = every[0]
    for other in every[1:]:
        totals = [a + b for a, b in zip(totals, other, strict=True)]
    return [total / np.float32(size) for total in totals]


def distribute(optimizer: Any, transport: LocalTransport, **options: Any) -> Any:
    return onebit.DistributedOptimizer(
        optimizer, transport=transport, **{"check_every": 1, "measure": False, **options}
    )


def train(optimizer: Any, trained: Sequence[Any], steps: Sequence[int], rank: int) -> None:
    for step in steps:
        optimizer.apply([tf.constant(g) for g in gradients(step, rank, [v.shape for v in trained])], trained)


def buckets_of(optimizer: Any) -> list[Any]:
    """Where the compression errors are."""
    return list(optimizer._engine.value._buckets)


def snapshot(trained: Sequence[Any]) -> list[Array]:
    """Copies: TensorFlow may use a variable's memory again."""
    return [v.numpy().copy() for v in trained]


def save(optimizer: Any, trained: Sequence[Any]) -> tuple[dict[str, Any], list[Array]]:
    """What a checkpoint holds, and the values of what is trained."""
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return {name: np.array(array) for name, array in store.items()}, snapshot(trained)


def restore(optimizer: Any, trained: Sequence[Any], saved: tuple[dict[str, Any], list[Array]]) -> None:
    """Puts back what `save` gave."""
    for variable, value in zip(trained, saved[1], strict=True):
        variable.assign(value)
    optimizer.load_own_variables(saved[0])


def assert_bit_equal(mine: Sequence[Array], theirs: Sequence[Array], what: str = "") -> None:
    assert len(mine) == len(theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            differ = np.flatnonzero(np.asarray(a != b)) if a.shape == b.shape else a.shape
            raise AssertionError(f"{what}: array {i} differs, at {differ[:5]}")


def assert_replicas_equal(every_rank: Sequence[Sequence[Array]]) -> None:
    for rank, replica in enumerate(every_rank):
        assert_bit_equal(replica, every_rank[0], f"rank {rank}")
