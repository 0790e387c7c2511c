"""When to freeze the variance: after a fixed number of updates, or when it has settled.

The automatic rule is the 1-bit Adam paper's (Tang et al. 2021, arXiv 2102.02888, section 7.1): freeze once
||v_t||_1 / ||v_{t-D}||_1 >= 0.96 with D = round(1/(1-beta2)). Two things are added. v is taken with its bias corrected,
since the raw v starts at zero and the ratio would pass at once; and the rule waits until the learning rate has stopped
rising for D updates, since the paper freezes only after the learning rate's own warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_onebit.options import AUTO, CompressionOptions

__all__ = ["FreezeSchedule", "delay_of", "stride_of"]


def delay_of(beta2: float) -> int:
    """D = round(1/(1-beta2)), the memory of the variance in updates."""
    return max(1, round(1.0 / (1.0 - beta2)))


def stride_of(delay: int) -> int:
    """The largest divisor of `delay` not above a twentieth of it: how often the variance's norm is taken."""
    most = max(1, delay // 20)
    return next(stride for stride in range(most, 0, -1) if delay % stride == 0)


class FreezeSchedule:
    """Decides, after each committed update, whether the variance freezes now.

    The decision is a function of the number of updates, the learning rates and the averaged variance: the same on
    every rank. `state()` and `load()` carry it through a checkpoint.
    """

    def __init__(self, options: CompressionOptions, beta2: float) -> None:
        self._options = options
        self._delay = delay_of(beta2)
        self._stride = stride_of(self._delay)
        self._norms: dict[int, float] = {}
        self._highest_lr = 0.0
        self._last_rise = 0

    @property
    def is_automatic(self) -> bool:
        return self._options.freeze_step == AUTO

    def should_freeze(self, step: int, lr: float, variance_norm: Callable[[], float]) -> bool:
        """True when the update just made was the last one in full precision.

        Args:
            step: committed updates so far, this one included.
            lr: the largest learning rate used in this update.
            variance_norm: returns ||v||_1 with v's bias corrected; called only when it is needed.
        """
        if not self.is_automatic:
            assert isinstance(self._options.freeze_step, int)
            return step >= self._options.freeze_step
        if lr > self._highest_lr:
            self._highest_lr, self._last_rise = lr, step
        latest = self._options.freeze_latest_step
        if latest is not None and step >= latest:
            return True
        if step % self._stride:
            return False
        norm = variance_norm()
        earlier = self._norms.get(step - self._delay)
        self._norms = {at: value for at, value in self._norms.items() if at > step - self._delay}
        self._norms[step] = norm
        if earlier is None or step < self._last_rise + self._delay:
            return False
        return earlier > 0 and norm / earlier >= self._options.freeze_threshold

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
