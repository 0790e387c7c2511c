"""DistributedOptimizer: Horovod's own distributed optimizer, with the compression stage put in its one seam.

Horovod makes its optimizer's class at run time, by copying the methods of `_DistributedOptimizer` over the user's
optimizer class. We do the same and replace `_allreduce_grad_async`, where every gradient is sent, `synchronize` and
`step`. Nothing of Horovod's is patched. The release is pinned: 0.28.1 is its last.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hvd_onebit.errors import OneBitError, scaler_with_local_steps
from hvd_onebit.options import CompressionOptions, options_from, refuse_for_local_steps
from hvd_onebit.rules import refuse_update_space
from hvd_onebit.stats import WARM_UP, Stats, ring_allreduce_bytes
from hvd_onebit.torch.engine import FORMAT_VERSION, CompressionEngine, Engine
from hvd_onebit.torch.local_steps import LocalStepsEngine, LocalStepsRule
from hvd_onebit.torch.optimizers import Lamb, OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam
from hvd_onebit.torch.rules import FROZEN_STEP, NOT_FROZEN, AdamRule, LambRule, SgdRule
from hvd_onebit.torch.transport import HorovodTransport, HostTransport
from hvd_onebit.transport import Transport

__all__ = ["DistributedOptimizer"]

_RULES: dict[type, tuple[type[Engine], type[AdamRule]]] = {
    torch.optim.Adam: (CompressionEngine, AdamRule),
    torch.optim.AdamW: (CompressionEngine, AdamRule),
    torch.optim.SGD: (CompressionEngine, SgdRule),
    OneBitAdam: (CompressionEngine, AdamRule),
    Lamb: (CompressionEngine, LambRule),
    OneBitLamb: (CompressionEngine, LambRule),
    OneBitSGD: (CompressionEngine, SgdRule),
    ZeroOneAdam: (LocalStepsEngine, LocalStepsRule),
}
_instances: Counter[str] = Counter()  # optimizers that have stepped, by process set: part of their collectives' names

_WRAPPED_TWICE = "this optimizer is distributed already: wrap it once, with one DistributedOptimizer"


@dataclass(frozen=True)
class _Settings:
    """The arguments of DistributedOptimizer that outlive it."""

    named_parameters: tuple[tuple[str, Tensor], ...]
    options: CompressionOptions
    backward_passes_per_step: int
    sparse_as_dense: bool
    transport: Transport[Any] | None
    compression: Any
    op: Any
    gradient_predivide_factor: float
    groups: Any
    process_set: Any
    grad_scaler: Any = None


def DistributedOptimizer(  # noqa: N802 - Horovod's name for it
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    grad_scaler: Any = None,
    transport: Transport[Any] | None = None,
    **options: Any,
) -> Any:
    """The optimizer, averaging over Horovod's ranks: in full precision at first, then one bit an element.

    The first `freeze_step` updates are Horovod's own DistributedOptimizer at work. Then the variance is frozen and the
    momentum travels, compressed, with error feedback (Tang et al. 2021, arXiv 2102.02888). Construction is not
    collective; `step()` and `synchronize()` are.

    After an explicit `synchronize()`, `.grad` holds what `step()` will use: the averaged gradient during warm-up, the
    averaged momentum afterwards. Clipping there bounds exactly that; the option `local_clip_norm` bounds each rank's
    own gradient instead, in both stages. `step()` alone leaves `.grad` of compressed
    parameters as backward made it.

    Args:
        optimizer: torch.optim.Adam, AdamW, or OneBitAdam. Its param_groups are shared, its class becomes the base.
        named_parameters: as in Horovod, typically model.named_parameters().
        compression: hvd.Compression for the full-precision stage; default none.
        backward_passes_per_step: as in Horovod; one exchange and one step of the schedule for that many passes.
        op: hvd.Average (default) or hvd.Sum.
        gradient_predivide_factor: as in Horovod, in full precision.
        num_groups: as in Horovod, deprecated there.
        groups: as in Horovod, during warm-up.
        sparse_as_dense: sum sparse gradients into dense ones; without it a sparse gradient is refused.
        process_set: as in Horovod.
        grad_scaler: the torch.amp.GradScaler that scales the loss, if there is one: gradients are unscaled before they
            enter the momentum. Use Horovod's order: synchronize(), scaler.unscale_(), then scaler.step() inside
            skip_synchronize(), scaler.update(). An overflow on one rank makes all skip and all scales shrink alike.
        transport: average over this transport of `hvd_onebit.transport` instead of Horovod.
        **options: of `hvd_onebit.options.CompressionOptions`: freeze_step, exchange, scale, block, full_precision, ...

    Returns:
        An optimizer of a subclass of the given one's class, with `synchronize()`, `skip_synchronize()` and `stats`.

    Raises:
        TypeError: the optimizer, an option or a parameter list of a kind that cannot be served.
        ValueError: a value out of range; unnamed or doubly named parameters.
        OneBitError: Horovod is not initialised.
    """
    options_given = _options_of(optimizer, options)
    _check_optimizer(optimizer, options_given)
    if grad_scaler is not None and isinstance(optimizer, ZeroOneAdam):
        raise scaler_with_local_steps()
    if options_given.local_clip_norm is not None and (groups is not None or num_groups):
        raise ValueError(
            "groups are sent while backward runs, when the norm of all gradients is not known yet: leave out either "
            "groups and num_groups, or local_clip_norm"
        )
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {backward_passes_per_step!r}")
    if transport is None:
        op, compression, process_set = _horovod_defaults(op, compression, process_set, gradient_predivide_factor)
    settings = _Settings(
        named_parameters=_named(optimizer, named_parameters),
        options=options_given,
        backward_passes_per_step=backward_passes_per_step,
        sparse_as_dense=sparse_as_dense,
        transport=transport,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else (num_groups or None),
        process_set=process_set,
        grad_scaler=grad_scaler,
    )
    return _make(type(optimizer), optimizer.param_groups, optimizer.defaults, settings)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _options_of(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> CompressionOptions:
    own: CompressionOptions | None = getattr(optimizer, "compression_options", None)
    if own is None:
        default = {"freeze_step": 0} if isinstance(optimizer, torch.optim.SGD) else {}
        return options_from({**default, **given})
    options_from(given)
    if isinstance(optimizer, ZeroOneAdam):
        refuse_for_local_steps(given)
    return replace(own, **given)


def _check_optimizer(optimizer: Any, options: CompressionOptions) -> None:
    if hasattr(type(optimizer), "_onebit_base"):
        raise TypeError(_WRAPPED_TWICE)
    if isinstance(optimizer, type):
        raise TypeError(
            f"DistributedOptimizer takes an optimizer, not the class: {optimizer.__name__}(model.parameters())"
        )
    if hasattr(type(optimizer), "_allreduce_grad_async"):
        raise TypeError(
            "this optimizer is wrapped by Horovod's DistributedOptimizer already: replace that, do not add to it"
        )
    if type(optimizer) not in _RULES:
        names = ", ".join(cls.__name__ for cls in _RULES)
        raise TypeError(
            f"DistributedOptimizer serves {names}, not {type(optimizer).__name__}: compression has to know the "
            "optimizer's update rule. Use one of them, or horovod.torch.DistributedOptimizer for uncompressed training."
        )
    rule = _RULES[type(optimizer)][1]
    if options.freeze_step == 0 and not issubclass(rule, SgdRule):
        raise ValueError("freeze_step=0 leaves no variance to freeze: it must be at least 1")
    if options.space == "update" and rule not in (AdamRule, LambRule):
        refuse_update_space(type(optimizer).__name__)
    for group in optimizer.param_groups:
        rule(options).check_group(group)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.is_complex():
            raise TypeError("complex parameters cannot be compressed: train their real view (torch.view_as_real)")


def _horovod_defaults(op: Any, compression: Any, process_set: Any, predivide: float) -> tuple[Any, Any, Any]:
    import horovod.torch as hvd

    if not hvd.is_initialized():
        raise OneBitError("Horovod is not initialised: call hvd.init() before DistributedOptimizer")
    op = hvd.Average if op is None else op
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("op must be hvd.Average or hvd.Sum: Adasum combines gradients in a way that bits cannot carry")
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    process_set = hvd.global_process_set if process_set is None else process_set
    return op, hvd.Compression.none if compression is None else compression, process_set


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> tuple[tuple[str, Tensor], ...]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return tuple(
            (f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        )
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise TypeError("named_parameters takes (name, parameter) pairs, usually model.named_parameters()")
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ValueError(
            f"parameter names must be unique, but these appear more than once: {', '.join(twice)}. With several models "
            "give each a prefix: model.named_parameters(prefix='encoder')."
        )
    known = {id(p) for _, p in named}
    unnamed = [p for p in parameters if id(p) not in known]
    if unnamed:
        shapes = ", ".join(str(tuple(p.shape)) for p in unnamed[:5])
        raise ValueError(
            f"{len(unnamed)} of the optimizer's {len(parameters)} parameters are not in named_parameters (shapes: "
            f"{shapes}{', ...' if len(unnamed) > 5 else ''}): pass the named_parameters of every module that it trains."
        )
    mine = {id(p) for p in parameters}
    return tuple((name, p) for name, p in named if id(p) in mine)


# -- the class made at run time ----------------------------------------------------------------------------------------


def _make(base: type[Any], param_groups: list[dict[str, Any]], defaults: dict[str, Any], settings: _Settings) -> Any:
    if settings.transport is not None:
        inherited: dict[str, Any] = _methods_of(_TransportMethods)
    else:
        from horovod.torch.optimizer import _DistributedOptimizer

        inherited = _methods_of(_DistributedOptimizer)
    methods = {**inherited, **_methods_of(_OneBitMethods), "_onebit_base": base, "_onebit_inherited": inherited}
    cls: Any = type(base.__name__, (base,), methods)
    # the groups themselves, as Horovod does: a scheduler on the user's optimizer goes on steering this one
    return cls(param_groups, defaults, settings)


def _methods_of(cls: type) -> dict[str, Any]:
    return {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}


class _TransportMethods:
    """What Horovod's class provides, over one of the core's transports: averaging when `synchronize` is called."""

    def __init__(self, params: Any, settings: _Settings) -> None:
        super(self.__class__, self).__init__(params)  # type: ignore[call-arg]
        self._parameter_names = {p: name for name, p in settings.named_parameters}
        self._synchronized = False
        self._should_synchronize = True
        self.backward_passes_per_step = settings.backward_passes_per_step

    def synchronize(self) -> None:
        engine: Engine = self._onebit  # type: ignore[attr-defined]
        live = [p for p in engine.parameters() if p.requires_grad and not engine.is_compressed(p)]
        pending = []
        for p in live:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            engine.stats.count(ring_allreduce_bytes(gradient.numel() * gradient.element_size(), self._transport.size))  # type: ignore[attr-defined]
            pending.append(self._transport.allreduce(gradient, name=self._parameter_names[p]))  # type: ignore[attr-defined]
        for p, each in zip(live, pending, strict=True):
            mean = each.wait()
            p.grad = mean if self._gradient_scale == 1.0 else mean * self._gradient_scale  # type: ignore[attr-defined]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True


class _CountingCompression:
    """hvd.Compression, counting what it hands to allreduce; bfloat16, which Horovod's cannot sum, goes as float32."""

    def __init__(self, inner: Any, count: Callable[[int], None]) -> None:
        self._inner = inner
        self._count = count

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        compressed, context = self._inner.compress(wide)
        self._count(compressed.numel() * compressed.element_size())
        return compressed, (tensor.dtype, context)

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        dtype, inner_context = context
        result: Tensor = self._inner.decompress(tensor, inner_context)
        return result.to(dtype)


