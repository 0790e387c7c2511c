"""How each optimizer is compressed: what it sends, how it applies the average, what it keeps.

A rule knows the optimizer's variables and numbers. What it does to one variable is written once for both kinds of
bucket: on NumPy's arrays and on TensorFlow's tensors, all flat float32. The mathematics is `hvd_onebit.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.fused import apply_adam, apply_momentum
from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import (
    AdamStep,
    LambArrays,
    LambFactors,
    LambStep,
    adam_step,
    adam_update,
    check_sgd,
    denominator,
    lamb_factor,
    lamb_scalings,
    lamb_step,
    lamb_update,
    ordered_norm,
    refuse_update_space,
    true_average,
)
from hvd_onebit.stage import FROZEN_STEP, VARIANCE_STEPS, thaw_ratio
from hvd_onebit.stats import Stats, TrustRatio
from hvd_onebit.tensorflow.codec import num_threads

__all__ = [
    "COEFF_AVERAGE",
    "COEFF_UPDATES",
    "LAMB_ROWS",
    "AdamRule",
    "Arrays",
    "LambRule",
    "Moment",
    "Rule",
    "SgdRule",
    "Tensors",
    "native",
]

Floats = npt.NDArray[np.float32]
Table = npt.NDArray[Any]

# rows of 1-bit LAMB's table of float64, shape (LAMB_ROWS, variables), in the optimizer's own variables
COEFF_AVERAGE = 0
"""Row: c_avg, with the bias of its start at 0."""
COEFF_UPDATES = 1
"""Row: coefficients that went into it."""
LAST_FACTOR = 2
"""Row: r of the last step; 0 in warm-up."""
SCALING = 3
"""Row: k, by which the momentum is multiplied before it is sent; 0 in warm-up."""
LAMB_ROWS = 4


class Arrays(LambArrays[Any], Protocol):
    """What a rule needs of NumPy or TensorFlow beside operators."""

    def call(self, function: Callable[..., Any], inputs: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
        """`function` on the values of scalars and small arrays, which returns as many as `types`."""
        ...


@dataclass(frozen=True)
class Moment:
    """What the numbers of a step depend on."""

    table: Table
    """The stage of all variables, as `stage.py` has it."""
    scalars: Table
    """What the rule keeps of all variables; float64, shape (rows, variables)."""
    step: int
    """Committed updates before this one."""
    lr: float


@dataclass(frozen=True)
class Tensors:
    """One variable and what belongs to it, flat float32; `fresh` and `column` (scalars) for rules that have them."""

    parameter: Any
    momentum: Any
    fresh: Any = None
    column: Any = None


class AdamRule:
    """1-bit Adam as Keras writes it: the momentum travels, the variance is frozen. The base of the others."""

    hyperparameters: tuple[str, ...] = ("beta_1", "beta_2", "epsilon")
    switches: tuple[str, ...] = ("amsgrad", "bias_correction", "decoupled_weight_decay")
    numbers_type: type = AdamStep
    has_variance = True
    keeps_fresh = False
    keeps_momentum = True  # as the bits of the last step, from which `momentum_from` makes it

    def __init__(self, optimizer: Any, variables: Sequence[Any], options: CompressionOptions) -> None:
        self._optimizer = optimizer
        self.options = options
        self.weight_decays = tuple(optimizer.decoupled_weight_decay_of(native(v)) for v in variables)
        self.bias_corrected = bool(getattr(optimizer, "bias_correction", True))

    # -- what it serves --

    @classmethod
    def check(cls, optimizer: Any, options: CompressionOptions) -> None:
        """Raises TypeError or ValueError for an optimizer or options that cannot be served."""
        if options.freeze_step == 0 and cls.has_variance:
            raise ValueError("freeze_step=0 leaves no variance to freeze: it must be at least 1")
        if options.space == "update" and cls not in (AdamRule, LambRule):
            refuse_update_space(type(optimizer).__name__)
        for name in cls.hyperparameters:
            value = getattr(optimizer, name)
            if not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, since all ranks compare it; got {value!r}")

    def fields(self) -> dict[str, Any]:
        """What ranks must have in common."""
        fields: dict[str, Any] = {"optimizer": type(self).__name__}
        for name in self.hyperparameters:
            fields[name] = float(getattr(self._optimizer, name))
        for name in self.switches:
            fields[name] = bool(getattr(self._optimizer, name, name != "amsgrad"))
        fields["weight decay"] = sorted(set(self.weight_decays))
        return fields

    # -- its state --

    @property
    def memory(self) -> float:
        """The decay rate of the average that has to settle before the freeze."""
        return float(self._optimizer.beta_2)

    def momentum_of(self, index: int) -> tf.Variable:
        """The momentum of variable `index`."""
        return native(self.momentum_variable(index))

    def momentum_variable(self, index: int) -> Any:
        """The same as Keras's variable."""
        return self._optimizer._momentums[index]

    def variance_of(self, index: int) -> tf.Variable | None:
        """What the update takes the root of; None for rules without a variance."""
        amsgrad = getattr(self._optimizer, "amsgrad", False)
        return native((self._optimizer._velocity_hats if amsgrad else self._optimizer._velocities)[index])

    @property
    def scalars(self) -> tf.Variable | None:
        """What else it keeps of every variable: float64, shape (rows, variables)."""
        return None

    def frozen_scalars(self, ready: Sequence[int], scalars: Table, momenta: Sequence[Floats]) -> Table:
        """The scalars when the variables `ready`, with these momenta, have been frozen."""
        return scalars

    def thaw(self, index: int, *, step: int, variance_steps: int, fresh: Any) -> None:
        """Makes a frozen variable's state a live one again, so that the optimizer's own update can go on with it."""
        variance = self.variance_of(index)
        if variance is not None and self.bias_corrected and variance_steps:
            ratio = np.float32(thaw_ratio(self.memory, step, variance_steps))
            variance.assign(tf.cast(tf.cast(variance, tf.float32) * ratio, variance.dtype))

    def settle(self, index: int, owed: Floats, moment: Moment) -> bool:
        """Puts what is owed into a frozen variable's momentum, as if the next exchange sent all; False if it can't.

        The next momentum is beta1*m + (1-beta1)*g, and compression would have added what is owed to that.
        """
        beta1 = self._momentum_decay
        if not beta1:
            return False
        if self.options.space == "update":
            variance = self.variance_of(index)
            assert variance is not None
            numbers: Any = self.numbers(index, moment)
            owed = owed * denominator(variance.numpy().astype(np.float32).reshape(-1), numbers, np.sqrt)
        momentum = self.momentum_of(index)
        momentum.assign_add(tf.cast(tf.reshape(owed / np.float32(beta1), momentum.shape), momentum.dtype))
        return True

    # -- one step of one variable --

    @property
    def _momentum_decay(self) -> float:
        return float(self._optimizer.beta_1)

    @property
    def sent_momentum(self) -> float | None:
        """beta1, when beta1*momentum + (1-beta1)*gradient is what travels; None when `to_send` has to be asked."""
        return None if self.options.space == "update" else float(self._optimizer.beta_1)

    @property
    def sends_by_variance(self) -> bool:
        """Whether `to_send` needs the variance."""
        return self.options.space == "update"

    @property
    def fuses(self) -> bool:
        """Whether `apply_from_bits` serves."""
        return self.options.space == "momentum"

    def numbers(self, index: int, moment: Moment) -> Any:
        """The update's numbers, an instance of `numbers_type`."""
        # Keras adds epsilon to the root before it corrects the bias ("epsilon hat"): x -= lr * c/(1-b1^t) *
        # m/(sqrt(v)+eps)
        numbers = self._adam_numbers(index, moment)
        return replace(numbers, eps=numbers.eps / numbers.variance_correction)

    def _adam_numbers(self, index: int, moment: Moment) -> AdamStep:
        return adam_step(
            lr=moment.lr,
            betas=self._betas,
            eps=float(self._optimizer.epsilon),
            step=moment.step + 1,
            variance_steps=_variance_steps(index, moment),
            decoupled_weight_decay=self.weight_decays[index],
            bias_corrected=self.bias_corrected,
        )

    @property
    def _betas(self) -> tuple[float, float]:
        return float(self._optimizer.beta_1), float(self._optimizer.beta_2)

    def to_send(self, gradient: Any, momentum: Any, variance: Any, numbers: Any, arrays: Arrays) -> Any:
        """What travels of a variable."""
        beta1 = self._betas[0]
        z = gradient * np.float32(1.0 - beta1) + momentum * np.float32(beta1)
        return z / denominator(variance, numbers, arrays.sqrt) if self.options.space == "update" else z

    def momentum_from(self, averaged: Any, variance: Any, numbers: Any, arrays: Arrays) -> Any:
        """The momentum that came back as `averaged`; whatever step's numbers, once the variable is frozen."""
        return averaged * denominator(variance, numbers, arrays.sqrt) if self.options.space == "update" else averaged

    def apply(
        self, index: int, tensors: Tensors, averaged: Any, variance: Any, lr: Any, numbers: Any, arrays: Arrays
    ) -> Tensors:
        """The variable, its momentum and the rest after the update by what came back."""
        averaged = self.momentum_from(averaged, variance, numbers, arrays)
        x = self._decayed(index, tensors.parameter, numbers)
        new = adam_update(x, averaged, variance, replace(numbers, decay=1.0), arrays.sqrt)
        if self.options.dead != "hold":
            return Tensors(new, averaged)
        held = variance == 0
        return Tensors(arrays.where(held, tensors.parameter, new), arrays.where(held, tensors.momentum, averaged))

    def _decayed(self, index: int, parameter: Any, numbers: Any) -> Any:
        return parameter * numbers.decay if self.weight_decays[index] else parameter

    def apply_from_bits(
        self,
        exchange: CompressedAllreduce[Any],
        offset: int,
        parameter: Floats,
        momentum: Floats | None,
        variance: Floats,
        numbers: Any,
    ) -> None:
        """Decodes and updates in one pass over memory; the momentum, too, unless it is None."""
        hold = self.options.dead == "hold"
        apply_adam(exchange, offset, parameter, momentum, variance, numbers, hold=hold, threads=num_threads())


