"""0/1 Adam in TensorFlow against the float64 oracle, torch's counts, and the promises every optimizer keeps.

What takes real ranks is in scripts/tf_checks.py: model.fit, and 3000 steps of two replicas.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    gradients,
    mean_gradients,
    on_ranks,
    restore,
    save,
    snapshot,
    train,
    variables,
)

import hvd_onebit.tensorflow as onebit
from hvd_onebit import reference
from hvd_onebit.schedule import RoundSchedule
from hvd_onebit.stats import COMPRESSION
from hvd_onebit.tensorflow import engine
from hvd_onebit.transport.local import LocalTransport

SHAPES = ((6, 5), (5,), (20, 2))
FREEZE = 6
ROUNDS: dict[str, Any] = {"var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 16}


def zero_one(**how: Any) -> Any:
    # Keras adds epsilon to another place than the paper: it is too small to matter here
    given = {"learning_rate": 0.01, "beta_2": 0.95, "epsilon": 1e-12, "var_freeze_step": FREEZE, **ROUNDS, **how}
    return onebit.ZeroOneAdam(**given)


def due(
    steps: int, *, freeze: int = FREEZE, lr: Callable[[int], float] = lambda step: 0.01, **rounds: Any
) -> tuple[set[int], set[int]]:
    """The steps, counted from 1, that update the variance and that synchronise."""
    schedule = RoundSchedule(**{**ROUNDS, **rounds})
    variance_steps, sync_steps = set(), set()
    for step in range(1, steps + 1):
        made = schedule.due(step, lr(step))
        variance_steps |= {step} if made.variance else set()
        sync_steps |= {step} if made.sync else set()
        schedule.made(step, made)
        if step == freeze:
            schedule.freeze(step, lr(step))
    return variance_steps, sync_steps


def flat(arrays: Sequence[Any]) -> Any:
    """In the bucket's order: the last variable first."""
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in reversed(arrays)])


