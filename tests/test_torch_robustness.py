"""What users do to optimizers, and what once went wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_family import FAMILY, FREEZE, gradients, parameters, step_once, wrap
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvd_onebit.torch as onebit
from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport, run_ranks


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "zero one adam"])
def test_an_explicit_synchronize_changes_no_bit(name: str) -> None:
    def work(transport: LocalTransport, *, explicit: bool) -> list[torch.Tensor]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport)
        for step in range(FREEZE + 15):
            optimizer.zero_grad()
            for p, gradient in zip(ps, gradients(step, transport.rank), strict=True):
                p.grad = gradient.clone()
            if explicit:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return [p.detach() for p in ps]

    plain = run_ranks(2, lambda t: work(t, explicit=False))
    explicit = run_ranks(2, lambda t: work(t, explicit=True))
    for mine, theirs in zip(plain[0], explicit[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("switch", ["maximize", "amsgrad", "requires_grad"])
def test_ranks_that_differ_in_a_switch_are_found(switch: str) -> None:
    def work(transport: LocalTransport) -> str:
        ps = parameters()
        options = {switch: bool(transport.rank)} if switch != "requires_grad" else {}
        optimizer = wrap(torch.optim.Adam(ps, **options), transport, freeze_step=2)
        if switch == "requires_grad" and transport.rank:
            ps[1].requires_grad_(False)
        with pytest.raises(onebit.OneBitError) as caught:
            step_once(optimizer, ps, 0, transport.rank)
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == second
    assert ("trained" if switch == "requires_grad" else switch) in first


def test_replicas_that_part_in_warm_up_are_found() -> None:
    """As when gradients are clipped while Horovod is averaging them."""

    def work(transport: LocalTransport) -> str:
        ps = parameters()
        optimizer = wrap(torch.optim.Adam(ps), transport, freeze_step=50, check_every=2)

        def train() -> None:
            for step in range(6):
                optimizer.zero_grad()
                for p, gradient in zip(ps, gradients(step, transport.rank), strict=True):
                    p.grad = gradient.clone()
                optimizer.synchronize()
                ps[0].grad.mul_(1.0 + transport.rank)
                with optimizer.skip_synchronize():
                    optimizer.step()

        with pytest.raises(onebit.OneBitError) as caught:
            train()
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == second
    assert "checksum of the momentum" in first
    assert "synchronize()" in first


def test_a_scaler_that_nobody_told_us_of_is_refused() -> None:
    def work(transport: LocalTransport) -> None:
        p = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 50))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(torch.optim.Adam([p]), transport, freeze_step=2)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale((p * (1.0 + transport.rank)).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    with pytest.raises(onebit.OneBitError, match="grad_scaler"):
        run_ranks(2, work)


@pytest.mark.parametrize("order", ["optimizer first", "model first"])
def test_a_copy_of_model_and_optimizer_trains_the_copied_model(order: str) -> None:
    def work(transport: LocalTransport) -> None:
        model = torch.nn.Linear(5, 3)
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.5)
        optimizer = onebit.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), transport=transport, freeze_step=2
        )
        pair = {"o": optimizer, "m": model} if order == "optimizer first" else {"m": model, "o": optimizer}
        copied = copy.deepcopy(pair)
        assert copied["o"].param_groups[0]["params"][0] is copied["m"].weight
        for _ in range(4):
            copied["m"](torch.ones(2, 5)).sum().backward()
            copied["o"].step()
            copied["o"].zero_grad()
        assert (copied["m"].weight < 0.5).all()
        assert torch.equal(model.weight, torch.full((3, 5), 0.5))

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("mine", "theirs"), [("adam", "lamb"), ("adam", "sgd"), ("lamb", "adam"), ("zero one adam", "adam")]
)
def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(mine: str, theirs: str) -> None:
    def work(transport: LocalTransport) -> None:
        other = parameters()
        foreign = wrap(FAMILY[theirs](other), transport)
        for step in range(FREEZE + 3):
            step_once(foreign, other, step, transport.rank)
        saved = copy.deepcopy(foreign.state_dict())
        ps = parameters()
        optimizer = wrap(FAMILY[mine](ps), transport)
        step_once(optimizer, ps, 0, transport.rank)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        with pytest.raises(ValueError, match="checkpoint"):
            optimizer.load_state_dict(saved)
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                same = torch.equal(value, before[index][key]) if torch.is_tensor(value) else value == before[index][key]
                assert same, key

    run_ranks(2, work)


def test_plain_sgds_checkpoint_loads() -> None:
    ps = parameters()
    plain = torch.optim.SGD(ps, lr=0.01, momentum=0.9)
    for step in range(3):
        step_once(plain, ps, step, 0)

    def work(transport: LocalTransport) -> list[torch.Tensor]:
        mine = [torch.nn.Parameter(p.detach().clone()) for p in ps]
        optimizer = wrap(torch.optim.SGD(mine, lr=0.01, momentum=0.9), transport, freeze_step=2)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        for step in range(3, 9):
            step_once(optimizer, mine, step, transport.rank)
        return [p.detach() for p in mine]

    first, second = run_ranks(2, work)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()


def test_step_hooks_run_once() -> None:
    def work(transport: LocalTransport) -> list[str]:
        seen: list[str] = []
        ps = parameters()
        optimizer = wrap(torch.optim.AdamW(ps), transport, freeze_step=2)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for step in range(3):
            step_once(optimizer, ps, step, transport.rank)
        return seen

    assert run_ranks(2, work)[0] == ["before", "after"] * 3


def test_hooks_of_all_optimizers_run_once_and_find_the_momentum() -> None:
    seen: list[str] = []
    mine: list[Any] = []

    def look(optimizer: Any, *_: Any) -> None:
        if mine and optimizer is mine[0]:
            assert all("exp_avg" in state for state in optimizer.state.values())
            seen.append("after")

    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(torch.optim.AdamW(ps), transport, freeze_step=2)
        if transport.rank == 0:
            mine.append(optimizer)
        for step in range(4):
            step_once(optimizer, ps, step, transport.rank)

    handle = register_optimizer_step_post_hook(look)
    try:
        run_ranks(2, work)
    finally:
        handle.remove()
    assert seen == ["after"] * 4


def test_steps_that_the_user_gives_up_are_no_fault_of_the_gradients() -> None:
    def work(transport: LocalTransport) -> Any:
        ps = parameters()
        optimizer = wrap(torch.optim.Adam(ps), transport, freeze_step=2, max_skipped_steps=3)
        for step in range(12):
            optimizer.zero_grad()
            for p, gradient in zip(ps, gradients(step, transport.rank), strict=True):
                p.grad = gradient.clone()
            optimizer.synchronize()
            if step in (0, 11):
                with optimizer.skip_synchronize():
                    optimizer.step()
        return optimizer.stats.step, optimizer.stats.skipped_in_a_row

    assert run_ranks(2, work) == [(2, 0), (2, 0)]


def _set(ps: list[torch.nn.Parameter], step: int, rank: int) -> None:
    for p, gradient in zip(ps, gradients(step, rank), strict=True):
        p.grad = gradient.clone()


def _errors(optimizer: Any) -> list[torch.Tensor]:
    exchanges = [bucket.exchange for bucket in optimizer._onebit._all_buckets()]
    return [e.clone() for each in exchanges for e in (each.worker_error, each.server_error) if e is not None]


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
@pytest.mark.parametrize("name", [name for name in FAMILY if name != "zero one adam"])
def test_a_step_that_is_given_up_leaves_the_error_feedback_as_it_was(name: str, exchange: str) -> None:
    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, exchange=exchange)
        for step in range(FREEZE + 9):
            _set(ps, step, transport.rank)
            if step > FREEZE and step % 2:
                before = _errors(optimizer)
                optimizer.synchronize()
                assert not all(map(torch.equal, _errors(optimizer), before))
                optimizer.zero_grad()
                for now, then in zip(_errors(optimizer), before, strict=True):
                    # to the rounding of what was compressed
                    torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-6 * float(then.abs().max()) + 1e-6)
            else:
                optimizer.step()

    run_ranks(3, work)


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
def test_nothing_is_lost_by_steps_that_are_given_up(exchange: str) -> None:
    """What was applied and what is owed add up to what the applied steps were given."""

    def work(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        p = torch.nn.Parameter(torch.ones(301))
        optimizer = wrap(torch.optim.Adam([p], lr=1e-3), transport, freeze_step=1, exchange=exchange)
        generator = torch.Generator().manual_seed(transport.rank)
        applied, given = torch.zeros(301, dtype=torch.float64), torch.zeros(301, dtype=torch.float64)
        for step in range(90):
            own = torch.randn(301, generator=generator)
            p.grad = own.clone()
            momentum = optimizer.state[p]["exp_avg"].double()
            if step % 3:
                optimizer.synchronize()
            if step % 3 == 1:
                optimizer.zero_grad()
                continue
            optimizer.step()
            if step:
                given += 0.9 * momentum + 0.1 * own.double()
                applied += optimizer.state[p]["exp_avg"].double()
        return (applied, given, *_errors(optimizer))

    results = run_ranks(2, work)
    owed = torch.stack([each[2].double() for each in results]).mean(0)
    if exchange == "two_phase":
        owed += torch.cat([each[3] for each in results]).double()
    given = torch.stack([each[1] for each in results]).mean(0)
    torch.testing.assert_close(results[0][0] + owed, given, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY)
def test_local_clipping_bounds_each_ranks_own_gradient_in_both_stages(name: str) -> None:
    """Rank 1's gradients are far too large in some steps, rank 0's never: to the bit as if clipped by hand."""

    def work(transport: LocalTransport, *, by_hand: bool) -> list[torch.Tensor]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, **({} if by_hand else {"local_clip_norm": 100.0}))
        for step in range(FREEZE + 6):
            _set(ps, step, transport.rank)
            own = [p.grad for p in ps if p.grad is not None]
            if transport.rank and step % 3:
                for gradient in own:
                    gradient.mul_(1000.0)
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in own))
            assert (norm > 100.0) == bool(transport.rank and step % 3)
            if by_hand and norm > 100.0:
                for gradient in own:
                    gradient.mul_(100.0 / norm)
            if step % 2:
                optimizer.synchronize()
            optimizer.step()
        return [p.detach() for p in ps]

    by_option = run_ranks(2, lambda t: work(t, by_hand=False))
    by_hand = run_ranks(2, lambda t: work(t, by_hand=True))
    for mine, theirs in zip(by_option[0], by_hand[0], strict=True):
        # a norm may round otherwise by a last bit
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_local_clipping_bounds_the_gradient_as_it_is_without_a_loss_scale() -> None:
    def work(transport: LocalTransport, scale: float) -> list[torch.Tensor]:
        ps = parameters()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        scaler.scale(torch.zeros(()))
        optimizer = wrap(torch.optim.Adam(ps), transport, freeze_step=3, local_clip_norm=0.5, grad_scaler=scaler)
        for step in range(8):
            for p, gradient in zip(ps, gradients(step, transport.rank), strict=True):
                p.grad = gradient * scale
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in ps]

    scaled = run_ranks(2, lambda t: work(t, 1024.0))
    for mine, theirs in zip(scaled[0], run_ranks(2, lambda t: work(t, 1.0))[0], strict=True):
        assert torch.equal(mine, theirs)


def test_groups_and_local_clipping_are_refused_together() -> None:
    with pytest.raises(ValueError, match="leave out either groups and num_groups, or local_clip_norm"):
        onebit.DistributedOptimizer(torch.optim.Adam(parameters()), num_groups=2, local_clip_norm=1.0)


def test_an_average_that_overflows_skips_the_step() -> None:
    def work(transport: LocalTransport) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(9))
        optimizer = wrap(onebit.OneBitSGD([p], lr=1.0, momentum=0.5), transport, exchange="one_shot")
        p.grad = torch.full((9,), 3e38)
        optimizer.step()
        assert optimizer.stats.steps_skipped == 1
        return p.detach()

    for p in run_ranks(2, work):
        assert torch.equal(p, torch.ones(9))


def test_another_ranks_schedule_is_taken_up() -> None:
    """Horovod's broadcast_optimizer_state replaces what the groups hold, and calls nothing of ours."""

    def work(transport: LocalTransport, given: Any = None) -> Any:
        ps = parameters()
        make = onebit.OneBitAdam(ps, betas=(0.9, 0.9), freeze_step="auto", freeze_threshold=0.5)
        optimizer = wrap(make, transport)
        if given is not None and transport.rank == 0:
            optimizer.load_state_dict(copy.deepcopy(given[0]))
        if given is not None and transport.rank == 1:
            for key, value in given[0]["param_groups"][0].items():
                if key != "params":
                    optimizer.param_groups[0][key] = copy.deepcopy(value)
            for i, p in enumerate(ps):
                optimizer.state[p] = copy.deepcopy(given[0]["state"][i])
        for p, value in zip(ps, given[1] if given else [p.detach() for p in ps], strict=True):
            p.data = value.clone()
        for step in range(10 if given is None else 20):
            step_once(optimizer, ps, step, transport.rank)
        return copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in ps], optimizer.stats.frozen_step

    saved = run_ranks(2, work)[0]
    assert saved[2] == 0
    resumed = run_ranks(2, lambda t: work(t, saved))
    assert resumed[0][2] == resumed[1][2] > 10


