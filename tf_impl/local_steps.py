"""0/1 Adam: local steps between synchronisations, a variance that is updated ever more rarely.

Lu et al. 2022, arXiv 2202.06009, algorithm 1. Where we differ from the paper: in a step that updates the variance, the
update comes before its use, since the first step would divide by zero; the variance is corrected by its number of
updates, and floored (or held) as in 1-bit Adam; weight decay acts on the parameters and on the point they were last
synchronised at, and stays out of what is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_onebit import notices
from hvd_onebit.errors import OneBitError, stuck
from hvd_onebit.rules import AdamStep, bias_correction, denominator
from hvd_onebit.schedule import Rounds, RoundSchedule, can_divide
from hvd_onebit.stage import FROZEN_STEP, VARIANCE_STEPS, first_frozen_step, variance_threshold
from hvd_onebit.stats import COMPRESSION, ring_allreduce_bytes
from hvd_onebit.tensorflow.buckets import Inputs
from hvd_onebit.tensorflow.engine import CompressionEngine, Outcome, flat_tensor, pack_schedule, unpack_schedule
from hvd_onebit.tensorflow.rules import AdamRule, Moment, native
from hvd_onebit.tensorflow.transport import on_host

__all__ = ["LocalStepsEngine", "LocalStepsRule"]

Array = npt.NDArray[Any]

# places in the variable that holds the rounds; all 0 in a fresh one
_UPDATES, _NEXT, _FROZEN_STEP, _FROZEN_LR, _LAST_SYNC, _IS_FROZEN, _RATE_SUM = range(7)
_LENGTH = 7


@dataclass(frozen=True)
class _State:
    """What all ranks have in common, as tensors."""

    step: tf.Tensor
    lr: tf.Tensor
    table: tf.Tensor
    rounds: tf.Tensor
    schedule: tf.Tensor
    floors: tf.Tensor


@dataclass(frozen=True)
class _Plan:
    """What this step is going to do, the same on every rank; scalars, but for `numbers`."""

    variance_due: tf.Tensor
    sync_due: tf.Tensor
    exchanges: tf.Tensor
    """A synchronisation is due and somebody may have moved."""
    starts: tf.Tensor
    """All ranks are equal: whatever the parameters are now, they are the anchor."""
    takes_checksum: tf.Tensor
    rate_sum: tf.Tensor
    """The sum of learning rates since the last synchronisation, this step's included: float32."""
    numbers: tf.Tensor
    """AdamStep's fields, float32, one row a compressible variable."""


@dataclass(frozen=True)
class _Local:
    """One variable after this rank's own step, but for its place: flat float32."""

    index: int
    parameter: tf.Tensor
    momentum: tf.Tensor
    distance: tf.Tensor
    accumulated: tf.Tensor
    anchor: tf.Tensor
    root: tf.Tensor
    moving: tf.Tensor
    decay: tf.Tensor | None


_OPTIONS = ("var_update_scaler", "local_step_scaler", "local_step_clipper")


class LocalStepsRule(AdamRule):
    """0/1 Adam's numbers: Adam's. Between two synchronisations the momentum is each rank's own."""

    keeps_momentum = False

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), **{name: getattr(self._optimizer, name) for name in _OPTIONS}}


