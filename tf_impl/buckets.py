"""One bucket's exchange as a chain of operations: through the core's kernels on host memory, or through TF operations.

A bucket knows which of the optimizer's variables lie in it, and owns the error feedback. A step calls `exchange`, then
`commit` or `rollback` in the branches of one condition on what all buckets reported. Nothing is shared between two
buckets' chains, so that TensorFlow runs them beside each other and beside backward.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit import kernels
from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket, Chunk, cut_chunks
from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import AdamStep, adam_step, adam_update, denominator
from hvd_onebit.stage import FROZEN_STEP, VARIANCE_STEPS
from hvd_onebit.tensorflow import codec
from hvd_onebit.tensorflow.transport import TensorTransport

__all__ = ["DeviceBucket", "HostBucket", "Inputs", "Rule", "Sent", "on_host"]

Floats = npt.NDArray[np.float32]
_ALIGNMENT = 64  # what TensorFlow asks of memory that it takes over without a copy


def on_host(function: Callable[..., Any], inputs: Sequence[tf.Tensor], types: Any, *, stateful: bool = True) -> Any:
    """`function` on the tensors' NumPy views, as an operation.

    Args:
        function: gets arrays that may share the tensors' memory and are not to be written.
        inputs: tensors.
        types: dtype or list of dtypes of what it returns.
        stateful: TensorFlow runs stateful functions in the order of the program, and even if nobody uses the result.
            Others run as soon as their inputs are there: once, as long as somebody uses the result.
    """
    if not tf.executing_eagerly():
        return tf.numpy_function(function, list(inputs), types, stateful=stateful)
    results = function(*(tf.convert_to_tensor(each).numpy() for each in inputs))
    if not isinstance(types, list):
        return tf.constant(results, types)
    return [tf.constant(result, dtype) for result, dtype in zip(results, types, strict=True)]


@dataclass(frozen=True)
class Rule:
    """The optimizer's numbers of one variable each: Adam, as Keras writes it."""

    beta1: float
    beta2: float
    epsilon: float
    bias_corrected: bool
    weight_decays: tuple[float, ...]

    def numbers(self, index: int, *, lr: float, step: int, variance_steps: int) -> AdamStep:
        """The update's numbers for variable `index` at its update number `step`."""
        numbers = adam_step(
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            step=step,
            variance_steps=variance_steps,
            decoupled_weight_decay=self.weight_decays[index],
            bias_corrected=self.bias_corrected,
        )
        # Keras adds epsilon to the root before it corrects the bias ("epsilon hat"): x -= lr * c/(1-b1^t) *
        # m/(sqrt(v)+eps)
        return replace(numbers, eps=numbers.eps / numbers.variance_correction)


@dataclass(frozen=True)
class Inputs:
    """What a step reads, as tensors; lists go by the bucket's variables, each flat float32 and in its order."""

    gradients: Sequence[tf.Tensor]
    parameters: Sequence[tf.Tensor]
    momenta: Sequence[tf.Tensor]
    variances: Sequence[tf.Tensor]
    table: tf.Tensor
    """The stage of all variables, as `stage.py` has it."""
    step: tf.Tensor
    """Committed updates before this one."""
    lr: tf.Tensor


@dataclass(frozen=True)
class Sent:
    """A bucket's exchange of one step: what everyone got, and whether it was finite everywhere."""

    gathered: tf.Tensor
    finite: tf.Tensor
    new_errors: tuple[tf.Tensor | None, ...] = ()


class ExchangedBucket(Protocol):
    """What the engine asks of a bucket."""

    bucket: Bucket
    members: tuple[int, ...]
    bytes_sent: int
    checksum: int

    def exchange(self, inputs: Inputs) -> Sent: ...

    def commit(self, inputs: Inputs, sent: Sent) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """New parameters and momenta, flat float32."""
        ...

    def rollback(self, sent: Sent) -> None: ...

    def errors(self) -> dict[str, Floats | None]: ...

    def restore_errors(self, saved: dict[str, Floats | None]) -> bool:
        """False when something saved doesn't fit this bucket."""
        ...

    def forget(self) -> None:
        """Drops what was derived from a state that has been replaced, and all errors."""
        ...


