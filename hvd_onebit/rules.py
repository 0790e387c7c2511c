"""The update rules as the papers write them, on any array type.

Each rule rounds after every operation, in the order written, so that a framework's elementwise operations and the fused
kernels (`kernels.adam_apply`) give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["AdamStep", "adam_step", "adam_update", "bias_correction"]

Array = TypeVar("Array", bound=Any)


def bias_correction(beta: float, steps: float) -> float:
    """1 - beta**steps, by which an exponential average that started at zero is divided (Kingma and Ba 2015)."""
    return 1.0 - beta**steps


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one update with a frozen variance: x <- decay*x - step_size * m / (sqrt(v)/correction + eps)."""

    step_size: float
    eps: float
    variance_correction: float
    decay: float


def adam_step(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    variance_steps: int,
    decoupled_weight_decay: float = 0.0,
    bias_corrected: bool = True,
) -> AdamStep:
    """The numbers of the update of 1-bit Adam's compression stage.

    Tang et al. 2021, arXiv 2102.02888, algorithm 1; the paper's Adam corrects no bias, ours does as the user's Adam
    does. The variance's correction stays what it was when the variance was frozen: if it kept moving, so would the
    step size.

    Args:
        lr: learning rate.
        betas: decay rates of momentum and variance.
        eps: added to the root of the variance.
        step: updates of this parameter, this one included.
        variance_steps: updates that went into its variance.
        decoupled_weight_decay: AdamW's weight decay, 0 for none (coupled decay is part of the gradient).
        bias_corrected: False for the paper's Adam.
    """
    first, second = 1.0, 1.0
    if bias_corrected:
        first = bias_correction(betas[0], step)
        second = math.sqrt(bias_correction(betas[1], variance_steps))
    return AdamStep(lr / first, eps, second, 1.0 - lr * decoupled_weight_decay)


def adam_update(
    parameter: Array, momentum: Array, variance: Array, numbers: AdamStep, sqrt: Callable[[Array], Array]
) -> Array:
    """The new value of `parameter`, in the arrays' own precision; the arguments are not written."""
    update = momentum / (sqrt(variance) / numbers.variance_correction + numbers.eps)
    decayed = parameter * numbers.decay if numbers.decay != 1.0 else parameter
    return decayed - update * numbers.step_size
