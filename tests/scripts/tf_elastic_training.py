"""Keras training that changes its own ranks: python tf_elastic_training.py FOLDER FREEZE_STEP LAST_STEP EVENT@STEP...

As elastic_training.py: an event is "hosts=A,B" or "kill", and every rank writes what it saw to FOLDER/PID.jsonl.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from elastic_log import change_hosts, write_note

import hvd_onebit.tensorflow as onebit
from hvd_onebit.state import owed_by_parameter
from hvd_onebit.tensorflow.engine import unpack_errors

FOLDER = Path(sys.argv[1])
FREEZE_STEP, LAST_STEP = int(sys.argv[2]), int(sys.argv[3])
EVENTS = {int(each.split("@")[1]): each.split("@")[0] for each in sys.argv[4:]}
WAIT_SECONDS = 60.0
ANSWERS = np.random.default_rng(3).standard_normal((8, 5)).astype(np.float32)


def happens_first(event: str, step: int) -> bool:
    """True for the first process that asks."""
    try:
        (FOLDER / f"{event.split('=')[0]}.{step}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def batch(step: int) -> tuple[Any, Any]:
    """This rank's own."""
    x = np.random.default_rng([step, hvd.rank()]).standard_normal((16, 8)).astype(np.float32)
    return x, x @ ANSWERS


def mine(optimizer: Any) -> list[float]:
    """What this rank owes: the mean over the ranks is what training owes."""
    about, errors = unpack_errors(optimizer._engine.value.state())
    owed = owed_by_parameter(errors, about["size"])
    return np.concatenate([owed[name] for name in sorted(owed)]).tolist()


def note(kind: str, state: Any) -> None:
    flat = np.concatenate([w.ravel() for w in state.model.get_weights()]).tolist()
    write_note(FOLDER, kind, state, hvd, parameters=flat, owes=mine(state.optimizer))


def fit_a_batch(state: Any) -> None:
    """Under model.fit, as users do; the victim of a "kill" ends between two collectives of its step."""
    x, y = batch(state.step)
    state.model.fit(x, y, batch_size=16, verbose=0, shuffle=False)


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@onebit.elastic.run
def train(state: Any) -> None:
    note("entered", state)
    while state.step < LAST_STEP:
        event = EVENTS.get(state.step, "")
        if event.startswith("hosts") and hvd.size() != 1 + event.count(","):
            if hvd.rank() == 0 and happens_first(event, state.step):
                change_hosts(FOLDER, event.removeprefix("hosts="))
            deadline = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < deadline:
                time.sleep(0.1)
                state.check_host_updates()
            raise TimeoutError(f"the ranks did not change at step {state.step}")
        if event == "kill":
            # nobody has to start any more: Horovod need not wait long
            os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "8"
        if event == "kill" and hvd.rank() == hvd.size() - 1 and happens_first(event, state.step):
            # once its part of the step's second collective is due
            for bucket in state.optimizer._engine.value._buckets:
                bucket._exchange.reduce = die
            state.model.make_train_function(force=True)
        fit_a_batch(state)
        state.step += 1
        note("step", state)
        state.commit()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
    adam = keras.optimizers.Adam(0.03, beta_2=0.9)
    optimizer = onebit.DistributedOptimizer(adam, freeze_step=FREEZE_STEP, exchange="two_phase", block=8, check_every=1)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    train(onebit.elastic.TensorFlowKerasState(model, step=0))


if __name__ == "__main__":
    main()
