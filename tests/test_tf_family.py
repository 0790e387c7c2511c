"""1-bit SGD and 1-bit LAMB in TensorFlow: against Keras, the oracle, and the promises every optimizer keeps."""

from __future__ import annotations

import json
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
from hvd_onebit.stats import COMPRESSION, WARM_UP
from hvd_onebit.tensorflow import engine
from hvd_onebit.transport.local import LocalTransport

SGD, Lamb = keras.optimizers.SGD, keras.optimizers.Lamb
SHAPES = ((12, 5), (5,), (40,))
FREEZE = 4
STEPS = 10

Make = Callable[..., Any]

# Keras's plain optimizer, and what may be given to all of a kind
FAMILY: dict[str, Make] = {
    "SGD": lambda **more: SGD(**{"learning_rate": 0.01, "momentum": 0.9, **more}),
    "OneBitSGD": lambda **more: onebit.OneBitSGD(**{"learning_rate": 0.01, "weight_decay": 0.1, **more}),
    "Lamb": lambda **more: Lamb(**{"learning_rate": 0.01, "beta_2": 0.95, **more}),
    "onebit.Lamb": lambda **more: onebit.Lamb(**{"learning_rate": 0.01, "beta_2": 0.95, "weight_decay": 0.1, **more}),
    "OneBitLamb": lambda **more: onebit.OneBitLamb(
        **{"learning_rate": 0.01, "beta_2": 0.95, "weight_decay": 0.1, **more}
    ),
}
LAMBS = [name for name in FAMILY if "Lamb" in name]

family = pytest.mark.parametrize("name", FAMILY)


def make(name: str, transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    """The optimizer on variables that it was built on."""
    trained = variables(SHAPES)
    given = {"freeze_step": FREEZE, "block": 16, "bucket_elements": 50, "exchange": "two_phase", **options}
    optimizer = distribute(FAMILY[name](), transport, **given)
    optimizer.build(trained)
    return optimizer, trained


def momenta(optimizer: Any, count: int = len(SHAPES)) -> list[Any]:
    return [optimizer.momentum_of(i).numpy().copy() for i in range(count)]


@pytest.mark.parametrize(("size", "exchange"), [(2, "one_shot"), (3, "two_phase"), (4, "two_phase")])
@family
def test_replicas_are_bit_equal_after_every_step(name: str, size: int, exchange: str) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport, exchange=exchange)
        every = []
        for step in range(STEPS):
            train(optimizer, trained, [step], transport.rank)
            every += [*snapshot(trained), *momenta(optimizer)]
            assert optimizer.stats.stage == (COMPRESSION if step >= FREEZE - 1 else WARM_UP)
        assert all(np.isfinite(array).all() for array in every)
        return every

    assert_replicas_equal(on_ranks(size, work))


# -- the oracle --------------------------------------------------------------------------------------------------------


def _flat(arrays: Sequence[Any]) -> Any:
    """In the bucket's order: last variable first."""
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in reversed(arrays)])


@pytest.mark.parametrize(("size", "freeze_step"), [(1, 5), (2, 0), (2, 5), (3, 5), (4, 0)])
def test_sgd_follows_the_oracle_step_by_step(size: int, freeze_step: int) -> None:
    """Keras's velocity is -lr times the paper's momentum, and as many bits are the others' opposite."""
    start = [v.numpy() for v in variables(SHAPES)]
    oracle = reference.OneBitSGD(
        _flat(start),
        num_workers=size,
        freeze_step=freeze_step if size > 1 else 10**9,
        lr=0.01,
        momentum=0.9,
        block=16,
        weight_decay=0.1,
    )
    expected = []
    for step in range(20):
        grads = [[gradient(step, rank, i, s) for i, s in enumerate(SHAPES)] for rank in range(size)]
        oracle.step_workers([_flat(g) for g in grads])
        expected.append((oracle.x.copy(), -0.01 * oracle.m))

    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)
        optimizer = distribute(
            onebit.OneBitSGD(0.01, weight_decay=0.1, decoupled_weight_decay=False, freeze_step=freeze_step),
            transport,
            block=16,
            exchange="one_shot",
        )
        for step, (x, velocity) in enumerate(expected):
            train(optimizer, trained, [step], transport.rank)
            np.testing.assert_allclose(_flat(snapshot(trained)), x, rtol=0, atol=1e-5, err_msg=f"step {step}")
            np.testing.assert_allclose(_flat(momenta(optimizer)), velocity, rtol=0, atol=1e-5)
        assert optimizer.stats.stage == (COMPRESSION if size > 1 else WARM_UP)

    on_ranks(size, work)


