"""Checks of hvd_onebit.tensorflow under a real launcher: see rank_checks.py."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_checks import FOLDER, check, heard, run_checks
from tf_training import SHAPES, assert_bit_equal, gradients, snapshot, train, variables

import hvd_onebit.tensorflow as onebit
from hvd_onebit.state import owed_by_parameter
from hvd_onebit.stats import COMPRESSION, WARM_UP
from hvd_onebit.tensorflow.callbacks import broadcast_variables
from hvd_onebit.tensorflow.engine import unpack_errors

Adam, AdamW = keras.optimizers.Adam, keras.optimizers.AdamW

# -- helpers --


def distribute(optimizer: Any, **options: Any) -> Any:
    return onebit.DistributedOptimizer(
        optimizer, **{"check_every": 1, "bucket_elements": 3000, "measure": False, **options}
    )


def model(*, built: bool = True, dropout: float = 0.1) -> keras.Model:
    """Another one on every rank, until it's broadcast."""
    keras.utils.set_random_seed(1 + hvd.rank())
    first = [keras.Input((64,))] if built else []
    return keras.Sequential(
        [*first, keras.layers.Dense(100, activation="relu"), keras.layers.Dropout(dropout), keras.layers.Dense(10)]
    )


def data(rank: int, count: int = 12) -> tuple[Any, Any]:
    """This rank's batches of 16."""
    rng = np.random.default_rng(5 + rank)
    x = rng.standard_normal((16 * count, 64)).astype(np.float32)
    return x, (x @ np.random.default_rng(3).standard_normal((64, 10))).argmax(1)


def fit(network: keras.Model, optimizer: Any, *, epochs: int = 1, callbacks: Sequence[Any] = (), **how: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss, metrics=["accuracy"], **how)
    start = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
    x, y = data(hvd.rank())
    return network.fit(x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=[start, *callbacks])


def assert_replicas(arrays: Sequence[Any], what: str = "") -> None:
    for rank, replica in enumerate(hvd.allgather_object(list(arrays))):
        assert_bit_equal(replica, list(arrays), f"rank {rank} {what}")


def state_of(network: keras.Model) -> list[Any]:
    return [*network.get_weights(), *(np.array(v.numpy()) for v in network.optimizer.variables)]


# -- checks --


@check
def fit_keeps_replicas_equal() -> None:
    """The model is built at its first batch; two buckets, both exchanges."""
    for exchange in ("one_shot", "two_phase"):
        network = model(built=False)
        optimizer = distribute(AdamW(0.01, beta_2=0.9), freeze_step=5, exchange=exchange)
        fit(network, optimizer)
        assert optimizer.stats.stage == COMPRESSION
        assert optimizer.stats.step == 12
        assert_replicas(state_of(network), exchange)


