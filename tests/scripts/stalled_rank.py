"""Rank 1 stands still after three steps: horovodrun -np 2 python stalled_rank.py torch|tensorflow."""

from __future__ import annotations

import sys
import time
from typing import Any


def stand_still() -> None:
    print("asleep", flush=True)
    time.sleep(1000)


def train_torch() -> None:
    import horovod.torch as hvd
    import torch

    import hvd_onebit.torch as onebit

    hvd.init()
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters(), freeze_step=2
    )
    for step in range(6):
        if step == 3 and hvd.rank() == 1:
            stand_still()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def train_tensorflow() -> None:
    import horovod.tensorflow as hvd
    import keras
    import numpy as np

    import hvd_onebit.tensorflow as onebit

    class StandStill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and hvd.rank() == 1:
                stand_still()

    hvd.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=onebit.DistributedOptimizer(keras.optimizers.Adam(), freeze_step=2), loss="mse")
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), StandStill()]
    model.fit(np.ones((12, 4)), np.ones((12, 1)), batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    {"torch": train_torch, "tensorflow": train_tensorflow}[sys.argv[1]]()
    print("not reached", flush=True)