class HostBucket:
    """Through the core's exchange and kernels, on the tensors' own memory."""

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[int],
        transport: TensorTransport,
        options: CompressionOptions,
        rule: Rule,
    ) -> None:
        self.bucket = bucket
        self.members = tuple(members)
        self.checksum = 0
        self._transport = transport
        self._options = options
        self._rule = rule
        self._exchange = CompressedAllreduce(
            bucket, rank=transport.rank, size=transport.size, codec=HostCodec(), options=options
        )
        self.bytes_sent = self._exchange.bytes_sent
        self._memory = _Memory(bucket.num_elements)
        self._gradient: Floats | None = None
        self._momentum: Floats | None = None
        self._given: tuple[Floats, Floats | None, float] | None = None
        self._live_for: bytes | None = None

    def exchange(self, inputs: Inputs) -> Sent:
        """Collective: compress, send, reduce, send, in the graph."""
        exchange = self._exchange
        count = len(self.members)
        variances = inputs.variances if self._needs_variances else []

        def compress(table: Any, step: Any, lr: Any, *arrays: Any) -> Any:
            self._prepare(table, arrays, int(step), float(lr))
            assert self._given is not None
            return exchange.compress(*self._given)

        arrays = [*inputs.gradients, *inputs.momenta, *variances]
        assert len(arrays) in (2 * count, 3 * count)
        message = on_host(compress, [inputs.table, inputs.step, inputs.lr, *arrays], tf.uint8, stateful=False)
        if exchange.is_two_phase:
            message.set_shape([sum(exchange.alltoall_bytes[0])])
            name = f"{self.bucket.name}.alltoall"
            received = self._transport.alltoall(message, *exchange.alltoall_bytes, name=name)
            message = on_host(exchange.reduce, [received], tf.uint8, stateful=False)
        message.set_shape([exchange.own_chunk.num_bytes])
        name = f"{self.bucket.name}.allgather"
        gathered = self._transport.allgather(message, exchange.allgather_bytes, name=name)
        finite = on_host(lambda every: np.bool_(exchange.accept(every)), [gathered], tf.bool, stateful=False)
        finite.set_shape([])
        return Sent(gathered, finite)

    def commit(self, inputs: Inputs, sent: Sent) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The update, from the bits that all ranks have."""
        count = len(self.members)

        def update(table: Any, step: Any, lr: Any, *arrays: Any) -> Any:
            return self._update(table, int(step), float(lr), arrays[:count], arrays[count:])

        arrays = [*inputs.parameters, *inputs.variances]
        with tf.control_dependencies([sent.finite]):
            given = [inputs.table, inputs.step, inputs.lr, *arrays]
            new = on_host(update, given, [tf.float32] * (2 * count), stateful=False)
        return list(new[:count]), list(new[count:])

    def rollback(self, sent: Sent) -> None:
        """Puts the error feedback back to what it was, to rounding."""

        def undo() -> Any:
            assert self._given is not None
            self._exchange.rollback(*self._given)
            return np.bool_(True)

        with tf.control_dependencies([sent.finite]):
            on_host(undo, [], tf.bool)

    # -- on arrays --

    @property
    def _needs_variances(self) -> bool:
        return self._options.dead == "hold" or self._options.space == "update"

    def _prepare(self, table: Any, arrays: Sequence[Floats], step: int, lr: float) -> None:
        count = len(self.members)
        gradients, momenta, variances = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
        self._set_live(table, variances)
        self._gradient = values = self._memory.take()
        np.concatenate(gradients, out=values)
        momentum = self._gather_momentum(momenta)
        if self._options.space == "momentum":
            self._given = (values, momentum, self._rule.beta1)
            return
        values *= np.float32(1.0 - self._rule.beta1)
        values += momentum * np.float32(self._rule.beta1)
        for view, root in zip(self._views(values), self._roots(table, variances, step, lr), strict=True):
            view /= root
        self._given = (values, None, 0.0)

    def _gather_momentum(self, momenta: Sequence[Floats]) -> Floats:
        """All momenta end to end: the last step's own output, as long as TensorFlow still uses its memory."""
        if self._momentum is not None:
            places = list(zip(self._views(self._momentum), momenta, strict=True))
            moved = [(view, m) for view, m in places if view.ctypes.data != m.ctypes.data]
            if not any(_can_be_shared(view) for view, _ in moved):
                for view, m in moved:
                    view[:] = m
                return self._momentum
        self._momentum = self._memory.take()
        np.concatenate(momenta, out=self._momentum)
        return self._momentum

    def _update(
        self, table: Any, step: int, lr: float, parameters: Sequence[Floats], variances: Sequence[Floats]
    ) -> list[Floats]:
        assert self._gradient is not None
        assert self._momentum is not None
        old_momenta = self._views(self._momentum)
        # the gradients are used up, and TensorFlow takes what is returned as the variables' new memory
        new_parameters = self._views(self._gradient)
        self._momentum = self._memory.take()
        new_momenta = self._views(self._momentum)
        self._given = self._gradient = None
        averaged: Floats | None = None
        if self._options.space == "update":
            averaged = np.empty(self.bucket.num_elements, np.float32)
            self._exchange.average(averaged)
            for view, root in zip(self._views(averaged), self._roots(table, variances, step, lr), strict=True):
                view *= root
        for i, (index, offset) in enumerate(zip(self.members, self.bucket.offsets, strict=True)):
            new_parameters[i][:] = parameters[i]
            is_frozen = bool(table[FROZEN_STEP, index])
            if self._options.dead == "hold" or not is_frozen:
                new_momenta[i][:] = old_momenta[i]
            if not is_frozen:
                continue
            numbers = self._rule.numbers(index, lr=lr, step=step + 1, variance_steps=int(table[VARIANCE_STEPS, index]))
            if averaged is not None:
                part = averaged[offset : offset + len(parameters[i])]
                self._apply(part, new_parameters[i], new_momenta[i], variances[i], numbers)
            else:
                self._apply_from_bits(offset, new_parameters[i], new_momenta[i], variances[i], numbers)
        every = self._options.check_every
        self.checksum = zlib.crc32(self._exchange.checksum_bytes()) if every and (step + 1) % every == 0 else 0
        self._exchange.commit()
        return new_parameters + new_momenta

    def _apply_from_bits(
        self, offset: int, parameter: Floats, momentum: Floats, variance: Floats, numbers: AdamStep
    ) -> None:
        for piece in self._exchange.pieces(offset, offset + len(parameter)):
            kernels.adam_apply(
                self._exchange.messages(piece),
                piece.start,
                parameter[piece.low : piece.high],
                momentum[piece.low : piece.high],
                variance[piece.low : piece.high],
                num_elements=piece.num_elements,
                block=piece.block,
                step_size=numbers.step_size,
                eps=numbers.eps,
                variance_correction=numbers.variance_correction,
                decay=numbers.decay,
                hold=self._options.dead == "hold",
            )

    def _apply(
        self, averaged: Floats, parameter: Floats, momentum: Floats, variance: Floats, numbers: AdamStep
    ) -> None:
        moving = variance != 0 if self._options.dead == "hold" else np.True_
        np.copyto(momentum, averaged, where=moving)
        np.copyto(parameter, adam_update(parameter, momentum, variance, _rounded(numbers), np.sqrt), where=moving)

    def _roots(self, table: Any, variances: Sequence[Floats], step: int, lr: float) -> list[Floats]:
        roots = []
        for index, variance in zip(self.members, variances, strict=True):
            frozen = table[FROZEN_STEP, index]
            steps = int(table[VARIANCE_STEPS, index]) if frozen else step + 1
            numbers = _rounded(self._rule.numbers(index, lr=lr, step=step + 1, variance_steps=steps))
            roots.append(denominator(variance, numbers, np.sqrt))
        return roots

    def _views(self, flat: Floats) -> list[Floats]:
        edges = zip(self.bucket.offsets, self.bucket.sizes, strict=True)
        return [flat[offset : offset + size] for offset, size in edges]

    def _set_live(self, table: Any, variances: Sequence[Floats]) -> None:
        """Holds the variables that aren't compressed yet, and with dead="hold" the coordinates without variance."""
        frozen = np.ascontiguousarray(table[FROZEN_STEP, list(self.members)])
        key = frozen.tobytes()
        if key == self._live_for:
            return
        self._live_for = key
        if self._options.dead != "hold" and frozen.all():
            self._exchange.live = None
            return
        live = np.zeros(self.bucket.num_elements, np.float32)
        for i, view in enumerate(self._views(live)):
            if frozen[i]:
                view[:] = variances[i] if self._options.dead == "hold" else 1.0
        self._exchange.live = live

    # -- errors --

    def errors(self) -> dict[str, Floats | None]:
        """This rank's compression errors."""
        return {"worker_error": self._exchange.worker_error, "server_error": self._exchange.server_error}

    def restore_errors(self, saved: dict[str, Floats | None]) -> bool:
        """Takes up `saved`, as far as it fits."""
        fits = True
        for name, error in self.errors().items():
            kept = saved.get(name)
            if error is not None and kept is not None and error.shape == kept.shape:
                error[:] = kept
            elif error is not None or kept is not None:
                fits = False
        return fits

    def forget(self) -> None:
        """Drops what belongs to a state that has been replaced."""
        self._live_for = self._given = self._gradient = self._momentum = None
        self._exchange.commit()
        for error in self.errors().values():
            if error is not None:
                error[:] = 0.0


