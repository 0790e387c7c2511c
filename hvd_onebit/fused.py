"""A tensor's update straight from the bits that were received: decode and apply in one pass over memory.

On host memory. A tensor may lie across several messages; these walk over its pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_onebit import kernels
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.rules import AdamStep

__all__ = ["apply_adam", "apply_momentum"]

Floats = npt.NDArray[np.float32]


def apply_adam(
    exchange: CompressedAllreduce[Any],
    offset: int,
    parameter: Floats,
    momentum: Floats | None,
    variance: Floats,
    numbers: AdamStep,
    *,
    hold: bool,
    threads: int,
) -> None:
    """Adam's update, with the averaged momentum that `exchange` has accepted.

    Args:
        exchange: of messages in host memory.
        offset: the tensor's first element in the bucket.
        parameter: float32, shape (n,), written in place.
        momentum: the same; becomes the averaged one. None: it is not written.
        variance: float32, shape (n,).
        numbers: of this step.
        hold: leave coordinates whose variance is 0 as they are.
        threads: that the kernel may use.
    """
    for piece in exchange.pieces(offset, offset + len(parameter)):
        kernels.adam_apply(
            [np.asarray(message) for message in exchange.messages(piece)],
            piece.start,
            parameter[piece.low : piece.high],
            None if momentum is None else momentum[piece.low : piece.high],
            variance[piece.low : piece.high],
            num_elements=piece.num_elements,
            block=piece.block,
            step_size=numbers.step_size,
            eps=numbers.eps,
            variance_correction=numbers.variance_correction,
            decay=numbers.decay,
            hold=hold,
            threads=threads,
        )


def apply_momentum(
    exchange: CompressedAllreduce[Any],
    offset: int,
    parameter: Floats,
    momentum: Floats | None,
    *,
    step_size: float,
    decay: float = 1.0,
    threads: int,
) -> None:
    """The update of SGD with momentum: parameter <- decay*parameter - step_size*m; arguments as in `apply_adam`."""
    for piece in exchange.pieces(offset, offset + len(parameter)):
        kernels.momentum_apply(
            [np.asarray(message) for message in exchange.messages(piece)],
            piece.start,
            parameter[piece.low : piece.high],
            None if momentum is None else momentum[piece.low : piece.high],
            num_elements=piece.num_elements,
            block=piece.block,
            step_size=step_size,
            decay=decay,
            threads=threads,
        )
