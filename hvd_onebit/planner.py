"""Will it pay here? A cost model of Horovod's float32 allreduce and of the compressed exchange.

A collective takes as long as its slowest link and its rounds' latency; compressing and decoding take the processor,
while other buckets travel. Formulas are those of rings and of direct exchanges, as Gloo and Open MPI use them: an
allreduce or an allgather of n ranks passes over every host's link once in each direction, however many ranks the host
has; an alltoall sends from every rank to every other.

The model knows nothing of what else happens on the network and the processor. `hvd-onebit bench network` measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_onebit.options import CompressionOptions
from hvd_onebit.wire import message_num_bytes

__all__ = ["Cluster", "Estimate", "KernelSpeeds", "Plan", "estimates", "make_plan"]

# Horovod looks for new collectives, and agrees on them, once in a cycle of this length unless it is told otherwise
_CYCLE_SECONDS = 1e-3
_LEAST_SPEED_UP = 1.05  # what is less the model cannot tell from none


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
        kernel_seconds: compressing, reducing, decoding.
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
    float32, *compressed = estimates(cluster, num_elements, speeds, options or CompressionOptions())
    return Plan(float32, tuple(compressed))


def estimates(
    cluster: Cluster, num_elements: int, speeds: KernelSpeeds, options: CompressionOptions
) -> tuple[Estimate, Estimate, Estimate]:
    """Horovod's float32 allreduce, one_shot, two_phase."""
    n, num_buckets = cluster.size, math.ceil(num_elements / options.bucket_elements)
    block = options.block if isinstance(options.block, int) else num_elements
    message = message_num_bytes(num_elements, block)

    def wire_seconds(link_bytes: float, rounds: int, phases: int) -> float:
        sending = 8 * link_bytes / cluster.bits_per_second
        return sending + rounds * cluster.latency_seconds + phases * _CYCLE_SECONDS

    agreement = n - 1  # rounds of the digests that ranks compare in every step
    link_bytes = 2 * (n - 1) / n * 4 * num_elements
    wire = wire_seconds(link_bytes, 2 * (n - 1), 1)
    float32 = Estimate("float32", link_bytes, wire, 0.0, wire)

    # every rank's message goes round
    link_bytes = (n - 1) * message
    wire = wire_seconds(link_bytes, num_buckets * (n - 1) + agreement, 1)
    kernels = (speeds.compress + n * speeds.decode) * num_elements
    one_shot = _overlapped("one_shot", link_bytes, wire, kernels, num_buckets)

    # chunks go to their servers on other hosts, all at once, and the replies round
    remote = cluster.ranks_per_host * (n - cluster.ranks_per_host)
    link_bytes = (remote + n - 1) / n * message
    wire = wire_seconds(link_bytes, num_buckets * n + agreement, 2)
    served = (n * speeds.reduce + speeds.compress) / n
    kernels = (speeds.compress + served + speeds.decode) * num_elements
    two_phase = _overlapped("two_phase", link_bytes, wire, kernels, num_buckets)
    return float32, one_shot, two_phase


def _overlapped(method: str, link_bytes: float, wire: float, kernels: float, num_buckets: int) -> Estimate:
    """Buckets travel while others are compressed; only one's share of the shorter part is not hidden."""
    seconds = max(wire, kernels) + min(wire, kernels) / num_buckets
    return Estimate(method, link_bytes, wire, kernels, seconds)
