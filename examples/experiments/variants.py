"""What is compared: the experiments, each a task, a plan and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import hvd_onebit.torch as onebit

from .tasks import DeepDigitsTask, DigitsTask, LanguageTask, Task
from .training import Plan, Variant

__all__ = ["EXPERIMENTS", "REFERENCE", "Experiment"]

REFERENCE = "1-bit Adam"  # as it comes; the other variants are one choice away from it


@dataclass(frozen=True)
class Experiment:
    """A table and a plot.

    Attributes:
        title: of both.
        make_task: makes what is trained; loads its data.
        make_small_task: the same with a smaller model or batch.
        plan: how it is trained.
        variants: by name, in the table's order.
        reference: the variant that the others are compared to, seed by seed.
        shown: the variants whose losses are plotted over time.
    """

    title: str
    make_task: Callable[[], Task]
    make_small_task: Callable[[], Task]
    plan: Plan
    variants: dict[str, Variant]
    reference: str
    shown: tuple[str, ...]

    def quick(self) -> Experiment:
        """The same, small and with a few updates: shows that it runs, not who wins."""
        plan = replace(
            self.plan, num_steps=20, freeze_step=10, lr=min(self.plan.lr, 0.01), rising_steps=4, final_steps=4
        )
        return replace(self, plan=plan, make_task=self.make_small_task)


def _one_bit(**options: Any) -> Variant:
    return Variant(onebit.OneBitAdam, options)


_ADAMS = {
    "Adam": Variant(torch.optim.Adam, compressed=False),
    REFERENCE: _one_bit(),
    'space="update"': _one_bit(space="update"),
    'scale="mean"': _one_bit(scale="mean"),
    "block=512": _one_bit(block=512),
    'block="tensor"': _one_bit(block="tensor"),
    "variance_floor=0.001": _one_bit(variance_floor=0.001),
    "variance_floor=0.1": _one_bit(variance_floor=0.1),
    "variance_floor=0": _one_bit(variance_floor=0.0),
    'dead="hold"': _one_bit(dead="hold"),
    'space="update", block="tensor"': _one_bit(space="update", block="tensor"),
    'space="update", variance_floor=0.001': _one_bit(space="update", variance_floor=0.001),
    "error_feedback=False": _one_bit(error_feedback=False),
    "0/1 Adam": Variant(onebit.ZeroOneAdam),
}

_SGDS = {
    "SGD": Variant(torch.optim.SGD, {"momentum": 0.9}, compressed=False, lr_factor=10.0),
    "1-bit SGD": Variant(onebit.OneBitSGD, lr_factor=10.0),
}

_LARGE_BATCH = {
    "LAMB": Variant(onebit.Lamb, compressed=False),
    "1-bit LAMB": Variant(onebit.OneBitLamb),
    "1-bit LAMB, frozen coefficient": Variant(onebit.OneBitLamb, {"factor_min": 1.0, "factor_max": 1.0}),
    "Adam": Variant(torch.optim.Adam, compressed=False),
    REFERENCE: _one_bit(),
}

EXPERIMENTS = {
    "language": Experiment(
        title="Words of the King James Bible, 1.1M parameters",
        make_task=lambda: LanguageTask(batch_size=192),
        make_small_task=lambda: LanguageTask(batch_size=32, num_features=8, num_hidden=32, num_classes=256),
        plan=Plan(num_ranks=2, num_steps=240, freeze_step=60, lr=9e-3, rising_steps=20, last_rate=0.1),
        variants=_ADAMS,
        reference=REFERENCE,
        shown=("Adam", REFERENCE, 'space="update"', 'dead="hold"', "error_feedback=False", "0/1 Adam"),
    ),
    "image": Experiment(
        title="MNIST digits, a convolutional network of 21K parameters",
        make_task=lambda: DigitsTask(batch_size=16, most_shift=3),
        make_small_task=lambda: DigitsTask(batch_size=16, most_shift=0),
        plan=Plan(num_ranks=2, num_steps=400, freeze_step=100, lr=3e-3, rising_steps=20, last_rate=0.1),
        variants={**_ADAMS, **_SGDS},
        reference=REFERENCE,
        shown=("Adam", REFERENCE, 'space="update"', "error_feedback=False", "0/1 Adam", "SGD", "1-bit SGD"),
    ),
    "lamb": Experiment(
        title="MNIST digits in batches of 512",
        make_task=lambda: DeepDigitsTask(batch_size=256, most_shift=3),
        make_small_task=lambda: DeepDigitsTask(batch_size=32, most_shift=0),
        plan=Plan(num_ranks=2, num_steps=150, freeze_step=40, lr=0.04, rising_steps=20, last_rate=0.1, final_steps=20),
        variants=_LARGE_BATCH,
        reference="LAMB",
        shown=tuple(_LARGE_BATCH),
    ),
}
