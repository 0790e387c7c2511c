"""What the compression stage keeps in memory in TensorFlow, and that nobody sees how it is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from memory import count_while_all_hold
from tf_training import (
    SHAPES,
    assert_bit_equal,
    assert_replicas_equal,
    distribute,
    gradient,
    on_ranks,
    snapshot,
    train,
    variables,
)

import hvd_onebit.tensorflow as onebit
from hvd_onebit.tensorflow import engine
from hvd_onebit.tensorflow.buckets import Memory
from hvd_onebit.transport.local import LocalTransport

FREEZE = 2
FAMILY: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "adam": (lambda: keras.optimizers.Adam(0.01, beta_2=0.9), {}),
    "update space": (lambda: keras.optimizers.Adam(0.01, beta_2=0.9), {"space": "update"}),
    "hold": (lambda: keras.optimizers.Adam(0.01, beta_2=0.9), {"dead": "hold"}),
    "lamb": (lambda: onebit.OneBitLamb(0.01, beta_2=0.9, weight_decay=0.1), {"exchange": "two_phase"}),
    "sgd": (lambda: keras.optimizers.SGD(0.01, momentum=0.9), {}),
}
TENSORS, ELEMENTS = 64, 1 << 15


def make(name: str, transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    make_plain, more = FAMILY[name]
    trained = variables()
    optimizer = distribute(
        make_plain(), transport, freeze_step=FREEZE, block=16, bucket_elements=150, **more, **options
    )
    optimizer.build(trained)
    return optimizer, trained


def raw_momenta(optimizer: Any) -> list[tf.Variable]:
    """The variables as they are, looked at by nobody."""
    return list(optimizer._engine.value._momenta)


def held_bytes() -> int:
    """Bytes of all variables, and of all NumPy arrays that some object holds; what both share is counted once."""
    gc.collect()
    places: dict[int, int] = {}
    for each in gc.get_objects():
        arrays = [held for held in gc.get_referents(each) if type(held) is np.ndarray]
        if issubclass(type(each), tf.Variable):  # not isinstance: some objects warn when they are asked
            arrays.append(np.asarray(memoryview(each.read_value())))
        for array in arrays:
            while type(array.base) is np.ndarray:
                array = array.base
            places[array.ctypes.data] = max(places.get(array.ctypes.data, 0), array.nbytes)
    total = end = 0
    for start, length in sorted(places.items()):
        total += max(start + length - max(start, end), 0)
        end = max(end, start + length)
    return total


@pytest.mark.parametrize(
    ("exchange", "kept_bytes"), [("one_shot", 2 / 8), ("two_phase", 1 / 8 + 4 / 2)], ids=["one_shot", "two_phase"]
)
def test_adam_keeps_little_more_than_plain_adam(exchange: str, kept_bytes: float) -> None:
    """8.5 bytes of state a parameter, working memory and messages included, beside two_phase's server errors."""
    size = 2
    counted: list[int] = []

    def work(transport: LocalTransport) -> None:
        trained = [keras.Variable(tf.ones([ELEMENTS])) for _ in range(TENSORS)]
        optimizer = distribute(
            keras.optimizers.Adam(), transport, freeze_step=1, exchange=exchange, bucket_elements=ELEMENTS
        )
        for step in range(4):
            optimizer.apply([tf.fill([ELEMENTS], 0.1 * (step + 1))] * TENSORS, trained)
        counted.extend(count_while_all_hold(transport, held_bytes))
        assert optimizer.stats.stage == "compression"

    before = held_bytes()
    on_ranks(size, work)
    per_parameter = (counted[0] - before) / (size * TENSORS * ELEMENTS) - 4  # the parameters themselves
    # variance and worker error, messages, and a few buckets to work in
    assert 8 + kept_bytes <= per_parameter <= 8.5 + (2 if exchange == "two_phase" else 0)


def test_working_memory_is_reserved_used_again_and_given_back() -> None:
    memory = Memory()
    memory.reserve(100)
    memory.reserve(100)
    reserved = list(memory._blocks)  # referred to here, and so not free
    assert len(reserved) == 2
    other = memory.take(100)
    assert not any(np.shares_memory(other, block) for block in reserved)
    del reserved
    taken = [memory.take(100) for _ in range(2)]
    assert len(memory._blocks) == 3
    assert not any(np.shares_memory(a, b) for a, b in ((taken[0], taken[1]), (taken[0], other), (taken[1], other)))
    taken += [memory.take(100) for _ in range(5)]
    view = taken[0][:3]
    taken.clear()
    seven = memory.take(7)
    assert not np.shares_memory(memory.take(100), view)
    assert len(memory._blocks) == 5, "two in use, a view of a third, and two to spare"
    assert len(seven) == 7


