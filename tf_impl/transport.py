"""Transports for TensorFlow tensors: Horovod's collectives as operations, or one of the core's transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from hvd_onebit.errors import OneBitError
from hvd_onebit.state import Collectives
from hvd_onebit.transport import Pending, Transport

if TYPE_CHECKING:
    from horovod.common.process_sets import ProcessSet

__all__ = ["HorovodTransport", "HostTransport", "TensorTransport", "split_frames"]


class TensorTransport(Protocol):
    """Collectives among `size` ranks on tensors. In a graph they are operations, which run when their inputs are there.

    Attributes:
        runs_in_graph: False when collectives run at once, in the order of calls, and so in eager code only.
    """

    runs_in_graph: bool

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def on_host(self) -> Collectives[Any]:
        """The same ranks, for NumPy arrays in eager code."""
        ...

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor: ...

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor: ...

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
    def on_host(self) -> Collectives[Any]:
        return _HorovodOnHost(self, self._hvd, self._process_set)

    def alltoall(
        self, message: tf.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> tf.Tensor:
        splits = tf.constant(list(send_bytes), tf.int32)
        received, _ = self._hvd.alltoall(
            message, splits, name=self._named(name), ignore_name_scope=True, process_set=self._process_set
        )
        return _shaped(received, receive_bytes)

    def allgather(self, message: tf.Tensor, receive_bytes: Sequence[int], *, name: str) -> tf.Tensor:
        gathered = self._hvd.allgather(
            message, name=self._named(name), ignore_name_scope=True, process_set=self._process_set
        )
        return _shaped(gathered, receive_bytes)

    def allreduce(self, values: Sequence[tf.Tensor], *, names: Sequence[str]) -> list[tf.Tensor]:
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


class _HorovodOnHost:
    """horovod.tensorflow's collectives for NumPy arrays. They run at once: eager operations have no names."""

    def __init__(self, tensors: HorovodTransport, hvd: Any, process_set: ProcessSet) -> None:
        self._tensors = tensors
        self._hvd = hvd
        self._process_set = process_set

    def allgather(self, message: np.ndarray, receive_bytes: Sequence[int], *, name: str) -> Pending[np.ndarray]:
        return _Arrived(self._tensors.allgather(tf.constant(message), receive_bytes, name=name).numpy())

    def allreduce(self, values: np.ndarray, *, name: str) -> Pending[np.ndarray]:
        # the plain mean, whatever op and compression the gradients have
        mean = self._hvd.allreduce(tf.constant(values), op=self._hvd.Average, name=name, process_set=self._process_set)
        return _Arrived(mean.numpy())


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

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def on_host(self) -> Collectives[Any]:
        return self._inner

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


def split_frames(framed: bytes) -> list[bytes]:
    """Every rank's bytes, from what `gather_frames` returned."""
    parts = []
    while framed:
        end = 4 + int.from_bytes(framed[:4], "little")
        parts.append(framed[4:end])
        framed = framed[end:]
    return parts


def _array(tensor: tf.Tensor) -> np.ndarray:
    if not tf.executing_eagerly():
        raise OneBitError(
            "transport= serves eager code only, since its collectives run in the order of calls: compile the model "
            "with run_eagerly=True, or call apply() outside tf.function"
        )
    array: np.ndarray = tensor.numpy()
    return array


def _shaped(tensor: tf.Tensor, num_bytes: Sequence[int]) -> tf.Tensor:
    return tf.ensure_shape(tensor, [sum(num_bytes)])
