"""A momentum that is kept as bits: its Keras variable holds no elements until somebody looks.

Keras, its files, checkpoints and Horovod's broadcasts all get at an optimizer's variable through these members, and so
see it as ever. What a graph of the compression stage needs goes past them, by `native` taken beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

__all__ = ["can_be_kept", "is_empty", "keep", "put", "read"]


def can_be_kept(variable: tf.Variable) -> bool:
    """Whether the variable may hold no elements: others are small, or round the momentum."""
    return bool(variable.dtype == tf.float32 and variable.shape.rank and variable.shape.num_elements())


def keep(variable: keras.Variable, bring_back: Callable[[], None]) -> None:
    """From now on the variable's value is asked of `bring_back`, which may `put` it, whenever somebody looks."""
    variable.__class__ = _KeptVariable
    variable._bring_back = bring_back


def read(variable: tf.Variable) -> tf.Tensor:
    """The value, flat, of no elements where it is kept elsewhere: its length is known when it is read."""
    value = variable.read_value()
    if not tf.executing_eagerly():
        # the shape that the variable was made with must not be taken for granted
        value = tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None] * value.shape.rank)
    return tf.reshape(value, [-1])


def is_empty(variable: tf.Variable) -> bool:
    """Whether the value is kept elsewhere; in eager code."""
    return not int(tf.size(variable.read_value()))


def put(variable: tf.Variable, value: tf.Tensor) -> None:
    """Writes a flat value, or one of no elements, which frees the memory."""
    shape = [-1, *variable.shape[1:]] if can_be_kept(variable) else variable.shape
    value = tf.reshape(tf.cast(value, variable.dtype), shape)
    if not tf.executing_eagerly():
        value = tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None] * value.shape.rank)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


class _KeptVariable(keras.Variable):
    _bring_back: Callable[[], None]

    @property
    def value(self) -> Any:
        """The tf.Variable, with its value in eager code."""
        if tf.executing_eagerly():
            self._bring_back()
        return super().value

    def _direct_assign(self, value: Any) -> None:
        put(self._value, tf.reshape(value, [-1]))