@check
def warm_up_is_one_process_with_the_joint_batch() -> None:
    network = model(dropout=0.0)
    hvd.broadcast_variables([v.value for v in network.weights], 0)
    joint = keras.models.clone_model(network)
    joint.set_weights(network.get_weights())
    fit(network, distribute(Adam(0.01), freeze_step=100))
    joint.compile(Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    parts = [data(rank) for rank in range(hvd.size())]
    x, y = (np.concatenate([p[i].reshape(12, 16, *p[i].shape[1:]) for p in parts], 1) for i in (0, 1))
    for step in range(12):
        joint.train_on_batch(x[step], y[step])
    for mine, theirs in zip(network.get_weights(), joint.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@check
def other_ways_to_run() -> None:
    """Eagerly, several steps an execution, gradient accumulation."""
    base = model(dropout=0.0)
    hvd.broadcast_variables([v.value for v in base.weights], 0)
    results = []
    for how in ({}, {"run_eagerly": True}, {"steps_per_execution": 3}):
        network = keras.models.clone_model(base)
        network.set_weights(base.get_weights())
        fit(network, distribute(Adam(0.01, beta_2=0.9), freeze_step=4), **how)
        assert_replicas(state_of(network), str(how))
        results.append(network.get_weights())
    for other in results[1:]:
        for mine, theirs in zip(other, results[0], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-3)


@check
def accumulation() -> None:
    network = model()
    optimizer = distribute(Adam(0.01, beta_2=0.9, gradient_accumulation_steps=2), freeze_step=3)
    fit(network, optimizer)
    assert optimizer.stats.step == 6
    assert optimizer.stats.bytes_sent[COMPRESSION] == 3 * optimizer.stats.bytes_per_step[COMPRESSION]
    assert_replicas(state_of(network))


@check
def mixed_float16_with_an_overflow_on_one_rank() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        network = model()
        scaling = keras.optimizers.LossScaleOptimizer(Adam(0.01, beta_2=0.9), initial_scale=2.0**8)
        optimizer = distribute(scaling, freeze_step=3)
        x, y = data(hvd.rank())
        if hvd.rank() == 1:
            x[16 * 6] = 6e4  # in the seventh batch only
        network.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        start = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
        network.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[start])
        assert optimizer.stats.stage == COMPRESSION
        assert optimizer.stats.steps_skipped == 1, optimizer.stats
        assert optimizer.stats.step == 11
        assert_replicas(state_of(network))
    finally:
        keras.config.set_dtype_policy("float32")


@check
def bfloat16_variables() -> None:
    """They are broadcast bit for bit, and averaged as float32: Horovod's operations do not know bfloat16."""
    keras.config.set_dtype_policy("bfloat16")
    try:
        network = model()
        before = hvd.broadcast_object(network.get_weights(), 0)
        optimizer = distribute(Adam(0.01, beta_2=0.9, epsilon=1e-4), freeze_step=5)
        broadcast_variables(network.weights, 0, hvd.global_process_set)
        assert_bit_equal(network.get_weights(), before, "broadcast")
        fit(network, optimizer)
        assert optimizer.stats.step == 12
        assert optimizer.stats.bytes_per_step[WARM_UP] >= 4 * network.count_params(), optimizer.stats
        assert_replicas(state_of(network))
    finally:
        keras.config.set_dtype_policy("float32")


@check
def jit_compile_is_refused_on_all_ranks() -> None:
    with pytest.raises(ValueError, match="jit_compile=True cannot be served"):
        fit(model(), distribute(Adam(0.01), freeze_step=3), jit_compile=True)


@check
def custom_loop() -> None:
    """tf.GradientTape inside tf.function, two optimizers, a learning rate schedule."""
    one, two = variables(), variables(seed=1)
    schedule = keras.optimizers.schedules.CosineDecay(0.02, 20)
    first = distribute(Adam(schedule, beta_2=0.9), freeze_step=3)
    second = distribute(onebit.OneBitAdam(0.01, beta_2=0.9, freeze_step=6), exchange="two_phase")
    for optimizer, trained in ((first, one), (second, two)):
        optimizer.build(trained)

    @tf.function
    def step(given: Any) -> None:
        for optimizer, trained in ((first, one), (second, two)):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v.value * g) for v, g in zip(trained, given, strict=True)])
            optimizer.apply(tape.gradient(loss, [v.value for v in trained]), trained)

    for i in range(9):
        step([tf.constant(g) for g in gradients(i, hvd.rank(), SHAPES)])
    assert (first.stats.frozen_step, second.stats.frozen_step) == (3, 6)
    assert_replicas([*snapshot(one), *snapshot(two)])


@check
def functions_that_are_dropped_leave_nothing() -> None:
    """What was traced goes with the function: the optimizer, its errors and all that it holds."""

    def train() -> list[weakref.ref[Any]]:
        network = model()
        optimizer = distribute(keras.optimizers.Adam(0.01, beta_2=0.9), freeze_step=2)
        fit(network, optimizer)
        assert optimizer.stats.stage == COMPRESSION
        engine = optimizer._engine.value
        return [weakref.ref(each) for each in (optimizer, engine, *engine._buckets)]

    for seen in [train() for _ in range(3)]:
        gc.collect()
        alive = [each() for each in seen if each() is not None]
        assert not alive, alive


