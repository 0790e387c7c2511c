"""1-bit Adam and its family for PyTorch on Horovod: one changed line in a Horovod script.

import hvd_onebit.torch as onebit
optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), freeze_step=2000)
"""

from __future__ import annotations

from hvd_onebit.errors import OneBitError
from hvd_onebit.torch.distributed import DistributedOptimizer
from hvd_onebit.torch.optimizers import Lamb, OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam

__all__ = ["DistributedOptimizer", "Lamb", "OneBitAdam", "OneBitError", "OneBitLamb", "OneBitSGD", "ZeroOneAdam"]
