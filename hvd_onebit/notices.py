"""What the user is told, in the same words in every framework."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Sequence

from hvd_onebit.options import CompressionOptions
from hvd_onebit.planner import RunPlan, verdict
from hvd_onebit.schedule import delay_of
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats

__all__ = [
    "back_to_warm_up",
    "dropped_errors",
    "dropped_local_steps",
    "ended",
    "errors_lost_with_ranks",
    "errors_not_broadcast",
    "errors_of_other_ranks",
    "frozen",
    "hierarchical",
    "kept_wide",
    "learning_rate_rises",
    "local_steps",
    "measured",
    "never_compressed",
    "no_shared_memory",
    "not_distributed",
    "not_finite",
    "not_hierarchical",
    "nothing_to_compress",
    "one_rank",
    "pattern_without_match",
    "resumed",
    "skipped",
    "skipped_locally",
    "started",
    "waiting",
    "without_variance",
]

log = logging.getLogger("hvd_onebit")

_FASTEST_GIGABITS = 500.0


def one_rank() -> None:
    """Said once, when there is nobody to exchange gradients with."""
    log.warning("one rank: there is nothing to send, so nothing is compressed; the optimizer runs uncompressed")


def started(freeze_step: int | str, beta2: float, stats: Stats) -> None:
    """Said once, when training starts in the warm-up stage on several ranks; `stats` are looked at when it ends."""
    memory = delay_of(beta2)
    # of several trainings in a process, the last one started is told of
    atexit.unregister(never_compressed)
    atexit.register(never_compressed, freeze_step, stats)
    if freeze_step == "auto":
        log.info(
            "warm-up in full precision; compression starts when the variance has settled (after %d steps at "
            "the earliest)",
            2 * memory,
        )
        return
    assert isinstance(freeze_step, int)
    log.info("warm-up: %d steps in full precision, then compression", freeze_step)
    if freeze_step * 10 < memory:
        log.warning(
            "freeze_step=%d is early: with beta2=%g the variance remembers about %d steps, and it is frozen as it "
            'stands after %d; watch the loss, or use a later freeze_step, a smaller beta2 or "auto"',
            freeze_step,
            beta2,
            memory,
            freeze_step,
        )


def never_compressed(freeze_step: int | str, stats: Stats) -> None:
    """Said when the interpreter ends and training was still in its warm-up."""
    if not stats.bytes_sent[WARM_UP] or stats.bytes_sent[COMPRESSION]:
        return
    if getattr(sys, "last_value", None) is not None:
        return  # an error has ended it: that is what to look at
    log.warning(
        "the run ended in its warm-up, at step %d, so that nothing was compressed: freeze_step=%s; a good one is 10 to "
        "25 %% of all steps",
        stats.step,
        repr(freeze_step).replace("'", '"'),
    )


def hierarchical(num_hosts: int, local_size: int) -> None:
    """Said once, when gradients are averaged inside hosts first."""
    log.info("hierarchical exchange: %d hosts with %d ranks each", num_hosts, local_size)


def not_hierarchical(obstacle: str) -> None:
    """Said once, when the ranks of several hosts exchange alike although they need not."""
    log.info("the exchange is not hierarchical: %s", obstacle)


def no_shared_memory() -> None:
    """Said once, when ranks of one host cannot open each other's memory."""
    log.warning(
        "the ranks of a host cannot share memory (other containers, or no memfd_create): what they average among "
        "themselves goes through Horovod, which is slower; hierarchical=False may be faster"
    )


def nothing_to_compress(reason: str) -> None:
    """Said once, when the user's own options leave nothing for compression."""
    log.warning("compression was asked for but nothing will be compressed: %s", reason)


