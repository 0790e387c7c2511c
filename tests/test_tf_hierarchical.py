"""The hierarchical exchange in TensorFlow: its bits, its state, and two hosts with two ranks each under horovodrun."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import on_two_hosts

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from tf_training import (
    SHAPES,
    assert_bit_equal,
    assert_replicas_equal,
    distribute,
    gradients,
    on_ranks,
    snapshot,
    variables,
)

import hvd_onebit.tensorflow as onebit
from hvd_onebit import netlab
from hvd_onebit.tensorflow import engine
from hvd_onebit.transport.local import LocalTransport

WHY_NOT = netlab.why_impossible()
SCRIPT = Path(__file__).parent / "scripts" / "tf_hierarchical.py"
FREEZE = 4
ROUNDS: dict[str, Any] = {"var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
FAMILY: dict[str, Callable[[], Any]] = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, beta_2=0.9),
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "lamb": lambda: onebit.OneBitLamb(0.01, beta_2=0.9, weight_decay=0.1),
    "zero one adam": lambda: onebit.ZeroOneAdam(0.01, beta_2=0.95, var_freeze_step=6, **ROUNDS),
}

Saved = tuple[dict[str, Any], list[Any]]


@pytest.fixture(autouse=True)
def _hierarchical_with_two_ranks_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_onebit.hosts.AUTO_LEAST_RANKS", 2)


def make(name: str, transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    trained = variables()
    # shards start where scales do
    given = {"block": 8, "bucket_elements": 150, **options}
    if name != "zero one adam":
        given["freeze_step"] = FREEZE
    optimizer = distribute(FAMILY[name](), transport, **given)
    optimizer.build(trained)
    return optimizer, trained


def dyadic(step: int, rank: int) -> list[Any]:
    """Gradients whose mean over two or four ranks is exact."""
    return [np.round(8 * each) / np.float32(8) for each in gradients(step, rank, SHAPES)]


def host_mean(step: int, host: int) -> list[Any]:
    pairs = zip(dyadic(step, 2 * host), dyadic(step, 2 * host + 1), strict=True)
    return [(one + other) / np.float32(2) for one, other in pairs]


def train(optimizer: Any, trained: Sequence[Any], steps: Sequence[int], rank: int, give: Any = dyadic) -> None:
    for step in steps:
        optimizer.apply([tf.constant(g) for g in give(step, rank)], trained)


def save(optimizer: Any, trained: Sequence[Any]) -> Saved:
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return {key: np.array(array) for key, array in store.items()}, snapshot(trained)


def restore(optimizer: Any, trained: Sequence[Any], saved: Saved) -> None:
    for variable, value in zip(trained, saved[1], strict=True):
        variable.assign(value)
    optimizer.load_own_variables(saved[0])


@pytest.mark.parametrize(
    ("name", "exchange", "on_cpu"),
    [
        ("adamw", "one_shot", True),
        ("adamw", "two_phase", True),
        ("adamw", "two_phase", False),
        ("sgd", "one_shot", True),
        ("lamb", "two_phase", True),
    ],
)
def test_two_hosts_train_as_two_ranks_with_the_hosts_mean_gradients(
    name: str, exchange: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit where gradients are what is sent; where it is more, the hosts' means are rounded."""
    monkeypatch.setattr(engine, "is_on_host", lambda variables: on_cpu)
    steps = range(FREEZE + 4 if name == "adamw" else FREEZE + 2)
    options = {"exchange": exchange}

    def on_hosts(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport, hierarchical=True, **options)
        train(optimizer, trained, steps, transport.rank)
        stats = optimizer.stats
        assert stats.inside_bytes_per_step["warm-up"] == 0
        assert 0 < stats.inside_bytes_per_step["compression"] < stats.bytes_per_step["compression"]
        return snapshot(trained)

    def alone(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport, **options)
        train(optimizer, trained, steps, transport.rank, host_mean)
        assert optimizer.stats.inside_bytes_per_step["compression"] == 0
        return snapshot(trained)

    replicas = on_ranks(4, on_hosts, ranks_per_host=2)
    expected = on_ranks(2, alone)[0]
    assert_replicas_equal(replicas)
    if name == "adamw":
        assert_bit_equal(replicas[0], expected)
    else:
        moved = np.concatenate([np.abs(a - b).ravel() for a, b in zip(replicas[0], expected, strict=True)])
        # a value next to zero may go the other way
        assert (moved > 1e-5).mean() < 0.01


@pytest.mark.parametrize(("name", "hosts", "ranks"), [("adamw", 2, 3), ("zero one adam", 3, 2)])
def test_replicas_are_bit_equal_and_resume_bit_for_bit(name: str, hosts: int, ranks: int) -> None:
    last = FREEZE + 5

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport)
        train(optimizer, trained, range(last), transport.rank)
        saved = save(optimizer, trained)
        train(optimizer, trained, range(last, last + 4), transport.rank)
        second, resumed = make(name, transport)
        restore(second, resumed, saved)
        train(second, resumed, range(last, last + 4), transport.rank)
        assert_bit_equal(snapshot(resumed), snapshot(trained))
        if name == "zero one adam":
            optimizer.synchronize_for_checkpoint()
        return snapshot(trained)

    assert_replicas_equal(on_ranks(hosts * ranks, work, ranks_per_host=ranks))


@pytest.mark.parametrize("later", [1, 2])
def test_zero_one_adam_is_measured_before_its_next_round(later: int) -> None:
    """Resumed between two rounds, it has not exchanged anything yet when it is measured."""
    last = 12 + later

    def work(transport: LocalTransport) -> None:
        optimizer, trained = make("zero one adam", transport)
        train(optimizer, trained, range(last), transport.rank)
        second, resumed = make("zero one adam", transport, measure=True)
        restore(second, resumed, save(optimizer, trained))
        train(second, resumed, range(last, last + 4), transport.rank)
        assert second.stats.plan is not None

    on_ranks(4, work, ranks_per_host=2)