class _OneBitMethods:
    """The methods put over Horovod's (or the transport's) and the optimizer's own.

    They use super(self.__class__, self) as Horovod's do: the class they end up in is made at run time and is the last.
    """

    def __init__(self, params: Any, defaults: dict[str, Any] | None = None, settings: _Settings | None = None) -> None:
        if defaults is None or settings is None:  # by hvd.DistributedOptimizer around this one
            raise TypeError(_WRAPPED_TWICE)
        self._onebit: Engine | None = None
        self._settings = settings
        self._late_hooks: dict[Tensor, Any] = {}
        self._is_clipped = False  # while a step's own gradients are, and may be sent
        if settings.transport is not None:
            self._transport: Any = HostTransport(settings.transport)
            self._gradient_scale = 1.0
            self._inherited("__init__", params, settings)
        else:
            self._transport = HorovodTransport(settings.process_set)
            included = settings.process_set.included()
            self._gradient_scale = _gradient_scale(settings, self._transport) if included else 1.0
            self._inherited(
                "__init__",
                params,
                settings.named_parameters,
                _CountingCompression(settings.compression, self._count_allreduce),
                settings.backward_passes_per_step,
                settings.op,
                settings.gradient_predivide_factor,
                settings.groups,
                settings.sparse_as_dense,
                settings.process_set,
            )
            if not included:
                self._transport = None
        self.defaults = dict(defaults)
        self.compression_options = settings.options
        if self._transport is not None:
            engine, rule = _RULES[self._onebit_base]  # type: ignore[attr-defined]
            self._onebit = engine(
                self,
                rule(settings.options),
                self._parameter_names,  # type: ignore[attr-defined]
                self._transport,
                gradient_scale=self._gradient_scale,
                loss_scale=_loss_scale_of(settings.grad_scaler),
            )
            if settings.transport is None:
                self._transport.named_by(lambda: _next_name(settings.process_set), step=self._step_under_way)

    @property
    def state(self) -> Any:
        """As torch's: the optimizer's tensors by parameter.

        In the compression stage the momentum is kept as bits; whoever looks gets it as float32, until the next step.
        """
        engine = self.__dict__.get("_onebit")
        if engine is not None:
            engine.expand_momentum()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self._leave_bits()
        self.__dict__["state"] = state

    def _leave_bits(self) -> None:
        """Before the state is replaced: what is kept as bits belongs to the old one, and must not get into the new."""
        engine = self.__dict__.get("_onebit")
        if engine is not None:
            engine.expand_momentum()

    def _inherited(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._onebit_inherited[name](self, *args, **kwargs)  # type: ignore[attr-defined]

    @property
    def stats(self) -> Stats:
        """Counters of this rank: stage, steps, bytes sent, elements compressed, steps skipped."""
        return Stats() if self._onebit is None else self._onebit.stats

    def _count_allreduce(self, num_bytes: int) -> None:
        if self._onebit is not None:
            self._onebit.stats.count(ring_allreduce_bytes(num_bytes, self._transport.size))

    # -- Horovod's seam --

    def _allreduce_grad_async(self, p: Tensor) -> Any:
        self._make_dense(p)
        if self._synchronized:
            self._abandon_step()  # before this backward's first bucket is compressed on top of it
        if self._settings.options.local_clip_norm is not None and not self._is_clipped:
            return None, None  # Horovod sends it in synchronize(): the norm is of all gradients, and some are to come
        if self._onebit is not None and self._onebit.is_compressed(p):
            if not self._onebit.is_torn:
                self._onebit.gradient_is_ready(p)
            return self._onebit.finish, None  # a handle for Horovod's check of repeated backward passes; never called
        _make_contiguous(p)
        handle, context = self._inherited("_allreduce_grad_async", p)
        name = f"the gradient of {self._parameter_names[p]}"  # type: ignore[attr-defined]
        # called by Horovod's synchronize(), whose own wait has no end
        return functools.partial(self._transport.wait_for, handle, name), context

    def _step_under_way(self) -> int:
        return 0 if self._onebit is None else self._onebit.step + 1

    def _grouped_allreduce_grad_async(self, ps: Sequence[Tensor]) -> Any:
        for p in ps:
            self._make_dense(p)
            _make_contiguous(p)
        return self._inherited("_grouped_allreduce_grad_async", ps)

    def _make_dense(self, p: Tensor) -> None:
        if p.grad is None or not p.grad.is_sparse:
            return
        if not self._settings.sparse_as_dense:
            name = self._parameter_names[p]  # type: ignore[attr-defined]
            raise TypeError(
                f"parameter {name!r} has a sparse gradient, which Adam cannot take: pass sparse_as_dense=True to sum "
                "it into a dense one, or build the embedding with sparse=False"
            )
        p.grad = p.grad.to_dense()

    def _watch(self) -> None:
        """Keeps Horovod's lists in step with what is trained now: it looks at parameters only once, at construction."""
        engine = self._onebit
        assert engine is not None
        for p in engine.parameters():
            self._make_dense(p)
        if self._settings.transport is not None or self._transport.size == 1:
            return
        if self._groups is not None and engine.stage != WARM_UP:  # type: ignore[has-type]
            self._groups = None
        for p in engine.parameters():
            if engine.is_compressed(p):
                self._handles.pop(p, None)  # type: ignore[attr-defined]
                self._allreduce_delay[p] = self.backward_passes_per_step  # type: ignore[attr-defined]
            if p.requires_grad and not engine.is_compressed(p):
                self._requires_update.add(p)  # type: ignore[attr-defined]
            else:
                # what is on its way already is still waited for
                self._requires_update.discard(p)  # type: ignore[attr-defined]
            if p.requires_grad:
                self._hook_late(p)

    def _hook_late(self, p: Tensor) -> None:
        """Horovod's hook for a parameter that it did not see at construction."""
        if p not in self._hooked and p not in self._late_hooks:
            self._allreduce_delay.setdefault(p, self.backward_passes_per_step)  # type: ignore[attr-defined]
            if self._groups is not None:
                self._p_to_group[p] = (p,)
                self._group_counts[p,] = 0
            self._late_hooks[p] = p.register_post_accumulate_grad_hook(self._make_hook(p))  # type: ignore[attr-defined]

    def _register_hooks(self) -> None:
        self._inherited("_register_hooks")
        self._hooked = frozenset(self._requires_update)  # type: ignore[attr-defined]

    # -- a step --

    def synchronize(self) -> None:
        """Collective: averages all gradients, so that `.grad` holds what `step()` will use."""
        if self._onebit is None:
            self._inherited("synchronize")
            return
        self._leave_unused_step()
        if not self._synchronized:
            with self._in_one_piece():
                self._exchange()
                self._onebit.write_gradients()

    def _leave_unused_step(self) -> None:
        """Gradients that were synchronised but not used, as when a scaler skips a step, make way for newer ones."""
        if self._synchronized and getattr(self, "_handles", None):
            self._abandon_step()

    def _abandon_step(self) -> None:
        assert self._onebit is not None
        self._synchronized = False
        self._onebit.abandon()

    def _exchange(self) -> None:
        assert self._onebit is not None
        self._watch()
        self._onebit.clip_own_gradients()
        self._is_clipped = True
        try:
            self._onebit.begin()
            self._wait_for_groups()
            self._inherited("synchronize")
        finally:
            self._is_clipped = False
        self._onebit.finish()
        self._synchronized = True

    def _wait_for_groups(self) -> None:
        """Those of Horovod's `groups` that are under way: their handles cannot be functions."""
        for key, (handle, _) in getattr(self, "_handles", {}).items():
            if isinstance(key, tuple):
                name = f"the gradients of the group of {self._parameter_names[key[0]]}"  # type: ignore[attr-defined]
                self._transport.poll_until_there(handle, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: one update; averages first unless `synchronize()` has. All ranks skip it if one has a NaN."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plain_step = self._plain_step
        if self._onebit is None:
            plain_step()
            return loss
        if self._should_synchronize:
            self._leave_unused_step()
            if not self._synchronized:
                self._check_scaling()
                with self._in_one_piece():
                    self._exchange()
        if not self._synchronized:
            raise OneBitError("step() inside skip_synchronize() needs a synchronize() before it")
        self._synchronized = False
        with self._in_one_piece(applies=True):
            self._onebit.apply(plain_step)
        return loss

    @contextmanager
    def _in_one_piece(self, *, applies: bool = False) -> Iterator[None]:
        """What is done in part, since something was raised in the midst of it, must not be gone on with.

        Args:
            applies: then any error may have come between two parameters. Before, errors are told of and undone where
                they arise, and only what may be raised anywhere counts, as a KeyboardInterrupt.
        """
        engine = self._onebit
        assert engine is not None
        engine.refuse_if_torn()
        try:
            yield
        except OneBitError:  # on all ranks alike, and at a place that was made for it
            raise
        except BaseException as error:
            if applies or not isinstance(error, Exception):
                self._forget_handles()
                engine.tear(error)
            raise

    def _plain_step(self) -> None:
        """The optimizer's own step, without any hook, the optimizer's or torch's global ones: they run around ours."""
        step = super(self.__class__, self).step.__func__  # type: ignore[misc]
        if getattr(step, "hooked", False):  # torch's word for a step that it has put hooks around
            step = step.__wrapped__
        step(self)

    def _check_scaling(self) -> None:
        if self._settings.grad_scaler is not None and self._settings.grad_scaler.is_enabled():
            raise OneBitError(
                "with a GradScaler gradients are synchronised before they are unscaled: call optimizer.synchronize(), "
                "scaler.unscale_(optimizer), then scaler.step(optimizer) inside optimizer.skip_synchronize()"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; not between backward() and step() or synchronize()."""
        if getattr(self, "_handles", None):
            raise OneBitError(
                "zero_grad() was called after backward() but before step() or synchronize(): gradients are under way"
            )
        if self._onebit is not None and self._synchronized:
            self._abandon_step()
        super(self.__class__, self).zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters warm up in full precision for as many updates as the others had."""
        if self._onebit is not None:
            self._onebit.check_group({**self.defaults, **param_group})
            self._check_names(param_group)
        super(self.__class__, self).add_param_group(param_group)  # type: ignore[misc]
        if self._onebit is None:
            return
        index = len(self.param_groups) - 1  # type: ignore[attr-defined]
        group = self.param_groups[index]  # type: ignore[attr-defined]
        given = group.get("param_names") or [f"group{index}.{j}" for j in range(len(group["params"]))]
        for name, p in zip(given, group["params"], strict=True):
            self._parameter_names[p] = name  # type: ignore[attr-defined]
        self._settings = replace(
            self._settings,
            named_parameters=tuple((name, p) for p, name in self._parameter_names.items()),  # type: ignore[attr-defined]
        )
        self._onebit.initialise_state()

    def _check_names(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        given = [each[0] for each in params if isinstance(each, tuple)] if isinstance(params, (list, tuple)) else []
        twice = sorted(set(given) & set(self._parameter_names.values()))  # type: ignore[attr-defined]
        if twice:
            raise ValueError(
                f"parameter names must be unique, but these are taken: {', '.join(twice)}. Give the new ones a prefix: "
                "head.named_parameters(prefix='head')"
            )

    # -- state --

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with this rank's compression errors under "onebit". Not collective."""
        extra = None if self._onebit is None else self._onebit.state()
        state: dict[str, Any] = super(self.__class__, self).state_dict()  # type: ignore[misc]
        if extra is not None:
            state["onebit"] = extra
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a checkpoint of this optimizer or of the plain one. Not collective; do it on every rank.

        Raises:
            ValueError: the checkpoint does not fit or is damaged; the optimizer is as it was.
            OneBitError: gradients are under way; the optimizer is as it was.
        """
        if any(handle is not None for handle, _ in getattr(self, "_handles", {}).values()):
            raise OneBitError(
                "load_state_dict() was called after backward() but before step() or synchronize(): gradients are under "
                "way. Call synchronize() before it, on every rank"
            )
        rule = _RULES[self._onebit_base][1](self._settings.options)  # type: ignore[attr-defined]
        saved = _check_checkpoint(state_dict, self, rule)  # type: ignore[arg-type]
        own_groups = self.param_groups  # type: ignore[attr-defined]
        self._leave_bits()
        super(self.__class__, self).load_state_dict(state_dict)  # type: ignore[misc]
        for group, own in zip(self.param_groups, own_groups, strict=True):  # type: ignore[attr-defined]
            for key, value in own.items():
                if not key.startswith("onebit_"):
                    group.setdefault(key, value)  # options that the plain optimizer's checkpoint does not know
        self._forget_handles()
        if self._onebit is not None:
            self._onebit.load(state_dict.get("onebit"), saved)

    def _forget_handles(self) -> None:
        """Drops gradients that are under way, and what Horovod has counted of them."""
        self._synchronized = False
        self._should_synchronize = True
        if hasattr(self, "_handles"):
            self._handles.clear()
            for p in self._allreduce_delay:  # type: ignore[attr-defined]
                self._allreduce_delay[p] = self.backward_passes_per_step  # type: ignore[attr-defined]

    def _enter_world(self, prefix: str, old: dict[str, Any] | None = None) -> None:
        """After Horovod was initialised anew: takes up its ranks. Not collective.

        Args:
            prefix: of the names of all its collectives, the same on every rank whatever it did before.
            old: as for `Engine.move_to`.
        """
        assert self._onebit is not None
        self._forget_handles()
        self._transport = HorovodTransport(self._settings.process_set)
        self._transport.named_by(lambda: prefix, step=self._step_under_way)
        self._gradient_scale = _gradient_scale(self._settings, self._transport)
        self._onebit.move_to(self._transport, gradient_scale=self._gradient_scale, old=old)

    def plain_state_dict(self) -> dict[str, Any]:
        """A state_dict for the plain optimizer of the same kind (torch.optim.Adam for OneBitAdam). Not collective.

        The frozen variance is biased by its own number of updates; here it is as the plain optimizer will correct it.
        """
        state: dict[str, Any] = copy.deepcopy(super(self.__class__, self).state_dict())  # type: ignore[misc]
        rule = _RULES[self._onebit_base][1](self._settings.options)  # type: ignore[attr-defined]
        for group in state["param_groups"]:
            for index in group["params"]:
                each = state["state"].get(index, {})
                if each.get(FROZEN_STEP, NOT_FROZEN) != NOT_FROZEN:
                    rule.thaw(group, each)
                state["state"][index] = {k: v for k, v in each.items() if not k.startswith("onebit_")}
            for key in [key for key in group if key.startswith("onebit_")]:
                del group[key]
        return state

    def synchronize_for_checkpoint(self) -> None:
        """Collective: afterwards any rank's state_dict() alone restores a run on any number of ranks.

        Every rank gets the mean of the ranks' compression errors, so that nothing that is still owed is lost.
        """
        if self._onebit is not None:
            self._onebit.synchronize_for_checkpoint()

    # -- copies --

    def __reduce_ex__(self, protocol: Any) -> Any:
        settings = self._settings
        if settings.process_set is not None and settings.process_set.process_set_id != 0:
            raise TypeError("an optimizer on a process set cannot be pickled: pickle its state_dict() instead")
        if settings.transport is not None:
            raise TypeError("an optimizer on a transport cannot be pickled: pickle its state_dict() instead")
        return _rebuild, self._recipe(replace(settings, process_set=None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settings = self._settings
        # in the caller's memo, so that a model copied beside the optimizer is the one that the copy trains
        memo.update({id(each): each for each in (settings.process_set, settings.transport) if each is not None})
        return _rebuild(*copy.deepcopy(self._recipe(settings), memo))

    def _recipe(self, settings: _Settings) -> tuple[Any, ...]:
        return self._onebit_base, self.param_groups, self.defaults, settings, self.state_dict()  # type: ignore[attr-defined]

    def __getstate__(self) -> Any:
        raise TypeError("use copy, pickle or state_dict()")


def _rebuild(
    base: type, param_groups: list[dict[str, Any]], defaults: dict[str, Any], settings: _Settings, state: dict[str, Any]
) -> Any:
    """An optimizer from its pickled parts."""
    if settings.transport is None and settings.process_set is None:
        op, compression, process_set = _horovod_defaults(settings.op, settings.compression, None, 1.0)
        settings = replace(settings, op=op, compression=compression, process_set=process_set)
    optimizer = _make(base, param_groups, defaults, settings)
    optimizer.load_state_dict(state)
    return optimizer


def _make_contiguous(p: Tensor) -> None:
    """Horovod takes no other gradient, and autograd gives it the parameter's own strides."""
    if p.grad is not None and not p.grad.is_contiguous():
        p.grad = p.grad.contiguous()


def _loss_scale_of(grad_scaler: Any) -> Callable[[], float]:
    if grad_scaler is None:
        return lambda: 1.0
    return lambda: float(grad_scaler.get_scale())


def _gradient_scale(settings: _Settings, transport: HorovodTransport) -> float:
    import horovod.torch as hvd

    return float(transport.size) if settings.op == hvd.Sum else 1.0


def forget_names() -> None:
    """Counts optimizers from the start again: Horovod has been initialised anew, and newcomers start at one."""
    _instances.clear()


def _next_name(process_set: Any) -> str:
    key = str(process_set.process_set_id)
    _instances[key] += 1
    return f"onebit.{key}.{_instances[key]}"


def _check_checkpoint(state_dict: Any, optimizer: torch.optim.Optimizer, rule: AdamRule) -> list[dict[str, Any] | None]:
    """The saved state of each parameter in order; raises ValueError for what does not fit, before anything changes."""
    for key in ("state", "param_groups"):
        if not isinstance(state_dict, dict) or key not in state_dict:
            raise ValueError(f"not an optimizer's state_dict: it has no {key!r}")
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in state_dict["param_groups"]]
    if here != there:
        raise ValueError(f"the checkpoint has parameter groups of {there} parameters, the optimizer of {here}")
    saved: list[dict[str, Any] | None] = []
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], saved_group["params"], strict=True):
            state = state_dict["state"].get(index)
            if state:
                is_frozen = state.get(FROZEN_STEP, NOT_FROZEN) != NOT_FROZEN
                _check_state(state, p, len(saved), rule.frozen_keys(group) if is_frozen else rule.plain_keys)
            saved.append(state)
    _check_extra(state_dict.get("onebit"), rule)
    return saved


def _check_state(saved: dict[str, Any], p: Tensor, index: int, required: Sequence[str]) -> None:
    for name in required:
        if name not in saved:
            raise ValueError(
                f"the checkpoint has no {name} of parameter {index}: it is damaged, or another optimizer's"
            )
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            continue
        if name != "step" and value.shape != p.shape:
            raise ValueError(
                f"the checkpoint's {name} of parameter {index} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(p.shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the checkpoint's {name} of parameter {index} holds NaN or infinity: take an earlier one")


def _check_extra(extra: Any, rule: AdamRule) -> None:
    """Checks what `CompressionEngine.state` adds to a checkpoint; None in a plain optimizer's."""
    if extra is None:
        return
    if not isinstance(extra, dict) or not isinstance(extra.get("version"), int):
        raise ValueError("the checkpoint's 'onebit' is not what this optimizer wrote: it is damaged, or foreign")
    if extra["version"] > FORMAT_VERSION:
        raise ValueError(
            f"the checkpoint has format version {extra['version']}, this hvd_onebit reads up to {FORMAT_VERSION}: "
            "upgrade it"
        )
    missing = [key for key in ("rule", "rank", "size", "shared", "errors") if key not in extra]
    if missing:
        raise ValueError(f"the checkpoint's 'onebit' has no {', '.join(missing)}: it is damaged")
    if extra["rule"] != type(rule).__name__:
        raise ValueError(f"the checkpoint is of another kind of optimizer: {extra['rule']}, not {type(rule).__name__}")
    for bucket, each in extra["errors"].items():
        for name in ("parameters", "sizes", "worker_error", "server_error"):
            if name not in each:
                raise ValueError(f"the checkpoint's errors of {bucket} have no {name}: it is damaged")
        for name in ("worker_error", "server_error"):
            if each[name] is not None and not bool(torch.isfinite(each[name]).all()):
                raise ValueError(f"the checkpoint's {name} of {bucket} holds NaN or infinity: take an earlier one")
