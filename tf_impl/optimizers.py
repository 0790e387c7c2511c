"""The family: optimizers that know how they want to be compressed.

Alone, or in one process, each is the plain optimizer that it warms up with; `DistributedOptimizer` does the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvd_onebit.options import CompressionOptions, local_steps_options, options_from
from hvd_onebit.rules import LambFactors, check_range
from hvd_onebit.tensorflow.rules import COEFF_AVERAGE, COEFF_UPDATES, LAMB_ROWS

__all__ = ["Lamb", "LambUpdate", "OneBitAdam", "OneBitLamb", "OneBitSGD", "ZeroOneAdam"]

# Keras's class comes next in the order of methods; it is unknown to type checkers, and so are its attributes
_Base: Any = object


class _WithOptions(_Base):
    """Keeps the compression options in Keras's configuration."""

    compression_options: CompressionOptions

    def get_config(self) -> dict[str, Any]:
        """Keras's, with the compression options that differ from their defaults."""
        default = CompressionOptions()
        changed = {
            name: list(value) if isinstance(value, tuple) else value
            for name in sorted(CompressionOptions.__dataclass_fields__)
            if (value := getattr(self.compression_options, name)) != getattr(default, name)
        }
        return {**super().get_config(), **changed}


class _WithCoupledDecay(_Base):
    """Weight decay beside the update, as Keras has it, or added to the gradient."""

    decoupled_weight_decay: bool

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One full-precision update of one variable."""
        if self.weight_decay and not self.decoupled_weight_decay and self._use_weight_decay(variable):
            gradient = ops.add(gradient, ops.multiply(variable, ops.cast(self.weight_decay, variable.dtype)))
        super().update_step(gradient, variable, learning_rate)

    def _apply_weight_decay(self, variables: Any) -> None:
        # Keras's own is decoupled; a coupled one is part of the gradient
        if self.decoupled_weight_decay:
            super()._apply_weight_decay(variables)

    def get_config(self) -> dict[str, Any]:
        """Keras's, with this option."""
        return {**super().get_config(), "decoupled_weight_decay": self.decoupled_weight_decay}


class _BiasedAdam(keras.optimizers.Adam):
    """keras.optimizers.Adam with an option bias_correction."""

    bias_correction: bool

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One full-precision update of one variable."""
        if self.bias_correction:
            super().update_step(gradient, variable, learning_rate)
        else:
            self._uncorrected_step(gradient, variable, learning_rate)

    def _uncorrected_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        lr = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        self.assign_add(m, ops.multiply(ops.subtract(gradient, m), 1 - self.beta_1))
        self.assign_add(v, ops.multiply(ops.subtract(ops.square(gradient), v), 1 - self.beta_2))
        if self.amsgrad:
            v_hat = self._velocity_hats[index]
            self.assign(v_hat, ops.maximum(v_hat, v))
            v = v_hat
        self.assign_sub(variable, ops.divide(ops.multiply(m, lr), ops.add(ops.sqrt(v), self.epsilon)))

    def get_config(self) -> dict[str, Any]:
        """Keras's, with this option."""
        return {**super().get_config(), "bias_correction": self.bias_correction}


