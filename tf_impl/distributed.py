"""DistributedOptimizer: a Keras optimizer whose `apply` averages over Horovod's ranks, compressed after a warm-up.

Keras 3 has no seam for Horovod, and Horovod's own Keras wrapper doesn't know Keras 3: there its optimizer averages
nothing. So these are subclasses of Keras's optimizers that override `apply`, built on horovod.tensorflow's collectives
alone. Nothing of Keras's or Horovod's is patched.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as graph_ops
from tensorflow.python.ops import control_flow_util

from hvd_onebit.errors import OneBitError, scaler_with_local_steps
from hvd_onebit.options import CompressionOptions, options_from, refuse_for_local_steps
from hvd_onebit.rules import clip_factor, ordered_norm
from hvd_onebit.stats import Stats
from hvd_onebit.tensorflow.codec import is_on_host
from hvd_onebit.tensorflow.engine import FORMAT_VERSION, CompressionEngine, Outcome, native
from hvd_onebit.tensorflow.local_steps import LocalStepsEngine, LocalStepsRule
from hvd_onebit.tensorflow.optimizers import Lamb, LambUpdate, OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam
from hvd_onebit.tensorflow.rules import AdamRule, LambRule, Rule, SgdRule
from hvd_onebit.tensorflow.transport import HorovodTransport, HostTransport, TensorTransport, on_host
from hvd_onebit.transport import Transport

__all__ = ["DistributedOptimizer", "forget_names", "is_distributed"]

_instances: Counter[str] = Counter()  # optimizers that were traced, by process set: part of their collectives' names
_STORE_PREFIX = "onebit."


@dataclass(frozen=True)
class _Settings:
    """The arguments of DistributedOptimizer that outlive it."""

    options: CompressionOptions
    sums_passes: bool = False
    sparse_as_dense: bool = False
    transport: Transport[Any] | None = None
    compression: Any = None
    op: Any = None
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    process_set: Any = None

    def make_transport(self, make_prefix: Callable[[], str]) -> tuple[TensorTransport, float]:
        """Among the ranks as they are now, and by what gradients are multiplied there."""
        if self.transport is not None:
            return HostTransport(self.transport), 1.0
        import horovod.tensorflow as hvd

        transport = HorovodTransport(
            self.process_set,
            make_prefix,
            compression=self.compression,
            op=self.op,
            predivide=self.gradient_predivide_factor,
            num_groups=self.num_groups,
        )
        return transport, float(transport.size) if self.op == hvd.Sum else 1.0

    @property
    def wire_bytes(self) -> int:
        """Bytes an element takes in a full-precision allreduce, at most."""
        return 2 if self.transport is None and self.compression == _compressions()["fp16"] else 8

    def as_config(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        if self.transport is not None:
            raise TypeError(
                "an optimizer on a transport cannot be saved with its model: save the model's weights instead"
            )
        if self.process_set.process_set_id != 0:
            raise TypeError(
                "an optimizer on a process set cannot be saved with its model: use model.save_weights() and a "
                "tf.train.Checkpoint of the optimizer"
            )
        return {
            "options": self.options.as_fields(),
            "sums_passes": self.sums_passes,
            "sparse_as_dense": self.sparse_as_dense,
            "compression": _name_in(_compressions(), self.compression),
            "op": _name_in(_ops(), self.op),
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "num_groups": self.num_groups,
        }

    @staticmethod
    def of_config(config: dict[str, Any]) -> _Settings:
        """What `as_config` returned."""
        op, compression = _ops()[config["op"]], _compressions()[config["compression"]]
        options = options_from(config["options"])
        op, compression, process_set = _horovod_defaults(op, compression, None, config["gradient_predivide_factor"])
        names = ("sums_passes", "sparse_as_dense", "gradient_predivide_factor", "num_groups")
        kept = {name: config[name] for name in names}
        return _Settings(options, op=op, compression=compression, process_set=process_set, **kept)


def DistributedOptimizer(  # noqa: N802 - Horovod's name for it
    optimizer: keras.optimizers.Optimizer,
    *,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    transport: Transport[Any] | None = None,
    **options: Any,
) -> Any:
    """The optimizer, averaging over Horovod's ranks: in full precision at first, then one bit an element.

    The first `freeze_step` updates are Keras's own, from gradients averaged by Horovod. Then the variance is frozen and
    the momentum travels, compressed, with error feedback (Tang et al. 2021, arXiv 2102.02888). Construction is not
    collective; `apply` is.

    `clipnorm`, `clipvalue` and `global_clipnorm` of the optimizer act on the averaged gradient during warm-up, as on
    one process. Afterwards no rank knows it, and each clips its own gradients before they are sent. The option
    `local_clip_norm` clips each rank's own in both stages.

    Gradients that are None count as zero: momentum and weight decay go on. Variables that `apply` is not given, such as
    those of layers that were frozen before the model was compiled again, stay where they are, while their momentum
    decays; 0/1 Adam refuses that. Variables are those that the optimizer was built on, by `build`, by Keras, or
    by the first `apply`: variables added later are refused.

    Args:
        optimizer: keras.optimizers.Adam, AdamW, Lamb or SGD with momentum, OneBitAdam, Lamb, OneBitLamb, OneBitSGD or
            ZeroOneAdam, or a keras.optimizers.LossScaleOptimizer of one but the last. With mixed_float16 do wrap it in
            a LossScaleOptimizer first: Keras's own, put around this one, looks for overflow on one rank only, and is
            refused.
        compression: hvd.Compression for the full-precision stage; default none.
        backward_passes_per_step: as in Horovod: that many calls of `apply` make one exchange and one step of the
            schedule, of their gradients' sum. An optimizer's own gradient_accumulation_steps takes their mean.
        op: hvd.Average (default) or hvd.Sum.
        gradient_predivide_factor: as in Horovod, in full precision.
        average_aggregated_gradients: as in Horovod: the mean of the backward passes instead of the sum.
        num_groups: as in Horovod, deprecated there.
        groups: as in Horovod, during warm-up; a number only.
        sparse_as_dense: sum sparse gradients into dense ones; without it a sparse gradient is refused.
        process_set: as in Horovod.
        transport: average over this transport of `hvd_onebit.transport` instead of Horovod, in eager code.
        **options: of `hvd_onebit.options.CompressionOptions`: freeze_step, exchange, scale, block, full_precision, ...

    Returns:
        An optimizer of a subclass of the given one's class, with `stats`. If the given one was built, for instance
        because it was loaded with its model, its state is taken over.

    Raises:
        TypeError: the optimizer or an option of a kind that cannot be served.
        ValueError: a value out of range; a distribution strategy.
        OneBitError: Horovod is not initialised.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _distributed_loss_scaling(
            optimizer,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            transport=transport,
            **options,
        )
    options_given = _options_of(optimizer, options)
    _check_optimizer(optimizer, options_given)
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {backward_passes_per_step!r}")
    if backward_passes_per_step > 1 and optimizer.gradient_accumulation_steps:
        raise ValueError(
            "the optimizer has gradient_accumulation_steps: leave backward_passes_per_step at 1, or one would multiply "
            "the other"
        )
    if groups is not None and not isinstance(groups, int):
        raise TypeError("groups must be a number of groups here, not lists of variables")
    if transport is None:
        op, compression, process_set = _horovod_defaults(op, compression, process_set, gradient_predivide_factor)
    settings = _Settings(
        options=options_given,
        sums_passes=backward_passes_per_step > 1 and not average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        transport=transport,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=groups if groups is not None else num_groups,
        process_set=process_set,
    )
    config = optimizer.get_config()
    if not isinstance(optimizer._learning_rate, keras.Variable):
        # the user's own schedule object: a custom one need not be registered with Keras
        config["learning_rate"] = optimizer._learning_rate
    if backward_passes_per_step > 1:
        config["gradient_accumulation_steps"] = backward_passes_per_step
    distributed = _CLASSES[type(optimizer)](**config, onebit=settings)
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(distributed, name, getattr(optimizer, name))
    if optimizer.built:
        distributed.build(list(optimizer._trainable_variables))
        distributed.take_over(optimizer)
    return distributed