@check
def local_clipping() -> None:
    """In a graph; with one rank's gradients far too large."""
    trained, twins = variables(), variables()
    optimizer = distribute(Adam(0.01), freeze_step=2, local_clip_norm=1.0)
    twin = distribute(Adam(0.01), freeze_step=2)
    for step in range(5):
        own = [1e3 * (1 + hvd.rank()) * g for g in gradients(step, hvd.rank(), SHAPES)]
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in own))
        optimizer.apply([tf.constant(g, tf.float32) for g in own], trained)
        twin.apply([tf.constant(g / norm, tf.float32) for g in own], twins)
        assert_replicas(snapshot(trained), f"step {step}")
    for mine, theirs in zip(snapshot(trained), snapshot(twins), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@check
def what_was_read_before_stays_as_it_was() -> None:
    """Arrays are handed to TensorFlow and used again: never while anybody holds them."""
    trained = variables([(4096,), (33,), (64, 64)])
    optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=1, bucket_elements=10**6)
    held = []
    for step in range(8):
        train(optimizer, trained, [step], hvd.rank())
        for i, v in enumerate(trained):
            held += [(t, t.numpy().copy()) for t in (tf.identity(v.value), tf.identity(optimizer.momentum_of(i)))]
    for tensor, copy in held:
        np.testing.assert_array_equal(tensor.numpy(), copy)
    # and they are used again once nobody does
    del held[:], tensor
    train(optimizer, trained, range(8, 12), hvd.rank())
    blocks = len(optimizer._engine.value._buckets[0]._memory._blocks)
    train(optimizer, trained, range(12, 20), hvd.rank())
    assert len(optimizer._engine.value._buckets[0]._memory._blocks) == blocks


@check
def momentum_is_kept_as_bits() -> None:
    """In a graph, too; a broadcast shows it, and training goes on from what it brought."""
    runs = []
    for looks in (False, True):
        trained = variables()
        optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=2)
        train(optimizer, trained, range(5), hvd.rank())
        raw = optimizer._engine.value._momenta
        assert not any(int(tf.size(v.read_value())) for v in raw)
        if looks:
            broadcast_variables(optimizer.variables, 0, hvd.global_process_set)
            assert all(int(tf.size(v.read_value())) for v in raw)
        train(optimizer, trained, range(5, 8), hvd.rank())
        assert not any(int(tf.size(v.read_value())) for v in raw)
        runs.append([*snapshot(trained), *(v.numpy() for v in optimizer.variables)])
    assert_bit_equal(runs[1], runs[0])
    assert_replicas(runs[0])


@check
def nan_on_one_rank() -> None:
    for stage in (WARM_UP, COMPRESSION):
        trained = variables()
        optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=2 if stage == COMPRESSION else 100)
        train(optimizer, trained, range(4), hvd.rank())
        assert optimizer.stats.stage == stage
        before = snapshot(trained)
        given = gradients(4, hvd.rank(), SHAPES)
        if hvd.rank() == 1:
            given[2][3] = np.nan
        optimizer.apply([tf.constant(g) for g in given], trained)
        assert_bit_equal(snapshot(trained), before)
        assert optimizer.stats.steps_skipped == 1
        train(optimizer, trained, [5], hvd.rank())
        assert optimizer.stats.step == 5
        assert_replicas(snapshot(trained), stage)


@check
def a_gradient_that_one_rank_lacks() -> None:
    """As if it were zero there."""
    trained, twins = variables(), variables()
    optimizer, twin = (distribute(Adam(0.01, beta_2=0.9), freeze_step=2) for _ in range(2))
    for step in range(4):
        given: list[Any] = [tf.constant(g) for g in gradients(step, hvd.rank(), SHAPES)]
        if hvd.rank() == 0:
            given[1] = given[2] = None
        optimizer.apply(given, trained)
        filled = [tf.zeros(shape) if g is None else g for g, shape in zip(given, SHAPES, strict=True)]
        twin.apply(filled, twins)
    assert_replicas(snapshot(trained))
    assert_bit_equal(snapshot(trained), snapshot(twins))


@check
def saved_models_go_on_bit_for_bit() -> None:
    """Each rank its own file, as compression errors are its own; stopped in both stages."""
    network = model(dropout=0.0)
    optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=14, exchange="two_phase")
    fit(network, optimizer)
    path = FOLDER / f"model-{hvd.rank()}.keras"
    x, y = data(hvd.rank())
    for stage in (WARM_UP, COMPRESSION):
        assert network.optimizer.stats.stage == stage
        network.save(path)
        again = keras.models.load_model(path)
        assert type(again.optimizer) is type(optimizer)
        for each in (network, again):
            each.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
        assert_bit_equal(state_of(again), state_of(network), stage)
        assert_replicas(state_of(again), stage)
        network = again


