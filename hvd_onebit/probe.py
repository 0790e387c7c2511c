"""How fast are this run's network and kernels? A few small collectives among its ranks, and the kernels on a buffer.

Measured once in a run, between two of its steps, so that none of its own collectives is under way. The results are the
same on every rank: those of the slowest one, which each rank finds in the same gathered bytes.

What else goes on at that time only makes things slower, so the least of a few repeats is taken. Each collective is
measured with next to no bytes and with many: the difference tells what a byte costs, without negotiation. How many
bytes that is, and how often, goes by how fast they are: all of it takes about half a second on networks of 100 Mbit/s
or more, and two seconds at 10 Mbit/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from hvd_onebit.codec import Array, Codec, ordered_mean
from hvd_onebit.hosts import HostGroups, Place
from hvd_onebit.planner import CollectiveCost, KernelSpeeds, Measurement, Network
from hvd_onebit.transport import Collectives
from hvd_onebit.wire import DEFAULT_BLOCK, message_num_bytes

__all__ = ["PROBE_STEP", "measure"]

PROBE_STEP = 3
"""The step of a run after which it is measured, or at the freeze if that comes first: what is traced, allocated and
negotiated once is over by then, and whoever compresses in vain knows it early."""

_LEAST_BYTES = 1 << 10
_TRIED_BYTES = 1 << 18
_MANY_BYTES = ((1 << 22, 0.08), (1 << 20, 0.25))  # the first that is expected to take no longer, or else _TRIED_BYTES
_MOST_SECONDS = 0.3  # after so long no further repeat is begun
_LEAST_REPEATS, _MOST_REPEATS = 2, 5
_KERNEL_ELEMENTS = 1 << 19  # more than a core's cache holds
_KERNEL_REPEATS = 3
_SERVED = 4  # messages that the reduce kernel is given
_FURTHER = 0.5  # of a small collective's time is one of Horovod's cycles, which collectives under way together share


@dataclass(frozen=True)
class _Collective:
    """One that is timed: `run` starts it with about so many bytes and waits; `link_bytes` is what a host then sends."""

    run: Callable[[int], object]
    link_bytes: Callable[[int], float]


def measure(
    transport: Collectives[Array],
    codec: Codec[Array],
    place: Place,
    groups: HostGroups[Array] | None = None,
) -> Measurement:
    """Collective: measures collectives and kernels, with none of the run's own collectives under way.

    Args:
        transport: among all ranks, two or more.
        codec: for arrays where the run has them.
        place: of this rank.
        groups: if the run's exchange is hierarchical.
    """
    if groups is not None:
        groups.connect()  # a run of 0/1 Adam that is resumed between two rounds has not exchanged anything yet
    begin = time.perf_counter()
    several = place.num_hosts > 1
    # on a single host the links are those between ranks
    num_hosts, ranks_per_host = (place.num_hosts, place.local_size) if several else (transport.size, 1)
    nothing = CollectiveCost(0.0, 0.0, 0.0)
    shape = Network(num_hosts, ranks_per_host, nothing, nothing, nothing, None if groups is None else nothing)
    probe = _Probe(transport, codec, groups, shape)
    costs = probe.costs()
    speeds = KernelSpeeds(*probe.of_the_slowest(_kernel_seconds(codec)))
    seconds = max(probe.of_the_slowest([time.perf_counter() - begin]))
    return Measurement(Network(num_hosts, ranks_per_host, **costs), speeds, seconds, on_one_host=not several)


class _Probe(Generic[Array]):
    def __init__(
        self, transport: Collectives[Array], codec: Codec[Array], groups: HostGroups[Array] | None, shape: Network
    ) -> None:
        self._transport = transport
        self._codec = codec
        self._groups = groups
        self._group: Collectives[Array] = transport if groups is None else groups.across
        self._shape = shape
        self._floats = codec.zeros(_MANY_BYTES[0][0] // 4)
        self._bytes = codec.as_bytes(self._floats)

    def of_the_slowest(self, seconds: Sequence[float]) -> list[float]:
        """Collective: the most that a rank has of each number."""
        own = self._codec.zeros(len(seconds))
        for i, each in enumerate(seconds):
            own[i] = each
        sizes = [4 * len(seconds)] * self._transport.size
        gathered = self._transport.allgather(self._codec.as_bytes(own), sizes, name="probe.seconds").wait()
        numbers = [float(each) for each in self._codec.as_floats(gathered)]
        return [max(numbers[i :: len(seconds)]) for i in range(len(seconds))]

    def costs(self) -> dict[str, CollectiveCost]:
        """Collective: of each kind."""
        kinds = self._kinds()
        for kind in kinds.values():
            kind.run(_LEAST_BYTES)  # connections are made, and names negotiated
        tries = [[_seconds(kind, _TRIED_BYTES) for kind in kinds.values()] for _ in range(2)]
        per_byte = max(self.of_the_slowest([min(each) for each in zip(*tries, strict=True)])) / _TRIED_BYTES
        many = next((size for size, most in _MANY_BYTES if size * per_byte <= most), _TRIED_BYTES)
        rounds: list[list[float]] = []
        begin = time.perf_counter()
        for number in range(_MOST_REPEATS):
            rounds.append([_seconds(kind, size) for size in (_LEAST_BYTES, many) for kind in kinds.values()])
            (spent,) = self.of_the_slowest([time.perf_counter() - begin])
            if number + 1 >= _LEAST_REPEATS and spent >= _MOST_SECONDS:
                break
        least = self.of_the_slowest([min(each) for each in zip(*rounds, strict=True)])
        costs = {}
        for (name, kind), first, last in zip(kinds.items(), least, least[len(kinds) :], strict=False):
            link_bytes = kind.link_bytes(many) - kind.link_bytes(_LEAST_BYTES)
            # where even many bytes cost nothing that could be seen, they cost what could not be seen
            costs[name] = CollectiveCost(first, _FURTHER * first, max(last - first, 1e-6) / link_bytes)
        return costs

    def _kinds(self) -> dict[str, _Collective]:
        shape, group = self._shape, self._group
        shard = 1 if self._groups is None else shape.ranks_per_host

        def allreduce(num_bytes: int) -> Any:
            return self._transport.allreduce(self._floats[: num_bytes // 4], name=f"probe.allreduce.{num_bytes}").wait()

        def allgather(num_bytes: int) -> Any:
            each = num_bytes // (group.size * shard)
            name = f"probe.allgather.{num_bytes}"
            return group.allgather(self._bytes[:each], [each] * group.size, name=name).wait()

        def alltoall(num_bytes: int) -> Any:
            each = num_bytes // (group.size * shard)
            parts, name = [each] * group.size, f"probe.alltoall.{num_bytes}"
            return group.alltoall(self._bytes[: each * group.size], parts, parts, name=name).wait()

        kinds = {
            "allreduce": _Collective(allreduce, shape.allreduce_bytes),
            "allgather": _Collective(allgather, lambda num_bytes: shape.allgather_bytes(num_bytes / group.size)),
            "alltoall": _Collective(alltoall, shape.alltoall_bytes),
        }
        groups = self._groups
        if groups is None:
            return kinds
        inside = groups.inside

        def share(num_bytes: int) -> Any:
            lengths = [num_bytes // 4 // inside.size] * inside.size
            name = f"probe.parts.{num_bytes}"
            ordered_mean(inside.gather_parts(self._floats[: sum(lengths)], lengths, name=name).wait())
            bits = max(1, sum(lengths) // 8 // inside.size)
            name = f"probe.share.{num_bytes}"
            return inside.allgather(self._bytes[:bits], [bits] * inside.size, name=name).wait()

        return {**kinds, "inside": _Collective(share, float)}


def _seconds(kind: _Collective, num_bytes: int) -> float:
    begin = time.perf_counter()
    kind.run(num_bytes)
    return time.perf_counter() - begin


def _kernel_seconds(codec: Codec[Array]) -> list[float]:
    """Seconds an element of compress, decode and reduce, as in `KernelSpeeds`."""
    gradient, momentum, error, values = (codec.zeros(_KERNEL_ELEMENTS) for _ in range(4))
    gradient[:] = 1.0
    num_bytes = message_num_bytes(_KERNEL_ELEMENTS, DEFAULT_BLOCK)
    messages = [codec.empty_bytes(num_bytes) for _ in range(_SERVED)]
    reply = codec.empty_bytes(num_bytes)

    options: dict[str, Any] = {"block": DEFAULT_BLOCK, "scale": "rms", "live": None}

    def compress(message: Array, momenta: Array | None) -> None:
        codec.compress(gradient, momenta, 0.9, error, message, **options)

    def reduce() -> None:
        codec.reduce(messages, error, reply, num_elements=_KERNEL_ELEMENTS, **options)

    def least(run: Callable[[], None], result: Array) -> float:
        found = []
        for _ in range(_KERNEL_REPEATS):
            begin = time.perf_counter()
            run()
            codec.to_bytes(codec.as_bytes(result[:1]))  # a GPU is done by then
            found.append(time.perf_counter() - begin)
        return min(found)

    for message in messages:
        compress(message, momentum)
    compressing = least(lambda: compress(messages[0], momentum), error)
    without_momentum = least(lambda: compress(messages[0], None), error)
    decoding = least(lambda: codec.average(messages[:2], values, block=DEFAULT_BLOCK, live=None), values)
    reducing = least(reduce, error)
    each = (compressing, decoding / 2, max(reducing - without_momentum, 0.0) / _SERVED)
    return [seconds / _KERNEL_ELEMENTS for seconds in each]
