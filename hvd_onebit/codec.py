"""The interface between the exchange and the three kernels, and its implementation on host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hvd_onebit import kernels
from hvd_onebit.threads import num_threads

__all__ = ["Array", "Codec", "HostCodec", "ordered_mean"]

Array = TypeVar("Array", bound=Any)
"""A one-dimensional array of one framework: float32 for values, uint8 for messages; it can be sliced without a copy."""


def ordered_mean(parts: Sequence[Array]) -> Array:
    """The elementwise mean, summed in the order given."""
    first, *others = parts
    total: Array = first + 0 if not others else first + others.pop(0)
    for part in others:
        total += part
    total /= len(parts)
    return total


class Codec(Protocol[Array]):
    """Compress, reduce, decompress on one kind of array. All implementations write the same bytes (see `wire.py`).

    Several gradients, given as a list or tuple, are compressed as their `ordered_mean`.
    """

    def zeros(self, num_elements: int) -> Array:
        """A float32 array of zeros."""
        ...

    def empty_bytes(self, num_bytes: int) -> Array:
        """A uint8 array."""
        ...

    def concatenate(self, messages: Sequence[Array]) -> Array:
        """Bytes end to end."""
        ...

    @property
    def range_elements(self) -> int:
        """Elements that `compress` is given at a time with `kept`, as many as it may decode to floats."""
        ...

    def compress(
        self,
        gradient: Array | Sequence[Array],
        momentum: Array | None,
        beta1: float,
        error: Array | None,
        message: Array,
        *,
        block: int,
        scale: str,
        live: Array | None,
        kept: Sequence[Array] | None = None,
    ) -> None: ...

    def reduce(
        self,
        messages: Sequence[Array],
        error: Array | None,
        message: Array,
        *,
        num_elements: int,
        block: int,
        scale: str,
        live: Array | None,
    ) -> None: ...

    def average(self, messages: Sequence[Array], values: Array, *, block: int, live: Array | None) -> None: ...

    def scales_finite(self, messages: Sequence[Array], *, num_elements: int, block: int) -> bool: ...

    def restore(self, error: Array, sent: Array, given: Array, live: Array | None) -> None:
        """Error <- (error + sent) - given in place, where `sent` is finite and the coordinate is live."""
        ...

    def to_bytes(self, message: Array) -> bytes:
        """The message's bytes on the host, for checksums."""
        ...

    def as_bytes(self, values: Array) -> Array:
        """The memory of float32 values as uint8."""
        ...

    def as_floats(self, message: Array) -> Array:
        """The other way round."""
        ...


HostArray = npt.NDArray[Any]


class HostCodec:
    """The codec on NumPy arrays: the C kernels, or NumPy with the same results.

    `threads` is asked at each call how many threads it may use.
    """

    range_elements = 1 << 62  # any number: the kernels decode as they go

    def __init__(self, threads: Callable[[], int] = num_threads) -> None:
        self._threads = threads

    def zeros(self, num_elements: int) -> HostArray:
        return np.zeros(num_elements, np.float32)

    def empty_bytes(self, num_bytes: int) -> HostArray:
        return np.empty(num_bytes, np.uint8)

    def concatenate(self, messages: Sequence[HostArray]) -> HostArray:
        return np.concatenate(messages)

    def compress(
        self,
        gradient: HostArray | Sequence[HostArray],
        momentum: HostArray | None,
        beta1: float,
        error: HostArray | None,
        message: HostArray,
        *,
        block: int,
        scale: str,
        live: HostArray | None,
        kept: Sequence[HostArray] | None = None,
    ) -> None:
        kernels.compress(
            gradient,
            momentum,
            beta1,
            error,
            message,
            block=block,
            scale=scale,
            live=live,
            kept=kept,
            threads=self._threads(),
        )

    def reduce(
        self,
        messages: Sequence[HostArray],
        error: HostArray | None,
        message: HostArray,
        *,
        num_elements: int,
        block: int,
        scale: str,
        live: HostArray | None,
    ) -> None:
        kernels.reduce(
            messages,
            error,
            message,
            num_elements=num_elements,
            block=block,
            scale=scale,
            live=live,
            threads=self._threads(),
        )

    def average(self, messages: Sequence[HostArray], values: HostArray, *, block: int, live: HostArray | None) -> None:
        kernels.average(messages, values, num_elements=len(values), block=block, live=live, threads=self._threads())

    def scales_finite(self, messages: Sequence[HostArray], *, num_elements: int, block: int) -> bool:
        return kernels.scales_finite(messages, num_elements, block)

    def restore(self, error: HostArray, sent: HostArray, given: HostArray, live: HostArray | None) -> None:
        known = np.isfinite(sent) if live is None else np.isfinite(sent) & (live != 0)
        np.copyto(error, (error + sent) - given, where=known)

    def to_bytes(self, message: HostArray) -> bytes:
        return message.tobytes()

    def as_bytes(self, values: HostArray) -> HostArray:
        return values.view(np.uint8)

    def as_floats(self, message: HostArray) -> HostArray:
        return message.view(np.float32)
