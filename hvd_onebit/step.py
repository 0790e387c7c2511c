"""One step's exchanges in flight: all buckets are started, then moved on, then collected, always in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from hvd_onebit.codec import Array
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.hosts import HostGroups
from hvd_onebit.stats import Stats
from hvd_onebit.transport import Group, Pending, Transport

__all__ = ["Inputs", "StepExchange"]

Given = TypeVar("Given")


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
    """One bucket's exchange.

    Attributes:
        exchange: the bucket's.
        inputs: what the bucket gives.
        gradient: gives what is compressed of it: the same, or, if hierarchical, the shards of all ranks of the host.
        group: the ranks that messages are exchanged with: those of the same local rank, if hierarchical.
        pending: the collective under way.
        phases: what is still to be done with its result, and with those of the next ones; each starts the next one.
    """

    exchange: CompressedAllreduce[Array]
    inputs: Inputs[Array]
    gradient: Callable[[], Array | Sequence[Array]]
    group: Group[Array]
    pending: Pending[Any] | None = None
    phases: list[Callable[[_Flight[Array], Any], Pending[Array]]] = field(default_factory=list)


class StepExchange(Generic[Array]):
    """A step as a transaction: `start` for every bucket, `finish`, then `commit` or `rollback`.

    Args:
        transport: among all ranks.
        stats: counts what is sent.
        groups: connected before the first hierarchical exchange starts; None: there is none.
    """

    def __init__(self, transport: Transport[Array], stats: Stats, groups: HostGroups[Array] | None = None) -> None:
        self._transport = transport
        self._stats = stats
        self._groups = groups
        self._flights: list[_Flight[Array]] = []
        self._are_read = False  # ranks of a host may read each other's gradients, once more if the step is rolled back

    def start(self, exchange: CompressedAllreduce[Array], inputs: Inputs[Array]) -> None:
        """Collective: starts a bucket's first collective.

        If hierarchical, the array that `inputs.gradient` gives must stay as it is until the step's end.
        """
        groups = self._groups if exchange.is_hierarchical else None
        group: Group[Array] = self._transport if groups is None else groups.across
        flight = _Flight(exchange, inputs, inputs.gradient, group)
        if exchange.is_two_phase:
            flight.phases = [self._reduce]
        if groups is None:
            flight.pending = self._send(flight)
        else:
            flight.phases = [self._compress_mean, *flight.phases, self._share_inside]
            name = f"{exchange.bucket.name}.parts"
            self._are_read = True
            flight.pending = groups.inside.gather_parts(inputs.gradient(), exchange.shard_lengths, name=name)
        self._stats.count(exchange.bytes_sent + exchange.bytes_sent_inside, inside=exchange.bytes_sent_inside)
        self._flights.append(flight)

    def progress(self) -> None:
        """Starts the next collective of every bucket whose present one is through; does not wait.

        For transports that match collectives by name: ranks get here at different times.
        """
        for flight in self._flights:
            while flight.phases and flight.pending is not None and flight.pending.ready():
                self._move_on(flight)

    def arrivals(self) -> Iterator[tuple[CompressedAllreduce[Array], bool]]:
        """Collective: every bucket's exchange in order, as soon as it is here, with whether it was finite everywhere.

        What is decoded between two arrivals costs no time on a slow network; it must not be used before the last one.
        """
        while any(flight.phases for flight in self._flights):
            for flight in self._flights:
                if flight.phases:
                    self._move_on(flight)
        for flight in self._flights:
            assert flight.pending is not None
            yield flight.exchange, flight.exchange.accept(flight.pending.wait())

    def finish(self) -> bool:
        """Collective: waits for every bucket; True when all values were finite on all ranks."""
        finite = [is_finite for _, is_finite in self.arrivals()]
        return all(finite)

    def _move_on(self, flight: _Flight[Array]) -> None:
        assert flight.pending is not None
        phase = flight.phases.pop(0)
        flight.pending = phase(flight, flight.pending.wait())

    # -- the phases: what is done with a collective's result, and the next one -----------------------------------------

    def _compress_mean(self, flight: _Flight[Array], parts: Sequence[Array]) -> Pending[Array]:
        flight.gradient = partial(_same, parts)
        return self._send(flight)

    def _send(self, flight: _Flight[Array]) -> Pending[Array]:
        exchange, inputs = flight.exchange, flight.inputs
        gradient = flight.gradient()
        message = exchange.compress(gradient, inputs.momentum, inputs.beta1, from_kept=inputs.from_kept)
        if not exchange.is_two_phase:
            return self._gather(flight, message)
        return flight.group.alltoall(message, *exchange.alltoall_bytes, name=f"{exchange.bucket.name}.alltoall")

    def _reduce(self, flight: _Flight[Array], received: Array) -> Pending[Array]:
        return self._gather(flight, flight.exchange.reduce(received))

    def _gather(self, flight: _Flight[Array], message: Array) -> Pending[Array]:
        exchange = flight.exchange
        return flight.group.allgather(message, exchange.allgather_bytes, name=f"{exchange.bucket.name}.allgather")

    def _share_inside(self, flight: _Flight[Array], gathered: Array) -> Pending[Array]:
        assert self._groups is not None
        exchange = flight.exchange
        return self._groups.inside.allgather(gathered, exchange.inside_bytes, name=f"{exchange.bucket.name}.inside")

    # -- the end -------------------------------------------------------------------------------------------------------

    def commit(self, *, keep: bool = False) -> None:
        """Forgets the step's messages, but for results if they are kept: the error feedback stays as it has become."""
        for flight in self._flights:
            flight.exchange.commit(keep=keep)
        self._forget()

    def keep_inputs(self) -> None:
        """Collective: copies what was compressed, which a rollback needs: the gradients are about to be overwritten."""
        for flight in self._flights:
            if flight.exchange.worker_error is not None:
                flight.gradient = partial(_same, flight.exchange.copy_of(flight.gradient()))
        self._meet_readers()

    def rollback(self) -> None:
        """Collective: puts all error feedback back to what it was before the step, to rounding."""
        for flight in self._flights:
            inputs, gradient = flight.inputs, flight.gradient()
            flight.exchange.rollback(gradient, inputs.momentum, inputs.beta1, from_kept=inputs.from_kept)
        self._meet_readers()
        self._forget()

    def _meet_readers(self) -> None:
        """Waits until no rank reads another's gradients any more, after which each may overwrite its own."""
        if self._are_read:
            self._transport.allgather_bytes(b"", name="gradients_were_read").wait()
            self._are_read = False

    def _forget(self) -> None:
        self._flights.clear()
        self._are_read = False


def _same(given: Given) -> Given:
    return given
