"""The transport over mpi4py, on host buffers: compressed training without Horovod's engine, or beside it.

Its waits keep Horovod's limits (`hvd_onebit.stall`), though Horovod need not be there: a rank that has waited for
HOROVOD_STALL_CHECK_TIME_SECONDS says so, and after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, if that is set, it raises
OneBitError. Such a rank ends the whole run by MPI's Abort when its interpreter ends: MPI_Finalize would wait for the
others again.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_onebit.errors import OneBitError
from hvd_onebit.hosts import Place, place_of
from hvd_onebit.stall import StallLimits, Wait

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPITransport"]

HostArray = npt.NDArray[Any]


class _MPIPending:
    """A collective under way.

    Args:
        transport: that it was started on.
        request: MPI's.
        name: says what is waited for.
        finish: makes the result.
        buffers: what MPI reads and writes.
    """

    def __init__(
        self, transport: MPITransport, request: MPI.Request, name: str, finish: Callable[[], Any], *buffers: Any
    ) -> None:
        self._transport = transport
        self._request = request
        self._name = name
        self._finish = finish
        self._buffers = buffers
        _under_way.add(self)

    def ready(self) -> bool:
        return bool(self._request.Test())

    def wait(self) -> Any:
        wait = Wait(self._transport.limits, self._transport.rank, f"at {self._name!r}")
        try:
            # without a pause, as MPI's own Wait: data moves only while MPI is called
            while not self._request.Test():
                wait.check()
        except OneBitError:
            # once, and before mpi4py's own end
            atexit.unregister(_abort)
            atexit.register(_abort)
            raise
        except self._transport.mpi_error as error:
            wait.told(error)
            raise
        _under_way.discard(self)
        return self._finish()

    def then(self, convert: Callable[[Any], Any]) -> _MPIPending:
        """Itself, with a function applied to its result."""
        finish = self._finish
        self._finish = lambda: convert(finish())
        return self


# MPI reads and writes their buffers until they are through, even if nobody waits for them any more
_under_way: set[_MPIPending] = set()


def _abort() -> None:
    """Ends all ranks, unless those that were waited for have come in the end."""
    from mpi4py import MPI

    if not all(each.ready() for each in _under_way):
        MPI.COMM_WORLD.Abort(1)


class MPITransport:
    """Non-blocking MPI collectives on a communicator of the caller's, `MPI.COMM_WORLD` by default.

    MPI matches collectives by the order of calls, not by name: every rank starts them in the same order.

    Args:
        comm: the ranks. Collective: all of them make the transport.
        ranks_per_host: as many consecutive ranks say that they are on one host, for trying that; None: as it is.
        limits: when a wait for other ranks is told of, and when it ends; by default as Horovod's variables say.

    Raises:
        OneBitError: here and in every wait, when other ranks have not come in the time that the limits allow.
    """

    def __init__(
        self, comm: MPI.Comm | None = None, *, ranks_per_host: int | None = None, limits: StallLimits | None = None
    ) -> None:
        from mpi4py import MPI

        self._MPI = MPI
        self.mpi_error = MPI.Exception
        self.limits = StallLimits.from_environment() if limits is None else limits
        self._comm = MPI.COMM_WORLD if comm is None else comm
        self._meet("the transport")
        # an own communicator: our collectives never match the caller's
        self._comm = self._comm.Dup()
        if ranks_per_host is None:
            host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
            hosts = self._comm.allgather(host.bcast(self.rank))
            host.Free()
        else:
            hosts = [rank // ranks_per_host for rank in range(self.size)]
        self.place: Place = place_of(self.rank, hosts)

    @property
    def rank(self) -> int:
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        return int(self._comm.size)

    def _meet(self, name: str) -> None:
        """Waits until all ranks have come to a call that cannot be polled."""
        _MPIPending(self, self._comm.Ibarrier(), name, lambda: None).wait()

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> MPITransport:
        self._meet(name)
        return MPITransport(self._comm.Split(color=min(ranks), key=self.rank), limits=self.limits)

    def shared_zeros(self, num_elements: int) -> None:
        return None

    def alltoall(
        self, message: HostArray, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> _MPIPending:
        received = np.empty(sum(receive_bytes), np.uint8)
        request = self._comm.Ialltoallv(
            [message, list(send_bytes), _displacements(send_bytes), self._MPI.BYTE],
            [received, list(receive_bytes), _displacements(receive_bytes), self._MPI.BYTE],
        )
        return _MPIPending(self, request, name, lambda: received, message, received)

    def allgather(self, message: HostArray, receive_bytes: Sequence[int], *, name: str) -> _MPIPending:
        gathered = np.empty(sum(receive_bytes), np.uint8)
        request = self._comm.Iallgatherv(
            [message, self._MPI.BYTE], [gathered, list(receive_bytes), _displacements(receive_bytes), self._MPI.BYTE]
        )
        return _MPIPending(self, request, name, lambda: gathered, message, gathered)

    def allreduce(self, values: HostArray, *, name: str) -> _MPIPending:
        # MPI has no half precision: float16 is summed as float32
        wide = np.asarray(values, np.float32 if values.dtype == np.float16 else values.dtype, order="C")
        total = np.empty_like(wide)
        request = self._comm.Iallreduce(wide, total, op=self._MPI.SUM)

        def mean() -> HostArray:
            # dividing an array without dimensions gives a scalar
            return np.asarray(total / total.dtype.type(self.size), values.dtype)

        return _MPIPending(self, request, name, mean, wide, total)

    def gather_parts(self, values: HostArray, lengths: Sequence[int], *, name: str) -> _MPIPending:
        own = lengths[self.rank]
        received = np.empty(own * self.size, np.float32)
        request = self._comm.Ialltoallv(
            [values, list(lengths), _displacements(lengths), self._MPI.FLOAT],
            [received, [own] * self.size, _displacements([own] * self.size), self._MPI.FLOAT],
        )
        return _MPIPending(self, request, name, lambda: [*received.reshape(self.size, own)], values, received)

    def allgather_bytes(self, data: bytes, *, name: str) -> _MPIPending:
        lengths = np.empty(self.size, np.int64)
        length = np.array([len(data)])
        # MPI matches by order: this one is over before anything else is started
        _MPIPending(self, self._comm.Iallgather(length, lengths), name, lambda: None, length, lengths).wait()
        own = np.frombuffer(data, np.uint8)
        cuts = [0, *accumulate(lengths.tolist())]
        gathered = self.allgather(own, lengths.tolist(), name=name)
        return gathered.then(lambda messages: [messages[low:high].tobytes() for low, high in pairwise(cuts)])


def _displacements(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]
