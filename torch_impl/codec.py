"""The kernels on torch tensors: the core's on CPU tensors, without a copy; Triton's on an NVIDIA GPU; else torch ops.

All write the same bytes from the same scales (the format is in `hvd_onebit/wire.py`). Scales are equal to the bit on
the CPU and in Triton; torch ops may be off by one in a scale's last bit, as they add in an order of their own.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_onebit import threads
from hvd_onebit.codec import Codec, HostCodec, ordered_mean
from hvd_onebit.wire import num_blocks

__all__ = ["CpuCodec", "DeviceCodec", "TritonCodec", "codec_for", "num_threads", "why_not_triton"]

_OLDEST_TRITON = (3, 6)  # 3.3 was seen to divide with denormals flushed to zero


def num_threads() -> int:
    """Threads that the core's kernels may use: `torch.get_num_threads()` at most."""
    return threads.num_threads(torch.get_num_threads())


def codec_for(device: torch.device) -> Codec[Tensor]:
    """The codec for tensors on `device`."""
    if device.type == "cpu":
        return CpuCodec()
    return TritonCodec(device) if _uses_triton(device.type) else DeviceCodec(device)


@functools.cache
def _uses_triton(kind: str) -> bool:
    """Whether Triton's kernels serve this kind of device; says once what does."""
    log = logging.getLogger(__name__)
    why_not = why_not_triton(kind)
    if why_not is not None:
        log.info("%s: using torch operations, which give the same results in more passes over memory", why_not)
        return False
    log.info("using the Triton kernels, Triton %s", importlib.import_module("triton").__version__)
    return True


def why_not_triton(kind: str) -> str | None:
    """Why Triton's kernels do not serve this kind of device ("cuda", as torch calls it); None if they do."""
    if kind != "cuda" or torch.version.hip:
        return f"the Triton kernels are for NVIDIA GPUs, and these tensors are elsewhere ({kind})"
    if os.environ.get("HVD_ONEBIT_TRITON") == "0":
        return "HVD_ONEBIT_TRITON=0"
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError:
        return "Triton is not installed (pip install triton)"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _OLDEST_TRITON:
        return f"Triton {triton.__version__} is too old (pip install 'triton>=3.6')"
    return None


class CpuCodec:
    """The core's kernels on the memory of CPU tensors."""

    range_elements = HostCodec.range_elements

    def __init__(self) -> None:
        self._host = HostCodec(num_threads)

    def zeros(self, num_elements: int) -> Tensor:
        # NumPy asks Linux for large pages where an array is large, torch does not: compress gains 10 to 30 %
        return torch.from_numpy(self._host.zeros(num_elements))

    def empty_bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def concatenate(self, messages: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(messages))

    def compress(
        self,
        gradient: Tensor | Sequence[Tensor],
        momentum: Tensor | None,
        beta1: float,
        error: Tensor | None,
        message: Tensor,
        *,
        block: int,
        scale: str,
        live: Tensor | None,
        kept: Sequence[Tensor] | None = None,
    ) -> None:
        self._host.compress(
            gradient.numpy() if isinstance(gradient, Tensor) else [each.numpy() for each in gradient],
            _numpy(momentum),
            beta1,
            _numpy(error),
            message.numpy(),
            block=block,
            scale=scale,
            live=_numpy(live),
            kept=None if kept is None else [each.numpy() for each in kept],
        )

    def reduce(
        self,
        messages: Sequence[Tensor],
        error: Tensor | None,
        message: Tensor,
        *,
        num_elements: int,
        block: int,
        scale: str,
        live: Tensor | None,
    ) -> None:
        self._host.reduce(
            [each.numpy() for each in messages],
            _numpy(error),
            message.numpy(),
            num_elements=num_elements,
            block=block,
            scale=scale,
            live=_numpy(live),
        )

    def average(self, messages: Sequence[Tensor], values: Tensor, *, block: int, live: Tensor | None) -> None:
        self._host.average([each.numpy() for each in messages], values.numpy(), block=block, live=_numpy(live))

    def scales_finite(self, messages: Sequence[Tensor], *, num_elements: int, block: int) -> bool:
        return self._host.scales_finite([each.numpy() for each in messages], num_elements=num_elements, block=block)

    def restore(self, error: Tensor, sent: Tensor, given: Tensor, live: Tensor | None) -> None:
        self._host.restore(error.numpy(), sent.numpy(), given.numpy(), _numpy(live))

    def to_bytes(self, message: Tensor) -> bytes:
        return message.numpy().tobytes()

    def as_bytes(self, values: Tensor) -> Tensor:
        return _viewed(values, torch.uint8)

    def as_floats(self, message: Tensor) -> Tensor:
        return _viewed(message, torch.float32)


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # torch does not view an empty tensor whose stride is 0, as one that comes from NumPy has
    return tensor.view(dtype) if tensor.numel() else tensor.new_empty(0, dtype=dtype)


def _numpy(tensor: Tensor | None):  # type: ignore[no-untyped-def]
    return None if tensor is None else tensor.numpy()


