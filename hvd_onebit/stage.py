"""Which parameters are compressed: the rules by which they freeze and thaw, as pure functions of agreed state.

The state of n parameters is a table of integers, int64, shape (3, n); its rows are FROZEN_STEP, VARIANCE_STEPS and
WARM_SINCE. It's the same on every rank, so that every rank switches at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import bias_correction
from hvd_onebit.schedule import FreezeSchedule

__all__ = [
    "FROM_THE_START",
    "FROZEN_STEP",
    "VARIANCE_STEPS",
    "WARM_SINCE",
    "any_frozen",
    "first_frozen_step",
    "freeze_ready",
    "frozen_variance",
    "must_thaw",
    "new_table",
    "thaw_ratio",
    "variance_threshold",
]

Table = npt.NDArray[np.int64]

FROZEN_STEP = 0
"""Row: the step after which a parameter was compressed, or FROM_THE_START; 0: not yet."""
VARIANCE_STEPS = 1
"""Row: updates that went into its frozen variance."""
WARM_SINCE = 2
"""Row: the step at which its variance was last seen all zero: its own warm-up starts there."""

FROM_THE_START = -1
"""In row FROZEN_STEP: compressed from the first step on."""


def new_table(num_parameters: int) -> Table:
    """The table of parameters none of which is frozen."""
    return np.zeros((3, num_parameters), np.int64)


def any_frozen(table: Table) -> bool:
    """Whether a parameter is compressed."""
    return bool(table[FROZEN_STEP].any())


def first_frozen_step(table: Table) -> int:
    """The step at which the first parameter was frozen; 0 if none is, or from the start."""
    frozen = table[FROZEN_STEP]
    return max(int(frozen[frozen != 0].min()), 0) if frozen.any() else 0


def freeze_ready(
    table: Table,
    compressible: Sequence[int],
    *,
    step: int,
    lr: float,
    options: CompressionOptions,
    schedule: FreezeSchedule,
    variance_of: Callable[[int], npt.NDArray[np.float32] | None],
    variance_norm: Callable[[], float] | None,
) -> tuple[Table, list[int]]:
    """The parameters that freeze after `step`, and the table with them frozen.

    A parameter whose variance is all zero when its turn comes waits for as many updates of its own as the others had;
    one whose variance is not finite, after squares of huge gradients, waits until it is.

    Args:
        table: not written.
        compressible: the parameters that the user's options let be compressed.
        step: committed updates so far.
        lr: the learning rate of the last one.
        options: with `freeze_step`.
        schedule: its notes are brought up to date.
        variance_of: the variance of a parameter; None for rules without one.
        variance_norm: ||v||_1 over the parameters that wait, its bias corrected; None for rules without a variance.
    """
    table = table.copy()
    waiting = [i for i in compressible if not table[FROZEN_STEP, i]]
    if not waiting:
        return table, []
    if not any_frozen(table) and not schedule.should_freeze(step, lr, variance_norm):
        return table, []
    required = first_frozen_step(table) if schedule.is_automatic else int(options.freeze_step)
    ready = []
    for i in waiting:
        variance = variance_of(i)
        if variance is not None and not np.isfinite(variance).all():
            continue
        if variance is not None and not variance.any():
            table[WARM_SINCE, i] = step
        elif step - table[WARM_SINCE, i] >= required:
            ready.append(i)
    table[FROZEN_STEP, ready] = step
    table[VARIANCE_STEPS, ready] = step
    return table, ready


def variance_threshold(variance: npt.NDArray[np.float32], options: CompressionOptions) -> np.float32:
    """The least variance that is used of this tensor; 0 without a floor, and for a tensor without any variance."""
    # in float64, in one order whatever the number of threads, so that ranks agree to the bit
    return (
        np.float32(options.variance_floor * float(variance.mean(dtype=np.float64))) if variance.size else np.float32()
    )


def frozen_variance(
    variance: npt.NDArray[np.float32], options: CompressionOptions
) -> tuple[npt.NDArray[np.float32], int, int]:
    """A tensor's variance as it's frozen, its dead (zero) coordinates, and how many the floor has lifted."""
    dead = int(variance.size - np.count_nonzero(variance))
    if not variance.size:
        return variance.copy(), 0, 0
    threshold = variance_threshold(variance, options)
    # into an array: of one without dimensions NumPy would make a scalar
    frozen = np.maximum(variance, threshold, out=np.empty_like(variance))
    lifted = int((variance < threshold).sum())
    if options.dead == "hold":
        # zero is what marks a held coordinate
        np.copyto(frozen, 0.0, where=variance == 0)
        lifted -= dead
    return frozen, dead, lifted


def must_thaw(table: Table, *, step: int, size: int, options: CompressionOptions) -> bool:
    """Whether a restored state goes back to warm-up: `freeze_step` now lies ahead, or there is nobody to send to."""
    later = isinstance(options.freeze_step, int) and options.freeze_step > step
    return any_frozen(table) and (later or size == 1)


def thaw_ratio(beta2: float, step: int, variance_steps: int) -> float:
    """By what a frozen variance is multiplied to go on as a live one.

    It's biased by its own number of updates; Adam will correct it by all of them.
    """
    return bias_correction(beta2, step) / bias_correction(beta2, variance_steps)
