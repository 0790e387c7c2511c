"""One step's exchanges in flight: all buckets are started, then reduced, then collected, always in the same order."""

from __future__ import annotations

from typing import Generic

from hvd_onebit.codec import Array
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.stats import Stats
from hvd_onebit.transport import Pending, Transport

__all__ = ["StepExchange"]


class StepExchange(Generic[Array]):
    """A step as a transaction: `start` for every bucket, `finish`, then `commit` or `rollback`."""

    def __init__(self, transport: Transport[Array], stats: Stats) -> None:
        self._transport = transport
        self._stats = stats
        self._started: list[tuple[CompressedAllreduce[Array], Array, Array | None, float, Pending[Array]]] = []

    def start(
        self, exchange: CompressedAllreduce[Array], gradient: Array, momentum: Array | None, beta1: float
    ) -> None:
        """Collective: compresses a bucket and starts its first collective; the arrays must stay until the end."""
        message = exchange.compress(gradient, momentum, beta1)
        name = exchange.bucket.name
        if exchange.is_two_phase:
            pending = self._transport.alltoall(message, *exchange.alltoall_bytes, name=f"{name}.alltoall")
        else:
            pending = self._transport.allgather(message, exchange.allgather_bytes, name=f"{name}.allgather")
        self._stats.count(exchange.bytes_sent)
        self._started.append((exchange, gradient, momentum, beta1, pending))

    def finish(self) -> bool:
        """Collective: waits for every bucket; True when all values were finite on all ranks."""
        collecting: list[tuple[CompressedAllreduce[Array], Pending[Array]]] = []
        for exchange, _, _, _, pending in self._started:
            if exchange.is_two_phase:
                reply = exchange.reduce(pending.wait())
                name = f"{exchange.bucket.name}.allgather"
                pending = self._transport.allgather(reply, exchange.allgather_bytes, name=name)
            collecting.append((exchange, pending))
        accepted = [exchange.accept(pending.wait()) for exchange, pending in collecting]
        return all(accepted)

    def commit(self) -> None:
        for exchange, *_ in self._started:
            exchange.commit()
        self._started.clear()

    def rollback(self) -> None:
        """Puts all error feedback back to what it was before the step, to rounding."""
        for exchange, gradient, momentum, beta1, _ in self._started:
            exchange.rollback(gradient, momentum, beta1)
        self._started.clear()
