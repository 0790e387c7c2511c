"""The one exception type for a run gone wrong, and what both frameworks say in the same words."""

from __future__ import annotations

__all__ = ["FREEZE_FAILED", "OneBitError", "scaler_with_local_steps", "stuck", "too_many_skips"]

FREEZE_FAILED = (
    "the variance could not be frozen on some rank, so all ranks stay in warm-up with their state as it was, and the "
    "next step tries again; compression needs a little over 8 bytes a parameter beside the optimizer's state: free "
    "some memory, or keep large tensors in full precision with full_precision=[...]"
)


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


def stuck(steps: int) -> str:
    """What a rank of 0/1 Adam says that has not used its gradients for so many steps."""
    return f"gradients were NaN or infinite for {steps} steps in a row"


def scaler_with_local_steps() -> ValueError:
    """The error that refuses loss scaling around 0/1 Adam."""
    return ValueError("0/1 Adam's ranks step by themselves, and a scaler would skip one of them alone: use bfloat16")