def is_distributed(optimizer: Any) -> bool:
    """True for what `DistributedOptimizer` returns."""
    return isinstance(optimizer, (_Distributed, DistributedLossScaleOptimizer))


# -- arguments ---------------------------------------------------------------------------------------------------------


def _options_of(optimizer: Any, given: dict[str, Any]) -> CompressionOptions:
    own: CompressionOptions | None = getattr(optimizer, "compression_options", None)
    if own is None:
        default = {"freeze_step": 0} if isinstance(optimizer, keras.optimizers.SGD) else {}
        return options_from({**default, **given})
    options_from(given)
    if isinstance(optimizer, ZeroOneAdam):
        refuse_for_local_steps(given)
    return replace(own, **given)


def _check_optimizer(optimizer: Any, options: CompressionOptions) -> None:
    if is_distributed(optimizer):
        raise TypeError("this optimizer is distributed already: wrap it once, with one DistributedOptimizer")
    if type(optimizer) not in _CLASSES:
        names = ", ".join(dict.fromkeys(cls.__name__ for cls in _CLASSES))
        raise TypeError(
            f"DistributedOptimizer serves {names}, not {type(optimizer).__name__}: the compression stage has to know "
            "the optimizer's update rule. Use one of them."
        )
    _CLASSES[type(optimizer)].rule_type.check(optimizer, options)
    if options.is_open:
        raise ValueError(
            '"measured" is not there for TensorFlow, whose graph is traced before anything is measured: name the '
            "exchange and the bucket_elements, or leave them out"
        )
    if keras.backend.backend() != "tensorflow":
        raise TypeError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow, or use hvd_onebit.torch with "
            f"PyTorch"
        )
    _refuse_strategy()


