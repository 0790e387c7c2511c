"""A step of the distributed optimizer, one graph for all stages: gradients in, the core called, parameters written.

What ranks agree on lies in the optimizer's own variables: whatever saves, restores or broadcasts these carries the
stage with it. Compression errors belong to one rank and lie in the buckets.
"""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit import notices
from hvd_onebit.agreement import FAILURE, PARAMETERS, digest, encode_fields, raise_disagreement, static_fields
from hvd_onebit.codec import HostCodec
from hvd_onebit.errors import OneBitError, restored_too_far, too_many_skips
from hvd_onebit.hosts import HostGroups, hierarchical_place, shard_key
from hvd_onebit.layout import make_buckets
from hvd_onebit.options import CompressionOptions, is_full_precision, patterns_without_match
from hvd_onebit.planner import plan_run
from hvd_onebit.probe import PROBE_STEP, measure
from hvd_onebit.rules import bias_correction
from hvd_onebit.schedule import FreezeSchedule, delay_of, stride_of
from hvd_onebit.stage import (
    FROM_THE_START,
    FROZEN_STEP,
    VARIANCE_STEPS,
    WARM_SINCE,
    any_frozen,
    first_frozen_step,
    freeze_ready,
    frozen_variance,
    must_thaw,
    new_table,
)
from hvd_onebit.state import owed_by_parameter, share_errors, share_owed, take_shared_errors
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats, ring_allreduce_bytes
from hvd_onebit.tensorflow import kept
from hvd_onebit.tensorflow.buckets import DeviceBucket, ExchangedBucket, HostBucket, Hosts, Inputs, Memory, Sent
from hvd_onebit.tensorflow.codec import is_on_host, num_threads
from hvd_onebit.tensorflow.rules import Moment, Rule, native
from hvd_onebit.tensorflow.transport import (
    TRACED_FOR_GONE,
    HostFunctions,
    TensorTransport,
    averaged_as,
    on_host,
    split_frames,
)

__all__ = [
    "FORMAT_VERSION",
    "CompressionEngine",
    "Outcome",
    "flat_tensor",
    "native",
    "owes",
    "pack_schedule",
    "relative_paths",
    "unpack_errors",
    "unpack_schedule",
]

FORMAT_VERSION = 1
_AT_A_TIME = 2  # buckets whose update is under way
_COUNTED = re.compile(r"(.*?)_(\d+)")
_LEFT_OUT = "variables that are not trained"
_FROZEN_CHECKSUM = "checksum of the frozen variance"

Array = npt.NDArray[Any]


class Outcome(NamedTuple):
    """What became of a step, as tensors without dimensions."""

    made: tf.Tensor
    """Whether the update was made."""
    look: tf.Tensor
    """Whether there may be something to freeze."""
    step: tf.Tensor
    """Committed updates before it: int64."""
    lr: tf.Tensor

    @staticmethod
    def of(made: Any, look: Any, step: Any, lr: Any) -> Outcome:
        """With the types that all outcomes have."""
        return Outcome(tf.convert_to_tensor(made), tf.convert_to_tensor(look), tf.cast(step, tf.int64), lr)

    @staticmethod
    def of_a_pass() -> Outcome:
        """Of a backward pass that makes no update."""
        return Outcome.of(True, False, 0, tf.constant(0.0))


