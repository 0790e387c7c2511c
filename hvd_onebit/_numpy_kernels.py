"""The kernels in NumPy: the fallback, and the readable form of what csrc/onebit.c does.

`hvd_onebit.kernels` checks every argument, then calls one of the functions here or their native twins; they give
the same bits, so the order of float32 operations is part of the contract. Arrays are worked through in chunks of whole
blocks, so that temporaries stay small unless a single block is large. `threads` has no effect here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_onebit import wire

_SUB_BLOCK = 2048  # elements whose sum is kept apart: part of the contract, see _sub_block_sums
_LANES = 32
_CHUNK = 1 << 16  # elements worked on at a time: some temporaries of this size fit a second-level cache

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]


@np.errstate(all="ignore")
def compress(
    gradients: Sequence[_Floats],
    momentum: _Floats | None,
    kept: Sequence[_Bytes] | None,
    beta: float,
    one_minus_beta: float,
    error: _Floats | None,
    message: _Bytes,
    block: int,
    mean: bool,
    live: _Floats | None,
    threads: int,
) -> None:
    """See `hvd_onebit.kernels.Kernels.compress`; `beta` and `one_minus_beta` are already rounded to float32."""
    beta32, one_minus_beta32 = np.float32(beta), np.float32(one_minus_beta)
    num_elements = gradients[0].size
    compressor = _Compressor(num_elements, error, message, block, mean, live)
    for begin, end in _chunks(num_elements, block):
        z = gradients[0][begin:end]
        for i, gradient in enumerate(gradients[1:]):
            z = np.add(z, gradient[begin:end], out=z if i else None)
        if len(gradients) > 1:
            z /= np.float32(len(gradients))
        if kept is not None:
            z = beta32 * _mean(kept, begin, end, num_elements, block) + one_minus_beta32 * z
        elif momentum is not None:
            z = beta32 * momentum[begin:end] + one_minus_beta32 * z
        compressor.compress_chunk(z, begin, end)
    compressor.pack_signs()


@np.errstate(all="ignore")
def reduce(
    messages: Sequence[_Bytes],
    error: _Floats | None,
    message: _Bytes,
    num_elements: int,
    block: int,
    mean: bool,
    live: _Floats | None,
    threads: int,
) -> None:
    """See `hvd_onebit.kernels.Kernels.reduce`."""
    compressor = _Compressor(num_elements, error, message, block, mean, live)
    for begin, end in _chunks(num_elements, block):
        compressor.compress_chunk(_mean(messages, begin, end, num_elements, block), begin, end)
    compressor.pack_signs()


@np.errstate(all="ignore")
def average(messages: Sequence[_Bytes], values: _Floats, block: int, live: _Floats | None, threads: int) -> None:
    """See `hvd_onebit.kernels.Kernels.average`."""
    for begin in range(0, values.size, _CHUNK):
        end = min(begin + _CHUNK, values.size)
        values[begin:end] = _mean(messages, begin, end, values.size, block)
        if live is not None:
            values[begin:end][live[begin:end] == 0] = 0


@np.errstate(all="ignore")
def apply(
    messages: Sequence[_Bytes],
    start: int,
    parameter: _Floats,
    momentum: _Floats | None,
    variance: _Floats | None,
    num_elements: int,
    block: int,
    step_size: float,
    eps: float,
    variance_correction: float,
    decay: float,
    hold: bool,
    threads: int,
) -> None:
    """See `hvd_onebit.kernels.Kernels.adam_apply`, and `momentum_apply` for variance None; the numbers are float32."""
    for begin in range(0, parameter.size, _CHUNK):
        part = slice(begin, min(begin + _CHUNK, parameter.size))
        m = _mean(messages, start + part.start, start + part.stop, num_elements, block)
        x = parameter[part]
        if decay != 1:
            x = x * np.float32(decay)
        if variance is None:
            x = x - np.float32(step_size) * m
        else:
            denominator: _Floats = np.sqrt(variance[part])
            denominator /= np.float32(variance_correction)
            denominator += np.float32(eps)
            direction: _Floats = np.divide(m, denominator)
            x = x - np.float32(step_size) * direction
            if hold:
                moving = variance[part] != 0
                x = np.where(moving, x, parameter[part])
                if momentum is not None:
                    m = np.where(moving, m, momentum[part])
        parameter[part] = x
        if momentum is not None:
            momentum[part] = m


@np.errstate(all="ignore")
def triad(a: _Floats, b: _Floats, c: _Floats, factor: float, threads: int) -> None:
    """See `hvd_onebit.kernels.Kernels.triad`."""
    for begin in range(0, a.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        np.multiply(np.float32(factor), c[part], out=a[part])
        np.add(b[part], a[part], out=a[part])


class _Compressor:
    """Compensates, measures, packs and keeps the error of the values it's given chunk by chunk, into one message."""

    def __init__(
        self, num_elements: int, error: _Floats | None, message: _Bytes, block: int, mean: bool, live: _Floats | None
    ) -> None:
        self._error, self._block, self._mean, self._live = error, block, mean, live
        self._scales = wire.scales_view(message, num_elements, block)
        self._bits = wire.bits_view(message, num_elements, block)
        self._signs = np.empty(num_elements, np.bool_)

    def compress_chunk(self, z: _Floats, begin: int, end: int) -> None:
        """Compress `z` plus the error of elements `begin` to `end`: whole blocks, but for the last."""
        if self._error is not None:
            z = z + self._error[begin:end]
        sizes = _block_sizes(begin, end, self._block)
        counts = sizes
        alive: NDArray[np.bool_] | None = None
        if self._live is not None:
            alive = self._live[begin:end] != 0
            z = np.where(alive, z, np.float32(0))
            counts = np.add.reduceat(alive, np.cumsum(sizes) - sizes, dtype=np.intp)
        scales = _scales(z, self._block, counts, self._mean)
        self._scales[begin // self._block :][: scales.size] = scales
        signs = np.greater_equal(z, 0, out=self._signs[begin:end])
        if self._error is not None:
            spread = np.repeat(scales, sizes)
            kept = np.isfinite(spread) if alive is None else np.isfinite(spread) & alive
            np.subtract(z, np.where(signs, spread, -spread), out=self._error[begin:end], where=kept)

    def pack_signs(self) -> None:
        """Write the sign bits, once every chunk was compressed."""
        self._bits[:] = wire.pack_signs(self._signs)


def _chunks(num_elements: int, block: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole blocks, at least one, of about _CHUNK elements."""
    length = max(_CHUNK // block, 1) * block
    for begin in range(0, num_elements, length):
        yield begin, min(begin + length, num_elements)


def _block_sizes(begin: int, end: int, block: int) -> NDArray[np.intp]:
    """Number of the elements `begin` to `end` in each block they touch."""
    borders = np.arange(begin // block, -(-end // block) + 1, dtype=np.intp) * block
    borders = np.clip(borders, begin, end)
    return borders[1:] - borders[:-1]


def _mean(messages: Sequence[_Bytes], begin: int, end: int, num_elements: int, block: int) -> _Floats:
    """Mean over the messages of elements `begin` to `end`: summed in rank order, then divided."""
    sizes = _block_sizes(begin, end, block)
    total: _Floats | None = None
    for message in messages:
        scales = wire.scales_view(message, num_elements, block)[begin // block :][: sizes.size]
        spread = np.repeat(scales.astype(np.float32), sizes)
        signs = wire.unpack_signs(wire.bits_view(message, num_elements, block), begin, end)
        values = np.where(signs, spread, -spread)
        total = values if total is None else total + values
    assert total is not None
    return total if len(messages) == 1 else total / np.float32(len(messages))


def _scales(z: _Floats, block: int, counts: NDArray[np.intp], mean: bool) -> _Floats:
    """Scale of each block of `z` that has `counts` live elements (the held ones are 0 in `z`)."""
    whole = z.size // block
    totals = np.concatenate(
        [_block_sums(z[: whole * block].reshape(whole, block), mean), _block_sums(z[None, whole * block :], mean)]
    )[: counts.size]
    means = totals / np.maximum(counts, 1)
    scales = (means if mean else np.sqrt(means)).astype(np.float32)
    return np.where(np.isfinite(scales), scales, np.float32("nan"))


def _block_sums(z: _Floats, mean: bool) -> NDArray[np.float64]:
    """Sum of |z| or z*z over each row: the sums of its sub-blocks, added one after the other."""
    rows, width = z.shape
    whole = width // _SUB_BLOCK
    sums = _sub_block_sums(z[:, : whole * _SUB_BLOCK].reshape(rows * whole, _SUB_BLOCK), mean).reshape(rows, whole)
    total = np.zeros(rows)
    for column in range(whole):
        total += sums[:, column]
    total += _sub_block_sums(z[:, whole * _SUB_BLOCK :], mean)
    return total


def _sub_block_sums(z: _Floats, mean: bool) -> NDArray[np.float64]:
    """Sum of |z| or z*z over each row of at most _SUB_BLOCK elements.

    Element i goes to float64 lane i % 32, in order, and the lanes are added as a tree: an order that plain C, registers
    2, 4 or 8 wide and this function can all keep. np.sum's order isn't specified, so the loop is written out.
    """
    rows, width = z.shape
    lanes = np.zeros((rows, _LANES))
    if rows == 0 or width == 0:
        return lanes[:, 0]
    many = max(_CHUNK // width, 1)
    if rows > many:
        return np.concatenate([_sub_block_sums(z[row : row + many], mean) for row in range(0, rows, many)])
    depth = -(-width // _LANES)
    terms = np.zeros((depth, rows, _LANES))
    whole = width // _LANES
    terms[:whole] = z[:, : whole * _LANES].reshape(rows, whole, _LANES).swapaxes(0, 1)
    if width % _LANES:
        terms[whole, :, : width % _LANES] = z[:, whole * _LANES :]
    if mean:
        np.abs(terms, out=terms)
    else:
        np.multiply(terms, terms, out=terms)
    for term in terms:
        lanes += term
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
