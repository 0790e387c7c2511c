"""One bucket's exchange as a chain of operations: through the core's kernels on host memory, or through TF operations.

A bucket knows which of the optimizer's variables lie in it, and owns the error feedback; what is done to each of them
is the rule's (`rules.py`). A step calls `exchange`, then `commit` or `rollback` in the branches of one condition on
what all buckets reported. Nothing is shared between two buckets' chains, so that TensorFlow runs them beside each other
and beside backward.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket, Chunk, cut_chunks
from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import ordered_norm
from hvd_onebit.stage import FROZEN_STEP
from hvd_onebit.tensorflow import codec
from hvd_onebit.tensorflow.rules import Moment, Rule, Tensors
from hvd_onebit.tensorflow.transport import TensorTransport

__all__ = ["DeviceBucket", "HostBucket", "Inputs", "Sent", "Updates", "on_host"]

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
class Inputs:
    """What a step reads, as tensors; lists go by the bucket's variables, each flat float32 and in its order."""

    gradients: Sequence[tf.Tensor]
    parameters: Sequence[tf.Tensor]
    momenta: Sequence[tf.Tensor]
    variances: Sequence[tf.Tensor]
    """Empty for rules that have none, and so `fresh`."""
    fresh: Sequence[tf.Tensor]
    table: tf.Tensor
    """The stage of all variables, as `stage.py` has it."""
    scalars: tf.Tensor
    """What the rule keeps of all variables: float64, shape (rows, variables)."""
    step: tf.Tensor
    """Committed updates before this one."""
    lr: tf.Tensor

    @property
    def moment(self) -> list[tf.Tensor]:
        """What the step's numbers depend on."""
        return [self.table, self.scalars, self.step, self.lr]


@dataclass(frozen=True)
class Sent:
    """A bucket's exchange of one step: what everyone got, and whether it was finite everywhere."""

    gathered: tf.Tensor
    finite: tf.Tensor
    new_errors: tuple[tf.Tensor | None, ...] = ()
    live: tf.Tensor | None = None


@dataclass(frozen=True)
class Updates:
    """What the variables become; lists as in `Inputs`."""

    parameters: Sequence[tf.Tensor]
    momenta: Sequence[tf.Tensor]
    fresh: Sequence[tf.Tensor]
    columns: Sequence[tf.Tensor]
    """Each variable's column of `Inputs.scalars`; none if the rule keeps no scalars."""


