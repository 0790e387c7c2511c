"""One bucket's exchange as a chain of operations: through the core's kernels on host memory, or through TF operations.

A bucket knows which of the optimizer's variables lie in it, and owns the error feedback; what is done to each of them
is the rule's (`rules.py`). A step calls `exchange`, then `commit` or `rollback` in the branches of one condition on
what all buckets reported. Nothing is shared between two buckets' chains, so that TensorFlow runs them beside each other
and beside backward.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce, Piece
from hvd_onebit.hosts import Place
from hvd_onebit.layout import Bucket, Chunk
from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import ordered_norm
from hvd_onebit.stage import FROZEN_STEP
from hvd_onebit.tensorflow import codec
from hvd_onebit.tensorflow.rules import Moment, Rule, Tensors
from hvd_onebit.tensorflow.transport import TensorGroup, TensorGroups, TensorTransport, on_host

__all__ = ["DeviceBucket", "ExchangedBucket", "HostBucket", "Hosts", "Inputs", "Memory", "Sent", "Updates"]

Floats = npt.NDArray[np.float32]
_ALIGNMENT = 64  # what TensorFlow asks of memory that it takes over without a copy


@dataclass(frozen=True)
class Inputs:
    """What a step reads, as tensors; lists go by the bucket's variables, each flat float32 and in its order."""

    gradients: Sequence[tf.Tensor]
    parameters: Sequence[tf.Tensor]
    momenta: Sequence[tf.Tensor]
    """One that the bucket keeps as bits has no elements."""
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
    given: Sequence[tf.Tensor] = ()
    """What was compressed was made of these, by `gather`."""
    gather: Callable[..., Any] | None = None
    momenta: Sequence[tf.Tensor] = ()
    """As floats, of a bucket on a device."""


@dataclass(frozen=True)
class Updates:
    """What the variables become; lists as in `Inputs`."""

    parameters: Sequence[tf.Tensor]
    momenta: Sequence[tf.Tensor]
    """Flat; of no elements where the bucket keeps it."""
    fresh: Sequence[tf.Tensor]
    columns: Sequence[tf.Tensor]
    """Each variable's column of `Inputs.scalars`; none if the rule keeps no scalars."""


@dataclass(frozen=True)
class Hosts:
    """A hierarchical exchange's ranks: where this one is, and the groups that it is in."""

    place: Place
    groups: TensorGroups


class ExchangedBucket(Protocol):
    """What the engine asks of a bucket.

    Attributes:
        bytes_sent: what this rank sends to others in one exchange.
        bytes_sent_inside: what of it goes to ranks of the same host, if hierarchical.
        layout: which part of the bucket this rank's errors are of.
        shared_error: float32, shape (num_elements,): while the ranks' errors are shared, what every rank's checkpoint
            holds of them, if the exchange is hierarchical and has only a shard; else None.
    """

    bucket: Bucket
    members: tuple[int, ...]
    bytes_sent: int
    bytes_sent_inside: int
    checksum: int
    shared_error: Floats | None

    @property
    def layout(self) -> CompressedAllreduce[Any]: ...

    def reserve(self) -> None:
        """Allocates the memory that steps work in, now rather than in the middle of one."""
        ...

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

    def momenta(self, inputs: Inputs) -> list[tf.Tensor]:
        """The momenta as floats, flat, wherever they are kept."""
        ...

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


@dataclass(frozen=True)
class _Given:
    """What is compressed, as the core's exchange takes it: beta1*momentum + (1-beta1)*gradient."""

    gradient: Floats
    momentum: Floats | None = None
    beta1: float = 0.0
    from_kept: bool = False


