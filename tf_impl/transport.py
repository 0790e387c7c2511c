"""Transports for TensorFlow tensors: Horovod's collectives as operations, or one of the core's transports."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit.codec import ordered_mean
from hvd_onebit.errors import OneBitError
from hvd_onebit.hosts import HostGroups, Place, horovods_place
from hvd_onebit.stall import StallLimits, StallWatch
from hvd_onebit.transport import Group, Pending, Transport
from hvd_onebit.transport.shared import SharedMemory, share_memory

if TYPE_CHECKING:
    from horovod.common.process_sets import ProcessSet

__all__ = [
    "TRACED_FOR_GONE",
    "HorovodTransport",
    "HostFunctions",
    "HostTransport",
    "TensorGroup",
    "TensorGroups",
    "TensorTransport",
    "averaged_as",
    "on_host",
    "split_frames",
]

HostArray = npt.NDArray[Any]

TRACED_FOR_GONE = (
    "this tf.function was traced for ranks that are gone. Make it anew after every reset: inside the function that "
    "elastic.run decorates, or in a callback of state.register_reset_callbacks. Without elastic.run, the optimizer is "
    "gone: keep it for as long as the function is called"
)


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
        keeper = _keeper.get()
        kept = function if keeper is None else keeper.keep(function)
        return tf.numpy_function(kept, list(inputs), types, stateful=stateful)
    results = function(*(tf.convert_to_tensor(each).numpy() for each in inputs))
    if not isinstance(types, list):
        return tf.constant(results, types)
    return [tf.constant(result, dtype) for result, dtype in zip(results, types, strict=True)]


def averaged_as(dtype: tf.DType) -> tf.DType:
    """The type as which values of this type are averaged: Horovod's operations do not know bfloat16."""
    return tf.float32 if dtype == tf.bfloat16 else dtype


class HostFunctions:
    """Keeps the functions that a graph calls on the host.

    TensorFlow keeps what `tf.numpy_function` is given for as long as the outermost graph lives, which for a tf.function
    is the life of the process. So TensorFlow is given no more than a weak reference: with whoever holds this go the
    functions, and all that they hold.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[..., Any]] = []

    @contextmanager
    def traced(self) -> Iterator[None]:
        """While open, the functions given to `on_host` in a graph are kept here."""
        token = _keeper.set(self)
        try:
            yield
        finally:
            _keeper.reset(token)

    def keep(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What calls the function as long as this lives."""
        number = len(self._functions)
        self._functions.append(function)
        return _Numbered(self, number)

    def function(self, number: int) -> Callable[..., Any]:
        return self._functions[number]


class _Numbered:
    def __init__(self, keeper: HostFunctions, number: int) -> None:
        self._keeper = weakref.ref(keeper)
        self._number = number

    def __call__(self, *arrays: HostArray) -> Any:
        keeper = self._keeper()
        if keeper is None:
            raise OneBitError(TRACED_FOR_GONE)
        return keeper.function(self._number)(*arrays)


_keeper: ContextVar[HostFunctions | None] = ContextVar("hvd_onebit_host_functions", default=None)


class TensorGroup(Protocol):
    """What an exchange needs of some ranks, on tensors. In a graph: operations, which run when their inputs are there.

    `hvd_onebit.transport.Group` says what each of them does.
    """

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor: ...

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor: ...


class HostTensorGroup(TensorGroup, Protocol):
    """The ranks of one host."""

    def reduce_scatter(self, values: tf.Tensor, lengths: Sequence[int], *, name: str) -> tf.Tensor:
        """This rank's part of the mean of `values` (float32, flat), summed in rank order."""
        ...

    def zeros(self, num_elements: int) -> HostArray:
        """Zeros (float32) on the host, which `reduce_scatter` reads without a copy where that can be had."""
        ...


@dataclass(frozen=True)
class TensorGroups:
    """The two groups of a hierarchical exchange; which ranks are in them is known when they are used."""

    inside: HostTensorGroup
    across: TensorGroup