LAMB_ORACLES: dict[str, tuple[Make, dict[str, Any]]] = {
    "OneBitLamb": (lambda: onebit.OneBitLamb(0.01, 0.9, 0.95, 1e-8), {}),
    "weight decay": (lambda: onebit.OneBitLamb(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1), {"weight_decay": 0.1}),
    "bounds": (
        lambda: onebit.OneBitLamb(0.01, 0.9, 0.95, 1e-8, max_coeff=1.5, coeff_beta=0.7, factor_max=1.2),
        {"max_coeff": 1.5, "coeff_beta": 0.7, "factor_max": 1.2},
    ),
    "Keras's": (lambda: Lamb(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1), {"max_coeff": np.inf, "min_coeff": 0.0}),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("OneBitLamb", size) for size in (1, 2, 3, 4)),
        *((name, size) for name in ("weight decay", "bounds", "Keras's") for size in (1, 3)),
    ],
)
def test_lamb_follows_the_oracle_step_by_step(name: str, size: int) -> None:
    create, numbers = LAMB_ORACLES[name]
    oracle = reference.OneBitLamb(
        [v.numpy().ravel() for v in variables(SHAPES)],
        num_workers=size,
        freeze_step=6 if size > 1 else 10**9,
        lr=0.01,
        betas=(0.9, 0.95),
        block=2048,
        buffer_order=range(len(SHAPES) - 1, -1, -1),
        **numbers,
    )
    expected = []
    for step in range(20):
        grads = [[gradient(step, rank, i, s).ravel() for i, s in enumerate(SHAPES)] for rank in range(size)]
        if name == "Keras's":
            # weight decay acts beside the update, and before it
            oracle.xs = [x * (1 - 0.01 * 0.1) for x in oracle.xs]
        oracle.step_workers([[g.astype(np.float64) for g in each] for each in grads])
        expected.append([x.copy() for x in oracle.xs])

    def work(transport: LocalTransport) -> Any:
        trained = variables(SHAPES)
        optimizer = distribute(create(), transport, freeze_step=6, exchange="one_shot")
        for step, xs in enumerate(expected):
            train(optimizer, trained, [step], transport.rank)
            for mine, theirs in zip(snapshot(trained), xs, strict=True):
                np.testing.assert_allclose(mine.ravel(), theirs, rtol=0, atol=2e-5, err_msg=f"step {step}")
        return optimizer.stats.trust_ratios

    for ratios in on_ranks(size, work):
        if size > 1:
            assert [ratio.factor for ratio in ratios.values()] == pytest.approx(oracle.r_last[::-1], rel=1e-4)
            assert [ratio.average for ratio in ratios.values()] == pytest.approx(
                [oracle.coefficient(k) for k in reversed(range(len(SHAPES)))], rel=1e-4
            )


# -- warm-up -----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "weight decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "moving average": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)},
    "loss_scale_factor": {"loss_scale_factor": 8.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["SGD", "OneBitSGD", "Lamb"])
