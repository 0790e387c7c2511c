"""1-bit Adam and its family for TensorFlow and Keras 3 on Horovod: one changed line in a Horovod script.

import hvd_onebit.tensorflow as onebit
optimizer = onebit.DistributedOptimizer(keras.optimizers.AdamW(1e-3), freeze_step=2000)
model.fit(..., callbacks=[onebit.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import Any

from hvd_onebit.errors import OneBitError
from hvd_onebit.tensorflow import callbacks
from hvd_onebit.tensorflow.distributed import DistributedOptimizer
from hvd_onebit.tensorflow.optimizers import Lamb, OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam

__all__ = [
    "DistributedOptimizer",
    "Lamb",
    "OneBitAdam",
    "OneBitError",
    "OneBitLamb",
    "OneBitSGD",
    "ZeroOneAdam",
    "callbacks",
]


def __getattr__(name: str) -> Any:
    """`elastic`, as horovod.tensorflow has it: its module needs Horovod, so it is imported when it is asked for."""
    if name == "elastic":
        import importlib

        return importlib.import_module("hvd_onebit.tensorflow.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