@pytest.mark.parametrize("name", FAMILY)
def test_the_states_of_warm_up_and_compression_have_the_same_names(name: str) -> None:
    """Or broadcast_optimizer_state hangs when one rank has restored a checkpoint and the others are fresh."""

    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport)
        kinds = [{key: torch.is_tensor(value) for key, value in optimizer.state[p].items()} for p in ps]
        for step in range(FREEZE + 3):
            step_once(optimizer, ps, step, transport.rank)
        assert kinds == [{key: torch.is_tensor(value) for key, value in optimizer.state[p].items()} for p in ps]

    run_ranks(2, work)


def test_zero_one_adam_keeps_what_the_user_sets() -> None:
    def work(transport: LocalTransport) -> torch.Tensor:
        p = torch.nn.Parameter(torch.zeros(20))
        optimizer = wrap(onebit.ZeroOneAdam([p], lr=0.01, var_freeze_step=5), transport)
        for _ in range(3):
            p.grad = torch.ones(20)
            optimizer.step()
        with torch.no_grad():
            p.fill_(7.0)
        for _ in range(2):
            p.grad = torch.ones(20)
            optimizer.step()
        return p.detach()

    for p in run_ranks(2, work):
        np.testing.assert_allclose(p.numpy(), 7.0 - 0.02, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ps, t: wrap(torch.optim.Adam(ps), t, freeze_step=5, freeze_latest_step=9), "freeze_latest_step"),
        (lambda ps, t: onebit.DistributedOptimizer(torch.optim.Adam, transport=t), "class"),
        (lambda ps, t: wrap(torch.optim.Adam(ps), t, variance_floor="a"), "variance_floor"),
        (
            lambda ps, t: wrap(onebit.OneBitSGD(ps[:2]), t).add_param_group({"params": ps[2:], "nesterov": True}),
            "nesterov",
        ),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run_ranks(1, lambda t: call(parameters(), t))


