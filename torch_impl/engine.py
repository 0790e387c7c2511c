"""The compression stage of a torch optimizer: takes gradients out, calls the core, writes parameters back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_onebit import kernels, notices
from hvd_onebit.agreement import Agreement, digest
from hvd_onebit.errors import OneBitError
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket, make_buckets
from hvd_onebit.options import CompressionOptions, is_full_precision
from hvd_onebit.rules import AdamStep, adam_step, adam_update, bias_correction
from hvd_onebit.schedule import FreezeSchedule
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats
from hvd_onebit.step import StepExchange
from hvd_onebit.torch.codec import codec_for
from hvd_onebit.transport import Transport

__all__ = ["FORMAT_VERSION", "CompressionEngine"]

FORMAT_VERSION = 1

# kept in the optimizer's own per-parameter state, so that whatever copies that state carries the stage with it
FROZEN_STEP = "onebit_frozen_step"  # the step after which this parameter was compressed; 0: not yet
VARIANCE_STEPS = "onebit_variance_steps"  # updates that went into its frozen variance
WARM_SINCE = "onebit_warm_since"  # its own updates at the time its variance was last seen all zero
SCHEDULE = "onebit_schedule"  # in the first parameter group

Group = dict[str, Any]
BucketKey = tuple[int, int, str]  # group, frozen step, device


class _CompressedBucket:
    """One bucket's tensors: where parameters, momentum and gradients lie, and the exchange that averages them."""

    def __init__(
        self, bucket: Bucket, parameters: Sequence[Tensor], group: Group, transport: Transport[Tensor],
        options: CompressionOptions,
    ) -> None:
        device = parameters[0].device
        codec = codec_for(device)
        self.bucket = bucket
        self.parameters = tuple(parameters)
        self.group = group
        self.exchange = CompressedAllreduce(
            bucket, rank=transport.rank, size=transport.size, codec=codec, options=options
        )
        self.momentum = codec.zeros(bucket.num_elements)
        self.values = codec.zeros(bucket.num_elements)
        if options.dead == "hold":
            self.exchange.live = codec.zeros(bucket.num_elements)

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` cut into the parameters' shapes."""
        return [
            flat[offset : offset + size].view(p.shape)
            for offset, size, p in zip(self.bucket.offsets, self.bucket.sizes, self.parameters, strict=True)
        ]

    def gather(self, gradient_scale: float) -> None:
        """Copies the gradients, with coupled weight decay, into `values`; a missing one counts as zero."""
        sign = -gradient_scale if self.group["maximize"] else gradient_scale
        decay = 0.0 if self.group["decoupled_weight_decay"] else self.group["weight_decay"]
        for view, p in zip(self.views(self.values), self.parameters, strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
            if sign != 1.0:
                view.mul_(sign)
            if decay:
                view.add_(p, alpha=decay)


class CompressionEngine:
    """Everything an optimizer needs beside its own full-precision step.

    A step is `begin`, (the caller averages the full-precision gradients), `finish`, optionally `write_gradients`, and
    `apply`. `begin` and `finish` are collective.

    Args:
        optimizer: a torch.optim.Adam or subclass, whose `state` and `param_groups` are used in place.
        names: the name of every parameter.
        transport: among the ranks that train together.
        gradient_scale: gradients are multiplied by this before they enter the momentum (n for op=Sum).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        options: CompressionOptions,
        transport: Transport[Tensor],
        *,
        gradient_scale: float = 1.0,
    ) -> None:
        self.options = options
        self.stats = Stats()
        self.names = names
        self._optimizer = optimizer
        self._transport = transport
        self._gradient_scale = gradient_scale
        self._schedule = FreezeSchedule(options, optimizer.param_groups[0]["betas"][1])
        self._agreement = Agreement(transport, "agreement")
        self._buckets: dict[BucketKey, list[_CompressedBucket]] = {}
        self._in_flight: StepExchange[Tensor] | None = None
        self._finite = True
        self._gradients_written = False
        self._static_digest: bytes | None = None
        self._checksum: int | None = None
        self._frozen_checksum: int | None = None
        self._restorable_errors: dict[str, Any] = {}
        self._told = False
        self.initialise_state()

    # -- agreed state ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Committed updates."""
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return max(steps, default=0)

    def is_compressed(self, p: Tensor) -> bool:
        """True when this parameter's gradient travels as bits."""
        return bool(self._optimizer.state[p].get(FROZEN_STEP, 0)) if p in self._optimizer.state else False

    @property
    def stage(self) -> str:
        return COMPRESSION if any(self.is_compressed(p) for p in self.parameters()) else WARM_UP

    def parameters(self) -> list[Tensor]:
        """All parameters, in registration order."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def initialise_state(self) -> None:
        """Creates the optimizer's state now: Horovod's broadcast_optimizer_state would run a step to create it."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._optimizer.state[p]
                if p.requires_grad and not state:
                    on_device = group["capturable"] or group["fused"]
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
                    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                        state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if state:
                    for key in (FROZEN_STEP, VARIANCE_STEPS, WARM_SINCE):
                        state.setdefault(key, 0)
        self._optimizer.param_groups[0].setdefault(SCHEDULE, self._schedule.state())
        self._static_digest = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Collective: compares the ranks' state and starts the compressed exchanges."""
        if not self._told:
            self._tell_once()
        self._build_buckets()
        alone = self._transport.size == 1
        if not alone:
            self._agreement.start(self._token())
        self._in_flight = StepExchange(self._transport, self.stats)
        self._gradients_written = False
        for bucket in self._all_buckets():
            bucket.gather(self._gradient_scale)
            self._in_flight.start(bucket.exchange, bucket.values, bucket.momentum, bucket.group["betas"][0])
        if not alone:
            self._agreement.finish(self._fields)

    def finish(self) -> None:
        """Collective: completes the exchanges; the full-precision gradients are averaged by now."""
        assert self._in_flight is not None
        self._finite = self._in_flight.finish()
        if self.options.skip_nonfinite:
            self._finite = self._finite and _all_finite(
                [p.grad for p in self.parameters() if p.grad is not None and not self.is_compressed(p)]
            )
        if not self._finite:
            self._in_flight.rollback()

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Puts what the step will use into every compressed parameter's .grad: the averaged momentum."""
        for bucket in self._all_buckets():
            if self._finite:
                bucket.exchange.average(bucket.values)
            else:
                bucket.values.zero_()
            for p, view in zip(bucket.parameters, bucket.views(bucket.values), strict=True):
                p.grad = view if view.dtype == p.dtype else view.to(p.dtype)
        self._gradients_written = True

    @torch.no_grad()
    def apply(self, full_precision_step: Callable[[], None]) -> None:
        """Commits the step on parameters, momentum, counters and error feedback, or skips it as a whole.

        Raises:
            OneBitError: too many steps were skipped in a row; the same on every rank.
        """
        assert self._in_flight is not None
        stage = COMPRESSION if self._buckets else WARM_UP
        if self._finite:
            self._step_uncompressed(full_precision_step)
            for bucket in self._all_buckets():
                self._update(bucket)
            self._take_checksum()
            self._in_flight.commit()
        self._in_flight = None
        self.stats.end_step(stage, skipped=not self._finite)
        self.stats.stage, self.stats.step = self.stage, self.step
        if not self._finite:
            self._report_skip()
        elif self._transport.size > 1:
            self._freeze_when_due()

    def _step_uncompressed(self, full_precision_step: Callable[[], None]) -> None:
        hidden = [(p, p.grad) for bucket in self._all_buckets() for p in bucket.parameters]
        for p, _ in hidden:
            p.grad = None
        try:
            full_precision_step()
        finally:
            for p, gradient in hidden:
                p.grad = gradient

    def _update(self, bucket: _CompressedBucket) -> None:
        decoded: Tensor | None = bucket.values if self._gradients_written else None
        for i, p in enumerate(bucket.parameters):
            offset, size = bucket.bucket.offsets[i], bucket.bucket.sizes[i]
            state = self._optimizer.state[p]
            state["step"] += 1
            numbers = _numbers(bucket.group, state)
            variance = _variance(bucket.group, state)
            if decoded is None and _is_plain(p) and p.requires_grad:
                self._apply_from_bits(bucket, p, offset, size, variance, numbers)
                continue
            if decoded is None:
                bucket.exchange.average(bucket.values)
                decoded = bucket.values
            gradient = p.grad if self._gradients_written and p.grad is not None else decoded[offset : offset + size]
            averaged = gradient.float().view(p.shape)
            momentum = bucket.momentum[offset : offset + size].view(p.shape)
            held = variance == 0 if self.options.dead == "hold" else None
            momentum.copy_(averaged if held is None else torch.where(held, momentum, averaged))
            if p.requires_grad:
                new = adam_update(p.float(), momentum, variance, numbers, torch.sqrt)
                p.copy_(new if held is None else torch.where(held, p.float(), new))

    def _apply_from_bits(
        self, bucket: _CompressedBucket, p: Tensor, offset: int, size: int, variance: Tensor, numbers: AdamStep
    ) -> None:
        parameter = p.detach().view(-1).numpy()
        momentum = bucket.momentum.numpy()[offset : offset + size]
        flat_variance = variance.view(-1).numpy()
        for piece in bucket.exchange.pieces(offset, offset + size):
            kernels.adam_apply(
                [message.numpy() for message in bucket.exchange.messages(piece)],
                piece.start,
                parameter[piece.low : piece.high],
                momentum[piece.low : piece.high],
                flat_variance[piece.low : piece.high],
                num_elements=piece.num_elements,
                block=piece.block,
                step_size=numbers.step_size,
                eps=numbers.eps,
                variance_correction=numbers.variance_correction,
                decay=numbers.decay,
                hold=self.options.dead == "hold",
            )

    def _report_skip(self) -> None:
        in_a_row = self.stats.skipped_in_a_row
        if self._transport.rank == 0:
            notices.skipped(self.step + 1, in_a_row)
        if in_a_row >= self.options.max_skipped_steps:
            raise OneBitError(
                f"{in_a_row} steps in a row were skipped because a gradient was NaN or infinite on some rank (last good "
                f"step: {self.step}). Likely causes: a learning rate too high, bad input data on one rank, or overflow in "
                "half precision. Parameters and optimizer state are those of the last good step."
            )

    # -- freezing ----------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[tuple[Group, Tensor]]:
        """Parameters that will be compressed but are not yet."""
        return [
            (group, p)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
            and self._optimizer.state[p]
            and not self.is_compressed(p)
            and p.is_floating_point()
            and not is_full_precision(self.names[p], p.numel(), self.options)
        ]

    def _first_frozen_step(self) -> int:
        steps = [state.get(FROZEN_STEP, 0) for state in self._optimizer.state.values()]
        return min((step for step in steps if step), default=0)

    @torch.no_grad()
    def _freeze_when_due(self) -> None:
        waiting = self._waiting()
        if not waiting:
            return
        step = self.step
        first = self._first_frozen_step()
        if not first:
            lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
            due = self._schedule.should_freeze(step, lr, lambda: self._variance_norm(waiting))
            if self._schedule.is_automatic:
                self._optimizer.param_groups[0][SCHEDULE] = self._schedule.state()
            if not due:
                return
            required = 0 if self._schedule.is_automatic else int(self.options.freeze_step)
        else:
            required = first if self._schedule.is_automatic else int(self.options.freeze_step)
        ready = [(group, p) for group, p in waiting if self._has_settled(group, p, required)]
        if ready:
            self._freeze(ready, step)

    def _has_settled(self, group: Group, p: Tensor, required: int) -> bool:
        state = self._optimizer.state[p]
        if not bool(_variance(group, state).any()):
            # a layer that has not been trained yet: its own warm-up starts with its first gradient
            state[WARM_SINCE] = int(state["step"])
            return False
        return int(state["step"]) - state[WARM_SINCE] >= required

    def _variance_norm(self, waiting: Sequence[tuple[Group, Tensor]]) -> float:
        """||v||_1 over what will be compressed, its bias corrected."""
        total = 0.0
        for group, p in waiting:
            state = self._optimizer.state[p]
            steps = int(state["step"])
            if steps:
                correction = bias_correction(group["betas"][1], steps) if group.get("bias_correction", True) else 1.0
                total += float(_variance(group, state).sum(dtype=torch.float64)) / correction
        return total

    def _freeze(self, ready: Sequence[tuple[Group, Tensor]], step: int) -> None:
        variances = []
        crc = 0
        for group, p in ready:
            variance = _variance(group, self._optimizer.state[p]).float().clone(memory_format=torch.contiguous_format)
            dead = int((variance == 0).sum())
            self.stats.dead_elements += dead
            if self.options.dead == "floor":
                threshold = self.options.variance_floor * _mean(variance)
                self.stats.floored_elements += int((variance < threshold).sum())
                variance.clamp_(min=threshold)
            variances.append(variance)
            crc = zlib.crc32(variance.cpu().numpy().tobytes(), crc)
        frozen = {p: variance for (_, p), variance in zip(ready, variances, strict=True)}
        # everything is allocated before anything is switched
        new = self._new_buckets({**self._wanted(), **self._keys_for(ready, step)})
        for (group, p), variance in zip(ready, variances, strict=True):
            state = self._optimizer.state[p]
            state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] = variance
            state[FROZEN_STEP] = step
            state[VARIANCE_STEPS] = int(state["step"])
        self._adopt(new)
        self._frozen_checksum = crc
        if not self.stats.frozen_step:
            self.stats.frozen_step = step
        self._count_elements()
        del frozen
        self.stats.stage = self.stage
        if self._transport.rank == 0:
            full = [self.names[p] for p in self.parameters() if p.requires_grad and not self.is_compressed(p)]
            notices.frozen(self.stats, full)

    # -- buckets -----------------------------------------------------------------------------------------------------

    def _all_buckets(self) -> list[_CompressedBucket]:
        return [bucket for key in sorted(self._buckets) for bucket in self._buckets[key]]

    def _keys_for(self, members: Sequence[tuple[Group, Tensor]], step: int) -> dict[BucketKey, list[Tensor]]:
        groups = self._optimizer.param_groups
        keyed: dict[BucketKey, list[Tensor]] = {}
        for group, p in members:
            index = next(i for i, other in enumerate(groups) if other is group)
            keyed.setdefault((index, step, str(p.device)), []).append(p)
        return keyed

    def _wanted(self) -> dict[BucketKey, list[Tensor]]:
        """The compressed parameters by bucket key, from agreed state only."""
        keyed: dict[BucketKey, list[Tensor]] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                if self.is_compressed(p):
                    step = int(self._optimizer.state[p][FROZEN_STEP])
                    keyed.setdefault((index, step, str(p.device)), []).append(p)
        return keyed

    def _new_buckets(self, wanted: dict[BucketKey, list[Tensor]]) -> dict[BucketKey, list[_CompressedBucket]]:
        """Allocates the buckets of all keys that are not built yet; changes nothing."""
        new: dict[BucketKey, list[_CompressedBucket]] = {}
        for key, parameters in wanted.items():
            if key in self._buckets:
                continue
            by_name = {self.names[p]: p for p in parameters}
            group = self._optimizer.param_groups[key[0]]
            sizes = [(name, p.numel()) for name, p in by_name.items()]
            buckets = make_buckets(
                sizes, bucket_elements=self.options.bucket_elements, prefix=f"group{key[0]}.step{key[1]}.{key[2]}"
            )
            new[key] = [
                _CompressedBucket(bucket, [by_name[n] for n in bucket.parameters], group, self._transport, self.options)
                for bucket in buckets
            ]
        return new

    @torch.no_grad()
    def _adopt(self, new: dict[BucketKey, list[_CompressedBucket]]) -> None:
        """Moves momentum (and what holds dead coordinates) into new buckets, and any restored errors with them."""
        for buckets in new.values():
            for bucket in buckets:
                for p, view in zip(bucket.parameters, bucket.views(bucket.momentum), strict=True):
                    state = self._optimizer.state[p]
                    view.copy_(state["exp_avg"])
                    state["exp_avg"] = view
                    name = "max_exp_avg_sq" if bucket.group["amsgrad"] else "exp_avg_sq"
                    state[name] = state[name].float().contiguous()
                if bucket.exchange.live is not None:
                    for p, live in zip(bucket.parameters, bucket.views(bucket.exchange.live), strict=True):
                        live.copy_(_variance(bucket.group, self._optimizer.state[p]))
                self._restore_errors(bucket)
        self._buckets.update(new)

    def _build_buckets(self) -> None:
        """Buckets for parameters that came compressed: from a checkpoint or another rank's broadcast."""
        wanted = self._wanted()
        if set(wanted) != set(self._buckets):
            for key in set(self._buckets) - set(wanted):
                del self._buckets[key]
            self._adopt(self._new_buckets(wanted))
            self.stats.frozen_step = self._first_frozen_step()
            self._count_elements()

    def _count_elements(self) -> None:
        trained = [p for p in self.parameters() if p.requires_grad]
        self.stats.compressed_elements = sum(p.numel() for p in trained if self.is_compressed(p))
        self.stats.full_precision_elements = sum(p.numel() for p in trained) - self.stats.compressed_elements

    # -- agreement ---------------------------------------------------------------------------------------------------

    def _tell_once(self) -> None:
        self._told = True
        self.stats.stage, self.stats.step = self.stage, self.step
        self._count_elements()
        if self._transport.rank != 0:
            return
        if self._transport.size == 1:
            notices.one_rank()
        elif not self._waiting() and self.stage == WARM_UP:
            notices.nothing_to_compress("every parameter is kept in full precision by full_precision or min_elements")
        elif self.stage == WARM_UP:
            notices.started(self.options.freeze_step, self._optimizer.param_groups[0]["betas"][1])

    def _static_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {f"option {name}": value for name, value in self.options.as_fields().items()}
        fields["number of parameters"] = len(self.parameters())
        for i, p in enumerate(self.parameters()):
            fields[f"parameter {i}"] = f"{self.names[p]} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}"
        fields["world size"] = self._transport.size
        return fields

    def _dynamic_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": self.step, "stage": self.stage}
        for index, step, device in sorted(self._buckets):
            fields[f"group {index} frozen at step {step}"] = [self._buckets[index, step, device][0].bucket.parameters[0]]
        for i, group in enumerate(self._optimizer.param_groups):
            for name in ("lr", "betas", "eps", "weight_decay"):
                value = group[name]
                fields[f"{name} of group {i}"] = [float(v) for v in value] if name == "betas" else float(value)
        if self._checksum is not None:
            fields["checksum of the averaged momentum"] = self._checksum
        if self._frozen_checksum is not None:
            fields["checksum of the frozen variance"] = self._frozen_checksum
        return fields

    def _fields(self) -> dict[str, Any]:
        return {**self._static_fields(), **self._dynamic_fields()}

    def _token(self) -> bytes:
        if self._static_digest is None:
            self._static_digest = digest(self._static_fields())
        return digest({"static": self._static_digest.hex(), **self._dynamic_fields()})

    def _take_checksum(self) -> None:
        self._checksum = self._frozen_checksum = None
        every = self.options.check_every
        if every and self._buckets and self.step % every == 0:
            self._checksum = 0
            for bucket in self._all_buckets():
                self._checksum = zlib.crc32(bucket.exchange.checksum_bytes(), self._checksum)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the optimizer's own state: this rank's compression errors. Not collective."""
        self._build_buckets()
        return {
            "version": FORMAT_VERSION,
            "rank": self._transport.rank,
            "size": self._transport.size,
            "errors": {
                bucket.bucket.name: {
                    "parameters": list(bucket.bucket.parameters),
                    "worker_error": bucket.exchange.worker_error,
                    "server_error": bucket.exchange.server_error,
                }
                for bucket in self._all_buckets()
            },
        }

    @torch.no_grad()
    def load(self, extra: dict[str, Any] | None, moments: Sequence[dict[str, Any] | None]) -> None:
        """Takes up a restored optimizer state. Not collective: buckets are built from the state as it now is.

        Args:
            extra: what `state` returned, or None for a plain optimizer's checkpoint.
            moments: the checkpoint's state of each parameter, as saved; torch casts it to the parameter's dtype.
        """
        self._buckets = {}
        self._in_flight = None
        self._restorable_errors = {}
        self._checksum = self._frozen_checksum = None
        for p, saved in zip(self.parameters(), moments, strict=True):
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if saved and name in saved and saved.get(FROZEN_STEP, 0):
                    self._optimizer.state[p][name] = saved[name].to(p.device, torch.float32).clone()
        self.initialise_state()
        self._schedule.load(self._optimizer.param_groups[0][SCHEDULE])
        self._thaw_if_early()
        if extra and extra["errors"] and self.stage == COMPRESSION:
            here = (self._transport.rank, self._transport.size)
            if (extra["rank"], extra["size"]) == here:
                self._restorable_errors = dict(extra["errors"])
            elif self._transport.rank == 0:
                notices.dropped_errors(f"saved by rank {extra['rank']} of {extra['size']}, restored on {here[0]} of {here[1]}")
        self._build_buckets()
        self._told = False

    def _thaw_if_early(self) -> None:
        """Back to warm-up when freeze_step now lies ahead, or when there is nobody to send to."""
        first, step = self._first_frozen_step(), self.step
        later = isinstance(self.options.freeze_step, int) and self.options.freeze_step > step
        if not first or not (later or self._transport.size == 1):
            return
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._optimizer.state[p]
                if not state or not state[FROZEN_STEP]:
                    continue
                name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
                if group.get("bias_correction", True):
                    # the frozen variance is biased by its own number of updates; Adam will correct it by all of them
                    beta2 = group["betas"][1]
                    ratio = bias_correction(beta2, int(state["step"])) / bias_correction(beta2, state[VARIANCE_STEPS])
                    state[name] = state[name] * ratio
                for moment in ("exp_avg", name):
                    state[moment] = state[moment].to(p.dtype).clone()
                state[FROZEN_STEP] = state[VARIANCE_STEPS] = 0
        self.stats.frozen_step = 0
        if self._transport.rank == 0 and later:
            notices.backs_to_warm_up(first, self.options.freeze_step, step)

    def _restore_errors(self, bucket: _CompressedBucket) -> None:
        saved = self._restorable_errors.pop(bucket.bucket.name, None)
        if saved is None:
            return
        if list(bucket.bucket.parameters) != list(saved["parameters"]):
            notices.dropped_errors(f"bucket {bucket.bucket.name} holds other parameters now")
            return
        for error, kept in (
            (bucket.exchange.worker_error, saved["worker_error"]),
            (bucket.exchange.server_error, saved["server_error"]),
        ):
            if error is not None and kept is not None and error.shape == kept.shape:
                error.copy_(kept)
            elif error is not None or kept is not None:
                notices.dropped_errors(f"bucket {bucket.bucket.name} is exchanged in another way now")


def _variance(group: Group, state: dict[str, Any]) -> Tensor:
    variance: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return variance


def _numbers(group: Group, state: dict[str, Any]) -> AdamStep:
    return adam_step(
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        step=int(state["step"]),
        variance_steps=state[VARIANCE_STEPS],
        decoupled_weight_decay=group["weight_decay"] if group["decoupled_weight_decay"] else 0.0,
        bias_corrected=group.get("bias_correction", True),
    )


def _is_plain(p: Tensor) -> bool:
    """True when the core's kernels can work on the parameter's memory."""
    return p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous()


def _mean(variance: Tensor) -> float:
    """The mean in float64, summed in one order whatever the number of threads, so that ranks agree to the bit."""
    if variance.device.type == "cpu":
        return float(variance.numpy().mean(dtype="float64"))
    return float(variance.double().mean())


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    dense = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not dense:
        return True
    largest = torch._foreach_norm(dense, float("inf"))
    return all(bool(torch.isfinite(each)) for each in largest)