class ExchangedBucket(Protocol):
    """What the engine asks of a bucket."""

    bucket: Bucket
    members: tuple[int, ...]
    bytes_sent: int
    checksum: int
    server_start: int
    """The element of the bucket at which this rank's server error starts."""

    def exchange(self, inputs: Inputs) -> Sent: ...

    def commit(self, inputs: Inputs, sent: Sent) -> Updates:
        """What the variables become."""
        ...

    def exchange_values(self, values: Sequence[tf.Tensor], live: Sequence[tf.Tensor]) -> Sent:
        """Collective: sends `values`, flat float32, one a variable, instead of what the rule says.

        Where `live` (bool, of a value's shape, or of none for all of it) is False, coordinates take no part.
        """
        ...

    def averages(self, sent: Sent, takes_checksum: tf.Tensor) -> list[tf.Tensor]:
        """Commits an exchange of values: their means, flat float32, 0 where they are not live."""
        ...

    def rollback(self, sent: Sent) -> None: ...

    def errors(self) -> dict[str, Floats | None]: ...

    def errors_on_host(self) -> AbstractContextManager[CompressedAllreduce[Any]]:
        """An exchange that holds this bucket's errors: arrays, to be written until the block ends."""
        ...

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
            bucket, rank=transport.rank, size=transport.size, codec=HostCodec(codec.num_threads), options=options
        )
        self.bytes_sent = self._exchange.bytes_sent
        self.server_start = self._exchange.own_chunk.start
        self._memory = _Memory(bucket.num_elements)
        self._gradient: Floats | None = None
        self._momentum: Floats | None = None
        self._given: tuple[Floats, Floats | None, float] | None = None
        self._live_for: bytes | None = None

    def exchange(self, inputs: Inputs) -> Sent:
        """Collective: compress, send, reduce, send, in the graph."""
        exchange = self._exchange
        needs_variances = self._rule.sends_by_variance or (self._options.dead == "hold" and self._rule.has_variance)
        variances = inputs.variances if needs_variances else []

        def compress(*given: Any) -> Any:
            moment, arrays = _moment(*given[:4]), given[4:]
            self._prepare(moment, arrays)
            assert self._given is not None
            return exchange.compress(*self._given)

        arrays = [*inputs.gradients, *inputs.momenta, *variances]
        return self._send(on_host(compress, [*inputs.moment, *arrays], tf.uint8, stateful=False))

    def exchange_values(self, values: Sequence[tf.Tensor], live: Sequence[tf.Tensor]) -> Sent:
        """Collective: the same with values of the caller's own."""
        count = len(self.members)

        def compress(*arrays: Any) -> Any:
            self._set_live_where(arrays[count:])
            given = self._memory.take()
            np.concatenate(arrays[:count], out=given)
            self._given = (given, None, 0.0)
            return self._exchange.compress(*self._given)

        return self._send(on_host(compress, [*values, *live], tf.uint8, stateful=False))

    def averages(self, sent: Sent, takes_checksum: tf.Tensor) -> list[tf.Tensor]:
        """The means, from the bits that all ranks have."""

        def average(takes: Any) -> Any:
            self._given = None
            averaged = self._memory.take()
            self._exchange.average(averaged)
            self.checksum = zlib.crc32(self._exchange.checksum_bytes()) if takes else 0
            self._exchange.commit()
            return self._views(averaged)

        with tf.control_dependencies([sent.finite]):
            means = on_host(average, [takes_checksum], [tf.float32] * len(self.members), stateful=False)
        return [tf.ensure_shape(mean, [size]) for mean, size in zip(means, self.bucket.sizes, strict=True)]

    def _send(self, message: tf.Tensor) -> Sent:
        exchange = self._exchange
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

    def commit(self, inputs: Inputs, sent: Sent) -> Updates:
        """The update, from the bits that all ranks have."""
        count = len(self.members)
        lists = [inputs.parameters, inputs.variances, inputs.fresh]
        num_fresh, num_rows = len(inputs.fresh), int(inputs.scalars.shape[0])

        def update(*given: Any) -> Any:
            parts = iter(given[4:])
            arrays = [[next(parts) for _ in each] for each in lists]
            return self._update(_moment(*given[:4]), *arrays)

        types = [tf.float32] * (2 * count + num_fresh) + [tf.float64]
        with tf.control_dependencies([sent.finite]):
            new = on_host(update, [*inputs.moment, *(t for each in lists for t in each)], types, stateful=False)
        columns = tf.unstack(tf.ensure_shape(new[-1], [num_rows, count]), axis=1) if num_rows else []
        return Updates(new[:count], new[count : 2 * count], new[2 * count : -1], columns)

    def rollback(self, sent: Sent) -> None:
        """Puts the error feedback back to what it was, to rounding."""

        def undo() -> Any:
            assert self._given is not None
            self._exchange.rollback(*self._given)
            return np.bool_(True)

        with tf.control_dependencies([sent.finite]):
            on_host(undo, [], tf.bool)

    # -- on arrays --

    def _prepare(self, moment: Moment, arrays: Sequence[Floats]) -> None:
        count = len(self.members)
        gradients, momenta, variances = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
        self._set_live(moment.table, variances)
        self._gradient = values = self._memory.take()
        np.concatenate(gradients, out=values)
        momentum = self._gather_momentum(momenta)
        beta1 = self._rule.sent_momentum
        if beta1 is not None:
            self._given = (values, momentum, beta1)
            return
        views = zip(self.members, self._views(values), self._views(momentum), strict=True)
        for i, (index, view, old) in enumerate(views):
            variance = variances[i] if self._rule.sends_by_variance else None
            numbers = _rounded(self._rule.numbers(index, moment))
            view[:] = self._rule.to_send(view, old, variance, numbers, _HOST)
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
        self, moment: Moment, parameters: Sequence[Floats], variances: Sequence[Floats], fresh: Sequence[Floats]
    ) -> list[Any]:
        assert self._gradient is not None
        assert self._momentum is not None
        rule, exchange = self._rule, self._exchange
        old_momenta = self._views(self._momentum)
        # the gradients are used up, and TensorFlow takes what is returned as the variables' new memory
        new_parameters = self._views(self._gradient)
        self._momentum = self._memory.take()
        new_momenta = self._views(self._momentum)
        new_fresh = self._views(self._memory.take()) if fresh else []
        self._given = self._gradient = None
        columns = moment.scalars[:, list(self.members)]
        averaged: list[Floats] | None = None
        if not rule.fuses:
            every = np.empty(self.bucket.num_elements, np.float32)
            exchange.average(every)
            averaged = self._views(every)
        for i, (index, offset) in enumerate(zip(self.members, self.bucket.offsets, strict=True)):
            variance = variances[i] if variances else None
            old = Tensors(parameters[i], old_momenta[i], fresh[i] if fresh else None, columns[:, i])
            new = old
            if moment.table[FROZEN_STEP, index] and averaged is not None:
                numbers = _rounded(rule.numbers(index, moment))
                new = rule.apply(index, old, averaged[i], variance, np.float32(moment.lr), numbers, _HOST)
            new_parameters[i][:], new_momenta[i][:] = new.parameter, new.momentum
            if fresh:
                new_fresh[i][:] = new.fresh
            if new.column is not None:
                columns[:, i] = new.column
            if moment.table[FROZEN_STEP, index] and averaged is None:
                numbers = rule.numbers(index, moment)
                rule.apply_from_bits(exchange, offset, new_parameters[i], new_momenta[i], variance, numbers)
        every_steps = self._options.check_every
        is_checked = every_steps and (moment.step + 1) % every_steps == 0
        self.checksum = zlib.crc32(exchange.checksum_bytes()) if is_checked else 0
        exchange.commit()
        return [*new_parameters, *new_momenta, *new_fresh, columns]

    def _views(self, flat: Floats) -> list[Floats]:
        edges = zip(self.bucket.offsets, self.bucket.sizes, strict=True)
        return [flat[offset : offset + size] for offset, size in edges]

    def _set_live_where(self, moving: Sequence[npt.NDArray[np.bool_]]) -> None:
        if all(each.all() for each in moving):
            self._exchange.live = None
            return
        live = np.empty(self.bucket.num_elements, np.float32)
        for view, each in zip(self._views(live), moving, strict=True):
            view[:] = each
        self._exchange.live = live

    def _set_live(self, table: Any, variances: Sequence[Floats]) -> None:
        """Holds the variables that aren't compressed yet, and with dead="hold" the coordinates without variance."""
        frozen = np.ascontiguousarray(table[FROZEN_STEP, list(self.members)])
        key = frozen.tobytes()
        if key == self._live_for:
            return
        self._live_for = key
        holds = self._options.dead == "hold" and self._rule.has_variance
        if not holds and frozen.all():
            self._exchange.live = None
            return
        live = np.zeros(self.bucket.num_elements, np.float32)
        for i, view in enumerate(self._views(live)):
            if frozen[i]:
                view[:] = variances[i] if holds else 1.0
        self._exchange.live = live

    # -- errors --

    def errors(self) -> dict[str, Floats | None]:
        """This rank's compression errors."""
        return {"worker_error": self._exchange.worker_error, "server_error": self._exchange.server_error}

    @contextmanager
    def errors_on_host(self) -> Iterator[CompressedAllreduce[Any]]:
        """An exchange that holds this bucket's errors: arrays, to be written until the block ends."""
        yield self._exchange

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
            codec=HostCodec(codec.num_threads),
            options=replace(options, error_feedback=False),
        )
        self.bytes_sent = self._layout.bytes_sent
        self.server_start = self._layout.own_chunk.start
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
        return self._send(self._momentum_to_send(inputs), self._live(inputs))

    def exchange_values(self, values: Sequence[tf.Tensor], live: Sequence[tf.Tensor]) -> Sent:
        """Collective: the same with values of the caller's own."""
        sizes = self.bucket.sizes
        alive = [tf.broadcast_to(tf.cast(each, tf.float32), [n]) for each, n in zip(live, sizes, strict=True)]
        return self._send(tf.concat(values, 0), tf.concat(alive, 0))

    def averages(self, sent: Sent, takes_checksum: tf.Tensor) -> list[tf.Tensor]:
        """The means, from the bits that all ranks have."""
        averaged = self._commit_average(sent, sent.live)
        self._take_checksum(sent, takes_checksum)
        return list(tf.split(averaged, list(self.bucket.sizes)))

    def _send(self, z: tf.Tensor, live: tf.Tensor | None) -> Sent:
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
        return Sent(gathered, tf.reduce_all(tf.stack(finite)), (worker_error, server_error), live)

    def _commit_average(self, sent: Sent, live: tf.Tensor | None) -> tf.Tensor:
        replies = self._replies(sent.gathered)
        averaged = [self._average(c, each, _cut(live, c)) for c, each in zip(self._chunks, replies, strict=True)]
        for variable, new_error in zip((self._worker_error, self._server_error), sent.new_errors, strict=True):
            if variable is not None:
                variable.assign(new_error)
        return tf.concat(averaged, 0)

    def commit(self, inputs: Inputs, sent: Sent) -> Updates:
        """The update, from the bits that all ranks have."""
        averaged = self._commit_average(sent, self._live(inputs))
        updated = []
        numbers = self._numbers(inputs)
        for i, (index, part) in enumerate(zip(self.members, tf.split(averaged, list(self.bucket.sizes)), strict=True)):
            variance = inputs.variances[i] if inputs.variances else None
            fresh = inputs.fresh[i] if inputs.fresh else None
            old = Tensors(inputs.parameters[i], inputs.momenta[i], fresh, inputs.scalars[:, index])
            new = self._rule.apply(index, old, part, variance, inputs.lr, numbers[i], _DEVICE)
            frozen = inputs.table[FROZEN_STEP, index] != 0
            kept = [
                None if theirs is None else tf.where(frozen, theirs, mine)
                for mine, theirs in zip(_parts(old), _parts(new), strict=True)
            ]
            updated.append(Tensors(*kept))
        every = self._options.check_every
        if every:
            self._take_checksum(sent, (inputs.step + 1) % every == 0)
        return Updates(
            [each.parameter for each in updated],
            [each.momentum for each in updated],
            [each.fresh for each in updated if each.fresh is not None],
            [each.column for each in updated if each.column is not None],
        )

    def rollback(self, sent: Sent) -> None:
        """Nothing was changed."""

    def _take_checksum(self, sent: Sent, takes_it: tf.Tensor) -> None:
        def take(gathered: Any, takes: Any) -> Any:
            self.checksum = zlib.crc32(gathered.tobytes()) if takes else 0
            return np.bool_(True)

        on_host(take, [sent.gathered, takes_it], tf.bool)

    def _momentum_to_send(self, inputs: Inputs) -> tf.Tensor:
        parts = []
        numbers = self._numbers(inputs)
        for i, (m, g) in enumerate(zip(inputs.momenta, inputs.gradients, strict=True)):
            variance = inputs.variances[i] if inputs.variances else None
            parts.append(self._rule.to_send(g, m, variance, numbers[i], _DEVICE))
        return tf.concat(parts, 0)

    def _numbers(self, inputs: Inputs) -> list[Any]:
        """Each variable's numbers, as tensors."""
        width = len(fields(self._rule.numbers_type))

        def compute(*given: Any) -> Any:
            rows = [astuple(self._rule.numbers(index, _moment(*given))) for index in self.members]
            return np.array(rows, np.float32)

        numbers = on_host(compute, inputs.moment, tf.float32, stateful=False)
        rows = tf.unstack(tf.ensure_shape(numbers, [len(self.members), width]))
        return [self._rule.numbers_type(*tf.unstack(row)) for row in rows]

    def _live(self, inputs: Inputs) -> tf.Tensor:
        parts = []
        for i, (index, m) in enumerate(zip(self.members, inputs.momenta, strict=True)):
            holds = self._options.dead == "hold" and self._rule.has_variance
            alive = tf.cast(inputs.variances[i] != 0, tf.float32) if holds else tf.ones_like(m)
            parts.append(tf.where(inputs.table[FROZEN_STEP, index] != 0, alive, 0.0))
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

    @contextmanager
    def errors_on_host(self) -> Iterator[CompressedAllreduce[Any]]:
        """An exchange that holds this bucket's errors: arrays, to be written until the block ends."""
        exchange = self._layout
        errors = {name: None if error is None else error.copy() for name, error in self.errors().items()}
        exchange.worker_error, exchange.server_error = errors["worker_error"], errors["server_error"]
        try:
            yield exchange
            self.restore_errors({"worker_error": exchange.worker_error, "server_error": exchange.server_error})
        finally:
            exchange.worker_error = exchange.server_error = None

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


