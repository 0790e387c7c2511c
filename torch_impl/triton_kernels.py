"""The kernels in Triton, for tensors on an NVIDIA GPU: the same bits as the core's C kernels.

The arithmetic is that of `hvd_onebit.kernels`, to the order of every rounding; the order in which a scale's terms are
added is that of `hvd_onebit._numpy_kernels`, from which the number of partial sums is taken. So that the compiler keeps
to it, multiplications and additions are not fused (`enable_fp_fusion=False` at every launch), divisions and roots are
the correctly rounded ones, and no sum of floats is left to `tl.sum`, whose order is not specified, unless it has two
terms.

Each kernel reads and writes every value once, but for two cases: a scale that no single program can compute (a block of
more than a sub-block, or of a length that is no multiple of 8) takes a pass over the values before the one that writes
bits and errors; and within a program values are read again for that second pass, from the cache.

With TRITON_INTERPRET=1 in the environment before Triton is imported, all of this runs on CPU tensors: that is how the
tests compare it with C.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvd_onebit._numpy_kernels import _LANES as LANES
from hvd_onebit._numpy_kernels import _SUB_BLOCK as SUB_BLOCK
from hvd_onebit.wire import message_num_bytes, num_blocks

__all__ = ["adam_apply", "average", "compress", "momentum_apply", "reduce"]

_WARPS = 4
_GROUPS = 32 * _WARPS // LANES  # sub-blocks that a program sums at a time: a thread for each partial sum
_BYTES = 128  # sign bytes that a program writes at a time: at least one a thread, as no value may be read by two
_TILE = 1024
_LAUNCH = {"num_warps": _WARPS, "enable_fp_fusion": False}


# ---- On the device. BLOCK is the number of elements that share a scale, 0 for all of them; NUM the number of messages
# that are decoded, 0 where a gradient is compressed. What isn't given is None.


@triton.jit
def _decode(bits, stride, scales, num_scales, index, inside, BLOCK: tl.constexpr, NUM: tl.constexpr):
    """Mean of what the messages decode to at `index`: summed in rank order, then divided."""
    which = index // BLOCK if BLOCK else index * 0
    total = _signed(bits, scales, index, which, inside)
    for _ in range(1, NUM):
        bits += stride
        scales += num_scales
        total = total + _signed(bits, scales, index, which, inside)
    if NUM > 1:
        total = tl.div_rn(total, tl.full(total.shape, NUM, tl.float32))
    return total


@triton.jit
def _signed(bits, scales, index, which, inside):
    """A message's values at `index`."""
    byte = tl.load(bits + index // 8, mask=inside, other=0).to(tl.int32)
    positive = (byte >> (index % 8).to(tl.int32)) & 1
    # a product, as the negation of 0 is written as 0 - 0
    return tl.load(scales + which, mask=inside, other=0.0) * tl.where(positive != 0, 1.0, -1.0)


@triton.jit
def _value(
    gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, index, inside,
    BLOCK: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """What is compressed, at `index`; 0 where it is held or not inside."""
    if NUM:
        value = _decode(bits, stride, scales, num_scales, index, inside, BLOCK, NUM)
    else:
        value = tl.load(gradient + index, mask=inside, other=0.0)
        if momentum is not None:
            value = beta * tl.load(momentum + index, mask=inside, other=0.0) + one_minus_beta * value
    if error is not None:
        value = value + tl.load(error + index, mask=inside, other=0.0)
    if live is not None:
        inside = inside & (tl.load(live + index, mask=inside, other=0.0) != 0)
    return tl.where(inside, value, 0.0)


@triton.jit
def _sub_block_sums(
    gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, group, num_subs, rows, n,
    BLOCK: tl.constexpr, NUM: tl.constexpr, MEAN: tl.constexpr, SUB: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Sum of |z| or z*z over each of the sub-blocks `group`, and how many live elements they have.

    Element i of a sub-block goes to lane i % LANES, in order; then one half of the lanes is added to the other, until
    one is left.
    """
    block_of = group // num_subs
    start = block_of * BLOCK + group % num_subs * SUB
    stop = tl.minimum(start + SUB, n)
    if BLOCK:
        stop = tl.minimum(stop, (block_of + 1) * BLOCK)
    LANES: tl.constexpr = 1 << HALVINGS
    lane = tl.arange(0, LANES)
    lanes = tl.zeros([group.shape[0], LANES], tl.float64)
    found = tl.zeros([group.shape[0], LANES], tl.int32)
    for row in tl.range(0, rows, loop_unroll_factor=8):
        index = start[:, None] + (row * LANES + lane)[None, :]
        inside = index < stop[:, None]
        value = _value(
            gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, index, inside,
            BLOCK, NUM,
        ).to(tl.float64)  # fmt: skip
        lanes = lanes + (tl.abs(value) if MEAN else value * value)
        if live is not None:
            found += (inside & (tl.load(live + index, mask=inside, other=0.0) != 0)).to(tl.int32)
    for half in tl.static_range(1, HALVINGS + 1):
        lanes = tl.sum(tl.reshape(lanes, [group.shape[0], 2, LANES >> half]), axis=1)
    total = tl.reshape(lanes, [group.shape[0]])
    count = tl.maximum(stop - start, 0)
    if live is not None:
        count = tl.sum(found, axis=1).to(tl.int64)
    return total, count


@triton.jit
def _scale(total, count, MEAN: tl.constexpr):
    """Scale of a block from the sum over its live elements; always the same NaN where that isn't finite."""
    mean = total / tl.maximum(count, 1).to(tl.float64)
    scale = (mean if MEAN else tl.sqrt(mean)).to(tl.float32)
    finite = scale <= 3.4028234663852886e38
    return tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _feed_back(
    gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, out_bits, out_scales,
    first_byte, stop, BLOCK: tl.constexpr, NUM: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Sign bits and errors of the elements from byte `first_byte` on, but not beyond element `stop`."""
    byte = first_byte + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    index = byte[:, None] * 8 + bit[None, :]
    inside = index < stop
    value = _value(
        gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, index, inside,
        BLOCK, NUM,
    )  # fmt: skip
    positive = value >= 0
    packed = tl.sum(positive.to(tl.int32) << bit[None, :], axis=1)
    tl.store(out_bits + byte, packed.to(tl.uint8), mask=byte * 8 < stop)
    if error is not None:
        scale = tl.load(out_scales + (index // BLOCK if BLOCK else index * 0), mask=inside, other=0.0)
        kept = inside & (scale == scale)
        if live is not None:
            kept = kept & (tl.load(live + index, mask=inside, other=0.0) != 0)
        tl.store(error + index, value - scale * tl.where(positive, 1.0, -1.0), mask=kept)


@triton.jit
def _compress_blocks(
    gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, out_bits, out_scales,
    rows, n, BLOCK: tl.constexpr, NUM: tl.constexpr, MEAN: tl.constexpr, SUB: tl.constexpr, HALVINGS: tl.constexpr,
    GROUPS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """All of a compression, where a block is no longer than a sub-block and starts at a byte of its own."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = first + tl.arange(0, GROUPS)
    total, count = _sub_block_sums(
        gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, group, 1, rows, n,
        BLOCK, NUM, MEAN, SUB, HALVINGS,
    )  # fmt: skip
    tl.store(out_scales + group, _scale(total, count, MEAN), mask=group < num_scales)
    # Errors are written below that other threads must have read above, and scales are read that others have written.
    tl.debug_barrier()
    begin = first * BLOCK
    stop = tl.minimum(begin + GROUPS * BLOCK, n) if BLOCK else begin + n
    for byte in range(begin // 8, (stop + 7) // 8, BYTES):
        _feed_back(
            gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, out_bits,
            out_scales, byte, stop, BLOCK, NUM, BYTES,
        )  # fmt: skip


@triton.jit
def _sums_of_sub_blocks(
    gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, sums, counts, num_subs,
    num_groups, rows, n, BLOCK: tl.constexpr, NUM: tl.constexpr, MEAN: tl.constexpr, SUB: tl.constexpr,
    HALVINGS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """First of three kernels where blocks are longer than a sub-block, or share bytes."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    total, count = _sub_block_sums(
        gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, group, num_subs, rows,
        n, BLOCK, NUM, MEAN, SUB, HALVINGS,
    )  # fmt: skip
    tl.store(sums + group, total, mask=group < num_groups)
    tl.store(counts + group, count, mask=group < num_groups)


@triton.jit
def _scales_of_blocks(sums, counts, out_scales, num_subs, num_scales, MEAN: tl.constexpr, TILE: tl.constexpr):
    """Second: the sums of a block's sub-blocks, added one after the other."""
    block_of = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block_of < num_scales
    total = tl.zeros([TILE], tl.float64)
    count = tl.zeros([TILE], tl.int64)
    for sub in tl.range(0, num_subs, loop_unroll_factor=8):
        total = total + tl.load(sums + block_of * num_subs + sub, mask=inside, other=0.0)
        count += tl.load(counts + block_of * num_subs + sub, mask=inside, other=0)
    tl.store(out_scales + block_of, _scale(total, count, MEAN), mask=inside)


@triton.jit
def _bits_and_errors(
    gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, out_bits, out_scales, n,
    BLOCK: tl.constexpr, NUM: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Third."""
    _feed_back(
        gradient, momentum, beta, one_minus_beta, bits, stride, scales, num_scales, error, live, out_bits, out_scales,
        tl.program_id(0).to(tl.int64) * BYTES, n, BLOCK, NUM, BYTES,
    )  # fmt: skip


@triton.jit
def _average(
    bits, stride, scales, num_scales, live, values, n, BLOCK: tl.constexpr, NUM: tl.constexpr, TILE: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < n
    value = _decode(bits, stride, scales, num_scales, index, inside, BLOCK, NUM)
    if live is not None:
        value = tl.where(tl.load(live + index, mask=inside, other=0.0) != 0, value, 0.0)
    tl.store(values + index, value, mask=inside)


@triton.jit
def _apply(
    bits, stride, scales, num_scales, start, parameter, momentum, variance, n, step_size, eps, correction, decay,
    BLOCK: tl.constexpr, NUM: tl.constexpr, HOLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < n
    m = _decode(bits, stride, scales, num_scales, index + start, inside, BLOCK, NUM)
    x = tl.load(parameter + index, mask=inside, other=0.0) * decay
    if variance is None:
        x = x - step_size * m
    else:
        v = tl.load(variance + index, mask=inside, other=1.0)
        root = tl.div_rn(tl.sqrt_rn(v), tl.full(v.shape, 0, tl.float32) + correction)
        x = x - step_size * tl.div_rn(m, root + eps)
        if HOLD:
            inside = inside & (v != 0)
    tl.store(parameter + index, x, mask=inside)
    tl.store(momentum + index, m, mask=inside)


# ---- On the host: the arguments of hvd_onebit.kernels, on tensors.


def compress(
    gradient: Tensor,
    momentum: Tensor | None,
    beta1: float,
    error: Tensor | None,
    message: Tensor,
    *,
    block: int,
    scale: str = "rms",
    live: Tensor | None = None,
) -> None:
    """Fills `message` with the compressed momentum of this rank, as `hvd_onebit.kernels.Kernels.compress` does.

    Args:
        gradient: float32, shape (n,), contiguous, as all tensors.
        momentum: float32, shape (n,), or None.
        beta1: decay of the momentum.
        error: float32, shape (n,), updated in place, or None.
        message: uint8, shape (wire.message_num_bytes(n, block),), overwritten.
        block: elements per scale.
        scale: "rms" or "mean".
        live: float32, shape (n,), or None; elements where it is 0 are held.

    Raises:
        TypeError, ValueError: a tensor is not as above, or lies on another device than the gradient.
    """
    n = len(gradient)
    _check(gradient.device, n, gradient=gradient, momentum=momentum, error=error, live=live)
    source = (gradient, momentum, _rounded(beta1), _rounded(1.0 - beta1), None, 0, None, num_blocks(n, block))
    _compress((*source, error, live), 0, error, message, n, block, scale)


def reduce(
    messages: Sequence[Tensor],
    error: Tensor | None,
    message: Tensor,
    *,
    num_elements: int,
    block: int,
    scale: str = "rms",
    live: Tensor | None = None,
) -> None:
    """Fills `message` with the compressed mean of `messages`, as `hvd_onebit.kernels.Kernels.reduce` does.

    Arguments and errors as in `compress`; `messages` are uint8, one-dimensional, in rank order.
    """
    _check(message.device, num_elements, error=error, live=live)
    source = (None, None, 0.0, 0.0, *_received(messages, num_elements, block))
    _compress((*source, error, live), len(messages), error, message, num_elements, block, scale)


def average(messages: Sequence[Tensor], values: Tensor, *, block: int, live: Tensor | None = None) -> None:
    """Fills `values` (float32, shape (n,)) with the mean of `messages`; arguments and errors as in `reduce`."""
    n = len(values)
    _check(values.device, n, values=values, live=live)
    received = _received(messages, n, block)
    if n == 0:
        return
    with _on(values.device):
        _average[(triton.cdiv(n, _TILE),)](
            *received, live, values, n, BLOCK=_shared(block, n), NUM=len(messages), TILE=_TILE, **_LAUNCH
        )


def adam_apply(
    messages: Sequence[Tensor],
    start: int,
    parameter: Tensor,
    momentum: Tensor,
    variance: Tensor,
    *,
    num_elements: int,
    block: int,
    step_size: float,
    eps: float,
    variance_correction: float = 1.0,
    decay: float = 1.0,
    hold: bool = False,
) -> None:
    """Decodes a slice of the mean of `messages` into a step of Adam, as `hvd_onebit.kernels.Kernels.adam_apply` does.

    Arguments as there, on tensors; errors as in `compress`.
    """
    _check(parameter.device, len(parameter), variance=variance)
    numbers = (step_size, eps, variance_correction, decay)
    _apply_slice(messages, start, parameter, momentum, variance, num_elements, block, numbers, hold)


def momentum_apply(
    messages: Sequence[Tensor],
    start: int,
    parameter: Tensor,
    momentum: Tensor,
    *,
    num_elements: int,
    block: int,
    step_size: float,
    decay: float = 1.0,
) -> None:
    """The same for a step of SGD with momentum, as `hvd_onebit.kernels.Kernels.momentum_apply` does."""
    numbers = (step_size, 0.0, 1.0, decay)
    _apply_slice(messages, start, parameter, momentum, None, num_elements, block, numbers, False)


def _apply_slice(
    messages: Sequence[Tensor],
    start: int,
    parameter: Tensor,
    momentum: Tensor,
    variance: Tensor | None,
    num_elements: int,
    block: int,
    numbers: tuple[float, float, float, float],
    hold: bool,
) -> None:
    n = len(parameter)
    _check(parameter.device, n, parameter=parameter, momentum=momentum)
    if not 0 <= start <= start + n <= num_elements:
        raise ValueError(f"elements {start} to {start + n} reach beyond a message of {num_elements} elements")
    received = _received(messages, num_elements, block)
    if n == 0:
        return
    with _on(parameter.device):
        _apply[(triton.cdiv(n, _TILE),)](
            *received, start, parameter, momentum, variance, n, *map(_rounded, numbers),
            BLOCK=_shared(block, num_elements), NUM=len(messages), HOLD=hold, TILE=_TILE, **_LAUNCH,
        )  # fmt: skip


def _compress(
    source: tuple[Any, ...], num: int, error: Tensor | None, message: Tensor, n: int, block: int, scale: str
) -> None:
    """Compresses what `source`, the first arguments of the kernels, gives."""
    if scale not in ("rms", "mean"):
        raise ValueError(f"scale must be 'rms' or 'mean', got {scale!r}")
    _check_bytes(message, message_num_bytes(n, block), message.device)
    if n == 0:
        return
    count = num_blocks(n, block)
    prefix, bits = message[: 4 * count], message[4 * count :]
    # a slice of bytes that others send and receive may not be aligned to four
    aligned = prefix.data_ptr() % 4 == 0 and prefix.storage_offset() % 4 == 0
    scales = prefix.view(torch.float32) if aligned else torch.empty(count, device=message.device)
    options = {"BLOCK": _shared(block, n), "NUM": num}
    sums = {"MEAN": scale == "mean", "SUB": SUB_BLOCK, "HALVINGS": LANES.bit_length() - 1, "GROUPS": _GROUPS}
    longest = min(block, n)
    rows = triton.cdiv(min(longest, SUB_BLOCK), LANES)
    with _on(message.device):
        if longest <= SUB_BLOCK and (count == 1 or block % 8 == 0):
            _compress_blocks[(triton.cdiv(count, _GROUPS),)](
                *source, bits, scales, rows, n, **options, **sums, BYTES=_BYTES, **_LAUNCH
            )
        else:
            subs = triton.cdiv(longest, SUB_BLOCK)
            totals = torch.empty(count * subs, dtype=torch.float64, device=message.device)
            counts = torch.empty(count * subs, dtype=torch.int64, device=message.device)
            _sums_of_sub_blocks[(triton.cdiv(count * subs, _GROUPS),)](
                *source, totals, counts, subs, count * subs, rows, n, **options, **sums, **_LAUNCH
            )
            _scales_of_blocks[(triton.cdiv(count, 32 * _WARPS),)](
                totals, counts, scales, subs, count, MEAN=scale == "mean", TILE=32 * _WARPS, **_LAUNCH
            )
            _bits_and_errors[(triton.cdiv(len(bits), _BYTES),)](
                *source, bits, scales, n, **options, BYTES=_BYTES, **_LAUNCH
            )
        if not aligned:
            prefix.copy_(scales.view(torch.uint8))


def _received(messages: Sequence[Tensor], num_elements: int, block: int) -> tuple[Tensor, int, Tensor, int]:
    """The messages' bits, the distance between two messages' bits, their scales, and how many a message has."""
    if not messages:
        raise ValueError("messages must hold the message of one rank at least")
    num_bytes = message_num_bytes(num_elements, block)
    for message in messages:
        _check_bytes(message, num_bytes, messages[0].device)
    count = num_blocks(num_elements, block)
    prefixes = torch.stack([message[: 4 * count] for message in messages])  # aligned, whatever the messages are
    scales = prefixes.view(torch.float32) if count else torch.empty(0, device=prefixes.device)
    first = messages[0].data_ptr()
    step = messages[1].data_ptr() - first if len(messages) > 1 else 0
    if step < 0 or any(message.data_ptr() != first + rank * step for rank, message in enumerate(messages)):
        messages = torch.stack(list(messages)).unbind()  # they don't lie in one gathered buffer: not so in training
        step = num_bytes
    return messages[0][4 * count :], step, scales, count


def _shared(block: int, num_elements: int) -> int:
    """BLOCK of the kernels, which are compiled once for each: one block over everything is the same for all sizes."""
    return 0 if block >= num_elements else block


def _check(device: torch.device, num_elements: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.device != device:
            raise TypeError(f"{name} must be float32 on {device}, got {tensor.dtype} on {tensor.device}")
        if tensor.ndim != 1 or not tensor.is_contiguous() or len(tensor) != num_elements:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} must be contiguous, of shape ({num_elements},), got {shape}, {tensor.stride()}")


def _check_bytes(message: Tensor, num_bytes: int, device: torch.device) -> None:
    if message.dtype != torch.uint8 or message.device != device:
        raise TypeError(f"a message must be uint8 on {device}, got {message.dtype} on {message.device}")
    if message.ndim != 1 or not message.is_contiguous() or len(message) != num_bytes:
        raise ValueError(f"a message here is contiguous and {num_bytes} bytes long, got {tuple(message.shape)}")


def _rounded(number: float) -> float:
    """The float32 nearest to `number`; beyond their range an infinity, where Triton would raise an error."""
    return ctypes.c_float(number).value


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
