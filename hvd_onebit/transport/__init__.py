"""What the exchange asks of a network, as a protocol; `local.py` and `mpi.py` implement it on host memory.

Every method is collective: all ranks call it with the same name, in the same order, or the run hangs. The buffers of
one call may differ in length between ranks only as the byte counts say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hvd_onebit.hosts import Place

__all__ = ["Collectives", "Group", "Pending", "Transport"]

Array = TypeVar("Array", bound=Any)
Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """A collective under way."""

    def ready(self) -> bool:
        """True when `wait` would not block. Not collective."""
        ...

    def wait(self) -> Result:
        """Blocks until the result is there; called once."""
        ...


class Collectives(Protocol[Array]):
    """The collectives of `size` ranks, on one framework's flat arrays, that share errors and that are timed."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def alltoall(
        self, message: Array, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> Pending[Array]:
        """Sends the i-th part of `message` (uint8) to rank i; the result holds the parts received, in rank order."""
        ...

    def allgather(self, message: Array, receive_bytes: Sequence[int], *, name: str) -> Pending[Array]:
        """The messages (uint8) of all ranks, laid end to end in rank order."""
        ...

    def allreduce(self, values: Array, *, name: str) -> Pending[Array]:
        """The mean of `values` over ranks, same dtype and shape."""
        ...


class Group(Collectives[Array], Protocol[Array]):
    """What an exchange needs of `size` ranks, on one framework's flat arrays."""

    def gather_parts(self, values: Array, lengths: Sequence[int], *, name: str) -> Pending[list[Array]]:
        """This rank's part of every rank's `values` (float32, flat), in rank order; not to be written.

        They may lie where the ranks have their values. So these must stay as they are until all ranks have said, by
        another collective, that they need the parts no more.

        Args:
            values: of all ranks' parts, end to end.
            lengths: the elements of each rank's part.
            name: as for every collective, the same on all ranks.
        """
        ...


class Transport(Group[Array], Protocol[Array]):
    """All ranks that train together."""

    @property
    def place(self) -> Place:
        """Where this rank runs."""
        ...

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> Group[Array]:
        """Collective: the group of `ranks`, in ascending order. Every rank names a group that it is a member of.

        Args:
            ranks: ascending; the groups of one call hold every rank once.
            name: the same on all ranks; part of the names of the group's collectives.
            same_host: the ranks of every group are on one host, and may use its memory.
        """
        ...

    def shared_zeros(self, num_elements: int) -> Array | None:
        """Zeros (float32, on the host) that a `gather_parts` of ranks of one host reads without a copy.

        None where that makes no difference.
        """
        ...

    def allgather_bytes(self, data: bytes, *, name: str) -> Pending[list[bytes]]:
        """Every rank's `data`, which may differ in length, in rank order."""
        ...