def measured(plan: RunPlan, options: CompressionOptions) -> None:
    """Said once a run: what its network and kernels do, and whether compression pays.

    Args:
        plan: by the measurement.
        options: the user's own.
    """
    found, used = plan.measurement, plan.best
    network = found.network
    log.info(
        "measured in %.2f s: float32 allreduce %s, allgather of bits %s, alltoall %s; compressing takes %.2f ns an "
        "element, decoding %.2f ns a rank",
        found.seconds,
        *(
            f"{_rate(cost.bits_per_second)} from {1e3 * cost.first_seconds:.2g} ms on"
            for cost in (network.allreduce, network.allgather, network.alltoall)
        ),
        1e9 * found.speeds.compress,
        1e9 * found.speeds.decode,
    )
    text = "%s Expected: float32 %.1f ms a step, %s %.1f ms for %d elements in buckets of %d"
    values = [verdict(plan), 1e3 * plan.float32.seconds, used.method, 1e3 * used.seconds]
    values += [plan.num_elements, plan.bucket_elements]
    if options.is_open:
        text += ', as chosen by the measurement; for the same bits in every run pass exchange="%s", bucket_elements=%d'
        values += [used.method, plan.bucket_elements]
    elif plan.faster is not None:
        faster, bucket_elements = plan.faster
        text += '; exchange="%s", bucket_elements=%d is expected to take %.1f ms'
        values += [faster.method, bucket_elements, 1e3 * faster.seconds]
    if not plan.pays:
        text += ". It is compressed all the same, as asked"
    if found.on_one_host:
        text += ". All ranks are on one host: what is measured there says nothing of a network between hosts"
    text += ". Measured once: other work on the cores distorts it, so compare the time of real steps"
    log.log(logging.INFO if plan.pays else logging.WARNING, text, *values)


def _rate(bits_per_second: float) -> str:
    gigabits = bits_per_second / 1e9
    # a large message that took no longer than a small one
    return "faster than could be told" if gigabits > _FASTEST_GIGABITS else f"{gigabits:.3g} Gbit/s a host"


def kept_wide(names: Sequence[str]) -> None:
    """Said once, when there are float64 parameters."""
    log.warning(
        "float64 parameters stay in full precision, since what is compressed is updated in float32: %s%s; make them "
        "float32 to have them compressed",
        ", ".join(names[:8]),
        ", ..." if len(names) > 8 else "",
    )


def frozen(stats: Stats, *, has_variance: bool, lr_rises: bool = False) -> None:
    """Said at every freeze, and where rules without a variance start to compress.

    Args:
        stats: as they are after the freeze.
        has_variance: False for SGD.
        lr_rises: the learning rate was higher in the last step than in the one before.
    """
    names = stats.full_precision_names
    dead = f"; dead coordinates (variance zero): {stats.dead_elements}, lifted by the floor: {stats.floored_elements}"
    log.info(
        "step %d: %scompression starts: %d elements as one bit, %d in full precision%s%s",
        stats.step,
        "variance frozen, " if has_variance else "",
        stats.compressed_elements,
        stats.full_precision_elements,
        f" ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})" if names else "",
        dead if has_variance else "",
    )
    if lr_rises and stats.step == stats.frozen_step:
        learning_rate_rises(stats.step, "freeze_step")


def learning_rate_rises(step: int, option: str) -> None:
    """Said when compression starts, or 0/1 Adam's variance is frozen, in the learning rate's own warm-up."""
    log.warning(
        "step %d: the learning rate still rises; what is frozen now was made by small steps and will be used for long "
        'ones: use a %s after the learning rate\'s warm-up, or "auto", which waits for it',
        step,
        option,
    )


def clipping_changes(step: int) -> None:
    """Said when a loop that calls `synchronize` itself, as one does to clip, comes to compression."""
    log.warning(
        "step %d: from now on .grad holds the averaged momentum after synchronize(), on which clipping hardly acts, "
        "while the variance stays that of clipped gradients: if you clip there, steps grow and the loss may jump. "
        "Use the option local_clip_norm instead, from the first step on",
        step,
    )


def back_to_warm_up(frozen_step: int, freeze_step: int | str, step: int) -> None:
    """Said when a restored state is thawed."""
    log.warning(
        "this state was frozen at step %d, but freeze_step=%s lies after step %d: back to warm-up in full "
        "precision until then",
        frozen_step,
        freeze_step,
        step,
    )


def dropped_errors(reason: str) -> None:
    """Said when a checkpoint's compression errors cannot be used here."""
    log.warning(
        "compression errors of the checkpoint were dropped (%s): a rounding's worth of gradient is lost, "
        "training goes on",
        reason,
    )