def state_of(optimizer: Any, trained: Sequence[Any]) -> list[Any]:
    return [*snapshot(trained), *snapshot(optimizer.variables)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def _halving(step: int) -> float:
    return 1 / 64 if step <= 8 else 1 / 128 if step <= 14 else 1 / 1024


LEARNING_RATES: dict[str, tuple[Callable[[], Any], Callable[[int], float], dict[str, Any]]] = {
    "constant": (lambda: 0.01, lambda step: 0.01, {}),
    "schedule": (
        lambda: keras.optimizers.schedules.PiecewiseConstantDecay([7, 13], [1 / 64, 1 / 128, 1 / 1024]),
        _halving,
        {"local_step_scaler": None},
    ),
    "assigned": (lambda: 1 / 64, _halving, {"local_step_scaler": None}),
}


@pytest.mark.parametrize(
    ("size", "decoupled", "name"), [(2, True, "constant"), (3, True, "assigned"), (4, True, "schedule")]
)
def test_every_step_follows_the_oracle(size: int, decoupled: bool, name: str) -> None:
    """Each rank for itself, between synchronisations too; and all are equal to the bit after one."""
    steps = 24
    make_lr, lr, rounds = LEARNING_RATES[name]
    variance_steps, sync_steps = due(steps, lr=lr, **rounds)
    assert len(variance_steps) < FREEZE
    assert len(sync_steps) < steps - 5

    def work(transport: LocalTransport) -> list[list[Any]]:
        trained = variables(SHAPES)
        make = zero_one(learning_rate=make_lr(), weight_decay=0.1, decoupled_weight_decay=decoupled, **rounds)
        optimizer = distribute(make, transport, exchange="one_shot", block=32)
        every = []
        for step in range(steps):
            if name == "assigned":
                optimizer.learning_rate = lr(step + 1)
            train(optimizer, trained, [step], transport.rank)
            every.append(snapshot(trained))
            assert (optimizer.stats.bytes_per_step[COMPRESSION] > 0) == (step + 1 in sync_steps)
        assert (optimizer.stats.rounds, optimizer.stats.variance_updates) == (len(sync_steps), len(variance_steps))
        return every

    ranks = on_ranks(size, work)
    oracle = reference.ZeroOneAdam(
        flat(snapshot(variables(SHAPES))),
        num_workers=size,
        variance_steps=variance_steps,
        sync_steps=sync_steps,
        betas=(0.9, 0.95),
        eps=1e-12,
        block=32,
        scale="rms",
        decoupled_weight_decay=0.1,
        sizes=[int(np.prod(shape)) for shape in reversed(SHAPES)],
    )
    for step in range(steps):
        oracle.step_workers([flat(gradients(step, rank, SHAPES)) for rank in range(size)], lr(step + 1))
        for rank in range(size):
            np.testing.assert_allclose(flat(ranks[rank][step]), oracle.xs[rank], rtol=0, atol=1e-4, err_msg=f"{step}")
        if step + 1 in sync_steps:
            assert_replicas_equal([each[step] for each in ranks])
        else:
            assert ranks[0][step][0].tobytes() != ranks[1][step][0].tobytes()


SETTINGS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "gaps by steps": ({"var_freeze_step": 6, **ROUNDS}, lambda step: 1 / 64),
    "gaps by learning rate": (
        {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_clipper": 4},
        lambda step: 2.0 ** -(6 + step // 5),
    ),
    "learning rate of zero": ({"var_freeze_step": 3}, lambda step: 0.0 if step in (2, 3, 9, 10) else 1 / 64),
    "automatic": ({"var_update_scaler": 4, "local_step_scaler": 2}, lambda step: min(step, 6) / 64),
}


@pytest.mark.parametrize(("name", "exchange"), [*zip(SETTINGS, ["one_shot", "two_phase"] * 2, strict=True)])
def test_rounds_updates_and_bytes_are_torchs(name: str, exchange: str) -> None:
    torch = pytest.importorskip("torch")
    import hvd_onebit.torch as other

    settings, lr = SETTINGS[name]
    steps = range(30 if name == "automatic" else 20)

    def counts(stats: Any) -> tuple[Any, ...]:
        return stats.step, stats.rounds, stats.variance_updates, stats.bytes_per_step[COMPRESSION], stats.stage

    def ours(transport: LocalTransport) -> list[Any]:
        trained, seen = variables(SHAPES), []
        make = onebit.ZeroOneAdam(lr(0), beta_2=0.9, **settings)
        optimizer = distribute(make, transport, exchange=exchange, block=16)
        for step in steps:
            optimizer.learning_rate = lr(step)
            # of constant magnitude: the variance settles as fast as it can
            optimizer.apply([tf.constant(np.sign(g)) for g in gradients(step, 0, SHAPES)], trained)
            seen.append(counts(optimizer.stats))
        return seen

    def theirs(transport: LocalTransport) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.from_numpy(x)) for x in snapshot(variables(SHAPES))]
        make = other.ZeroOneAdam(parameters, lr=1.0, betas=(0.9, 0.9), **settings)
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        optimizer = other.DistributedOptimizer(make, named, transport=transport, exchange=exchange, block=16)
        seen = []
        for step in steps:
            optimizer.param_groups[0]["lr"] = lr(step)
            for p, g in zip(parameters, gradients(step, 0, SHAPES), strict=True):
                p.grad = torch.from_numpy(np.sign(g))
            optimizer.step()
            seen.append(counts(optimizer.stats))
        return seen

    seen = on_ranks(2, ours)[0]
    assert seen == on_ranks(2, theirs)[0]
    assert seen[-1][1] < len(steps)