@check
def a_checkpoint_of_one_rank_is_broadcast() -> None:
    network = model(dropout=0.0)
    fit(network, distribute(Adam(0.01, beta_2=0.9), freeze_step=5))
    path = FOLDER / f"broadcast-{hvd.rank()}.keras"
    network.save(path)
    again = keras.models.load_model(path) if hvd.rank() == 0 else model(dropout=0.0)
    optimizer = again.optimizer if hvd.rank() == 0 else distribute(Adam(0.01, beta_2=0.9), freeze_step=5)
    with heard() as messages:
        fit(again, optimizer)
    said = [f"rank {hvd.rank()} got its state by a broadcast" in message for message in messages]
    assert sum(said) == (hvd.rank() > 0), messages
    assert optimizer.stats.frozen_step == 5
    assert optimizer.stats.step == 24
    assert_replicas(state_of(again))


@check
def any_ranks_checkpoint_has_all_that_is_owed() -> None:
    """Whatever Horovod is told to do with gradients, what is shared is the plain mean."""
    for how in (
        {"exchange": "one_shot", "op": hvd.Sum},
        {"exchange": "two_phase", "compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0},
    ):
        network = model(dropout=0.0)
        optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=5, **how)
        fit(network, optimizer)
        before = np.mean(hvd.allgather_object(_owed(optimizer)), axis=0)
        assert np.abs(before).max() > 1e-4
        optimizer.synchronize_for_checkpoint()
        np.testing.assert_allclose(_owed(optimizer), before, rtol=0, atol=1e-6)
        path = FOLDER / f"shared-{hvd.rank()}.keras"
        network.save(path)
        hvd.allgather_object(0)
        again = keras.models.load_model(FOLDER / "shared-0.keras")
        np.testing.assert_allclose(_owed(again.optimizer), before, rtol=0, atol=1e-6)
        x, y = data(hvd.rank())
        again.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        assert again.optimizer.stats.step == 24
        assert_replicas(state_of(again))
        hvd.allgather_object(0)  # nobody saves the next before all have loaded this


def _owed(optimizer: Any) -> Any:
    about, errors = unpack_errors(optimizer._engine.value.state())
    parts = owed_by_parameter(errors, about["size"])
    return np.concatenate([parts[key] for key in sorted(parts)])


@check
def a_process_set_trains_alone() -> None:
    """Two of three ranks train in fit; the third trains by itself, as plain Keras would."""
    members = hvd.add_process_set([0, 2])
    trained = variables()
    optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=2, process_set=members)
    given = members.rank() if members.included() else 7
    train(optimizer, trained, range(6 if members.included() else 3), given)
    optimizer.synchronize_for_checkpoint()
    everyone = hvd.allgather_object(snapshot(trained))
    assert_bit_equal(everyone[2], everyone[0])
    if members.included():
        assert optimizer.stats.stage == COMPRESSION
        assert optimizer.stats.bytes_sent[COMPRESSION] > 0
        train(optimizer, trained, [6], given)
    else:
        alone = variables()
        train(Adam(0.01, beta_2=0.9), alone, range(3), given)
        assert_bit_equal(snapshot(trained), snapshot(alone))
        assert optimizer.stats.bytes_sent[COMPRESSION] == 0
    assert_bit_equal(hvd.allgather_object(snapshot(trained))[2], hvd.allgather_object(snapshot(trained))[0])


@check
def callbacks_average_and_watch() -> None:
    network = model()
    monitor = [onebit.callbacks.MetricAverageCallback(), onebit.callbacks.CompressionMonitor()]
    optimizer = distribute(Adam(0.01, beta_2=0.9), freeze_step=14)
    history = fit(network, optimizer, epochs=2, callbacks=monitor).history
    for every in zip(*hvd.allgather_object([history["loss"], history["accuracy"]]), strict=True):
        assert all(values == every[0] for values in every)
    assert history["onebit_stage"] == [0.0, 1.0]
    assert history["onebit_ratio"][0] == 1.0
    assert history["onebit_ratio"][1] > 14
    assert history["onebit_bytes"][1] == optimizer.stats.bytes_per_step[COMPRESSION]