def errors_not_broadcast(rank: int) -> None:
    """Said by a rank that goes on in the compression stage from another rank's state, but not its own checkpoint."""
    dropped_errors(
        f"rank {rank} got its state by a broadcast, which does not carry them: to keep them load the checkpoint on "
        "every rank, each rank's own or one that was saved after synchronize_for_checkpoint()"
    )


def dropped_local_steps(reason: str) -> None:
    """Said when a checkpoint of 0/1 Adam was saved between two synchronisations and cannot be taken up as it was."""
    log.warning(
        "the checkpoint was saved between two synchronisations (%s): what the other ranks had done since the last one "
        "was dropped, training goes on",
        reason,
    )


def errors_of_other_ranks(before: int, now: int) -> None:
    """Said when errors that all ranks had shared go on with another number of ranks."""
    log.info("compression errors of %d ranks were taken up by %d: nothing that is owed is lost", before, now)


def ended(error: Exception) -> None:
    """Said before an error is raised where a framework buries it in a trace of its own."""
    log.error("%s", error)


def errors_lost_with_ranks(lost: int, size: int) -> None:
    """Said after a resize in which ranks have gone without a word."""
    log.warning(
        "%d of %d ranks are gone with their compression errors: their part of a rounding's worth of gradient is lost; "
        "what the others owed was kept",
        lost,
        size,
    )


def skipped(step: int, in_a_row: int) -> None:
    """Said at every skipped step."""
    if in_a_row & (in_a_row - 1):
        return  # 1, 2, 4, 8, ...: a run of them is told often enough
    log.warning("step %d skipped on all ranks: a gradient was NaN or infinite (%d in a row)", step, in_a_row)


def not_finite(step: int, rank: int, names: Sequence[str], in_a_row: int) -> None:
    """Said by the rank, or the ranks, whose own gradients were the reason of a skipped step.

    Args:
        step: that was skipped.
        rank: this one.
        names: its parameters whose gradients are not finite.
        in_a_row: skipped steps, this one included.
    """
    if in_a_row & (in_a_row - 1):
        return
    some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    log.warning("step %d: on rank %d the gradients of %s are NaN or infinite", step, rank, some)


def not_distributed(optimizer: str) -> None:
    """Said once, when a model on several ranks is trained without averaging."""
    log.warning(
        "the model was compiled with %s and there are several ranks: nothing averages its gradients, so that every "
        "rank trains a model of its own; compile it with DistributedOptimizer(%s(...))",
        optimizer,
        optimizer,
    )


def skipped_locally(step: int, rank: int, in_a_row: int) -> None:
    """Said by a rank of 0/1 Adam that leaves its own gradient out."""
    if in_a_row & (in_a_row - 1):
        return
    log.warning("step %d: rank %d left out its gradient, which was NaN or infinite (%d in a row)", step, rank, in_a_row)


def resumed(step: int, frozen_step: int) -> None:
    """Said when training goes on from a compressed state."""
    log.info("resumed at step %d in the compression stage (variance frozen at step %d)", step, frozen_step)


def local_steps(var_freeze_step: int | str) -> None:
    """Said once by 0/1 Adam, which has no warm-up."""
    until = "it has settled" if var_freeze_step == "auto" else f"step {var_freeze_step}"
    log.info("0/1 Adam: compressed from the first step on; its variance is updated until %s", until)


def waiting(rank: int, what: str, seconds: float, end_seconds: float | None) -> None:
    """Said by a rank that has waited long for others."""
    log.warning(
        "rank %d has waited %.0f s for other ranks %s: some rank stands still or does something else; %s",
        rank,
        seconds,
        what,
        "set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS for an end to such waits"
        if end_seconds is None
        else f"after {end_seconds:g} s this ends with an error",
    )


def without_variance(names: list[str]) -> None:
    """Said by 0/1 Adam when it freezes the variance of tensors that had no gradient yet."""
    log.warning(
        "the variance is frozen, but %s had no gradient so far and would never be trained: use a later "
        "var_freeze_step, or keep them in full_precision",
        ", ".join(names[:8]) + (", ..." if len(names) > 8 else ""),
    )


def pattern_without_match(pattern: str, nearest: str | None) -> None:
    """Said once for an entry of full_precision that keeps nothing."""
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    log.warning("full_precision: no parameter matches %r, so it keeps nothing in full precision%s", pattern, hint)
