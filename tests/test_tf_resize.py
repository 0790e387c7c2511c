"""TensorFlow checkpoints that one rank alone saves, restored on another number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from tf_training import (
    assert_bit_equal,
    assert_replicas_equal,
    buckets_of,
    distribute,
    gradient,
    on_ranks,
    snapshot,
    train,
    variables,
)

import hvd_onebit.tensorflow as onebit
from hvd_onebit.state import owed_by_parameter
from hvd_onebit.stats import COMPRESSION, WARM_UP
from hvd_onebit.tensorflow import engine
from hvd_onebit.transport.local import LocalTransport

SHAPES = ((12, 5), (5,), (40,))
FREEZE, STEPS = 4, 13
BETA1 = 0.9
ROUNDS: dict[str, Any] = {"var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}

Saved = tuple[dict[str, Any], list[Any]]

FAMILY: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(0.01, beta_2=0.9),
    "AdamW in update space": lambda: keras.optimizers.AdamW(0.01, beta_2=0.9),
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "OneBitLamb": lambda: onebit.OneBitLamb(0.01, beta_2=0.95, weight_decay=0.1),
    "ZeroOneAdam": lambda **more: onebit.ZeroOneAdam(0.01, beta_2=0.95, var_freeze_step=6, **ROUNDS, **more),
}
EVERY_EXCHANGE = [*((name, "two_phase") for name in FAMILY), ("Adam", "one_shot"), ("ZeroOneAdam", "one_shot")]


def make(name: str, transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    trained = variables(SHAPES)
    given = {"block": 16, "bucket_elements": 70, **options}
    if name != "ZeroOneAdam":
        given["freeze_step"] = FREEZE
    if "update space" in name:
        given["space"] = "update"
    optimizer = distribute(FAMILY[name](), transport, **given)
    optimizer.build(trained)
    return optimizer, trained


def save(optimizer: Any, trained: Sequence[Any]) -> Saved:
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return {key: np.array(array) for key, array in store.items()}, snapshot(trained)


def restore(optimizer: Any, trained: Sequence[Any], saved: Saved) -> None:
    for variable, value in zip(trained, saved[1], strict=True):
        variable.assign(value)
    optimizer.load_own_variables(saved[0])


def owed_part(saved: Saved) -> dict[str, Any]:
    """What this rank owes, by variable: the mean over ranks is what training owes."""
    arrays = {key.removeprefix("onebit."): array for key, array in saved[0].items() if key.startswith("onebit.")}
    about, errors = engine.unpack_errors(arrays)
    return owed_by_parameter(errors, about["size"])


def owed(everyone: Sequence[Saved]) -> Any:
    parts = [owed_part(saved) for saved in everyone]
    return np.concatenate([np.mean([part[key] for part in parts], axis=0) for key in sorted(parts[0])])


@pytest.mark.parametrize(("name", "exchange"), EVERY_EXCHANGE)
def test_rank_0_alone_restores_any_number_of_ranks(name: str, exchange: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_onebit")

    def first(transport: LocalTransport) -> tuple[Saved, Saved, list[Any]]:
        optimizer, trained = make(name, transport, exchange=exchange)
        train(optimizer, trained, range(STEPS), transport.rank)
        before = save(optimizer, trained)
        optimizer.synchronize_for_checkpoint()
        saved = save(optimizer, trained)
        optimizer.synchronize_for_checkpoint()
        np.testing.assert_allclose(owed([save(optimizer, trained)]), owed([saved]), rtol=1e-5, atol=1e-7)
        rounds = optimizer.stats.rounds
        train(optimizer, trained, range(STEPS, STEPS + 5), transport.rank)
        while name == "ZeroOneAdam" and optimizer.stats.rounds < rounds + 2:
            train(optimizer, trained, [optimizer.stats.step], transport.rank)
        return before, saved, snapshot(trained)

    runs = on_ranks(3, first)
    before = owed([run[0] for run in runs])
    assert np.abs(before).max() > 1e-4
    np.testing.assert_allclose(owed([run[1] for run in runs]), before, rtol=0, atol=2e-6)
    # every rank could have saved it
    for key, array in runs[0][1][0].items():
        if "server_error" in key:
            assert not array.any()
        elif key != "onebit.about":
            for _, other, _ in runs:
                assert_bit_equal([other[0][key]], [array], key)
    assert_replicas_equal([run[1][1] for run in runs])
    assert_replicas_equal([run[2] for run in runs])
    assert "taken up" not in caplog.text

    for size in (2, 4):
        caplog.clear()

        def second(transport: LocalTransport) -> tuple[Saved, list[Any]]:
            optimizer, trained = make(name, transport, exchange=exchange)
            restore(optimizer, trained, runs[0][1])
            restored = save(optimizer, trained)
            assert (optimizer.stats.stage, optimizer.stats.step) == (COMPRESSION, STEPS)
            rounds = optimizer.stats.rounds
            train(optimizer, trained, range(STEPS, STEPS + 3), transport.rank)
            while name == "ZeroOneAdam" and optimizer.stats.rounds < rounds + 2:
                train(optimizer, trained, [optimizer.stats.step], transport.rank)
            return restored, snapshot(trained)

        resumed = on_ranks(size, second)
        np.testing.assert_allclose(owed([run[0] for run in resumed]), before, rtol=0, atol=2e-6)
        assert_replicas_equal([run[1] for run in resumed])
        assert caplog.text.count(f"compression errors of 3 ranks were taken up by {size}") == 1
        assert "dropped" not in caplog.text


def test_the_ranks_go_on_from_the_mean_of_their_local_steps() -> None:
    """0/1 Adam between two synchronisations: where the next one would have met, but for rounding to bits."""

    def work(transport: LocalTransport) -> tuple[list[Any], ...]:
        trained = variables(SHAPES)
        optimizer = distribute(FAMILY["ZeroOneAdam"](), transport, block=16)
        train(optimizer, trained, range(18), transport.rank)
        rounds = optimizer.stats.rounds
        while optimizer.stats.rounds == rounds:
            train(optimizer, trained, [optimizer.stats.step], transport.rank)
        train(optimizer, trained, range(2), transport.rank)
        assert optimizer.stats.rounds == rounds + 1, "two local steps"
        apart = snapshot(trained)
        optimizer.synchronize_for_checkpoint()
        return apart, snapshot(trained)

    runs = on_ranks(2, work)
    assert any((a != b).any() for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert_replicas_equal([run[1] for run in runs])
    for a, b, met in zip(runs[0][0], runs[1][0], runs[0][1], strict=True):
        # all moved along the same direction from the same point
        np.testing.assert_allclose(met, (a + b) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "ZeroOneAdam"])
def test_one_rank_alone_settles_what_was_owed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its next momentum is the one that an exchange without rounding would have given."""

    def first(transport: LocalTransport) -> tuple[Saved, Any, list[Any]]:
        optimizer, trained = make(name, transport)
        train(optimizer, trained, range(STEPS), transport.rank)
        optimizer.synchronize_for_checkpoint()
        momenta = [optimizer.momentum_of(i).numpy().copy() for i in range(len(SHAPES))]
        variances = [optimizer.variance_of(i) for i in range(len(SHAPES))]
        return (
            save(optimizer, trained),
            getattr(optimizer, "lamb_table", tf.zeros([4])).numpy(),
            [momenta, [None if v is None else v.numpy().copy() for v in variances]],
        )

    saved, table, (momenta, variances) = on_ranks(3, first)[0]
    parts = owed_part(saved)

    def alone(transport: LocalTransport) -> None:
        optimizer, trained = make(name, transport)
        restore(optimizer, trained, saved)
        assert optimizer.stats.stage == WARM_UP
        for i, shape in enumerate(SHAPES):
            part = next(each for key, each in parts.items() if key.startswith(f"{i}.")).reshape(shape)
            if name == "OneBitLamb":
                part = part / table[3, i]
            if "update space" in name:
                correction = np.sqrt(1 - 0.9**FREEZE)
                part = part * (np.sqrt(variances[i]) + 1e-7) / correction
            expected = momenta[i] + part / BETA1
            assert np.abs(part).max() > 1e-6
            np.testing.assert_allclose(optimizer.momentum_of(i).numpy(), expected, rtol=1e-4, atol=1e-6)
        train(optimizer, trained, [STEPS], 0)

    on_ranks(1, alone)
    assert "dropped" not in caplog.text