def test_warm_up_is_kerass_own_optimizer(name: str, option: str) -> None:
    """Exactly freeze_step updates on the averaged gradient: SGD to the bit, Lamb to a few ulp of its norms."""
    size = 3
    plain = FAMILY[name.removeprefix("OneBit")](**{"weight_decay": 0.1, **OPTIONS[option]})
    plain_variables = variables(SHAPES)
    for step in range(FREEZE):
        plain.apply([tf.constant(g) for g in mean_gradients(step, size, SHAPES)], plain_variables)
    expected = snapshot(plain_variables)

    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)
        optimizer = distribute(
            FAMILY[name](**{"weight_decay": 0.1, **OPTIONS[option]}), transport, freeze_step=FREEZE, check_every=0
        )
        train(optimizer, trained, range(FREEZE), transport.rank)
        assert optimizer.stats.frozen_step == FREEZE
        assert optimizer.stats.bytes_sent[COMPRESSION] == 0
        if name == "Lamb":
            for mine, theirs in zip(snapshot(trained), expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=4 * 2**-23, atol=4 * 2**-23)
        else:
            assert_bit_equal(snapshot(trained), expected, option)
        train(optimizer, trained, [FREEZE], transport.rank)
        assert optimizer.stats.bytes_sent[COMPRESSION] > 0

    on_ranks(size, work)


@pytest.mark.parametrize("correct", [True, False])
def test_plain_lamb_is_its_formula(correct: bool) -> None:
    """In one process, bounds included; the float64 oracle has no option bias_correction."""
    trained = variables(SHAPES)
    xs = [v.numpy().astype(np.float64) for v in trained]
    ms, vs = [np.zeros_like(x) for x in xs], [np.zeros_like(x) for x in xs]
    optimizer = onebit.Lamb(0.02, weight_decay=0.1, bias_correction=correct, max_coeff=1.1, min_coeff=0.9)
    for step in range(1, 8):
        train(optimizer, trained, [step], 0)
        for k, shape in enumerate(SHAPES):
            g = gradient(step, 0, k, shape).astype(np.float64)
            ms[k], vs[k] = 0.9 * ms[k] + 0.1 * g, 0.999 * vs[k] + 0.001 * g**2
            first, second = (1 - 0.9**step, 1 - 0.999**step) if correct else (1.0, 1.0)
            u = ms[k] / first / (np.sqrt(vs[k] / second) + 1e-7) + 0.1 * xs[k]
            xs[k] = xs[k] - 0.02 * np.clip(np.linalg.norm(xs[k]) / np.linalg.norm(u), 0.9, 1.1) * u
    for v, x in zip(trained, xs, strict=True):
        np.testing.assert_allclose(v.numpy(), x, rtol=0, atol=5e-6)


