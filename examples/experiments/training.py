"""One training on simulated ranks: threads of this process, each with its own replica, batches and error feedback."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hvd_onebit.torch as onebit
from hvd_onebit.stats import Stats
from hvd_onebit.transport.local import LocalTransport, run_ranks

from .tasks import Task, mean_loss

__all__ = ["Plan", "Run", "Variant", "train"]

_TIMEOUT_SECONDS = 300.0  # for a rank that waits for the others


@dataclass(frozen=True)
class Plan:
    """What all variants of an experiment share.

    Attributes:
        num_ranks: simulated ranks.
        num_steps: updates.
        freeze_step: updates in full precision.
        lr: the highest learning rate of Adam and LAMB.
        rising_steps: updates in which it rises from 0 to that, linearly; from the freeze on it falls again.
        last_rate: what it has fallen to, linearly, at the end, relative to the highest.
        final_steps: the final loss is the mean over so many last updates.
    """

    num_ranks: int
    num_steps: int
    freeze_step: int
    lr: float
    rising_steps: int
    last_rate: float
    final_steps: int = 50

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0, relative to the highest."""
        if step < self.rising_steps:
            return (step + 1) / self.rising_steps
        done = max(0, step - self.freeze_step) / max(1, self.num_steps - self.freeze_step)
        return 1.0 - (1.0 - self.last_rate) * done


@dataclass(frozen=True)
class Variant:
    """An optimizer and its options.

    Attributes:
        optimizer: its class.
        options: of compression, and of the optimizer's constructor.
        compressed: False trains with full precision to the end.
        lr_factor: times the plan's learning rate; another optimizer may need another one.
    """

    optimizer: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    compressed: bool = True
    lr_factor: float = 1.0

    def make(self, model: nn.Module, plan: Plan, transport: LocalTransport) -> Any:
        """The distributed optimizer over `transport`."""
        freeze_step = plan.freeze_step if self.compressed else plan.num_steps + 1
        has_warm_up = not issubclass(self.optimizer, onebit.ZeroOneAdam)
        own = {"lr": plan.lr * self.lr_factor, **({} if has_warm_up else {"var_freeze_step": freeze_step})}
        return onebit.DistributedOptimizer(
            self.optimizer(model.parameters(), **{**own, **self.options}),
            model.named_parameters(),
            transport=transport,
            **({"freeze_step": freeze_step} if has_warm_up else {}),
        )


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        losses: of every update, the mean over ranks; NaN from where the run was given up.
        held_out_loss: of the mean of the ranks' models, which differ only within 0/1 Adam's local steps.
        dead_share: coordinates that had no variance at the freeze, of those compressed.
        floored_share: coordinates whose variance the floor lifted.
        bytes_after_freeze: what a rank sends in an update, on average.
    """

    losses: list[float]
    held_out_loss: float
    dead_share: float
    floored_share: float
    bytes_after_freeze: float


def train(task: Task, plan: Plan, variant: Variant, seed: int) -> Run:
    """Trains on simulated ranks. All variants with the same seed start alike and see the same batches."""
    torch.manual_seed(seed)
    model = task.make_model()

    def work(transport: LocalTransport) -> tuple[nn.Module, list[float], Stats, float]:
        return _train_rank(task, plan, variant, seed, copy.deepcopy(model), transport)

    models, losses, stats, bytes_before = zip(
        *run_ranks(plan.num_ranks, work, timeout_seconds=_TIMEOUT_SECONDS), strict=True
    )
    with torch.no_grad():
        for p, *replicas in zip(model.parameters(), *(each.parameters() for each in models), strict=True):
            p.copy_(torch.stack(replicas).mean(dim=0))
    compressed = max(1, stats[0].compressed_elements)
    steps_after_freeze = max(1, plan.num_steps - plan.freeze_step)
    return Run(
        losses=[math.fsum(each) / plan.num_ranks for each in zip(*losses, strict=True)],
        held_out_loss=mean_loss(model, task.held_out()),
        dead_share=stats[0].dead_elements / compressed,
        floored_share=stats[0].floored_elements / compressed,
        bytes_after_freeze=(_bytes_sent(stats[0]) - bytes_before[0]) / steps_after_freeze,
    )


def _train_rank(
    task: Task, plan: Plan, variant: Variant, seed: int, model: nn.Module, transport: LocalTransport
) -> tuple[nn.Module, list[float], Stats, float]:
    optimizer = variant.make(model, plan, transport)
    losses = [math.nan] * plan.num_steps
    bytes_before_freeze = 0.0
    source = task.batches(seed, transport.rank, transport.size)
    try:
        for step in range(plan.num_steps):
            if step == plan.freeze_step:
                bytes_before_freeze = _bytes_sent(optimizer.stats)
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * variant.lr_factor * plan.rate(step)
            inputs, labels = next(source)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses[step] = float(loss.detach())
    except onebit.OneBitError:  # on all ranks alike: too many steps in a row were not finite
        pass
    return model, losses, optimizer.stats, bytes_before_freeze


def _bytes_sent(stats: Stats) -> float:
    return math.fsum(stats.bytes_sent.values())