def test_a_pattern_without_match_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> None:
        ps = parameters()
        step_once(
            wrap(torch.optim.Adam(ps), transport, freeze_step=9, full_precision=["*.bais"]), ps, 0, transport.rank
        )

    run_ranks(2, work)
    assert "*.bais" in caplog.text


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_plain_adam_goes_on_from_a_compressed_state_at_the_same_pace(name: str) -> None:
    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport)
        for step in range(FREEZE + 40):
            step_once(optimizer, ps, step, transport.rank)
        kept = [torch.nn.Parameter(p.detach().clone()) for p in ps]
        plain = torch.optim.Adam(kept, lr=0.01, betas=(0.9, 0.95))
        plain.load_state_dict(optimizer.plain_state_dict())
        assert not any(key.startswith("onebit") for key in plain.param_groups[0])
        before, after = [p.detach().clone() for p in ps], [p.detach().clone() for p in kept]
        step_once(optimizer, ps, 99, transport.rank)
        step_once(plain, kept, 99, transport.rank)
        mine = sum(float((p.detach() - x).norm()) for p, x in zip(ps, before, strict=True))
        theirs = sum(float((p.detach() - x).norm()) for p, x in zip(kept, after, strict=True))
        assert theirs == pytest.approx(mine, rel=0.5)

    run_ranks(2, work)


