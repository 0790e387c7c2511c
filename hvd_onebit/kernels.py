"""The compute kernels on host memory: compress, reduce, and average or apply what was received.

Each works on flat float32 arrays and on messages as `hvd_onebit.wire` lays them out, in the native extension if it
could be imported, else in NumPy with the same results, bit for bit. Environment variable HVD_ONEBIT_NATIVE=0 forces
NumPy. Every float32 operation is rounded by itself, in the order that a docstring writes it, so that elementwise
operations of any framework can reproduce it; scales too, up to the order of a float64 sum. The native kernels release
the GIL and run on `threads` threads at most, the calling one included: as many as the array is worth, with the same
results whatever their number. No thread outlives a call. `hvd_onebit.threads` says how many a rank may use.

Arguments may be anything that NumPy can view without copying through the buffer protocol: arrays, memoryviews, a
framework tensor's NumPy view. Float arrays are one-dimensional, contiguous float32; messages are uint8 and may lie at
any address. What a kernel writes must not overlap anything else that it was given.

The module's functions are the methods of one `Kernels` object, the fastest present; `implementations()` has them all.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvd_onebit import _numpy_kernels, wire

if TYPE_CHECKING:
    from types import ModuleType

    from typing_extensions import Buffer

__all__ = [
    "NATIVE",
    "SCALES",
    "Kernels",
    "adam_apply",
    "average",
    "compress",
    "decompress",
    "implementations",
    "momentum_apply",
    "reduce",
    "scales_finite",
]

SCALES = ("rms", "mean")
"""Kinds of scale: sqrt(sum(z*z) / d) of 1-bit Adam and 1-bit LAMB, sum(|z|) / d of 0/1 Adam."""

_PART = 1 << 18  # elements that are worth a thread: several times what starting one costs
_MAX_THREADS = 64  # the native extension's limit

_Floats: TypeAlias = NDArray[np.float32]
_Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = "_Floats | Buffer"
"""One-dimensional, contiguous float32 array, or an object whose buffer is one."""
Message: TypeAlias = "_Bytes | Buffer"
"""One-dimensional, contiguous uint8 array, or an object whose buffer is one."""
Messages: TypeAlias = "_Bytes | Sequence[Message]"
"""Messages of n ranks, in rank order: uint8, shape (n, message_num_bytes), or n messages one by one."""


class _Backend(Protocol):
    """What an implementation brings: functions that get checked arrays and numbers already rounded to float32."""

    def compress(
        self,
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
        /,
    ) -> None: ...

    def reduce(
        self,
        messages: Sequence[_Bytes],
        error: _Floats | None,
        message: _Bytes,
        num_elements: int,
        block: int,
        mean: bool,
        live: _Floats | None,
        threads: int,
        /,
    ) -> None: ...

    def average(
        self, messages: Sequence[_Bytes], values: _Floats, block: int, live: _Floats | None, threads: int, /
    ) -> None: ...

    def apply(
        self,
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
        /,
    ) -> None: ...

    def triad(self, a: _Floats, b: _Floats, c: _Floats, factor: float, threads: int, /) -> None: ...


class Kernels:
    """One implementation of the kernels; `name` says which: "numpy", "c", "avx2", "avx512" or "neon"."""

    def __init__(self, name: str, backend: _Backend) -> None:
        self.name = name
        self._backend = backend

    def __repr__(self) -> str:
        return f"<hvd_onebit kernels: {self.name}>"

    def compress(
        self,
        gradient: Floats | Sequence[Floats],
        momentum: Floats | None,
        beta1: float,
        error: Floats | None,
        message: Message,
        *,
        block: SupportsIndex = wire.DEFAULT_BLOCK,
        scale: str = "rms",
        live: Floats | None = None,
        kept: Messages | None = None,
        threads: int = 1,
    ) -> None:
        """Fill `message` with the compressed momentum of this rank, and keep in `error` what compression lost.

        With f = float32, for the d live elements of each block:

            z = (f(beta1) * momentum + f(1 - beta1) * gradient) + error
            s = f(sqrt(sum(z * z) / d))  or, for "mean",  f(sum(abs(z)) / d);  0 if d is 0
            message <- s and z >= 0
            error <- z - (s if z >= 0 else -s)

        without the terms that aren't given: momentum None makes z = gradient + error, and `beta1` has no effect.
        Sums are float64, added in one fixed order (see `_numpy_kernels._sub_block_sums`). A block that holds a NaN or
        an infinity gets the scale NaN, and its error is left untouched.

        Args:
            gradient: float32, shape (n,); or a list or tuple of such arrays, whose mean, summed in their order, is the
                gradient. Not written.
            momentum: float32, shape (n,), or None. Not written.
            beta1: decay of the momentum.
            error: float32, shape (n,), updated in place; None for no error feedback.
            message: uint8, shape (wire.message_num_bytes(n, block),), overwritten.
            block: elements per scale; n or more for one scale.
            scale: "rms" or "mean".
            live: float32, shape (n,). Elements where it's 0 are held: they take no part in scale, d and error, and
                their bit is 1. None: all are live.
            kept: messages whose mean, as in `average`, is the momentum, instead of `momentum`: uint8, shape (m,
                wire.message_num_bytes(n, block)), or m such messages.
            threads: the native kernels use so many at most.

        Raises:
            TypeError: an array isn't a buffer of the dtype above.
            ValueError: an array's shape, layout, length or overlap, the block or the kind of scale isn't as above.
        """
        gradients = _gradients(gradient)
        num_elements = gradients[0].size
        block = wire.check_block(block)
        momentum_ = _optional_floats("momentum", momentum, num_elements)
        error_ = _optional_floats("error", error, num_elements, written=True)
        live_ = _optional_floats("live", live, num_elements)
        message_ = _message(message, num_elements, block, written=True)
        kept_ = None if kept is None else _messages(kept, num_elements, block)
        if momentum_ is not None and kept_ is not None:
            raise ValueError("the momentum is given twice, as floats and as messages: give one of them")
        mean = _is_mean(scale)
        _check_apart(
            {"error": error_, "message": message_},
            {**_named_gradients(gradients), "momentum": momentum_, "live": live_, **_named(kept_ or [], "kept")},
        )
        self._backend.compress(
            gradients,
            momentum_,
            kept_,
            _rounded(beta1),
            _rounded(1.0 - beta1),
            error_,
            message_,
            _clamped(block, num_elements),
            mean,
            live_,
            _num_parts(threads, num_elements),
        )

    def reduce(
        self,
        messages: Messages,
        error: Floats | None,
        message: Message,
        *,
        num_elements: SupportsIndex,
        block: SupportsIndex = wire.DEFAULT_BLOCK,
        scale: str = "rms",
        live: Floats | None = None,
        threads: int = 1,
    ) -> None:
        """Fill `message` with the compressed mean of `messages`, and keep in `error` what compression lost.

        The server's side of the compressed allreduce. With ±s_r what message r decodes to:

            y = (((±s_0) + ±s_1) + ...) / float32(n) + error

        (no division if n is 1), then y is compressed as `compress` does it, error and non-finite blocks included.

        Args:
            messages: uint8, shape (n, wire.message_num_bytes(num_elements, block)), or n such messages, in rank order.
            error: float32, shape (num_elements,), updated in place; None for no error feedback.
            message: uint8, shape (wire.message_num_bytes(num_elements, block),), overwritten.
            num_elements: elements in each message.
            block: elements per scale.
            scale: "rms" or "mean".
            live: float32, shape (num_elements,), as in `compress`.
            threads: as in `compress`.

        Raises:
            TypeError: an array isn't a buffer of the dtype above.
            ValueError: there is no message, or an array's shape, layout, length or overlap, the block or the kind of
                scale isn't as above.
        """
        messages_ = _messages(messages, num_elements, block)
        message_ = _message(message, num_elements, block, written=True)
        num_elements, block = _counts(num_elements, block)
        error_ = _optional_floats("error", error, num_elements, written=True)
        live_ = _optional_floats("live", live, num_elements)
        mean = _is_mean(scale)
        _check_apart({"error": error_, "message": message_}, {"live": live_, **_named(messages_)})
        parts = _num_parts(threads, num_elements)
        self._backend.reduce(messages_, error_, message_, num_elements, block, mean, live_, parts)

    def average(
        self,
        messages: Messages,
        values: Floats,
        *,
        num_elements: SupportsIndex | None = None,
        block: SupportsIndex = wire.DEFAULT_BLOCK,
        live: Floats | None = None,
        threads: int = 1,
    ) -> None:
        """Fill `values` with the mean of what `messages` decode to.

            values <- (((±s_0) + ±s_1) + ...) / float32(n)

        exactly ±s_0 if n is 1.

        Args:
            messages: uint8, shape (n, wire.message_num_bytes(len(values), block)), or n such messages, in rank order.
            values: float32, shape (num_elements,), overwritten.
            num_elements: length of `values`, to be checked against it.
            block: elements per scale.
            live: float32, shape (num_elements,); where it's 0, so is the value.
            threads: as in `compress`.

        Raises:
            TypeError: an array isn't a buffer of the dtype above.
            ValueError: there is no message, or an array's shape, layout, length or overlap or the block isn't as above.
        """
        values_ = _floats("values", values, num_elements, written=True)
        messages_ = _messages(messages, values_.size, block)
        size, block = _counts(values_.size, block)
        live_ = _optional_floats("live", live, size)
        _check_apart({"values": values_}, {"live": live_, **_named(messages_)})
        self._backend.average(messages_, values_, block, live_, _num_parts(threads, size))

    def decompress(
        self,
        message: Message,
        values: Floats,
        *,
        block: SupportsIndex = wire.DEFAULT_BLOCK,
        live: Floats | None = None,
        threads: int = 1,
    ) -> None:
        """Fill `values` with what one message decodes to: exactly ±scale. Arguments and errors as in `average`."""
        self.average([message], values, block=block, live=live, threads=threads)

    def adam_apply(
        self,
        messages: Messages,
        start: SupportsIndex,
        parameter: Floats,
        momentum: Floats | None,
        variance: Floats,
        *,
        num_elements: SupportsIndex,
        block: SupportsIndex = wire.DEFAULT_BLOCK,
        step_size: float,
        eps: float,
        variance_correction: float = 1.0,
        decay: float = 1.0,
        hold: bool = False,
        threads: int = 1,
    ) -> None:
        """Decode a slice of the mean of `messages` straight into a step of Adam with a frozen variance.

        With f = float32, for elements `start` to `start + len(parameter)` of the messages:

            m = mean of the messages, as in `average`
            parameter <- parameter * f(decay)                                  only if decay isn't 1
            parameter <- parameter - f(step_size) * (m / (sqrt(variance) / f(variance_correction) + f(eps)))
            momentum <- m

        Non-finite scales go straight into the parameters: ask `scales_finite` first.

        Args:
            messages: uint8, shape (n, wire.message_num_bytes(num_elements, block)), or n such messages, in rank order.
            start: first element of the slice; any, not only a multiple of 8 or of the block.
            parameter: float32, shape (k,), updated in place, start + k <= num_elements.
            momentum: float32, shape (k,), overwritten; or None: nothing is written.
            variance: float32, shape (k,). Not written.
            num_elements: elements in each message.
            block: elements per scale.
            step_size: learning rate, with the momentum's bias correction if there is one.
            eps: added to the root of the variance.
            variance_correction: divisor of that root: sqrt(1 - beta2**t), or 1.
            decay: factor of decoupled weight decay, 1 - lr * weight_decay.
            hold: leave parameter and momentum as they are where the variance is 0.
            threads: as in `compress`.

        Raises:
            TypeError: an array isn't a buffer of the dtype above.
            ValueError: there is no message, the slice reaches beyond the message, or an array's shape, layout, length
                or overlap or the block isn't as above.
        """
        self._apply(
            messages,
            start,
            parameter,
            momentum,
            variance,
            num_elements=num_elements,
            block=block,
            step_size=step_size,
            eps=eps,
            variance_correction=variance_correction,
            decay=decay,
            hold=hold,
            threads=threads,
        )

    def momentum_apply(
        self,
        messages: Messages,
        start: SupportsIndex,
        parameter: Floats,
        momentum: Floats | None,
        *,
        num_elements: SupportsIndex,
        block: SupportsIndex = wire.DEFAULT_BLOCK,
        step_size: float,
        decay: float = 1.0,
        threads: int = 1,
    ) -> None:
        """Decode a slice of the mean of `messages` straight into a step of SGD with momentum.

            m = mean of the messages, as in `average`
            parameter <- parameter * float32(decay)                            only if decay isn't 1
            parameter <- parameter - float32(step_size) * m
            momentum <- m

        Arguments and errors as in `adam_apply`.
        """
        self._apply(
            messages,
            start,
            parameter,
            momentum,
            None,
            num_elements=num_elements,
            block=block,
            step_size=step_size,
            decay=decay,
            threads=threads,
        )

    def scales_finite(
        self, messages: Messages, num_elements: SupportsIndex, block: SupportsIndex = wire.DEFAULT_BLOCK
    ) -> bool:
        """Whether all scales of all messages, and their sums, are finite, so that the step may be taken.

        Args:
            messages: uint8, shape (n, wire.message_num_bytes(num_elements, block)), or n such messages.
            num_elements: elements in each message.
            block: elements per scale.

        Raises:
            TypeError: a message isn't a buffer of uint8.
            ValueError: there is no message, or one has the wrong shape or length.
        """
        messages_ = _messages(messages, num_elements, block)
        num_bytes = 4 * wire.num_blocks(num_elements, block)
        total = np.zeros(num_bytes // 4, np.float32)
        with np.errstate(over="ignore"):
            for message in messages_:
                total += message[:num_bytes].view("<f4")
        return bool(np.isfinite(total).all())

    def triad(self, a: Floats, b: Floats, c: Floats, factor: float, *, threads: int = 1) -> None:
        """A <- b + float32(factor) * c: a yardstick for the memory's speed, as in McCalpin's STREAM.

        Args:
            a: float32, shape (n,), overwritten.
            b: float32, shape (n,).
            c: float32, shape (n,).
            factor: any number.
            threads: as in `compress`.

        Raises:
            TypeError: an array isn't a buffer of the dtype above.
            ValueError: an array's shape, layout, length or overlap isn't as above.
        """
        a_ = _floats("a", a, written=True)
        b_, c_ = _floats("b", b, a_.size), _floats("c", c, a_.size)
        _check_apart({"a": a_}, {"b": b_, "c": c_})
        self._backend.triad(a_, b_, c_, _rounded(factor), _num_parts(threads, a_.size))

    def _apply(
        self,
        messages: Messages,
        start: SupportsIndex,
        parameter: Floats,
        momentum: Floats | None,
        variance: Floats | None,
        *,
        num_elements: SupportsIndex,
        block: SupportsIndex,
        step_size: float,
        eps: float = 0.0,
        variance_correction: float = 1.0,
        decay: float,
        hold: bool = False,
        threads: int,
    ) -> None:
        messages_ = _messages(messages, num_elements, block)
        num_elements, block = _counts(num_elements, block)
        parameter_ = _floats("parameter", parameter, written=True)
        momentum_ = _optional_floats("momentum", momentum, parameter_.size, written=True)
        variance_ = _optional_floats("variance", variance, parameter_.size)
        first = start.__index__()
        if not 0 <= first <= first + parameter_.size <= num_elements:
            raise ValueError(
                f"elements {first} to {first + parameter_.size} reach beyond a message of {num_elements} elements"
            )
        _check_apart({"parameter": parameter_, "momentum": momentum_}, {"variance": variance_, **_named(messages_)})
        self._backend.apply(
            messages_,
            first,
            parameter_,
            momentum_,
            variance_,
            num_elements,
            block,
            _rounded(step_size),
            _rounded(eps),
            _rounded(variance_correction),
            _rounded(decay),
            hold,
            _num_parts(threads, parameter_.size),
        )


def implementations() -> dict[str, Kernels]:
    """All implementations that this machine can run, by name, the plainest first: "numpy", then native ones.

    "c" is the plain loop; "avx2" and "avx512", or "neon", are there if the processor has them. With
    HVD_ONEBIT_NATIVE=0, or without the extension, there is only "numpy".
    """
    return dict(_implementations)


class _NativeBackend:
    """The native extension at one of its levels of vector instructions."""

    def __init__(self, extension: ModuleType, level: int) -> None:
        self._extension, self._level = extension, level

    def compress(self, *args: Any) -> None:
        self._extension.compress(self._level, *args)

    def reduce(self, *args: Any) -> None:
        self._extension.reduce(self._level, *args)

    def average(self, *args: Any) -> None:
        self._extension.average(self._level, *args)

    def apply(self, *args: Any) -> None:
        self._extension.apply(self._level, *args)

    def triad(self, *args: Any) -> None:
        self._extension.triad(self._level, *args)


def _load_native() -> ModuleType | None:
    log = logging.getLogger(__name__)
    if os.environ.get("HVD_ONEBIT_NATIVE") == "0":
        log.info("HVD_ONEBIT_NATIVE=0: using the NumPy kernels")
        return None
    try:
        return importlib.import_module("hvd_onebit._kernels")
    except ImportError as error:
        log.warning("no native kernels, using the NumPy ones, which are many times slower: %s", error)
        return None


def _load_implementations(extension: ModuleType | None) -> dict[str, Kernels]:
    found = {"numpy": Kernels("numpy", _numpy_kernels)}
    if extension is not None:
        for level, name in enumerate(extension.levels()):
            found[name] = Kernels(name, _NativeBackend(extension, level))
    return found


def _array(name: str, buffer: Any, dtype: type[np.generic], written: bool) -> NDArray[Any]:
    if isinstance(buffer, np.ndarray):
        array = buffer
    else:
        try:
            array = np.asarray(memoryview(buffer))
        except TypeError:
            raise TypeError(
                f"{name} must be an array or another object with a buffer, got {type(buffer).__name__}; "
                "of a framework's tensor in host memory pass its NumPy view"
            ) from None
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {np.dtype(dtype)}, got {array.dtype}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be one-dimensional and contiguous, got shape {array.shape} with strides {array.strides}"
        )
    if not array.flags.aligned:
        raise ValueError(f"{name} must be aligned to {array.itemsize} bytes")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is written in place, but is read-only")
    return array


def _floats(name: str, buffer: Any, num_elements: SupportsIndex | None = None, *, written: bool = False) -> _Floats:
    array = _array(name, buffer, np.float32, written)
    if num_elements is not None and array.size != num_elements.__index__():
        raise ValueError(f"{name} must have {num_elements.__index__()} elements, got {array.size}")
    return array


def _gradients(gradient: Any) -> list[_Floats]:
    if not isinstance(gradient, list | tuple):
        return [_floats("gradient", gradient)]
    if not gradient:
        raise ValueError("gradient is an empty sequence: give one array at least")
    first = _floats("gradient[0]", gradient[0])
    return [first, *(_floats(f"gradient[{i}]", each, first.size) for i, each in enumerate(gradient[1:], 1))]


def _optional_floats(name: str, buffer: Any, num_elements: int, *, written: bool = False) -> _Floats | None:
    return None if buffer is None else _floats(name, buffer, num_elements, written=written)


def _message(message: Any, num_elements: SupportsIndex, block: SupportsIndex, *, written: bool = False) -> _Bytes:
    array = wire.check_message(message, num_elements, block)
    if written and not array.flags.writeable:
        raise ValueError("message is written in place, but is read-only")
    return array


def _messages(messages: Any, num_elements: SupportsIndex, block: SupportsIndex) -> list[_Bytes]:
    if isinstance(messages, np.ndarray) and messages.ndim != 2:
        raise ValueError(f"messages must be a list of messages or have shape (n, bytes), got shape {messages.shape}")
    arrays = [_message(message, num_elements, block) for message in messages]
    if not arrays:
        raise ValueError("messages must hold the message of one rank at least")
    return arrays


def _named_gradients(gradients: list[_Floats]) -> dict[str, NDArray[Any] | None]:
    return {"gradient": gradients[0]} if len(gradients) == 1 else _named(gradients, "gradient")


def _named(messages: Sequence[NDArray[Any]], name: str = "messages") -> dict[str, NDArray[Any] | None]:
    return {f"{name}[{rank}]": message for rank, message in enumerate(messages)}


def _check_apart(written: dict[str, Any], read: dict[str, Any]) -> None:
    """Refuse a written array that shares memory with any other; they are contiguous, so that bounds decide."""
    others = {**read, **written}
    for name, array in written.items():
        del others[name]
        for other_name, other in others.items():
            if array is not None and other is not None and np.may_share_memory(array, other):
                raise ValueError(f"{name} is written in place and must not overlap {other_name}")


def _is_mean(scale: str) -> bool:
    if scale not in SCALES:
        near = difflib.get_close_matches(str(scale), SCALES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"scale must be 'rms' or 'mean', got {scale!r}{hint}")
    return scale == "mean"


def _counts(num_elements: SupportsIndex, block: SupportsIndex) -> tuple[int, int]:
    size = num_elements.__index__()
    return size, _clamped(block.__index__(), size)


def _clamped(block: int, num_elements: int) -> int:
    """`block`, no larger than it matters: native code then needs no care about overflow."""
    return min(block, max(num_elements, 1))


def _num_parts(threads: int, num_elements: int) -> int:
    """How many threads share the work on so many elements, of those allowed."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return max(1, min(threads, num_elements // _PART, _MAX_THREADS))


def _rounded(number: float) -> float:
    """The float32 nearest to `number`; beyond their range an infinity, without NumPy's warning."""
    return ctypes.c_float(number).value


_extension = _load_native()
_implementations = _load_implementations(_extension)
_fastest = list(_implementations.values())[-1]

NATIVE: bool = _extension is not None
"""Whether the native extension does the work."""

compress = _fastest.compress
reduce = _fastest.reduce
average = _fastest.average
decompress = _fastest.decompress
adam_apply = _fastest.adam_apply
momentum_apply = _fastest.momentum_apply
scales_finite = _fastest.scales_finite