class HostBucket:
    """Through the core's exchange and kernels, on the tensors' own memory.

    Args:
        bucket: its layout.
        members: the variables in it.
        keeps: whether the momentum of each is kept as bits.
        transport: among all ranks.
        options: what the user chose.
        rule: what the variables' optimizer sends and applies.
        memory: to work in, shared with other buckets.
        hosts: of a hierarchical exchange.
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[int],
        keeps: Sequence[bool],
        transport: TensorTransport,
        options: CompressionOptions,
        rule: Rule,
        memory: Memory,
        hosts: Hosts | None = None,
    ) -> None:
        self.bucket = bucket
        self.members = tuple(members)
        self._keeps = tuple(keeps)
        self.checksum = 0
        self.shared_error: Floats | None = None
        self._transport = transport
        self._options = options
        self._rule = rule
        self._exchange = CompressedAllreduce(
            bucket,
            rank=transport.rank,
            size=transport.size,
            codec=HostCodec(codec.num_threads),
            options=options,
            place=None if hosts is None else hosts.place,
        )
        self.bytes_sent, self.bytes_sent_inside = _bytes_sent(self._exchange)
        self._groups = None if hosts is None else hosts.groups
        self._values: Floats | None = None
        self._memory = memory
        self._given: _Given | None = None
        self._mean: Floats | None = None
        self._live_for: bytes | None = None

    @property
    def layout(self) -> CompressedAllreduce[Any]:
        return self._exchange

    def reserve(self) -> None:
        """Allocates the memory that steps work in, now rather than in the middle of one."""
        self._memory.reserve(self.bucket.num_elements)

    def exchange(self, inputs: Inputs) -> Sent:
        """Collective: compress, send, reduce, send, in the graph."""
        needs_variances = self._rule.sends_by_variance or (self._options.dead == "hold" and self._rule.has_variance)
        variances = inputs.variances if needs_variances else []
        arrays = [*inputs.gradients, *inputs.momenta, *variances]
        return self._send(self._gather, [*inputs.moment, *arrays])

    def exchange_values(self, values: Sequence[tf.Tensor], live: Sequence[tf.Tensor]) -> Sent:
        """Collective: the same with values of the caller's own."""
        return self._send(self._gather_values, [*values, *live])

    def averages(self, sent: Sent, takes_checksum: tf.Tensor) -> list[tf.Tensor]:
        """The means, from the bits that all ranks have."""

        def average(takes: Any) -> Any:
            averaged = self._take()
            self._exchange.average(averaged)
            self.checksum = zlib.crc32(self._exchange.checksum_bytes()) if takes else 0
            self._end_step()
            return self._views(averaged)

        with tf.control_dependencies([sent.finite]):
            means = on_host(average, [takes_checksum], [tf.float32] * len(self.members), stateful=False)
        return [tf.ensure_shape(mean, [size]) for mean, size in zip(means, self.bucket.sizes, strict=True)]

    def _send(self, gather: Callable[..., _Given], inputs: Sequence[tf.Tensor]) -> Sent:
        """The exchange of what `gather` makes of the inputs' arrays."""
        exchange, name = self._exchange, self.bucket.name
        group: TensorGroup = self._transport if self._groups is None else self._groups.across

        def compress(*arrays: Any) -> Any:
            return self._compress(gather(*arrays))

        if self._groups is None:
            message = on_host(compress, inputs, tf.uint8, stateful=False)
        else:
            message = self._compress_mean(self._groups, gather, inputs)
        message.set_shape([sum(chunk.num_bytes for chunk in exchange.chunks)])
        if exchange.is_two_phase:
            received = group.alltoall(message, *exchange.alltoall_bytes, name=f"{name}.alltoall")
            message = on_host(exchange.reduce, [received], tf.uint8, stateful=False)
            message.set_shape([exchange.own_chunk.num_bytes])
        gathered = group.allgather(message, exchange.allgather_bytes, name=f"{name}.allgather")
        if self._groups is not None:
            gathered = self._groups.inside.allgather(gathered, exchange.inside_bytes, name=f"{name}.share")
        finite = on_host(lambda every: np.bool_(exchange.accept(every)), [gathered], tf.bool, stateful=False)
        finite.set_shape([])
        return Sent(gathered, finite, given=inputs, gather=gather)

    def _compress(self, given: _Given) -> Any:
        return self._exchange.compress(given.gradient, given.momentum, given.beta1, from_kept=given.from_kept)

    def _compress_mean(
        self, groups: TensorGroups, gather: Callable[..., _Given], inputs: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """The host's mean first; the message of this rank's shard of it."""

        def gathered(*arrays: Any) -> Any:
            self._given = gather(*arrays)
            return self._given.gradient

        def compress(mean: Any) -> Any:
            assert self._given is not None
            given, self._given, self._mean = self._given, None, mean
            return self._compress(replace(given, gradient=mean))

        values = tf.ensure_shape(on_host(gathered, inputs, tf.float32, stateful=False), [self.bucket.num_elements])
        name = f"{self.bucket.name}.reduce_scatter"
        mean = groups.inside.reduce_scatter(values, self._exchange.shard_lengths, name=name)
        return on_host(compress, [mean], tf.uint8, stateful=False)

    def commit(self, inputs: Inputs, sent: Sent) -> Updates:
        """The update, from the bits that all ranks have."""
        count = len(self.members)
        lists = [inputs.parameters, inputs.momenta, inputs.variances, inputs.fresh]
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
        gather = sent.gather
        assert gather is not None

        def undo(*arrays: Any) -> Any:
            # made again, so that nobody has to keep it until the step's end; the mean may lie where it is made
            mean = None if self._mean is None else self._mean.copy()
            given: _Given = gather(*arrays)
            gradient = given.gradient if mean is None else mean
            self._exchange.rollback(gradient, given.momentum, given.beta1, from_kept=given.from_kept)
            self._mean = None
            return np.bool_(True)

        with tf.control_dependencies([sent.finite]):
            on_host(undo, sent.given, tf.bool)

    def momenta(self, inputs: Inputs) -> list[tf.Tensor]:
        """The momenta as floats, wherever they are kept."""
        variances = inputs.variances if self._rule.sends_by_variance else []

        def floats(*given: Any) -> Any:
            moment, arrays = _moment(*given[:4]), given[4:]
            count = len(self.members)
            return [view.copy() for view in self._views(self._floats_of(moment, arrays[:count], arrays[count:]))]

        types = [tf.float32] * len(self.members)
        return list(on_host(floats, [*inputs.moment, *inputs.momenta, *variances], types))

    # -- on arrays --

    def _gather(self, *given: Any) -> _Given:
        moment, arrays, count = _moment(*given[:4]), given[4:], len(self.members)
        gradients, momenta, variances = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
        self._set_live(moment.table, variances)
        values = self._memory_to_send()
        np.concatenate(gradients, out=values)
        beta1 = self._rule.sent_momentum
        if beta1 is not None and not any(len(m) for m in momenta) and self._exchange.has_kept:
            return _Given(values, None, beta1, from_kept=True)
        momentum = self._floats_of(moment, momenta, variances)
        if beta1 is not None:
            return _Given(values, momentum, beta1)
        views = zip(self.members, self._views(values), self._views(momentum), strict=True)
        for i, (index, view, old) in enumerate(views):
            variance = variances[i] if self._rule.sends_by_variance else None
            numbers = _rounded(self._rule.numbers(index, moment))
            view[:] = self._rule.to_send(view, old, variance, numbers, _HOST)
        return _Given(values)

    def _gather_values(self, *arrays: Any) -> _Given:
        count = len(self.members)
        self._set_live_where(arrays[count:])
        values = self._memory_to_send()
        np.concatenate(arrays[:count], out=values)
        return _Given(values)

    def _take(self) -> Floats:
        return self._memory.take(self.bucket.num_elements)

    def _memory_to_send(self) -> Floats:
        """For what is compressed, or read by the other ranks of the host until the step's end."""
        if self._groups is None:
            return self._take()
        if self._values is None:
            self._values = self._groups.inside.zeros(self.bucket.num_elements)
        return self._values

    def _floats_of(self, moment: Moment, momenta: Sequence[Floats], variances: Sequence[Floats]) -> Floats:
        """All momenta end to end, as floats; the variances are needed if the rule `sends_by_variance`."""
        flat = self._take()
        parts = list(zip(self.members, self.bucket.sizes, self._views(flat), momenta, strict=True))
        are_kept = any(len(m) < size for _, size, _, m in parts)
        if are_kept:
            self._exchange.kept(flat)
        for i, (index, size, view, m) in enumerate(parts):
            if len(m) == size:
                view[:] = m
            else:
                numbers = _rounded(self._rule.numbers(index, moment))
                variance = variances[i] if self._rule.sends_by_variance else None
                view[:] = self._rule.momentum_from(view, variance, numbers, _HOST)
        return flat

    def _update(
        self,
        moment: Moment,
        parameters: Sequence[Floats],
        momenta: Sequence[Floats],
        variances: Sequence[Floats],
        fresh: Sequence[Floats],
    ) -> list[Any]:
        rule, exchange = self._rule, self._exchange
        # TensorFlow takes what is returned as the variables' new memory
        new_parameters = self._views(self._take())
        new_momenta: list[Floats] = []
        new_fresh = self._views(self._take()) if fresh else []
        columns = moment.scalars[:, list(self.members)]
        averaged: list[Floats] | None = None
        if not rule.fuses:
            every = self._take()
            exchange.average(every)
            averaged = self._views(every)
            momenta = self._views(self._floats_of(moment, momenta, variances))
        for i, (index, offset) in enumerate(zip(self.members, self.bucket.offsets, strict=True)):
            is_frozen = bool(moment.table[FROZEN_STEP, index])
            keeps = is_frozen and self._keeps[i]
            variance = variances[i] if variances else None
            new = Tensors(parameters[i], momenta[i], fresh[i] if fresh else None, columns[:, i])
            if is_frozen and averaged is not None:
                numbers = _rounded(rule.numbers(index, moment))
                new = rule.apply(index, new, averaged[i], variance, np.float32(moment.lr), numbers, _HOST)
            new_parameters[i][:] = new.parameter
            new_momenta.append(np.empty(0, np.float32) if keeps else new.momentum.copy())
            if fresh:
                new_fresh[i][:] = new.fresh
            if new.column is not None:
                columns[:, i] = new.column
            if is_frozen and averaged is None:
                numbers = rule.numbers(index, moment)
                momentum = None if keeps else new_momenta[i]
                rule.apply_from_bits(exchange, offset, new_parameters[i], momentum, variance, numbers)
        every_steps = self._options.check_every
        is_checked = every_steps and (moment.step + 1) % every_steps == 0
        self.checksum = zlib.crc32(exchange.checksum_bytes()) if is_checked else 0
        self._end_step(keep=any(self._keeps))
        return [*new_parameters, *new_momenta, *new_fresh, columns]

    def _end_step(self, *, keep: bool = False) -> None:
        self._exchange.commit(keep=keep)
        self._mean = None

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
        self._live_for = self._given = self.shared_error = None
        self._end_step()
        for error in self.errors().values():
            if error is not None:
                error[:] = 0.0


class DeviceBucket:
    """The same as TensorFlow operations, on any device; the error feedback is in variables, changed by the commit."""

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[int],
        keeps: Sequence[bool],
        transport: TensorTransport,
        options: CompressionOptions,
        rule: Rule,
        memory: Memory,
        hosts: Hosts | None = None,
    ) -> None:
        self.bucket = bucket
        self.members = tuple(members)
        self._keeps = tuple(keeps)
        self.checksum = 0
        self.shared_error: Floats | None = None
        self._transport = transport
        self._options = options
        self._rule = rule
        self._groups = None if hosts is None else hosts.groups
        # layout and byte counts are the core's; its arrays stay empty
        self._layout = CompressedAllreduce(
            bucket,
            rank=transport.rank,
            size=transport.size,
            codec=HostCodec(codec.num_threads),
            options=replace(options, error_feedback=False),
            place=None if hosts is None else hosts.place,
        )
        self.bytes_sent, self.bytes_sent_inside = _bytes_sent(self._layout)
        self._worker_error: tf.Variable | None = None
        self._server_error: tf.Variable | None = None
        self._kept: tf.Variable | None = None
        if any(keeps):
            sent = self._layout.allgather_bytes if self._groups is None else self._layout.inside_bytes
            self._kept = tf.Variable(tf.zeros([sum(sent)], tf.uint8), trainable=False, name="kept")
        if options.error_feedback:
            own, (start, stop) = self._layout.own_chunk, self._layout.shard
            self._worker_error = tf.Variable(tf.zeros([stop - start]), trainable=False, name="worker_error")
            if self._layout.is_two_phase:
                self._server_error = tf.Variable(tf.zeros([own.stop - own.start]), trainable=False, name="server_error")

    def reserve(self) -> None:
        """Nothing: operations allocate what they need."""

    def exchange(self, inputs: Inputs) -> Sent:
        """Collective: compress, send, reduce, send, in the graph."""
        momentum: tf.Tensor | None = None
        inputs = replace(inputs, momenta=self.momenta(inputs))
        if self._groups is not None and self._rule.sent_momentum is not None:
            # as on the host: gradients are averaged inside it, and the momentum, which all have, comes in afterwards
            values, momentum = tf.concat(inputs.gradients, 0), tf.concat(inputs.momenta, 0)
        else:
            values = self._momentum_to_send(inputs)
        return replace(self._send(values, self._live(inputs), momentum), momenta=inputs.momenta)

    def momenta(self, inputs: Inputs) -> list[tf.Tensor]:
        """The momenta as floats, wherever they are kept."""
        stored, sizes = self._kept, self.bucket.sizes
        if stored is None:
            return list(inputs.momenta)
        gone = [
            tf.size(m) == 0 if keeps else tf.constant(False)
            for m, keeps in zip(inputs.momenta, self._keeps, strict=True)
        ]
        flat = tf.cond(
            tf.reduce_any(tf.stack(gone)),
            lambda: self._decoded(tf.convert_to_tensor(stored), self._live(inputs)),
            lambda: tf.zeros([self.bucket.num_elements]),
        )
        numbers = self._numbers(inputs)
        momenta = []
        for i, (part, m) in enumerate(zip(tf.split(flat, list(sizes)), inputs.momenta, strict=True)):
            variance = inputs.variances[i] if inputs.variances else None
            momentum = tf.cond(
                gone[i],
                lambda i=i, part=part, variance=variance: self._rule.momentum_from(part, variance, numbers[i], _DEVICE),
                lambda m=m: m,
            )
            momenta.append(tf.ensure_shape(momentum, [sizes[i]]))
        return momenta

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

    def _send(self, values: tf.Tensor, live: tf.Tensor | None, momentum: tf.Tensor | None = None) -> Sent:
        layout, name = self._layout, self.bucket.name
        group: TensorGroup = self._transport
        first, stop = layout.shard
        if self._groups is not None:
            group = self._groups.across
            lengths = layout.shard_lengths
            values = self._groups.inside.reduce_scatter(values, lengths, name=f"{name}.reduce_scatter")
        if momentum is not None:
            beta1 = self._rule.sent_momentum
            assert beta1 is not None
            values = values * np.float32(1.0 - beta1) + momentum[first:stop] * np.float32(beta1)
        error = None if self._worker_error is None else tf.convert_to_tensor(self._worker_error)
        parts = [self._compress(_cut(values, c, first), _cut(error, c, first), c, _cut(live, c)) for c in layout.chunks]
        worker_error = None if error is None else tf.concat([new for _, new in parts], 0)
        message = tf.concat([part for part, _ in parts], 0)
        server_error: tf.Tensor | None = None
        if layout.is_two_phase:
            to_and_from = layout.alltoall_bytes
            received = group.alltoall(message, *to_and_from, name=f"{name}.alltoall")
            own = layout.own_chunk
            messages = tf.split(received, to_and_from[1]) if own.num_bytes else [received] * layout.size
            mean = self._average(own, messages, _cut(live, own))
            error = None if self._server_error is None else tf.convert_to_tensor(self._server_error)
            message, server_error = self._compress(mean, error, own, _cut(live, own))
        gathered = group.allgather(message, layout.allgather_bytes, name=f"{name}.allgather")
        if self._groups is not None:
            gathered = self._groups.inside.allgather(gathered, layout.inside_bytes, name=f"{name}.share")
        finite = [
            codec.scales_finite(_messages(gathered, piece), piece.num_elements, block=piece.block)
            for piece in self._pieces
        ]
        return Sent(gathered, tf.reduce_all(tf.stack(finite)), (worker_error, server_error), live)

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        """Every segment, whole."""
        return self._layout.pieces(0, self.bucket.num_elements)

    def _decoded(self, gathered: tf.Tensor, live: tf.Tensor | None) -> tf.Tensor:
        parts = [
            codec.average(
                _messages(gathered, piece),
                piece.num_elements,
                block=piece.block,
                live=None if live is None else live[piece.low : piece.high],
            )
            for piece in self._pieces
        ]
        return tf.concat(parts, 0)

    def _commit_average(self, sent: Sent, live: tf.Tensor | None) -> tf.Tensor:
        averaged = self._decoded(sent.gathered, live)
        for variable, new_error in zip((self._worker_error, self._server_error), sent.new_errors, strict=True):
            if variable is not None:
                variable.assign(new_error)
        return averaged

    def commit(self, inputs: Inputs, sent: Sent) -> Updates:
        """The update, from the bits that all ranks have."""
        averaged = self._commit_average(sent, self._live(inputs))
        updated = []
        numbers = self._numbers(inputs)
        for i, (index, part) in enumerate(zip(self.members, tf.split(averaged, list(self.bucket.sizes)), strict=True)):
            variance = inputs.variances[i] if inputs.variances else None
            fresh = inputs.fresh[i] if inputs.fresh else None
            old = Tensors(inputs.parameters[i], sent.momenta[i], fresh, inputs.scalars[:, index])
            new = self._rule.apply(index, old, part, variance, inputs.lr, numbers[i], _DEVICE)
            frozen = inputs.table[FROZEN_STEP, index] != 0
            kept = [
                None if theirs is None else tf.where(frozen, theirs, mine)
                for mine, theirs in zip(_parts(old), _parts(new), strict=True)
            ]
            if self._keeps[i]:
                kept[1] = tf.cond(frozen, lambda: tf.zeros([0]), lambda old=old: old.momentum)
            updated.append(Tensors(*kept))
        if self._kept is not None:
            self._kept.assign(sent.gathered)
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
        for i, (index, size) in enumerate(zip(self.members, self.bucket.sizes, strict=True)):
            holds = self._options.dead == "hold" and self._rule.has_variance
            alive = tf.cast(inputs.variances[i] != 0, tf.float32) if holds else tf.ones([size])
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

    # -- errors --

    def errors(self) -> dict[str, Floats | None]:
        """This rank's compression errors."""
        return {
            "worker_error": None if self._worker_error is None else self._worker_error.numpy(),
            "server_error": None if self._server_error is None else self._server_error.numpy(),
        }

    @property
    def layout(self) -> CompressedAllreduce[Any]:
        return self._layout

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
        self.shared_error = None
        for variable in (self._worker_error, self._server_error):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))