def test_plain_adams_checkpoint_keeps_our_options() -> None:
    ps = parameters()
    plain = torch.optim.Adam(ps, lr=0.01)
    step_once(plain, ps, 0, 0)

    def work(transport: LocalTransport) -> None:
        mine = parameters()
        optimizer = wrap(onebit.OneBitAdam(mine, bias_correction=False, freeze_step=3), transport)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert optimizer.param_groups[0]["bias_correction"] is False
        for step in range(5):
            step_once(optimizer, mine, step, transport.rank)

    run_ranks(2, work)


def test_damped_sgd_is_torchs_in_warm_up() -> None:
    def work(transport: LocalTransport) -> None:
        ps, plain_ps = parameters(), parameters()
        optimizer = wrap(torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5), transport, freeze_step=50)
        plain = torch.optim.SGD(plain_ps, lr=0.1, momentum=0.9, dampening=0.5)
        for step in range(6):
            step_once(optimizer, ps, step, 0)
            step_once(plain, plain_ps, step, 0)
        for p, q in zip(ps, plain_ps, strict=True):
            assert torch.equal(p.detach(), q.detach())

    run_ranks(2, work)


def test_zero_one_adam_leaves_a_group_with_no_learning_rate() -> None:
    def work(transport: LocalTransport) -> torch.Tensor:
        moving, resting = torch.nn.Parameter(torch.ones(9)), torch.nn.Parameter(torch.ones(9))
        make = onebit.ZeroOneAdam([{"params": [moving]}, {"params": [resting]}], lr=0.01, var_freeze_step=3)
        optimizer = onebit.DistributedOptimizer(make, [("a", moving), ("b", resting)], transport=transport)
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(12):
            if step == 4:
                optimizer.param_groups[1]["lr"] = 0.0
                before = resting.detach().clone()
            moving.grad, resting.grad = torch.randn(9, generator=generator), torch.randn(9, generator=generator)
            optimizer.step()
        assert torch.equal(resting.detach(), before)
        return moving.detach()

    assert all(torch.isfinite(p).all() for p in run_ranks(2, work))


