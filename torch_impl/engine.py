"""The compression stage of a torch optimizer: takes gradients out, calls the core, writes parameters back."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_onebit import notices
from hvd_onebit.agreement import PARAMETERS, Agreement, digest, raise_if_any_failed, static_fields
from hvd_onebit.errors import FREEZE_FAILED, OneBitError, parameters_removed, too_many_skips
from hvd_onebit.hosts import HostGroups, Place, hierarchical_place, shard_key
from hvd_onebit.layout import Bucket, make_buckets
from hvd_onebit.options import CompressionOptions, is_full_precision, patterns_without_match
from hvd_onebit.planner import Measurement, choose, plan_run
from hvd_onebit.probe import PROBE_STEP, measure
from hvd_onebit.rules import bias_correction, clip_factor
from hvd_onebit.schedule import FreezeSchedule
from hvd_onebit.stage import frozen_variance
from hvd_onebit.state import owed_by_parameter, share_errors, share_owed, take_shared_errors
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats
from hvd_onebit.step import Inputs, StepExchange
from hvd_onebit.torch.codec import codec_for
from hvd_onebit.torch.rules import (
    FROZEN_STEP,
    NOT_FROZEN,
    VARIANCE_STEPS,
    WARM_SINCE,
    AdamRule,
    CompressedBucket,
    Workspace,
)
from hvd_onebit.transport import Transport

__all__ = ["FORMAT_VERSION", "SCHEDULE", "CompressionEngine", "Engine", "all_finite", "floor_variance"]

FORMAT_VERSION = 1
# in the first parameter group: whatever copies the groups carries these with it
SCHEDULE = "onebit_schedule"
STEP = "onebit_step"  # committed updates
CHECKSUMS = "onebit_checksums"  # compared at the next step
CHOICE = "onebit_choice"  # what a measurement has chosen; empty: nothing

_SCALER_FACTOR = 2.0**-6  # a user's own division is by less

Group = dict[str, Any]
BucketKey = tuple[int, int, str]  # group, frozen step, device


class Engine:
    """What compressed training needs beside an optimizer's own full-precision step: buckets, agreement, state.

    A step is `begin`, (the caller averages the full-precision gradients), `finish`, optionally `write_gradients`, and
    `apply`. All are collective.

    Args:
        optimizer: its `state` and `param_groups` are used in place.
        rule: how this kind of optimizer is compressed.
        names: the name of every parameter.
        transport: among the ranks that train together.
        gradient_scale: gradients are multiplied by this before they enter the momentum (n for op=Sum).
        loss_scale: by what the loss, and so every gradient, is multiplied at this time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: AdamRule,
        names: dict[Tensor, str],
        transport: Transport[Tensor],
        *,
        gradient_scale: float = 1.0,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.options: CompressionOptions = rule.options
        self.stats = Stats()
        self.names = names
        self._rule = rule
        self._optimizer = optimizer
        self._transport = transport
        self._gradient_scale = gradient_scale
        self._loss_scale = loss_scale
        self._schedule = FreezeSchedule(self.options, max(rule.memory(group) for group in optimizer.param_groups))
        self._agreement = Agreement(transport, "agreement")
        self._buckets: dict[BucketKey, list[CompressedBucket]] = {}
        self._bucket_of: dict[Tensor, CompressedBucket] = {}
        self._place: Place | None = None
        self._groups: HostGroups[Tensor] | None = None
        self._find_hosts()
        self._in_flight: StepExchange[Tensor] = StepExchange(transport, self.stats, self._groups)
        self._finite = True
        self._torn_by = ""  # what was raised in the midst of a step
        self._steps_itself = False  # the optimizer's own step is running
        self._static_digest: bytes | None = None
        self._restorable_errors: dict[str, Any] = {}
        self._restores_shared = False
        self._errors_are_shared = False
        self._told = False
        self._steps_here = 0  # made with these ranks, skipped ones included
        self._measurement: Measurement | None = None
        # groups are shared with the wrapped optimizer, which may have been wrapped before
        for key in (SCHEDULE, STEP, CHECKSUMS, CHOICE):
            optimizer.param_groups[0].pop(key, None)
        self.initialise_state()

    # -- agreed state ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Committed updates."""
        return int(self._optimizer.param_groups[0][STEP])

    def is_compressed(self, p: Tensor) -> bool:
        """True when this parameter travels as bits."""
        return self._frozen_step_of(p) != NOT_FROZEN

    @property
    def stage(self) -> str:
        return COMPRESSION if any(self.is_compressed(p) for p in self.parameters()) else WARM_UP

    def parameters(self) -> list[Tensor]:
        """All parameters, in registration order."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def check_group(self, group: Group) -> None:
        """Raises ValueError for a parameter group that cannot be served."""
        self._rule.check_group(group)

    def initialise_state(self) -> None:
        """Creates the optimizer's state now: Horovod's broadcast_optimizer_state would run a step to create it."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._states()[p]
                if p.requires_grad:
                    packed = p in self._bucket_of and self._bucket_of[p].momentum is None
                    for key, value in self._rule.new_state(group, p).items():
                        if not (packed and key == self._rule.momentum_key):
                            state.setdefault(key, value)
                if state:
                    state.setdefault(FROZEN_STEP, NOT_FROZEN)
                    state.setdefault(VARIANCE_STEPS, 0)
                    state.setdefault(WARM_SINCE, 0)
        first = self._optimizer.param_groups[0]
        if STEP not in first:
            # fresh, or from a plain optimizer's checkpoint
            first[STEP] = max((int(state["step"]) for state in self._states().values() if "step" in state), default=0)
        first.setdefault(SCHEDULE, self._schedule_state())
        first.setdefault(CHECKSUMS, {})
        first.setdefault(CHOICE, {})
        self._static_digest = None

    @property
    def _checksums(self) -> dict[str, int]:
        checksums: dict[str, int] = self._optimizer.param_groups[0][CHECKSUMS]
        return checksums

    def _set_checksums(self, checksums: dict[str, int]) -> None:
        # a new object each time: a state_dict taken earlier keeps what it had
        self._optimizer.param_groups[0][CHECKSUMS] = checksums

    def _states(self) -> dict[Any, dict[str, Any]]:
        # past the optimizer's property of this name, which asks for `expand_momentum`
        states: dict[Any, dict[str, Any]] = self._optimizer.__dict__["state"]
        return states

    def _frozen_step_of(self, p: Tensor) -> int:
        return int(self._states()[p].get(FROZEN_STEP, NOT_FROZEN)) if p in self._states() else NOT_FROZEN

    def _first_frozen_step(self) -> int:
        """The step of the first freeze; NOT_FROZEN before."""
        steps = [self._frozen_step_of(p) for p in self.parameters()]
        return min((step for step in steps if step != NOT_FROZEN), default=NOT_FROZEN)

    def _compressible(self) -> list[tuple[Group, Tensor]]:
        """Trained parameters that the user's options let us compress."""
        return [
            (group, p)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
            and p.is_floating_point()
            and not is_full_precision(self.names[p], p.numel(), self.options, num_bytes=p.element_size())
        ]

    def _schedule_state(self) -> dict[str, Any]:
        return self._schedule.state()

    def _load_schedule(self, state: dict[str, Any]) -> None:
        self._schedule.load(state)

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Collective: compares the ranks' state and starts what can be started."""
        raise NotImplementedError

    def gradient_is_ready(self, p: Tensor) -> None:
        """Called by backward for a compressed parameter, if the caller has hooks."""

    @torch.no_grad()
    def clip_own_gradients(self) -> None:
        """Before `begin`: scales this rank's gradients down to `local_clip_norm`, if there is one."""
        limit = self.options.local_clip_norm
        if limit is None:
            return
        own = [p.grad for p in self.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in own))
        factor = clip_factor(norm, limit * self._loss_scale())
        if factor != 1.0:
            for gradient in own:
                gradient.mul_(factor)

    def finish(self) -> None:
        """Collective: completes the exchanges; the full-precision gradients are averaged by now."""
        raise NotImplementedError

    def write_gradients(self) -> None:
        """Collective: puts what the step will use into every compressed parameter's .grad."""
        raise NotImplementedError

    def apply(self, full_precision_step: Callable[[], None]) -> None:
        """Commits the step on parameters, momentum, counters and error feedback, or skips it as a whole.

        Raises:
            OneBitError: too many steps were skipped in a row; the same on every rank.
        """
        raise NotImplementedError

    @torch.no_grad()
    def abandon(self) -> None:
        """Gives up a step between `finish` and `apply`: all stays as it was before it, error feedback included."""
        was_finite, in_a_row = self._finite, self.stats.skipped_in_a_row
        if was_finite:
            self._in_flight.rollback()
        self._finite = False
        self._forget_step()
        if was_finite:  # the user's choice, not a fault of the gradients
            self.stats.end_step(self.stage, skipped=True)
            self.stats.skipped_in_a_row = in_a_row
        else:
            self._end_step(self.stage)

    def _removed(self) -> list[str]:
        """Parameters that were once in a group and are in none now."""
        present = set(self.parameters())
        return [name for p, name in self.names.items() if p not in present]

    def _refuse_removed(self, *, together: bool = True) -> None:
        """Raises OneBitError when a parameter group was removed. Collective, if `together`: the same on every rank."""
        removed = self._removed()
        if not removed or self._transport.size == 1:
            return
        if together:
            self._start_agreement()
            self._finish_agreement()
        raise parameters_removed(removed)

    def _prepare(self) -> None:
        """What a step needs before anything is sent."""
        self._keep_agreed_state()
        self._refuse_removed()
        self._errors_are_shared = False
        for bucket in self._all_buckets():
            bucket.shared_error = None
        if any(p.requires_grad and FROZEN_STEP not in self._states()[p] for p in self.parameters()):
            self.initialise_state()
        # the groups hold the schedule: another rank's broadcast may have replaced it
        self._load_schedule(self._optimizer.param_groups[0][SCHEDULE])
        self._tell_once()
        self._build_buckets()

    def _keep_agreed_state(self) -> None:
        """It lies in the first group: it is lost with that one if the user removes it."""
        first = self._optimizer.param_groups[0]
        first.setdefault(STEP, self.stats.step)
        first.setdefault(CHECKSUMS, {})
        first.setdefault(CHOICE, {})
        if SCHEDULE not in first:
            first[SCHEDULE] = self._schedule_state()

    def _find_hosts(self) -> None:
        place = hierarchical_place(self.options, self._transport.place)
        if place != self._place:
            self._place = place
            self._groups = None if place is None else HostGroups(self._transport, place)

    @property
    def is_torn(self) -> bool:
        """Whether a step ended in the midst of it, so that ranks, and what they hold, may not belong together."""
        return bool(self._torn_by)

    def tear(self, error: BaseException) -> None:
        """Gives up the step under way, which `error` has ended somewhere."""
        self._torn_by = f"step {self.step + 1} was ended by {type(error).__name__} before it was done"
        self._forget_step()

    def refuse_if_torn(self) -> None:
        """Raises OneBitError if a step was torn, until a checkpoint is loaded."""
        if self._torn_by:
            raise OneBitError(
                f"{self._torn_by}: parameters, momentum and compression errors may be of two steps, and differ between "
                "ranks. On every rank load a checkpoint, the model's and the optimizer's (load_state_dict), or end"
            )

    def _forget_step(self) -> None:
        """Drops what is under way."""
        self._in_flight = StepExchange(self._transport, self.stats, self._groups)

    def _full_precision_finite(self) -> bool:
        if not self.options.skip_nonfinite:
            return True
        return all_finite([p.grad for p in self.parameters() if p.grad is not None and not self.is_compressed(p)])

    def _step_uncompressed(self, full_precision_step: Callable[[], None]) -> None:
        """The optimizer's own step on the parameters that are not compressed."""
        hidden = [(p, p.grad) for bucket in self._all_buckets() for p in bucket.parameters]
        for p, _ in hidden:
            p.grad = None
        for group in self._optimizer.param_groups:
            self._rule.before_first_step(group, [self._states()[p] for p in group["params"] if p.grad is not None])
        self._steps_itself = True
        try:
            full_precision_step()
        finally:
            self._steps_itself = False
            for p, gradient in hidden:
                p.grad = gradient
        if not self._rule.counts_own_steps:
            for p in self.parameters():
                if p.grad is not None and not self.is_compressed(p):
                    self._states()[p]["step"] += 1

    def _end_step(self, stage: str) -> None:
        self.stats.end_step(stage, skipped=not self._finite)
        self._optimizer.param_groups[0][STEP] += self._finite
        self.stats.stage, self.stats.step = self.stage, self.step
        if not self._finite:
            self._report_skip()

    def _report_skip(self) -> None:
        in_a_row = self.stats.skipped_in_a_row
        if self._transport.rank == 0:
            notices.skipped(self.step + 1, in_a_row)
        if in_a_row >= self.options.max_skipped_steps:
            raise too_many_skips(in_a_row, self.step)

    # -- buckets -----------------------------------------------------------------------------------------------------

    def _all_buckets(self) -> list[CompressedBucket]:
        return [bucket for key in sorted(self._buckets) for bucket in self._buckets[key]]

    def _keyed(self, members: Sequence[tuple[Group, Tensor]], step: int | None) -> dict[BucketKey, list[Tensor]]:
        """Parameters by the key of their buckets; `step` is theirs when they are frozen now."""
        index_of = {id(group): i for i, group in enumerate(self._optimizer.param_groups)}
        keyed: dict[BucketKey, list[Tensor]] = {}
        for group, p in members:
            frozen_step = self._frozen_step_of(p) if step is None else step
            keyed.setdefault((index_of[id(group)], frozen_step, str(p.device)), []).append(p)
        return keyed

    def _wanted(self) -> dict[BucketKey, list[Tensor]]:
        """The compressed parameters by bucket key, from agreed state only."""
        groups = self._optimizer.param_groups
        return self._keyed([(group, p) for group in groups for p in group["params"] if self.is_compressed(p)], None)

    def _new_buckets(self, wanted: Mapping[BucketKey, list[Tensor]]) -> dict[BucketKey, list[CompressedBucket]]:
        """Allocates the buckets of all keys that are not built yet; changes nothing."""
        new: dict[BucketKey, list[CompressedBucket]] = {}
        for key, parameters in wanted.items():
            if key in self._buckets:
                continue
            index, step, device = key
            by_name = {self.names[p]: p for p in parameters}
            buckets = make_buckets(
                [(name, p.numel()) for name, p in by_name.items()],
                self._used_options,
                prefix=f"group{index}.step{step}.{device}",
            )
            group = self._optimizer.param_groups[index]
            new[key] = [self._new_bucket(b, [by_name[n] for n in b.parameters], group) for b in buckets]
        return new

    def _new_bucket(self, bucket: Bucket, parameters: Sequence[Tensor], group: Group) -> CompressedBucket:
        workspace = self._workspace_on(parameters[0].device)
        return CompressedBucket(bucket, parameters, group, self._transport, self._used_options, workspace, self._place)

    def _workspace_on(self, device: torch.device) -> Workspace:
        """Memory for a new bucket to work in."""
        shares = self._place is not None and device.type == "cpu"
        return Workspace(codec_for(device), self._transport if shares else None)

    @torch.no_grad()
    def expand_momentum(self) -> None:
        """Puts momentum that is kept as bits back into the optimizer's state, as float32, until the next step."""
        if self._steps_itself:
            return
        for bucket in self._all_buckets():
            if bucket.momentum is None:
                momentum = bucket.codec.zeros(bucket.bucket.num_elements)
                self._rule.decode_momentum(bucket, momentum, self._states())
                bucket.momentum = momentum
                for p, view in zip(bucket.parameters, bucket.views(momentum), strict=True):
                    self._states()[p][self._rule.momentum_key] = view

    @torch.no_grad()
    def _adopt(self, new: Mapping[BucketKey, list[CompressedBucket]]) -> None:
        """Moves momentum (and what holds dead coordinates) into new buckets, and any restored errors with them."""
        for buckets in new.values():
            for bucket in buckets:
                variance_key = self._rule.variance_key(bucket.group)
                assert bucket.momentum is not None
                for p, view in zip(bucket.parameters, bucket.views(bucket.momentum), strict=True):
                    state = self._states()[p]
                    if state[self._rule.momentum_key] is not None:
                        view.copy_(state[self._rule.momentum_key])
                    state[self._rule.momentum_key] = view
                    if variance_key is not None:
                        state[variance_key] = state[variance_key].float().contiguous()
                self._mark_live(bucket)
                self._restore_errors(bucket)
        self._buckets.update(new)
        self._bucket_of = {p: bucket for bucket in self._all_buckets() for p in bucket.parameters}

    def _mark_live(self, bucket: CompressedBucket) -> None:
        """Takes coordinates whose variance is zero out of the exchange, with dead="hold"."""
        variance_key = self._rule.variance_key(bucket.group)
        if bucket.exchange.live is None:
            return
        if variance_key is None:
            bucket.exchange.live = None
            return
        for p, live in zip(bucket.parameters, bucket.views(bucket.exchange.live), strict=True):
            live.copy_(self._states()[p][variance_key])

    def _build_buckets(self, *, restores: bool = False) -> None:
        """Buckets for parameters that came compressed: from a checkpoint, if it restores one, or by a broadcast."""
        wanted = self._wanted()
        if set(wanted) != set(self._buckets):
            for key in set(self._buckets) - set(wanted):
                del self._buckets[key]
            new = self._new_buckets(wanted)
            if not restores and any(self.step > step for _, step, _ in new):
                notices.errors_not_broadcast(self._transport.rank)
            self._adopt(new)
            self._count_elements()

    def _count_elements(self) -> None:
        trained = [p for p in self.parameters() if p.requires_grad]
        stats = self.stats
        stats.stage, stats.step = self.stage, self.step
        stats.compressed_elements = sum(p.numel() for p in trained if self.is_compressed(p))
        stats.full_precision_elements = sum(p.numel() for p in trained) - stats.compressed_elements
        stats.full_precision_names = tuple(self.names[p] for p in trained if not self.is_compressed(p))
        stats.frozen_step = max(self._first_frozen_step(), 0)
        stats.count_uncompressed(4 * sum(p.numel() for p in trained), self._transport.size)

    # -- agreement ---------------------------------------------------------------------------------------------------

    def _tell_once(self) -> None:
        if self._told:
            return
        self._told = True
        self._count_elements()
        if self._transport.rank != 0:
            return
        for pattern, nearest in patterns_without_match(list(self.names.values()), self.options):
            notices.pattern_without_match(pattern, nearest)
        if self._transport.size == 1:
            notices.one_rank()
            return
        if wide := [self.names[p] for p in self.parameters() if p.dtype == torch.float64 and p.requires_grad]:
            notices.kept_wide(wide)
        if not self._compressible():
            notices.nothing_to_compress(
                "every parameter is kept in full precision, by full_precision, min_elements or its type"
            )
        else:
            self._tell_stage()
            if self._place is not None:
                notices.hierarchical(self._place.num_hosts, self._place.local_size)
            elif self.options.hierarchical and self._transport.place.obstacle:
                notices.not_hierarchical(self._transport.place.obstacle)

    def _tell_stage(self) -> None:
        if self.stage == WARM_UP:
            notices.started(self.options.freeze_step, self._rule.memory(self._optimizer.param_groups[0]), self.stats)
        elif self.step > self._first_frozen_step():
            notices.resumed(self.step, self._first_frozen_step())

    def _static_fields(self) -> dict[str, Any]:
        parameters = [
            f"{self.names[p]} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}" for p in self.parameters()
        ]
        fields = static_fields(self.options, parameters, self._transport.size)
        fields["optimizer"] = type(self._rule).__name__
        fields["hosts of the hierarchical exchange"] = None if self._place is None else self._place.num_hosts
        return fields

    def _dynamic_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": self.step, "stage": self.stage}
        for (index, step, _), buckets in sorted(self._buckets.items()):
            fields[f"group {index} frozen at step {step}, first parameter"] = buckets[0].bucket.parameters[0]
        for i, group in enumerate(self._optimizer.param_groups):
            for name in self._rule.hyperparameters:
                value = group[name]
                fields[f"{name} of group {i}"] = [float(v) for v in value] if name == "betas" else float(value)
            for name in self._rule.switches:
                fields[f"{name} of group {i}"] = bool(group.get(name, name == "bias_correction"))
        if self.step == 0:
            fields[PARAMETERS] = functools.reduce(lambda crc, p: zlib.crc32(_bytes(p), crc), self.parameters(), 0)
        choice = self._optimizer.param_groups[0][CHOICE]
        fields |= {f"measured {name}": value for name, value in choice.items()}
        # a rank that measures waits for the others
        fields["first steps"] = min(self._steps_here, PROBE_STEP)
        if removed := self._removed():
            fields["parameters removed from param_groups"] = removed
        fields["parameters that are trained"] = "".join("01"[p.requires_grad] for p in self.parameters())
        return {**fields, **self._checksums}

    def _fields(self) -> dict[str, Any]:
        return {**self._static_fields(), **self._dynamic_fields()}

    def _start_agreement(self) -> None:
        if self._transport.size > 1:
            if self._static_digest is None:
                self._static_digest = digest(self._static_fields())
            self._agreement.start(digest({"static": self._static_digest.hex(), **self._dynamic_fields()}))

    def _finish_agreement(self) -> None:
        if self._transport.size > 1:
            self._agreement.finish(self._fields)
        if self._groups is not None:
            # not before: a rank that wants none would not come
            self._groups.connect()

    def _is_checked(self) -> bool:
        """True when what this step leaves is compared across ranks."""
        every = self.options.check_every
        return bool(every) and (self.step + 1) % every == 0

    def _take_checksum(self) -> None:
        self._set_checksums({})
        if not self._is_checked():
            return
        sample = 0
        for p in self.parameters():
            sample = zlib.crc32(_first_bytes(p), sample)
        self._set_checksums({PARAMETERS: sample})
        sample = 0
        for p in self.parameters():
            momentum = self._states()[p].get(self._rule.momentum_key)
            if momentum is not None and not self.is_compressed(p):
                sample = zlib.crc32(_first_bytes(momentum), sample)
        self._set_checksums({**self._checksums, "checksum of the momentum": sample})
        if self._buckets:
            checksum = 0
            for bucket in self._all_buckets():
                checksum = zlib.crc32(bucket.exchange.checksum_bytes(), checksum)
            self._set_checksums({**self._checksums, "checksum of the averaged momentum": checksum})

    # -- measuring ---------------------------------------------------------------------------------------------------

    @property
    def _num_peers(self) -> int:
        """Ranks that exchange bits with each other."""
        return self._transport.size if self._place is None else self._place.num_hosts

    @property
    def _used_options(self) -> CompressionOptions:
        return self.options.with_choice(self._optimizer.param_groups[0][CHOICE], self._num_peers)

    def _measure_when_due(self) -> None:
        """Collective, at the end of a step: once with these ranks."""
        self._steps_here += 1
        if self._steps_here == PROBE_STEP:
            self._measure()

    @torch.no_grad()
    def _measure(self) -> None:
        """Collective, once: measures the network and the kernels, and says whether compression pays."""
        compressible = [p for _, p in self._compressible()]
        is_wanted = self.options.measure and self._measurement is None
        if not is_wanted or self._transport.size == 1 or not compressible:
            return
        codec = codec_for(compressible[0].device)
        self._measurement = measure(self._transport, codec, self._transport.place, self._groups)
        self._choose()
        num_elements = sum(p.numel() for p in compressible)
        self.stats.plan = plan_run(self._measurement, num_elements, self._used_options)
        if self._transport.rank == 0:
            # a run that is resumed in the compression stage goes on as it was, whatever is measured now
            notices.measured(self.stats.plan, self.options if self._has_choice else self._used_options)

    @property
    def _has_choice(self) -> bool:
        """Whether a measurement among as many has decided what was left to it."""
        choice = self._optimizer.param_groups[0][CHOICE]
        return bool(choice) and bool(choice["size"] == self._num_peers)

    def _choose(self) -> None:
        """Lays down what a measurement decides, unless a checkpoint has brought it, or it is too late for it."""
        if self._measurement is None or self._has_choice or not self.options.is_open or self.stage == COMPRESSION:
            return
        num_elements = sum(p.numel() for _, p in self._compressible())
        chosen = choose(self._measurement, num_elements, self.options)
        self._optimizer.param_groups[0][CHOICE] = chosen.choice_of(self._num_peers)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the optimizer's own state: this rank's compression errors. Not collective."""
        self._keep_agreed_state()
        self._refuse_removed(together=False)
        self._build_buckets()
        return {
            "version": FORMAT_VERSION,
            "rule": type(self._rule).__name__,
            "rank": self._transport.rank,
            "size": self._transport.size,
            "shard": shard_key(self._place),
            "shared": self._errors_are_shared,
            "errors": {
                bucket.bucket.name: {
                    "parameters": list(bucket.bucket.parameters),
                    "sizes": list(bucket.bucket.sizes),
                    "worker_error": bucket.exchange.worker_error
                    if bucket.shared_error is None
                    else bucket.shared_error,
                    "worker_start": bucket.exchange.shard[0],
                    "hosts": None if self._place is None or self._errors_are_shared else self._place.num_hosts,
                    "server_error": bucket.exchange.server_error,
                    "server_start": bucket.exchange.own_chunk.start,
                }
                for bucket in self._all_buckets()
            },
        }

    @torch.no_grad()
    def synchronize_for_checkpoint(self) -> None:
        """Collective: afterwards any rank's checkpoint alone restores a run of any size, what is owed included."""
        self._prepare()
        if self._groups is not None:
            self._groups.connect()
        for bucket in self._all_buckets():
            shared = share_errors(bucket.exchange, self._transport, bucket.codec, self._groups)
            bucket.shared_error = shared if bucket.exchange.is_hierarchical else None
        self._errors_are_shared = True

    @torch.no_grad()
    def load(self, extra: dict[str, Any] | None, saved_states: Sequence[dict[str, Any] | None]) -> None:
        """Takes up a restored optimizer state. Not collective: buckets are built from the state as it now is.

        Args:
            extra: what `state` returned, or None for a plain optimizer's checkpoint.
            saved_states: the checkpoint's state of each parameter, as saved; torch casts it to the parameter's dtype.
        """
        self._buckets = {}
        self._restorable_errors = {}
        self._restores_shared = self._errors_are_shared = False
        self._find_hosts()
        self._forget_step()
        for p, saved in zip(self.parameters(), saved_states, strict=True):
            state = self._states()[p]
            for name, value in state.items():
                if isinstance(value, Tensor):
                    # torch hands over the checkpoint's own tensors: what we train with must not write into them
                    if saved and name != "step" and saved.get(FROZEN_STEP, NOT_FROZEN) != NOT_FROZEN:
                        value = saved[name].to(p.device, torch.float32)
                    state[name] = value.clone()
        self._take_up(extra, owed_by_parameter(extra["errors"], extra["size"]) if extra and extra["shared"] else {})

    @torch.no_grad()
    def move_to(
        self, transport: Transport[Tensor], *, gradient_scale: float, old: Mapping[str, Any] | None = None
    ) -> None:
        """Goes on in another world: other ranks, perhaps more or fewer. Not collective.

        Errors that were shared stay. Others belong to the old world: a rank that is now alone settles its part of them,
        on several ranks `share_owed` brings them back.

        Args:
            transport: of the new world.
            gradient_scale: as at construction.
            old: what `state` returned in the old world; by default what it returns now.
        """
        extra = self.state() if old is None else old
        self.expand_momentum()
        self.stats.give_up_step(self.stage)
        self._transport = transport
        self._gradient_scale = gradient_scale
        self._agreement = Agreement(transport, "agreement")
        self._steps_here, self._measurement, self.stats.plan = 0, None, None
        self._buckets = {}
        self._restorable_errors = {}
        self._restores_shared = False
        self._place = self._groups = None
        self._find_hosts()
        self._forget_step()
        if extra["shared"]:
            self._take_up(extra, owed_by_parameter(extra["errors"], extra["size"]))
        else:
            owed = owed_by_parameter(extra["errors"], extra["size"], torch.zeros) if transport.size == 1 else {}
            self._take_up(None, {name: part / extra["size"] for name, part in owed.items()})

    @torch.no_grad()
    def share_owed(self, errors: Mapping[str, Any], size: int, weight: float) -> None:
        """Collective: gives every rank the mean of `weight` times what the ranks owe; see `hvd_onebit.state`.

        Args:
            errors: this rank's, as `state` returned them, in a world of `size` ranks.
            size: ranks of that world.
            weight: 0 when this rank has no part in it.
        """
        self._prepare()
        owed = owed_by_parameter(errors, size, torch.zeros) if weight else {}
        for bucket in self._all_buckets():
            shared = share_owed(bucket.exchange, owed, weight, self._transport, bucket.codec)
            bucket.shared_error = shared if bucket.exchange.is_hierarchical else None
        self._errors_are_shared = True

    def _take_up(self, extra: Mapping[str, Any] | None, owed: Mapping[str, Tensor]) -> None:
        """Builds what a step needs from the optimizer's state, and from `extra`, what `state` returned somewhere.

        Args:
            extra: holds the errors to go on with, if they fit.
            owed: by parameter, the same on every rank: what is settled where compression ends.
        """
        self._torn_by = ""
        self.initialise_state()
        self._load_schedule(self._optimizer.param_groups[0][SCHEDULE])
        settled = self._thaw_if_early(owed)
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.dtype == torch.float64 and self.is_compressed(p):
                    self._thaw(group, p)  # saved by a float32 model, or by a version that rounded
        shared = bool(extra and extra["shared"])
        if extra and extra["errors"] and self.stage == COMPRESSION:
            here = (self._transport.rank, self._transport.size)
            self._restores_shared = self._errors_are_shared = shared
            if not shared and (extra["rank"], extra["size"]) != here:
                notices.dropped_errors(
                    f"saved by rank {extra['rank']} of {extra['size']}, restored on rank {here[0]} of {here[1]}"
                )
            elif not shared and extra.get("shard") != shard_key(self._place):
                notices.dropped_errors("saved by a hierarchical exchange over other hosts, or by one that is not")
            else:
                self._restorable_errors = dict(extra["errors"])
        elif extra and not settled and any(each["worker_error"] is not None for each in extra["errors"].values()):
            notices.dropped_errors("training goes on uncompressed")
        self._static_digest = None
        self._build_buckets(restores=True)
        self._restorable_errors = {}
        self._count_elements()
        self._told = False

    def _thaw_if_early(self, owed: Mapping[str, Tensor]) -> bool:
        """Back to warm-up when freeze_step now lies ahead, or when there is nobody to send to.

        Returns:
            True when what was owed is now in the momentum, on which training goes on.
        """
        first, step = self._first_frozen_step(), self.step
        later = isinstance(self.options.freeze_step, int) and self.options.freeze_step > step
        if first == NOT_FROZEN or not (later or self._transport.size == 1):
            return False
        settled = bool(owed)
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._states()[p]
                if self._frozen_step_of(p) == NOT_FROZEN:
                    continue
                if settled and (part := owed.get(self.names[p])) is not None:
                    settled = self._rule.settle(group, state, part.to(p.device).view(p.shape))
                self._thaw(group, p)
        if self._transport.rank == 0 and later:
            notices.back_to_warm_up(first, self.options.freeze_step, step)
        return settled

    def _thaw(self, group: Group, p: Tensor) -> None:
        """Back to full precision: the state of a parameter that was compressed."""
        state = self._states()[p]
        self._rule.thaw(group, state)
        for name in self._rule.tensors(group):
            if isinstance(state.get(name), Tensor):
                state[name] = state[name].to(p.dtype).clone()
        state[FROZEN_STEP], state[VARIANCE_STEPS] = NOT_FROZEN, 0

    def _restore_errors(self, bucket: CompressedBucket) -> None:
        if self._restores_shared and self._restorable_errors:
            saved_parts = {
                name: (each["parameters"], each["sizes"], each["worker_error"])
                for name, each in self._restorable_errors.items()
                if each["worker_error"] is not None
            }
            if bucket.exchange.is_hierarchical and bucket.exchange.worker_error is not None:
                bucket.shared_error = bucket.codec.zeros(bucket.bucket.num_elements)
            missing = take_shared_errors(bucket.exchange, saved_parts, bucket.shared_error)
            if missing:
                notices.dropped_errors(f"none of this size were saved for {', '.join(missing[:8])}")
            return
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