class DeviceBucket:
    """The same as TensorFlow operations, on any device; the error feedback is in variables, changed by the commit."""

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[int],
        transport: TensorTransport,
        options: CompressionOptions,
        rule: Rule,
    ) -> None:
        self.bucket = bucket
        self.members = tuple(members)
        self.checksum = 0
        self._transport = transport
        self._options = options
        self._rule = rule
        # layout and byte counts are the core's; its arrays stay empty
        self._layout = CompressedAllreduce(
            bucket,
            rank=transport.rank,
            size=transport.size,
            codec=HostCodec(),
            options=replace(options, error_feedback=False),
        )
        self.bytes_sent = self._layout.bytes_sent
        self._is_two_phase = self._layout.is_two_phase
        self._chunks = cut_chunks(bucket, transport.size if self._is_two_phase else 1, options.block)
        self._worker_error: tf.Variable | None = None
        self._server_error: tf.Variable | None = None
        if options.error_feedback:
            own = self._layout.own_chunk
            self._worker_error = tf.Variable(tf.zeros([bucket.num_elements]), trainable=False, name="worker_error")
            if self._is_two_phase:
                self._server_error = tf.Variable(tf.zeros([own.stop - own.start]), trainable=False, name="server_error")

    def exchange(self, inputs: Inputs) -> Sent:
        """Collective: compress, send, reduce, send, in the graph."""
        live = self._live(inputs)
        z = self._momentum_to_send(inputs)
        error = None if self._worker_error is None else tf.convert_to_tensor(self._worker_error)
        parts = [self._compress(z[c.start : c.stop], _cut(error, c), c, _cut(live, c)) for c in self._chunks]
        worker_error = None if error is None else tf.concat([new for _, new in parts], 0)
        message = tf.concat([part for part, _ in parts], 0)
        server_error: tf.Tensor | None = None
        if self._is_two_phase:
            to_and_from = self._layout.alltoall_bytes
            received = self._transport.alltoall(message, *to_and_from, name=f"{self.bucket.name}.alltoall")
            own = self._layout.own_chunk
            messages = tf.split(received, to_and_from[1]) if own.num_bytes else [received] * self._transport.size
            mean = self._average(own, messages, _cut(live, own))
            error = None if self._server_error is None else tf.convert_to_tensor(self._server_error)
            message, server_error = self._compress(mean, error, own, _cut(live, own))
        counts = self._layout.allgather_bytes
        gathered = self._transport.allgather(message, counts, name=f"{self.bucket.name}.allgather")
        replies = self._replies(gathered)
        finite = [
            codec.scales_finite([m[s.byte_start : s.byte_stop] for m in each], s.num_elements, block=s.block)
            for chunk, each in zip(self._chunks, replies, strict=True)
            for s in chunk.segments
        ]
        return Sent(gathered, tf.reduce_all(tf.stack(finite)), (worker_error, server_error))

    def commit(self, inputs: Inputs, sent: Sent) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The update, from the bits that all ranks have."""
        live = self._live(inputs)
        replies = self._replies(sent.gathered)
        averaged = tf.concat(
            [self._average(c, each, _cut(live, c)) for c, each in zip(self._chunks, replies, strict=True)], 0
        )
        for variable, new in zip((self._worker_error, self._server_error), sent.new_errors, strict=True):
            if variable is not None:
                variable.assign(new)
        new_parameters, new_momenta = [], []
        numbers = self._numbers(inputs)
        for i, part in enumerate(tf.split(averaged, list(self.bucket.sizes))):
            index = self.members[i]
            step_size, eps, correction, decay = tf.unstack(numbers[i])
            x, variance, old = inputs.parameters[i], inputs.variances[i], inputs.momenta[i]
            m = part
            if self._options.space == "update":
                m = m * (tf.sqrt(variance) / correction + eps)
            moving = inputs.table[FROZEN_STEP, index] > 0
            if self._options.dead == "hold":
                moving = moving & (variance != 0)
            m = tf.where(moving, m, old)
            decayed = x * decay if self._rule.weight_decays[index] else x
            new = adam_update(decayed, m, variance, AdamStep(step_size, eps, correction, 1.0), tf.sqrt)
            new_momenta.append(m)
            new_parameters.append(tf.where(moving, new, x))
        self._take_checksum(inputs, sent)
        return new_parameters, new_momenta

    def rollback(self, sent: Sent) -> None:
        """Nothing was changed."""

    def _take_checksum(self, inputs: Inputs, sent: Sent) -> None:
        every = self._options.check_every
        if not every:
            return

        def take(gathered: Any, step: Any) -> Any:
            self.checksum = zlib.crc32(gathered.tobytes()) if (int(step) + 1) % every == 0 else 0
            return np.bool_(True)

        on_host(take, [sent.gathered, inputs.step], tf.bool)

    def _momentum_to_send(self, inputs: Inputs) -> tf.Tensor:
        beta1 = self._rule.beta1
        parts = []
        numbers = self._numbers(inputs) if self._options.space == "update" else None
        for i, (m, g) in enumerate(zip(inputs.momenta, inputs.gradients, strict=True)):
            z = m * np.float32(beta1) + g * np.float32(1.0 - beta1)
            if numbers is not None:
                z = z / (tf.sqrt(inputs.variances[i]) / numbers[i, 2] + numbers[i, 1])
            parts.append(z)
        return tf.concat(parts, 0)

    def _numbers(self, inputs: Inputs) -> tf.Tensor:
        def compute(table: Any, step: Any, lr: Any) -> Any:
            rows = []
            for index in self.members:
                steps = int(table[VARIANCE_STEPS, index]) or int(step) + 1
                n = self._rule.numbers(index, lr=float(lr), step=int(step) + 1, variance_steps=steps)
                rows.append((n.step_size, n.eps, n.variance_correction, n.decay))
            return np.array(rows, np.float32)

        numbers = on_host(compute, [inputs.table, inputs.step, inputs.lr], tf.float32, stateful=False)
        return tf.ensure_shape(numbers, [len(self.members), 4])

    def _live(self, inputs: Inputs) -> tf.Tensor:
        parts = []
        for index, variance in zip(self.members, inputs.variances, strict=True):
            frozen = inputs.table[FROZEN_STEP, index] > 0
            alive = tf.cast(variance != 0, tf.float32) if self._options.dead == "hold" else tf.ones_like(variance)
            parts.append(tf.where(frozen, alive, 0.0))
        return tf.concat(parts, 0)

    def _compress(
        self, z: tf.Tensor, error: tf.Tensor | None, chunk: Chunk, live: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        messages, errors = [tf.zeros([0], tf.uint8)], [tf.zeros([0])]
        for s in chunk.segments:
            low, high = s.start - chunk.start, s.stop - chunk.start
            part = None if error is None else error[low:high]
            alive = None if live is None else live[low:high]
            message, new = codec.compress(z[low:high], part, block=s.block, scale=self._options.scale, live=alive)
            messages.append(message)
            if new is not None:
                errors.append(new)
        return tf.concat(messages, 0), None if error is None else tf.concat(errors, 0)

    def _average(self, chunk: Chunk, messages: Sequence[tf.Tensor], live: tf.Tensor | None) -> tf.Tensor:
        parts = [tf.zeros([0])]
        for s in chunk.segments:
            alive = None if live is None else live[s.start - chunk.start : s.stop - chunk.start]
            cut = [message[s.byte_start : s.byte_stop] for message in messages]
            parts.append(codec.average(cut, s.num_elements, block=s.block, live=alive))
        return tf.concat(parts, 0)

    def _replies(self, gathered: tf.Tensor) -> list[list[tf.Tensor]]:
        """The messages that make up each chunk: one of its server, or (one_shot) one of each rank."""
        parts = tf.split(gathered, self._layout.allgather_bytes)
        return [[part] for part in parts] if self._is_two_phase else [list(parts)]

    # -- errors --

    def errors(self) -> dict[str, Floats | None]:
        """This rank's compression errors."""
        return {
            "worker_error": None if self._worker_error is None else self._worker_error.numpy(),
            "server_error": None if self._server_error is None else self._server_error.numpy(),
        }

    def restore_errors(self, saved: dict[str, Floats | None]) -> bool:
        """Takes up `saved`, as far as it fits."""
        fits = True
        for name, variable in (("worker_error", self._worker_error), ("server_error", self._server_error)):
            kept = saved.get(name)
            if variable is not None and kept is not None and tuple(variable.shape) == kept.shape:
                variable.assign(kept)
            elif variable is not None or kept is not None:
                fits = False
        return fits

    def forget(self) -> None:
        """Drops all errors."""
        for variable in (self._worker_error, self._server_error):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))