def test_operations_and_kernels_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of other devices, here on the CPU."""

    def work(transport: LocalTransport) -> list[Any]:
        result = []
        for options in ({"exchange": "two_phase"}, {"dead": "hold"}):
            trained = variables(SHAPES)
            optimizer = distribute(zero_one(), transport, block=16, bucket_elements=50, **options)
            for step in range(11):
                given = gradients(step, transport.rank, SHAPES)
                given[0][2] = 0.0
                optimizer.apply([tf.constant(g) for g in given], trained)
            errors = [e for bucket in buckets_of(optimizer) for e in bucket.errors().values() if e is not None]
            result += [*state_of(optimizer, trained), *(error.copy() for error in errors)]
        return result

    by_kernels = on_ranks(2, work)
    monkeypatch.setattr(engine, "is_on_host", lambda variables: False)
    for mine, theirs in zip(on_ranks(2, work), by_kernels, strict=True):
        assert_bit_equal(mine, theirs)


def test_one_rank_is_plain_adam(caplog: pytest.LogCaptureFixture) -> None:
    plain = keras.optimizers.Adam(0.01, beta_2=0.95, epsilon=1e-12, weight_decay=0.1)
    mine, theirs = variables(SHAPES), variables(SHAPES)
    train(plain, theirs, range(12), 0)

    def work(transport: LocalTransport) -> None:
        train(distribute(zero_one(weight_decay=0.1), transport), mine, range(12), 0)

    on_ranks(1, work)
    assert_bit_equal(snapshot(mine), snapshot(theirs))
    assert "one rank" in caplog.text
    alone = variables(SHAPES)
    train(zero_one(weight_decay=0.1), alone, range(12), 0)
    assert_bit_equal(snapshot(alone), snapshot(theirs))


def test_a_tensor_in_full_precision_follows_adam_for_ever() -> None:
    assert 12 not in due(12)[1]
    plain = keras.optimizers.Adam(0.01, beta_2=0.95, epsilon=1e-12, weight_decay=0.1)
    theirs = variables(SHAPES)
    for step in range(12):
        plain.apply([tf.constant(g) for g in mean_gradients(step, 2, SHAPES)], theirs)

    def work(transport: LocalTransport) -> Any:
        trained = variables(SHAPES)
        optimizer = distribute(zero_one(weight_decay=0.1, full_precision=["*p1"]), transport)
        train(optimizer, trained, range(12), transport.rank)
        assert optimizer.stats.full_precision_elements == 5
        assert optimizer.stats.bytes_per_step[COMPRESSION] == 4 * 5  # a step of no round
        return snapshot(trained)[1]

    for replica in on_ranks(2, work):
        assert_bit_equal([replica], [snapshot(theirs)[1]])


@pytest.mark.parametrize("decoupled", [True, False])
def test_weight_decay_decays(decoupled: bool) -> None:
    """Decoupled, it is all that acts on a tensor without gradient, and no part of what is sent."""
    steps, shapes = max(due(20)[1]), ((40,), (9,))

    def work(transport: LocalTransport, *, by_hand: bool = False) -> list[Any]:
        trained = variables(shapes)
        how = {} if by_hand else {"weight_decay": 0.5, "decoupled_weight_decay": decoupled}
        optimizer = distribute(zero_one(epsilon=1e-4, **how), transport)
        for step in range(steps):
            given = [gradient(step, transport.rank, 0, shapes[0]), np.zeros(shapes[1], np.float32)]
            if by_hand:
                given = [g + np.float32(0.5) * x for g, x in zip(given, snapshot(trained), strict=True)]
            optimizer.apply([tf.constant(g) for g in given], trained)
        return snapshot(trained)

    replicas = on_ranks(2, work)
    assert_replicas_equal(replicas)
    if decoupled:
        start = snapshot(variables(shapes))[1]
        np.testing.assert_allclose(replicas[0][1], start * (1 - 0.01 * 0.5) ** steps, rtol=1e-5)
        return
    for mine, theirs in zip(replicas[0], on_ranks(2, lambda t: work(t, by_hand=True))[0], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("rate", [0.0, 1e-44])
def test_a_learning_rate_of_zero_moves_nothing_and_does_no_harm(rate: float) -> None:
    """Nor does one that float32 hardly tells from zero."""

    def work(transport: LocalTransport) -> list[Any]:
        trained = variables(SHAPES)
        start = snapshot(trained)
        optimizer = distribute(zero_one(learning_rate=rate), transport)
        train(optimizer, trained, range(FREEZE + 2), transport.rank)
        assert_bit_equal(snapshot(trained), start)
        assert optimizer.stats.rounds == 0
        optimizer.learning_rate = 0.01
        step = FREEZE + 2
        while optimizer.stats.rounds < 3:
            train(optimizer, trained, [step], transport.rank)
            step += 1
        assert all((a != b).all() for a, b in zip(snapshot(trained), start, strict=True))
        return snapshot(trained)

    replicas = on_ranks(2, work)
    assert_replicas_equal(replicas)
    assert all(np.abs(x).max() < 10 for x in replicas[0])


def test_what_the_user_sets_is_kept() -> None:
    def work(transport: LocalTransport) -> Any:
        trained = variables([(20,)])
        optimizer = distribute(zero_one(), transport)
        for _ in range(3):
            optimizer.apply([tf.ones(20)], trained)
        trained[0].assign(np.full(20, 7.0, np.float32))
        for _ in range(2):
            optimizer.apply([tf.ones(20)], trained)
        return trained[0].numpy()

    for x in on_ranks(2, work):
        np.testing.assert_allclose(x, 7.0 - 0.02, rtol=0, atol=2e-3)


# -- gradients that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
def test_a_synchronisation_that_overflows_changes_nothing(exchange: str) -> None:
    """Neither while the variance is live, nor later."""
    variance_steps, sync_steps = due(24)
    overflows = (3, max(sync_steps))
    assert 3 in variance_steps & sync_steps

    def work(transport: LocalTransport) -> list[Any]:
        trained = variables(SHAPES)
        optimizer = distribute(zero_one(), transport, exchange=exchange, block=16, full_precision=["p1"])
        for step in range(1, max(sync_steps) + 1):
            if step in overflows:
                accumulated = optimizer._engine.value.accumulated[0]
                kept = accumulated.numpy().copy()
                if transport.rank == 1:  # lr times momentum may well be too large for float32
                    accumulated.assign(np.where(np.arange(30).reshape(6, 5) == 3, np.inf, kept))
                before, stats = state_of(optimizer, trained), optimizer.stats
                owed = copy.deepcopy([bucket.errors() for bucket in buckets_of(optimizer)])
                updates = stats.variance_updates
                train(optimizer, trained, [50], transport.rank)
                assert_bit_equal(state_of(optimizer, trained), before)
                assert (stats.step, stats.skipped_in_a_row, stats.variance_updates) == (step - 1, 1, updates)
                for bucket, errors in zip(buckets_of(optimizer), owed, strict=True):
                    for name, error in bucket.errors().items():
                        if error is not None:
                            np.testing.assert_allclose(error, errors[name], rtol=1e-4, atol=1e-7)
                accumulated.assign(kept)
            train(optimizer, trained, [step], transport.rank)
        assert optimizer.stats.step == max(sync_steps)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


def test_a_nan_between_synchronisations_stays_out_of_that_ranks_momentum() -> None:
    """In a step of the variance all ranks skip; elsewhere only the rank itself leaves it out."""
    variance_steps, sync_steps = due(24)
    bad = {2: "variance", 12: "local", max(sync_steps): "sync"}
    assert 2 in variance_steps
    assert 12 not in sync_steps

    def work(transport: LocalTransport) -> list[Any]:
        trained = variables(SHAPES)
        optimizer = distribute(zero_one(), transport)
        for step in range(1, max(sync_steps) + 1):
            if step in bad:
                given = gradients(step, transport.rank, SHAPES)
                given[0][1, 1] = np.nan if transport.rank == 1 else given[0][1, 1]
                before, momentum = state_of(optimizer, trained), optimizer.momentum_of(0).numpy().copy()
                optimizer.apply([tf.constant(g) for g in given], trained)
                if bad[step] == "variance":
                    assert_bit_equal(state_of(optimizer, trained), before)
                elif bad[step] == "local":
                    same = optimizer.momentum_of(0).numpy().tobytes() == momentum.tobytes()
                    assert same == (transport.rank == 1)
                if bad[step] != "variance":
                    continue
            train(optimizer, trained, [step], transport.rank)
        assert optimizer.stats.step == max(sync_steps)
        assert optimizer.stats.steps_skipped == (3 if transport.rank == 1 else 1)
        return snapshot(trained)

    replicas = on_ranks(2, work)
    assert_replicas_equal(replicas)
    assert all(np.isfinite(x).all() for x in replicas[0])


@pytest.mark.parametrize("stuck_ranks", [(1,), (0, 1)])
def test_a_rank_without_gradients_stops_all_at_the_next_round(stuck_ranks: tuple[int, ...]) -> None:
    def work(transport: LocalTransport) -> str:
        trained = variables([(30,)])
        optimizer = distribute(zero_one(max_skipped_steps=3), transport)
        train(optimizer, trained, range(12), transport.rank)

        def go_on() -> None:
            for _ in range(40):
                optimizer.apply([tf.fill([30], np.nan if transport.rank in stuck_ranks else 1.0)], trained)

        with pytest.raises(onebit.OneBitError, match="NaN or infinite for 3 steps in a row") as caught:
            go_on()
        return str(caught.value)

    assert len(set(on_ranks(2, work))) == 1


# -- shapes, types, dead coordinates -----------------------------------------------------------------------------------


def test_shapes_and_types() -> None:
    shapes = ((0,), (), (1,), (2, 0, 3), (3, 3), (17,))
    dtypes, steps = ("float32", "bfloat16", "float16"), max(due(12)[1])

    def work(transport: LocalTransport) -> list[Any]:
        trained = [
            keras.Variable(v, dtype=dtypes[i % len(dtypes)], name=v.name) for i, v in enumerate(variables(shapes))
        ]
        start = [v.numpy().astype(np.float32) for v in trained]
        optimizer = distribute(zero_one(learning_rate=0.05, epsilon=1e-3), transport, exchange="two_phase")
        for step in range(steps):
            given = gradients(step, transport.rank, shapes)
            optimizer.apply([tf.cast(g, v.dtype) for g, v in zip(given, trained, strict=True)], trained)
        after = [v.numpy().astype(np.float32) for v in trained]
        assert all(np.isfinite(a).all() for a in after)
        assert all((a != b).any() or not a.size for a, b in zip(after, start, strict=True))
        return after

    assert_replicas_equal(on_ranks(3, work))


@pytest.mark.parametrize("dead", ["floor", "hold"])
def test_rows_that_are_never_touched_do_not_explode(dead: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a tensor that is never touched, beside others in one block."""
    steps = max(due(20)[1])

    def work(transport: LocalTransport) -> list[Any]:
        trained = variables([(20, 8), (50,)])
        start = snapshot(trained)
        optimizer = distribute(zero_one(), transport, dead=dead)
        for step in range(steps):
            given = gradient(step, transport.rank, 0, (20, 8))
            # the ranks' own gradients, whose mean is zero
            mine = 0.01 * (-1) ** transport.rank
            given[12:] = mine
            optimizer.apply([tf.constant(given), tf.fill([50], mine)], trained)
            after = snapshot(trained)
            assert_bit_equal(after[1:], start[1:], f"step {step}")
            if dead == "hold":
                assert_bit_equal([after[0][12:]], [start[0][12:]], f"step {step}")
        assert optimizer.stats.dead_elements == 8 * 8 + 50
        assert optimizer.stats.floored_elements == (64 if dead == "floor" else 0)
        return [after[0] - start[0]]

    replicas = on_ranks(2, work)
    assert_replicas_equal(replicas)
    assert "p1 had no gradient so far and would never be trained" in caplog.text
    moved = np.abs(replicas[0][0])
    if dead == "hold":
        assert not moved[12:].any()
    else:
        # bits cannot say zero, and the floor makes steps of them ten times as long as a mean one
        assert moved[12:].max() <= 10 * moved[:12].max()
    assert moved[:12].all()