class CompressionEngine(Engine):
    """Optimizers that warm up in full precision, freeze, and then send their momentum (1-bit Adam, LAMB, SGD)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gradients_written = False
        self._was_synchronized = False  # by the caller, not by `step`
        self._samples: list[float] = []
        self._started: set[CompressedBucket] = set()  # looked up only, never iterated
        self._arrived: set[Tensor] = set()
        self._workspaces: dict[torch.device, Workspace] = {}
        super().__init__(*args, **kwargs)
        if self.options.freeze_step == 0 and self.step == 0 and self._transport.size > 1:
            self._freeze(self._compressible(), 0, together=False)

    def _workspace_on(self, device: torch.device) -> Workspace:
        if self._place is not None:
            return super()._workspace_on(device)  # the other ranks of the host read it when they get there
        # one for all buckets: each is compressed, and decoded, at once
        if device not in self._workspaces:
            self._workspaces[device] = super()._workspace_on(device)
        return self._workspaces[device]

    def gradient_is_ready(self, p: Tensor) -> None:
        """Called by backward for a compressed parameter: a bucket that is now full starts on its way."""
        if not self.options.overlap or (self._groups is not None and not self._groups.is_connected):
            return
        if not self._arrived:
            if self._removed():
                return  # for `begin` to tell
            self._build_buckets()
        self._arrived.add(p)
        bucket = self._bucket_of[p]
        if bucket not in self._started and self._arrived.issuperset(bucket.parameters):
            self._start(bucket)
        self._in_flight.progress()

    def begin(self) -> None:
        self._prepare()
        self._start_agreement()
        self._gradients_written = False
        if self._groups is not None and not self._groups.is_connected:
            self._finish_agreement()  # in the first step
            self._start_agreement()
        for bucket in self._all_buckets():
            if bucket not in self._started:
                self._start(bucket)
        self._started.clear()
        self._arrived.clear()
        self._finish_agreement()

    def _forget_step(self) -> None:
        super()._forget_step()
        self._started.clear()
        self._arrived.clear()

    @torch.no_grad()
    def _start(self, bucket: CompressedBucket) -> None:
        self._started.add(bucket)
        gradient_scale = self._gradient_scale / self._loss_scale()

        def gather() -> Tensor:
            bucket.gather(gradient_scale)
            self._rule.prepare(bucket, self._states())
            return bucket.values

        beta1 = self._rule.momentum_decay(bucket.group)
        if beta1 is None:
            inputs = Inputs(gather)
        else:
            inputs = Inputs(gather, bucket.momentum, beta1, from_kept=bucket.momentum is None)
        self._in_flight.start(bucket.exchange, inputs)

    @torch.no_grad()
    def finish(self) -> None:
        arrived = self._in_flight.finish()
        self._finite = self._full_precision_finite() and arrived
        if not self._finite:
            self._in_flight.rollback()
            self._tell_own_fault()

    def _tell_own_fault(self) -> None:
        """Before gradients are overwritten: a mean does not tell whose fault it is."""
        of_this_rank = [p for bucket in self._all_buckets() for p in bucket.parameters if not all_finite([p.grad])]
        if of_this_rank:
            names = [self.names[p] for p in of_this_rank]
            notices.not_finite(self.step + 1, self._transport.rank, names, self.stats.skipped_in_a_row + 1)

    @torch.no_grad()
    def write_gradients(self) -> None:
        if self._finite:
            self._in_flight.keep_inputs()
        self._was_synchronized = True
        self._write_gradients()
        self._samples = self._gradient_samples()

    def _gradient_samples(self) -> list[float]:
        """A few of the gradients as they were written, to see what was done to them."""
        buckets = self._all_buckets()[:4]
        return [
            float(p.grad.reshape(-1)[0]) for b in buckets for p in b.parameters[:4] if p.grad is not None and p.numel()
        ]

    def _check_unscaled(self) -> None:
        """Raises when the gradients were divided by a power of two: a GradScaler that we do not know of did that."""
        if not self._gradients_written or self._loss_scale() != 1.0:
            return
        now = self._gradient_samples()
        factors = {a / b for a, b in zip(now, self._samples, strict=False) if b}
        if len(factors) == 1 and 0.0 < (factor := factors.pop()) <= _SCALER_FACTOR and math.frexp(factor)[0] == 0.5:
            raise OneBitError(
                f"gradients were multiplied by {factor:g} between synchronize() and step(): a GradScaler, it seems. "
                "Pass it as DistributedOptimizer(..., grad_scaler=scaler), so that gradients are unscaled before they "
                "enter the momentum"
            )

    def _write_gradients(self) -> None:
        for bucket in self._all_buckets():
            if self._finite:
                self._decode(bucket)
                scale = self._loss_scale()
                if scale != 1.0:
                    bucket.values.mul_(scale)  # as backward would have left it: whoever scaled will unscale
            else:
                # what a scaler looks for, and clipping does not hide
                bucket.values.fill_(float("inf"))
            for p, view in zip(bucket.parameters, bucket.views(bucket.values), strict=True):
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(view)
        self._gradients_written = True

    @torch.no_grad()
    def apply(self, full_precision_step: Callable[[], None]) -> None:
        stage = COMPRESSION if self._buckets else WARM_UP
        if self._finite:
            self._check_unscaled()
            if self._gradients_written:
                self.expand_momentum()
            self._step_uncompressed(full_precision_step)
            for bucket in self._all_buckets():
                self._update(bucket)
            self._take_checksum()
            self.stats.rounds += bool(self._buckets)
            self._commit()
        self._end_step(stage)
        self._measure_when_due()
        if self._finite and self._transport.size > 1:
            self._freeze_when_due()

    def _decode(self, bucket: CompressedBucket) -> None:
        bucket.exchange.average(bucket.values)
        self._rule.restore(bucket, bucket.values, self._states())

    def _update(self, bucket: CompressedBucket) -> None:
        decoded = False
        momenta: list[Tensor] | None = None
        for i, p in enumerate(bucket.parameters):
            state = self._states()[p]
            state["step"] += 1
            if not self._gradients_written and self._rule.fuses(p) and p.requires_grad:
                self._rule.apply_from_bits(bucket, i, state)
                continue
            if self._gradients_written and p.grad is not None:
                averaged = p.grad.float()
            else:
                if not decoded:
                    self._decode(bucket)
                    decoded = True
                averaged = bucket.views(bucket.values)[i]
            if momenta is None:
                momenta = bucket.views(self._rule.momentum_of(bucket, self._states()))
            self._rule.apply(bucket.group, p, state, momenta[i], averaged, self.names[p], self.stats)

    def _commit(self) -> None:
        """The momentum is now what the bits say, unless the user has had a hand in it."""
        keeps = not self._gradients_written
        self._in_flight.commit(keep=keeps)
        for bucket in self._all_buckets() if keeps else []:
            bucket.momentum = None
            for p in bucket.parameters:
                self._states()[p].pop(self._rule.momentum_key, None)

    # -- freezing ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _freeze_when_due(self) -> None:
        waiting = [(group, p) for group, p in self._compressible() if not self.is_compressed(p) and self._states()[p]]
        if not waiting:
            return
        step, first = self.step, self._first_frozen_step()
        automatic = self._schedule.is_automatic
        required = 0 if automatic else int(self.options.freeze_step)
        if first == NOT_FROZEN:
            lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
            has_variance = self._rule.variance_key(self._optimizer.param_groups[0]) is not None
            due = self._schedule.should_freeze(
                step, lr, (lambda: self._variance_norm(waiting)) if has_variance else None
            )
            if automatic:
                self._optimizer.param_groups[0][SCHEDULE] = self._schedule_state()
            if not due:
                return
        elif automatic:
            required = first
        ready = [(group, p) for group, p in waiting if self._has_settled(group, p, required)]
        if ready:
            self._measure()
            self._choose()
            self._freeze(ready, step)

    def _has_settled(self, group: Group, p: Tensor, required: int) -> bool:
        state = self._states()[p]
        variance_key = self._rule.variance_key(group)
        if variance_key is not None:
            # by a reduction: memory must not run out on one rank before ranks tell each other of it
            largest = float(torch.linalg.vector_norm(state[variance_key], ord=math.inf))
            if not math.isfinite(largest):
                return False  # squares of huge gradients: nothing to freeze
            if largest == 0.0:
                # a layer that has not been trained yet: its own warm-up starts with its first gradient
                state[WARM_SINCE] = int(state["step"])
                return False
        return int(state["step"]) - int(state[WARM_SINCE]) >= required

    def _variance_norm(self, waiting: Sequence[tuple[Group, Tensor]]) -> float:
        """||v||_1 over what will be compressed, its bias corrected."""
        total = 0.0
        for group, p in waiting:
            state = self._states()[p]
            steps, key = int(state["step"]), self._rule.variance_key(group)
            if steps and key is not None:
                correction = bias_correction(group["betas"][1], steps) if group.get("bias_correction", True) else 1.0
                total += float(state[key].sum(dtype=torch.float64)) / correction
        return total

    @torch.no_grad()
    def _freeze(self, ready: Sequence[tuple[Group, Tensor]], step: int, *, together: bool = True) -> None:
        """Allocates everything, then switches. Collective, if `together`: ranks fail at it together, too.

        Raises:
            OneBitError: some rank could not; nothing has changed.
        """
        failure = ""
        try:
            frozen = [self._floored(group, p) for group, p in ready]
            variances = [variance for variance, _, _ in frozen]
            changes = self._rule.frozen_state(ready, self._states(), variances)
            new = self._new_buckets(self._keyed(ready, step))
            for bucket in (each for buckets in new.values() for each in buckets):
                _ = bucket.values  # what all buckets share is allocated when it is first asked for
            checksum = 0
            for variance in variances:
                if variance is not None and variance.numel():
                    checksum = zlib.crc32(variance.cpu().view(-1).view(torch.uint8).numpy().data, checksum)
        except Exception as error:
            if not together:
                raise
            failure = f"{type(error).__name__}: {error}"[:200]
        if together:
            raise_if_any_failed(self._transport, failure, what=FREEZE_FAILED, name="freeze")
        for (_, p), change in zip(ready, changes, strict=True):
            state = self._states()[p]
            state.update(change)
            state[FROZEN_STEP] = step
            state[VARIANCE_STEPS] = int(state["step"])
        self._adopt(new)
        self.stats.dead_elements += sum(dead for _, dead, _ in frozen)
        self.stats.floored_elements += sum(floored for _, _, floored in frozen)
        self._set_checksums({**self._checksums, "checksum of the frozen variance": checksum})
        self._count_elements()
        if self._transport.rank == 0:
            has_variance = any(self._rule.variance_key(group) is not None for group, _ in ready)
            notices.frozen(self.stats, has_variance=has_variance, lr_rises=self._schedule.lr_rises)
            scales = self._loss_scale() != 1.0  # then it is synchronised to be unscaled
            if self._was_synchronized and not scales and self.options.local_clip_norm is None:
                notices.clipping_changes(self.step)

    def _floored(self, group: Group, p: Tensor) -> tuple[Tensor | None, int, int]:
        key = self._rule.variance_key(group)
        return (None, 0, 0) if key is None else floor_variance(self._states()[p][key], self.options)


def floor_variance(variance: Tensor, options: CompressionOptions) -> tuple[Tensor, int, int]:
    """A float32, contiguous copy with the floor applied (or not, with dead="hold"); how many were dead, and lifted."""
    # on the host, whatever the device: one order of summation, so that ranks agree to the bit
    host = variance.detach().float().contiguous().cpu().numpy()
    frozen, dead, floored = frozen_variance(host, options)
    return torch.from_numpy(frozen).to(variance.device), dead, floored


def _first_bytes(tensor: Tensor) -> bytes:
    """Enough of a tensor to see that replicas have parted, little enough to cost nothing."""
    return tensor.detach().reshape(-1)[:4096].float().cpu().numpy().tobytes()


def _bytes(p: Tensor) -> Any:
    # bfloat16 has no NumPy type; bits are bits
    flat = p.detach().reshape(-1).cpu().contiguous()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def all_finite(gradients: Sequence[Tensor | None]) -> bool:
    """True when no gradient holds NaN or infinity."""
    dense = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not dense:
        return True
    return bool(
        torch.isfinite(torch.stack([each.float().cpu() for each in torch._foreach_norm(dense, float("inf"))])).all()
    )
