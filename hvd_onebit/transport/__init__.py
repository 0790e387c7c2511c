"""What the exchange asks of a network, as a protocol; `local.py` and `mpi.py` implement it on host memory.

Every method is collective: all ranks call it with the same name, in the same order, or the run hangs. The buffers of
one call may differ in length between ranks only as the byte counts say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["Pending", "Transport"]

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


class Transport(Protocol[Array]):
    """Collectives among `size` ranks on one framework's flat arrays."""

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

    def allgather_bytes(self, data: bytes, *, name: str) -> Pending[list[bytes]]:
        """Every rank's `data`, which may differ in length, in rank order."""
        ...
