"""What a TensorFlow checkpoint holds: resume, resize, refuse; Keras's files and configurations."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from tf_training import (
    SHAPES,
    assert_bit_equal,
    assert_replicas_equal,
    buckets_of,
    distribute,
    on_ranks,
    restore,
    save,
    snapshot,
    train,
    variables,
)

from hvd_onebit.stats import COMPRESSION, WARM_UP
from hvd_onebit.transport.local import LocalTransport

Adam = keras.optimizers.Adam
Store = dict[str, Any]


def _make(transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    trained = variables()
    given = {"freeze_step": 4, "block": 16, "bucket_elements": 150, "exchange": "two_phase", **options}
    optimizer = distribute(Adam(0.01, beta_2=0.9), transport, **given)
    optimizer.build(trained)
    return optimizer, trained


@pytest.mark.parametrize("freeze_step", [4, "auto"])
def test_resume_is_bit_for_bit(freeze_step: Any) -> None:
    """Stopped before, at and after the freeze."""
    stops, last = (3, 4, 5, 9), 12
    options = {"freeze_step": freeze_step, **({"freeze_latest_step": 4} if freeze_step == "auto" else {})}

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport, **options)
        saved = {}
        for step in range(last):
            if step in stops:
                saved[step] = save(optimizer, trained)
            train(optimizer, trained, [step], transport.rank)
        expected = snapshot(trained)
        for stop in stops:
            optimizer, trained = _make(transport, **options)
            restore(optimizer, trained, saved[stop])
            train(optimizer, trained, range(stop, last), transport.rank)
            assert_bit_equal(snapshot(trained), expected, f"stopped at {stop}")
        return expected

    assert_replicas_equal(on_ranks(2, work))


def test_another_size_goes_on_without_the_errors_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def first(transport: LocalTransport) -> Any:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(8), transport.rank)
        return save(optimizer, trained)

    saved = on_ranks(2, first)[0]

    def second(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport)
        restore(optimizer, trained, saved)
        assert optimizer.stats.stage == COMPRESSION
        assert not any(error.any() for bucket in buckets_of(optimizer) for error in bucket.errors().values())
        train(optimizer, trained, range(8, 11), transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(3, second))
    assert "compression errors of the checkpoint were dropped" in caplog.text


def test_one_rank_goes_back_to_plain_adam() -> None:
    def first(transport: LocalTransport) -> Any:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(8), transport.rank)
        return save(optimizer, trained)

    saved = on_ranks(2, first)[0]

    def alone(transport: LocalTransport) -> None:
        optimizer, trained = _make(transport)
        restore(optimizer, trained, saved)
        assert optimizer.stats.stage == WARM_UP
        # corrected by 8 updates now instead of 4
        ratio = optimizer.variance_of(2).numpy() / saved[0]["7"].reshape(SHAPES[2])
        np.testing.assert_allclose(ratio, (1 - 0.9**8) / (1 - 0.9**4), rtol=1e-5)
        train(optimizer, trained, range(8, 10), 0)

    names = {f"{i}" for i in range(2 + 2 * len(SHAPES))}
    assert names <= set(saved[0])
    on_ranks(1, alone)


@pytest.mark.parametrize(("freeze_step", "stage"), [(2, COMPRESSION), (20, WARM_UP)])
def test_resume_with_another_freeze_step(freeze_step: int, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(8), transport.rank)
        saved = save(optimizer, trained)
        optimizer, trained = _make(transport, freeze_step=freeze_step)
        restore(optimizer, trained, saved)
        assert optimizer.stats.stage == stage
        train(optimizer, trained, range(8, 10), transport.rank)
        assert optimizer.stats.stage == stage
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))
    assert ("back to warm-up" in caplog.text) == (stage == WARM_UP)


def _damaged(store: Store) -> dict[str, Store]:
    about = json.loads(store["onebit.about"].tobytes())
    newer = np.frombuffer(json.dumps({**about, "version": 99}).encode(), np.uint8)
    return {
        "optimizer variables": {name: array for name, array in store.items() if name != "3"},
        "shape": {**store, "4": store["4"][:1]},
        "NaN or infinity": {**store, "5": np.full_like(store["5"], np.nan)},
        "worker_error holds NaN": {**store, "onebit.bucket.0.worker_error": np.full(3, np.inf, np.float32)},
        "upgrade": {**store, "onebit.about": newer},
    }


def test_a_damaged_checkpoint_is_refused_and_changes_nothing() -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(6), transport.rank)
        store, _ = save(optimizer, trained)
        before = {name: np.array(array) for name, array in store.items()}
        for reason, damaged in _damaged(store).items():
            with pytest.raises(ValueError, match=reason):
                optimizer.load_own_variables(damaged)
            after, _ = save(optimizer, trained)
            assert_bit_equal(list(after.values()), list(before.values()), reason)
        train(optimizer, trained, [6], transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


def test_to_plain_adam_and_back() -> None:
    def work(transport: LocalTransport) -> None:
        plain, plain_variables = Adam(0.01, beta_2=0.9), variables()
        train(plain, plain_variables, range(3), 0)
        store: Store = {}
        plain.save_own_variables(store)
        optimizer, trained = _make(transport)
        for mine, theirs in zip(trained, plain_variables, strict=True):
            mine.assign(theirs)
        optimizer.load_own_variables(store)
        assert (optimizer.stats.step, optimizer.stats.stage) == (3, WARM_UP)
        train(optimizer, trained, range(3, 6), transport.rank)
        assert optimizer.stats.frozen_step == 4
        # Keras's own variables come first and keep their order
        for theirs, mine in zip(plain.variables, optimizer.variables, strict=False):
            theirs.assign(mine)
        assert_bit_equal([plain._momentums[2].numpy()], [optimizer.momentum_of(2).numpy()])

    on_ranks(2, work)


def test_an_optimizer_that_was_used_brings_its_state() -> None:
    def work(transport: LocalTransport) -> None:
        plain, trained = Adam(0.01), variables()
        train(plain, trained, range(3), 0)
        optimizer = distribute(plain, transport, freeze_step=5)
        assert int(optimizer.iterations.numpy()) == 3
        assert_bit_equal([optimizer.momentum_of(0).numpy()], [plain._momentums[0].numpy()])
        train(optimizer, trained, range(3, 6), transport.rank)
        assert optimizer.stats.frozen_step == 5

    on_ranks(2, work)


def test_ranks_that_restored_different_checkpoints_all_raise() -> None:
    def work(transport: LocalTransport) -> str:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(3), transport.rank)
        saved = save(optimizer, trained)
        train(optimizer, trained, range(3, 6), transport.rank)
        if transport.rank == 1:
            restore(optimizer, trained, saved)
        with pytest.raises(RuntimeError, match="the ranks disagree") as caught:
            train(optimizer, trained, [6], transport.rank)
        return str(caught.value)

    messages = on_ranks(3, work)
    assert len(set(messages)) == 1
    assert 'stage: rank 0,2: "compression"; rank 1: "warm-up"' in messages[0]
    assert "step: rank 0,2: 6; rank 1: 3" in messages[0]


@pytest.mark.parametrize("what", ["options", "model", "learning rate"])
def test_ranks_that_differ_all_raise(what: str) -> None:
    def work(transport: LocalTransport) -> str:
        odd = transport.rank == 1
        trained = variables([(3, 4), (5,)] if what == "model" and odd else [(4, 3), (5,)])
        lr = 0.02 if what == "learning rate" and odd else 0.01
        optimizer = distribute(Adam(lr), transport, freeze_step=5, block=32 if what == "options" and odd else 64)
        with pytest.raises(RuntimeError, match="the ranks disagree") as caught:
            train(optimizer, trained, [0], transport.rank)
        return str(caught.value)

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert {"options": "option block", "model": "parameter 0", "learning rate": "lr"}[what] in messages[0]


def test_a_replica_that_drifted_is_found() -> None:
    """Where the variance differs at the freeze, nobody freezes."""

    def work(transport: LocalTransport) -> str:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(3), transport.rank)
        if transport.rank == 1:
            optimizer.variance_of(0).assign_add(tf.ones(SHAPES[0]))
        with pytest.raises(RuntimeError, match="checksum of the frozen variance") as caught:
            train(optimizer, trained, [3], transport.rank)
        assert optimizer.stats.stage == WARM_UP
        return str(caught.value)

    assert len(set(on_ranks(2, work))) == 1


def test_the_log_tells_the_stages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_onebit")

    def work(transport: LocalTransport) -> None:
        optimizer, trained = _make(transport, freeze_step=1)
        train(optimizer, trained, range(2), transport.rank)

    on_ranks(2, work)
    assert caplog.text.count("warm-up: 1 steps in full precision, then compression") == 1
    assert caplog.text.count("step 1: variance frozen, compression starts: 273 elements as one bit") == 1


def test_the_log_tells_of_a_resume_and_of_errors_that_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    """As in torch: on every rank that loses something."""
    caplog.set_level(logging.INFO, "hvd_onebit")
    saved: dict[str, Any] = {}

    def work(transport: LocalTransport) -> None:
        optimizer, trained = _make(transport, freeze_step=2)
        train(optimizer, trained, range(4), transport.rank)
        if transport.rank == 0:
            optimizer.save_own_variables(saved)

    def resume(transport: LocalTransport) -> None:
        optimizer, trained = _make(transport, freeze_step=2)
        optimizer.load_own_variables(saved)
        train(optimizer, trained, [4], transport.rank)

    on_ranks(2, work)
    caplog.clear()
    on_ranks(2, resume)
    assert caplog.text.count("resumed at step 4 in the compression stage (variance frozen at step 2)") == 1
    assert caplog.text.count("saved by rank 0 of 2, restored on rank 1 of 2") == 1
    assert "warm-up" not in caplog.text