def test_names_that_are_taken_are_refused() -> None:
    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(torch.optim.Adam(ps), transport, freeze_step=3)
        with pytest.raises(ValueError, match="unique"):
            optimizer.add_param_group({"params": [("p0", torch.nn.Parameter(torch.ones(3)))]})
        assert len(optimizer.param_groups) == 1

    run_ranks(1, work)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("where", ["_finish_agreement", "finish", "apply", "_step_uncompressed", "_end_step"])
@pytest.mark.parametrize("name", ["adam", "zero one adam"])
def test_a_step_that_ended_in_the_middle_is_not_gone_on_with(name: str, where: str, hierarchical: bool) -> None:
    """Ctrl-C, or the user's own error, on all ranks at one place: a checkpoint brings back every bit."""
    last = FREEZE + 3

    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, hierarchical=hierarchical, measure=False)
        for step in range(last):
            step_once(optimizer, ps, step, transport.rank)
        saved = copy.deepcopy((optimizer.state_dict(), ps))
        for step in range(last, last + 9):
            step_once(optimizer, ps, step, transport.rank)
        expected = [p.detach().clone() for p in ps]

        def load() -> None:
            optimizer.load_state_dict(copy.deepcopy(saved[0]))
            with torch.no_grad():
                for p, value in zip(ps, saved[1], strict=True):
                    p.copy_(value)

        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        def train_on() -> None:
            for step in range(last, last + 9):
                step_once(optimizer, ps, step, transport.rank)

        load()
        setattr(optimizer._onebit, where, interrupted)
        with pytest.raises(KeyboardInterrupt):  # 0/1 Adam does not agree in every step
            train_on()
        delattr(optimizer._onebit, where)
        for go_on in (train_on, optimizer.synchronize):
            with pytest.raises(OneBitError, match=r"was ended by KeyboardInterrupt before .*load_state_dict"):
                go_on()
        load()
        train_on()
        assert all(torch.equal(p, value) for p, value in zip(ps, expected, strict=True))

    run_ranks(4, work, ranks_per_host=2)
