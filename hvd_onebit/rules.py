"""The update rules as the papers write them, on any array type.

Each rule rounds after every operation, in the order written, so that a framework's elementwise operations and the fused
kernels (`kernels.adam_apply`) give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "AdamStep",
    "LambArrays",
    "LambFactors",
    "LambStep",
    "LambUpdate",
    "adam_step",
    "adam_update",
    "average_coefficient",
    "bias_correction",
    "check_range",
    "check_sgd",
    "clip_factor",
    "denominator",
    "implied_gradient",
    "lamb_coefficient",
    "lamb_factor",
    "lamb_scalings",
    "lamb_step",
    "lamb_update",
    "ordered_norm",
    "refuse_update_space",
    "true_average",
]

Array = TypeVar("Array", bound=Any)


def clip_factor(norm: float, limit: float) -> float:
    """By what gradients of this 2-norm are multiplied so that it is at most `limit`; what is not finite stays so."""
    return limit / norm if math.isfinite(norm) and norm > limit else 1.0


def bias_correction(beta: float, steps: float) -> float:
    """1 - beta**steps, by which an exponential average that started at zero is divided (Kingma and Ba 2015)."""
    return 1.0 - float(beta**steps)


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


def denominator(variance: Array, numbers: AdamStep, sqrt: Callable[[Array], Array]) -> Array:
    """sqrt(v)/correction + eps."""
    root: Array = sqrt(variance) / numbers.variance_correction + numbers.eps
    return root


def adam_update(
    parameter: Array, momentum: Array, variance: Array, numbers: AdamStep, sqrt: Callable[[Array], Array]
) -> Array:
    """The new value of `parameter`, in the arrays' own precision; the arguments are not written."""
    update = momentum / denominator(variance, numbers, sqrt)
    decayed = parameter * numbers.decay if numbers.decay != 1.0 else parameter
    new: Array = decayed - update * numbers.step_size
    return new


# LAMB: You et al. 2020, arXiv 1904.00962; 1-bit LAMB: Li et al. 2021, arXiv 2104.06069, algorithm 1


@dataclass(frozen=True)
class LambFactors:
    """Bounds of 1-bit LAMB's numbers: the coefficient c of a tensor and the factor r that follows the variance."""

    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        check_range("coeff_beta", self.coeff_beta, 0.0, below=1.0)
        check_range("min_coeff", self.min_coeff, 0.0)
        if self.max_coeff < self.min_coeff:
            raise ValueError(f"max_coeff ({self.max_coeff}) must not be below min_coeff ({self.min_coeff})")
        if not 0.0 < self.factor_min <= self.factor_max:
            raise ValueError(
                f"factor_min ({self.factor_min}) must be above 0 and not above factor_max ({self.factor_max})"
            )
        check_range("factor_threshold", self.factor_threshold, 0.0, below=1.0)


def lamb_coefficient(parameter_norm: float, update_norm: float, factors: LambFactors) -> float | None:
    """LAMB's trust ratio c = clip(||x||/||u||, min_coeff, max_coeff); None (and c counts as 1) when a norm is 0."""
    if parameter_norm == 0.0 or update_norm == 0.0:
        return None
    return min(max(parameter_norm / update_norm, factors.min_coeff), factors.max_coeff)


def average_coefficient(average: float, coefficient: float, coeff_beta: float) -> float:
    """c_avg <- b3*c_avg + (1-b3)*c; it starts at 0, `true_average` corrects that."""
    return coeff_beta * average + (1.0 - coeff_beta) * coefficient


def true_average(average: float, updates: int, coeff_beta: float) -> float:
    """c_avg without the bias of its start at 0, so that an early freeze freezes the right coefficient; 1 before any."""
    return average / bias_correction(coeff_beta, updates) if updates else 1.0


def lamb_scalings(momentum_rms: list[float]) -> list[float]:
    """k_l = Q/q_l with q_l = rms(m_l) and Q their mean over tensors with q_l > 0; 1 where q_l = 0."""
    moving = [rms for rms in momentum_rms if rms > 0.0]
    if not moving:
        return [1.0] * len(momentum_rms)
    mean = sum(moving) / len(moving)
    return [mean / rms if rms > 0.0 else 1.0 for rms in momentum_rms]


def implied_gradient(momentum: Array, previous: Array, beta1: float) -> Array:
    """g~ = (m_t - b1*m_{t-1})/(1-b1): the averaged gradient that the averaged momentum implies."""
    gradient: Array = (momentum - previous * beta1) / (1.0 - beta1)
    return gradient


def lamb_factor(
    largest_ratio: float,
    last_factor: float,
    factors: LambFactors,
    *,
    direction_norm: float | None = None,
    update_norm: float | None = None,
) -> float:
    """r, by which the frozen coefficient is corrected for the variance having moved on.

    Args:
        largest_ratio: max over coordinates of (sqrt(V)+eps)/(sqrt(v')+eps), V frozen, v' fresh.
        last_factor: the previous step's r, 1 at the freeze.
        factors: the bounds.
        direction_norm: ||m/(sqrt(V)+eps)||; needed with weight decay only.
        update_norm: ||u||, u with the weight decay; needed with weight decay only.
    """
    r = largest_ratio
    if update_norm is not None and direction_norm is not None:
        share = min(1.0, direction_norm / update_norm) if update_norm > 0.0 else 1.0
        r = r * share + 1.0 - share
    r = min(max(r, factors.factor_min), factors.factor_max)
    low, high = (1.0 - factors.factor_threshold) * last_factor, (1.0 + factors.factor_threshold) * last_factor
    return min(max(r, low), high)