def test_a_step_after_it_makes_a_checkpoint_one_rank_s_again(caplog: pytest.LogCaptureFixture) -> None:
    def first(transport: LocalTransport) -> Saved:
        optimizer, trained = make("Adam", transport)
        train(optimizer, trained, range(STEPS), transport.rank)
        optimizer.synchronize_for_checkpoint()
        train(optimizer, trained, [STEPS], transport.rank)
        return save(optimizer, trained)

    saved = on_ranks(2, first)[0]

    def second(transport: LocalTransport) -> None:
        optimizer, trained = make("Adam", transport)
        restore(optimizer, trained, saved)
        assert not any(error.any() for bucket in buckets_of(optimizer) for error in bucket.errors().values())

    on_ranks(3, second)
    assert "compression errors of the checkpoint were dropped" in caplog.text


def test_buckets_on_a_device_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations that a GPU runs, on the host; ranks with an empty part included."""
    monkeypatch.setattr(engine, "is_on_host", lambda variables: False)

    def work(transport: LocalTransport) -> tuple[Saved, Saved]:
        trained = variables([(40,)])
        optimizer = distribute(keras.optimizers.Adam(0.01), transport, freeze_step=1, exchange="two_phase")
        for step in range(4):
            optimizer.apply([tf.constant(gradient(step, transport.rank, 0, (40,)))], trained)
        before = save(optimizer, trained)
        optimizer.synchronize_for_checkpoint()
        after = save(optimizer, trained)
        restore(optimizer, trained, after)
        train(optimizer, trained, [4], transport.rank)
        return before, after

    runs = on_ranks(3, work)
    before = owed([run[0] for run in runs])
    assert np.abs(before).max() > 1e-4
    for _, after in runs:
        np.testing.assert_allclose(owed([after]), before, rtol=0, atol=1e-6)


def test_a_loss_scaling_optimizer_keeps_its_errors() -> None:
    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)

        def scaling() -> Any:
            inner = keras.optimizers.Adam(0.01, beta_2=0.9)
            made = distribute(keras.optimizers.LossScaleOptimizer(inner), transport, freeze_step=FREEZE)
            made.build(trained)
            return made

        optimizer = scaling()
        for step in range(STEPS):
            scaled = [
                optimizer.scale_loss(tf.constant(gradient(step, transport.rank, i, s))) for i, s in enumerate(SHAPES)
            ]
            optimizer.apply(scaled, trained)
        optimizer.synchronize_for_checkpoint()
        saved = save(optimizer, trained)
        assert np.abs(owed([saved])).max() > 1e-4
        again = scaling()
        restore(again, trained, saved)
        assert again.stats.stage == COMPRESSION
        assert_bit_equal([owed([save(again, trained)])], [owed([saved])])

    on_ranks(2, work)


def test_inside_a_graph_it_is_refused() -> None:
    def work(transport: LocalTransport) -> None:
        optimizer, _ = make("Adam", transport)
        with pytest.raises(onebit.OneBitError, match="call it in eager code"):
            tf.function(optimizer.synchronize_for_checkpoint, autograph=False)()

    on_ranks(1, work)
