"""Transports for torch tensors: Horovod's collectives, or one of the core's host transports."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvd_onebit.codec import ordered_mean
from hvd_onebit.hosts import Place, horovods_place
from hvd_onebit.stall import StallLimits, Wait
from hvd_onebit.transport import Group, Pending, Transport
from hvd_onebit.transport.shared import SharedMemory, share_memory

if TYPE_CHECKING:
    from horovod.common.process_sets import ProcessSet

__all__ = ["HorovodTransport", "HostTransport"]

_POLL_SECONDS = 0.0002


class _Then:
    """A pending result with a function applied to it."""

    def __init__(self, ready: Callable[[], bool], wait: Callable[[], Any], convert: Callable[[Any], Any]) -> None:
        self.ready = ready
        self._wait = wait
        self._convert = convert

    def wait(self) -> Any:
        return self._convert(self._wait())


class HorovodTransport:
    """horovod.torch's collectives on a process set, under fixed names.

    The names' prefix is chosen when the first collective runs: ranks run collectives in the same order, but may
    construct optimizers that they never use. Rank and size stay those of the world that it was made in, so that what
    belongs to a world that has ended can still be told apart.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        import horovod.torch as hvd
        from horovod.common.exceptions import HorovodInternalError

        self._hvd = hvd
        self._internal_error = HorovodInternalError
        self._process_set = process_set
        self._prefix: str | None = None
        self._make_prefix: Callable[[], str] = lambda: "onebit"
        self._step: Callable[[], int] = lambda: 0
        self._limits = StallLimits.from_environment()
        is_member = process_set.included()
        self._rank = int(process_set.rank()) if is_member else -1
        self._size = int(process_set.size()) if is_member else 0
        self._place = self._find_place() if is_member else Place(0, 1, 0, 1)
        self._memory: SharedMemory | None = None

    def named_by(self, make_prefix: Callable[[], str], *, step: Callable[[], int]) -> None:
        """Sets what gives the prefix when it is first needed, and the number of the step under way."""
        self._make_prefix = make_prefix
        self._step = step

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def place(self) -> Place:
        return self._place

    def _find_place(self) -> Place:
        from horovod.torch.mpi_ops import is_homogeneous

        return horovods_place(self._hvd, self._process_set, is_homogeneous=bool(is_homogeneous()))

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> Group[Tensor]:
        memory = None
        if same_host and share_memory(self._own_memory(), self, ranks):
            memory = self._own_memory()
        return _Subgroup(self, ranks, name, memory)

    def shared_zeros(self, num_elements: int) -> Tensor | None:
        memory = self._own_memory()
        return torch.from_numpy(memory.zeros(num_elements)) if memory.is_there and num_elements else None

    def _own_memory(self) -> SharedMemory:
        if self._memory is None:
            self._memory = SharedMemory()
        return self._memory

    def alltoall(
        self, message: Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> Pending[Tensor]:
        splits = torch.tensor(list(send_bytes), dtype=torch.int32)
        handle = self._hvd.alltoall_async(message, splits, name=self._named(name), process_set=self._process_set)
        return self._pending(handle, name, lambda result: result[0])

    def allgather(self, message: Tensor, receive_bytes: Sequence[int], *, name: str) -> Pending[Tensor]:
        handle = self._hvd.allgather_async(message, name=self._named(name), process_set=self._process_set)
        return self._pending(handle, name, lambda gathered: gathered)

    def allreduce(self, values: Tensor, *, name: str) -> Pending[Tensor]:
        handle = self._hvd.allreduce_async(
            values, op=self._hvd.Average, name=self._named(name), process_set=self._process_set
        )
        return self._pending(handle, name, lambda mean: mean)

    def gather_parts(self, values: Tensor, lengths: Sequence[int], *, name: str) -> Pending[list[Tensor]]:
        return _parts_by_alltoall(self, values, lengths, name=name)

    def allgather_bytes(self, data: bytes, *, name: str) -> Pending[list[bytes]]:
        # lengths travel in front, so that one collective serves messages of any length
        framed = len(data).to_bytes(4, "little") + data
        message = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        handle = self._hvd.allgather_async(message, name=self._named(name), process_set=self._process_set)
        return self._pending(handle, name, lambda gathered: _split_frames(gathered.numpy().tobytes()))

    def _named(self, name: str) -> str:
        if self._prefix is None:
            self._prefix = self._make_prefix()
        return f"{self._prefix}.{name}"

    def wait_for(self, handle: int, name: str) -> Any:
        """The result of one of Horovod's collectives, be it ours or its own.

        Args:
            handle: as Horovod's asynchronous functions return it.
            name: says what is waited for.

        Raises:
            OneBitError: other ranks have not come in the time that Horovod's variables allow.
        """
        wait = self.poll_until_there(handle, name)
        with self._telling(wait):
            return self._hvd.synchronize(handle)

    def poll_until_there(self, handle: int, name: str) -> Wait:
        """`wait_for` without taking the result."""
        wait = Wait(self._limits, self.rank, f"in step {self._step()} at {name!r}")
        with self._telling(wait):
            # synchronize() alone spins, and takes the core from the threads that move the data
            while not self._hvd.poll(handle):
                time.sleep(_POLL_SECONDS)
                wait.check()
        return wait

    @contextmanager
    def _telling(self, wait: Wait) -> Iterator[None]:
        try:
            yield
        except self._internal_error as error:
            wait.told(error)
            raise

    def _pending(self, handle: int, name: str, convert: Callable[[Any], Any]) -> Pending[Any]:
        return _Then(lambda: bool(self._hvd.poll(handle)), lambda: self.wait_for(handle, name), convert)


class _Subgroup:
    """Some ranks of a HorovodTransport: all take part in its alltoall, and send nothing to those of other groups.

    Process sets would have to be added at run time by all ranks together, which users must allow, and they are
    negotiated one after the other in every cycle of Horovod's: measured, all collectives took about twice as long.
    """

    def __init__(
        self, everyone: HorovodTransport, ranks: Sequence[int], name: str, memory: SharedMemory | None
    ) -> None:
        self._everyone = everyone
        self._ranks = tuple(ranks)
        self._name = name
        self._memory = memory
        self._parts: dict[tuple[int, ...], list[Tensor]] = {}
        self.rank = self._ranks.index(everyone.rank)
        self.size = len(self._ranks)

    def alltoall(
        self, message: Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> Pending[Tensor]:
        send, receive = [0] * self._everyone.size, [0] * self._everyone.size
        for rank, to, of in zip(self._ranks, send_bytes, receive_bytes, strict=True):
            send[rank], receive[rank] = to, of
        return self._everyone.alltoall(message, send, receive, name=f"{self._name}.{name}")

    def allgather(self, message: Tensor, receive_bytes: Sequence[int], *, name: str) -> Pending[Tensor]:
        memory = self._memory
        if memory is None or message.device.type != "cpu":
            return self.alltoall(message.repeat(self.size), [len(message)] * self.size, receive_bytes, name=name)
        # everybody is told where the bytes are: no socket carries them, and Horovod joins such small collectives
        at = torch.tensor([memory.expose_bytes(name, message.numpy()) if len(message) else 0])
        places = self._everyone.allgather(at, [1] * self._everyone.size, name=f"{self._name}.{name}")

        def collect(places: Tensor) -> Tensor:
            written = [int(places[rank]) for rank in self._ranks]
            return torch.from_numpy(memory.gathered(written, receive_bytes))

        return _Then(places.ready, places.wait, collect)

    def allreduce(self, values: Tensor, *, name: str) -> Pending[Tensor]:
        flat = values.reshape(-1)
        gathered = self.alltoall(flat.repeat(self.size), [len(flat)] * self.size, [len(flat)] * self.size, name=name)
        return _Then(
            gathered.ready, gathered.wait, lambda each: ordered_mean(each.view(self.size, *values.shape).unbind())
        )

    def gather_parts(self, values: Tensor, lengths: Sequence[int], *, name: str) -> Pending[list[Tensor]]:
        memory = self._memory
        if memory is None or values.device.type != "cpu" or not len(values):
            return _parts_by_alltoall(self, values, lengths, name=name)
        # everybody is told where the values are: they stay there until all have read them, since no rank gets to the
        # next step's before the others have sent what they made of these
        stop = sum(lengths[: self.rank + 1])
        own, array = slice(stop - lengths[self.rank], stop), values.numpy()
        at = torch.tensor([memory.expose(name, array)])
        places = self._everyone.allgather(at, [1] * self._everyone.size, name=f"{self._name}.{name}")

        def parts(places: Tensor) -> list[Tensor]:
            written = [int(places[rank]) for rank in self._ranks]
            key = (own.start, own.stop, *written)
            if key not in self._parts:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written
                    found = [torch.from_numpy(each) for each in memory.parts(self.rank, own, len(array), written)]
                self._parts[key] = found
            return self._parts[key]

        return _Then(places.ready, places.wait, parts)


def _parts_by_alltoall(
    group: HorovodTransport | _Subgroup, values: Tensor, lengths: Sequence[int], *, name: str
) -> Pending[list[Tensor]]:
    own = lengths[group.rank]
    received = group.alltoall(values, lengths, [own] * group.size, name=name)
    return _Then(received.ready, received.wait, lambda parts: list(parts.view(group.size, own).unbind()))


def _split_frames(framed: bytes) -> list[bytes]:
    parts = []
    while framed:
        end = 4 + int.from_bytes(framed[:4], "little")
        parts.append(framed[4:end])
        framed = framed[end:]
    return parts


class HostTransport:
    """One of the core's transports (`local.py`, `mpi.py`) for torch tensors, which pass through host memory."""

    def __init__(self, inner: Transport[Any]) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def place(self) -> Place:
        return self._inner.place

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> Group[Tensor]:
        # a group is what of a transport the collectives below use
        group: Any = self._inner.subgroup(ranks, name=name, same_host=same_host)
        return HostTransport(group)

    def shared_zeros(self, num_elements: int) -> Tensor | None:
        return None

    def alltoall(
        self, message: Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> Pending[Tensor]:
        pending = self._inner.alltoall(message.cpu().numpy(), send_bytes, receive_bytes, name=name)
        return _Then(pending.ready, pending.wait, _tensor_on(message.device))

    def allgather(self, message: Tensor, receive_bytes: Sequence[int], *, name: str) -> Pending[Tensor]:
        pending = self._inner.allgather(message.cpu().numpy(), receive_bytes, name=name)
        return _Then(pending.ready, pending.wait, _tensor_on(message.device))

    def gather_parts(self, values: Tensor, lengths: Sequence[int], *, name: str) -> Pending[list[Tensor]]:
        pending = self._inner.gather_parts(values.cpu().numpy(), lengths, name=name)
        convert = _tensor_on(values.device)
        return _Then(pending.ready, pending.wait, lambda parts: [convert(part) for part in parts])

    def allreduce(self, values: Tensor, *, name: str) -> Pending[Tensor]:
        # NumPy has no bfloat16: half precision is averaged as float32
        wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        pending = self._inner.allreduce(wide.contiguous().cpu().numpy(), name=name)
        return _Then(pending.ready, pending.wait, lambda mean: torch.from_numpy(mean).to(values.device, values.dtype))

    def allgather_bytes(self, data: bytes, *, name: str) -> Pending[list[bytes]]:
        return self._inner.allgather_bytes(data, name=name)


def _tensor_on(device: torch.device) -> Callable[[Any], Tensor]:
    return lambda array: torch.from_numpy(array).to(device)
