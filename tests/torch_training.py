"""What the torch tests share: small models with gradients given by hand, trained on ranks in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

import hvd_onebit.torch as onebit
from hvd_onebit.transport.local import LocalTransport, run_ranks

__all__ = [
    "SHAPES",
    "assert_bit_equal",
    "assert_replicas_equal",
    "distribute",
    "gradient",
    "mean_gradient",
    "on_ranks",
    "parameters",
    "set_gradients",
    "snapshot",
    "train",
]

Result = TypeVar("Result")

SHAPES = ((8, 5), (5,), (40, 5), (1,), (3, 3, 3))


def on_ranks(size: int, work: Callable[[LocalTransport], Result]) -> list[Result]:
    """`work` on `size` ranks of one process; whatever hangs ends with an error."""
    return run_ranks(size, work, timeout_seconds=20.0)


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """The same parameters on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradient(step: int, rank: int, index: int, p: Tensor, *, noise: float = 0.5) -> Tensor:
    """A gradient of parameter `index` with a part that all ranks share and a part of the rank's own."""

    def normal(*key: int) -> Tensor:
        seed = 0
        for each in key:
            seed = seed * 1009 + each + 1
        return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))

    shared = normal(1, index) + 0.5 * normal(2, index, step)
    return (shared + noise * normal(3, index, step, rank)).to(p.dtype)


def mean_gradient(step: int, size: int, index: int, p: Tensor) -> Tensor:
    """The mean over ranks, rounded as the local transport rounds it: a sum in rank order, then a division."""
    total = gradient(step, 0, index, p)
    for rank in range(1, size):
        total += gradient(step, rank, index, p)
    return total / size


def set_gradients(params: Sequence[Tensor], step: int, rank: int) -> None:
    for index, p in enumerate(params):
        if p.requires_grad:
            p.grad = gradient(step, rank, index, p)


def distribute(optimizer: torch.optim.Optimizer, transport: LocalTransport, **options: Any) -> Any:
    """The optimizer over the transport, its parameters called p0, p1, ... in order."""
    every = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    names = [(f"p{i}", p) for i, p in enumerate(every)]
    options = {"named_parameters": names, "check_every": 1, "measure": False, **options}
    return onebit.DistributedOptimizer(optimizer, transport=transport, **options)


def train(optimizer: Any, params: Sequence[Tensor], steps: Sequence[int], rank: int) -> None:
    """Steps of these numbers, with each step's gradients."""
    for step in steps:
        set_gradients(params, step, rank)
        optimizer.step()


def snapshot(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def assert_bit_equal(left: Sequence[Tensor], right: Sequence[Tensor], what: str = "") -> None:
    """Equal to the bit, and finite."""
    assert len(left) == len(right), what
    for i, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.isfinite(one.float()).all(), f"tensor {i} is not finite {what}"
        same = torch.equal(one, other)
        worst = 0.0 if same else float((one.double() - other.double()).abs().max())
        assert same, f"tensor {i} differs by up to {worst:g} {what}"


def assert_replicas_equal(by_rank: Sequence[Sequence[Tensor]]) -> None:
    for rank, replica in enumerate(by_rank):
        assert_bit_equal(replica, by_rank[0], f"on rank {rank}")