@family
def test_one_rank_is_the_plain_optimizer(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, theirs = FAMILY[name](), variables(SHAPES)
    train(plain, theirs, range(STEPS), 0)

    def alone(transport: LocalTransport) -> None:
        optimizer, trained = make(name, transport)
        train(optimizer, trained, range(STEPS), 0)
        np.testing.assert_allclose(_flat(snapshot(trained)), _flat(snapshot(theirs)), rtol=1e-6, atol=1e-7)

    on_ranks(1, alone)
    assert "one rank" in caplog.text


# -- LAMB's numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAMBS)
def test_lamb_freezes_the_true_average_of_its_coefficient(name: str) -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        trained = [keras.Variable(np.full(50, 3.0, np.float32), name="p")]
        optimizer = distribute(FAMILY[name](learning_rate=1e-4, weight_decay=None), transport, freeze_step=3)
        seen = []
        for step in range(5):
            x = float(np.linalg.norm(trained[0].numpy().astype(np.float64)))
            optimizer.apply([tf.ones([50])], trained)  # so u is all ones
            if step < 3:
                seen.append(x)
        (ratio,) = optimizer.stats.trust_ratios.values()
        return ratio.average, float(np.mean(seen)) / 50**0.5

    (average, expected), _ = on_ranks(2, work)
    assert average == pytest.approx(expected, rel=1e-2)


def test_lamb_tells_its_trust_ratios_by_name() -> None:
    def work(transport: LocalTransport) -> Any:
        optimizer, trained = make("OneBitLamb", transport)
        train(optimizer, trained, range(STEPS), transport.rank)
        assert set(optimizer.stats.trust_ratios) == {v.path for v in trained}
        return list(optimizer.stats.trust_ratios.values())

    first, second = on_ranks(2, work)
    assert first == second
    assert len({ratio.factor for ratio in first}) > 1
    for ratio in first:
        assert 0.5 <= ratio.factor <= 4.0
        assert 0.01 <= ratio.average <= 10.0


# -- what could go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", ["floor", "hold"])
@family
def test_zero_momentum_and_unused_variables(name: str, dead: str) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        trained = variables([(9,), (9,), (9,), (0,), (), (20, 4), (1,)])
        trained[1].assign(tf.zeros(9))  # a norm of zero
        before = snapshot(trained)
        decay = 0.1 if dead == "hold" else None
        optimizer = distribute(FAMILY[name](weight_decay=decay), transport, freeze_step=3, dead=dead)
        for step in range(8):
            if step == 3:
                at_the_freeze = snapshot(trained)
            rows = gradient(step, transport.rank, 5, (20, 4))
            rows[15:] = 0.0  # rows that are never touched
            one = tf.ones([9]) * (1.0 + transport.rank)
            optimizer.apply(
                [one, one, None, tf.ones([0]), tf.constant(2.0), tf.constant(rows), tf.constant([0.5])], trained
            )
        after = snapshot(trained)
        assert all(np.isfinite(array).all() for array in after)
        assert (after[1] < 0).all()
        assert after[4] < before[4]
        moved = np.abs(after[5] - before[5])
        assert moved[15:].max() <= 3 * moved[:15].max()
        if "SGD" not in name:
            # there is a variance to tell what has no gradient; without one it moves by its block's rounding
            if dead == "hold":
                assert_bit_equal([after[5][15:]], [at_the_freeze[5][15:]])
            else:
                assert_bit_equal([after[2]], [before[2]])
        return [*after, *momenta(optimizer, len(after))]

    assert_replicas_equal(on_ranks(2, work))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("SGD", "float16"),
        ("OneBitSGD", "bfloat16"),
        ("Lamb", "bfloat16"),
        ("onebit.Lamb", "float16"),
        ("OneBitLamb", "float16"),
        ("OneBitLamb", "bfloat16"),
    ],
)
def test_half_precision(name: str, dtype: str) -> None:
    shapes = ((0,), (), (1,), (3, 3), (17,))

    def work(transport: LocalTransport) -> list[Any]:
        trained = variables(shapes, dtype=dtype)
        start = [v.numpy().astype(np.float32) for v in trained]
        optimizer = distribute(FAMILY[name](learning_rate=0.05, weight_decay=None), transport, freeze_step=2)
        for step in range(6):
            grads = [tf.cast(gradient(step, transport.rank, i, s), dtype) for i, s in enumerate(shapes)]
            optimizer.apply(grads, trained)
        after = [v.numpy().astype(np.float32) for v in trained]
        assert all(np.isfinite(a).all() for a in after)
        assert all((a != b).any() or not a.size for a, b in zip(after, start, strict=True))
        return after

    assert_replicas_equal(on_ranks(3, work))


@pytest.mark.parametrize("name", ["SGD", "OneBitSGD"])
def test_weight_decay_acts_in_both_stages(name: str) -> None:
    """A tensor without gradients shrinks by lr*wd a step; LAMB's weight decay is in the oracle's test."""

    def work(transport: LocalTransport) -> None:
        trained = [keras.Variable(np.full(40, 2.0, np.float32), name="p")]
        optimizer = distribute(FAMILY[name](weight_decay=0.1), transport, freeze_step=3)
        for _ in range(6):
            before = snapshot(trained)[0]
            optimizer.apply([tf.zeros([40])], trained)
            np.testing.assert_allclose(snapshot(trained)[0] / before, 1 - 0.01 * 0.1, rtol=1e-6)
        assert optimizer.stats.stage == COMPRESSION

    on_ranks(2, work)


