"""When to freeze the variance, when to update it (0/1 Adam), when to synchronise (0/1 Adam).

The automatic freeze is the 1-bit Adam paper's (Tang et al. 2021, arXiv 2102.02888, section 7.1): freeze once
||v_t||_1 / ||v_{t-D}||_1 >= 0.96 with D = round(1/(1-beta2)). Two things are added. v is taken with its bias corrected,
since the raw v starts at zero and the ratio would pass at once; and the rule waits until the learning rate has stopped
rising for D updates, since the paper freezes only after the learning rate's own warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_onebit.options import AUTO, CompressionOptions

__all__ = [
    "FreezeSchedule",
    "RoundSchedule",
    "Rounds",
    "SyncSchedule",
    "VarianceSchedule",
    "can_divide",
    "delay_of",
    "stride_of",
]


def delay_of(beta: float) -> int:
    """D = round(1/(1-beta)), the memory of an exponential average in updates; beta is beta2 for the variance."""
    return max(1, round(1.0 / (1.0 - beta)))


def stride_of(delay: int) -> int:
    """The largest divisor of `delay` not above a twentieth of it: how often the variance's norm is taken."""
    most = max(1, delay // 20)
    return next(stride for stride in range(most, 0, -1) if delay % stride == 0)


class FreezeSchedule:
    """Decides, after each committed update, whether the variance freezes now.

    The decision is a function of the number of updates, the learning rates and the averaged variance: the same on
    every rank. `state()` and `load()` carry it through a checkpoint.

    Attributes:
        lr_rises: the learning rate given last was higher than the one before; not part of the state.
    """

    def __init__(self, options: CompressionOptions, beta: float) -> None:
        self._options = options
        self._delay = delay_of(beta)
        self._stride = stride_of(self._delay)
        self._norms: dict[int, float] = {}
        self._highest_lr = 0.0
        self._last_rise = 0
        self._last_lr = math.inf
        self.lr_rises = False

    @property
    def is_automatic(self) -> bool:
        return self._options.freeze_step == AUTO

    def should_freeze(self, step: int, lr: float, variance_norm: Callable[[], float] | None) -> bool:
        """True when the update just made was the last one in full precision.

        Args:
            step: committed updates so far, this one included.
            lr: the largest learning rate used in this update.
            variance_norm: returns ||v||_1 with v's bias corrected; called only when it is needed. None for rules
                without a variance, which freeze automatically as soon as the learning rate has settled.
        """
        self.lr_rises, self._last_lr = lr > self._last_lr, lr
        if not self.is_automatic:
            assert isinstance(self._options.freeze_step, int)
            return step >= self._options.freeze_step
        settled = self.lr_has_settled(step, lr)
        latest = self._options.freeze_latest_step
        if latest is not None and step >= latest:
            return True
        if variance_norm is None:
            return settled
        if step % self._stride:
            return False
        norm = variance_norm()
        earlier = self._norms.get(step - self._delay)
        self._norms = {at: value for at, value in self._norms.items() if at > step - self._delay}
        self._norms[step] = norm
        if earlier is None or not settled:
            return False
        return earlier > 0 and norm / earlier >= self._options.freeze_threshold

    def lr_has_settled(self, step: int, lr: float) -> bool:
        """Notes the step's learning rate; True when it has not risen for as long as the average remembers."""
        if lr > self._highest_lr:
            self._highest_lr, self._last_rise = lr, step
        return step >= self._last_rise + self._delay

    def state(self) -> dict[str, Any]:
        """Plain JSON values that `load` takes back."""
        return {
            "norms": [[step, norm] for step, norm in sorted(self._norms.items())],
            "highest_lr": self._highest_lr,
            "last_rise": self._last_rise,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._norms = {int(step): float(norm) for step, norm in state["norms"]}
        self._highest_lr = float(state["highest_lr"])
        self._last_rise = int(state["last_rise"])


class VarianceSchedule:
    """T_v of 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, section 4.1): gaps of 2**floor(j/kappa) after the j-th update.

    The first step always updates; `kappa` is DeepSpeed's var_update_scaler.
    """

    def __init__(self, kappa: int) -> None:
        self._kappa = kappa
        self._updates = 0
        self._next = 1

    def is_due(self, step: int) -> bool:
        """True when the variance is updated in this step, counted from 1."""
        return step >= self._next

    def update(self, step: int) -> None:
        """Notes that the step updated the variance."""
        self._next = step + 2 ** (self._updates // self._kappa)
        self._updates += 1

    def state(self) -> dict[str, Any]:
        return {"updates": self._updates, "next": self._next}

    def load(self, state: dict[str, Any]) -> None:
        self._updates, self._next = int(state["updates"]), int(state["next"])


class SyncSchedule:
    """T_u of 0/1 Adam (section 4.2 there): every step while the variance is live, then at growing gaps.

    The gap doubles each time the learning rate has halved from its highest since the variance was frozen, or, when
    `doubling_steps` is given (DeepSpeed's local_step_scaler), every so many steps; it never exceeds `longest`
    (local_step_clipper).
    """

    def __init__(self, longest: int, doubling_steps: int | None = None) -> None:
        self._longest = longest
        self._doubling_steps = doubling_steps
        self._frozen_step = 0
        self._frozen_lr = 0.0
        self._last = 0

    @property
    def last(self) -> int:
        """The step that synchronised last; 0 before any."""
        return self._last

    def freeze(self, step: int, lr: float) -> None:
        """Notes that the variance is frozen after this step, made with learning rate `lr`."""
        self._frozen_step, self._frozen_lr = step, lr

    def gap(self, step: int, lr: float) -> int:
        """Steps between synchronisations at this step and learning rate."""
        if not self._frozen_step:
            return 1
        self._frozen_lr = max(self._frozen_lr, lr)
        if self._doubling_steps is not None:
            doublings = (step - self._frozen_step) // self._doubling_steps
        elif lr > 0.0 and self._frozen_lr > 0.0:
            # a ratio of exactly 2 is one halving, whatever its logarithm rounds to
            doublings = max(0, math.floor(math.log2(self._frozen_lr / lr) + 1e-9))
        else:
            doublings = self._longest.bit_length()
        return int(min(self._longest, 2 ** min(doublings, 62)))

    def is_due(self, step: int, lr: float) -> bool:
        """True when this step, counted from 1, ends with a synchronisation."""
        return step - self._last >= self.gap(step, lr)

    def synchronised(self, step: int) -> None:
        """Notes that the step synchronised."""
        self._last = step

    def state(self) -> dict[str, Any]:
        return {"frozen_step": self._frozen_step, "frozen_lr": self._frozen_lr, "last": self._last}

    def load(self, state: dict[str, Any]) -> None:
        self._frozen_step, self._last = int(state["frozen_step"]), int(state["last"])
        self._frozen_lr = float(state["frozen_lr"])


class Rounds(NamedTuple):
    """What 0/1 Adam communicates in one step."""

    variance: bool
    """A full-precision mean of the gradients, for the variance."""
    sync: bool
    """A compressed mean of what the ranks have done since the last time."""


_LEAST_DIVISOR = 2.0**-126  # float32's least normal number: frameworks may take smaller ones for zero


def can_divide(rate_sum: float) -> bool:
    """Whether what 0/1 Adam's ranks have done, in float32, can be divided by the sum of their learning rates.

    Until then it is not averaged: a learning rate of 0, as at the start of many schedules, moves nothing.
    """
    return rate_sum >= _LEAST_DIVISOR


class RoundSchedule:
    """The rounds of 0/1 Adam's steps (algorithm 1 there): T_v as long as the variance is live, and T_u.

    A function of the number of updates and the learning rates: the same on every rank.
    """

    def __init__(self, *, var_update_scaler: int, local_step_scaler: int | None, local_step_clipper: int) -> None:
        self._variance = VarianceSchedule(var_update_scaler)
        self._sync = SyncSchedule(local_step_clipper, local_step_scaler)
        self._is_live = True

    @property
    def variance_is_live(self) -> bool:
        return self._is_live

    @property
    def last_sync(self) -> int:
        """The step that synchronised last; 0 before any."""
        return self._sync.last

    def due(self, step: int, lr: float) -> Rounds:
        """The rounds of this step, counted from 1, made with learning rate `lr`."""
        return Rounds(self._is_live and self._variance.is_due(step), self._sync.is_due(step, lr))

    def made(self, step: int, rounds: Rounds) -> None:
        """Notes that the step was committed with these rounds."""
        if rounds.variance:
            self._variance.update(step)
        if rounds.sync:
            self._sync.synchronised(step)

    def freeze(self, step: int, lr: float) -> None:
        """Notes that the variance is frozen after this step, made with learning rate `lr`."""
        self._is_live = False
        self._sync.freeze(step, lr)

    def state(self) -> dict[str, Any]:
        return {
            "variance": self._variance.state(),
            "sync": self._sync.state(),
            "variance_is_live": self._is_live,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._variance.load(state["variance"])
        self._sync.load(state["sync"])
        self._is_live = bool(state["variance_is_live"])
