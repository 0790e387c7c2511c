"""The family: optimizers that know how they want to be compressed.

Alone, or in one process, each is the plain optimizer that it warms up with; `DistributedOptimizer` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_onebit.options import local_steps_options, options_from
from hvd_onebit.rules import (
    LambFactors,
    adam_step,
    adam_update,
    average_coefficient,
    bias_correction,
    check_range,
    denominator,
    lamb_coefficient,
)
from hvd_onebit.torch.rules import group_factors, norm

__all__ = ["Lamb", "OneBitAdam", "OneBitLamb", "OneBitSGD", "ZeroOneAdam"]


class _BiasedAdam(torch.optim.Adam):
    """torch.optim.Adam with an option bias_correction in its groups."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One full-precision update."""
        uncorrected = [group for group in self.param_groups if not group.get("bias_correction", True)]
        if not uncorrected:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        corrected = [group for group in self.param_groups if group.get("bias_correction", True)]
        every_group = self.param_groups
        try:
            self.param_groups = corrected
            super().step()
        finally:
            self.param_groups = every_group
        for group in uncorrected:
            self._uncorrected_step(group)
        return loss

    @torch.no_grad()
    def _uncorrected_step(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        params: list[Tensor] = []
        grads: list[Tensor] = []
        moments: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        steps: list[Tensor] = []
        self._init_group(group, params, grads, *moments, steps)
        decoupled = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
        for i, p in enumerate(params):
            steps[i] += 1
            grad = -grads[i] if group["maximize"] else grads[i]
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                grad = grad.add(p, alpha=group["weight_decay"])
            moments[0][i].lerp_(grad, 1 - beta1)
            moments[1][i].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            variance = moments[1][i]
            if group["amsgrad"]:
                torch.maximum(moments[2][i], variance, out=moments[2][i])
                variance = moments[2][i]
            numbers = adam_step(
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                step=int(steps[i]),
                variance_steps=int(steps[i]),
                decoupled_weight_decay=decoupled,
                bias_corrected=False,
            )
            p.copy_(adam_update(p, moments[0][i], variance, numbers, torch.sqrt))


class OneBitAdam(_BiasedAdam):
    """Adam with 1-bit compression once its variance is frozen (Tang et al. 2021, arXiv 2102.02888).

    In one process, or before `DistributedOptimizer` wraps it, it is torch.optim.Adam.

    Args:
        params: as for torch.optim.Adam, and so lr, betas, eps, weight_decay, amsgrad, maximize,
            decoupled_weight_decay.
        bias_correction: False for the paper's Adam, which corrects no bias.
        **compression: options of `hvd_onebit.options.CompressionOptions`: freeze_step, exchange, scale, block, ...

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.

    Example:
        >>> optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2000)
        >>> optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        **compression: Any,
    ) -> None:
        self.compression_options = options_from(compression)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962), uncompressed: Adam whose step is scaled to each tensor's norm.

    u = m/(sqrt(v)+eps) + weight_decay*x;  c = clip(||x||/||u||, min_coeff, max_coeff), 1 if a norm is 0;  x -= lr*c*u.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay, part of u.
        bias_correction: False leaves the biases of momentum and variance in.
        max_coeff: upper bound of the trust ratio c.
        min_coeff: lower bound of the trust ratio c.
        coeff_beta: decay rate of the average of c, which 1-bit LAMB freezes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        **more_defaults: Any,
    ) -> None:
        check_range("lr", lr, 0.0)
        check_range("eps", eps, 0.0)
        check_range("weight_decay", weight_decay, 0.0)
        for i, beta in enumerate(betas):
            check_range(f"betas[{i}]", beta, 0.0, below=1.0)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "decoupled_weight_decay": True,
            **_FACTORS,
            **more_defaults,
        }
        group_factors(defaults)  # raises for what is out of range
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One full-precision update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(group, p, p.grad)
        return loss

    def _update(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> None:
        state = self.state[p]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["coeff_average"], state["coeff_updates"] = 0.0, 0
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = int(state["step"])
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        momentum.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        variance.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        numbers = adam_step(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            step=steps,
            variance_steps=steps,
            bias_corrected=group["bias_correction"],
        )
        update = momentum / denominator(variance, numbers, torch.sqrt)
        if group["bias_correction"]:
            update = update / bias_correction(beta1, steps)
        if group["weight_decay"]:
            update = update + p * group["weight_decay"]
        factors = group_factors(group)
        coefficient = lamb_coefficient(norm(p), norm(update), factors)
        if coefficient is not None:
            state["coeff_average"] = average_coefficient(state["coeff_average"], coefficient, factors.coeff_beta)
            state["coeff_updates"] += 1
        p.sub_(update * (float(group["lr"]) * (1.0 if coefficient is None else coefficient)))


_FACTORS = {name: getattr(LambFactors(), name) for name in ("factor_max", "factor_min", "factor_threshold")}


class OneBitLamb(Lamb):
    """LAMB with 1-bit compression once its variance is frozen (Li et al. 2021, arXiv 2104.06069).

    Args:
        params: as for `Lamb`, and so all but these.
        factor_max: upper bound of r, by which the frozen coefficient follows the variance.
        factor_min: its lower bound; factor_min = factor_max = 1 keeps the coefficient frozen.
        factor_threshold: r changes by at most this share in a step.
        **options: of `Lamb` and of `hvd_onebit.options.CompressionOptions`.

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        self.compression_options = options_from(options)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            coeff_beta=coeff_beta,
            factor_max=factor_max,
            factor_min=factor_min,
            factor_threshold=factor_threshold,
        )


class OneBitSGD(torch.optim.SGD):
    """SGD whose momentum travels as bits, from the first step on or after `freeze_step` updates.

    Args:
        params: as for torch.optim.SGD, and so lr, momentum, dampening, weight_decay, maximize.
        **compression: options of `hvd_onebit.options.CompressionOptions`; freeze_step is 0 unless given.

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **compression: Any,
    ) -> None:
        self.compression_options = options_from({"freeze_step": 0, **compression})
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, maximize=maximize
        )


class ZeroOneAdam(_BiasedAdam):
    """0/1 Adam (Lu et al. 2022, arXiv 2202.06009): local steps between ever rarer one-bit synchronisations.

    Args:
        params: as for torch.optim.Adam, and so lr, betas, eps, weight_decay, decoupled_weight_decay, maximize.
        bias_correction: False for the paper's Adam, which corrects no bias.
        var_freeze_step: updates after which the variance is frozen; "auto" for 1-bit Adam's rule.
        var_update_scaler: kappa: the variance is updated at gaps of 2**floor(j/kappa).
        local_step_scaler: the gap between synchronisations doubles every so many steps after the freeze; None: each
            time the learning rate has halved.
        local_step_clipper: H, the longest such gap.
        **compression: options of `hvd_onebit.options.CompressionOptions` but freeze_step.

    Raises:
        TypeError: an unknown option, named with the nearest known one.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        var_freeze_step: int | str = "auto",
        var_update_scaler: int = 16,
        local_step_scaler: int | None = None,
        local_step_clipper: int = 16,
        **compression: Any,
    ) -> None:
        own: dict[str, Any] = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        self.compression_options = local_steps_options(compression, var_freeze_step=var_freeze_step, **own)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        settings = {"bias_correction": bias_correction, **own}
        self.defaults.update(settings)
        for group in self.param_groups:
            for key, setting in settings.items():
                group.setdefault(key, setting)
