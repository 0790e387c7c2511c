"""1-bit LAMB, 0/1 Adam and 1-bit SGD in torch: against the float64 oracle, and the promises every optimizer keeps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_onebit.torch as onebit
from hvd_onebit import reference
from hvd_onebit.schedule import SyncSchedule, VarianceSchedule
from hvd_onebit.transport.local import LocalTransport, run_ranks

SHAPES = [(30, 20), (20,), (20, 7), (7,)]
STEPS = 60
FREEZE = 20

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

FAMILY: dict[str, Make] = {
    "adam": lambda ps: onebit.OneBitAdam(ps, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, freeze_step=FREEZE),
    "adamw": lambda ps: onebit.OneBitAdam(
        ps, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, decoupled_weight_decay=True, freeze_step=FREEZE
    ),
    "adam in update space": lambda ps: onebit.OneBitAdam(
        ps, lr=0.01, betas=(0.9, 0.95), freeze_step=FREEZE, space="update"
    ),
    "lamb": lambda ps: onebit.OneBitLamb(ps, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, freeze_step=FREEZE),
    "sgd": lambda ps: onebit.OneBitSGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1, freeze_step=FREEZE),
    "sgd from the start": lambda ps: onebit.OneBitSGD(ps, lr=0.01, momentum=0.9),
    "zero one adam": lambda ps: onebit.ZeroOneAdam(
        ps, lr=0.01, betas=(0.9, 0.95), var_freeze_step=FREEZE, var_update_scaler=4, local_step_scaler=8
    ),
}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """The same whatever the parameters are, so that oracle and adapter see the same."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) + 0.3 for shape in SHAPES]


def wrap(optimizer: torch.optim.Optimizer, transport: LocalTransport, **options: Any) -> Any:
    names = [(f"p{i}", p) for i, p in enumerate(optimizer.param_groups[0]["params"])]
    return onebit.DistributedOptimizer(optimizer, named_parameters=names, transport=transport, **options)


def step_once(optimizer: Any, ps: list[torch.nn.Parameter], step: int, rank: int) -> None:
    optimizer.zero_grad()
    for p, gradient in zip(ps, gradients(step, rank), strict=True):
        p.grad = gradient.clone()
    optimizer.step()


def train(make: Make, size: int, steps: range = range(STEPS), **options: Any) -> list[list[np.ndarray[Any, Any]]]:
    """Every rank's parameters after the last step."""

    def work(transport: LocalTransport) -> list[np.ndarray[Any, Any]]:
        ps = parameters()
        optimizer = wrap(make(ps), transport, **options)
        for step in steps:
            step_once(optimizer, ps, step, transport.rank)
        return [p.detach().numpy() for p in ps]

    return run_ranks(size, work)