def _refuse_strategy() -> None:
    if tf.distribute.has_strategy():
        raise ValueError(
            f"{type(tf.distribute.get_strategy()).__name__} is active: Horovod already averages over processes, and "
            "both together would average twice. Leave the strategy's scope, and start one process a device with "
            "horovodrun."
        )


def _horovod_defaults(op: Any, compression: Any, process_set: Any, predivide: float) -> tuple[Any, Any, Any]:
    import horovod.tensorflow as hvd

    if not hvd.is_initialized():
        raise OneBitError("Horovod is not initialised: call hvd.init() before DistributedOptimizer")
    op = hvd.Average if op is None else op
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("op must be hvd.Average or hvd.Sum: Adasum combines gradients in a way that bits cannot carry")
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    process_set = hvd.global_process_set if process_set is None else process_set
    return op, hvd.Compression.none if compression is None else compression, process_set


def _ops() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {"Average": hvd.Average, "Sum": hvd.Sum}


def _compressions() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


def _name_in(known: dict[str, Any], value: Any) -> str:
    for name, each in known.items():
        if each == value:
            return name
    raise TypeError(f"{value!r} cannot be saved with a model: only {', '.join(known)} can")


def forget_names() -> None:
    """Counts optimizers from the start again: Horovod has been initialised anew, and newcomers start at one."""
    _instances.clear()


def _next_name(process_set: Any) -> str:
    key = str(process_set.process_set_id)
    _instances[key] += 1
    return f"onebit.{key}.{_instances[key]}"


# -- the optimizers ----------------------------------------------------------------------------------------------------


# Keras's class comes next in the order of methods; it is unknown to type checkers, and so are its attributes
_Base: Any = object
_PythonState: Any = tf.train.experimental.PythonState