@keras.saving.register_keras_serializable(package="hvd_onebit")
class OneBitAdam(_WithOptions, _WithCoupledDecay, _BiasedAdam):
    """Adam with 1-bit compression once its variance is frozen (Tang et al. 2021, arXiv 2102.02888).

    In one process, or before `DistributedOptimizer` wraps it, it is keras.optimizers.Adam.

    Args:
        learning_rate: as for keras.optimizers.Adam, and so beta_1, beta_2, epsilon, amsgrad, weight_decay, clipnorm and
            all other keyword arguments that it takes.
        beta_1: decay rate of the momentum.
        beta_2: decay rate of the variance.
        epsilon: added to the root of the variance before its bias is corrected, as Keras does.
        amsgrad: as for keras.optimizers.Adam.
        bias_correction: False for the paper's Adam, which corrects no bias.
        decoupled_weight_decay: True, as Keras's Adam and AdamW have it: `weight_decay` acts beside the update. False
            adds it to the gradient, as torch.optim.Adam does.
        **kwargs: Keras's, and options of `hvd_onebit.options.CompressionOptions`: freeze_step, exchange, scale, block,
            ...

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.

    Example:
        >>> optimizer = onebit.DistributedOptimizer(OneBitAdam(1e-3, freeze_step=2000))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        **kwargs: Any,
    ) -> None:
        kerass, compression = _split(kwargs)
        options = options_from(compression)
        super().__init__(
            learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad, **kerass
        )
        self.compression_options = options
        self.bias_correction = bias_correction
        self.decoupled_weight_decay = decoupled_weight_decay


@keras.saving.register_keras_serializable(package="hvd_onebit")
class OneBitSGD(_WithOptions, _WithCoupledDecay, keras.optimizers.SGD):
    """SGD whose velocity travels as bits, from the first step on or after `freeze_step` updates.

    In one process, or before `DistributedOptimizer` wraps it, it is keras.optimizers.SGD.

    Args:
        learning_rate: as for keras.optimizers.SGD, and so momentum, weight_decay, clipnorm and all other keyword
            arguments that it takes, but nesterov.
        momentum: decay rate of the velocity.
        decoupled_weight_decay: True, as Keras has it: `weight_decay` acts beside the update. False adds it to the
            gradient, as torch.optim.SGD does.
        **kwargs: Keras's, and options of `hvd_onebit.options.CompressionOptions`; freeze_step is 0 unless given.

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        *,
        decoupled_weight_decay: bool = True,
        **kwargs: Any,
    ) -> None:
        kerass, compression = _split(kwargs)
        options = options_from({"freeze_step": 0, **compression})
        super().__init__(learning_rate=learning_rate, momentum=momentum, **kerass)
        self.compression_options = options
        self.decoupled_weight_decay = decoupled_weight_decay

    def get_config(self) -> dict[str, Any]:
        """Keras's, with the compression options that differ from their defaults."""
        config = {**super().get_config(), "freeze_step": self.compression_options.freeze_step}
        del config["nesterov"]  # refused
        return config


class LambUpdate(_Base):
    """LAMB's update, with the average of its coefficients, over a class that keeps momentum and variance.

    Computed in float32 at least, whatever the variable's type: in bfloat16 1 - beta_2 would be 0.

    Attributes:
        lamb_factors: bounds of the coefficients. This class's own are those of keras.optimizers.Lamb: none.
        bias_correction: False leaves the biases of momentum and variance in.
        lamb_table: float64, shape (LAMB_ROWS, variables): see `rules.py`.
    """

    lamb_factors = LambFactors(max_coeff=float("inf"), min_coeff=0.0)
    bias_correction = True

    def build(self, variables: Any) -> None:
        """Creates all variables."""
        if not self.built:
            super().build(variables)
            self.lamb_table = self.add_variable((LAMB_ROWS, len(variables)), dtype="float64", name="lamb_table")

    def update_weight_decay_of(self, variable: Any) -> float:
        """The weight decay that is part of the update, and so of its norm."""
        return 0.0

    def norm_of(self, tensor: tf.Tensor, variable: Any) -> tf.Tensor:
        """The 2-norm of a tensor of `variable`'s shape, float64."""
        return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(tensor, tf.float64))))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One full-precision update of one variable."""
        index = self._get_variable_index(variable)
        dtype = tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32
        m, v = self._momentums[index], self._velocities[index]
        x, g = (tf.cast(tf.convert_to_tensor(each), dtype) for each in (variable, gradient))
        old_m, old_v = (tf.cast(tf.convert_to_tensor(each), dtype) for each in (m, v))
        new_m = old_m + (g - old_m) * (1 - self.beta_1)
        new_v = old_v + (tf.square(g) - old_v) * (1 - self.beta_2)
        self.assign(m, new_m)
        self.assign(v, new_v)
        if self.bias_correction:
            step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, dtype)
            new_m = new_m / (1.0 - tf.pow(tf.constant(self.beta_1, dtype), step))
            new_v = new_v / (1.0 - tf.pow(tf.constant(self.beta_2, dtype), step))
        update = new_m / (tf.sqrt(new_v) + self.epsilon)
        weight_decay = self.update_weight_decay_of(variable)
        if weight_decay:
            update = update + x * weight_decay
        coefficient = self._next_coefficient(index, self.norm_of(x, variable), self.norm_of(update, variable))
        step_size = tf.cast(coefficient * tf.cast(learning_rate, tf.float64), dtype)
        self.assign(variable, x - step_size * update)

    def _next_coefficient(self, index: int, parameter_norm: tf.Tensor, update_norm: tf.Tensor) -> tf.Tensor:
        """LAMB's c, which is averaged in its table; 1 when a norm is 0, and then left out."""
        bounds = self.lamb_factors
        counts = (parameter_norm > 0.0) & (update_norm > 0.0)
        ratio = parameter_norm / tf.where(counts, update_norm, 1.0)
        ratio = tf.minimum(tf.maximum(ratio, bounds.min_coeff), bounds.max_coeff)
        table = self.lamb_table.value
        average, updates = table[COEFF_AVERAGE, index], table[COEFF_UPDATES, index]
        new = average * bounds.coeff_beta + ratio * (1.0 - bounds.coeff_beta)
        table.scatter_nd_update(
            [[COEFF_AVERAGE, index], [COEFF_UPDATES, index]],
            tf.stack([tf.where(counts, new, average), tf.where(counts, updates + 1.0, updates)]),
        )
        return tf.where(counts, ratio, tf.ones_like(ratio))


