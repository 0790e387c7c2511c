"""OneBitAdam: Adam that knows how it wants to be compressed. Alone it is plain Adam."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from hvd_onebit.options import CompressionOptions, options_from

__all__ = ["OneBitAdam"]

_OPTION_NAMES = frozenset(CompressionOptions.__dataclass_fields__)


@keras.saving.register_keras_serializable(package="hvd_onebit")
class OneBitAdam(keras.optimizers.Adam):
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

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One full-precision update of one variable."""
        if self.weight_decay and not self.decoupled_weight_decay and self._use_weight_decay(variable):
            gradient = ops.add(gradient, ops.multiply(variable, ops.cast(self.weight_decay, variable.dtype)))
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

    def _apply_weight_decay(self, variables: Any) -> None:
        # Keras's own is decoupled; a coupled one is part of the gradient
        if self.decoupled_weight_decay:
            super()._apply_weight_decay(variables)

    def get_config(self) -> dict[str, Any]:
        """Keras's, with the compression options that differ from their defaults."""
        default = CompressionOptions()
        changed = {
            name: list(value) if isinstance(value, tuple) else value
            for name in sorted(_OPTION_NAMES)
            if (value := getattr(self.compression_options, name)) != getattr(default, name)
        }
        own = {"bias_correction": self.bias_correction, "decoupled_weight_decay": self.decoupled_weight_decay}
        return {**super().get_config(), **own, **changed}


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