@dataclass(frozen=True)
class LambStep:
    """The numbers of one tensor's update in 1-bit LAMB's compression stage."""

    eps: float
    variance_correction: float
    fresh_correction: float
    momentum_correction: float


def lamb_step(
    *, betas: tuple[float, float], eps: float, step: int, variance_steps: int, bias_corrected: bool = True
) -> LambStep:
    """The numbers of the update; arguments as for `adam_step`."""
    if not bias_corrected:
        return LambStep(eps, 1.0, 1.0, 1.0)
    frozen, fresh = bias_correction(betas[1], variance_steps), bias_correction(betas[1], step)
    return LambStep(eps, math.sqrt(frozen), math.sqrt(fresh), bias_correction(betas[0], step))


class LambArrays(Protocol[Array]):
    """What `lamb_update` needs of a framework beside operators."""

    def sqrt(self, array: Array) -> Array: ...

    def where(self, condition: Any, these: Any, others: Any) -> Array: ...

    def largest(self, array: Array) -> Any: ...

    def norm(self, array: Array) -> Any:
        """The 2-norm in float64, the same to the bit on every rank."""
        ...


@dataclass(frozen=True)
class LambUpdate(Generic[Array]):
    """What `lamb_update` returns: new state, u, and what `lamb_factor` asks for."""

    momentum: Array
    fresh: Array
    update: Array
    largest_ratio: Any
    direction_norm: Any = None
    update_norm: Any = None


def lamb_update(
    parameter: Array,
    momentum: Array,
    averaged: Array,
    variance: Array,
    fresh: Array,
    numbers: LambStep,
    arrays: LambArrays[Array],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    held: Any | None = None,
) -> LambUpdate[Array]:
    """One tensor's step up to the learning rate: x <- x - lr * (r*c_avg) * update; the arguments are not written.

    Args:
        parameter: x.
        momentum: m_{t-1}.
        averaged: m_t.
        variance: V, frozen.
        fresh: v', which goes on.
        numbers: of this step.
        arrays: the framework's operations.
        betas: decay rates of momentum and variance.
        weight_decay: part of the update.
        held: coordinates that stay as they are; None for none.
    """
    gradient = implied_gradient(averaged, momentum, betas[0])
    new_fresh = fresh * betas[1] + gradient * gradient * (1.0 - betas[1])
    new_momentum = averaged if held is None else arrays.where(held, momentum, averaged)
    root = arrays.sqrt(variance) / numbers.variance_correction + numbers.eps
    ratio = root / (arrays.sqrt(new_fresh) / numbers.fresh_correction + numbers.eps)
    direction = new_momentum / root / numbers.momentum_correction
    update = direction + parameter * weight_decay if weight_decay else direction
    if held is not None:
        ratio, update = arrays.where(held, 0.0, ratio), arrays.where(held, 0.0, update)
    if not weight_decay:
        return LambUpdate(new_momentum, new_fresh, update, arrays.largest(ratio))
    norms = arrays.norm(direction), arrays.norm(update)
    return LambUpdate(new_momentum, new_fresh, update, arrays.largest(ratio), *norms)


def ordered_norm(flat: npt.NDArray[Any]) -> float:
    """The 2-norm in float64, summed in one order whatever the number of threads, so that ranks agree to the bit."""
    total = 0.0
    for start in range(0, len(flat), _NORM_CHUNK):
        part = flat[start : start + _NORM_CHUNK].astype(np.float64)
        total += float(np.square(part, out=part).sum())
    return math.sqrt(total)


_NORM_CHUNK = 1 << 16  # elements whose float64 copy stays in the cache


# what cannot be served, said in one place for all frameworks


def refuse_update_space(optimizer: str) -> NoReturn:
    """Raises ValueError: space="update" is for rules with a frozen variance."""
    raise ValueError(
        f'space="update" divides what is sent by the root of a frozen variance: SGD has none, and that of 0/1 Adam is '
        f'updated while errors are owed, so {optimizer} takes space="momentum" only'
    )


def check_range(name: str, value: float, least: float, *, below: float | None = None) -> None:
    """Raises ValueError for a value under `least`, or not under `below`."""
    if value < least or (below is not None and value >= below):
        limit = f"at least {least}" if below is None else f"in [{least}, {below})"
        raise ValueError(f"{name} must be {limit}, not {value!r}")


def check_sgd(*, momentum: float, nesterov: bool) -> None:
    """Raises ValueError for an SGD that 1-bit compression does not serve."""
    if not momentum:
        raise ValueError("SGD without momentum has nothing to compress with error feedback: set momentum, e.g. 0.9")
    if nesterov:
        raise ValueError("nesterov=True needs the averaged gradient, which is not sent: use plain momentum")