Rule = AdamRule


@dataclass(frozen=True)
class SgdStep:
    """The numbers of Keras's SGD: w <- decay*w + v."""

    lr: float
    decay: float


class SgdRule(AdamRule):
    """1-bit momentum SGD: Keras's velocity, v <- momentum*v - lr*g, is what travels. There is no variance."""

    hyperparameters = ("momentum",)
    switches = ("decoupled_weight_decay",)
    numbers_type = SgdStep
    has_variance = False

    @classmethod
    def check(cls, optimizer: Any, options: CompressionOptions) -> None:
        super().check(optimizer, options)
        check_sgd(momentum=optimizer.momentum, nesterov=optimizer.nesterov)

    @property
    def memory(self) -> float:
        return float(self._optimizer.momentum)

    def momentum_variable(self, index: int) -> Any:
        return self._optimizer.momentums[index]

    def variance_of(self, index: int) -> tf.Variable | None:
        return None

    @property
    def _momentum_decay(self) -> float:
        return float(self._optimizer.momentum)

    @property
    def sent_momentum(self) -> float | None:
        return None

    def numbers(self, index: int, moment: Moment) -> SgdStep:
        return SgdStep(moment.lr, 1.0 - moment.lr * self.weight_decays[index])

    def to_send(self, gradient: Any, momentum: Any, variance: Any, numbers: Any, arrays: Arrays) -> Any:
        return momentum * np.float32(self._optimizer.momentum) - gradient * numbers.lr

    def apply(
        self, index: int, tensors: Tensors, averaged: Any, variance: Any, lr: Any, numbers: Any, arrays: Arrays
    ) -> Tensors:
        return Tensors(self._decayed(index, tensors.parameter, numbers) + averaged, averaged)

    def apply_from_bits(
        self,
        exchange: CompressedAllreduce[Any],
        offset: int,
        parameter: Floats,
        momentum: Floats | None,
        variance: Floats,
        numbers: Any,
    ) -> None:
        apply_momentum(
            exchange, offset, parameter, momentum, step_size=-1.0, decay=numbers.decay, threads=num_threads()
        )