def _cut(flat: tf.Tensor | None, chunk: Chunk) -> tf.Tensor | None:
    return None if flat is None else flat[chunk.start : chunk.stop]


class _Memory:
    """Flat float32 arrays that are handed to TensorFlow and used again once nobody refers to them any more.

    Fresh memory costs more than what is written into it: the system clears every page.
    """

    def __init__(self, num_elements: int) -> None:
        self._num_elements = num_elements
        self._blocks: list[npt.NDArray[np.uint8]] = []

    def take(self) -> Floats:
        """An array that shares memory with nothing in use; its contents are undefined."""
        for block in self._blocks:
            # the list, the loop's variable and the call itself refer to it
            if sys.getrefcount(block) == _OWN_REFERENCES:
                return self._array(block)
        block = np.empty(4 * self._num_elements + _ALIGNMENT, np.uint8)
        self._blocks.append(block)
        return self._array(block)

    def _array(self, block: npt.NDArray[np.uint8]) -> Floats:
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + 4 * self._num_elements].view(np.float32)


_OWN_REFERENCES = 3


def _can_be_shared(array: Floats) -> bool:
    """Whether TensorFlow takes over this memory as it is."""
    return array.ctypes.data % _ALIGNMENT == 0


def _rounded(numbers: AdamStep) -> Any:
    """The numbers as float32, so that NumPy computes in that precision as the kernels do."""
    rounded: Any = [np.float32(n) for n in astuple(numbers)]
    return AdamStep(*rounded)