def _bytes_sent(exchange: CompressedAllreduce[Any]) -> tuple[int, int]:
    """All bytes that a rank sends in one exchange, and those of them that stay on the host."""
    inside = exchange.bytes_sent_inside
    return exchange.bytes_sent + inside, inside


def _cut(flat: tf.Tensor | None, chunk: Chunk, first: int = 0) -> tf.Tensor | None:
    """The chunk's part of an array that starts at element `first` of the bucket."""
    return None if flat is None else flat[chunk.start - first : chunk.stop - first]


def _messages(gathered: tf.Tensor, piece: Piece) -> list[tf.Tensor]:
    return [gathered[low:high] for low, high in piece.byte_ranges]


class Memory:
    """Flat float32 arrays that are handed to TensorFlow and used again once nobody refers to them any more.

    Fresh memory costs more than what is written into it: the system clears every page. All buckets share it: what one
    has done with serves the next of its size, and little is left over when a step has ended.
    """

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()  # TensorFlow may call for two buckets at once

    def reserve(self, num_elements: int) -> None:
        """Allocates, without taking it, what a bucket of this length needs beside what others leave it."""
        num_bytes = _num_bytes(num_elements)
        with self._lock:
            there = sum(len(self._blocks[at]) == num_bytes for at in self._free())
            self._blocks += [np.empty(num_bytes, np.uint8) for _ in range(_SPARE - there)]

    def take(self, num_elements: int) -> Floats:
        """An array that shares memory with nothing in use; its contents are undefined."""
        num_bytes = _num_bytes(num_elements)
        with self._lock:
            free = self._free()
            chosen = next((at for at in free if len(self._blocks[at]) == num_bytes), None)
            if chosen is None:
                block = np.empty(num_bytes, np.uint8)
            else:
                block = self._blocks[chosen]
                free.remove(chosen)
            for at in reversed(free[_SPARE:]):
                del self._blocks[at]
            if chosen is None:
                self._blocks.append(block)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + 4 * num_elements].view(np.float32)

    def _free(self) -> list[int]:
        """Places of blocks to which nothing but the list refers."""
        return [at for at in range(len(self._blocks)) if sys.getrefcount(self._blocks[at]) == _OWN_REFERENCES]


def _num_bytes(num_elements: int) -> int:
    return 4 * num_elements + _ALIGNMENT


_OWN_REFERENCES = 2  # the list and the call
_SPARE = 2  # blocks that are kept although nobody uses them


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