class _Distributed(_Base):
    """What is put over Keras's optimizer classes."""

    rule_type: type[Rule] = AdamRule
    engine_type: type[CompressionEngine] = CompressionEngine

    def __init__(self, *args: Any, onebit: _Settings | dict[str, Any] | None = None, **kwargs: Any) -> None:
        if onebit is None:
            raise TypeError(f"{type(self).__name__} is made by hvd_onebit.tensorflow.DistributedOptimizer")
        settings = _Settings.of_config(onebit) if isinstance(onebit, dict) else onebit
        super().__init__(*args, **kwargs)
        self._settings = _Untracked(settings)
        self._engine = _Untracked(None)
        self._steps = _Untracked(None)
        self._stats = _Untracked(Stats())
        self._is_scaled_elsewhere = False
        self.compression_errors = _ErrorsInCheckpoint(_Untracked(self))  # an attribute that TensorFlow tracks

    @property
    def stats(self) -> Stats:
        """Counters of this rank: stage, steps, bytes sent, elements compressed, steps skipped."""
        return self._stats.value

    @property
    def variables(self) -> list[Any]:
        """Keras's: all of the optimizer's variables."""
        self.bring_back_momentum()
        variables: list[Any] = super().variables
        return variables

    def bring_back_momentum(self, index: int | None = None) -> None:
        """Puts momentum that is kept as bits into its variables until the next step. Not collective.

        Whoever looks at the optimizer's variables in eager code does it without knowing. What reads them in a graph of
        its own, and got hold of them before it was traced, has to call this first.

        Args:
            index: a variable whose momentum is wanted; None for all.
        """
        engine = getattr(self, "_engine", None)
        if tf.executing_eagerly() and engine is not None and engine.value is not None:
            engine.value.bring_back_momentum(index)

    # -- what the engine asks --

    def momentum_of(self, index: int) -> tf.Variable:
        """The momentum of variable `index`."""
        self.bring_back_momentum()
        return self._engine.value.rule.momentum_of(index)

    def variance_of(self, index: int) -> tf.Variable:
        """What the update takes the root of."""
        return self._engine.value.rule.variance_of(index)

    def decoupled_weight_decay_of(self, variable: tf.Variable) -> float:
        """The weight decay that acts beside the update."""
        return self._weight_decay_of(variable) if getattr(self, "decoupled_weight_decay", True) else 0.0

    def coupled_weight_decay(self, variable: tf.Variable) -> float:
        """The weight decay that is added to the gradient."""
        return 0.0 if getattr(self, "decoupled_weight_decay", True) else self._weight_decay_of(variable)

    def _weight_decay_of(self, variable: tf.Variable) -> float:
        return float(self.weight_decay or 0.0) if self._use_weight_decay(variable) else 0.0

    def clip(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients, clipped as the optimizer was told to."""
        return list(self._clip_gradients(list(gradients)))

    def plain_update(self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable], *, clip: bool) -> None:
        """Keras's own update, in full precision."""
        if not variables:
            return
        if clip:
            gradients = self.clip(gradients)
        self._apply_weight_decay(variables)
        self._backend_update_step(gradients, variables, self.learning_rate)

    # -- Keras's interface --

    def build(self, variables: Any) -> None:
        """Creates all variables; they must exist before a graph is traced."""
        if self.built:
            return
        _refuse_strategy()
        super().build(variables)
        settings: _Settings = self._settings.value
        if settings.transport is None and not settings.process_set.included():
            return
        transport, gradient_scale = settings.make_transport(lambda: _next_name(settings.process_set))
        self._engine = _Untracked(
            self.engine_type(
                self,
                self.rule_type(self, self._trainable_variables, settings.options),
                self._trainable_variables,
                settings.options,
                transport,
                self.stats,
                gradient_scale=gradient_scale,
                wire_bytes=settings.wire_bytes,
            )
        )
        self.compression_errors.hand_over()

    def enter_world(self, prefix: str, old: dict[str, Any] | None = None) -> None:
        """After Horovod was initialised anew: takes up its ranks. Not collective.

        Args:
            prefix: of the names of all its collectives, the same on every rank whatever it did before.
            old: as for `CompressionEngine.moved_to`.
        """
        transport, gradient_scale = self._settings.value.make_transport(lambda: prefix)
        engine: CompressionEngine = self._engine.value
        self._engine = _Untracked(engine.moved_to(transport, gradient_scale=gradient_scale, old=old))
        self._steps = _Untracked(None)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Collective: one update from this rank's gradients. All ranks skip it if one has a NaN or an infinity."""
        if self._is_scaled_elsewhere:
            raise TypeError(_WRONG_ORDER)
        _refuse_xla()
        if not self.built:
            if trainable_variables is None:
                raise ValueError("apply() without variables needs build(variables) before it")
            with tf.init_scope():
                self.build(list(trainable_variables))
        engine: CompressionEngine | None = self._engine.value
        gradients, held = self._all_gradients(grads, trainable_variables)
        if engine is None:
            super().apply(gradients, self._trainable_variables)
        elif tf.executing_eagerly() and engine.transport.runs_in_graph:
            # in a graph of its own: collectives get names of their own there, and run beside each other
            if self._steps.value is None:
                self._steps = _Untracked(tf.function(self._apply_all, autograph=False))
            self._steps.value(gradients, held)
        else:
            self._apply_all(gradients, held)

    def _all_gradients(
        self, grads: Sequence[Any], variables: Sequence[Any] | None
    ) -> tuple[list[tf.Tensor], tuple[int, ...]]:
        """A dense gradient for every variable that the optimizer was built on, in that order; which were not given."""
        built: list[Any] = self._trainable_variables
        given = built if variables is None else list(variables)
        if len(given) != len(grads):
            raise ValueError(f"{len(grads)} gradients for {len(given)} variables")
        by_key: dict[Any, Any] = {}
        for gradient, variable in zip(grads, given, strict=True):
            key = self._var_key(variable)
            if key not in self._trainable_variables_indices:
                raise ValueError(
                    f"variable {getattr(variable, 'path', variable.name)!r} is not among those that the optimizer was "
                    "built on: buckets and collectives are fixed then. Build it on all variables that it will ever "
                    "train, optimizer.build(model.variables), or compile the model again with a new optimizer after a "
                    "change of layer.trainable."
                )
            by_key[key] = gradient
        held = tuple(i for i, v in enumerate(built) if self._var_key(v) not in by_key)
        return [self._dense(by_key.get(self._var_key(v)), native(v)) for v in built], held

    def _dense(self, gradient: Any, variable: tf.Variable) -> tf.Tensor:
        if gradient is None:
            return tf.zeros(variable.shape, variable.dtype)
        if isinstance(gradient, tf.IndexedSlices) and not self._settings.value.sparse_as_dense:
            raise TypeError(
                f"variable {variable.name!r} has a sparse gradient, which bits cannot carry: pass sparse_as_dense=True "
                "to sum it into a dense one"
            )
        return tf.cast(tf.convert_to_tensor(gradient), variable.dtype)

    def _apply_all(self, gradients: list[tf.Tensor], held: Sequence[int]) -> tf.Tensor:
        """What Keras's `apply` does around the update: unscaling, accumulation, constraints, moving average."""
        engine: CompressionEngine = self._engine.value
        with engine.host_functions.traced():
            return self._apply_traced(engine, gradients, held)

    def _apply_traced(self, engine: CompressionEngine, gradients: list[tf.Tensor], held: Sequence[int]) -> tf.Tensor:
        if self.loss_scale_factor is not None:
            gradients = [g / self.loss_scale_factor for g in gradients]
        iterations = native(self._iterations)
        passes = self.gradient_accumulation_steps
        if passes:
            outcome = self._accumulate(gradients, iterations, passes, held)
        else:
            outcome = self._update(gradients, iterations, 1, held)
        engine.freeze_when_due(outcome)
        return outcome.made

    def _accumulate(
        self, gradients: list[tf.Tensor], iterations: tf.Variable, passes: int, held: Sequence[int]
    ) -> Outcome:
        accumulated = [native(v) for v in self._accumulated_gradients]

        def accumulate() -> Outcome:
            for variable, gradient in zip(accumulated, gradients, strict=True):
                variable.assign_add(gradient)
            self._end_pass(iterations)
            return Outcome.of_a_pass()

        def update() -> Outcome:
            total = [g + variable for g, variable in zip(gradients, accumulated, strict=True)]
            mean = total if self._settings.value.sums_passes else [g / passes for g in total]
            outcome = self._update(mean, iterations, passes, held)
            for variable in accumulated:
                variable.assign(tf.zeros_like(variable))
            return outcome

        return tf.cond((iterations + 1) % passes == 0, update, accumulate)

    def _update(self, gradients: list[tf.Tensor], iterations: tf.Variable, passes: int, held: Sequence[int]) -> Outcome:
        kept = [(variable, tf.identity(variable)) for variable in (native(self._trainable_variables[i]) for i in held)]
        outcome = self._engine.value.step(self._clip_own(gradients), held)

        def commit() -> bool:
            for variable, value in kept:
                variable.assign(value)
            for variable in self._trainable_variables:
                constraint = getattr(variable, "constraint", None)
                if constraint is not None:
                    variable.assign(constraint(variable))
            self._end_pass(iterations)
            return True

        def skip() -> bool:
            # the passes whose gradients are dropped don't count either
            iterations.assign_sub(passes - 1)
            return False

        with tf.control_dependencies([tf.cond(outcome.made, commit, skip)]):
            return Outcome(*map(tf.identity, outcome))

    def _clip_own(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """This rank's gradients scaled down to `local_clip_norm`, if there is one."""
        limit = self._settings.value.options.local_clip_norm
        if limit is None:
            return gradients
        squares = [tf.reduce_sum(tf.square(tf.cast(g, tf.float64))) for g in gradients]
        norm = tf.sqrt(tf.add_n(squares))
        factor = on_host(lambda n: np.float64(clip_factor(float(n), limit)), [norm], tf.float64, stateful=False)
        factor.set_shape([])
        return [g * tf.cast(factor, g.dtype) for g in gradients]

    def _end_pass(self, iterations: tf.Variable) -> None:
        if self.use_ema:
            variables = self._trainable_variables
            self._update_model_variables_moving_average(variables)
            every = self.ema_overwrite_frequency
            if every:

                def overwrite() -> bool:
                    self._overwrite_model_variables_with_average_value(variables)
                    return True

                tf.cond((native(self.iterations) + 1) % every == 0, overwrite, lambda: False)
        iterations.assign_add(1)

    # -- loss scaling --

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras's LossScaleOptimizer clears this on the optimizer that it is put around: there is no other sign of it
        if name == "loss_scale_factor":
            self._is_scaled_elsewhere = True
        super().__setattr__(name, value)

    def scaled_by(self, owner: Any) -> None:
        """Tells that `owner`, which looks for overflow on all ranks, was put around this optimizer."""
        assert isinstance(owner, DistributedLossScaleOptimizer)
        self._is_scaled_elsewhere = False

    # -- state --

    def take_over(self, optimizer: Any) -> None:
        """Copies the state of the optimizer that this one was made of."""
        passes = self.gradient_accumulation_steps
        new = [] if not passes or optimizer.gradient_accumulation_steps else self._accumulated_gradients
        variables = [v for v in self.variables if not any(v is each for each in new)]
        for mine, theirs in zip(variables, optimizer.variables, strict=False):
            mine.assign(theirs)
        if new:
            self._iterations.assign(optimizer.iterations * passes)  # Keras counts passes

    def synchronize_for_checkpoint(self) -> None:
        """Collective: afterwards any rank's checkpoint alone restores a run on any number of ranks.

        Every rank gets the mean of the ranks' compression errors, so that nothing that is still owed is lost. Call it
        in eager code, for instance in a callback's on_epoch_end.

        Raises:
            OneBitError: ranks disagree, the same on every rank.
        """
        if not tf.executing_eagerly():
            raise OneBitError("synchronize_for_checkpoint() was called inside a tf.function: call it in eager code")
        engine: CompressionEngine | None = self._engine.value
        if engine is not None:
            engine.synchronize_for_checkpoint()

    def own_variables(self) -> list[Any]:
        """The variables that the plain optimizer does not have."""
        return [] if self._engine.value is None else self._engine.value.own_variables

    def get_config(self) -> dict[str, Any]:
        """Keras's, with the arguments of DistributedOptimizer."""
        return {**super().get_config(), "onebit": self._settings.value.as_config()}

    def save_own_variables(self, store: Any) -> None:
        """Keras's, with this rank's compression errors. Not collective."""
        super().save_own_variables(store)
        _save_errors(self._engine.value, store)

    def load_own_variables(self, store: Any) -> None:
        """Restores a checkpoint of this optimizer or of the plain one. Not collective; do it on every rank.

        Raises:
            ValueError: the checkpoint does not fit or is damaged; the optimizer is as it was.
        """
        _load(self.variables, self.own_variables(), self._engine.value, store)


class _ErrorsInCheckpoint(_PythonState):
    """This rank's compression errors in a tf.train.Checkpoint of the optimizer, beside its variables.

    Attributes:
        optimizer: whose errors they are; held as `_Untracked`.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._pending: dict[str, Any] | None = None

    def serialize(self) -> bytes:
        """What Keras's files hold of them; nothing before the optimizer is built."""
        engine = self._optimizer.value._engine.value
        file = io.BytesIO()
        np.savez(file, **({} if engine is None else engine.state()))
        return file.getvalue()

    def deserialize(self, string: bytes) -> None:
        """The other way round; they are taken up by the next step."""
        with np.load(io.BytesIO(string)) as saved:
            self._pending = dict(saved) or None
        self.hand_over()

    def hand_over(self) -> None:
        """Gives restored errors to the engine, once there is one."""
        engine = self._optimizer.value._engine.value
        if engine is not None and self._pending is not None:
            engine.load_at_next_step(self._pending)
            self._pending = None


class _Untracked:
    """Holds what Keras's and TensorFlow's tracking of attributes should not look into."""

    def __init__(self, value: Any) -> None:
        self.value = value


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedAdam(_Distributed, keras.optimizers.Adam):
    """keras.optimizers.Adam on Horovod; made by `DistributedOptimizer`."""


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedAdamW(_Distributed, keras.optimizers.AdamW):
    """keras.optimizers.AdamW on Horovod; made by `DistributedOptimizer`."""


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedOneBitAdam(_Distributed, OneBitAdam):
    """OneBitAdam on Horovod; made by `DistributedOptimizer`."""


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedSGD(_Distributed, keras.optimizers.SGD):
    """keras.optimizers.SGD with momentum on Horovod; made by `DistributedOptimizer`."""

    rule_type = SgdRule


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedOneBitSGD(_Distributed, OneBitSGD):
    """OneBitSGD on Horovod; made by `DistributedOptimizer`."""

    rule_type = SgdRule


class _DistributedLamb(_Distributed):
    """What LAMB needs beside: norms that are the same on every rank, whatever its number of threads."""

    rule_type = LambRule

    def norm_of(self, tensor: tf.Tensor, variable: Any) -> tf.Tensor:
        """The 2-norm of a tensor of `variable`'s shape, float64."""
        engine: CompressionEngine | None = self._engine.value
        if engine is None or engine.transport.size == 1 or not is_on_host([native(variable)]):
            return super().norm_of(tensor, variable)
        norm = on_host(
            lambda values: np.float64(ordered_norm(values.reshape(-1))), [tensor], tf.float64, stateful=False
        )
        norm.set_shape([])
        return norm


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedKerasLamb(_DistributedLamb, LambUpdate, keras.optimizers.Lamb):
    """keras.optimizers.Lamb on Horovod; made by `DistributedOptimizer`."""

    def own_variables(self) -> list[Any]:
        """The variables that the plain optimizer does not have."""
        return [self.lamb_table, *super().own_variables()]


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedLamb(_DistributedLamb, Lamb):
    """hvd_onebit.tensorflow.Lamb on Horovod; made by `DistributedOptimizer`."""

    def decoupled_weight_decay_of(self, variable: tf.Variable) -> float:
        """None: it is part of the update."""
        return 0.0


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedOneBitLamb(_DistributedLamb, OneBitLamb):
    """OneBitLamb on Horovod; made by `DistributedOptimizer`."""

    def decoupled_weight_decay_of(self, variable: tf.Variable) -> float:
        """None: it is part of the update."""
        return 0.0


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedZeroOneAdam(_Distributed, ZeroOneAdam):
    """ZeroOneAdam on Horovod; made by `DistributedOptimizer`."""

    rule_type = LocalStepsRule
    engine_type = LocalStepsEngine


_CLASSES: dict[type, type[_Distributed]] = {
    keras.optimizers.Adam: DistributedAdam,
    keras.optimizers.AdamW: DistributedAdamW,
    keras.optimizers.SGD: DistributedSGD,
    keras.optimizers.Lamb: DistributedKerasLamb,
    OneBitAdam: DistributedOneBitAdam,
    OneBitSGD: DistributedOneBitSGD,
    Lamb: DistributedLamb,
    OneBitLamb: DistributedOneBitLamb,
    ZeroOneAdam: DistributedZeroOneAdam,
}


@keras.saving.register_keras_serializable(package="hvd_onebit")
class DistributedLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """keras.optimizers.LossScaleOptimizer that skips a step on all ranks when one overflows."""

    def __init__(self, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(inner_optimizer, *args, **kwargs)
        inner_optimizer.scaled_by(self)
        self._steps = _Untracked(None)

    @property
    def stats(self) -> Stats:
        """Counters of this rank."""
        return self.inner_optimizer.stats

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Collective: as the inner optimizer's, from scaled gradients."""
        _refuse_xla()
        if not self.built:
            with tf.init_scope():
                self.build(list(trainable_variables or []))
        inner = self.inner_optimizer
        engine: CompressionEngine | None = inner._engine.value
        gradients, held = inner._all_gradients(grads, trainable_variables)
        if tf.executing_eagerly() and engine is not None and engine.transport.runs_in_graph:
            if self._steps.value is None:
                self._steps = _Untracked(tf.function(self._apply_all, autograph=False))
            self._steps.value(gradients, held)
        else:
            self._apply_all(gradients, held)

    def _apply_all(self, gradients: list[tf.Tensor], held: Sequence[int]) -> None:
        given = [i for i in range(len(gradients)) if i not in set(held)]
        variables = self.inner_optimizer._trainable_variables
        super().apply([gradients[i] for i in given], [variables[i] for i in given])

    def bring_back_momentum(self) -> None:
        """As the inner optimizer's. Not collective."""
        self.inner_optimizer.bring_back_momentum()

    def synchronize_for_checkpoint(self) -> None:
        """Collective: as the inner optimizer's."""
        self.inner_optimizer.synchronize_for_checkpoint()

    def enter_world(self, prefix: str, old: dict[str, Any] | None = None) -> None:
        """As the inner optimizer's."""
        self.inner_optimizer.enter_world(prefix, old)
        self._steps = _Untracked(None)

    def save_own_variables(self, store: Any) -> None:
        """Keras's, with this rank's compression errors. Not collective."""
        super().save_own_variables(store)
        _save_errors(self.inner_optimizer._engine.value, store)

    def load_own_variables(self, store: Any) -> None:
        """As the inner optimizer's."""
        inner = self.inner_optimizer
        _load(self.variables, inner.own_variables(), inner._engine.value, store)

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Collective: whether all gradients of all ranks are finite."""
        mine = super().check_finite(grads)
        engine: CompressionEngine | None = self.inner_optimizer._engine.value
        if engine is None or engine.transport.size == 1:
            return mine
        bad = tf.where(mine, 0.0, 1.0)
        finite = engine.transport.allreduce([bad], names=["overflow"])[0] == 0.0

        def count() -> bool:
            on_host(lambda: np.bool_(engine.count_overflow() or True), [], tf.bool)
            return True

        tf.cond(finite, lambda: False, count)
        return finite


def _distributed_loss_scaling(optimizer: Any, **arguments: Any) -> DistributedLossScaleOptimizer:
    if is_distributed(optimizer) or is_distributed(optimizer.inner_optimizer):
        raise TypeError("this optimizer is distributed already: wrap it once, with one DistributedOptimizer")
    if isinstance(optimizer.inner_optimizer, ZeroOneAdam):
        raise scaler_with_local_steps()
    inner = DistributedOptimizer(optimizer.inner_optimizer, **arguments)
    scaling = DistributedLossScaleOptimizer(
        inner,
        initial_scale=optimizer.initial_scale,
        dynamic_growth_steps=optimizer.dynamic_growth_steps,
        name=optimizer.name,
    )
    if optimizer.built:
        scaling.build(list(optimizer._trainable_variables))
        for mine, theirs in zip(scaling._variables, optimizer._variables, strict=True):
            mine.assign(theirs)
    return scaling


_WRONG_ORDER = (
    "Keras's LossScaleOptimizer was put around this optimizer (model.compile does that by itself with mixed_float16): "
    "it looks for overflow on its own rank only, and ranks would skip different steps. Wrap in the other order: "
    "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)."
)


def _refuse_xla() -> None:
    if control_flow_util.GraphOrParentsInXlaContext(graph_ops.get_default_graph()):
        raise ValueError(
            "jit_compile=True cannot be served: XLA compiles neither Horovod's operations nor the compression kernels. "
            "Pass "
            'jit_compile=False to model.compile() (on a GPU its default "auto" compiles too) or to tf.function.'
        )


def _save_errors(engine: CompressionEngine | None, store: Any) -> None:
    if engine is not None:
        for name, array in engine.state().items():
            store[_STORE_PREFIX + name] = array


def _load(variables: Sequence[Any], own: Sequence[Any], engine: CompressionEngine | None, store: Any) -> None:
    """Restores a checkpoint; `own` are those of the variables that the plain optimizer does not have."""
    # not every store iterates over its names
    saved = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118
    plain = {name: array for name, array in saved.items() if not name.startswith(_STORE_PREFIX)}
    errors = {name.removeprefix(_STORE_PREFIX): array for name, array in saved.items() if name not in plain}
    theirs = [v for v in variables if not any(v is mine for mine in own)]
    if len(plain) == len(theirs) and own and not errors:
        wanted = dict(zip(map(str, range(len(theirs))), theirs, strict=True))
    else:
        wanted = dict(zip(map(str, range(len(variables))), variables, strict=True))
    _check_checkpoint(plain, wanted, errors)
    for mine in own:
        mine.assign(tf.zeros_like(native(mine)))
    for name, variable in wanted.items():
        variable.assign(plain[name])
    if engine is not None:
        engine.load(errors or None)


def _check_checkpoint(saved: dict[str, Any], wanted: dict[str, Any], errors: dict[str, Any]) -> None:
    """Raises ValueError for what does not fit."""
    if set(saved) != set(wanted):
        raise ValueError(
            f"the checkpoint has {len(saved)} optimizer variables, the optimizer {len(wanted)}: another optimizer or "
            f"model"
        )
    for name, variable in wanted.items():
        array = saved[name]
        if tuple(array.shape) != tuple(variable.shape):
            raise ValueError(
                f"the checkpoint's variable {name} has shape {tuple(array.shape)}, the optimizer's "
                f"{variable.path!r} {tuple(variable.shape)}"
            )
    for name, array in {**saved, **errors}.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"the checkpoint's {name} holds NaN or infinity: take an earlier one")
    if errors:
        version = json.loads(errors["about"].tobytes()).get("version", 0)
        if version > FORMAT_VERSION:
            raise ValueError(
                f"the checkpoint has format version {version}, this hvd_onebit reads up to {FORMAT_VERSION}: upgrade it"
            )
