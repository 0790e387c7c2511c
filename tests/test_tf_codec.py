"""The kernels as TensorFlow operations write the bytes of the core's kernels, and read them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_onebit import kernels, wire

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

from hvd_onebit.tensorflow import codec  # noqa: E402

SIZES = (1, 7, 8, 9, 63, 64, 65, 1023, 4099)


def _values(size: int, seed: int = 0) -> Any:
    return np.random.default_rng([size, seed]).standard_normal(size).astype(np.float32)


def _message(z: Any, block: int, scale: str, error: Any = None, live: Any = None) -> Any:
    message = np.empty(wire.message_num_bytes(z.size, block), np.uint8)
    kernels.compress(z, None, 0.0, error, message, block=block, scale=scale, live=live)
    return message


@pytest.mark.parametrize("scale", kernels.SCALES)
@pytest.mark.parametrize("block", [5, 64, 2048])
def test_compress_writes_the_kernels_bytes(scale: str, block: int) -> None:
    for size in SIZES:
        _check_compress(size, block, scale, codec.compress)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_average_decodes_to_the_kernels_floats(ranks: int) -> None:
    for size in SIZES:
        _check_average(size, ranks, codec.average)


def test_in_a_graph_too() -> None:
    """Where the graph optimizer rewrites what it can."""
    _check_compress(1023, 64, "rms", lambda *args, **kwargs: _in_graph(codec.compress, *args, **kwargs))
    _check_average(1023, 3, lambda *args, **kwargs: _in_graph(codec.average, *args, **kwargs))


def _in_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tf.function(lambda given: function(given, *args[1:], **kwargs), autograph=False)(args[0])


def _check_compress(size: int, block: int, scale: str, compress: Callable[..., Any]) -> None:
    z, error = _values(size), _values(size, 1)
    for live in (None, (_values(size, 2) > -1).astype(np.float32)):
        expected_error = error.copy()
        expected = _message(z, block, scale, expected_error, live)
        message, new_error = compress(tf.constant(z), tf.constant(error), block=block, scale=scale, live=live)
        np.testing.assert_array_equal(message.numpy(), expected)
        np.testing.assert_array_equal(new_error.numpy(), expected_error)


def _check_average(size: int, ranks: int, average: Callable[..., Any]) -> None:
    messages = [_message(_values(size, seed), 64, "rms") for seed in range(ranks)]
    for live in (None, (_values(size, 9) > -1).astype(np.float32)):
        expected = np.empty(size, np.float32)
        kernels.average(messages, expected, block=64, live=live)
        mean = average([tf.constant(message) for message in messages], size, block=64, live=live)
        np.testing.assert_array_equal(mean.numpy(), expected)


def test_a_block_that_is_not_finite_says_so_and_keeps_its_error() -> None:
    z, error = _values(200), _values(200, 1)
    z[70] = np.inf
    expected_error = error.copy()
    expected = _message(z, 64, "rms", expected_error)
    message, new_error = codec.compress(tf.constant(z), tf.constant(error), block=64, scale="rms", live=None)
    np.testing.assert_array_equal(message.numpy(), expected)
    np.testing.assert_array_equal(new_error.numpy(), expected_error)
    assert not codec.scales_finite([message], 200, block=64)
    finite = tf.constant(_message(error, 64, "rms"))
    assert codec.scales_finite([finite], 200, block=64)


def test_minus_zero_counts_as_positive_and_zeros_stay_zero() -> None:
    z = np.array([-0.0, 0.0], np.float32)
    message, error = codec.compress(tf.constant(z), tf.zeros([2]), block=2, scale="rms", live=None)
    assert message.numpy().tolist() == [0, 0, 0, 0, 0xFF]
    assert not error.numpy().any()
    assert not codec.average([message], 2, block=2, live=None).numpy().any()


def test_nothing_is_a_message_of_no_bytes() -> None:
    message, _ = codec.compress(tf.zeros([0]), tf.zeros([0]), block=64, scale="rms", live=None)
    assert message.shape == (0,)