@family
def test_a_tensor_in_full_precision_follows_the_plain_optimizer_for_ever(name: str) -> None:
    plain, theirs = FAMILY[name](), variables(SHAPES)
    for step in range(STEPS):
        plain.apply([tf.constant(g) for g in mean_gradients(step, 2, SHAPES)], theirs)

    def work(transport: LocalTransport) -> None:
        optimizer, trained = make(name, transport, full_precision=["*p1"])
        train(optimizer, trained, range(STEPS), transport.rank)
        assert optimizer.stats.full_precision_elements == 5
        np.testing.assert_allclose(trained[1].numpy(), theirs[1].numpy(), rtol=1e-6, atol=1e-7)
        assert np.abs(trained[0].numpy() - theirs[0].numpy()).max() > 1e-5

    on_ranks(2, work)


@family
def test_a_nan_on_one_rank_skips_the_step_everywhere(name: str) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport)
        for step in range(STEPS):
            if step in (2, 7):
                grads = [gradient(99, transport.rank, i, s) for i, s in enumerate(SHAPES)]
                if transport.rank == 1:
                    grads[step % 3].flat[0] = np.nan
                before = [v.numpy().copy() for v in optimizer.variables] + snapshot(trained)
                optimizer.apply([tf.constant(g) for g in grads], trained)
                assert_bit_equal([v.numpy() for v in optimizer.variables] + snapshot(trained), before)
            train(optimizer, trained, [step], transport.rank)
        assert optimizer.stats.steps_skipped == 2
        return snapshot(trained)

    assert_replicas_equal(on_ranks(3, work))


HOLD = {"dead": "hold", "scale": "mean"}
BY_TENSOR = {"block": "tensor", "exchange": "one_shot"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", HOLD),
        ("OneBitSGD", BY_TENSOR),
        ("OneBitSGD", {"freeze_step": 0}),
        ("Lamb", {}),
        ("Lamb", BY_TENSOR),
        ("OneBitLamb", HOLD),
        ("OneBitLamb", {"error_feedback": False, "variance_floor": 0.1}),
    ],
)
def test_operations_and_kernels_train_alike(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of other devices, here on the CPU; LAMB's norms are summed in another order."""

    def work(transport: LocalTransport) -> tuple[list[Any], list[Any]]:
        optimizer, trained = make(name, transport, **options)
        for step in range(STEPS):
            grads = [gradient(step, transport.rank, i, s) for i, s in enumerate(SHAPES)]
            grads[2][30:] = 0.0
            optimizer.apply([tf.constant(g) for g in grads], trained)
        errors = [error for bucket in buckets_of(optimizer) for error in bucket.errors().values() if error is not None]
        return [*snapshot(trained), *momenta(optimizer)], [error.copy() for error in errors]

    by_kernels = on_ranks(2, work)
    monkeypatch.setattr(engine, "is_on_host", lambda variables: False)
    by_operations = on_ranks(2, work)
    assert_replicas_equal([arrays for arrays, _ in by_operations])
    for (x, errors), (other_x, other_errors) in zip(by_kernels, by_operations, strict=True):
        if "SGD" in name:
            assert_bit_equal(other_x, x, "parameters")
            assert_bit_equal(other_errors, errors, "errors")
        else:
            for mine, theirs in zip([*other_x, *other_errors], [*x, *errors], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "OneBitLamb"])
