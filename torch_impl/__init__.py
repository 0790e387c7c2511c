"""1-bit Adam and its family for PyTorch on Horovod: one changed line in a Horovod script.

import hvd_onebit.torch as onebit
optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), freeze_step=2000)
"""

from __future__ import annotations

from typing import Any

from hvd_onebit.errors import OneBitError
from hvd_onebit.torch.distributed import DistributedOptimizer
from hvd_onebit.torch.optimizers import Lamb, OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam

__all__ = ["DistributedOptimizer", "Lamb", "OneBitAdam", "OneBitError", "OneBitLamb", "OneBitSGD", "ZeroOneAdam"]


def __getattr__(name: str) -> Any:
    """`elastic`, as horovod.torch has it: its module needs Horovod, so it is imported when it is asked for."""
    if name == "elastic":
        import importlib

        return importlib.import_module("hvd_onebit.torch.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
