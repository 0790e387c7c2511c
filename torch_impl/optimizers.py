"""OneBitAdam: Adam that knows how it wants to be compressed. Alone it is plain Adam; DistributedOptimizer does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_onebit.options import options_from
from hvd_onebit.rules import adam_step, adam_update

__all__ = ["OneBitAdam"]


class OneBitAdam(torch.optim.Adam):
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