class CompressionEngine:
    """Everything an optimizer needs beside its own full-precision update.

    Args:
        optimizer: one of the classes of `distributed.py`, with its variables built.
        rule: how this kind of optimizer is compressed.
        variables: what it trains, in the order in which it was built on them.
        options: what the user chose.
        transport: among the ranks that train together.
        stats: counters to keep.
        gradient_scale: gradients are multiplied by this before they enter the momentum (n for op=Sum).
        wire_bytes: bytes an element takes in a full-precision allreduce, at most.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        variables: Sequence[Any],
        options: CompressionOptions,
        transport: TensorTransport,
        stats: Stats,
        *,
        gradient_scale: float = 1.0,
        wire_bytes: int = 8,
    ) -> None:
        self.options = options
        self.stats = stats
        self.rule = rule
        self._optimizer = optimizer
        self._variables = [native(v) for v in variables]
        self._names = [getattr(v, "path", v.name) for v in variables]
        self._sizes = [int(np.prod(v.shape, dtype=np.int64)) for v in self._variables]
        self._wire_bytes = wire_bytes
        self._buckets: list[ExchangedBucket] = []
        self._compressible = [
            i
            for i, v in enumerate(self._variables)
            if v.dtype.is_floating
            and not is_full_precision(self._names[i], self._sizes[i], options, num_bytes=v.dtype.size)
        ]
        self._momenta = [native(rule.momentum_of(i)) for i in range(len(variables))]
        self._keeps = [
            rule.keeps_momentum and i in self._compressible and kept.can_be_kept(momentum)
            for i, momentum in enumerate(self._momenta)
        ]
        self._keep_momenta()
        self._schedule = FreezeSchedule(options, rule.memory)
        delay = delay_of(rule.memory)
        with tf.init_scope():
            self.table = optimizer.add_variable((3, len(variables)), dtype="int64", name="onebit_stage")
            # highest_lr, last_rise, then (step, norm) pairs, as many as the schedule remembers
            length = 2 + 2 * (delay // stride_of(delay) + 1)
            self.schedule = optimizer.add_variable((length,), dtype="float64", name="onebit_schedule")
        self.fresh = self._add_fresh() if rule.keeps_fresh else []
        self._enter_world(transport, gradient_scale)
        if options.freeze_step == 0 and transport.size > 1:
            self._start_compressed()

    def _enter_world(self, transport: TensorTransport, gradient_scale: float) -> None:
        """Makes what depends on the ranks: buckets, counts, what is compared."""
        self.transport = transport
        self.host_functions = HostFunctions()  # of the graphs that are traced for these ranks
        self._gradient_scale = gradient_scale
        self._place = hierarchical_place(self.options, transport.place)
        self._groups = None if self._place is None else HostGroups(transport.on_host, self._place)
        self._buckets = self._make_buckets()
        sizes = [
            size * min(averaged_as(v.dtype).size, self._wire_bytes)
            for size, v in zip(self._sizes, self._variables, strict=True)
        ]
        self._allreduce_bytes = [ring_allreduce_bytes(size, transport.size) for size in sizes]
        self.stats.uncompressed_bytes_per_step = ring_allreduce_bytes(4 * sum(self._sizes), transport.size)
        self._static_fields = self._describe()
        self._static_digest = digest(self._static_fields).hex()
        self._failure = ""  # of this rank, at the freeze
        self._prepared = (0, 0, 0)  # by the freeze: coordinates that are dead and floored, checksum of the variance
        self._counted_for: bytes | None = None  # the frozen steps that these are of:
        self._waits = False  # something will be compressed, but is not yet
        self._allreduced_bytes = 0.0
        self._errors_are_shared = False
        self._restored: dict[str, Array] | None = None
        self._has_ended = False
        self._told = False
        self._steps_here = 0  # made with these ranks, skipped ones included
        self.stats.plan = None

    @property
    def own_variables(self) -> list[Any]:
        """The optimizer's variables that are there for the compression stage only."""
        return [self.table, self.schedule, *self.fresh]

    def _add_fresh(self) -> list[Any]:
        """A variance that goes on after the freeze, one a variable."""
        fresh = []
        for i, v in enumerate(self._variables):
            with tf.init_scope(), tf.device(v.device):
                name = f"onebit_fresh_{i}"
                fresh.append(self._optimizer.add_variable(tuple(v.shape), dtype="float32", name=name))
        return fresh

    def _keep_momenta(self) -> None:
        for i, keeps in enumerate(self._keeps):
            if keeps:
                kept.keep(self.rule.momentum_variable(i), partial(self._optimizer.bring_back_momentum, i))

    def bring_back_momentum(self, index: int | None = None) -> None:
        """Puts momentum that is kept as bits into its variables, until the next step. In eager code, not collective.

        Args:
            index: a variable whose momentum is wanted; None for all.
        """
        for bucket in self._buckets:
            if index is not None and (index not in bucket.members or not self._is_kept_now(index)):
                continue
            gone = [i for i in bucket.members if self._is_kept_now(i)]
            if gone:
                table, step, lr = self._moment()
                momenta = dict(zip(bucket.members, bucket.momenta(self._held(bucket, step, lr, table)), strict=True))
                for i in gone:
                    kept.put(self._momenta[i], momenta[i])

    def _is_kept_now(self, index: int) -> bool:
        return self._keeps[index] and kept.is_empty(self._momenta[index])

    def _moment(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        lr = tf.cast(tf.convert_to_tensor(native(self._optimizer.learning_rate)), tf.float32)
        step = tf.identity(native(self._optimizer.iterations))
        return tf.identity(native(self.table)), step, tf.reshape(lr, [])

    def _start_compressed(self) -> None:
        """Without a warm-up, for rules that have nothing to freeze."""
        table = new_table(len(self._variables))
        table[FROZEN_STEP, self._compressible] = FROM_THE_START
        with tf.init_scope():
            self.table.assign(table)
        self._say_frozen(table, step=0)

    def _make_buckets(self) -> list[ExchangedBucket]:
        index_of = {self._key(i): i for i in self._compressible}
        sizes = [(self._key(i), self._sizes[i]) for i in self._compressible]
        buckets: list[ExchangedBucket] = []
        memory, hosts = Memory(), None
        if self._groups is not None:
            hosts = Hosts(self._groups.place, self.transport.groups(self._groups))
        for bucket in make_buckets(sizes, self.options):
            members = [index_of[name] for name in bucket.parameters]
            on_cpu = is_on_host([self._variables[i] for i in members])
            keeps = [self._keeps[i] for i in members]
            kind: Any = HostBucket if on_cpu else DeviceBucket
            with tf.init_scope(), tf.device(None if on_cpu else self._variables[members[0]].device):
                buckets.append(kind(bucket, members, keeps, self.transport, self.options, self.rule, memory, hosts))
        return buckets

    def _key(self, index: int) -> str:
        # without the model's name, which Keras counts up: ranks may have built other models before, and so may the run
        # that saved a checkpoint
        return f"{index}.{self._variables[index].name.split('/')[-1]}"

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, gradients: Sequence[tf.Tensor], held: Sequence[int] = ()) -> Outcome:
        """Collective: one update from this rank's gradients, one a variable, or none. `freeze_when_due` comes after it.

        Args:
            gradients: one a variable.
            held: variables that the caller will put back to what they were: ranks have to agree on them.

        Raises:
            OneBitError: ranks disagree, or too many steps were skipped in a row; the same on every rank. Inside a graph
                TensorFlow raises tf.errors.UnknownError with the same text.
        """
        self._tell_once()
        table, step, lr = self._moment()
        agreed = self._agree(step, lr, table, held)
        with tf.control_dependencies([agreed]):
            compresses = tf.reduce_any(table[FROZEN_STEP] != 0)
        finite = tf.cond(
            compresses,
            lambda: self._compression_step(gradients, step, lr, table),
            lambda: self._warm_up_step(gradients),
        )
        return Outcome.of(finite, self._end_step(finite, compresses, step, lr, table), step, lr)

    def _warm_up_step(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        everything = range(len(self._variables))
        means = self._allreduce(gradients, everything)
        finite = self._all_finite(means)

        def commit() -> bool:
            self._optimizer.plain_update(means, self._variables, clip=True)
            return True

        return tf.cond(finite, commit, lambda: False)

    def _compression_step(
        self, gradients: Sequence[tf.Tensor], step: tf.Tensor, lr: tf.Tensor, table: tf.Tensor
    ) -> tf.Tensor:
        gradients = self._optimizer.clip(gradients)
        full = [i for i in range(len(self._variables)) if i not in set(self._compressible)]
        means = self._allreduce([gradients[i] for i in full], full)
        waits = tf.reduce_any(tf.gather(table[FROZEN_STEP], tf.constant(self._compressible, tf.int64)) == 0)
        waiting_means, waiting_finite = self._allreduce_waiting(waits, gradients, table)
        inputs = [self._inputs(bucket, gradients, step, lr, table) for bucket in self._buckets]
        sent = [bucket.exchange(each) for bucket, each in zip(self._buckets, inputs, strict=True)]
        finite = tf.reduce_all(tf.stack([each.finite for each in sent] + [waiting_finite, self._all_finite(means)]))

        def commit() -> bool:
            columns: dict[int, tf.Tensor] = {}
            written: list[list[Any]] = [[]] * _AT_A_TIME
            for bucket, each, message in zip(self._buckets, inputs, sent, strict=True):
                # a few at a time: the memory of a bucket's old parameters serves for the new ones of another
                with tf.control_dependencies(written[-_AT_A_TIME]):
                    new, assigned = self._commit(bucket, each, message)
                columns |= new
                written.append(assigned)
            self._assign_scalars(columns)
            self._optimizer.plain_update(means, [self._variables[i] for i in full], clip=False)
            tf.cond(waits, lambda: self._update_waiting(waiting_means, table), lambda: False)
            return True

        def rollback() -> bool:
            for bucket, message in zip(self._buckets, sent, strict=True):
                bucket.rollback(message)
            own = tf.stack([tf.reduce_all(tf.math.is_finite(gradients[i])) for i in self._compressible])
            on_host(self._tell_own_fault, [step, own], tf.bool)
            return False

        return tf.cond(finite, commit, rollback)

    def _inputs(
        self,
        bucket: ExchangedBucket,
        gradients: Sequence[tf.Tensor],
        step: tf.Tensor,
        lr: tf.Tensor,
        table: tf.Tensor,
    ) -> Inputs:
        members = bucket.members
        parameters = [flat_tensor(self._variables[i]) for i in members]
        flat = [flat_tensor(gradients[i]) for i in members]
        if self._gradient_scale != 1.0:
            flat = [g * np.float32(self._gradient_scale) for g in flat]
        coupled = [self._optimizer.coupled_weight_decay(self._variables[i]) for i in members]
        flat = [g + x * np.float32(wd) if wd else g for g, x, wd in zip(flat, parameters, coupled, strict=True)]
        return replace(self._held(bucket, step, lr, table), gradients=flat, parameters=parameters)

    def _held(self, bucket: ExchangedBucket, step: tf.Tensor, lr: tf.Tensor, table: tf.Tensor) -> Inputs:
        """What the optimizer holds of the bucket's variables."""
        members = bucket.members
        return Inputs(
            gradients=(),
            parameters=(),
            momenta=[self._momentum(i) for i in members],
            variances=[flat_tensor(self.rule.variance_of(i)) for i in members] if self.rule.has_variance else [],
            fresh=[flat_tensor(native(self.fresh[i])) for i in members] if self.fresh else [],
            table=table,
            scalars=self._scalars(),
            step=step,
            lr=lr,
        )

    def _momentum(self, index: int) -> tf.Tensor:
        variable = self._momenta[index]
        return kept.read(variable) if self._keeps[index] else flat_tensor(variable)

    def _commit(self, bucket: ExchangedBucket, inputs: Inputs, sent: Sent) -> tuple[dict[int, tf.Tensor], list[Any]]:
        """Writes what the bucket's variables become; their new columns of scalars, and what has written."""
        new = bucket.commit(inputs, sent)
        members = bucket.members
        variables = [self._variables[i] for i in members]
        variables += [native(self.fresh[i]) for i in members] if self.fresh else []
        written = [
            variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))
            for variable, value in zip(variables, [*new.parameters, *new.fresh], strict=True)
        ]
        for i, value in zip(members, new.momenta, strict=True):
            variable = self._momenta[i]
            if self._keeps[i]:
                kept.put(variable, value)
            else:
                variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))
        return dict(zip(members, new.columns, strict=False)), written

    def _scalars(self) -> tf.Tensor:
        scalars = self.rule.scalars
        return tf.zeros([0, len(self._variables)], tf.float64) if scalars is None else tf.identity(scalars)

    def _assign_scalars(self, columns: dict[int, tf.Tensor]) -> None:
        scalars = self.rule.scalars
        if scalars is not None and columns:
            old = tf.unstack(tf.identity(scalars), axis=1)
            scalars.assign(tf.stack([columns.get(i, column) for i, column in enumerate(old)], 1))

    # -- in full precision --

    def _allreduce(self, gradients: Sequence[tf.Tensor], indices: Sequence[int]) -> list[tf.Tensor]:
        if self.transport.size == 1 or not gradients:
            return list(gradients)
        return self.transport.allreduce(gradients, names=[f"allreduce.{i}" for i in indices])

    def _allreduce_waiting(
        self, waits: tf.Tensor, gradients: Sequence[tf.Tensor], table: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Means of the gradients that will be compressed but are not yet; nothing for the others."""
        indices = self._compressible

        def nothing(i: int) -> tf.Tensor:
            return tf.zeros([0], self._variables[i].dtype)

        def average(i: int) -> tf.Tensor:
            return tf.reshape(self._allreduce([gradients[i]], [i])[0], [-1])

        def average_waiting() -> list[tf.Tensor]:
            # one after the other where collectives match by order; in a graph they all start at once
            return [
                tf.cond(table[FROZEN_STEP, i] == 0, lambda i=i: average(i), lambda i=i: nothing(i)) for i in indices
            ]

        means = tf.cond(waits, average_waiting, lambda: [nothing(i) for i in indices]) if indices else []
        means = [means] if isinstance(means, tf.Tensor) else list(means)
        return means, self._all_finite(means)

    def _update_waiting(self, means: Sequence[tf.Tensor], table: tf.Tensor) -> bool:
        def update(variable: tf.Variable, mean: tf.Tensor) -> bool:
            self._optimizer.plain_update([tf.reshape(mean, variable.shape)], [variable], clip=False)
            return True

        for i, mean in zip(self._compressible, means, strict=True):
            variable = self._variables[i]
            tf.cond(table[FROZEN_STEP, i] == 0, lambda v=variable, m=mean: update(v, m), lambda: False)
        return True

    def _all_finite(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        if not tensors or not self.options.skip_nonfinite:
            return tf.constant(True)
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(each)) for each in tensors]))

    # -- agreement ---------------------------------------------------------------------------------------------------

    def _agree(self, step: tf.Tensor, lr: tf.Tensor, table: tf.Tensor, held: Sequence[int] = ()) -> tf.Tensor:
        """Collective: compares a digest of the ranks' state; where it differs, every rank raises the same error.

        Nothing else may be under way: an operation that waits for a rank which has stopped never ends.
        """
        if self.transport.size == 1:
            return tf.ensure_shape(on_host(self._take_restored, [step, table], tf.bool), [])
        left_out = [self._names[i] for i in held]
        given = [step, lr, table, self._parameters_checksum(step)]
        return self._compare(partial(self._token, left_out), partial(self._encoded_fields, left_out), given)

    def _agree_to_freeze(self, step: tf.Tensor, lr: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """Collective: raises the same error on every rank, if one has failed or would freeze something else.

        By the collective that begins a step: there it meets a rank that saw nothing to freeze, and both raise.
        """

        def fields(step: Any, lr: Any, table: Any) -> dict[str, Any]:
            own: dict[str, Any] = {_FROZEN_CHECKSUM: self._prepared[2]}
            if self._failure:
                own = {FAILURE: [self.transport.rank, self._failure]}
            return {**self._fields_now([], step, lr, table, 0), **own}

        def token(step: Any, *given: Any) -> Array:
            self.transport.watch.begin(f"at the freeze in step {int(step)}")
            return self._digest(fields(step, *given))

        return self._compare(
            token,
            lambda *given: self._encoded(fields(*given)),
            [step + 1, lr, table],
        )

    def _compare(
        self, token: Callable[..., Array], encoded: Callable[..., Array], given: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        frames = self.transport.gather_frames(on_host(token, given, tf.uint8), name="agreement.digest")
        digests = tf.reshape(frames, [self.transport.size, -1])
        same = tf.reduce_all(digests == digests[:1])

        def raise_everywhere() -> tf.Tensor:
            fields = self.transport.gather_frames(on_host(encoded, given, tf.uint8), name="agreement.fields")
            return on_host(self._raise_disagreement, [fields], tf.bool)

        # not before: a rank that wants no groups would not come
        return tf.cond(same, self._connect, raise_everywhere)

    def _connect(self) -> tf.Tensor:
        """Collective in the first step, if the exchange is hierarchical: finds out which ranks lie where."""
        groups = self._groups
        if groups is None:
            return tf.constant(True)

        def connect() -> Any:
            groups.connect()
            return np.bool_(True)

        return tf.ensure_shape(on_host(connect, [], tf.bool), [])

    def _parameters_checksum(self, step: tf.Tensor) -> tf.Tensor:
        """Of all variables before the second step: a model that was not built is broadcast after the first."""

        def compute(*values: Any) -> Any:
            return np.int64(reduce(lambda crc, value: zlib.crc32(value.tobytes(), crc), values, 0))

        def checksum() -> tf.Tensor:
            values = [tf.bitcast(tf.cast(v, tf.float32), tf.int32) for v in self._variables if v.dtype.is_floating]
            return tf.ensure_shape(on_host(compute, values, tf.int64), [])

        return tf.cond(step == 1, checksum, lambda: tf.constant(0, tf.int64))

    def _token(self, left_out: Sequence[str], step: Any, lr: Any, table: Any, parameters: Any) -> Array:
        self._refuse_if_ended()
        self._forget_shared()
        self._notice_broadcast(step, table)
        self._take_restored(step, table)
        token = self._digest(self._fields_now(left_out, step, lr, table, parameters))
        self.transport.watch.begin(f"in step {int(step) + 1}")
        return token

    def _forget_shared(self) -> None:
        self._errors_are_shared = False
        for bucket in self._buckets:
            bucket.shared_error = None

    def _encoded_fields(self, left_out: Sequence[str], *agreed: Any) -> Array:
        return self._encoded(self._fields_now(left_out, *agreed))

    def _digest(self, fields: dict[str, Any]) -> Array:
        return np.frombuffer(digest({"static": self._static_digest, **fields}), np.uint8)

    def _encoded(self, fields: dict[str, Any]) -> Array:
        return np.frombuffer(encode_fields({**self._static_fields, **fields}), np.uint8)

    def _fields_now(self, left_out: Sequence[str], step: Any, lr: Any, table: Any, parameters: Any) -> dict[str, Any]:
        return {_LEFT_OUT: left_out, PARAMETERS: int(parameters), **self._dynamic_fields(step, lr, table)}

    def _raise_disagreement(self, frames: Any) -> Any:
        self.transport.watch.end()
        with self._logged():
            raise_disagreement(split_frames(frames.tobytes()))

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """What is raised inside is in the log, too: a graph's operation buries it in TensorFlow's trace."""
        try:
            yield
        except OneBitError as error:
            if self.transport.runs_in_graph and self.transport.rank == 0:
                notices.ended(error)
            raise

    def _refuse_if_ended(self) -> None:
        """A graph holds the numbers of the world that it was traced in."""
        if self._has_ended:
            raise OneBitError(TRACED_FOR_GONE)

    def _describe(self) -> dict[str, Any]:
        named = zip(relative_paths(self._names), self._variables, strict=True)
        parameters = [f"{name} {tuple(v.shape)} {v.dtype.name}" for name, v in named]
        hosts = {"hosts of the hierarchical exchange": None if self._place is None else self._place.num_hosts}
        return {**static_fields(self.options, parameters, self.transport.size), **hosts, **self.rule.fields()}

    def _dynamic_fields(self, step: Any, lr: Any, table: Any) -> dict[str, Any]:
        compressed = any_frozen(table)
        fields: dict[str, Any] = {
            "step": int(step),
            "stage": COMPRESSION if compressed else WARM_UP,
            "lr": float(lr),
            "frozen at steps": table[FROZEN_STEP].tolist() if compressed else [],
            "first steps": min(self._steps_here, PROBE_STEP),  # a rank that measures waits for the others
        }
        checksums = [bucket.checksum for bucket in self._buckets]
        if any(checksums):
            fields["checksum of the averaged momentum"] = checksums
        return fields

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _end_step(
        self, finite: tf.Tensor, compresses: tf.Tensor, step: tf.Tensor, lr: tf.Tensor, table: tf.Tensor
    ) -> tf.Tensor:
        """Counts the step; True when the variances have to be looked at."""
        look = on_host(self._count_step, [finite, compresses, step, lr, table, native(self.schedule)], tf.bool)
        look.set_shape([])
        return look

    def _count_step(self, finite: Any, compresses: Any, step: Any, lr: Any, table: Any, schedule: Any) -> Any:
        self._refuse_if_ended()
        self.transport.watch.end()
        self._count_stages(table)
        stage = COMPRESSION if compresses else WARM_UP
        if self.transport.size > 1:
            if compresses:
                self._count_exchange()
            self.stats.count(self._allreduced_bytes)
        self.stats.end_step(stage, skipped=not finite)
        self.stats.stage, self.stats.step = stage, int(step) + int(finite)
        self._measure_when_due()
        if not finite:
            for bucket in self._buckets:
                bucket.checksum = 0
            self._report_skip(int(step))
            return np.bool_(False)
        if self.transport.size == 1 or not self._waits:
            return np.bool_(False)
        return np.bool_(self._must_look(int(step) + 1, float(lr), table, schedule))

    def _count_exchange(self) -> None:
        for bucket in self._buckets:
            self.stats.count(bucket.bytes_sent, inside=bucket.bytes_sent_inside)

    def _measure_when_due(self) -> None:
        """Collective, at the end of a step: once with these ranks."""
        self._steps_here += 1
        if self._steps_here == PROBE_STEP:
            self._measure()

    def _measure(self) -> None:
        """Collective, once with these ranks: measures, and says whether compression pays. All else is over by now."""
        is_wanted = self.options.measure and self.stats.plan is None
        if not is_wanted or self.transport.size == 1 or not self._compressible:
            return
        found = measure(self.transport.on_host, HostCodec(num_threads), self.transport.place, self._groups)
        num_elements = sum(self._sizes[i] for i in self._compressible)
        self.stats.plan = plan_run(found, num_elements, self.options)
        if self.transport.rank == 0:
            notices.measured(self.stats.plan, self.options)

    def _count_stages(self, table: Array) -> None:
        """What depends on the variables' stages alone: counted once after each change of them."""
        key = table[FROZEN_STEP].tobytes()
        if key == self._counted_for:
            return
        self._counted_for = key
        frozen = table[FROZEN_STEP] != 0
        self.stats.frozen_step = first_frozen_step(table)
        self._count_elements(frozen)
        self._waits = not frozen[self._compressible].all()
        self._allreduced_bytes = sum(n for n, each in zip(self._allreduce_bytes, frozen, strict=True) if not each)

    def _must_look(self, step: int, lr: float, table: Any, schedule: Array) -> bool:
        if any_frozen(table):
            return True
        if not self._schedule.is_automatic:
            # one step early, so that the schedule sees whether the learning rate rises
            return step >= int(self.options.freeze_step) - 1
        latest = self.options.freeze_latest_step
        is_late = latest is not None and step >= latest
        # these are the steps at which the schedule takes notes
        return is_late or lr > float(schedule[0]) or step % stride_of(delay_of(self.rule.memory)) == 0

    def _report_skip(self, step: int) -> None:
        in_a_row = self.stats.skipped_in_a_row
        if self.transport.rank == 0:
            notices.skipped(step + 1, in_a_row)
        if in_a_row >= self.options.max_skipped_steps:
            with self._logged():
                raise too_many_skips(in_a_row, step)

    def _tell_own_fault(self, step: Any, are_finite: Any) -> Any:
        """A mean does not tell whose fault it is."""
        names = [self._names[i] for i, is_finite in zip(self._compressible, are_finite, strict=True) if not is_finite]
        if names:
            notices.not_finite(int(step) + 1, self.transport.rank, names, self.stats.skipped_in_a_row + 1)
        return np.bool_(True)

    def _count_elements(self, frozen: Any) -> None:
        compressed = sum(size for size, is_frozen in zip(self._sizes, frozen, strict=True) if is_frozen)
        self.stats.compressed_elements = compressed
        self.stats.full_precision_elements = sum(self._sizes) - compressed
        self.stats.full_precision_names = tuple(
            name for name, is_frozen in zip(self._names, frozen, strict=True) if not is_frozen
        )

    def count_overflow(self) -> None:
        """A step skipped by loss scaling: on all ranks, before anything was exchanged."""
        self.stats.steps_skipped += 1

    # -- freezing ----------------------------------------------------------------------------------------------------

    def freeze_when_due(self, outcome: Outcome) -> None:
        """Collective: the last thing in a step, since a step in which the freeze fails was made all the same.

        Raises:
            OneBitError: some rank could not freeze, and all stay in warm-up; or ranks would freeze something else. The
                same on every rank.
        """
        tf.cond(outcome.look, lambda: self._freeze_what_is_ready(outcome.step, outcome.lr), lambda: False)

    def _freeze_what_is_ready(self, step: tf.Tensor, lr: tf.Tensor) -> bool:
        """Everything is allocated first; then the ranks agree; then they switch."""
        own_table, own_schedule = native(self.table), native(self.schedule)
        variances = [self.rule.variance_of(i) for i in self._compressible] if self.rule.has_variance else []
        flat = [flat_tensor(v) for v in variances]
        given = [step, lr, tf.identity(own_table), own_schedule, *flat]
        table, schedule, ready = on_host(self._decide, given, [tf.int64, tf.float64, tf.bool])
        table, schedule = tf.ensure_shape(table, own_table.shape), tf.ensure_shape(schedule, own_schedule.shape)
        own_table.assign(table)
        own_schedule.assign(schedule)
        ready = tf.ensure_shape(ready, [len(self._compressible)])
        tf.cond(tf.reduce_any(ready), lambda: self._freeze(step, lr, table, ready, variances, flat), lambda: False)
        return True

    def _freeze(
        self,
        step: tf.Tensor,
        lr: tf.Tensor,
        table: tf.Tensor,
        ready: tf.Tensor,
        variances: Sequence[tf.Variable],
        flat: Sequence[tf.Tensor],
    ) -> bool:
        own_scalars = self.rule.scalars
        momenta = [] if own_scalars is None else [self._momentum(i) for i in self._compressible]
        given = [step, table, ready, self._scalars(), *flat, *momenta]
        types = [tf.int64, tf.float64] + [tf.float32] * len(flat)
        new_table, scalars, *frozen = on_host(self._prepare_freeze, given, types)
        with tf.control_dependencies([self._agree_to_freeze(step, lr, new_table)]):
            native(self.table).assign(tf.ensure_shape(new_table, native(self.table).shape))
            for k, (i, variable) in enumerate(zip(self._compressible, variances, strict=False)):
                new = tf.reshape(frozen[k], variable.shape)
                variable.assign(tf.where(ready[k], tf.cast(new, variable.dtype), variable))
                if self.fresh:
                    fresh = native(self.fresh[i])
                    fresh.assign(tf.where(ready[k], new, fresh))
            if own_scalars is not None:
                own_scalars.assign(tf.ensure_shape(scalars, own_scalars.shape))
            on_host(self._end_freeze, [step, new_table], tf.bool)
        return True

    def _decide(self, step: Any, lr: Any, table: Any, schedule: Any, *variances: Any) -> Any:
        """Which variables freeze now, as a mask, and the notes that were taken; no variable is frozen yet."""
        self._failure, self._prepared = "", (0, 0, 0)
        mask = np.zeros(len(self._compressible), bool)
        try:
            noted, ready = self._find_ready(int(step) + 1, float(lr), table, schedule, variances)
        except Exception as error:
            # the other ranks are told: they may be waiting for this one
            self._fail(error)
            return table.copy(), schedule.copy(), ~mask
        mask[[self._compressible.index(i) for i in ready]] = True
        noted[[FROZEN_STEP, VARIANCE_STEPS]] = table[[FROZEN_STEP, VARIANCE_STEPS]]
        return noted, pack_schedule(self._schedule.state(), len(schedule)), mask

    def _find_ready(
        self, now: int, lr: float, table: Array, schedule: Array, variances: Sequence[Array]
    ) -> tuple[Array, list[int]]:
        variance_of = dict(zip(self._compressible, variances, strict=False))
        self._schedule.load(unpack_schedule(schedule))
        waiting = [v for i, v in variance_of.items() if not table[FROZEN_STEP, i]]
        correction = bias_correction(self.rule.memory, now) if self.rule.bias_corrected else 1.0

        def norm() -> float:
            return sum(float(v.sum(dtype=np.float64)) for v in waiting) / correction

        return freeze_ready(
            table,
            self._compressible,
            step=now,
            lr=lr,
            options=self.options,
            schedule=self._schedule,
            variance_of=variance_of.get,
            variance_norm=norm if self.rule.has_variance else None,
        )

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"[:200]

    def _prepare_freeze(self, step: Any, table: Array, ready: Array, scalars: Array, *arrays: Any) -> list[Any]:
        """Makes all that the freeze needs, and changes nothing."""
        num_variances = len(self._compressible) if self.rule.has_variance else 0
        variances, momenta = arrays[:num_variances], arrays[num_variances:]
        chosen = [int(k) for k in np.flatnonzero(ready)]
        indices = [self._compressible[k] for k in chosen]
        table = table.copy()
        table[FROZEN_STEP, indices] = table[VARIANCE_STEPS, indices] = int(step) + 1
        if not self._failure:
            try:
                return [table, *self._frozen_arrays(chosen, scalars, variances, momenta)]
            except Exception as error:
                self._fail(error)
        return [table, scalars.copy(), *(np.zeros(0, np.float32) for _ in variances)]

    def _frozen_arrays(
        self, chosen: Sequence[int], scalars: Array, variances: Sequence[Array], momenta: Sequence[Array]
    ) -> list[Array]:
        """The rule's scalars, then every variance, frozen or as it is."""
        for bucket in self._buckets:
            bucket.reserve()
        every = [variance.copy() for variance in variances]
        dead = floored = checksum = 0
        for k in chosen if variances else []:
            every[k], its_dead, its_floored = frozen_variance(variances[k], self.options)
            dead, floored = dead + its_dead, floored + its_floored
            checksum = zlib.crc32(every[k].tobytes(), checksum)
        self._prepared = dead, floored, checksum
        if momenta:
            scalars = self.rule.frozen_scalars(
                [self._compressible[k] for k in chosen], scalars, [momenta[k] for k in chosen]
            )
        return [scalars, *every]

    def _end_freeze(self, step: Any, table: Any) -> Any:
        self.transport.watch.end()
        self._measure()
        dead, floored, _ = self._prepared
        self.stats.dead_elements += dead
        self.stats.floored_elements += floored
        self._say_frozen(table, step=int(step) + 1)
        return np.bool_(True)

    def _say_frozen(self, table: Array, *, step: int) -> None:
        self.stats.step, self.stats.stage = step, COMPRESSION
        self._count_stages(table)
        if self.transport.rank == 0:
            notices.frozen(self.stats, has_variance=self.rule.has_variance, lr_rises=self._schedule.lr_rises)

    # -- notices -----------------------------------------------------------------------------------------------------

    def _tell_once(self) -> None:
        if self._told:
            return
        self._told = True
        if self.transport.rank != 0:
            return
        for pattern, nearest in patterns_without_match(self._names, self.options):
            notices.pattern_without_match(pattern, nearest)
        if self.transport.size == 1:
            notices.one_rank()
            return
        if wide := [name for name, v in zip(self._names, self._variables, strict=True) if v.dtype == tf.float64]:
            notices.kept_wide(wide)
        if not self._compressible:
            notices.nothing_to_compress("every parameter is kept in full precision, by its type or your options")
        else:
            self._tell_stage()
            if self._place is not None:
                notices.hierarchical(self._place.num_hosts, self._place.local_size)
            elif self.options.hierarchical and self.transport.place.obstacle:
                notices.not_hierarchical(self.transport.place.obstacle)

    def _tell_stage(self) -> None:
        if self.stats.stage == WARM_UP:
            notices.started(self.options.freeze_step, self.rule.memory, self.stats)
        elif self.stats.step > self.stats.frozen_step:
            notices.resumed(self.stats.step, self.stats.frozen_step)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """What a checkpoint needs beside the optimizer's variables: this rank's compression errors. Not collective."""
        if self._restored is not None:
            return self._restored
        buckets = [bucket.bucket for bucket in self._buckets]
        described = {
            "version": FORMAT_VERSION,
            "rank": self.transport.rank,
            "size": self.transport.size,
            "shard": shard_key(self._place),
            "hosts": None if self._place is None or self._errors_are_shared else self._place.num_hosts,
            "shared": self._errors_are_shared,
            "buckets": {bucket.name: list(bucket.parameters) for bucket in buckets},
            "sizes": {bucket.name: list(bucket.sizes) for bucket in buckets},
            "worker_starts": {bucket.bucket.name: bucket.layout.shard[0] for bucket in self._buckets},
            "server_starts": {bucket.bucket.name: bucket.layout.own_chunk.start for bucket in self._buckets},
        }
        arrays = {"about": np.frombuffer(json.dumps(described).encode(), np.uint8)}
        for bucket in self._buckets:
            errors = bucket.errors()
            if bucket.shared_error is not None:
                errors["worker_error"] = bucket.shared_error
            for name, error in errors.items():
                if error is not None:
                    arrays[f"{bucket.bucket.name}.{name}"] = error.copy()
        return arrays

    def load(self, arrays: dict[str, Array] | None) -> None:
        """Takes up restored variables, and the errors that `state` returned, if there are any. Not collective."""
        if not arrays:
            self._take_up(None, {}, {})
            return
        about, errors = unpack_errors(arrays)
        self._take_up(about, errors, owed_by_parameter(errors, about["size"]) if about["shared"] else {})

    def load_at_next_step(self, arrays: dict[str, Array]) -> None:
        """As `load` takes up the errors, when the step knows the restored variables. Not collective.

        TensorFlow restores the variables of a tf.train.Checkpoint later than what is no variable.
        """
        self.bring_back_momentum()  # while its bits are still of the same state
        self._restored = arrays

    def _take_restored(self, step: Any, table: Array) -> Any:
        """Takes up the errors that a tf.train.Checkpoint has brought, if it has, before they are needed.

        Raises:
            OneBitError: the state has to go back to warm-up, for which it is too late here.
        """
        arrays = self._restored
        if arrays is None:
            return np.bool_(True)
        about, errors = unpack_errors(arrays)
        size = self.transport.size
        if self._must_thaw(table, int(step)) and (size, about["size"]) != (1, 1):
            raise OneBitError(restored_too_far(size, self.options.freeze_step))
        self._forget()
        if self._has_errors(table):
            self._restore_errors(about, errors)
        return np.bool_(True)

    def _has_errors(self, table: Array) -> bool:
        """Whether something is compressed."""
        return any_frozen(table)

    def _notice_broadcast(self, step: Any, table: Array) -> None:
        """Says so when the variables have come from another rank, in the compression stage."""
        if self._restored is None and int(step) != self.stats.step and self._has_compressed(int(step), table):
            notices.errors_not_broadcast(self.transport.rank)

    def _has_compressed(self, step: int, table: Array) -> bool:
        """Whether something was sent as bits in the steps made so far."""
        return any_frozen(table) and step > first_frozen_step(table)

    def _forget(self) -> None:
        """Drops what belongs to a state that has been replaced."""
        for bucket in self._buckets:
            bucket.forget()
            bucket.checksum = 0
        self._restored = None
        self._errors_are_shared = False
        self._told = False
        self._counted_for = None

    def moved_to(
        self, transport: TensorTransport, *, gradient_scale: float, old: dict[str, Array] | None = None
    ) -> CompressionEngine:
        """An engine that goes on in another world, of other ranks, perhaps more or fewer. Not collective.

        It has the same variables; graphs that were traced with this one raise from now on. Errors that were shared
        stay. Others belong to the old world: a rank that is now alone settles its part of them, on several ranks
        `share_owed` brings them back.

        Args:
            transport: of the new world.
            gradient_scale: as at construction.
            old: what `state` returned in the old world; by default what it returns now.
        """
        about, errors = unpack_errors(self.state() if old is None else old)
        self.bring_back_momentum()
        self.stats.give_up_step(self.stats.stage)
        new = copy.copy(self)
        self._has_ended = True
        self.transport.watch.end()
        new._enter_world(transport, gradient_scale)
        owed = owed_by_parameter(errors, about["size"])
        if about["shared"]:
            new._take_up(about, errors, owed)
        else:
            new._take_up(None, {}, {name: part / np.float32(about["size"]) for name, part in owed.items()})
        return new

    def synchronize_for_checkpoint(self) -> None:
        """Collective: afterwards any rank's checkpoint alone restores a run of any size, what is owed included.

        Raises:
            OneBitError: ranks disagree, the same on every rank.
        """
        table, step, lr = self._moment()
        self._agree(step, lr, table)
        self.transport.watch.end()
        for bucket in self._buckets:
            with bucket.errors_on_host() as exchange:
                shared = share_errors(exchange, self.transport.on_host, HostCodec(num_threads), self._groups)
            bucket.shared_error = None if self._groups is None else shared
        self._errors_are_shared = True

    def share_owed(self, errors: Mapping[str, Any], size: int, weight: float) -> None:
        """Collective: gives every rank the mean of `weight` times what the ranks owe; see `hvd_onebit.state`.

        Args:
            errors: this rank's, as `unpack_errors` gives them, in a world of `size` ranks.
            size: ranks of that world.
            weight: 0 when this rank has no part in it.
        """
        if self.stats.stage != COMPRESSION:
            return  # it was settled, or there is nothing
        owed = owed_by_parameter(errors, size) if weight else {}
        for bucket in self._buckets:
            with bucket.errors_on_host() as exchange:
                shared = share_owed(exchange, owed, weight, self.transport.on_host, HostCodec(num_threads))
            bucket.shared_error = None if self._groups is None else shared
        self._errors_are_shared = True

    def _take_up(self, about: Mapping[str, Any] | None, errors: Mapping[str, Any], owed: Mapping[str, Array]) -> None:
        """Goes on from the optimizer's variables as they now are.

        Args:
            about: what `unpack_errors` says, None if there is nothing saved.
            errors: to go on with, if they fit.
            owed: by parameter, the same on every rank: what is settled where compression ends.
        """
        self.bring_back_momentum()
        self._forget()
        settled = self._thaw_if_early(owed)
        self._count_restored()
        if about is None:
            return
        if self.stats.stage == COMPRESSION:
            self._restore_errors(about, errors)
        elif not settled and owes(errors) and self.transport.rank == 0:
            notices.dropped_errors("training goes on uncompressed")

    def _count_restored(self) -> None:
        table = self.table.numpy()
        self.stats.step = int(native(self._optimizer.iterations))
        self.stats.stage = COMPRESSION if any_frozen(table) else WARM_UP
        self._count_stages(table)

    def _must_thaw(self, table: Array, step: int) -> bool:
        return must_thaw(table, step=step, size=self.transport.size, options=self.options)

    def _thaw_if_early(self, owed: Mapping[str, Array]) -> bool:
        """Back to warm-up when freeze_step now lies ahead, or when there is nobody to send to.

        Returns:
            True when what was owed is now in the momentum, on which training goes on.
        """
        table, step = self.table.numpy(), int(native(self._optimizer.iterations))
        if not self._must_thaw(table, step):
            return False
        first = first_frozen_step(table)
        moment = Moment(table, self._scalars().numpy(), step, float(native(self._optimizer.learning_rate)))
        settled = bool(owed)
        for i in map(int, np.flatnonzero(table[FROZEN_STEP])):
            part = owed.get(self._key(i))
            if settled and part is not None:
                settled = self.rule.settle(i, part, moment)
            fresh = native(self.fresh[i]) if self.fresh else None
            self.rule.thaw(i, step=step, variance_steps=int(table[VARIANCE_STEPS, i]), fresh=fresh)
        thawed = new_table(len(self._variables))
        thawed[WARM_SINCE] = table[WARM_SINCE]
        self.table.assign(thawed)
        if self.transport.rank == 0 and self.transport.size > 1:
            notices.back_to_warm_up(first, self.options.freeze_step, step)
        return settled

    def _restore_errors(self, about: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        here, there = (self.transport.rank, self.transport.size), (about["rank"], about["size"])
        if about["shared"]:
            self._take_shared(errors)
            if here[0] == 0 and here[1] != there[1]:
                notices.errors_of_other_ranks(there[1], here[1])
            return
        if here != there:
            notices.dropped_errors(f"saved by rank {there[0]} of {there[1]}, restored on rank {here[0]} of {here[1]}")
            return
        if about["shard"] != shard_key(self._place):
            notices.dropped_errors("saved by a hierarchical exchange over other hosts, or by one that is not")
            return
        for bucket in self._buckets:
            name = bucket.bucket.name
            saved = errors.get(name)
            if saved is None or saved["parameters"] != list(bucket.bucket.parameters):
                notices.dropped_errors(f"bucket {name} holds other parameters now")
            elif not bucket.restore_errors({kind: saved[kind] for kind in ("worker_error", "server_error")}):
                notices.dropped_errors(f"bucket {name} is exchanged in another way now")

    def _take_shared(self, errors: Mapping[str, Any]) -> None:
        parts = {
            name: (each["parameters"], each["sizes"], each["worker_error"])
            for name, each in errors.items()
            if each["worker_error"] is not None
        }
        missing = []
        for bucket in self._buckets:
            with bucket.errors_on_host() as exchange:
                whole = None
                if self._groups is not None and exchange.worker_error is not None:
                    whole = np.zeros(bucket.bucket.num_elements, np.float32)
                missing += take_shared_errors(exchange, parts, whole)
            bucket.shared_error = whole
        if missing:
            notices.dropped_errors(f"none of this size were saved for {', '.join(missing[:8])}")
        self._errors_are_shared = True


def unpack_errors(arrays: Mapping[str, Array]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `CompressionEngine.state` returned: whose it is, and the errors by bucket, as in `hvd_onebit.state`."""
    about = json.loads(arrays["about"].tobytes())
    about = {
        "shared": False,
        "shard": None,
        "hosts": None,
        "sizes": {},
        "server_starts": {},
        "worker_starts": {},
        **about,
    }
    errors = {
        name: {
            "parameters": parameters,
            "sizes": about["sizes"].get(name, []),
            "worker_error": arrays.get(f"{name}.worker_error"),
            "worker_start": about["worker_starts"].get(name, 0),
            "hosts": about["hosts"],
            "server_error": arrays.get(f"{name}.server_error"),
            "server_start": about["server_starts"].get(name, 0),
        }
        for name, parameters in about["buckets"].items()
    }
    return about, errors


def relative_paths(paths: Sequence[str]) -> list[str]:
    """The variables' paths, as far as they are the same on every rank that has built the same model.

    Keras counts the names that it makes up: layers are dense_4 and dense_5 where other models were built before, dense
    and dense_1 elsewhere. So numbers become places among the numbers that occur, and a model's own name is left out.

    Example:
        >>> relative_paths(["model/dense_5/kernel", "model/dense_4/kernel"])
        ['dense.1/kernel', 'dense.0/kernel']
    """
    split = [[_COUNTED.fullmatch(part) or part for part in path.split("/")] for path in paths]
    parts = [[(part, 0) if isinstance(part, str) else (part[1], int(part[2])) for part in each] for each in split]
    if all(len(each) > 1 and each[0] == parts[0][0] for each in parts):
        parts = [each[1:] for each in parts]
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for name, number in chain.from_iterable(parts):
        numbers[name].add(number)

    def shown(name: str, number: int) -> str:
        places = sorted(numbers[name])
        return name if len(places) == 1 else f"{name}.{places.index(number)}"

    return ["/".join(shown(*part) for part in each) for each in parts]


def owes(errors: Mapping[str, Any]) -> bool:
    """Whether there is anything but zeros."""
    return any(
        error is not None and error.any()
        for each in errors.values()
        for error in (each["worker_error"], each["server_error"])
    )


def flat_tensor(tensor: Any) -> tf.Tensor:
    """The tensor as float32 of one dimension."""
    return tf.reshape(tf.cast(tf.convert_to_tensor(tensor), tf.float32), [-1])


def pack_schedule(state: dict[str, Any], length: int) -> Array:
    """What FreezeSchedule.state() returned, for the optimizer's variable."""
    flat = [state["highest_lr"], state["last_rise"], *(x for pair in state["norms"] for x in pair)]
    return np.array(flat + [0.0] * (length - len(flat)), np.float64)


def unpack_schedule(packed: Array) -> dict[str, Any]:
    """The other way round."""
    pairs = [[int(step), float(norm)] for step, norm in packed[2:].reshape(-1, 2) if step > 0]
    return {"norms": pairs, "highest_lr": float(packed[0]), "last_rise": int(packed[1])}
