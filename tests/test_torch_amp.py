"""Loss scaling: gradients are unscaled before they enter the momentum; an overflow on one rank skips on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_onebit.torch as onebit
from hvd_onebit.transport.local import LocalTransport, run_ranks

STEPS = 12
FREEZE = 4


def train(transport: LocalTransport, *, scaled: bool, overflow_at: int | None = None, clip: float | None = None) -> Any:
    p = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 100))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95)),
        [("p", p)],
        transport=transport,
        freeze_step=FREEZE,
        grad_scaler=scaler,
    )
    generator = torch.Generator().manual_seed(transport.rank)
    scales = []
    for step in range(STEPS):
        direction = torch.randn(100, generator=generator)
        if step == overflow_at and transport.rank == 1:
            direction[3] = float("inf")
        optimizer.zero_grad()
        scaler.scale((p * direction).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p], clip)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.zero_grad()
    return p.detach(), scales, optimizer.stats


def test_scaling_by_powers_of_two_changes_no_bit() -> None:
    plain = run_ranks(2, lambda t: train(t, scaled=False))
    scaled = run_ranks(2, lambda t: train(t, scaled=True))
    assert max(scaled[0][1]) > 2.0**10
    for mine, theirs in zip(plain, scaled, strict=True):
        assert torch.equal(mine[0], theirs[0])
    assert torch.equal(scaled[0][0], scaled[1][0])


@pytest.mark.parametrize("overflow_at", [1, FREEZE, FREEZE + 3])
def test_an_overflow_on_one_rank_skips_on_all(overflow_at: int) -> None:
    first, second = run_ranks(2, lambda t: train(t, scaled=True, overflow_at=overflow_at))
    assert torch.isfinite(first[0]).all()
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    assert first[1][overflow_at] < first[1][overflow_at - 1]
    assert first[2].steps_skipped == second[2].steps_skipped == 1
    assert first[2].step == STEPS - 1


def test_clipping_bounds_what_the_step_uses() -> None:
    loose = run_ranks(2, lambda t: train(t, scaled=True, clip=1e9))
    tight = run_ranks(2, lambda t: train(t, scaled=True, clip=1e-3))
    assert torch.equal(loose[0][0], run_ranks(2, lambda t: train(t, scaled=True))[0][0])
    assert not torch.equal(loose[0][0], tight[0][0])
    assert torch.equal(tight[0][0], tight[1][0])


def test_step_alone_is_refused_with_a_scaler() -> None:
    def work(transport: LocalTransport) -> None:
        p = torch.nn.Parameter(torch.ones(10))
        scaler = torch.amp.GradScaler("cpu")
        optimizer = onebit.DistributedOptimizer(
            torch.optim.Adam([p]), [("p", p)], transport=transport, freeze_step=2, grad_scaler=scaler
        )
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)

    with pytest.raises(onebit.OneBitError, match="synchronize"):
        run_ranks(2, work)


def test_zero_one_adam_with_a_scaler_is_refused() -> None:
    def work(transport: LocalTransport) -> None:
        p = torch.nn.Parameter(torch.ones(10))
        scaler = torch.amp.GradScaler("cpu")
        onebit.DistributedOptimizer(onebit.ZeroOneAdam([p]), [("p", p)], transport=transport, grad_scaler=scaler)

    with pytest.raises(ValueError, match="bfloat16"):
        run_ranks(1, work)
