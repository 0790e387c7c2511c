"""Will it pay here? A cost model of Horovod's float32 allreduce and of the compressed exchange.

A collective takes as long as its slowest link and its rounds' latency; compressing and decoding take the processor,
while other buckets travel. Formulas are those of rings and of direct exchanges, as Gloo and Open MPI use them: an
allreduce or an allgather of n ranks passes over every host's link once in each direction, however many ranks the host
has; an alltoall sends from every rank to every other.

What collectives and kernels cost is either said by the user (`Cluster`) or measured among the ranks of a run
(`probe.py`). The model knows nothing of what else happens on the network and the processor. `hvd-onebit bench network`
measures the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hvd_onebit.options import MEASURED, CompressionOptions
from hvd_onebit.wire import message_num_bytes

__all__ = [
    "Cluster",
    "CollectiveCost",
    "Estimate",
    "KernelSpeeds",
    "Measurement",
    "Network",
    "Plan",
    "RunPlan",
    "choose",
    "estimates",
    "hierarchical_bytes",
    "make_plan",
    "plan_run",
    "verdict",
]

# Horovod looks for new collectives, and agrees on them, once in a cycle of this length unless it is told otherwise
_CYCLE_SECONDS = 1e-3
_LEAST_SPEED_UP = 1.5  # what is less cannot be told from none: two measurements on busy cores differ by as much
_LEAST_GAIN = 1.1  # for which a measurement overrules what is chosen without one: noise is less
_BUCKETS = tuple(2**power for power in range(20, 25))


@dataclass(frozen=True)
class CollectiveCost:
    """What one kind of collective takes: first + (count - 1) * further + bytes * per_byte seconds.

    Attributes:
        first_seconds: of one that sends next to nothing, negotiation included.
        further_seconds: of each more, of those that are under way together.
        seconds_per_byte: of those that a host sends over its link.
    """

    first_seconds: float
    further_seconds: float
    seconds_per_byte: float

    def seconds(self, link_bytes: float, count: int = 1) -> float:
        """Of `count` of them, under way together, which send so many bytes in all."""
        return self.first_seconds + (count - 1) * self.further_seconds + link_bytes * self.seconds_per_byte

    @property
    def bits_per_second(self) -> float:
        """Of a host's link."""
        return 8.0 / self.seconds_per_byte if self.seconds_per_byte else math.inf


@dataclass(frozen=True)
class Network:
    """What collectives cost among ranks.

    Attributes:
        num_hosts: hosts.
        ranks_per_host: ranks on each of them, which share its link.
        allreduce: of float32 among all ranks.
        allgather: of bits: among all ranks, or if hierarchical among those of the same local rank, all at once.
        alltoall: the same.
        inside: averaging and sharing bits inside hosts, of a hierarchical exchange, where bytes are those of the
            gradients as float32; None for an exchange in which all ranks are alike.
    """

    num_hosts: int
    ranks_per_host: int
    allreduce: CollectiveCost
    allgather: CollectiveCost
    alltoall: CollectiveCost
    inside: CollectiveCost | None = None

    @property
    def size(self) -> int:
        """All ranks."""
        return self.num_hosts * self.ranks_per_host

    @property
    def num_peers(self) -> int:
        """Ranks that exchange bits with each other."""
        return self.size if self.inside is None else self.num_hosts

    def allreduce_bytes(self, num_bytes: float) -> float:
        """What a host sends when so many bytes are averaged."""
        return 2 * (self.size - 1) / self.size * num_bytes

    def allgather_bytes(self, message: float) -> float:
        """What a host sends when every rank (or, together, the ranks of a host) gives a message of so many bytes."""
        return (self.num_peers - 1) * message

    def alltoall_bytes(self, message: float) -> float:
        """What a host sends when the message is shared out among all who exchange bits."""
        if self.inside is not None:
            return (self.num_hosts - 1) / self.num_hosts * message
        return self.ranks_per_host * (self.size - self.ranks_per_host) / self.size * message


@dataclass(frozen=True)
class Cluster:
    """Where ranks run.

    Attributes:
        num_hosts: hosts.
        ranks_per_host: ranks on each of them, which share its link.
        bits_per_second: of a host's link, in each direction.
        latency_seconds: of one message.
    """

    num_hosts: int
    ranks_per_host: int
    bits_per_second: float
    latency_seconds: float = 50e-6

    def __post_init__(self) -> None:
        if min(self.num_hosts, self.ranks_per_host) < 1:
            raise ValueError(
                f"num_hosts and ranks_per_host must be at least 1, not {self.num_hosts} and {self.ranks_per_host}"
            )
        if not self.bits_per_second > 0 or self.latency_seconds < 0:
            raise ValueError(
                f"the link needs a rate above 0 and no negative latency, not {self.bits_per_second} bit/s and "
                f"{self.latency_seconds} s"
            )

    @property
    def size(self) -> int:
        """All ranks."""
        return self.num_hosts * self.ranks_per_host

    def network(self) -> Network:
        """What collectives take by the model: every round the latency, every kind one of Horovod's cycles."""

        def cost(rounds: int) -> CollectiveCost:
            latency = rounds * self.latency_seconds
            return CollectiveCost(_CYCLE_SECONDS + latency, latency, 8 / self.bits_per_second)

        n = self.size
        return Network(self.num_hosts, self.ranks_per_host, cost(2 * (n - 1)), cost(n - 1), cost(1))