@dataclass(frozen=True)
class LambNumbers(LambStep):
    """LAMB's numbers, with the scaling k and the weight decay that acts beside the update (Keras's own Lamb)."""

    scaling: float
    decay: float


class LambRule(AdamRule):
    """1-bit LAMB (Li et al. 2021, arXiv 2104.06069, algorithm 1)."""

    switches = ("bias_correction",)
    numbers_type = LambNumbers
    keeps_fresh = True

    def __init__(self, optimizer: Any, variables: Sequence[Any], options: CompressionOptions) -> None:
        super().__init__(optimizer, variables, options)
        self._factors: LambFactors = optimizer.lamb_factors
        self._update_decays = tuple(optimizer.update_weight_decay_of(native(v)) for v in variables)
        self._names = [getattr(v, "path", v.name) for v in variables]
        self._stats: Stats = optimizer.stats

    def fields(self) -> dict[str, Any]:
        own = {"bounds of LAMB's coefficients": list(vars(self._factors).values())}
        return {**super().fields(), **own, "weight decay in the update": sorted(set(self._update_decays))}

    @property
    def scalars(self) -> tf.Variable | None:
        return native(self._optimizer.lamb_table)

    def frozen_scalars(self, ready: Sequence[int], scalars: Table, momenta: Sequence[Floats]) -> Table:
        rms = [ordered_norm(m) / math.sqrt(len(m)) for m in momenta]
        scalars = scalars.copy()
        scalars[SCALING, list(ready)] = lamb_scalings(rms)
        scalars[LAST_FACTOR, list(ready)] = 1.0
        return scalars

    def settle(self, index: int, owed: Floats, moment: Moment) -> bool:
        if self.options.space == "momentum":
            owed = owed / np.float32(moment.scalars[SCALING, index])
        return super().settle(index, owed, moment)

    def thaw(self, index: int, *, step: int, variance_steps: int, fresh: Any) -> None:
        # v' has been kept up to date all along
        variance, scalars = self.variance_of(index), self.scalars
        assert variance is not None
        assert scalars is not None
        variance.assign(tf.cast(tf.reshape(fresh, variance.shape), variance.dtype))
        table = scalars.numpy()
        table[[LAST_FACTOR, SCALING], index] = 0.0
        scalars.assign(table)

    @property
    def sent_momentum(self) -> float | None:
        return None

    @property
    def fuses(self) -> bool:
        return False

    def numbers(self, index: int, moment: Moment) -> LambNumbers:
        numbers = lamb_step(
            betas=self._betas,
            eps=float(self._optimizer.epsilon),
            step=moment.step + 1,
            variance_steps=_variance_steps(index, moment),
            bias_corrected=self.bias_corrected,
        )
        decay = 1.0 - moment.lr * self.weight_decays[index]
        # one that's not frozen yet has none; in the update space all tensors are of comparable magnitude
        scaling = 1.0 if self.options.space == "update" else float(moment.scalars[SCALING, index]) or 1.0
        return LambNumbers(**vars(numbers), scaling=scaling, decay=decay)

    def to_send(self, gradient: Any, momentum: Any, variance: Any, numbers: Any, arrays: Arrays) -> Any:
        return super().to_send(gradient, momentum, variance, numbers, arrays) * numbers.scaling

    def momentum_from(self, averaged: Any, variance: Any, numbers: Any, arrays: Arrays) -> Any:
        return super().momentum_from(averaged, variance, numbers, arrays) / numbers.scaling

    def apply(
        self, index: int, tensors: Tensors, averaged: Any, variance: Any, lr: Any, numbers: Any, arrays: Arrays
    ) -> Tensors:
        x = self._decayed(index, tensors.parameter, numbers)
        held = variance == 0 if self.options.dead == "hold" else None
        new = lamb_update(
            x,
            tensors.momentum,
            self.momentum_from(averaged, variance, numbers, arrays),
            variance,
            tensors.fresh,
            numbers,
            arrays,
            betas=self._betas,
            weight_decay=self._update_decays[index],
            held=held,
        )
        norms = [] if new.update_norm is None else [new.direction_norm, new.update_norm]
        column, step_size = arrays.call(
            lambda *given: self._next(index, *given),
            [tensors.column, lr, new.largest_ratio, *norms],
            [tf.float64, tf.float32],
        )
        moved = x - new.update * step_size
        parameter = moved if held is None else arrays.where(held, tensors.parameter, moved)
        return Tensors(parameter, new.momentum, new.fresh, column)

    def _next(
        self, index: int, column: Table, lr: Any, largest: Any, direction_norm: Any = None, update_norm: Any = None
    ) -> tuple[Table, np.float32]:
        """The variable's scalars, and by what its update is multiplied."""
        if not column[LAST_FACTOR]:
            return column, np.float32(0.0)  # not frozen: nothing of this is used
        factor = lamb_factor(
            float(largest),
            float(column[LAST_FACTOR]),
            self._factors,
            direction_norm=None if direction_norm is None else float(direction_norm),
            update_norm=None if update_norm is None else float(update_norm),
        )
        average = true_average(float(column[COEFF_AVERAGE]), int(column[COEFF_UPDATES]), self._factors.coeff_beta)
        self._stats.trust_ratios[self._names[index]] = TrustRatio(average, factor)
        column = column.copy()
        column[LAST_FACTOR] = factor
        return column, np.float32(float(lr) * average * factor)


def _variance_steps(index: int, moment: Moment) -> int:
    return int(moment.table[VARIANCE_STEPS, index]) if moment.table[FROZEN_STEP, index] else moment.step + 1


def native(variable: Any) -> Any:
    """The tf.Variable inside a Keras variable; anything else as it is."""
    return getattr(variable, "value", variable) if hasattr(variable, "path") else variable