def assert_replicas_equal(replicas: list[list[np.ndarray[Any, Any]]]) -> None:
    for other in replicas[1:]:
        for mine, theirs in zip(replicas[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
@pytest.mark.parametrize("name", FAMILY)
def test_replicas_are_bit_equal(name: str, exchange: str, size: int) -> None:
    # 0/1 Adam's replicas are equal after a synchronisation
    last = max(schedule_steps(STEPS, FREEZE, 4, 16, 8)[1]) if name == "zero one adam" else STEPS
    replicas = train(FAMILY[name], size, range(last), exchange=exchange)
    assert_replicas_equal(replicas)
    assert all(np.isfinite(array).all() for array in replicas[0])


def flat_gradients(step: int, size: int) -> list[np.ndarray[Any, Any]]:
    """In the bucket's order: last parameter first."""
    return [
        np.concatenate([g.numpy().ravel() for g in reversed(gradients(step, rank))]).astype(np.float64)
        for rank in range(size)
    ]


def flat(arrays: list[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in reversed(arrays)])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("block", [64, 2048])
def test_sgd_follows_the_oracle(size: int, block: int) -> None:
    oracle = reference.OneBitSGD(
        flat([p.detach().numpy() for p in parameters()]),
        num_workers=size,
        freeze_step=FREEZE,
        lr=0.01,
        momentum=0.9,
        block=block,
        weight_decay=0.1,
    )
    for step in range(STEPS):
        oracle.step_workers(flat_gradients(step, size))
    got = train(FAMILY["sgd"], size, exchange="one_shot", block=block)
    np.testing.assert_allclose(flat(got[0]), oracle.x, rtol=0, atol=2e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_follows_the_oracle(size: int, weight_decay: float) -> None:
    def make(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return onebit.OneBitLamb(ps, lr=0.01, betas=(0.9, 0.95), weight_decay=weight_decay, freeze_step=FREEZE)

    oracle = reference.OneBitLamb(
        [p.detach().numpy().ravel() for p in parameters()],
        num_workers=size,
        freeze_step=FREEZE,
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=weight_decay,
        buffer_order=range(len(SHAPES) - 1, -1, -1),
    )
    for step in range(STEPS):
        oracle.step_workers([[g.numpy().ravel().astype(np.float64) for g in gradients(step, r)] for r in range(size)])
    got = train(make, size, exchange="one_shot")
    for mine, theirs in zip(got[0], oracle.xs, strict=True):
        np.testing.assert_allclose(mine.ravel(), theirs, rtol=0, atol=5e-5)


def test_lamb_without_compression_is_its_oracle() -> None:
    ps = parameters()
    optimizer = onebit.Lamb(ps, lr=0.02, weight_decay=0.1)
    oracle = reference.OneBitLamb(
        [p.detach().numpy().ravel() for p in ps],
        num_workers=1,
        freeze_step=10**9,
        lr=0.02,
        weight_decay=0.1,
        buffer_order=range(len(SHAPES)),
    )
    for step in range(30):
        step_once(optimizer, ps, step, 0)
        oracle.step_workers([[g.numpy().ravel().astype(np.float64) for g in gradients(step, 0)]])
    for p, x in zip(ps, oracle.xs, strict=True):
        np.testing.assert_allclose(p.detach().numpy().ravel(), x, rtol=0, atol=2e-6)


def schedule_steps(steps: int, freeze: int, kappa: int, longest: int, doubling: int) -> tuple[set[int], set[int]]:
    variance, sync = VarianceSchedule(kappa), SyncSchedule(longest, doubling)
    variance_steps, sync_steps = set(), set()
    for step in range(1, steps + 1):
        if step <= freeze and variance.is_due(step):
            variance.update(step)
            variance_steps.add(step)
        if sync.is_due(step, 1.0):
            sync.synchronised(step)
            sync_steps.add(step)
        if step == freeze:
            sync.freeze(step, 1.0)
    return variance_steps, sync_steps


# steps after which 0/1 Adam's replicas are equal, as the others' always are
LAST = max(schedule_steps(FREEZE + 100, FREEZE, 4, 16, 8)[1])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_zero_one_adam_follows_the_oracle(size: int, weight_decay: float) -> None:
    def make(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return onebit.ZeroOneAdam(
            ps,
            lr=0.01,
            betas=(0.9, 0.95),
            weight_decay=weight_decay,
            decoupled_weight_decay=True,
            var_freeze_step=FREEZE,
            var_update_scaler=4,
            local_step_scaler=8,
        )

    variance_steps, sync_steps = schedule_steps(STEPS, FREEZE, 4, 16, 8)
    assert len(variance_steps) < FREEZE
    assert len(sync_steps) < STEPS
    oracle = reference.ZeroOneAdam(
        flat([p.detach().numpy() for p in parameters()]),
        num_workers=size,
        variance_steps=variance_steps,
        sync_steps=sync_steps,
        betas=(0.9, 0.95),
        scale="rms",
        decoupled_weight_decay=weight_decay,
        sizes=[int(np.prod(shape)) for shape in reversed(SHAPES)],
    )
    for step in range(STEPS):
        oracle.step_workers(flat_gradients(step, size), 0.01)
    for mine, theirs in zip(train(make, size, exchange="one_shot"), oracle.xs, strict=True):
        np.testing.assert_allclose(flat(mine), theirs, rtol=0, atol=5e-5)


def test_the_papers_bert_large_policy_saves_what_the_paper_says() -> None:
    """Lu et al. 2022, arXiv 2202.06009, section 6: 162K steps, lr warm-up 12.5K, half-precision rounds for v."""
    steps, warm_up = 162_000, 12_500
    variance_steps, sync_steps = schedule_steps(steps, warm_up, 16, 16, 32_678)
    assert 1 - len(sync_steps) / steps == pytest.approx(0.537, abs=0.001)
    assert (len(sync_steps) + 16 * len(variance_steps)) / steps == pytest.approx(0.477, abs=0.001)


def test_zero_one_adam_is_equal_at_every_synchronisation_for_3000_steps() -> None:
    def work(transport: LocalTransport) -> list[bytes]:
        p = torch.nn.Parameter(torch.linspace(-1, 1, 33))
        optimizer = onebit.DistributedOptimizer(
            onebit.ZeroOneAdam(
                [p], lr=0.01, var_freeze_step=100, local_step_scaler=500, weight_decay=0.01, decoupled_weight_decay=True
            ),
            [("p", p)],
            transport=transport,
        )
        generator = torch.Generator().manual_seed(transport.rank)
        seen, rounds = [], 0
        for _ in range(3000):
            p.grad = p.detach() * 0.1 + torch.randn(33, generator=generator)
            optimizer.step()
            if optimizer.stats.rounds > rounds:
                rounds = optimizer.stats.rounds
                seen.append(p.detach().numpy().tobytes())
        return seen

    replicas = run_ranks(2, work)
    assert 100 < len(replicas[0]) < 1500
    assert replicas[0] == replicas[1]


@pytest.mark.parametrize("rate", [0.0, 1e-46])
def test_zero_one_adam_survives_a_learning_rate_of_zero(rate: float) -> None:
    """Or one that float32 does not tell from zero."""

    def work(transport: LocalTransport) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(70))
        optimizer = onebit.DistributedOptimizer(
            onebit.ZeroOneAdam([p], lr=rate, var_freeze_step=3), [("p", p)], transport=transport
        )
        for _ in range(6):
            p.grad = torch.full((70,), 1.0 + transport.rank)
            optimizer.step()
        assert torch.equal(p.detach(), torch.ones(70))
        optimizer.param_groups[0]["lr"] = 0.01
        rounds = optimizer.stats.rounds
        while optimizer.stats.rounds < rounds + 20:
            p.grad = torch.full((70,), 1.0 + transport.rank)
            optimizer.step()
        return p.detach()

    first, second = run_ranks(2, work)
    assert torch.isfinite(first).all()
    assert (first < 1.0).all()
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", FAMILY)
def test_one_rank_is_the_plain_optimizer(name: str, caplog: pytest.LogCaptureFixture) -> None:
    alone = train(FAMILY[name], 1)[0]
    assert "one rank" in caplog.text
    ps = parameters()
    plain = FAMILY[name](ps)
    for step in range(STEPS):
        step_once(plain, ps, step, 0)
    for mine, p in zip(alone, ps, strict=True):
        np.testing.assert_array_equal(mine, p.detach().numpy())


@pytest.mark.parametrize("stop", [1, FREEZE - 1, FREEZE, FREEZE + 1, FREEZE + 13])
@pytest.mark.parametrize("name", FAMILY)
def test_resume_goes_on_bit_for_bit(name: str, stop: int) -> None:
    whole = train(FAMILY[name], 2, exchange="two_phase")

    def first_half(transport: LocalTransport) -> tuple[list[torch.Tensor], bytes]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, exchange="two_phase")
        for step in range(stop):
            step_once(optimizer, ps, step, transport.rank)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        return copy.deepcopy([p.detach() for p in ps]), saved.getvalue()

    halves = run_ranks(2, first_half)

    def second_half(transport: LocalTransport) -> list[np.ndarray[Any, Any]]:
        values, saved = halves[transport.rank]
        ps = [torch.nn.Parameter(value.clone()) for value in values]
        optimizer = wrap(FAMILY[name](ps), transport, exchange="two_phase")
        optimizer.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        for step in range(stop, STEPS):
            step_once(optimizer, ps, step, transport.rank)
        return [p.detach().numpy() for p in ps]

    for mine, theirs in zip(whole, run_ranks(2, second_half), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dead", ["floor", "hold"])
@pytest.mark.parametrize("name", [name for name in FAMILY if "sgd" not in name])
def test_never_touched_rows_do_not_explode(name: str, dead: str) -> None:
    def work(transport: LocalTransport) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(40, 8))
        optimizer = wrap(FAMILY[name]([p]), transport, dead=dead)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(LAST):
            p.grad = torch.randn(40, 8, generator=generator) + 0.2
            p.grad[30:] = 0.0
            optimizer.step()
        return p.detach()

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    untouched, trained = (first[30:] - 1.0).abs(), (first[:30] - 1.0).abs()
    if dead == "hold":
        decayed = name in ("adam", "adamw", "lamb")
        assert decayed or untouched.max() == 0.0
    # of the kind that is trained, not 6953: a row that is never touched moves by rounding errors of its block only
    assert untouched.max() <= 3 * trained.max()


def test_zero_one_adam_leaves_a_tensor_without_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """The bits of its block say nothing of it, and its variance of zero would make them steps of any length."""

    def work(transport: LocalTransport) -> torch.Tensor:
        ps = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
        optimizer = wrap(FAMILY["zero one adam"](ps), transport)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(LAST):
            ps[0].grad = torch.randn(50, generator=generator) + 0.2
            optimizer.step()
        assert torch.equal(ps[1].detach(), torch.ones(50))
        return ps[0].detach()

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    assert "p1 had no gradient so far" in caplog.text


@pytest.mark.parametrize("name", FAMILY)
def test_zero_momentum_frozen_and_unused_parameters(name: str) -> None:
    def work(transport: LocalTransport) -> list[torch.Tensor]:
        ps = [torch.nn.Parameter(torch.ones(9)) for _ in range(5)]
        ps.append(torch.nn.Parameter(torch.ones(0)))
        ps.append(torch.nn.Parameter(torch.tensor(1.0)))
        ps[1].requires_grad_(False)
        optimizer = wrap(FAMILY[name](ps), transport)
        for step in range(LAST):
            ps[0].grad = torch.full((9,), 0.5 + step % 3)
            ps[2].grad = torch.zeros(9)
            ps[3].grad = None if transport.rank else torch.ones(9)
            ps[4].grad = None
            ps[5].grad = torch.ones(0)
            ps[6].grad = torch.tensor(2.0)
            optimizer.step()
        return [p.detach() for p in ps]

    first, second = run_ranks(2, work)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, theirs)
    assert torch.equal(first[1], torch.ones(9))
    assert first[0][0] < 1.0
    assert first[6] < 1.0


@pytest.mark.parametrize("name", FAMILY)
def test_a_nan_on_one_rank_poisons_nothing(name: str) -> None:
    def work(transport: LocalTransport) -> tuple[list[np.ndarray[Any, Any]], int]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, exchange="two_phase")
        for step in range(STEPS):
            optimizer.zero_grad()
            for p, gradient in zip(ps, gradients(step, transport.rank), strict=True):
                p.grad = gradient.clone()
            if step in (5, 31, 45) and transport.rank == 1:
                ps[2].grad[3, 3] = float("nan")
            optimizer.step()
        return [p.detach().numpy() for p in ps], optimizer.stats.steps_skipped

    results = run_ranks(2, work)
    assert results[1][1] == 3
    assert all(np.isfinite(array).all() for array in results[0][0])
    if name == "zero one adam":
        return  # only the rank itself leaves out its gradient between synchronisations
    assert results[0][1] == 3
    assert_replicas_equal([replica for replica, _ in results])


def test_lamb_freezes_the_true_average_of_its_coefficient() -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        p = torch.nn.Parameter(torch.full((50,), 3.0))
        optimizer = wrap(onebit.OneBitLamb([p], lr=1e-4, freeze_step=3), transport)
        seen = []
        for step in range(5):
            x = float(p.detach().double().norm())
            p.grad = torch.ones(50)  # so u is all ones
            optimizer.step()
            if step < 3:
                seen.append(x)
        return optimizer.stats.trust_ratios["p0"].average, float(np.mean(seen)) / 50**0.5

    (average, expected), _ = run_ranks(2, work)
    assert average == pytest.approx(expected, rel=1e-3)


def test_lamb_tells_its_trust_ratios() -> None:
    def work(transport: LocalTransport) -> Any:
        ps = parameters()
        optimizer = wrap(FAMILY["lamb"](ps), transport)
        for step in range(STEPS):
            step_once(optimizer, ps, step, transport.rank)
        return optimizer.stats.trust_ratios

    first, second = run_ranks(2, work)
    assert first == second
    assert set(first) == {f"p{i}" for i in range(len(SHAPES))}
    for ratio in first.values():
        assert 0.5 <= ratio.factor <= 4.0
        assert 0.01 <= ratio.average <= 10.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), "momentum"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda ps: torch.optim.RMSprop(ps), "RMSprop"),
        (lambda ps: onebit.ZeroOneAdam(ps, freeze_step=3), "var_freeze_step"),
        (lambda ps: onebit.ZeroOneAdam(ps, local_step_clipper=0), "local_step_clipper"),
        (lambda ps: onebit.OneBitLamb(ps, max_coef=3.0), "max_coef"),
        (lambda ps: onebit.OneBitLamb(ps, factor_min=5.0), "factor_min"),
        (lambda ps: onebit.Lamb(ps, betas=(0.9, 1.0)), r"betas\[1\]"),
        (lambda ps: onebit.OneBitSGD(ps, space="update"), 'takes space="momentum" only'),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(make: Make, message: str) -> None:
    def work(transport: LocalTransport) -> None:
        wrap(make(parameters()), transport)

    with pytest.raises((ValueError, TypeError), match=message):
        run_ranks(1, work)


def test_lamb_in_update_space_is_lamb() -> None:
    """With one scale an element nothing is lost, so that it does not matter what is sent."""

    def trained(space: str) -> list[np.ndarray[Any, Any]]:
        make = lambda ps: onebit.OneBitLamb(  # noqa: E731
            ps, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, freeze_step=FREEZE, block=1, space=space
        )
        replicas = train(make, 2)
        for mine, theirs in zip(*replicas, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        return replicas[0]

    for one, other in zip(trained("momentum"), trained("update"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