@dataclass(frozen=True)
class KernelSpeeds:
    """Seconds an element, on the cores that a rank has.

    Attributes:
        compress: momentum, error feedback, signs.
        decode: of one message; the update itself is not counted, since float32 training makes it too.
        reduce: of one message into a server's average; compressing that is `compress` once more.
    """

    compress: float
    decode: float
    reduce: float


@dataclass(frozen=True)
class Estimate:
    """What one way of averaging costs in a step.

    Attributes:
        method: "float32" (Horovod's allreduce), "one_shot" or "two_phase".
        link_bytes: what a host sends over its link.
        wire_seconds: bytes, latency and negotiation, alone.
        kernel_seconds: compressing, reducing, decoding; if hierarchical, also averaging inside the hosts.
        seconds: both, buckets overlapping.
    """

    method: str
    link_bytes: float
    wire_seconds: float
    kernel_seconds: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The estimates, and the verdict.

    Attributes:
        float32: Horovod's allreduce.
        compressed: the compressed exchanges.
    """

    float32: Estimate
    compressed: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate:
        """The faster of the compressed exchanges."""
        return min(self.compressed, key=lambda each: each.seconds)

    @property
    def speed_up(self) -> float:
        """How many times as fast as float32 it is."""
        return self.float32.seconds / self.best.seconds

    @property
    def saved_seconds(self) -> float:
        """Saved in a step, if nothing of either hides behind computation; negative: it takes so much longer."""
        return self.float32.seconds - self.best.seconds

    @property
    def pays(self) -> bool:
        """Whether it is faster, by more than the model may be wrong."""
        return self.speed_up >= _LEAST_SPEED_UP

    def __str__(self) -> str:
        return verdict(self)


@dataclass(frozen=True)
class Measurement:
    """What was measured among the ranks of a run (`probe.py`), the same on every rank.

    Attributes:
        network: what collectives cost.
        speeds: of the slowest rank's kernels.
        seconds: that measuring took.
        on_one_host: whether all ranks are: then every rank counts as a host of the network.
    """

    network: Network
    speeds: KernelSpeeds
    seconds: float
    on_one_host: bool = False


@dataclass(frozen=True)
class RunPlan(Plan):
    """What is expected of a run by what was measured in it. `compressed` holds the exchange that is used, alone.

    Attributes:
        measurement: made in the run.
        num_elements: that are compressed.
        bucket_elements: that are used.
        faster: what is expected to be faster by a tenth or more, with its `bucket_elements`; None if nothing is.
    """

    measurement: Measurement
    num_elements: int
    bucket_elements: int
    faster: tuple[Estimate, int] | None


def make_plan(
    cluster: Cluster, num_elements: int, speeds: KernelSpeeds, options: CompressionOptions | None = None
) -> Plan:
    """The costs of a step of `num_elements` parameters.

    Raises:
        ValueError: one rank, which sends nothing, or no parameter.
    """
    if cluster.size < 2:
        raise ValueError("one rank has nobody to send to: nothing is compressed, and nothing can be saved")
    if num_elements < 1:
        raise ValueError(f"num_elements must be at least 1, not {num_elements}")
    float32, *compressed = estimates(cluster.network(), num_elements, speeds, options or CompressionOptions())
    return Plan(float32, tuple(compressed))


def hierarchical_bytes(cluster: Cluster, num_elements: int) -> float:
    """What a host sends over its link if gradients are averaged inside the hosts first."""
    network = replace(cluster.network(), inside=CollectiveCost(0.0, 0.0, 0.0))
    untimed = Measurement(network, KernelSpeeds(0.0, 0.0, 0.0), 0.0)
    return _estimate(untimed, num_elements, CompressionOptions()).link_bytes


def choose(measurement: Measurement, num_elements: int, options: CompressionOptions) -> CompressionOptions:
    """The options with a name and a number where they say "measured".

    They are those that are used without a measurement, unless others are expected to be faster by a tenth or more.
    """
    chosen = options.unmeasured(measurement.network.num_peers)
    if options.exchange == MEASURED:
        chosen = _faster(measurement, num_elements, chosen, _exchanges(chosen))
    if options.bucket_elements == MEASURED:
        chosen = _faster(measurement, num_elements, chosen, _bucket_sizes(chosen))
    return chosen


def plan_run(measurement: Measurement, num_elements: int, used: CompressionOptions) -> RunPlan:
    """What is expected of a run whose options are `used`, by what was measured in it."""
    other = _faster(measurement, num_elements, used, _exchanges(used))
    other = _faster(measurement, num_elements, other, _bucket_sizes(other))
    float32, *_ = estimates(measurement.network, num_elements, measurement.speeds, used)
    return RunPlan(
        float32=float32,
        compressed=(_estimate(measurement, num_elements, used),),
        measurement=measurement,
        num_elements=num_elements,
        bucket_elements=used.bucket_size(num_elements),
        faster=None
        if other is used
        else (_estimate(measurement, num_elements, other), other.bucket_size(num_elements)),
    )


def _exchanges(options: CompressionOptions) -> list[CompressionOptions]:
    return [replace(options, exchange=name) for name in ("one_shot", "two_phase")]


def _bucket_sizes(options: CompressionOptions) -> list[CompressionOptions]:
    return [replace(options, bucket_elements=size) for size in _BUCKETS]


def _faster(
    measurement: Measurement, num_elements: int, options: CompressionOptions, others: Iterable[CompressionOptions]
) -> CompressionOptions:
    """The fastest of the others, if that gains enough to be more than noise; else what there is."""

    def expected(each: CompressionOptions) -> float:
        return _estimate(measurement, num_elements, each).seconds

    best = min(others, key=expected)
    return best if _LEAST_GAIN * expected(best) <= expected(options) else options


def _estimate(measurement: Measurement, num_elements: int, options: CompressionOptions) -> Estimate:
    """Of the exchange that the options name."""
    network = measurement.network
    _, one_shot, two_phase = estimates(network, num_elements, measurement.speeds, options)
    return two_phase if options.algorithm(network.num_peers) == "two_phase" else one_shot


def estimates(
    network: Network, num_elements: int, speeds: KernelSpeeds, options: CompressionOptions
) -> tuple[Estimate, Estimate, Estimate]:
    """Horovod's float32 allreduce, one_shot, two_phase."""
    n, num_buckets = network.num_peers, math.ceil(num_elements / options.bucket_size(num_elements))
    block = options.block if isinstance(options.block, int) else num_elements
    message = message_num_bytes(num_elements, block)
    agreement = network.allgather.further_seconds  # the digests that ranks compare in every step
    inside, local_size = 0.0, 1
    if network.inside is not None:
        inside, local_size = network.inside.seconds(4 * num_elements, num_buckets), network.ranks_per_host

    link_bytes = network.allreduce_bytes(4 * num_elements)
    wire = network.allreduce.seconds(link_bytes)
    float32 = Estimate("float32", link_bytes, wire, 0.0, wire)

    # every message goes round
    link_bytes = network.allgather_bytes(message)
    wire = network.allgather.seconds(link_bytes, num_buckets) + agreement
    kernels = (speeds.compress / local_size + n * speeds.decode) * num_elements + inside
    one_shot = _overlapped("one_shot", link_bytes, wire, kernels, num_buckets)

    # chunks go to their servers, all at once, and the replies round
    to_servers, replies = network.alltoall_bytes(message), network.allgather_bytes(message / n)
    wire = (
        network.alltoall.seconds(to_servers, num_buckets) + network.allgather.seconds(replies, num_buckets) + agreement
    )
    served = (n * speeds.reduce + speeds.compress) / n
    kernels = ((speeds.compress + served) / local_size + speeds.decode) * num_elements + inside
    two_phase = _overlapped("two_phase", to_servers + replies, wire, kernels, num_buckets)
    return float32, one_shot, two_phase


def _overlapped(method: str, link_bytes: float, wire: float, kernels: float, num_buckets: int) -> Estimate:
    """Buckets travel while others are compressed; only one's share of the shorter part is not hidden."""
    seconds = max(wire, kernels) + min(wire, kernels) / num_buckets
    return Estimate(method, link_bytes, wire, kernels, seconds)


def verdict(plan: Plan) -> str:
    """Whether compression pays, and by how much, in a sentence."""
    method, milliseconds = plan.best.method, 1e3 * plan.saved_seconds
    if plan.pays:
        return (
            f"Compression pays: {method} is {plan.speed_up:.1f} times as fast as float32 and saves "
            f"{milliseconds:,.1f} ms a step, as far as computation does not hide them."
        )
    if plan.speed_up > 1 / _LEAST_SPEED_UP:
        return (
            f"Compression makes little difference here: {method} is expected to take {abs(milliseconds):,.1f} ms a "
            f"step {'less' if milliseconds > 0 else 'more'} than float32, and such an estimate is no better than that."
        )
    return (
        f"Compression does not pay here: {method} takes {1 / plan.speed_up:.1f} times as long as float32 "
        f"({-milliseconds:+,.1f} ms a step)."
    )
