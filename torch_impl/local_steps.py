"""0/1 Adam: local steps between synchronisations, a variance that is updated ever more rarely.

Lu et al. 2022, arXiv 2202.06009, algorithm 1. Where we differ from the paper: in a step that updates the variance, the
update comes before its use, since the first step would divide by zero; the variance is corrected by its number of
updates, and floored (or held) as in 1-bit Adam; weight decay acts on the parameters and on the point they were last
synchronised at, and stays out of what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_onebit import notices
from hvd_onebit.errors import OneBitError, stuck
from hvd_onebit.rules import AdamStep, adam_step, denominator
from hvd_onebit.schedule import Rounds, RoundSchedule, can_divide
from hvd_onebit.stage import variance_threshold
from hvd_onebit.stats import COMPRESSION, ring_allreduce_bytes
from hvd_onebit.step import Inputs
from hvd_onebit.torch.engine import SCHEDULE, Engine, all_finite
from hvd_onebit.torch.rules import (
    FROZEN_STEP,
    NOT_FROZEN,
    VARIANCE_STEPS,
    AdamRule,
    CompressedBucket,
    square_root,
)

__all__ = ["LocalStepsEngine", "LocalStepsRule"]

ANCHOR = "onebit_anchor"  # the parameter as it was after the last synchronisation: the same on all ranks
ACCUMULATED = "onebit_accumulated"  # u, the sum of lr*momentum since then: this rank's own
FLOOR = "onebit_floor"  # the least variance that is used, of this tensor
RATE_SUMS = "rate_sums"  # in the schedule: the sum of lr since the last synchronisation, by bucket


class LocalStepsRule(AdamRule):
    """The state of 0/1 Adam's parameters."""

    def tensors(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", ANCHOR, ACCUMULATED)

    def settle(self, group: dict[str, Any], state: dict[str, Any], owed: Tensor) -> bool:
        return False  # what is owed here is a distance, not a momentum

    def new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        fresh = super().new_state(group, p)
        return {
            **fresh,
            ANCHOR: p.detach().float().clone(memory_format=torch.contiguous_format),
            ACCUMULATED: torch.zeros(p.shape, dtype=torch.float32, device=p.device),
            FLOOR: 0.0,
        }


class LocalStepsEngine(Engine):
    """0/1 Adam over the buckets that the other optimizers use. All communication happens in `apply`."""

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        group = optimizer.param_groups[0]
        names = ("var_update_scaler", "local_step_scaler", "local_step_clipper")
        self._rounds = RoundSchedule(**{name: group[name] for name in names})
        self._rate_sums: dict[str, float] = {}
        self._skipped_locally = 0  # in a row
        self._uses_own = True  # in this step
        self._accumulated: dict[str, Tensor] = {}
        super().__init__(optimizer, *args, **kwargs)

    def initialise_state(self) -> None:
        super().initialise_state()
        if self._transport.size > 1:
            for _, p in self._compressible():
                state = self._states()[p]
                if state[FROZEN_STEP] == NOT_FROZEN:
                    state[FROZEN_STEP] = self.step
                    if not state[VARIANCE_STEPS]:
                        state[VARIANCE_STEPS] = int(state["step"])  # plain Adam has updated it in every step

    def _schedule_state(self) -> dict[str, Any]:
        return {
            "freeze": self._schedule.state(),
            **self._rounds.state(),
            RATE_SUMS: dict(self._rate_sums),
        }

    def _load_schedule(self, state: dict[str, Any]) -> None:
        self._schedule.load(state["freeze"])
        self._rounds.load(state)
        self._rate_sums = dict(state[RATE_SUMS])

    def _thaw_if_early(self, owed: Mapping[str, Tensor]) -> bool:
        settled = False
        if self._transport.size == 1:
            settled = super()._thaw_if_early(owed)
            self._rate_sums = {}
            for p in self.parameters():
                if ACCUMULATED in self._states()[p]:
                    self._states()[p][ACCUMULATED].zero_()
            self._optimizer.param_groups[0][SCHEDULE] = self._schedule_state()
        return settled

    @torch.no_grad()
    def _adopt(self, new: Any) -> None:
        super()._adopt(new)
        for buckets in new.values():
            for bucket in buckets:
                flat = torch.zeros_like(bucket.values)
                for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                    state = self._states()[p]
                    view.copy_(state[ACCUMULATED])
                    state[ACCUMULATED] = view
                self._accumulated[bucket.bucket.name] = flat

    @torch.no_grad()
    def synchronize_for_checkpoint(self) -> None:
        super().synchronize_for_checkpoint()
        for bucket in self._all_buckets():
            accumulated = self._accumulated[bucket.bucket.name]
            for name, flat in (("momentum", bucket.momentum), ("accumulated", accumulated)):
                flat.copy_(self._transport.allreduce(flat, name=f"{bucket.bucket.name}.{name}").wait())
            if not self._rate_sums.get(bucket.bucket.name):
                continue  # nobody has moved; perhaps there was no step yet
            for p, u in zip(bucket.parameters, bucket.views(accumulated), strict=True):
                state = self._states()[p]
                self._move(p, u, state[ANCHOR], state, self._numbers(bucket.group, state))

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._prepare()

    def _tell_stage(self) -> None:
        if self.step == 0:
            notices.local_steps(self.options.freeze_step)
        else:
            notices.resumed(self.step, self._first_frozen_step())

    def finish(self) -> None:
        self._finite = self._full_precision_finite()

    def write_gradients(self) -> None:
        """Nothing: gradients stay this rank's own, what is averaged is the sum of several steps."""

    @torch.no_grad()
    def apply(self, full_precision_step: Callable[[], None]) -> None:
        step = self.step + 1
        lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
        due = self._rounds.due(step, lr) if self._buckets else Rounds(variance=False, sync=False)
        if any(due):
            self._start_agreement()
            self._finish_agreement()
            if self._is_stuck:
                raise OneBitError(stuck(self.options.max_skipped_steps))
            self._set_checksums({})
        for bucket in self._all_buckets():
            bucket.gather(self._gradient_scale)  # unscaled by now, if there is a scaler
        variances: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if due.variance and self._finite:
            variances = self._update_variance()
        if self._finite:
            self._leave_out_what_is_not_finite(step)
            meeting = [bucket for bucket in self._all_buckets() if due.sync and can_divide(self._rate_sum(bucket))]
            self._finite = self._exchange(meeting)
            if self._finite:
                self._step_uncompressed(full_precision_step)
                for bucket in self._all_buckets():
                    if bucket in meeting:
                        self._take_average(bucket)
                    else:
                        self._step_locally(bucket)
                self._end_rounds(step, lr, due, meeting)
            else:
                self._put_back(variances)
        self._end_step(COMPRESSION if self._buckets else "warm-up")
        self._measure_when_due()

    def _end_rounds(self, step: int, lr: float, due: Rounds, met: Sequence[CompressedBucket]) -> None:
        if met:
            self._rate_sums.update({bucket.bucket.name: 0.0 for bucket in met})
            self._take_checksum()
            self._in_flight.commit()
            self.stats.rounds += 1
        self._rounds.made(step, due)
        if self._rounds.variance_is_live:
            self._freeze_when_due(step, lr)
        self._optimizer.param_groups[0][SCHEDULE] = self._schedule_state()

    @property
    def _is_stuck(self) -> bool:
        return self._skipped_locally >= self.options.max_skipped_steps

    def _dynamic_fields(self) -> dict[str, Any]:
        # a rank that could not use its gradients for long stops all of them at the next round
        is_stuck = {stuck(self.options.max_skipped_steps): True} if self._is_stuck else {}
        return {**super()._dynamic_fields(), **is_stuck}

    def _update_variance(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Collective: one full-precision round for v; `_finite` is False when a rank's gradient was not.

        Returns:
            Each parameter's state, and what of it has changed, as it was.
        """
        buckets = self._all_buckets()
        pending = []
        for bucket in buckets:
            self.stats.count(ring_allreduce_bytes(4 * bucket.bucket.num_elements, self._transport.size))
            pending.append(self._transport.allreduce(bucket.values, name=f"{bucket.bucket.name}.variance"))
        means = [each.wait() for each in pending]
        self._finite = all_finite(means)
        if not self._finite:
            return []
        before = []
        for bucket, mean in zip(buckets, means, strict=True):
            beta2 = bucket.group["betas"][1]
            for p, gradient in zip(bucket.parameters, bucket.views(mean), strict=True):
                state = self._states()[p]
                before.append((state, {key: state[key] for key in ("exp_avg_sq", VARIANCE_STEPS, FLOOR)}))
                variance = (state["exp_avg_sq"] * beta2).add_(gradient.square() * (1.0 - beta2))
                state["exp_avg_sq"] = variance
                state[VARIANCE_STEPS] += 1
                state[FLOOR] = float(variance_threshold(variance.detach().cpu().numpy(), self.options))
            self._mark_live(bucket)
        self.stats.variance_updates += 1
        return before

    def _put_back(self, variances: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """After an exchange that failed: nothing else has changed by then."""
        for state, before in variances:
            state.update(before)
        if variances:
            self.stats.variance_updates -= 1
            for bucket in self._all_buckets():
                self._mark_live(bucket)

    def _mark_live(self, bucket: CompressedBucket) -> None:
        if self.options.dead == "hold":
            super()._mark_live(bucket)
            return
        states = [self._states()[p] for p in bucket.parameters]
        bucket.exchange.live = None
        if any(self._is_still(state) for state in states):
            bucket.exchange.live = bucket.codec.zeros(bucket.bucket.num_elements)
            for state, live in zip(states, bucket.views(bucket.exchange.live), strict=True):
                live.fill_(0.0 if self._is_still(state) else 1.0)

    def _is_still(self, state: dict[str, Any]) -> bool:
        """Without any variance there is nothing to lift: bits of its block's would throw the tensor far away."""
        return bool(self.options.variance_floor) and not state[FLOOR]

    def _leave_out_what_is_not_finite(self, step: int) -> None:
        """A rank whose gradient is not finite adds nothing to its momentum this once."""
        self._uses_own = not self.options.skip_nonfinite or all_finite([each.values for each in self._all_buckets()])
        self._skipped_locally = 0 if self._uses_own else self._skipped_locally + 1
        if not self._uses_own:
            self.stats.steps_skipped += 1
            notices.skipped_locally(step, self._transport.rank, self._skipped_locally)

    def _rate_sum(self, bucket: CompressedBucket) -> float:
        """The sum of lr since the last synchronisation, this step's included: 0 for a group that has not moved."""
        rate = self._next_numbers(bucket, bucket.parameters[-1]).step_size
        return self._rate_sums.get(bucket.bucket.name, 0.0) + rate

    def _next_momentum(self, bucket: CompressedBucket, index: int, gradient: Tensor) -> Tensor:
        momentum = bucket.views(bucket.momentum)[index]
        if not self._uses_own:
            return momentum
        beta1 = bucket.group["betas"][0]
        return (momentum * beta1).add_(gradient * (1.0 - beta1))

    def _step_locally(self, bucket: CompressedBucket) -> None:
        """This rank's own step."""
        name = bucket.bucket.name
        moments, sums = bucket.views(bucket.momentum), bucket.views(self._accumulated[name])
        rate_sum = self._rate_sum(bucket)
        for i, (p, gradient) in enumerate(zip(bucket.parameters, bucket.views(bucket.values), strict=True)):
            moments[i].copy_(self._next_momentum(bucket, i, gradient))
            state, numbers = self._count(bucket, p)
            sums[i].add_(moments[i] * numbers.step_size)
            self._move(p, moments[i] * numbers.step_size, p.float() * numbers.decay, state, numbers)
        self._rate_sums[name] = rate_sum

    def _count(self, bucket: CompressedBucket, p: Tensor) -> tuple[dict[str, Any], AdamStep]:
        """Begins a step of this parameter."""
        state = self._states()[p]
        if not self._rate_sums.get(
            bucket.bucket.name
        ):  # all ranks are equal here, and whatever the user has set counts
            state[ANCHOR].copy_(p)
        state["step"] += 1
        numbers = self._numbers(bucket.group, state)
        if numbers.decay != 1.0:
            state[ANCHOR].mul_(numbers.decay)
        return state, numbers

    def _exchange(self, buckets: Sequence[CompressedBucket]) -> bool:
        """Collective: averages what the ranks have done since the last time, this step included.

        Nothing has changed by then but the error feedback, which is put back if some value is not finite.
        """
        for bucket in buckets:
            sums = bucket.views(self._accumulated[bucket.bucket.name])
            for i, (p, values) in enumerate(zip(bucket.parameters, bucket.views(bucket.values), strict=True)):
                rate = self._next_numbers(bucket, p).step_size
                values.copy_(sums[i] + self._next_momentum(bucket, i, values) * rate)
            self._in_flight.start(bucket.exchange, Inputs.of(bucket.values))
        if not buckets or self._in_flight.finish():
            return True
        self._in_flight.rollback()
        return False

    def _take_average(self, bucket: CompressedBucket) -> None:
        """All ranks are equal again, bit for bit."""
        bucket.exchange.average(bucket.values)
        rate_sum = self._rate_sum(bucket)
        moments = bucket.views(bucket.momentum)
        for i, (p, u) in enumerate(zip(bucket.parameters, bucket.views(bucket.values), strict=True)):
            state, numbers = self._count(bucket, p)
            self._move(p, u, state[ANCHOR], state, numbers)
            state[ANCHOR].copy_(p)
            moments[i].copy_(u / rate_sum)
        self._accumulated[bucket.bucket.name].zero_()

    def _is_checked(self) -> bool:
        # rounds are rare, and seldom at a multiple
        every = self.options.check_every
        return bool(every) and (self.step + 1) // every > self._rounds.last_sync // every

    def _next_numbers(self, bucket: CompressedBucket, p: Tensor) -> AdamStep:
        state = self._states()[p]
        return self._numbers(bucket.group, {**state, "step": int(state["step"]) + 1})

    def _numbers(self, group: dict[str, Any], state: dict[str, Any]) -> AdamStep:
        return adam_step(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            step=int(state["step"]),
            variance_steps=max(state[VARIANCE_STEPS], 1),
            decoupled_weight_decay=group["weight_decay"] if group["decoupled_weight_decay"] else 0.0,
            bias_corrected=group.get("bias_correction", True),
        )

    def _move(self, p: Tensor, distance: Tensor, start: Tensor, state: dict[str, Any], numbers: AdamStep) -> None:
        """Moves p to start - distance/(sqrt(v)/correction + eps); held coordinates stay where they are."""
        if not p.requires_grad:
            return
        if self.options.dead != "hold" and self._is_still(state):
            p.copy_(start)
            return
        variance = state["exp_avg_sq"]
        used = variance.clamp(min=state[FLOOR]) if state[FLOOR] else variance
        moved = start - distance / denominator(used, numbers, square_root)
        p.copy_(torch.where(variance == 0, p.float(), moved) if self.options.dead == "hold" else moved)

    def _freeze_when_due(self, step: int, lr: float) -> None:
        if not self._buckets:
            return
        if self._schedule.should_freeze(step, lr, self._variance_norm):
            self._rounds.freeze(step, lr)
            still: list[str] = []
            for bucket in self._all_buckets():
                for p in bucket.parameters:
                    state = self._states()[p]
                    dead = int((state["exp_avg_sq"] == 0).sum())
                    self.stats.dead_elements += dead
                    still += [self.names[p]] if dead == p.numel() else []
                    if state[FLOOR]:
                        self.stats.floored_elements += int((state["exp_avg_sq"] < state[FLOOR]).sum())
            if still and self._transport.rank == 0:
                notices.without_variance(still)
            if self._schedule.lr_rises and self._transport.rank == 0:
                notices.learning_rate_rises(step, "var_freeze_step")

    def _variance_norm(self) -> float:
        total = 0.0
        for bucket in self._all_buckets():
            for p in bucket.parameters:
                state = self._states()[p]
                numbers = self._numbers(bucket.group, state)
                total += float(state["exp_avg_sq"].sum(dtype=torch.float64)) / numbers.variance_correction**2
        return total