@pytest.mark.parametrize("target", [(2, None), (6, 2)], ids=str)
def test_rank_0_alone_restores_any_layout(target: tuple[int, int | None], caplog: pytest.LogCaptureFixture) -> None:
    def first(transport: LocalTransport) -> Saved:
        optimizer, trained = make("adamw", transport, exchange="two_phase")
        train(optimizer, trained, range(FREEZE + 3), transport.rank)
        optimizer.synchronize_for_checkpoint()
        return save(optimizer, trained)

    runs = on_ranks(4, first, ranks_per_host=2)
    whole = {key: array for key, array in runs[0][0].items() if key.endswith("worker_error")}
    assert sum(len(error) for error in whole.values()) == sum(int(np.prod(shape)) for shape in SHAPES)
    assert all(error.any() for error in whole.values())
    for store, _ in runs:  # any rank could have saved it
        for key, error in whole.items():
            assert_bit_equal([store[key]], [error], key)

    def second(transport: LocalTransport) -> Saved:
        optimizer, trained = make("adamw", transport, exchange="two_phase")
        restore(optimizer, trained, runs[0])
        restored = save(optimizer, trained)[0]
        for key, error in whole.items():
            assert_bit_equal([restored[key]], [error], key)
        optimizer.synchronize_for_checkpoint()
        errors = save(optimizer, trained)[0]
        train(optimizer, trained, range(FREEZE + 3, FREEZE + 5), transport.rank)
        return errors, snapshot(trained)

    restored = on_ranks(target[0], second, ranks_per_host=target[1])
    assert "dropped" not in caplog.text
    for errors, _ in restored:
        for key, error in whole.items():
            np.testing.assert_allclose(errors[key], error, rtol=1e-5, atol=1e-7)
    assert_replicas_equal([values for _, values in restored])


def test_errors_of_another_layout_are_dropped_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def first(transport: LocalTransport) -> Saved:
        optimizer, trained = make("adamw", transport)
        train(optimizer, trained, range(FREEZE + 3), transport.rank)
        return save(optimizer, trained)

    saved = on_ranks(4, first, ranks_per_host=2)

    def second(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("adamw", transport, hierarchical=False)
        restore(optimizer, trained, saved[transport.rank])
        train(optimizer, trained, range(FREEZE + 3, FREEZE + 5), transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(4, second, ranks_per_host=2))
    assert "saved by a hierarchical exchange over other hosts, or by one that is not" in caplog.text


def test_a_nan_on_one_rank_skips_the_step_on_all() -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("adamw", transport, exchange="two_phase")
        train(optimizer, trained, range(FREEZE + 3), transport.rank)
        before = save(optimizer, trained)

        def with_nan(step: int, rank: int) -> list[Any]:
            given = dyadic(step, rank)
            if rank == 2:
                given[0][0, 0] = np.nan
            return given

        train(optimizer, trained, [99], transport.rank, with_nan)
        assert optimizer.stats.steps_skipped == 1
        after = save(optimizer, trained)
        assert_bit_equal(after[1], before[1])
        for key, array in before[0].items():
            if array.dtype == np.float32:
                np.testing.assert_allclose(after[0][key], array, rtol=1e-5, atol=1e-6)
        train(optimizer, trained, range(FREEZE + 3, FREEZE + 5), transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(4, work, ranks_per_host=2))


def test_it_says_whether_it_is_hierarchical(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> None:
        optimizer, trained = make("adamw", transport)
        train(optimizer, trained, range(2), transport.rank)

    for size, ranks, said in [
        (4, 2, "hierarchical exchange: 2 hosts with 2 ranks each"),
        (3, 2, "the exchange is not hierarchical: the hosts have different numbers of ranks: 2, 1"),
        (2, 2, None),
    ]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "hvd_onebit"):
            on_ranks(size, work, ranks_per_host=ranks)
        assert [each.getMessage() for each in caplog.records if "hierarchical" in each.getMessage()] == (
            [said] if said else []
        )


def test_ranks_that_want_it_and_ranks_that_do_not_all_raise() -> None:
    def work(transport: LocalTransport) -> str:
        optimizer, trained = make("adamw", transport, hierarchical=transport.rank != 1)
        with pytest.raises(RuntimeError, match="option hierarchical: rank 0,2,3: true; rank 1: false") as raised:
            train(optimizer, trained, [0], transport.rank)
        return str(raised.value)

    assert len(set(on_ranks(4, work, ranks_per_host=2, timeout_seconds=20))) == 1


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.timeout(240)
def test_two_hosts_with_two_ranks_each(tmp_path: Path) -> None:
    """Under horovodrun, in graphs: the bits of the local transport, with shared memory and without."""
    found, text = on_two_hosts(SCRIPT, tmp_path, timeout=150, environment={"TF_CPP_MIN_LOG_LEVEL": "3"})
    for each in found:
        assert each["memory"] == [True, False], "ranks of a host share memory, unless they cannot"
        assert each["parameters"] == found[0]["threads"]
        assert each["without memory"] == found[0]["threads"]
        assert each["undone"] == [True, True]
        assert each["errors kept"]
        message = 4 * -(-each["num_elements"] // 2048) + each["num_elements"] / 8
        assert each["sent to other hosts"] == pytest.approx(message / 2, rel=0.05)
    assert "hierarchical exchange: 2 hosts with 2 ranks each" in text
    assert "cannot share memory" in text
    assert text.count("on rank 2 the gradients of p2 are NaN or infinite") == 2
