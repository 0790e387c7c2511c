"""The three kernels as TensorFlow operations, for tensors on any device; CPU tensors go through the core's kernels.

Both write the same bytes from the same scales (the format is in `hvd_onebit/wire.py`). Tensors can't be written in
place, so these return what the core's `Codec` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_onebit import threads
from hvd_onebit.wire import num_blocks

__all__ = ["average", "compress", "is_on_host", "num_threads", "scales_finite"]

_BITS = tuple(1 << i for i in range(8))
_NAN = float("nan")


def is_on_host(variables: Sequence[Any]) -> bool:
    """True when the core's kernels can work on all variables' memory."""
    return all("GPU" not in v.device.upper() and "TPU" not in v.device.upper() for v in variables)


def num_threads() -> int:
    """Threads that the core's kernels may use: TensorFlow's own for one operation at most, if it was told a number."""
    return threads.num_threads(tf.config.threading.get_intra_op_parallelism_threads() or None)


def compress(
    z: tf.Tensor, error: tf.Tensor | None, *, block: int, scale: str, live: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The message of `z` + `error`, and the new error; blocks that hold a non-finite value keep their error.

    Args:
        z: float32, shape (n,), n known.
        error: float32, shape (n,), or None for no error feedback.
        block: elements per scale.
        scale: "rms" or "mean".
        live: float32, shape (n,), or None: elements where it's 0 take no part.
    """
    num_elements = int(z.shape[0])
    if not num_elements:
        return tf.zeros([0], tf.uint8), error
    if error is not None:
        z = z + error
    held = None if live is None else tf.equal(live, 0.0)
    counted = tf.ones_like(z) if held is None else tf.where(held, 0.0, 1.0)
    parts = tf.cast(_blocks(z if held is None else tf.where(held, 0.0, z), block), tf.float64)
    totals = tf.reduce_sum(tf.square(parts) if scale == "rms" else tf.abs(parts), 1)
    means = totals / tf.maximum(tf.reduce_sum(tf.cast(_blocks(counted, block), tf.float64), 1), 1.0)
    scales = tf.cast(tf.sqrt(means) if scale == "rms" else means, tf.float32)
    scales = tf.where(tf.math.is_finite(scales), scales, _NAN)
    positive = z >= 0 if held is None else (z >= 0) | held
    message = tf.concat([tf.reshape(tf.bitcast(scales, tf.uint8), [-1]), _pack(positive, num_elements)], 0)
    if error is None:
        return message, None
    each = _spread(scales, num_elements, block)
    keep = tf.math.is_finite(each) if held is None else tf.math.is_finite(each) & ~held
    return message, tf.where(keep, z - tf.where(positive, each, -each), error)


def average(messages: Sequence[tf.Tensor], num_elements: int, *, block: int, live: tf.Tensor | None) -> tf.Tensor:
    """The mean of what `messages` decode to: float32, shape (num_elements,), 0 where it's held."""
    total = _decode(messages[0], num_elements, block)
    for message in messages[1:]:
        total = total + _decode(message, num_elements, block)
    if len(messages) > 1:
        # not a constant, by whose rounded inverse the graph optimizer would multiply
        total = total / tf.raw_ops.PlaceholderWithDefault(input=float(len(messages)), shape=[])
    return total if live is None else tf.where(tf.equal(live, 0.0), 0.0, total)


def scales_finite(messages: Sequence[tf.Tensor], num_elements: int, *, block: int) -> tf.Tensor:
    """Whether all scales of all messages are finite: bool, shape ()."""
    scales = [_scales(message, num_elements, block) for message in messages]
    return tf.reduce_all(tf.math.is_finite(tf.concat(scales, 0)))


def _blocks(values: tf.Tensor, block: int) -> tf.Tensor:
    size = int(values.shape[0])
    block = min(block, size)
    return tf.reshape(tf.pad(values, [[0, -size % block]]), [-1, block])


def _spread(scales: tf.Tensor, num_elements: int, block: int) -> tf.Tensor:
    block = min(block, max(num_elements, 1))
    return tf.reshape(tf.repeat(scales, block), [-1])[:num_elements]


def _pack(positive: tf.Tensor, num_elements: int) -> tf.Tensor:
    padded = tf.pad(positive, [[0, -num_elements % 8]], constant_values=True)
    weighted = tf.cast(tf.reshape(padded, [-1, 8]), tf.int32) * tf.constant(_BITS, tf.int32)
    return tf.cast(tf.reduce_sum(weighted, 1), tf.uint8)


def _scales(message: tf.Tensor, num_elements: int, block: int) -> tf.Tensor:
    count = num_blocks(num_elements, block)
    return tf.bitcast(tf.reshape(message[: 4 * count], [count, 4]), tf.float32)


def _decode(message: tf.Tensor, num_elements: int, block: int) -> tf.Tensor:
    each = _spread(_scales(message, num_elements, block), num_elements, block)
    signs = tf.cast(message[4 * num_blocks(num_elements, block) :], tf.int32)
    bits = tf.bitwise.bitwise_and(signs[:, None], tf.constant(_BITS, tf.int32))
    return tf.where(tf.reshape(bits, [-1])[:num_elements] != 0, each, -each)