@check
def a_run_measures_its_network() -> None:
    """In fit's graph, in warm-up or before an early freeze, and 0/1 Adam between two of its steps."""
    for make, freeze in ((Adam, {"freeze_step": 5}), (Adam, {"freeze_step": 2}), (onebit.ZeroOneAdam, {})):
        network = model()
        optimizer = distribute(make(0.01), measure=True, **freeze)
        fit(network, optimizer)
        plan = optimizer.stats.plan
        assert plan is not None
        assert plan.num_elements == network.count_params()
        assert all(each == plan for each in hvd.allgather_object(plan))
        assert_replicas(state_of(network) if make is Adam else network.get_weights())


@check
def a_model_without_the_wrapper_gets_a_notice() -> None:
    with heard() as said:
        fit(model(), Adam(0.01))
    # once, by rank 0
    assert any("nothing averages its gradients" in line for line in said) == (hvd.rank() == 0)


@check
def zero_one_adam_fits() -> None:
    """In model.fit's graph, both exchanges, on into local steps; the last step is one of no round."""
    for exchange in ("one_shot", "two_phase"):
        network = model(built=False)
        zero_one = onebit.ZeroOneAdam(
            0.01, beta_2=0.9, weight_decay=0.01, var_freeze_step=8, var_update_scaler=2, local_step_scaler=2
        )
        optimizer = distribute(zero_one, exchange=exchange)
        network.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = data(hvd.rank(), 20)
        start = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
        seen: list[Any] = []

        def note(batch: int, logs: Any, seen: list[Any] = seen, network: Any = network) -> None:
            seen.append((network.optimizer.stats.rounds, network.get_weights()))

        watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        network.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[start, watch])
        stats = optimizer.stats
        assert (stats.step, stats.frozen_step, stats.variance_updates) == (20, 8, 5), stats
        assert stats.rounds == 8 + 2, stats  # steps 9 and 11, then the gap is 4, 8, 16
        assert stats.bytes_per_step[COMPRESSION] == 0.0
        for step, (rounds, weights) in enumerate(seen):
            if step and rounds > seen[step - 1][0]:
                assert_replicas(weights, f"{exchange}, step {step}")
        assert len({w[0].tobytes() for w in hvd.allgather_object(seen[-1][1])}) == hvd.size()


@check
def zero_one_adam_meets_for_3000_steps() -> None:
    """Replicas are equal bit for bit at every synchronisation, and apart between two."""
    trained = variables([(33,)])
    zero_one = onebit.ZeroOneAdam(0.01, weight_decay=0.01, var_freeze_step=100, local_step_scaler=500)
    optimizer = distribute(zero_one)
    generator = np.random.default_rng(hvd.rank())
    met, apart, rounds = [], [], 0
    for _ in range(3000):
        x = trained[0].numpy()
        optimizer.apply([tf.constant(x * np.float32(0.1) + generator.standard_normal(33, np.float32))], trained)
        seen = met if optimizer.stats.rounds > rounds else apart
        seen.append(trained[0].numpy().tobytes())
        rounds = optimizer.stats.rounds
    assert optimizer.stats.step == 3000
    assert 100 < rounds < 1500
    mine, others = hvd.allgather_object((met, apart))
    assert mine[0] == others[0]
    assert len(met) == rounds
    assert not set(mine[1]) & set(others[1])


@check
def horovods_arguments() -> None:
    """Sum, fp16 on the wire, predivision, groups: as many ways to the same mean."""
    results = []
    for how in (
        {},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.fp16},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
    ):
        trained = variables()
        optimizer = distribute(Adam(0.01, beta_2=0.9, epsilon=1e-12), freeze_step=3, **how)
        train(optimizer, trained, range(3), hvd.rank())
        assert_replicas(snapshot(trained), str(how))
        results.append(snapshot(trained))
        train(optimizer, trained, range(3, 6), hvd.rank())
        assert_replicas(snapshot(trained), str(how))
    for other in results[1:]:
        for mine, theirs in zip(other, results[0], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-3)