# -- state -------------------------------------------------------------------------------------------------------------


def _make(transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    trained = variables(SHAPES)
    given = {"block": 16, "bucket_elements": 50, "exchange": "two_phase", **options}
    optimizer = distribute(zero_one(weight_decay=0.1), transport, **given)
    optimizer.build(trained)
    return optimizer, trained


def test_resume_is_bit_for_bit_at_any_step() -> None:
    """While the variance is live, at its freeze, at a synchronisation, and between two."""
    last = max(due(24)[1])
    stops = (1, FREEZE, FREEZE + 1, 12)
    assert 12 not in due(24)[1]

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport)
        saved = {}
        for step in range(last):
            if step in stops:
                saved[step] = save(optimizer, trained)
            train(optimizer, trained, [step], transport.rank)
        expected = state_of(optimizer, trained)
        for stop in stops:
            other, others = _make(transport)
            restore(other, others, saved[stop])
            train(other, others, range(stop, last), transport.rank)
            assert_bit_equal(state_of(other, others), expected, f"stopped at {stop}")
            assert (other.stats.step, other.stats.frozen_step) == (last, FREEZE)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


def test_other_ranks_go_on_and_say_what_they_drop(caplog: pytest.LogCaptureFixture) -> None:
    """One rank's state, saved between two synchronisations, on all of another number of ranks."""
    stop, last = 12, max(due(24)[1])
    assert stop not in due(24)[1]

    def first(transport: LocalTransport) -> Any:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(stop), transport.rank)
        return save(optimizer, trained)

    saved = on_ranks(2, first)[1]

    def second(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport)
        restore(optimizer, trained, saved)
        assert_bit_equal(snapshot(trained), saved[1])
        train(optimizer, trained, range(stop, last), transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(3, second))
    assert "compression errors of the checkpoint were dropped" in caplog.text
    assert "what the other ranks had done since the last one was dropped" in caplog.text
    caplog.clear()

    def alone(transport: LocalTransport) -> None:
        optimizer, trained = _make(transport)
        restore(optimizer, trained, saved)
        updates = len(due(stop)[0])
        ratio = optimizer.variance_of(2).numpy() / saved[0][f"{2 + 2 * 2 + 1}"]
        np.testing.assert_allclose(ratio, (1 - 0.95**stop) / (1 - 0.95**updates), rtol=1e-5)
        train(optimizer, trained, range(stop, last), 0)
        assert all(np.isfinite(x).all() for x in snapshot(trained))

    on_ranks(1, alone)
    assert "what the other ranks had done since the last one was dropped" in caplog.text


