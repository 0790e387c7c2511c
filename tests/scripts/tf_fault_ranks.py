"""Keras ranks to which things happen: python tf_fault_ranks.py FOLDER, then what `forked_ranks.py` says."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from forked_ranks import die, scenario, serve
from tf_training import assert_bit_equal

import hvd_onebit.tensorflow as onebit

FOLDER = Path(sys.argv[1])
FREEZE_STEP = 3
ANSWERS = np.random.default_rng(3).standard_normal((8, 5)).astype(np.float32)


def begin() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)


def make() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
    options = {"freeze_step": FREEZE_STEP, "exchange": "two_phase", "check_every": 1, "measure": False}
    model.compile(onebit.DistributedOptimizer(keras.optimizers.Adam(0.01), **options), "mse", steps_per_execution=1)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model: keras.Model, steps: Iterable[int]) -> None:
    for step in steps:
        x = np.random.default_rng([step, hvd.rank()]).standard_normal((16, 8)).astype(np.float32)
        model.fit(x, x @ ANSWERS, batch_size=16, verbose=0)


def is_victim() -> bool:
    return bool(hvd.rank() == 1)


def outcome(model: keras.Model, steps: Iterable[int]) -> str:
    """An error of Horovod's operations is what a rank is to end with when another is gone."""
    try:
        train(model, steps)
    except tf.errors.OpError as error:
        stats = model.optimizer.stats
        return f"{type(error).__name__} in step {stats.step} of {stats.stage}: {error.message}"
    return "no error"


def save(model: keras.Model) -> keras.Model:
    """The model as it comes back from a file."""
    file = FOLDER / f"model.{hvd.rank()}.keras"
    model.save(file)
    return keras.models.load_model(file)


# -- a rank is killed --


@scenario
def killed_in_warm_up() -> str:
    """While it computes its gradient."""
    model = make()
    train(model, [0])
    if is_victim():
        die()
    return outcome(model, range(1, 9))


@scenario
def killed_at_the_freeze() -> str:
    """After its step, before the ranks tell each other that they are ready."""
    model = make()
    if is_victim():
        model.optimizer._engine.value._frozen_arrays = die
    return outcome(model, range(9))


@scenario
def killed_mid_exchange() -> str:
    """After its first collective of the step, before its second."""
    model = make()
    (bucket,) = model.optimizer._engine.value._buckets
    reduce = bucket._exchange.reduce
    dies = False
    bucket._exchange.reduce = lambda received: die() if dies else reduce(received)
    train(model, range(5))
    assert model.optimizer.stats.stage == "compression"
    dies = is_victim()
    return outcome(model, range(5, 9))


# -- memory --


@scenario
def no_memory_at_the_freeze_on_one_rank() -> str:
    model = make()
    engine = model.optimizer._engine.value

    def fail(*_: Any) -> Any:
        raise MemoryError("injected")

    if is_victim():
        engine._frozen_arrays = fail
    try:
        train(model, range(9))
    except tf.errors.UnknownError as error:
        said = error.message.split("OneBitError: ")[-1].split("\n")[0]
    stats, iterations = model.optimizer.stats, int(model.optimizer.iterations.numpy())
    assert (stats.stage, stats.step, iterations) == ("warm-up", FREEZE_STEP, FREEZE_STEP)
    engine.__dict__.pop("_frozen_arrays", None)
    every = []
    for each in (model, save(model)):
        train(each, range(FREEZE_STEP, 9))
        stats = each.optimizer.stats
        assert (stats.stage, stats.frozen_step, stats.step) == ("compression", FREEZE_STEP + 1, 9)
        every.append(each.get_weights())
    assert_bit_equal(*every)
    for replica in hvd.allgather_object(every[0]):
        assert_bit_equal(replica, every[0])
    return said


if __name__ == "__main__":
    serve(FOLDER, begin)