FAMILY: dict[str, Any] = {
    "SGD": lambda: distribute(keras.optimizers.SGD(0.02, momentum=0.9), freeze_step=4),
    "OneBitSGD": lambda: distribute(onebit.OneBitSGD(0.02, weight_decay=0.01), exchange="two_phase"),
    "Lamb": lambda: distribute(keras.optimizers.Lamb(0.02, beta_2=0.9), freeze_step=4, dead="hold", scale="mean"),
    "onebit.Lamb": lambda: distribute(onebit.Lamb(0.02, beta_2=0.9), freeze_step=4, block="tensor"),
    "OneBitLamb": lambda: distribute(
        onebit.OneBitLamb(0.02, beta_2=0.9, weight_decay=0.01, freeze_step=4), exchange="two_phase"
    ),
    "OneBitAdam": lambda: distribute(
        onebit.OneBitAdam(0.01, beta_2=0.9, freeze_step=4),
        space="update",
        dead="hold",
        scale="mean",
        block="tensor",
    ),
}


@check
def the_family_trains_in_fit() -> None:
    for name, make in FAMILY.items():
        network = model(dropout=0.0)
        optimizer = make()
        losses = fit(network, optimizer, epochs=4).history["loss"]
        assert optimizer.stats.stage == COMPRESSION
        assert optimizer.stats.step == 48
        print(f"{name}: loss by epoch {[round(loss, 3) for loss in losses]}")
        assert losses[-1] < 0.6 * losses[0], f"{name}: {losses}"
        assert_replicas(state_of(network), name)
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        assert type(again) is type(optimizer)
        assert again.get_config() == optimizer.get_config()
        if "Lamb" in name:
            assert set(optimizer.stats.trust_ratios) == {v.path for v in network.trainable_variables}


@check
def a_saved_lamb_goes_on_bit_for_bit() -> None:
    network = model(dropout=0.0)
    fit(network, FAMILY["OneBitLamb"]())
    path = FOLDER / f"lamb-{hvd.rank()}.keras"
    network.save(path)
    again = keras.models.load_model(path)
    x, y = data(hvd.rank())
    for each in (network, again):
        each.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    assert_bit_equal(state_of(again), state_of(network))
    assert_replicas(state_of(again))


@check
def same_as_torch() -> None:
    """The same parameters and gradients in both adapters: the same bytes after the freeze, the same parameters."""
    import torch

    lr = 1 / 128  # float32 has it exactly
    mine = Adam(lr, beta_2=0.95, epsilon=1e-12)
    _compare_with_torch(mine, lambda ps: torch.optim.Adam(ps, lr=lr, betas=(0.9, 0.95), eps=1e-12), steps=200)


@check
def sgd_is_the_same_as_torchs() -> None:
    """Keras's velocity is -lr times torch's momentum: to the bit, with a power of two for lr."""
    import hvd_onebit.torch as other

    lr = 1 / 128
    _compare_with_torch(onebit.OneBitSGD(lr, 0.9), lambda ps: other.OneBitSGD(ps, lr=lr, momentum=0.9), factor=-lr)