@keras.saving.register_keras_serializable(package="hvd_onebit")
class Lamb(LambUpdate, keras.optimizers.Lamb):
    """LAMB (You et al. 2020, arXiv 1904.00962), uncompressed: Adam whose step is scaled to each tensor's norm.

    u = m/(sqrt(v)+eps) + weight_decay*x;  c = clip(||x||/||u||, min_coeff, max_coeff), 1 if a norm is 0;  x -= lr*c*u.

    It differs from keras.optimizers.Lamb in the bounds of c, and in that weight decay is part of u.

    Args:
        learning_rate: as for keras.optimizers.Lamb, and so beta_1, beta_2, epsilon, clipnorm and all other keyword
            arguments that it takes.
        beta_1: decay rate of the momentum.
        beta_2: decay rate of the variance.
        epsilon: added to the root of the variance.
        bias_correction: False leaves the biases of momentum and variance in.
        max_coeff: upper bound of the trust ratio c.
        min_coeff: lower bound of the trust ratio c.
        coeff_beta: decay rate of the average of c, which 1-bit LAMB freezes.
        **kwargs: Keras's.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        **kwargs: Any,
    ) -> None:
        factors = LambFactors(max_coeff=max_coeff, min_coeff=min_coeff, coeff_beta=coeff_beta)
        check_range("epsilon", epsilon, 0.0)
        check_range("weight_decay", kwargs.get("weight_decay") or 0.0, 0.0)
        check_range("beta_1", beta_1, 0.0, below=1.0)
        check_range("beta_2", beta_2, 0.0, below=1.0)
        super().__init__(learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **kwargs)
        self.lamb_factors = factors
        self.bias_correction = bias_correction

    def update_weight_decay_of(self, variable: Any) -> float:
        """The weight decay that is part of the update, and so of its norm."""
        return float(self.weight_decay or 0.0) if self._use_weight_decay(variable) else 0.0

    def _apply_weight_decay(self, variables: Any) -> None:
        # it is part of the update
        pass

    def get_config(self) -> dict[str, Any]:
        """Keras's, with these options."""
        own = {name: getattr(self.lamb_factors, name) for name in ("max_coeff", "min_coeff", "coeff_beta")}
        return {**super().get_config(), "bias_correction": self.bias_correction, **own}