def test_plain_adams_checkpoint_goes_on_with_its_own_variance() -> None:
    """Its variance counts as updated in every step: it is neither forgotten nor corrected twice."""
    plain, theirs = keras.optimizers.Adam(0.01, beta_2=0.95), variables(SHAPES)
    train(plain, theirs, range(8), 0)
    store: dict[str, Any] = {}
    plain.save_own_variables(store)

    def work(transport: LocalTransport) -> None:
        optimizer, trained = _make(transport)
        restore(optimizer, trained, (store, snapshot(theirs)))
        train(optimizer, trained, [8], transport.rank)
        assert optimizer._engine.value.table.numpy()[1].tolist() == [9, 9, 9]
        assert np.abs(snapshot(trained)[0] - snapshot(theirs)[0]).max() < 0.03

    on_ranks(2, work)


def test_a_damaged_checkpoint_is_refused_and_changes_nothing() -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = _make(transport)
        train(optimizer, trained, range(12), transport.rank)
        store, _ = save(optimizer, trained)
        before = {name: np.array(array) for name, array in store.items()}
        about = json.loads(store["onebit.about"].tobytes())
        newer = np.frombuffer(json.dumps({**about, "version": 99}).encode(), np.uint8)
        anchor = str(len(optimizer.variables) - 1)
        for reason, damaged in {
            "optimizer variables": {name: array for name, array in store.items() if name != anchor},
            "shape": {**store, anchor: store[anchor][:1]},
            "NaN or infinity": {**store, anchor: np.full_like(store[anchor], np.nan)},
            "worker_error holds NaN": {**store, "onebit.bucket.0.worker_error": np.full(3, np.inf, np.float32)},
            "upgrade": {**store, "onebit.about": newer},
        }.items():
            with pytest.raises(ValueError, match=reason):
                optimizer.load_own_variables(damaged)
            after, _ = save(optimizer, trained)
            assert_bit_equal(list(after.values()), list(before.values()), reason)
        other = distribute(onebit.OneBitAdam(freeze_step=3), transport)
        other.build(variables(SHAPES))
        with pytest.raises(ValueError, match="optimizer variables"):
            other.load_own_variables(store)
        train(optimizer, trained, range(12, max(due(24)[1])), transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


# -- ranks -------------------------------------------------------------------------------------------------------------


@contextmanager
def counting(transport: LocalTransport) -> Iterator[list[str]]:
    """The names of this rank's collectives."""
    names: list[str] = []
    kinds = ("allreduce", "allgather", "alltoall", "allgather_bytes")
    plain = {kind: getattr(transport, kind) for kind in kinds}

    def counted(kind: str) -> Callable[..., Any]:
        def call(*args: Any, name: str, **how: Any) -> Any:
            names.append(name)
            return plain[kind](*args, name=name, **how)

        return call

    for kind in kinds:
        setattr(transport, kind, counted(kind))
    yield names


def test_a_step_without_a_round_makes_no_collective_at_all() -> None:
    variance_steps, sync_steps = due(16)

    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)
        optimizer = distribute(zero_one(), transport)
        with counting(transport) as names:
            for step in range(1, 17):
                names.clear()
                train(optimizer, trained, [step], transport.rank)
                expected = ["agreement.digest"] * (step in variance_steps | sync_steps)
                expected += ["bucket.0.variance"] * (step in variance_steps)
                expected += ["bucket.0.allgather"] * (step in sync_steps)
                assert names == expected, step

    on_ranks(2, work)


