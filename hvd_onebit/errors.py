"""The one exception type for a run gone wrong, and what both frameworks say in the same words."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "FREEZE_FAILED",
    "OneBitError",
    "parameters_removed",
    "restored_too_far",
    "scaler_with_local_steps",
    "stalled",
    "stuck",
    "too_many_skips",
]

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


def parameters_removed(names: Sequence[str]) -> OneBitError:
    """The error of a step after a parameter group was taken out of the optimizer by hand.

    Args:
        names: the parameters that are gone.
    """
    some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return OneBitError(
        f"parameters were removed from optimizer.param_groups: {some}. "
        "A distributed optimizer still holds them in its buckets and hooks: put their group back. To train them no "
        "longer, set requires_grad_(False) on them, or their group's lr to 0; or make a new optimizer of the other "
        "parameters, and wrap that"
    )


def stalled(rank: int, what: str, seconds: float) -> OneBitError:
    """The error of a rank that has waited for others as long as it was told to.

    Args:
        rank: the one that waited.
        what: what it waited for.
        seconds: the limit.
    """
    return OneBitError(
        f"rank {rank} has waited {seconds:g} s for other ranks {what}, and they have not come: some rank stands still, "
        "or does something else. Likely causes: a data loader or a file system that hangs, a deadlock, fewer batches "
        "on one rank, an evaluation, a checkpoint or a break that only some ranks take. `py-spy dump --pid PID` on a "
        "rank that does not wait shows where it is. If the wait is right, raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS "
        "(horovodrun --stall-check-shutdown-time-seconds). End the process: the step's collectives are still under way."
    )


def stuck(steps: int) -> str:
    """What a rank of 0/1 Adam says that has not used its gradients for so many steps."""
    return f"gradients were NaN or infinite for {steps} steps in a row"


def restored_too_far(size: int, freeze_step: int | str) -> str:
    """Why a tf.train.Checkpoint of the compression stage is not taken up.

    Args:
        size: ranks here.
        freeze_step: as it is now.
    """
    reason = "there is one rank only" if size == 1 else f"freeze_step={freeze_step} lies ahead"
    return (
        f"the tf.train.Checkpoint is of the compression stage, and has to go back to warm-up here, as {reason}. That "
        "needs the whole state at once: restore it on as many ranks with the old freeze_step, and save with "
        "model.save() or optimizer.save_own_variables(), which load anywhere"
    )


def scaler_with_local_steps() -> ValueError:
    """The error that refuses loss scaling around 0/1 Adam."""
    return ValueError("0/1 Adam's ranks step by themselves, and a scaler would skip one of them alone: use bfloat16")