@keras.saving.register_keras_serializable(package="hvd_onebit")
class OneBitLamb(_WithOptions, Lamb):
    """LAMB with 1-bit compression once its variance is frozen (Li et al. 2021, arXiv 2104.06069).

    Args:
        learning_rate: as for `Lamb`, and so all but these.
        beta_1: decay rate of the momentum.
        beta_2: decay rate of the variance.
        epsilon: added to the root of the variance.
        bias_correction: False leaves the biases of momentum and variance in.
        max_coeff: upper bound of the trust ratio c.
        min_coeff: lower bound of the trust ratio c.
        coeff_beta: decay rate of the average of c.
        factor_max: upper bound of r, by which the frozen coefficient follows the variance.
        factor_min: its lower bound; factor_min = factor_max = 1 keeps the coefficient frozen.
        factor_threshold: r changes by at most this share in a step.
        **kwargs: Keras's, and options of `hvd_onebit.options.CompressionOptions`.

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **kwargs: Any,
    ) -> None:
        kerass, compression = _split(kwargs)
        options = options_from(compression)
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            coeff_beta=coeff_beta,
            **kerass,
        )
        self.lamb_factors = replace(
            self.lamb_factors, factor_max=factor_max, factor_min=factor_min, factor_threshold=factor_threshold
        )
        self.compression_options = options

    def get_config(self) -> dict[str, Any]:
        """Keras's, with these options."""
        own = {name: getattr(self.lamb_factors, name) for name in ("factor_max", "factor_min", "factor_threshold")}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="hvd_onebit")
class ZeroOneAdam(_WithOptions, _WithCoupledDecay, _BiasedAdam):
    """0/1 Adam (Lu et al. 2022, arXiv 2202.06009): local steps between ever rarer one-bit synchronisations.

    In one process, or before `DistributedOptimizer` wraps it, it is keras.optimizers.Adam.

    Args:
        learning_rate: as for keras.optimizers.Adam, and so beta_1, beta_2, epsilon, weight_decay, clipnorm and all
            other keyword arguments that it takes, but amsgrad.
        beta_1: decay rate of the momentum.
        beta_2: decay rate of the variance.
        epsilon: added to the root of the variance before its bias is corrected, as Keras does.
        bias_correction: False for the paper's Adam, which corrects no bias.
        decoupled_weight_decay: as for OneBitAdam.
        var_freeze_step: updates after which the variance is frozen; "auto" for 1-bit Adam's rule.
        var_update_scaler: kappa: the variance is updated at gaps of 2**floor(j/kappa).
        local_step_scaler: the gap between synchronisations doubles every so many steps after the freeze; None: each
            time the learning rate has halved.
        local_step_clipper: H, the longest such gap.
        **kwargs: Keras's, and options of `hvd_onebit.options.CompressionOptions` but freeze_step.

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        var_freeze_step: int | str = "auto",
        var_update_scaler: int = 16,
        local_step_scaler: int | None = None,
        local_step_clipper: int = 16,
        **kwargs: Any,
    ) -> None:
        kerass, compression = _split(kwargs)
        options = local_steps_options(
            compression,
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
        )
        super().__init__(learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **kerass)
        self.compression_options = options
        self.bias_correction = bias_correction
        self.decoupled_weight_decay = decoupled_weight_decay
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper

    def get_config(self) -> dict[str, Any]:
        """Keras's, with the compression options that differ from their defaults."""
        config = super().get_config()
        del config["amsgrad"]
        own = {
            "var_freeze_step": config.pop("freeze_step", self.compression_options.freeze_step),
            "var_update_scaler": self.var_update_scaler,
            "local_step_scaler": self.local_step_scaler,
            "local_step_clipper": self.local_step_clipper,
        }
        return {**config, **own}


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keras's keyword arguments, and ours: what Keras doesn't know is ours, so that a misspelt option is named."""
    known = _KERAS_ARGUMENTS
    return (
        {name: value for name, value in kwargs.items() if name in known},
        {name: value for name, value in kwargs.items() if name not in known},
    )


_KERAS_ARGUMENTS = frozenset(
    (
        "weight_decay",
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "ema_momentum",
        "ema_overwrite_frequency",
        "loss_scale_factor",
        "gradient_accumulation_steps",
        "name",
    )
)