def _save(optimizer: Any, folder: Path) -> None:
    tf.train.Checkpoint(optimizer=optimizer).write(str(folder / f"{id(optimizer)}"))


def _read_errors_alone(optimizer: Any, folder: Path) -> None:
    checkpoint = tf.train.Checkpoint(errors=optimizer.compression_errors)
    checkpoint.read(checkpoint.write(str(folder / f"{id(optimizer)}.errors")))


LOOKS: list[Callable[[Any, Path], Any]] = [
    lambda optimizer, _: [v.numpy() for v in optimizer.variables],
    lambda optimizer, _: optimizer.save_own_variables({}),
    _save,
    _read_errors_alone,
]


@pytest.mark.parametrize(("name", "on_cpu"), [*((name, True) for name in FAMILY), ("lamb", False)])
def test_looking_at_the_state_changes_nothing(
    name: str, on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "is_on_host", lambda variables: on_cpu)

    def work(transport: LocalTransport, looks: bool) -> list[Any]:
        optimizer, trained = make(name, transport)
        for step, look in enumerate([None] * FREEZE + [*LOOKS, None]):
            train(optimizer, trained, [step], transport.rank)
            if looks and look is not None:
                look(optimizer, tmp_path)
                assert all(int(tf.size(v.read_value())) for v in raw_momenta(optimizer))
        assert not any(int(tf.size(v.read_value())) for v in raw_momenta(optimizer))
        return [*snapshot(trained), *(optimizer.momentum_of(i).numpy() for i in range(len(SHAPES)))]

    unseen, seen = (on_ranks(2, lambda t, looks=looks: work(t, looks)) for looks in (False, True))
    assert_replicas_equal(unseen)
    for mine, theirs in zip(seen, unseen, strict=True):
        assert_bit_equal(mine, theirs)


def test_whoever_holds_a_variable_sees_the_momentum_and_may_set_it() -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("adam", transport)
        before = list(optimizer._momentums)  # as of before the freeze
        train(optimizer, trained, range(4), transport.rank)
        other, same = make("adam", transport)
        train(other, same, range(4), transport.rank)
        raw = raw_momenta(optimizer)
        assert [int(tf.size(v.read_value())) for v in raw] == [0] * len(SHAPES)
        seen = [
            before[0].numpy(),
            (before[1] * 1.0).numpy(),
            tf.convert_to_tensor(before[2]).numpy(),
            keras.ops.copy(before[3]).numpy(),
        ]
        assert [each.shape for each in seen] == list(SHAPES[:4])
        assert_bit_equal(seen, [other.momentum_of(i).numpy() for i in range(4)])
        train(optimizer, trained, [4], transport.rank)
        train(other, same, [4], transport.rank)
        assert not int(tf.size(raw[0].read_value()))
        for v in before:
            v.assign(tf.zeros(v.shape))  # is taken at its word
        for i in range(len(SHAPES)):
            other.momentum_of(i).assign(tf.zeros(SHAPES[i]))
        with_zeros = [gradient(5, transport.rank, i, shape) for i, shape in enumerate(SHAPES)]
        for trains, on in ((optimizer, trained), (other, same)):
            trains.apply([tf.constant(g) for g in with_zeros], on)
        assert_bit_equal(snapshot(trained), snapshot(same))
        third, third_trained = make("adam", transport)
        train(third, third_trained, range(6), transport.rank)
        assert (third_trained[0].numpy() != trained[0].numpy()).any()
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


def test_with_loss_scaling_the_momentum_is_brought_back_when_asked_for() -> None:
    def work(transport: LocalTransport) -> None:
        plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1.0)
        optimizer, trained = distribute(plain, transport, freeze_step=FREEZE), variables()
        optimizer.build(trained)
        train(optimizer, trained, range(FREEZE + 1), transport.rank)
        momenta = raw_momenta(optimizer.inner_optimizer)
        assert not any(int(tf.size(v.read_value())) for v in momenta)
        optimizer.bring_back_momentum()
        assert [tuple(v.read_value().shape) for v in momenta] == list(SHAPES)

    on_ranks(2, work)


def test_a_tf_checkpoint_of_the_warm_up_brings_its_own_momentum(tmp_path: Path) -> None:
    """Into a process that is past it: what it holds is not mixed with the bits that are there."""
    stop = FREEZE - 1

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("update space", transport)
        train(optimizer, trained, range(stop), transport.rank)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, **{v.name: v for v in trained})
        path = checkpoint.write(str(tmp_path / f"{transport.rank}"))
        train(optimizer, trained, range(stop, stop + 4), transport.rank)
        expected = snapshot(trained)
        checkpoint.read(path)
        train(optimizer, trained, range(stop, stop + 4), transport.rank)
        assert_bit_equal(snapshot(trained), expected)
        return expected

    assert_replicas_equal(on_ranks(2, work))