class DeviceCodec:
    """The same as torch ops, for any device torch has."""

    range_elements = 1 << 22  # enough to hide what starting an operation costs

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._bits = torch.arange(8, dtype=torch.uint8, device=self._device)

    def zeros(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements, dtype=torch.float32, device=self._device)

    def empty_bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def concatenate(self, messages: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(messages))

    def compress(
        self,
        gradient: Tensor | Sequence[Tensor],
        momentum: Tensor | None,
        beta1: float,
        error: Tensor | None,
        message: Tensor,
        *,
        block: int,
        scale: str,
        live: Tensor | None,
        kept: Sequence[Tensor] | None = None,
    ) -> None:
        if not isinstance(gradient, Tensor):
            gradient = ordered_mean(gradient)
        if kept is not None:
            momentum = self._mean(kept, len(gradient), block)
        z = gradient if momentum is None else momentum * beta1 + gradient * (1.0 - beta1)
        self._compress(z if error is None else z + error, error, message, block, scale, live)

    def reduce(
        self,
        messages: Sequence[Tensor],
        error: Tensor | None,
        message: Tensor,
        *,
        num_elements: int,
        block: int,
        scale: str,
        live: Tensor | None,
    ) -> None:
        y = self._mean(messages, num_elements, block)
        self._compress(y if error is None else y + error, error, message, block, scale, live)

    def average(self, messages: Sequence[Tensor], values: Tensor, *, block: int, live: Tensor | None) -> None:
        total = self._decode(messages[0], len(values), block)
        for message in messages[1:]:
            total = total + self._decode(message, len(values), block)
        if len(messages) > 1:
            # a 0-dim divisor on the device: a host scalar would be multiplied by its rounded inverse there
            total = total / torch.tensor(float(len(messages)), device=self._device)
        values.copy_(total if live is None else torch.where(live != 0, total, 0.0))

    def scales_finite(self, messages: Sequence[Tensor], *, num_elements: int, block: int) -> bool:
        total = torch.zeros(num_blocks(num_elements, block), device=self._device)
        for message in messages:
            total += self._scales(message, num_elements, block)
        return bool(torch.isfinite(total).all())

    def restore(self, error: Tensor, sent: Tensor, given: Tensor, live: Tensor | None) -> None:
        known = torch.isfinite(sent) if live is None else torch.isfinite(sent) & (live != 0)
        error.copy_(torch.where(known, (error + sent) - given, error))

    def to_bytes(self, message: Tensor) -> bytes:
        return message.cpu().numpy().tobytes()

    def as_bytes(self, values: Tensor) -> Tensor:
        return _viewed(values, torch.uint8)

    def as_floats(self, message: Tensor) -> Tensor:
        return _viewed(message, torch.float32)

    def _compress(
        self, z: Tensor, error: Tensor | None, message: Tensor, block: int, scale: str, live: Tensor | None
    ) -> None:
        num_elements = len(z)
        if num_elements == 0:
            return
        held = None if live is None else live == 0
        counted = torch.ones_like(z) if held is None else (~held).float()
        parts = _blocks(z if held is None else torch.where(held, 0.0, z), block).double()
        totals = (parts.square() if scale == "rms" else parts.abs()).sum(1)
        means = totals / _blocks(counted, block).double().sum(1).clamp(min=1)
        scales = (means.sqrt() if scale == "rms" else means).float()
        scales = torch.where(torch.isfinite(scales), scales, torch.nan)  # one form on the wire: 0x7fc00000
        positive = z >= 0 if held is None else (z >= 0) | held
        prefix = 4 * len(scales)
        message[:prefix].copy_(scales.view(torch.uint8))
        message[prefix:].copy_(self._pack(positive))
        if error is not None:
            each = scales.repeat_interleave(block)[:num_elements]
            keep = torch.isfinite(each) if held is None else torch.isfinite(each) & ~held
            error.copy_(torch.where(keep, z - torch.where(positive, each, -each), error))

    def _mean(self, messages: Sequence[Tensor], num_elements: int, block: int) -> Tensor:
        values = self.zeros(num_elements)
        self.average(messages, values, block=block, live=None)
        return values

    def _pack(self, positive: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(positive, (0, -len(positive) % 8), value=True)
        return (padded.view(-1, 8).to(torch.uint8) << self._bits).sum(1, dtype=torch.uint8)

    def _scales(self, message: Tensor, num_elements: int, block: int) -> Tensor:
        # a copy, since a slice of the gathered bytes may not be aligned to four
        prefix = message[: 4 * num_blocks(num_elements, block)].clone()
        return prefix.view(torch.float32) if num_elements else self.zeros(0)

    def _decode(self, message: Tensor, num_elements: int, block: int) -> Tensor:
        each = self._scales(message, num_elements, block).repeat_interleave(block)[:num_elements]
        signs = message[4 * num_blocks(num_elements, block) :]
        bits = ((signs[:, None] >> self._bits) & 1).view(-1)[:num_elements]
        return torch.where(bits.bool(), each, -each)


class TritonCodec(DeviceCodec):
    """The same in as few passes over memory as can be, on an NVIDIA GPU: see `triton_kernels`."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        from hvd_onebit.torch import triton_kernels  # which needs Triton

        self._kernels = triton_kernels

    def compress(
        self,
        gradient: Tensor | Sequence[Tensor],
        momentum: Tensor | None,
        beta1: float,
        error: Tensor | None,
        message: Tensor,
        *,
        block: int,
        scale: str,
        live: Tensor | None,
        kept: Sequence[Tensor] | None = None,
    ) -> None:
        if not isinstance(gradient, Tensor):
            gradient = ordered_mean(gradient)
        if kept is not None:
            momentum = self._mean(kept, len(gradient), block)
        self._kernels.compress(gradient, momentum, beta1, error, message, block=block, scale=scale, live=live)

    def reduce(
        self,
        messages: Sequence[Tensor],
        error: Tensor | None,
        message: Tensor,
        *,
        num_elements: int,
        block: int,
        scale: str,
        live: Tensor | None,
    ) -> None:
        self._kernels.reduce(messages, error, message, num_elements=num_elements, block=block, scale=scale, live=live)

    def average(self, messages: Sequence[Tensor], values: Tensor, *, block: int, live: Tensor | None) -> None:
        self._kernels.average(messages, values, block=block, live=live)


def _blocks(values: Tensor, block: int) -> Tensor:
    block = min(block, len(values))
    return torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