class TensorTransport(TensorGroup, Protocol):
    """Collectives among `size` ranks on tensors.

    Attributes:
        runs_in_graph: False when collectives run at once, in the order of calls, and so in eager code only.
        watch: is told when this rank waits for others, and when no longer.
    """

    runs_in_graph: bool
    watch: StallWatch

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def place(self) -> Place:
        """Where this rank runs."""
        ...

    @property
    def on_host(self) -> Transport[Any]:
        """The same ranks, for NumPy arrays in eager code."""
        ...

    def groups(self, groups: HostGroups[Any]) -> TensorGroups:
        """For tensors what `groups`, made on `on_host`, are for arrays. They must be connected before a step's use."""
        ...

    def allreduce(self, values: Sequence[tf.Tensor], *, names: Sequence[str]) -> list[tf.Tensor]:
        """The mean of every tensor over ranks."""
        ...

    def gather_frames(self, data: tf.Tensor, *, name: str) -> tf.Tensor:
        """Every rank's bytes (uint8, of any length) in rank order, as `split_frames` takes them apart."""
        ...


class HorovodTransport:
    """horovod.tensorflow's collectives on a process set, under fixed names.

    The names' prefix is chosen when the first collective is traced: ranks trace them in the same order, but may
    construct optimizers that they never use. Rank and size stay those of the world that it was made in, so that what
    belongs to a world that has ended can still be told apart.

    Args:
        process_set: the ranks.
        make_prefix: gives the prefix.
        compression: hvd.Compression for `allreduce`.
        op: hvd.Average or hvd.Sum, for `allreduce`.
        predivide: gradient_predivide_factor, for `allreduce`.
        num_groups: allreduces are negotiated together in that many groups; 0: each by itself.
    """

    runs_in_graph = True

    def __init__(
        self,
        process_set: ProcessSet,
        make_prefix: Callable[[], str],
        *,
        compression: Any = None,
        op: Any = None,
        predivide: float = 1.0,
        num_groups: int = 0,
    ) -> None:
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._process_set = process_set
        self._rank, self._size = int(process_set.rank()), int(process_set.size())
        self._place = horovods_place(hvd, process_set, is_homogeneous=bool(hvd.is_homogeneous()))
        self._on_host = _HorovodOnHost(self, hvd, process_set)
        # Horovod's end makes all operations that are under way fail, on every rank
        self.watch = StallWatch(self._rank, hvd.shutdown, StallLimits.from_environment())
        self._make_prefix = make_prefix
        self._prefix: str | None = None
        self._num_groups = num_groups
        op = hvd.Average if op is None else op
        self._how = {
            "compression": hvd.Compression.none if compression is None else compression,
            # Horovod's own optimizer splits the average around the sum in the same way
            "op": hvd.Sum if predivide != 1.0 else op,
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide / self._size if predivide != 1.0 else 1.0,
            "process_set": process_set,
            "ignore_name_scope": True,
        }

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def place(self) -> Place:
        return self._place

    @property
    def on_host(self) -> Transport[Any]:
        return self._on_host

    def groups(self, groups: HostGroups[Any]) -> TensorGroups:
        place = groups.place
        return TensorGroups(
            _HorovodHostGroup(self, lambda: groups.inside, place.local_rank, place.local_size, "inside"),
            _HorovodGroup(self, lambda: groups.across, place.host, place.num_hosts, "across"),
        )

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor:
        received = self.alltoall_by(message, tf.constant(list(send_bytes), tf.int32), name=name)
        return _shaped(received, receive_bytes)

    def alltoall_by(self, message: tf.Tensor, splits: tf.Tensor, *, name: str) -> tf.Tensor:
        """The same with counts (int32) that are known when it runs."""
        received, _ = self._hvd.alltoall(
            message, splits, name=self._named(name), ignore_name_scope=True, process_set=self._process_set
        )
        return received

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor:
        gathered = self._hvd.allgather(
            message, name=self._named(name), ignore_name_scope=True, process_set=self._process_set
        )
        return _shaped(gathered, receive_bytes)

    def allreduce(self, values: Sequence[tf.Tensor], *, names: Sequence[str]) -> list[tf.Tensor]:
        means = self._allreduce([tf.cast(value, averaged_as(value.dtype)) for value in values], names)
        return [tf.cast(mean, value.dtype) for mean, value in zip(means, values, strict=True)]

    def _allreduce(self, values: Sequence[tf.Tensor], names: Sequence[str]) -> list[tf.Tensor]:
        if not self._num_groups:
            return [
                self._hvd.allreduce(value, name=self._named(name), **self._how)
                for value, name in zip(values, names, strict=True)
            ]
        per_group = max(1, -(-len(values) // self._num_groups))
        means: list[tf.Tensor] = []
        for low in range(0, len(values), per_group):
            group = list(values[low : low + per_group])
            means += self._hvd.grouped_allreduce(group, name=self._named(f"{names[low]}.group"), **self._how)
        return means

    def gather_frames(self, data: tf.Tensor, *, name: str) -> tf.Tensor:
        # lengths travel in front, so that one collective serves messages of any length
        length = tf.bitcast(tf.reshape(tf.size(data, out_type=tf.int32), [1]), tf.uint8)
        framed = tf.concat([tf.reshape(length, [4]), data], 0)
        return self._hvd.allgather(
            framed, name=self._named(name), ignore_name_scope=True, process_set=self._process_set
        )

    def _named(self, name: str) -> str:
        if self._prefix is None:
            self._prefix = self._make_prefix()
        return f"{self._prefix}.{name}"


class _HorovodGroup:
    """Some ranks of a HorovodTransport, on tensors: all ranks take part in its alltoall, and send nothing to others.

    Process sets would have to be added at run time by all ranks together, which users must allow, and they are
    negotiated one after the other in every cycle of Horovod's: measured, all collectives took about twice as long.
    """

    def __init__(self, everyone: HorovodTransport, find: Callable[[], Any], rank: int, size: int, name: str) -> None:
        self._everyone = everyone
        self._find: Callable[[], _HorovodSubgroup] = find
        self._name = name
        self.rank = rank
        self.size = size

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor:
        def counts(_: Any) -> Any:
            return np.array(self._find().spread(send_bytes), np.int32)

        # with an input, or it would be taken for a constant and asked before the ranks are known
        splits = tf.ensure_shape(on_host(counts, [message[:1]], tf.int32, stateful=False), [self._everyone.size])
        return _shaped(self._everyone.alltoall_by(message, splits, name=f"{self._name}.{name}"), receive_bytes)

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor:
        counts = [int(message.shape[0])] * self.size
        return self.alltoall(tf.tile(message, [self.size]), counts, receive_bytes, name=name)


class _HorovodHostGroup(_HorovodGroup):
    """The ranks of one host. What they send each other, or word where in memory it lies, is known when it runs."""

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor:
        received = self._exchanged(lambda array: self._find().offer_bytes(array, name=name), message, name=name)
        gathered = on_host(
            lambda offers: self._find().bytes_of(offers, receive_bytes), [received], tf.uint8, stateful=False
        )
        return _shaped(gathered, receive_bytes)

    def reduce_scatter(self, values: tf.Tensor, lengths: Sequence[int], *, name: str) -> tf.Tensor:
        received = self._exchanged(lambda array: self._find().offer(array, lengths, name=name), values, name=name)
        mean = on_host(lambda offers: self._find().mean_of(offers, lengths), [received], tf.float32, stateful=False)
        return tf.ensure_shape(mean, [lengths[self.rank]])

    def zeros(self, num_elements: int) -> HostArray:
        return self._find().zeros(num_elements)

    def _exchanged(self, offer: Callable[[HostArray], Any], given: tf.Tensor, *, name: str) -> tf.Tensor:
        message, splits = on_host(offer, [given], [tf.uint8, tf.int32], stateful=False)
        message, splits = tf.ensure_shape(message, [None]), tf.ensure_shape(splits, [self._everyone.size])
        return self._everyone.alltoall_by(message, splits, name=f"{self._name}.{name}")


class _HorovodOnHost:
    """horovod.tensorflow's collectives for NumPy arrays. They run at once: eager operations have no names."""

    def __init__(self, tensors: HorovodTransport, hvd: Any, process_set: ProcessSet) -> None:
        self._tensors = tensors
        self._hvd = hvd
        self._process_set = process_set
        self._memory: SharedMemory | None = None

    @property
    def rank(self) -> int:
        return self._tensors.rank

    @property
    def size(self) -> int:
        return self._tensors.size

    @property
    def place(self) -> Place:
        return self._tensors.place

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> Group[Any]:
        memory = None
        if same_host:
            self._memory = self._memory or SharedMemory()
            memory = self._memory if share_memory(self._memory, self, ranks) else None
        return _HorovodSubgroup(self, ranks, memory)

    def shared_zeros(self, num_elements: int) -> HostArray | None:
        return None

    def alltoall(
        self, message: HostArray, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> Pending[HostArray]:
        splits = tf.constant(list(send_bytes), tf.int32)
        with self._tensors.watch.waiting(f"at {name!r}"):
            return _Arrived(self._tensors.alltoall_by(tf.constant(message), splits, name=name).numpy())

    def allgather(self, message: HostArray, receive_bytes: Sequence[int], *, name: str) -> Pending[HostArray]:
        with self._tensors.watch.waiting(f"at {name!r}"):
            return _Arrived(self._tensors.allgather(tf.constant(message), receive_bytes, name=name).numpy())

    def allreduce(self, values: HostArray, *, name: str) -> Pending[HostArray]:
        # the plain mean, whatever op and compression the gradients have
        with self._tensors.watch.waiting(f"at {name!r}"):
            mean = self._hvd.allreduce(
                tf.constant(values), op=self._hvd.Average, name=name, process_set=self._process_set
            )
            return _Arrived(mean.numpy())

    def gather_parts(self, values: HostArray, lengths: Sequence[int], *, name: str) -> Pending[list[HostArray]]:
        return _parts_by_alltoall(self, values, lengths, name=name)

    def allgather_bytes(self, data: bytes, *, name: str) -> Pending[list[bytes]]:
        own = tf.constant(np.frombuffer(data, np.uint8))
        with self._tensors.watch.waiting(f"at {name!r}"):
            return _Arrived(split_frames(self._tensors.gather_frames(own, name=name).numpy().tobytes()))


class _HorovodSubgroup:
    """Some ranks of a HorovodTransport, for NumPy arrays in eager code.

    Args:
        everyone: all ranks; they take part in all that these do.
        ranks: the members.
        memory: that the members show each other, if they do.
    """

    def __init__(self, everyone: _HorovodOnHost, ranks: Sequence[int], memory: SharedMemory | None) -> None:
        self._everyone = everyone
        self._ranks = tuple(ranks)
        self._memory = memory
        self.rank = self._ranks.index(everyone.rank)
        self.size = len(self._ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether its ranks read each other's values where they lie."""
        return self._memory is not None

    def spread(self, counts: Sequence[int]) -> list[int]:
        """Counts for the members as counts for all ranks."""
        spread = [0] * self._everyone.size
        for rank, count in zip(self._ranks, counts, strict=True):
            spread[rank] = count
        return spread

    def alltoall(
        self, message: HostArray, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> Pending[HostArray]:
        return self._everyone.alltoall(message, self.spread(send_bytes), self.spread(receive_bytes), name=name)

    def allgather(self, message: HostArray, receive_bytes: Sequence[int], *, name: str) -> Pending[HostArray]:
        return self.alltoall(np.tile(message, self.size), [len(message)] * self.size, receive_bytes, name=name)

    def allreduce(self, values: HostArray, *, name: str) -> Pending[HostArray]:
        flat = values.reshape(-1)
        every = self.allgather(flat, [len(flat)] * self.size, name=name).wait()
        return _Arrived(ordered_mean(list(every.reshape(self.size, *values.shape))))

    def gather_parts(self, values: HostArray, lengths: Sequence[int], *, name: str) -> Pending[list[HostArray]]:
        return _parts_by_alltoall(self, values, lengths, name=name)

    def offer(self, values: HostArray, lengths: Sequence[int], *, name: str) -> tuple[HostArray, HostArray]:
        """What an alltoall of all ranks sends so that the members can take their means, and how much to each rank."""
        if self._memory is None or not len(values):
            counts = [4 * length for length in lengths]
            return values.view(np.uint8), np.array(self.spread(counts), np.int32)
        # everybody is told where the values are: they stay there until all have read them, since no rank gets to the
        # next step's before the others have sent what they made of these
        return self._told_to_all(self._memory.expose(name, values))

    def offer_bytes(self, message: HostArray, *, name: str) -> tuple[HostArray, HostArray]:
        """The same for an allgather of bytes."""
        if self._memory is None:
            return np.tile(message, self.size), np.array(self.spread([len(message)] * self.size), np.int32)
        return self._told_to_all(self._memory.expose_bytes(name, message) if len(message) else 0)

    def _told_to_all(self, place: int) -> tuple[HostArray, HostArray]:
        at = np.array([place], np.int64).view(np.uint8)
        return np.tile(at, self.size), np.array(self.spread([len(at)] * self.size), np.int32)

    def bytes_of(self, offers: HostArray, lengths: Sequence[int]) -> HostArray:
        """The members' bytes end to end, from what they have offered."""
        if self._memory is None:
            return offers
        return self._memory.gathered([int(at) for at in offers.view(np.int64)], lengths)

    def mean_of(self, offers: HostArray, lengths: Sequence[int]) -> HostArray:
        """This rank's part of the mean, from what all members have offered."""
        if self._memory is None or not sum(lengths):
            return _mean(list(offers.view(np.float32).reshape(self.size, lengths[self.rank])))
        stop = sum(lengths[: self.rank + 1])
        own = slice(stop - lengths[self.rank], stop)
        return self._memory.mean(self.rank, own, sum(lengths), [int(at) for at in offers.view(np.int64)])

    def zeros(self, num_elements: int) -> HostArray:
        """Zeros (float32) that `offer` need not copy."""
        if self._memory is None or not num_elements:
            return np.zeros(num_elements, np.float32)
        return self._memory.zeros(num_elements)


def _parts_by_alltoall(
    group: Group[Any], values: HostArray, lengths: Sequence[int], *, name: str
) -> Pending[list[HostArray]]:
    own = lengths[group.rank]
    received: HostArray = group.alltoall(values, lengths, [own] * group.size, name=name).wait()
    return _Arrived(list(received.reshape(group.size, own)))


def _mean(parts: Sequence[HostArray]) -> HostArray:
    mean: HostArray = np.asarray(ordered_mean(parts))
    return mean


class _Arrived:
    """The result of a collective that is over."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._result


class HostTransport:
    """One of the core's transports (`local.py`, `mpi.py`) for tensors of eager code, which pass through host memory."""

    runs_in_graph = False

    def __init__(self, inner: Transport[Any]) -> None:
        self._inner = inner
        self.watch = StallWatch(inner.rank, lambda: None, StallLimits(None, None))

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def place(self) -> Place:
        return self._inner.place

    @property
    def on_host(self) -> Transport[Any]:
        return self._inner

    def groups(self, groups: HostGroups[Any]) -> TensorGroups:
        return TensorGroups(_LocalGroup(lambda: groups.inside), _LocalGroup(lambda: groups.across))

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor:
        return tf.constant(self._inner.alltoall(_array(message), send_bytes, receive_bytes, name=name).wait())

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor:
        return tf.constant(self._inner.allgather(_array(message), receive_bytes, name=name).wait())

    def allreduce(self, values: Sequence[tf.Tensor], *, names: Sequence[str]) -> list[tf.Tensor]:
        means = []
        for value, name in zip(values, names, strict=True):
            # half precision is averaged as float32, as in Horovod's sums
            wide = tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value
            means.append(tf.cast(tf.constant(self._inner.allreduce(_array(wide), name=name).wait()), value.dtype))
        return means

    def gather_frames(self, data: tf.Tensor, *, name: str) -> tf.Tensor:
        parts = self._inner.allgather_bytes(_array(data).tobytes(), name=name).wait()
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return tf.constant(np.frombuffer(framed, np.uint8))


class _LocalGroup:
    """A group of a core transport's ranks for tensors of eager code."""

    def __init__(self, find: Callable[[], Group[Any]]) -> None:
        self._find = find

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor:
        return tf.constant(self._find().alltoall(_array(message), send_bytes, receive_bytes, name=name).wait())

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor:
        return tf.constant(self._find().allgather(_array(message), receive_bytes, name=name).wait())

    def reduce_scatter(self, values: tf.Tensor, lengths: Sequence[int], *, name: str) -> tf.Tensor:
        return tf.constant(_mean(self._find().gather_parts(_array(values), lengths, name=name).wait()))

    def zeros(self, num_elements: int) -> HostArray:
        return np.zeros(num_elements, np.float32)


def split_frames(framed: bytes) -> list[bytes]:
    """Every rank's bytes, from what `gather_frames` returned."""
    parts = []
    while framed:
        end = 4 + int.from_bytes(framed[:4], "little")
        parts.append(framed[4:end])
        framed = framed[end:]
    return parts


def _array(tensor: tf.Tensor) -> HostArray:
    if not tf.executing_eagerly():
        raise OneBitError(
            "transport= serves eager code only, since its collectives run in the order of calls: compile the model "
            "with run_eagerly=True, or call apply() outside tf.function"
        )
    array: HostArray = tensor.numpy()
    return array


def _shaped(tensor: tf.Tensor, num_bytes: Sequence[int]) -> tf.Tensor:
    return tf.ensure_shape(tensor, [sum(num_bytes)])