def test_accumulation_makes_one_exchange_of_many_passes(name: str) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        trained = variables(SHAPES)
        optimizer = distribute(FAMILY[name](gradient_accumulation_steps=2), transport, freeze_step=2)
        train(optimizer, trained, range(8), transport.rank)
        assert optimizer.stats.step == 4
        assert optimizer.stats.bytes_sent[COMPRESSION] == 2 * optimizer.stats.bytes_per_step[COMPRESSION]
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "freeze_step"), [*((name, FREEZE) for name in FAMILY), ("SGD", "auto"), ("OneBitLamb", "auto")]
)
def test_resume_is_bit_for_bit(name: str, freeze_step: Any) -> None:
    """Stopped before, at and after the freeze."""
    stops = (1, FREEZE - 1, FREEZE, FREEZE + 1, FREEZE + 3)
    options = {"freeze_step": freeze_step, **({"freeze_latest_step": FREEZE} if freeze_step == "auto" else {})}

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport, **options)
        saved = {}
        for step in range(STEPS):
            if step in stops:
                saved[step] = save(optimizer, trained)
            train(optimizer, trained, [step], transport.rank)
        expected = save(optimizer, trained)
        for stop in stops:
            optimizer, trained = make(name, transport, **options)
            restore(optimizer, trained, saved[stop])
            train(optimizer, trained, range(stop, STEPS), transport.rank)
            again = save(optimizer, trained)
            assert_bit_equal(again[1], expected[1], f"stopped at {stop}")
            assert_bit_equal(list(again[0].values()), list(expected[0].values()), f"state, stopped at {stop}")
        return expected[1]

    assert_replicas_equal(on_ranks(2, work))


@pytest.mark.parametrize(("freeze_step", "stage"), [(2, COMPRESSION), (20, WARM_UP)])
@pytest.mark.parametrize("name", ["SGD", "Lamb", "OneBitLamb"])
def test_resume_with_another_freeze_step(
    name: str, freeze_step: int, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport)
        train(optimizer, trained, range(7), transport.rank)
        saved = save(optimizer, trained)
        fresh = [v.numpy() for v in optimizer._engine.value.fresh]
        optimizer, trained = make(name, transport, freeze_step=freeze_step)
        restore(optimizer, trained, saved)
        assert optimizer.stats.stage == stage
        if fresh and stage == WARM_UP:
            # the variance that has been kept up to date is the live one
            assert_bit_equal([optimizer.variance_of(i).numpy() for i in range(len(SHAPES))], fresh)
        train(optimizer, trained, range(7, 9), transport.rank)
        assert optimizer.stats.stage == stage
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))
    assert ("back to warm-up" in caplog.text) == (stage == WARM_UP)


def test_sgd_without_a_warm_up_resumes_and_thaws() -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("OneBitSGD", transport, freeze_step=0)
        assert optimizer.stats.stage == COMPRESSION
        train(optimizer, trained, range(3), transport.rank)
        assert optimizer.stats.bytes_sent[WARM_UP] == 0
        saved = save(optimizer, trained)
        train(optimizer, trained, range(3, 6), transport.rank)
        expected = snapshot(trained)
        optimizer, trained = make("OneBitSGD", transport, freeze_step=0)
        restore(optimizer, trained, saved)
        train(optimizer, trained, range(3, 6), transport.rank)
        assert_bit_equal(snapshot(trained), expected)
        optimizer, trained = make("OneBitSGD", transport, freeze_step=5)
        restore(optimizer, trained, saved)
        assert optimizer.stats.stage == WARM_UP
        train(optimizer, trained, range(3, 6), transport.rank)
        assert optimizer.stats.frozen_step == 5
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


