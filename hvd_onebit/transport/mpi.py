"""The transport over mpi4py, on host buffers: compressed training without Horovod's engine, or beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_onebit.hosts import Place, place_of
from hvd_onebit.transport import ordered_mean

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPITransport"]

HostArray = npt.NDArray[Any]


class _MPIPending:
    def __init__(self, request: MPI.Request, finish: Callable[[], Any], *buffers: Any) -> None:
        self._request = request
        self._finish = finish
        self._buffers = buffers  # MPI reads and writes them until the request completes

    def ready(self) -> bool:
        return bool(self._request.Test())

    def wait(self) -> Any:
        self._request.Wait()
        return self._finish()


class MPITransport:
    """Non-blocking MPI collectives on a communicator of the caller's, `MPI.COMM_WORLD` by default.

    MPI matches collectives by the order of calls, not by name: every rank starts them in the same order.

    Args:
        comm: the ranks. Collective: all of them make the transport.
        ranks_per_host: as many consecutive ranks say that they are on one host, for trying that; None: as it is.
    """

    def __init__(self, comm: MPI.Comm | None = None, *, ranks_per_host: int | None = None) -> None:
        from mpi4py import MPI

        # an own communicator: our collectives never match the caller's
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._MPI = MPI
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

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> MPITransport:
        return MPITransport(self._comm.Split(color=min(ranks), key=self.rank))

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
        return _MPIPending(request, lambda: received, message, received)

    def allgather(self, message: HostArray, receive_bytes: Sequence[int], *, name: str) -> _MPIPending:
        gathered = np.empty(sum(receive_bytes), np.uint8)
        request = self._comm.Iallgatherv(
            [message, self._MPI.BYTE], [gathered, list(receive_bytes), _displacements(receive_bytes), self._MPI.BYTE]
        )
        return _MPIPending(request, lambda: gathered, message, gathered)

    def allreduce(self, values: HostArray, *, name: str) -> _MPIPending:
        # MPI has no half precision: float16 is summed as float32
        wide = np.asarray(values, np.float32 if values.dtype == np.float16 else values.dtype, order="C")
        total = np.empty_like(wide)
        request = self._comm.Iallreduce(wide, total, op=self._MPI.SUM)

        def mean() -> HostArray:
            # dividing an array without dimensions gives a scalar
            return np.asarray(total / total.dtype.type(self.size), values.dtype)

        return _MPIPending(request, mean, wide, total)

    def reduce_scatter(self, values: HostArray, lengths: Sequence[int], *, name: str) -> _MPIPending:
        own = lengths[self.rank]
        received = np.empty(own * self.size, np.float32)
        request = self._comm.Ialltoallv(
            [values, list(lengths), _displacements(lengths), self._MPI.FLOAT],
            [received, [own] * self.size, _displacements([own] * self.size), self._MPI.FLOAT],
        )
        return _MPIPending(request, lambda: ordered_mean([*received.reshape(self.size, own)]), values, received)

    def allgather_bytes(self, data: bytes, *, name: str) -> _MPIPending:
        lengths = self._comm.allgather(len(data))
        own = np.frombuffer(data, np.uint8)
        gathered = self.allgather(own, lengths, name=name)
        cuts = [0, *accumulate(lengths)]

        def split() -> list[bytes]:
            everything = gathered.wait().tobytes()
            return [everything[low:high] for low, high in pairwise(cuts)]

        return _MPIPending(self._MPI.REQUEST_NULL, split)


def _displacements(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]
