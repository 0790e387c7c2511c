"""The one exception type for a run gone wrong, and what both frameworks say in the same words."""

from __future__ import annotations

__all__ = ["OneBitError", "too_many_skips"]


class OneBitError(RuntimeError):
    """Training cannot go on as asked: ranks disagree, state does not fit, too many steps in a row were skipped."""


def too_many_skips(in_a_row: int, step: int) -> OneBitError:
    """The error that ends a run in which one step after the other was skipped.

    Args:
        in_a_row: skipped steps.
        step: the last good one.
    """
    return OneBitError(
        f"{in_a_row} steps in a row were skipped because a gradient was NaN or infinite on some rank (last good step: "
        f"{step}). Likely causes: a learning rate too high, bad input data on one rank, or overflow in half precision. "
        "Parameters and optimizer state are those of the last good step."
    )