@family
def test_a_damaged_checkpoint_is_refused_and_a_plain_one_is_taken(name: str) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport)
        train(optimizer, trained, range(6), transport.rank)
        store, _ = save(optimizer, trained)
        last = str(len(optimizer.variables) - 1)
        about = json.loads(store["onebit.about"].tobytes())
        newer = np.frombuffer(json.dumps({**about, "version": 99}).encode(), np.uint8)
        damaged = {
            "optimizer variables": {key: array for key, array in store.items() if key != last},
            "shape": {**store, "4": store["4"][:1]},
            "holds NaN": {**store, "3": np.full_like(store["3"], np.nan)},
            "upgrade": {**store, "onebit.about": newer},
        }
        for reason, each in damaged.items():
            with pytest.raises(ValueError, match=reason):
                optimizer.load_own_variables(each)
        again, _ = save(optimizer, trained)
        assert_bit_equal(list(again.values()), list(store.values()))

        plain, theirs = FAMILY[name](), variables(SHAPES)
        train(plain, theirs, range(3), 0)
        store = {}
        plain.save_own_variables(store)
        optimizer, trained = make(name, transport)
        restore(optimizer, trained, (store, snapshot(theirs)))
        assert (optimizer.stats.step, optimizer.stats.stage) == (3, WARM_UP)
        assert_bit_equal(
            [optimizer.momentum_of(2).numpy()], [(plain.momentums if "SGD" in name else plain._momentums)[2].numpy()]
        )
        train(optimizer, trained, range(3, 6), transport.rank)
        assert optimizer.stats.frozen_step == FREEZE
        # and so is an optimizer that was used before it was wrapped
        used = distribute(plain, transport, freeze_step=FREEZE)
        assert int(used.iterations.numpy()) == 3
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "options", "error", "text"),
    [
        (lambda: SGD(0.1), {}, ValueError, "SGD without momentum"),
        (lambda: SGD(0.1, momentum=0.9, nesterov=True), {}, ValueError, "nesterov=True"),
        (lambda: onebit.OneBitSGD(nesterov=True), {}, TypeError, "nesterov"),
        (lambda: onebit.OneBitSGD(freeze_stp=3), {}, TypeError, "did you mean 'freeze_step'"),
        (lambda: onebit.OneBitSGD(), {"space": "update"}, ValueError, 'OneBitSGD takes space="momentum" only'),
        (lambda: Lamb(), {"freeze_step": 0}, ValueError, "at least 1"),
        (lambda: onebit.OneBitLamb(max_coef=3.0), {}, TypeError, "max_coef"),
        (lambda: onebit.OneBitLamb(factor_min=5.0), {}, ValueError, "factor_min"),
        (lambda: onebit.OneBitLamb(factor_threshold=1.0), {}, ValueError, "factor_threshold"),
        (lambda: onebit.Lamb(beta_2=1.0), {}, ValueError, r"beta_2 must be in \[0.0, 1.0\)"),
        (lambda: onebit.Lamb(max_coeff=0.001), {}, ValueError, "must not be below min_coeff"),
        (lambda: Lamb(beta_1=lambda: 0.9), {}, TypeError, "beta_1 must be a number"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(create: Any, options: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        on_ranks(1, lambda transport: distribute(create(), transport, **options))


CONFIGURATIONS: dict[str, Make] = {
    "OneBitSGD": lambda: onebit.OneBitSGD(0.02, 0.8, weight_decay=0.1, freeze_step=3, full_precision=["*bias"]),
    "OneBitSGD from the start": lambda: onebit.OneBitSGD(decoupled_weight_decay=False),
    "Lamb": lambda: onebit.Lamb(0.02, max_coeff=5.0, coeff_beta=0.8, bias_correction=False, weight_decay=0.1),
    "OneBitLamb": lambda: onebit.OneBitLamb(0.02, min_coeff=0.1, factor_max=2.0, factor_threshold=0.2, freeze_step=9),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_configuration_makes_the_same_again(name: str) -> None:
    optimizer = CONFIGURATIONS[name]()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert getattr(again, "compression_options", None) == getattr(optimizer, "compression_options", None)
    assert getattr(again, "lamb_factors", None) == getattr(optimizer, "lamb_factors", None)


def test_the_defaults_are_those_of_the_torch_module() -> None:
    pytest.importorskip("torch")
    import inspect

    import hvd_onebit.torch as other

    here = {"lr": "learning_rate"}  # Keras's own names and defaults for what is Keras's
    for name in ("Lamb", "OneBitLamb", "OneBitSGD"):
        mine = inspect.signature(getattr(onebit, name)).parameters
        for key, theirs in inspect.signature(getattr(other, name)).parameters.items():
            if key in mine and key not in here:
                assert mine[key].default == theirs.default, f"{name}, {key}"


# -- variables that are left out ---------------------------------------------------------------------------------------

TRAINED: dict[str, Make] = {
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Lamb, weight decay": lambda: Lamb(0.01, weight_decay=0.1),
    "SGD, weight decay": lambda: SGD(0.01, momentum=0.9, weight_decay=0.1),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01), initial_scale=4.0),
    "accumulation": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
}


def _train_some(optimizer: Any, trained: Sequence[Any], steps: Sequence[int], rank: int, left_out: int) -> None:
    some = [(i, v) for i, v in enumerate(trained) if i != left_out]
    for step in steps:
        optimizer.apply([tf.constant(gradient(step, rank, i, tuple(v.shape))) for i, v in some], [v for _, v in some])


@pytest.mark.parametrize("full_precision", [(), ("p0",)], ids=["compressed", "in full precision"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_variable_that_is_left_out_stays_where_it_is(name: str, full_precision: tuple[str, ...]) -> None:
    """In both stages, as in Keras; a layer is frozen when the model is compiled again with the same optimizer."""

    def work(transport: LocalTransport) -> list[Any]:
        trained = variables(SHAPES)
        optimizer = distribute(TRAINED[name](), transport, freeze_step=4, full_precision=full_precision)
        optimizer.build(trained)
        for steps, stage in ((range(4), WARM_UP), (range(4, 16), COMPRESSION)):
            train(optimizer, trained, [*steps][:2], transport.rank)
            before = snapshot(trained)
            _train_some(optimizer, trained, [*steps][2:], transport.rank, left_out=0)
            assert_bit_equal([snapshot(trained)[0]], before[:1], stage)
            assert all((mine != theirs).any() for mine, theirs in zip(snapshot(trained)[1:], before[1:], strict=True))
        assert optimizer.stats.bytes_sent[COMPRESSION]
        before = snapshot(trained)
        train(optimizer, trained, [20, 21], transport.rank)
        assert (trained[0].numpy() != before[0]).all()
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


def test_ranks_that_leave_out_different_variables_all_raise() -> None:
    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)
        optimizer = distribute(keras.optimizers.Adam(0.01), transport, freeze_step=2)
        optimizer.build(trained)
        with pytest.raises(onebit.OneBitError, match="variables that are not trained"):
            _train_some(optimizer, trained, [0], transport.rank, left_out=transport.rank)

    on_ranks(2, work)


def test_zero_one_adam_leaves_none_out() -> None:
    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)
        optimizer = distribute(onebit.ZeroOneAdam(0.01, var_freeze_step=2), transport)
        optimizer.build(trained)
        with pytest.raises(ValueError, match="an optimizer of their own"):
            _train_some(optimizer, trained, [0], transport.rank, left_out=0)

    on_ranks(2, work)


@pytest.mark.parametrize("name", ["SGD", "Lamb"])
def test_an_optimizer_that_was_used_goes_on_with_more_backward_passes(name: str) -> None:
    """The plain optimizer has no variables for the sum of gradients."""
    plain, trained = FAMILY[name](), variables(SHAPES)
    train(plain, trained, range(3), 0)
    expected = {v.path.split("/")[-1]: v.numpy().copy() for v in plain.variables if "iteration" not in v.path}

    def work(transport: LocalTransport) -> None:
        optimizer = distribute(plain, transport, backward_passes_per_step=2, freeze_step=50)
        mine = {v.path.split("/")[-1]: v.numpy() for v in optimizer.variables}
        assert_bit_equal([mine[key] for key in expected], list(expected.values()))
        assert int(optimizer.iterations) == 3
        train(optimizer, trained, [3, 4], transport.rank)
        assert int(optimizer.iterations) == 4

    on_ranks(1, work)


def test_lamb_in_update_space_is_lamb() -> None:
    """With one scale an element nothing is lost, so that it does not matter what is sent."""

    def trained(space: str) -> list[Any]:
        def work(transport: LocalTransport) -> list[Any]:
            optimizer, trained = make("OneBitLamb", transport, space=space, block=1, exchange="one_shot")
            train(optimizer, trained, range(2 * STEPS), transport.rank)
            return snapshot(trained)

        by_rank = on_ranks(2, work)
        assert_replicas_equal(by_rank)
        return by_rank[0]

    for one, other in zip(trained("momentum"), trained("update"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