class LocalStepsEngine(CompressionEngine):
    """0/1 Adam over the buckets that the other optimizers use. A step in which no round is due sends nothing.

    What belongs to a rank, but is needed to go on between two synchronisations, lies in the optimizer's variables too:
    the point of the last synchronisation (the anchor, the same on all ranks) and the sum of lr*momentum since then.
    """

    def __init__(self, optimizer: Any, *args: Any, **how: Any) -> None:
        super().__init__(optimizer, *args, **how)
        with tf.init_scope():
            self.rounds = optimizer.add_variable((_LENGTH,), dtype="float64", name="onebit_rounds")
            # the least variance that is used, by variable
            self.floors = optimizer.add_variable((len(self._variables),), dtype="float32", name="onebit_floors")
        self.anchors = self._beside_variables("onebit_anchor")
        self.accumulated = self._beside_variables("onebit_accumulated")

    def _enter_world(self, *args: Any) -> None:
        super()._enter_world(*args)
        self._skipped_locally = 0  # in a row
        self._frozen_checksum: int | None = None  # until it is compared
        self._full_precision_bytes = sum(self._allreduce_bytes[i] for i in self._in_full_precision())
        if self._takes_local_steps:
            self.stats.stage = COMPRESSION
            self._count_elements(self._is_compressed())

    def _beside_variables(self, name: str) -> dict[int, Any]:
        made = {}
        for i in self._compressible:
            v = self._variables[i]
            with tf.init_scope(), tf.device(v.device):
                made[i] = self._optimizer.add_variable(tuple(v.shape), dtype="float32", name=f"{name}_{i}")
        return made

    @property
    def own_variables(self) -> list[Any]:
        beside = [*self.anchors.values(), *self.accumulated.values()]
        return [*super().own_variables, self.rounds, self.floors, *beside]

    def _has_errors(self, table: Array) -> bool:
        return self._takes_local_steps

    def _has_compressed(self, step: int, table: Array) -> bool:
        return bool(self.rounds.numpy()[_LAST_SYNC])

    @property
    def _takes_local_steps(self) -> bool:
        return self.transport.size > 1 and bool(self._compressible)

    def _is_compressed(self) -> Array:
        return np.isin(np.arange(len(self._variables)), self._compressible)

    def _in_full_precision(self) -> list[int]:
        return [int(i) for i in np.flatnonzero(~self._is_compressed())]

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, gradients: Sequence[tf.Tensor], held: Sequence[int] = ()) -> Outcome:
        """One update from this rank's gradients, or none. Collective in steps with a round.

        Raises:
            ValueError: some variables are held: between two synchronisations their values differ from rank to rank.
            OneBitError: ranks disagree, or gradients were not finite for too many steps in a row; the same on every
                rank. Inside a graph TensorFlow raises tf.errors.UnknownError with the same text.
        """
        if not self._takes_local_steps:
            return super().step(gradients, held)
        if held:
            names = ", ".join(self._names[i] for i in held[:8])
            raise ValueError(
                f"0/1 Adam was built on variables that apply() was not given ({names}), and cannot leave them out: "
                "ranks may be between two synchronisations. Train them with an optimizer of their own, or compile the "
                "model again with a new one after a change of layer.trainable."
            )
        self._tell_once()
        own = [native(v) for v in (self.table, self.rounds, self.schedule, self.floors)]
        lr = tf.cast(tf.convert_to_tensor(native(self._optimizer.learning_rate)), tf.float32)
        state = _State(
            tf.identity(native(self._optimizer.iterations)), tf.reshape(lr, []), *(tf.identity(v) for v in own)
        )
        plan = self._plan(state)
        full = self._in_full_precision()
        communicates = plan.variance_due | plan.sync_due | bool(full)
        agreed = tf.cond(communicates, lambda: self._agree_and_go_on(state), lambda: tf.constant(True))
        with tf.control_dependencies([agreed]):
            gradients = self._optimizer.clip(gradients)
            means = self._allreduce([gradients[i] for i in full], full)
            variances, floors, variance_is_finite = self._updated_variances(plan, state, gradients)
            local, is_finite_here = self._step_locally(plan, state, gradients, variances, floors)
            goes_on = variance_is_finite & self._all_finite(means)

            def commit() -> bool:
                tf.cond(plan.variance_due, lambda: self._assign_variances(variances, floors), lambda: False)
                self._optimizer.plain_update(means, [self._variables[i] for i in full], clip=False)
                self._assign_rounds(plan, state)
                return True

            moved = tf.cond(goes_on, lambda: self._move(plan, local), lambda: False)
            tf.cond(moved, commit, lambda: False)
        look = self._count(plan, state, goes_on, moved, is_finite_here, communicates)
        tf.cond(look, lambda: self._freeze_when_it_has_settled(state, variances), lambda: False)
        return Outcome.of(moved, False, state.step, state.lr)

    def _plan(self, state: _State) -> _Plan:
        flags, rate_sum, numbers = on_host(
            self._make_plan,
            [state.step, state.lr, state.table, state.rounds],
            [tf.bool, tf.float32, tf.float32],
            stateful=False,
        )
        variance_due, sync_due, exchanges, starts, takes_checksum = tf.unstack(tf.ensure_shape(flags, [5]))
        return _Plan(
            variance_due=variance_due,
            sync_due=sync_due,
            exchanges=exchanges,
            starts=starts,
            takes_checksum=takes_checksum,
            rate_sum=tf.ensure_shape(rate_sum, []),
            numbers=tf.ensure_shape(numbers, [len(self._compressible), 4]),
        )

    def _make_plan(self, step: Any, lr: Any, table: Array, rounds: Array) -> tuple[Any, Any, Any]:
        now, every = int(step) + 1, self.options.check_every
        due = self._rounds_of(rounds).due(now, float(lr))
        numbers = self._numbers(now, float(lr), table, due)
        rate_sum = _rate_sum(rounds, numbers)
        takes_checksum = bool(every) and now // every != int(rounds[_LAST_SYNC]) // every
        starts = rounds[_RATE_SUM] == 0.0
        rows = [(n.step_size, n.eps, n.variance_correction, n.decay) for n in numbers]
        flags = [due.variance, due.sync, due.sync and can_divide(rate_sum), starts, takes_checksum]
        return np.array(flags), np.float32(rate_sum), np.array(rows, np.float32)

    def _numbers(self, now: int, lr: float, table: Array, due: Rounds) -> list[AdamStep]:
        used = table.copy()
        used[FROZEN_STEP] = now  # corrected by the updates that are counted, from the first step on
        for i in self._compressible:
            used[VARIANCE_STEPS, i] = _variance_steps(table, i, now - 1) + due.variance
        moment = Moment(used, np.zeros((0, len(self._variables))), now - 1, lr)
        return [self.rule.numbers(i, moment) for i in self._compressible]

    def _updated_variances(
        self, plan: _Plan, state: _State, gradients: Sequence[tf.Tensor]
    ) -> tuple[dict[int, tf.Tensor], tf.Tensor, tf.Tensor]:
        """Collective where it is due: one full-precision round; whether the mean was finite."""
        current = {i: flat_tensor(self.rule.variance_of(i)) for i in self._compressible}

        def update() -> list[tf.Tensor]:
            flat = [tf.concat([flat_tensor(gradients[i]) for i in bucket.members], 0) for bucket in self._buckets]
            means = self.transport.allreduce(flat, names=[f"{bucket.bucket.name}.variance" for bucket in self._buckets])
            new = dict(current)
            for bucket, mean in zip(self._buckets, means, strict=True):
                for i, g in zip(bucket.members, tf.split(mean, list(bucket.bucket.sizes)), strict=True):
                    coupled = self._optimizer.coupled_weight_decay(self._variables[i])
                    if coupled:
                        # all ranks are equal as long as the variance is live
                        g = g + flat_tensor(self._variables[i]) * np.float32(coupled)
                    beta2 = self.rule.memory
                    new[i] = current[i] * np.float32(beta2) + tf.square(g) * np.float32(1.0 - beta2)
            finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(mean)) for mean in means]))
            floors = on_host(self._floors_of, [new[i] for i in self._compressible], tf.float32, stateful=False)
            return [finite, tf.ensure_shape(floors, [len(self._variables)]), *(new[i] for i in self._compressible)]

        def keep() -> list[tf.Tensor]:
            return [tf.constant(True), state.floors, *(current[i] for i in self._compressible)]

        finite, floors, *variances = tf.cond(plan.variance_due, update, keep)
        return dict(zip(self._compressible, variances, strict=True)), floors, finite

    def _floors_of(self, *variances: Any) -> Array:
        floors = np.zeros(len(self._variables), np.float32)
        for i, variance in zip(self._compressible, variances, strict=True):
            floors[i] = variance_threshold(variance, self.options)
        return floors

    def _step_locally(
        self,
        plan: _Plan,
        state: _State,
        gradients: Sequence[tf.Tensor],
        variances: dict[int, tf.Tensor],
        floors: tf.Tensor,
    ) -> tuple[dict[int, _Local], tf.Tensor]:
        """Every rank's own step; a rank whose gradient is not finite adds nothing to its momentum this once."""
        inputs = [self._inputs(bucket, gradients, state.step, state.lr, state.table) for bucket in self._buckets]
        finite = self._all_finite([g for each in inputs for g in each.gradients])
        local = {}
        for bucket, each in zip(self._buckets, inputs, strict=True):
            for k, i in enumerate(bucket.members):
                local[i] = self._local(plan, i, k, each, finite, variances[i], floors[i])
        return local, finite

    def _local(
        self, plan: _Plan, index: int, k: int, inputs: Inputs, finite: tf.Tensor, variance: tf.Tensor, floor: tf.Tensor
    ) -> _Local:
        step_size, eps, correction, decay = tf.unstack(plan.numbers[self._compressible.index(index)])
        x, old, beta1 = inputs.parameters[k], inputs.momenta[k], self.rule.sent_momentum
        momentum = tf.where(finite, old * np.float32(beta1) + inputs.gradients[k] * np.float32(1.0 - beta1), old)
        distance = momentum * step_size
        anchor = tf.where(plan.starts, x, flat_tensor(self.anchors[index]))
        decays = bool(self.rule.weight_decays[index])
        numbers: Any = AdamStep(step_size, eps, correction, 1.0)
        moving = self._moving(variance, floor)
        return _Local(
            index=index,
            parameter=x,
            momentum=momentum,
            distance=distance,
            accumulated=flat_tensor(self.accumulated[index]) + distance,
            anchor=anchor * decay if decays else anchor,
            root=self._root(variance, floor, moving, numbers),
            moving=moving,
            decay=decay if decays else None,
        )

    def _root(self, variance: tf.Tensor, floor: tf.Tensor, moving: tf.Tensor, numbers: AdamStep) -> tf.Tensor:
        """What a distance is divided by."""
        root = denominator(tf.maximum(variance, floor), numbers, tf.sqrt)
        return root if self._holds else tf.where(moving, root, np.float32(np.inf))

    @property
    def _holds(self) -> bool:
        return bool(self.options.dead == "hold")

    def _moving(self, variance: tf.Tensor, floor: tf.Tensor) -> tf.Tensor:
        """Which coordinates are trained: bool, of the variance's shape, or of none for all or nothing of it."""
        if self._holds:
            return variance != 0
        # without any variance there is nothing to lift: bits of its block's would throw the tensor far away
        return floor > 0 if self.options.variance_floor else tf.constant(True)

    # -- moving ------------------------------------------------------------------------------------------------------

    def _move(self, plan: _Plan, local: dict[int, _Local]) -> tf.Tensor:
        """Moves the parameters, by this rank's own step or to where all ranks meet: False if that was not finite."""

        def by_itself() -> bool:
            for each in local.values():
                decayed = each.parameter if each.decay is None else each.parameter * each.decay
                self._assign(each, decayed - each.distance / each.root, each.momentum)
                self.accumulated[each.index].assign(tf.reshape(each.accumulated, self._shape(each.index)))
                self.anchors[each.index].assign(tf.reshape(each.anchor, self._shape(each.index)))
            return True

        return tf.cond(plan.exchanges, lambda: self._synchronise(plan, local), by_itself)

    def _synchronise(self, plan: _Plan, local: dict[int, _Local]) -> tf.Tensor:
        """Collective: averages what the ranks have done since the last time; all are equal again, bit for bit."""
        sent = [
            bucket.exchange_values(
                [local[i].accumulated for i in bucket.members], [local[i].moving for i in bucket.members]
            )
            for bucket in self._buckets
        ]

        def meet() -> bool:
            for bucket, message in zip(self._buckets, sent, strict=True):
                means = bucket.averages(message, plan.takes_checksum)
                for i, mean in zip(bucket.members, means, strict=True):
                    each = local[i]
                    x = self._assign(each, each.anchor - mean / each.root, mean / plan.rate_sum)
                    self.accumulated[i].assign(tf.zeros(self._shape(i)))
                    self.anchors[i].assign(x)
            return True

        def rollback() -> bool:
            for bucket, message in zip(self._buckets, sent, strict=True):
                bucket.rollback(message)
            return False

        return tf.cond(tf.reduce_all(tf.stack([each.finite for each in sent])), meet, rollback)

    def _assign(self, local: _Local, moved: tf.Tensor, momentum: tf.Tensor) -> tf.Tensor:
        """Writes momentum and parameter; the parameter as it now is, in float32."""
        variable, where = self._variables[local.index], self.rule.momentum_of(local.index)
        if self._holds:
            moved = tf.where(local.moving, moved, local.parameter)
        x = tf.cast(tf.reshape(moved, variable.shape), variable.dtype)
        variable.assign(x)
        where.assign(tf.cast(tf.reshape(momentum, where.shape), where.dtype))
        return tf.cast(x, tf.float32)

    def _shape(self, index: int) -> Any:
        return self._variables[index].shape

    def _assign_variances(self, variances: dict[int, tf.Tensor], floors: tf.Tensor) -> bool:
        for i, new in variances.items():
            variable = self.rule.variance_of(i)
            variable.assign(tf.cast(tf.reshape(new, variable.shape), variable.dtype))
        self.floors.assign(floors)
        return True

    def _assign_rounds(self, plan: _Plan, state: _State) -> None:
        given = [state.step, state.lr, state.table, state.rounds, plan.exchanges]
        table, rounds = on_host(self._advance, given, [tf.int64, tf.float64], stateful=False)
        native(self.table).assign(tf.ensure_shape(table, state.table.shape))
        native(self.rounds).assign(tf.ensure_shape(rounds, state.rounds.shape))

    def _advance(self, step: Any, lr: Any, table: Array, rounds: Array, exchanges: Any) -> tuple[Array, Array]:
        now = int(step) + 1
        schedule = self._rounds_of(rounds)
        due = schedule.due(now, float(lr))
        schedule.made(now, due)
        rate_sum = 0.0 if exchanges else _rate_sum(rounds, self._numbers(now, float(lr), table, due))
        table = table.copy()
        if due.variance:
            for i in self._compressible:
                table[VARIANCE_STEPS, i] = _variance_steps(table, i, now - 1) + 1
        return table, _pack_rounds(schedule, rate_sum)

    def _rounds_of(self, packed: Array) -> RoundSchedule:
        rounds = RoundSchedule(**{name: getattr(self._optimizer, name) for name in _OPTIONS})
        rounds.load(
            {
                "variance": {"updates": packed[_UPDATES], "next": packed[_NEXT]},
                "sync": {
                    "frozen_step": packed[_FROZEN_STEP],
                    "frozen_lr": packed[_FROZEN_LR],
                    "last": packed[_LAST_SYNC],
                },
                "variance_is_live": not packed[_IS_FROZEN],
            }
        )
        return rounds

    # -- agreement ---------------------------------------------------------------------------------------------------

    @property
    def _is_stuck(self) -> bool:
        return self._skipped_locally >= self.options.max_skipped_steps

    def _agree_and_go_on(self, state: _State) -> tf.Tensor:
        """Collective: compares the ranks' state; raises too when all have been without gradients for too long."""

        def check() -> Any:
            if self._is_stuck:
                with self._logged():
                    raise OneBitError(stuck(self.options.max_skipped_steps))
            return np.bool_(True)

        with tf.control_dependencies([self._agree(state.step, state.lr, state.table)]):
            return tf.ensure_shape(on_host(check, [], tf.bool), [])

    def _dynamic_fields(self, step: Any, lr: Any, table: Any) -> dict[str, Any]:
        # a rank that could not use its gradients for long stops all of them at the next round
        is_stuck = {stuck(self.options.max_skipped_steps): True} if self._is_stuck else {}
        frozen = {} if self._frozen_checksum is None else {"checksum of the frozen variance": self._frozen_checksum}
        return {**super()._dynamic_fields(step, lr, table), "stage": self.stats.stage, **frozen, **is_stuck}

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _count(
        self,
        plan: _Plan,
        state: _State,
        goes_on: tf.Tensor,
        moved: tf.Tensor,
        is_finite_here: tf.Tensor,
        communicates: tf.Tensor,
    ) -> tf.Tensor:
        """Counts the step; True when the variance may freeze."""
        done = [plan.variance_due, plan.exchanges, goes_on, moved, is_finite_here, communicates]
        given = [tf.stack(done), state.step, state.lr, state.table, state.rounds, state.schedule]
        return tf.ensure_shape(on_host(self._count_local_step, given, tf.bool), [])

    def _count_local_step(self, done: Any, step: Any, lr: Any, table: Array, rounds: Array, schedule: Array) -> Any:
        self._refuse_if_ended()
        self.transport.watch.end()
        self._forget_shared()
        variance_due, exchanges, goes_on, moved, is_finite_here, communicates = (bool(each) for each in done)
        stats, now = self.stats, int(step) + 1
        if communicates:
            self._frozen_checksum = None  # it has been compared
        stats.count(self._full_precision_bytes)
        if variance_due:
            stats.count(sum(self._variance_bytes(bucket.bucket.num_elements) for bucket in self._buckets))
        if exchanges and goes_on:
            self._count_exchange()
        stats.end_step(COMPRESSION, skipped=not moved)
        stats.stage, stats.step = COMPRESSION, int(step) + moved
        stats.frozen_step = first_frozen_step(table)
        self._measure_when_due()
        if not moved:
            self._report_skip(int(step))
            return np.bool_(False)
        stats.rounds += exchanges
        stats.variance_updates += variance_due
        self._skipped_locally = 0 if is_finite_here else self._skipped_locally + 1
        if not is_finite_here:
            stats.steps_skipped += 1
            notices.skipped_locally(now, self.transport.rank, self._skipped_locally)
        return np.bool_(not rounds[_IS_FROZEN] and self._must_look(now, float(lr), table, schedule))

    def _variance_bytes(self, num_elements: int) -> float:
        return ring_allreduce_bytes(min(4, self._wire_bytes) * num_elements, self.transport.size)

    def _freeze_when_it_has_settled(self, state: _State, variances: dict[int, tf.Tensor]) -> bool:
        given = [state.step, state.lr, *(native(v) for v in (self.table, self.rounds, self.schedule, self.floors))]
        flat = [variances[i] for i in self._compressible]
        table, rounds, schedule = on_host(self._decide_on_rounds, [*given, *flat], [tf.int64, tf.float64, tf.float64])
        for variable, new in ((self.table, table), (self.rounds, rounds), (self.schedule, schedule)):
            native(variable).assign(tf.ensure_shape(new, native(variable).shape))
        return True

    def _decide_on_rounds(
        self, step: Any, lr: Any, table: Array, rounds: Array, schedule: Array, floors: Array, *variances: Any
    ) -> tuple[Array, Array, Array]:
        now = int(step) + 1
        self._schedule.load(unpack_schedule(schedule))
        updates = int(table[VARIANCE_STEPS, self._compressible[0]])
        correction = bias_correction(self.rule.memory, updates) if self.rule.bias_corrected else 1.0
        if self._schedule.should_freeze(
            now, float(lr), lambda: sum(float(v.sum(dtype=np.float64)) for v in variances) / correction
        ):
            made = self._rounds_of(rounds)
            made.freeze(now, float(lr))
            rounds = _pack_rounds(made, float(rounds[_RATE_SUM]))
            table = table.copy()
            table[FROZEN_STEP, self._compressible] = now
            self._count_frozen(now, [floors[i] for i in self._compressible], variances)
        return table, rounds, pack_schedule(self._schedule.state(), len(schedule))

    def _count_frozen(self, now: int, floors: Sequence[Any], variances: Sequence[Any]) -> None:
        crc = 0
        still = []
        for i, floor, variance in zip(self._compressible, floors, variances, strict=True):
            dead = int(variance.size - np.count_nonzero(variance))
            self.stats.dead_elements += dead
            if floor:
                self.stats.floored_elements += int((variance < floor).sum())
                self.stats.floored_elements -= dead if self.options.dead == "hold" else 0
            still += [self._names[i]] if dead == variance.size else []
            crc = zlib.crc32(variance.tobytes(), crc)
        if still and self.transport.rank == 0:
            notices.without_variance(still)
        if self._schedule.lr_rises and self.transport.rank == 0:
            notices.learning_rate_rises(now, "var_freeze_step")
        self._frozen_checksum = crc
        self.stats.frozen_step = now

    # -- notices -----------------------------------------------------------------------------------------------------

    def _tell_stage(self) -> None:
        if not self._takes_local_steps:
            super()._tell_stage()
        elif self.stats.frozen_step:
            notices.resumed(self.stats.step, self.stats.frozen_step)
        else:
            notices.local_steps(self.options.freeze_step)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def synchronize_for_checkpoint(self) -> None:
        """Collective: as the others; and all ranks go on from the mean of their steps since they last met."""
        super().synchronize_for_checkpoint()
        table, rounds = self.table.numpy(), self.rounds.numpy()
        if not self._takes_local_steps or rounds[_RATE_SUM] == 0.0:
            return  # all are equal
        step, lr = int(native(self._optimizer.iterations)), float(native(self._optimizer.learning_rate))
        rows = self._numbers(step, lr, table, Rounds(variance=False, sync=False))
        for i, row in zip(self._compressible, rows, strict=True):
            accumulated = self._mean_over_ranks(self.accumulated[i], f"{i}.accumulated")
            momentum = self._mean_over_ranks(self.rule.momentum_of(i), f"{i}.momentum")
            variance, floor = flat_tensor(self.rule.variance_of(i)), native(self.floors)[i]
            moving = self._moving(variance, floor)
            numbers: Any = AdamStep(*(tf.constant(n, tf.float32) for n in astuple(row)))
            local = _Local(
                index=i,
                parameter=flat_tensor(self._variables[i]),
                momentum=momentum,
                distance=accumulated,
                accumulated=accumulated,
                anchor=flat_tensor(self.anchors[i]),
                root=self._root(variance, floor, moving, numbers),
                moving=moving,
                decay=None,
            )
            self._assign(local, local.anchor - accumulated / local.root, momentum)
            self.accumulated[i].assign(tf.reshape(accumulated, self._shape(i)))

    def _mean_over_ranks(self, variable: Any, name: str) -> tf.Tensor:
        return tf.constant(self.transport.on_host.allreduce(flat_tensor(variable).numpy(), name=name).wait())

    def _take_up(self, about: Mapping[str, Any] | None, errors: Mapping[str, Any], owed: Mapping[str, Array]) -> None:
        self._skipped_locally = 0
        self._frozen_checksum = None
        is_between_rounds = bool(self.rounds.numpy()[_RATE_SUM])
        super()._take_up(about, errors, owed)
        if about is None or about["shared"] or not is_between_rounds:
            return
        here, there = (self.transport.rank, self.transport.size), (about["rank"], about["size"])
        if here != there:
            notices.dropped_local_steps(f"by rank {there[0]} of {there[1]}, restored on rank {here[0]} of {here[1]}")

    def _count_restored(self) -> None:
        super()._count_restored()
        if self._takes_local_steps:
            self.stats.stage = COMPRESSION
            self._count_elements(self._is_compressed())

    def _must_thaw(self, table: Array, step: int) -> bool:
        return not self._takes_local_steps

    def _thaw_if_early(self, owed: Mapping[str, Array]) -> bool:
        if self._must_thaw(self.table.numpy(), int(native(self._optimizer.iterations))):
            # what is owed here is a distance, not a momentum: it can't be settled there
            self._return_to_plain_adam(int(native(self._optimizer.iterations)))
        return False

    def _return_to_plain_adam(self, step: int) -> None:
        table = self.table.numpy()
        for i in self._compressible:
            self.rule.thaw(i, step=step, variance_steps=int(table[VARIANCE_STEPS, i]), fresh=None)
        for variable in self.own_variables:
            variable.assign(tf.zeros_like(native(variable)))


def _variance_steps(table: Array, index: int, step: int) -> int:
    """Updates that went into a variance: plain Adam, which keeps no such count, makes one in every step."""
    return int(table[VARIANCE_STEPS, index]) or step


def _rate_sum(rounds: Array, numbers: Sequence[AdamStep]) -> float:
    return float(rounds[_RATE_SUM]) + numbers[0].step_size


def _pack_rounds(schedule: RoundSchedule, rate_sum: float) -> Array:
    state = schedule.state()
    variance, sync = state["variance"], state["sync"]
    packed = np.zeros(_LENGTH, np.float64)
    packed[[_UPDATES, _NEXT]] = variance["updates"], variance["next"]
    packed[[_FROZEN_STEP, _FROZEN_LR, _LAST_SYNC]] = sync["frozen_step"], sync["frozen_lr"], sync["last"]
    packed[[_IS_FROZEN, _RATE_SUM]] = not state["variance_is_live"], rate_sum
    return packed