def _rounded(numbers: Any) -> Any:
    """The numbers as float32, so that NumPy computes in that precision as the kernels do."""
    return type(numbers)(*(np.float32(n) for n in astuple(numbers)))


def _moment(table: Any, scalars: Any, step: Any, lr: Any) -> Moment:
    return Moment(table, scalars, int(step), float(lr))


def _parts(tensors: Tensors) -> tuple[Any, ...]:
    return tensors.parameter, tensors.momentum, tensors.fresh, tensors.column


class _HostArrays:
    """A rule's operations on NumPy's arrays."""

    def sqrt(self, array: Any) -> Any:
        return np.sqrt(array)

    def where(self, condition: Any, these: Any, others: Any) -> Any:
        return np.where(condition, these, others)

    def largest(self, array: Any) -> Any:
        return array.max()

    def norm(self, array: Any) -> float:
        return ordered_norm(array)

    def call(self, function: Callable[..., Any], inputs: Sequence[Any], types: Sequence[Any]) -> Any:
        return function(*inputs)


class _DeviceArrays:
    """The same on TensorFlow's tensors."""

    def sqrt(self, array: Any) -> Any:
        return tf.sqrt(array)

    def where(self, condition: Any, these: Any, others: Any) -> Any:
        return tf.where(condition, these, others)

    def largest(self, array: Any) -> Any:
        return tf.reduce_max(array)

    def norm(self, array: Any) -> Any:
        return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(array, tf.float64))))

    def call(self, function: Callable[..., Any], inputs: Sequence[Any], types: Sequence[Any]) -> Any:
        results = on_host(function, inputs, list(types), stateful=False)
        for result, given in zip(results, inputs, strict=False):
            result.set_shape(given.shape)
        return results


_HOST = _HostArrays()
_DEVICE = _DeviceArrays()
