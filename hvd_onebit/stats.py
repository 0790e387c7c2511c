"""What was sent, what was saved, what was skipped: counted where buffers are handed to collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_onebit.planner import RunPlan

__all__ = ["COMPRESSION", "WARM_UP", "Stats", "TrustRatio", "ring_allreduce_bytes"]

WARM_UP = "warm-up"
COMPRESSION = "compression"


def ring_allreduce_bytes(num_bytes: int, size: int) -> float:
    """Bytes a rank sends when `num_bytes` are allreduced by a ring of `size` ranks: 2 (n-1)/n of them."""
    return 2.0 * (size - 1) / size * num_bytes if size > 1 else 0.0


@dataclass(frozen=True)
class TrustRatio:
    """LAMB's numbers of one tensor: its learning rate is multiplied by average * factor (in warm-up by the last c).

    Attributes:
        average: the average of c over warm-up, without the bias of its start; frozen with the variance.
        factor: r, by which compression corrects it; 1 in warm-up.
    """

    average: float
    factor: float


@dataclass(repr=False)
class Stats:
    """Counters of one optimizer on this rank. Printed, they are a line for people.

    Attributes:
        stage: "warm-up" or "compression".
        step: committed updates.
        frozen_step: the step at which the variance was first frozen; 0 before.
        steps_skipped: steps that every rank skipped because a gradient was not finite.
        skipped_in_a_row: how many of them came last without a good one between.
        bytes_per_step: bytes this rank sent to others in the last step of each stage. An allreduce counts as a ring's.
        bytes_sent: all bytes this rank has sent, by stage.
        inside_bytes_per_step: of `bytes_per_step`, what the hierarchical exchange sent to ranks of the same host, in
            full precision and as bits: the rest went to other hosts. 0 without it: then no difference is made.
        uncompressed_bytes_per_step: what a step sends as float32.
        compressed_elements: elements that travel as one bit.
        full_precision_elements: elements that do not.
        full_precision_names: the parameters that do not: all in warm-up, later those that the user named, those that
            are too small for `min_elements`, and those that still warm up.
        dead_elements: elements whose variance was zero at the freeze.
        floored_elements: elements whose variance the floor has lifted.
        rounds: steps in which compressed parameters were communicated (0/1 Adam skips some).
        variance_updates: full-precision rounds that updated 0/1 Adam's variance.
        trust_ratios: LAMB's numbers by parameter name.
        plan: what was measured in this run, and whether compression pays by it; None before, and with one rank.
    """

    stage: str = WARM_UP
    step: int = 0
    frozen_step: int = 0
    steps_skipped: int = 0
    skipped_in_a_row: int = 0
    bytes_per_step: dict[str, float] = field(default_factory=lambda: {WARM_UP: 0.0, COMPRESSION: 0.0})
    bytes_sent: dict[str, float] = field(default_factory=lambda: {WARM_UP: 0.0, COMPRESSION: 0.0})
    inside_bytes_per_step: dict[str, float] = field(default_factory=lambda: {WARM_UP: 0.0, COMPRESSION: 0.0})
    uncompressed_bytes_per_step: float = 0.0
    compressed_elements: int = 0
    full_precision_elements: int = 0
    full_precision_names: tuple[str, ...] = ()
    dead_elements: int = 0
    floored_elements: int = 0
    rounds: int = 0
    variance_updates: int = 0
    trust_ratios: dict[str, TrustRatio] = field(default_factory=dict)
    plan: RunPlan | None = None
    _bytes_this_step: float = 0.0
    _inside_this_step: float = 0.0

    def count_uncompressed(self, num_bytes: int, size: int) -> None:
        """Notes what a step of float32 training would send."""
        self.uncompressed_bytes_per_step = ring_allreduce_bytes(num_bytes, size)

    def count(self, num_bytes: float, *, inside: float = 0.0) -> None:
        """Adds bytes handed to a collective in the step under way, `inside` of them for ranks of the same host."""
        self._bytes_this_step += num_bytes
        self._inside_this_step += inside

    def end_step(self, stage: str, *, skipped: bool) -> None:
        """Closes the step's counters; `stage` is the one the step was made in."""
        self.bytes_per_step[stage] = self._bytes_this_step
        self.bytes_sent[stage] += self._bytes_this_step
        self.inside_bytes_per_step[stage] = self._inside_this_step
        self._bytes_this_step = self._inside_this_step = 0.0
        if skipped:
            self.steps_skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.step += 1
            self.skipped_in_a_row = 0

    def give_up_step(self, stage: str) -> None:
        """Counts what a step sent that was never finished, as when ranks came or went in the middle of it."""
        self.bytes_sent[stage] += self._bytes_this_step
        self._bytes_this_step = self._inside_this_step = 0.0

    def __repr__(self) -> str:
        parts = [f"step {self.step}", "warm-up in full precision" if self.stage == WARM_UP else "compression"]
        if self.stage == COMPRESSION and self.frozen_step:
            parts[1] += f" since step {self.frozen_step}"
        if sent := self.bytes_per_step[self.stage]:
            fewer = f" ({self.ratio:.1f} times fewer than float32)" if self.stage == COMPRESSION else ""
            parts.append(f"{sent:,.0f} bytes a step{fewer}")
        if self.stage == COMPRESSION:
            parts.append(f"{self.compressed_elements:,} elements as one bit")
            parts.append(f"{self.full_precision_elements:,} in full precision")
        if self.steps_skipped:
            parts.append(f"{self.steps_skipped} step{'s' if self.steps_skipped > 1 else ''} skipped")
        if self.plan is not None:
            parts.append(f"an exchange expected {self.plan.speed_up:.1f} times as fast as float32's")
        return f"<{', '.join(parts)}>"

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than float32 the last compressed step sent; 1.0 before the first one."""
        sent = self.bytes_per_step[COMPRESSION]
        return self.uncompressed_bytes_per_step / sent if sent else 1.0
