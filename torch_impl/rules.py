"""How each optimizer is compressed: what it sends, how it applies the average, what it keeps.

A rule reads and writes the optimizer's own state of a parameter; the mathematics is `hvd_onebit.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_onebit.codec import Codec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.fused import apply_adam, apply_momentum
from hvd_onebit.hosts import Place
from hvd_onebit.layout import Bucket
from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import (
    AdamStep,
    LambFactors,
    adam_step,
    adam_update,
    check_sgd,
    denominator,
    lamb_factor,
    lamb_scalings,
    lamb_step,
    lamb_update,
    ordered_norm,
    true_average,
)
from hvd_onebit.stage import thaw_ratio
from hvd_onebit.stats import Stats, TrustRatio
from hvd_onebit.torch.codec import codec_for, num_threads
from hvd_onebit.transport import Transport

__all__ = [
    "NOT_FROZEN",
    "VARIANCE_STEPS",
    "AdamRule",
    "CompressedBucket",
    "LambRule",
    "SgdRule",
    "Workspace",
    "group_factors",
    "is_plain",
    "norm",
    "numbers_of",
    "square_root",
]

# kept in the optimizer's own per-parameter state, so that whatever copies that state carries the stage with it
FROZEN_STEP = "onebit_frozen_step"  # the step after which this parameter was compressed
VARIANCE_STEPS = "onebit_variance_steps"  # updates that went into its frozen variance
WARM_SINCE = "onebit_warm_since"  # its own updates at the time its variance was last seen all zero
NOT_FROZEN = -1

Group = dict[str, Any]
State = dict[str, Any]


class Workspace:
    """Two flat arrays on one device that all buckets use in turn, as large as the largest bucket.

    Args:
        codec: makes them.
        transport: makes the first one, if given and where that makes a difference, in memory that the host's ranks see.
    """

    def __init__(self, codec: Codec[Tensor], transport: Transport[Tensor] | None = None) -> None:
        self._codec = codec
        self._transport = transport
        self._num_elements = 0
        self._arrays: list[Tensor | None] = [None, None]

    def reserve(self, num_elements: int) -> None:
        """Makes room for a bucket."""
        if num_elements > self._num_elements:
            self._num_elements = num_elements
            self._arrays = [None, None]

    def first(self, num_elements: int) -> Tensor:
        """float32, shape (num_elements,), holding what it was left with."""
        return self._array(0)[:num_elements]

    def second(self, num_elements: int) -> Tensor:
        """Another."""
        return self._array(1)[:num_elements]

    def _array(self, index: int) -> Tensor:
        array = self._arrays[index]
        if array is None:
            if self._transport is not None and index == 0:
                array = self._transport.shared_zeros(self._num_elements)
            if array is None:
                array = self._codec.zeros(self._num_elements)
            self._arrays[index] = array
        return array


class CompressedBucket:
    """One bucket's tensors: where their momentum lies, and the exchange that averages it.

    Attributes:
        momentum: float32, shape (num_elements,): the parameters' momentum, of which their state holds views; None
            while the exchange keeps it as the bits that the last step gave.
        shared_error: float32, shape (num_elements,): while the ranks' errors are shared, what every rank's checkpoint
            holds of them, if the exchange is hierarchical and has only a shard; else None.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[Tensor],
        group: Group,
        transport: Transport[Tensor],
        options: CompressionOptions,
        workspace: Workspace,
        place: Place | None = None,
    ) -> None:
        codec = codec_for(parameters[0].device)
        self.codec = codec
        self.bucket = bucket
        self.parameters = tuple(parameters)
        self.group = group
        self.exchange = CompressedAllreduce(
            bucket, rank=transport.rank, size=transport.size, codec=codec, options=options, place=place
        )
        self.momentum: Tensor | None = codec.zeros(bucket.num_elements)
        self.shared_error: Tensor | None = None
        self._workspace = workspace
        workspace.reserve(bucket.num_elements)
        if options.dead == "hold":
            self.exchange.live = codec.zeros(bucket.num_elements)

    @property
    def values(self) -> Tensor:
        """float32, shape (num_elements,): what is sent, or what came back; every bucket's, one after the other."""
        return self._workspace.first(self.bucket.num_elements)

    @property
    def scratch(self) -> Tensor:
        """float32, shape (num_elements,): as `values`, other memory."""
        return self._workspace.second(self.bucket.num_elements)

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` cut into the parameters' shapes."""
        return [
            flat[offset : offset + size].view(p.shape)
            for offset, size, p in zip(self.bucket.offsets, self.bucket.sizes, self.parameters, strict=True)
        ]

    def gather(self, gradient_scale: float) -> None:
        """Copies the gradients, with coupled weight decay, into `values`; a missing one counts as zero."""
        sign = -gradient_scale if self.group.get("maximize") else gradient_scale
        decay = self.group["weight_decay"] if _is_coupled(self.group) else 0.0
        for view, p in zip(self.views(self.values), self.parameters, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad)
            if sign != 1.0:
                view.mul_(sign)
            if decay:
                view.add_(p, alpha=decay)


class AdamRule:
    """1-bit Adam: the momentum travels, the variance is frozen. The base of the others."""

    momentum_key = "exp_avg"
    hyperparameters: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay")
    switches: tuple[str, ...] = ("maximize", "amsgrad", "bias_correction", "decoupled_weight_decay")
    plain_keys: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")  # what the plain optimizer's checkpoint must hold
    counts_own_steps = True  # the optimizer's own step() keeps state["step"]

    def __init__(self, options: CompressionOptions) -> None:
        self.options = options

    def memory(self, group: Group) -> float:
        """The decay rate of the average that has to settle before the freeze."""
        return float(group["betas"][1])

    def variance_key(self, group: Group) -> str | None:
        """The state's name of what is frozen; None for rules without a variance."""
        return "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"

    def tensors(self, group: Group) -> tuple[str, ...]:
        """The state's names of tensors that are float32 in the compression stage."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def new_state(self, group: Group, p: Tensor) -> State:
        """What the optimizer would create at its first step."""
        on_device = group.get("capturable") or group.get("fused")
        state: State = {"step": torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")}
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])):
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    def check_group(self, group: Group) -> None:
        """Raises ValueError for a parameter group that cannot be served."""
        if group.get("differentiable"):
            raise ValueError("differentiable=True cannot be served: the compressed update is not differentiable")

    def frozen_keys(self, group: Group) -> tuple[str, ...]:
        """The state's names that a compressed parameter's checkpoint must hold."""
        return (*self.plain_keys, VARIANCE_STEPS, WARM_SINCE)

    def before_first_step(self, group: Group, states: Sequence[State]) -> None:
        """Called before the optimizer's own step."""

    def frozen_state(
        self, ready: Sequence[tuple[Group, Tensor]], states: Any, variances: Sequence[Tensor | None]
    ) -> list[State]:
        """What changes in the states of `ready` when they are frozen with these variances; changes nothing yet."""
        keys = [self.variance_key(group) for group, _ in ready]
        return [
            {} if key is None or variance is None else {key: variance}
            for key, variance in zip(keys, variances, strict=True)
        ]

    def settle(self, group: Group, state: State, owed: Tensor) -> bool:
        """Puts what is owed into a frozen state's momentum, as if the next exchange sent everything; False if it can't.

        The next momentum is beta1*m + (1-beta1)*g, and compression would have added what is owed to that.
        """
        beta1 = group["betas"][0]
        if not beta1:
            return False
        if self.options.space == "update":
            owed = owed * self._root(group, state)
        state[self.momentum_key] = state[self.momentum_key] + owed / beta1
        return True

    def thaw(self, group: Group, state: State) -> None:
        """Makes a frozen state a live one again, so that the optimizer's own step can go on with it."""
        name = self.variance_key(group)
        if name is None or not group.get("bias_correction", True) or not state[VARIANCE_STEPS]:
            return
        state[name] = state[name] * thaw_ratio(group["betas"][1], int(state["step"]), state[VARIANCE_STEPS])

    def momentum_decay(self, group: Group) -> float | None:
        """The beta1 with which the exchange itself adds the momentum; None if `prepare` does."""
        return float(group["betas"][0]) if self.options.space == "momentum" else None

    def prepare(self, bucket: CompressedBucket, states: Any) -> None:
        """Makes what is compressed, beside the momentum, of `values`, which holds the gradients."""
        if self.options.space == "momentum":
            return
        beta1 = bucket.group["betas"][0]
        bucket.values.mul_(1.0 - beta1).add_(self.momentum_of(bucket, states) * beta1)
        for p, view in zip(bucket.parameters, bucket.views(bucket.values), strict=True):
            view.div_(self._root(bucket.group, states[p]))

    def restore(self, bucket: CompressedBucket, flat: Tensor, states: Any) -> None:
        """Makes the averaged momentum of `flat`, which holds what came back."""
        if self.options.space == "update":
            for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                view.mul_(self._root(bucket.group, states[p]))

    def momentum_of(self, bucket: CompressedBucket, states: Any) -> Tensor:
        """The bucket's momentum as float32; in `scratch`, if the exchange keeps it as bits."""
        if bucket.momentum is not None:
            return bucket.momentum
        self.decode_momentum(bucket, bucket.scratch, states)
        return bucket.scratch

    def decode_momentum(self, bucket: CompressedBucket, flat: Tensor, states: Any) -> None:
        """Writes the momentum that the exchange keeps."""
        bucket.exchange.kept(flat)
        self.restore(bucket, flat, states)

    def fuses(self, p: Tensor) -> bool:
        """True when `apply_from_bits` serves this parameter."""
        return self.options.space == "momentum" and is_plain(p)

    def apply_from_bits(self, bucket: CompressedBucket, index: int, state: State) -> None:
        """Decodes and updates in one pass over memory."""
        numbers = numbers_of(bucket.group, state)
        variance = self._variance(bucket.group, state).view(-1).numpy()
        hold = self.options.dead == "hold"
        apply_adam(bucket.exchange, *_flat(bucket, index), variance, numbers, hold=hold, threads=num_threads())

    def apply(
        self, group: Group, p: Tensor, state: State, momentum: Tensor, averaged: Tensor, name: str, stats: Stats
    ) -> None:
        """Takes up the averaged momentum (float32, the parameter's shape) and updates the parameter."""
        variance = self._variance(group, state)
        held = variance == 0 if self.options.dead == "hold" else None
        momentum.copy_(averaged if held is None else torch.where(held, momentum, averaged))
        if p.requires_grad:
            new = adam_update(p.float(), momentum, variance, numbers_of(group, state), square_root)
            p.copy_(new if held is None else torch.where(held, p.float(), new))

    def _variance(self, group: Group, state: State) -> Tensor:
        key = self.variance_key(group)
        assert key is not None
        variance: Tensor = state[key]
        return variance

    def _root(self, group: Group, state: State) -> Tensor:
        # step sizes play no part in the denominator
        return denominator(self._variance(group, state), numbers_of(group, state), square_root)


class SgdRule(AdamRule):
    """1-bit momentum SGD: the same without a variance."""

    momentum_key = "momentum_buffer"
    hyperparameters = ("lr", "momentum", "dampening", "weight_decay")
    switches = ("maximize", "nesterov")
    plain_keys = ("momentum_buffer",)
    counts_own_steps = False

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_sgd(momentum=group["momentum"], nesterov=group["nesterov"])

    def memory(self, group: Group) -> float:
        return float(group["momentum"])

    def variance_key(self, group: Group) -> str | None:
        return None

    def tensors(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def new_state(self, group: Group, p: Tensor) -> State:
        buffer = torch.zeros_like(p, memory_format=torch.preserve_format)
        return {"step": torch.zeros((), dtype=torch.float32), "momentum_buffer": buffer}

    def before_first_step(self, group: Group, states: Sequence[State]) -> None:
        for state in states if group["dampening"] else []:
            if state.get("step", 1) == 0:
                # torch's first step copies the gradient undamped, if there is no buffer
                state["momentum_buffer"] = None

    def settle(self, group: Group, state: State, owed: Tensor) -> bool:
        state["momentum_buffer"] = state["momentum_buffer"] + owed / group["momentum"]
        return True

    def momentum_decay(self, group: Group) -> float | None:
        return None

    def prepare(self, bucket: CompressedBucket, states: Any) -> None:
        if bucket.group["dampening"]:
            for p, view in zip(bucket.parameters, bucket.views(bucket.values), strict=True):
                if states[p]["step"] != 0:
                    view.mul_(1.0 - bucket.group["dampening"])
        # not by alpha=, which rounds once where all other implementations round twice
        bucket.values.add_(self.momentum_of(bucket, states) * bucket.group["momentum"])

    def restore(self, bucket: CompressedBucket, flat: Tensor, states: Any) -> None:
        pass

    def fuses(self, p: Tensor) -> bool:
        return is_plain(p)

    def apply_from_bits(self, bucket: CompressedBucket, index: int, state: State) -> None:
        step_size = float(bucket.group["lr"])
        apply_momentum(bucket.exchange, *_flat(bucket, index), step_size=step_size, threads=num_threads())

    def apply(
        self, group: Group, p: Tensor, state: State, momentum: Tensor, averaged: Tensor, name: str, stats: Stats
    ) -> None:
        momentum.copy_(averaged)
        if p.requires_grad:
            p.copy_(p.float() - averaged * float(group["lr"]))


class LambRule(AdamRule):
    """1-bit LAMB (Li et al. 2021, arXiv 2104.06069, algorithm 1)."""

    hyperparameters = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "max_coeff",
        "min_coeff",
        "coeff_beta",
        "factor_max",
        "factor_min",
        "factor_threshold",
    )

    switches = ("bias_correction",)

    def variance_key(self, group: Group) -> str | None:
        return "exp_avg_sq"

    def tensors(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    def frozen_keys(self, group: Group) -> tuple[str, ...]:
        own = ("coeff_average", "coeff_updates", "last_factor", "scaling", "exp_avg_sq_fresh")
        return (*super().frozen_keys(group), *own)

    def new_state(self, group: Group, p: Tensor) -> State:
        return {
            **super().new_state(group, p),
            "coeff_average": 0.0,
            "coeff_updates": 0,
            "last_factor": 1.0,
            "scaling": 1.0,
            # from the start, though it is used after the freeze: broadcast_optimizer_state broadcasts what is there
            "exp_avg_sq_fresh": torch.zeros_like(p, memory_format=torch.preserve_format),
        }

    def frozen_state(
        self, ready: Sequence[tuple[Group, Tensor]], states: Any, variances: Sequence[Tensor | None]
    ) -> list[State]:
        changes = super().frozen_state(ready, states, variances)
        rms = [norm(states[p]["exp_avg"]) / math.sqrt(p.numel()) for _, p in ready]
        for change, scaling in zip(changes, lamb_scalings(rms), strict=True):
            fresh = change["exp_avg_sq"].clone()
            change.update(scaling=scaling, last_factor=1.0, exp_avg_sq_fresh=fresh)
        return changes

    def settle(self, group: Group, state: State, owed: Tensor) -> bool:
        return super().settle(group, state, owed if self.options.space == "update" else owed / state["scaling"])

    def thaw(self, group: Group, state: State) -> None:
        # v' has been kept up to date all along
        state["exp_avg_sq"] = state["exp_avg_sq_fresh"]
        state["last_factor"] = state["scaling"] = 1.0

    def momentum_decay(self, group: Group) -> float | None:
        return None

    def prepare(self, bucket: CompressedBucket, states: Any) -> None:
        if self.options.space == "update":  # where all tensors are of comparable magnitude: no scaling
            super().prepare(bucket, states)
            return
        beta1 = bucket.group["betas"][0]
        bucket.values.mul_(1.0 - beta1).add_(self.momentum_of(bucket, states) * beta1)
        for p, view in zip(bucket.parameters, bucket.views(bucket.values), strict=True):
            view.mul_(states[p]["scaling"])

    def restore(self, bucket: CompressedBucket, flat: Tensor, states: Any) -> None:
        if self.options.space == "update":
            super().restore(bucket, flat, states)
            return
        for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
            view.div_(states[p]["scaling"])

    def fuses(self, p: Tensor) -> bool:
        return False

    def apply(
        self, group: Group, p: Tensor, state: State, momentum: Tensor, averaged: Tensor, name: str, stats: Stats
    ) -> None:
        factors = group_factors(group)
        new = lamb_update(
            p.float(),
            momentum,
            averaged,
            state["exp_avg_sq"],
            state["exp_avg_sq_fresh"],
            lamb_step(
                betas=group["betas"],
                eps=group["eps"],
                step=int(state["step"]),
                variance_steps=state[VARIANCE_STEPS],
                bias_corrected=group.get("bias_correction", True),
            ),
            _Arrays(),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            held=state["exp_avg_sq"] == 0 if self.options.dead == "hold" else None,
        )
        momentum.copy_(new.momentum)
        state["exp_avg_sq_fresh"] = new.fresh
        state["last_factor"] = lamb_factor(
            float(new.largest_ratio),
            state["last_factor"],
            factors,
            direction_norm=new.direction_norm,
            update_norm=new.update_norm,
        )
        average = true_average(state["coeff_average"], state["coeff_updates"], factors.coeff_beta)
        stats.trust_ratios[name] = TrustRatio(average, state["last_factor"])
        if p.requires_grad:
            p.copy_(p.float() - new.update * (float(group["lr"]) * average * state["last_factor"]))


class _Arrays:
    """torch's operations for `lamb_update`."""

    def sqrt(self, array: Tensor) -> Tensor:
        return square_root(array)

    def where(self, condition: Any, these: Any, others: Any) -> Tensor:
        return torch.where(condition, these, others)

    def largest(self, array: Tensor) -> Tensor:
        return array.max()

    def norm(self, array: Tensor) -> float:
        return norm(array)


def numbers_of(group: Group, state: State) -> AdamStep:
    """The numbers of this step's update of one parameter."""
    return adam_step(
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        step=int(state["step"]),
        variance_steps=state[VARIANCE_STEPS],
        decoupled_weight_decay=0.0 if _is_coupled(group) else group["weight_decay"],
        bias_corrected=group.get("bias_correction", True),
    )


def group_factors(group: Group) -> LambFactors:
    """LAMB's bounds of a parameter group."""
    names = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
    return LambFactors(**{name: group[name] for name in names})


def is_plain(p: Tensor) -> bool:
    """True when the core's kernels can work on the parameter's memory."""
    return p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous()


def square_root(tensor: Tensor) -> Tensor:
    """The root, rounded correctly: torch's on a CPU is off by a last bit now and then, and the kernels' is not."""
    if tensor.device.type != "cpu":
        return tensor.sqrt()
    return torch.from_numpy(np.sqrt(tensor.detach().numpy(), out=np.empty(tensor.shape, np.float32)))


def norm(tensor: Tensor) -> float:
    """The 2-norm in float64, summed in one order whatever the number of threads, so that ranks agree to the bit."""
    if tensor.device.type != "cpu":
        return float(tensor.double().square().sum().sqrt())
    return ordered_norm(tensor.detach().float().reshape(-1).numpy())


def _is_coupled(group: Group) -> bool:
    """True when weight decay is added to the gradient, as in Adam and SGD, and not applied beside the update."""
    return not group.get("decoupled_weight_decay", False)


def _flat(bucket: CompressedBucket, index: int) -> tuple[int, Any, Any]:
    """Where a parameter starts in the bucket, and its and its momentum's memory."""
    offset, size = bucket.bucket.offsets[index], bucket.bucket.sizes[index]
    parameter = bucket.parameters[index].detach().view(-1).numpy()
    momentum = None if bucket.momentum is None else bucket.momentum.numpy()[offset : offset + size]
    return offset, parameter, momentum