@check
def lamb_is_the_same_as_torchs() -> None:
    import hvd_onebit.torch as other

    mine = onebit.OneBitLamb(1 / 128, 0.9, 0.95, 1e-8, weight_decay=0.1)
    _compare_with_torch(
        mine, lambda ps: other.OneBitLamb(ps, lr=1 / 128, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    )


def _compare_with_torch(
    keras_optimizer: Any, make_theirs: Callable[[list[Any]], Any], *, steps: int = 60, factor: float = 1.0
) -> None:
    """Trains with both; `factor` is what Keras's momentum is of torch's."""
    import horovod.torch as other_hvd
    import torch

    import hvd_onebit.torch as other

    other_hvd.init()
    torch.set_num_threads(1)
    freeze_step = 20
    options = {"freeze_step": freeze_step, "block": 16, "exchange": "two_phase", "check_every": 1}
    shapes = [(8, 5), (40, 5)]
    trained = variables(shapes)
    parameters = [torch.nn.Parameter(torch.from_numpy(v.numpy().copy())) for v in trained]
    mine = onebit.DistributedOptimizer(keras_optimizer, **options)
    theirs = other.DistributedOptimizer(
        make_theirs(parameters), named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)], **options
    )
    momentum_name = "momentum_buffer" if factor != 1.0 else "exp_avg"
    worst = 0.0

    def torchs(p: Any, name: str) -> Any:
        return theirs.state[p][name].detach().numpy()

    for step in range(steps):
        given = gradients(step, hvd.rank(), shapes)
        mine.apply([tf.constant(g) for g in given], trained)
        theirs.zero_grad()
        for p, g in zip(parameters, given, strict=True):
            (p * torch.from_numpy(g)).sum().backward()
        theirs.step()
        moments = [
            (mine.momentum_of(i), torchs(p, momentum_name) * np.float32(factor)) for i, p in enumerate(parameters)
        ]
        if step < freeze_step and factor == 1.0:
            moments += [(mine.variance_of(i), torchs(p, "exp_avg_sq")) for i, p in enumerate(parameters)]
        if step == freeze_step - 1:
            # the frameworks' own full-precision updates round differently; compression starts from one state
            for m, other_m in moments:
                np.testing.assert_allclose(m.numpy(), other_m, rtol=2e-6, atol=1e-7)
                m.assign(other_m)
            _take_lamb_of_torch(mine, [theirs.state[p] for p in parameters])
        elif step >= freeze_step:
            for m, other_m in moments:
                np.testing.assert_array_equal(m.numpy(), other_m, f"step {step}")
        for v, p in zip(trained, parameters, strict=True):
            worst = max(worst, float(np.abs(v.numpy() - p.detach().numpy()).max()) / float(np.spacing(np.float32(1))))
    assert mine.stats.bytes_per_step == theirs.stats.bytes_per_step
    assert mine.stats.stage == COMPRESSION
    print(f"largest difference in {steps} steps: {worst:.1f} ulp of 1")
    assert worst < 8


def _take_lamb_of_torch(mine: Any, states: Sequence[Any]) -> None:
    """What 1-bit LAMB keeps of each parameter."""
    if "scaling" not in states[0]:
        return
    names = ("coeff_average", "coeff_updates", "last_factor", "scaling")
    table = np.array([[float(state[name]) for state in states] for name in names])
    np.testing.assert_allclose(mine.lamb_table.numpy(), table, rtol=1e-6)
    mine.lamb_table.assign(table)
    for fresh, state in zip(mine._engine.value.fresh, states, strict=True):
        fresh.assign(state["exp_avg_sq_fresh"].numpy())


# -- disagreements, each the last check of its launch --


@check
def disagree_about_a_checkpoint() -> None:
    """Restored on one rank only."""
    trained = variables()
    optimizer = distribute(Adam(0.01), freeze_step=2)
    train(optimizer, trained, range(4), hvd.rank())
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    store = {name: np.array(array) for name, array in store.items()}
    train(optimizer, trained, [4], hvd.rank())
    if hvd.rank() == 1:
        optimizer.load_own_variables(store)
    for collective in (lambda: train(optimizer, trained, [5], hvd.rank()), optimizer.synchronize_for_checkpoint):
        _expect("step: rank 0", collective)


def _expect(text: str, train_on: Callable[[], Any]) -> None:
    # inside a graph TensorFlow raises an error of its own, with the same text
    with (
        pytest.raises((onebit.OneBitError, tf.errors.OpError), match="the ranks disagree") as caught,
        heard(logging.ERROR) as messages,
    ):
        train_on()
    assert text in str(caught.value)
    # once, by rank 0, and not in a trace
    assert [text in message for message in messages] == [True] * (hvd.rank() == 0)


@check
def disagree_in_fit() -> None:
    _expect("option block", lambda: fit(model(), distribute(Adam(0.01), freeze_step=3, block=64 << (hvd.rank() == 1))))


@check
def disagree_about_the_stage() -> None:
    trained = variables()
    optimizer = distribute(Adam(0.01), freeze_step=2)
    train(optimizer, trained, range(2), hvd.rank())
    if hvd.rank() == 1:
        optimizer._engine.value.table.assign(np.zeros((3, len(SHAPES)), np.int64))
    _expect("stage: rank 0", lambda: train(optimizer, trained, [2], hvd.rank()))


def main() -> int:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    logging.basicConfig(level=logging.INFO)
    hvd.init()
    return run_checks(hvd.rank())


if __name__ == "__main__":
    sys.exit(main())
