"""One step's exchanges in flight: all buckets are started, then reduced, then collected, always in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from hvd_onebit.codec import Array
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.stats import Stats
from hvd_onebit.transport import Pending, Transport

__all__ = ["Inputs", "StepExchange"]


@dataclass(frozen=True)
class Inputs(Generic[Array]):
    """What a bucket compresses: beta1*momentum + (1-beta1)*gradient.

    Attributes:
        gradient: gives float32, shape (num_elements,); asked once more if the step is rolled back.
        momentum: the same shape; None for none, or if it's the result of the last step that the exchange has kept.
        beta1: decay rate of the momentum.
        from_kept: whether the momentum is that result.
    """

    gradient: Callable[[], Array]
    momentum: Array | None = None
    beta1: float = 0.0
    from_kept: bool = False

    @classmethod
    def of(cls, gradient: Array, momentum: Array | None = None, beta1: float = 0.0) -> Inputs[Array]:
        """Arrays that stay until the step's end."""
        return cls(lambda: gradient, momentum, beta1)


@dataclass
class _Flight(Generic[Array]):
    """One bucket's exchange: in its alltoall (`received`), then in its allgather (`gathered`)."""

    exchange: CompressedAllreduce[Array]
    inputs: Inputs[Array]
    received: Pending[Array] | None
    gathered: Pending[Array] | None


class StepExchange(Generic[Array]):
    """A step as a transaction: `start` for every bucket, `finish`, then `commit` or `rollback`."""

    def __init__(self, transport: Transport[Array], stats: Stats) -> None:
        self._transport = transport
        self._stats = stats
        self._flights: list[_Flight[Array]] = []

    def start(self, exchange: CompressedAllreduce[Array], inputs: Inputs[Array]) -> None:
        """Collective: compresses a bucket and starts its first collective."""
        gradient = inputs.gradient()
        message = exchange.compress(gradient, inputs.momentum, inputs.beta1, from_kept=inputs.from_kept)
        flight = _Flight(exchange, inputs, None, None)
        if exchange.is_two_phase:
            name = f"{exchange.bucket.name}.alltoall"
            flight.received = self._transport.alltoall(message, *exchange.alltoall_bytes, name=name)
        else:
            self._gather(flight, message)
        self._stats.count(exchange.bytes_sent)
        self._flights.append(flight)

    def progress(self) -> None:
        """Starts the second collective of every bucket whose first one is through; does not wait.

        For transports that match collectives by name: ranks get here at different times.
        """
        for flight in self._flights:
            if flight.gathered is None and flight.received is not None and flight.received.ready():
                self._reduce(flight)

    def arrivals(self) -> Iterator[tuple[CompressedAllreduce[Array], bool]]:
        """Collective: every bucket's exchange in order, as soon as it is here, with whether it was finite everywhere.

        What is decoded between two arrivals costs no time on a slow network; it must not be used before the last one.
        """
        for flight in self._flights:
            if flight.received is not None and flight.gathered is None:
                self._reduce(flight)
        for flight in self._flights:
            assert flight.gathered is not None
            yield flight.exchange, flight.exchange.accept(flight.gathered.wait())

    def finish(self) -> bool:
        """Collective: waits for every bucket; True when all values were finite on all ranks."""
        finite = [is_finite for _, is_finite in self.arrivals()]
        return all(finite)

    def _reduce(self, flight: _Flight[Array]) -> None:
        assert flight.received is not None
        self._gather(flight, flight.exchange.reduce(flight.received.wait()))

    def _gather(self, flight: _Flight[Array], message: Array) -> None:
        exchange = flight.exchange
        name = f"{exchange.bucket.name}.allgather"
        flight.gathered = self._transport.allgather(message, exchange.allgather_bytes, name=name)

    def commit(self, *, keep: bool = False) -> None:
        """Forgets the step's messages, but for results if they are kept: the error feedback stays as it has become."""
        for flight in self._flights:
            flight.exchange.commit(keep=keep)
        self._flights.clear()

    def rollback(self) -> None:
        """Puts all error feedback back to what it was before the step, to rounding."""
        for flight in self._flights:
            inputs = flight.inputs
            gradient = inputs.gradient()
            flight.exchange.rollback(gradient, inputs.momentum, inputs.beta1, from_kept=inputs.from_kept)
        self._flights.clear()