@pytest.mark.parametrize("what", ["var_update_scaler", "step", "checksum of the averaged momentum"])
def test_ranks_that_differ_all_raise(what: str) -> None:
    def work(transport: LocalTransport) -> str:
        odd = transport.rank == 1
        trained = variables(SHAPES)
        make = zero_one(var_update_scaler=3 if what == "var_update_scaler" and odd else 2)
        optimizer = distribute(make, transport)
        optimizer.build(trained)

        def go_on() -> None:
            for step in range(16):
                if step == 4 and odd and what == "step":
                    optimizer.iterations.assign(9)
                if step == 9 and what.startswith("checksum"):
                    assert buckets_of(optimizer)[0].checksum != 0
                    buckets_of(optimizer)[0].checksum += odd
                train(optimizer, trained, [step], transport.rank)

        with pytest.raises(onebit.OneBitError, match="the ranks disagree") as caught:
            go_on()
        return str(caught.value)

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert what in messages[0]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda t: onebit.ZeroOneAdam(freeze_step=3), TypeError, "it has var_freeze_step, not freeze_step"),
        (lambda t: distribute(onebit.ZeroOneAdam(), t, freeze_step=3), TypeError, "var_freeze_step, not freeze_step"),
        (lambda t: onebit.ZeroOneAdam(local_step_clipper=0), ValueError, "local_step_clipper must be an integer"),
        (lambda t: onebit.ZeroOneAdam(var_freez_step=3), TypeError, "unknown option 'var_freez_step'"),
        (lambda t: onebit.ZeroOneAdam(amsgrad=True), TypeError, "unknown option 'amsgrad'"),
        (lambda t: distribute(onebit.ZeroOneAdam(var_freeze_step=0), t), ValueError, "at least 1"),
        (
            lambda t: distribute(keras.optimizers.LossScaleOptimizer(onebit.ZeroOneAdam()), t),
            ValueError,
            "use bfloat16",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(make: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        on_ranks(1, make)


def test_its_configuration_comes_back() -> None:
    made = onebit.ZeroOneAdam(
        0.5, beta_2=0.9, bias_correction=False, var_freeze_step=7, local_step_scaler=5, dead="hold", weight_decay=0.1
    )
    config = keras.optimizers.serialize(made)
    again = keras.optimizers.deserialize(json.loads(json.dumps(config)))
    assert type(again) is onebit.ZeroOneAdam
    assert again.get_config() == made.get_config()
    assert again.compression_options == made.compression_options
    default = onebit.ZeroOneAdam().get_config()
    names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    assert [default[name] for name in names] == ["auto", 16, None, 16]
