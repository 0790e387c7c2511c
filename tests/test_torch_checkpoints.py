"""Checkpoints of the torch optimizer: resumed bit for bit, exchanged with plain Adam, refused when damaged."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_training import (
    assert_bit_equal,
    assert_replicas_equal,
    distribute,
    mean_gradient,
    on_ranks,
    parameters,
    snapshot,
    train,
)

import hvd_onebit.torch as onebit
from hvd_onebit.transport.local import LocalTransport

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW

FREEZE, STEPS = 4, 10


def saved_and_loaded(state: Any) -> Any:
    """Through torch.save and the safe torch.load, which builds no objects of a checkpoint's choice."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


VARIANTS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "Adam": (lambda p: Adam(p, lr=0.01), {}),
    "AdamW, amsgrad": (lambda p: AdamW(p, lr=0.01, amsgrad=True), {}),
    "OneBitAdam": (lambda p: onebit.OneBitAdam(p, lr=0.01, bias_correction=False), {}),
    "two_phase, blocks": (lambda p: Adam(p, lr=0.01), {"exchange": "two_phase", "block": 8}),
    "hold": (lambda p: Adam(p, lr=0.01), {"dead": "hold"}),
    "some in full precision": (lambda p: Adam(p, lr=0.01), {"full_precision": ["p2"], "block": "tensor"}),
    "many buckets": (lambda p: Adam(p, lr=0.01), {"bucket_elements": 30}),
}


@pytest.mark.parametrize("stop", [FREEZE - 1, FREEZE, FREEZE + 1, FREEZE + 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, stop: int) -> None:
    make, options = VARIANTS[name]
    size = 3 if name == "two_phase, blocks" else 2

    def uninterrupted(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(make(params), transport, freeze_step=FREEZE, **options)
        train(optimizer, params, range(STEPS), transport.rank)
        return snapshot(params)

    def until(transport: LocalTransport) -> tuple[Any, Any]:
        params = parameters()
        optimizer = distribute(make(params), transport, freeze_step=FREEZE, **options)
        train(optimizer, params, range(stop), transport.rank)
        return snapshot(params), saved_and_loaded(optimizer.state_dict())

    saved = on_ranks(size, until)

    def resumed(transport: LocalTransport) -> list[Tensor]:
        params = [torch.nn.Parameter(x.clone()) for x in saved[transport.rank][0]]
        optimizer = distribute(make(params), transport, freeze_step=FREEZE, **options)
        optimizer.load_state_dict(saved[transport.rank][1])
        assert optimizer.stats.step == stop
        assert optimizer.stats.stage == ("compression" if stop >= FREEZE else "warm-up")
        train(optimizer, params, range(stop, STEPS), transport.rank)
        return snapshot(params)

    expected = on_ranks(size, uninterrupted)
    found = on_ranks(size, resumed)
    assert_replicas_equal(found)
    assert_bit_equal(found[0], expected[0], f"stopped after {stop}")


@pytest.mark.parametrize("stop", [5, 10, 15])
def test_an_automatic_freeze_resumes_where_it_was(stop: int) -> None:
    """beta2 = 0.9 remembers 10 steps, so the rule decides early."""

    def make(params: list[torch.nn.Parameter], transport: LocalTransport) -> Any:
        return distribute(Adam(params, lr=0.01, betas=(0.9, 0.9)), transport, freeze_threshold=0.97)

    def uninterrupted(transport: LocalTransport) -> tuple[list[Tensor], int]:
        params = parameters()
        optimizer = make(params, transport)
        train(optimizer, params, range(20), transport.rank)
        return snapshot(params), optimizer.stats.frozen_step

    def resumed(transport: LocalTransport) -> tuple[list[Tensor], int]:
        params = parameters()
        optimizer = make(params, transport)
        train(optimizer, params, range(stop), transport.rank)
        state = saved_and_loaded(optimizer.state_dict())
        params = [torch.nn.Parameter(x) for x in snapshot(params)]
        optimizer = make(params, transport)
        optimizer.load_state_dict(state)
        train(optimizer, params, range(stop, 20), transport.rank)
        return snapshot(params), optimizer.stats.frozen_step

    (expected, step), (found, resumed_step) = on_ranks(2, uninterrupted)[0], on_ranks(2, resumed)[0]
    assert 10 < step < 15, "the rule must have acted for this to prove anything"
    assert resumed_step == step
    assert_bit_equal(found, expected)


def test_loading_into_the_same_optimizer_rolls_it_back() -> None:
    def work(transport: LocalTransport) -> tuple[list[Tensor], list[Tensor]]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        train(optimizer, params, range(6), transport.rank)
        kept, state = snapshot(params), copy.deepcopy(optimizer.state_dict())
        train(optimizer, params, range(6, STEPS), transport.rank)
        first = snapshot(params)
        with torch.no_grad():
            for p, x in zip(params, kept, strict=True):
                p.copy_(x)
        optimizer.load_state_dict(state)
        train(optimizer, params, range(6, STEPS), transport.rank)
        return first, snapshot(params)

    for first, second in on_ranks(2, work):
        assert_bit_equal(second, first)


# another freeze_step


def test_an_earlier_freeze_step_stays_frozen() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        train(optimizer, params, range(6), transport.rank)
        state = copy.deepcopy(optimizer.state_dict())
        variances = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
        again = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        again.load_state_dict(state)
        train(again, params, range(6, 9), transport.rank)
        assert again.stats.stage == "compression"
        assert_bit_equal([again.state[p]["exp_avg_sq"] for p in params], variances)

    on_ranks(2, work)


def test_a_later_freeze_step_goes_back_to_warm_up_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        train(optimizer, params, range(6), transport.rank)
        state = copy.deepcopy(optimizer.state_dict())
        again = distribute(Adam(params, lr=0.01), transport, freeze_step=9)
        again.load_state_dict(state)
        stages = []
        for step in range(6, 12):
            train(again, params, [step], transport.rank)
            stages.append(again.stats.stage)
        assert stages == ["warm-up"] * 2 + ["compression"] * 4
        return snapshot(params)

    with caplog.at_level(logging.WARNING, "hvd_onebit"):
        assert_replicas_equal(on_ranks(2, work))
    assert "back to warm-up" in caplog.text
    assert caplog.text.count("back to warm-up") == 1


def test_going_back_to_warm_up_does_not_jump() -> None:
    """A constant gradient moves by lr, whatever the stage: the frozen variance's bias is accounted for."""

    def work(transport: LocalTransport) -> None:
        params = [torch.nn.Parameter(torch.zeros(50))]

        def steps(optimizer: Any, count: int) -> None:
            for _ in range(count):
                before = snapshot(params)[0]
                params[0].grad = torch.ones(50)
                optimizer.step()
                torch.testing.assert_close(before - params[0], torch.full((50,), 0.01), rtol=1e-3, atol=1e-6)

        optimizer = distribute(Adam(params, lr=0.01, eps=0.0), transport, freeze_step=3)
        steps(optimizer, 30)
        state = copy.deepcopy(optimizer.state_dict())
        again = distribute(Adam(params, lr=0.01, eps=0.0), transport, freeze_step=50)
        again.load_state_dict(state)
        steps(again, 10)
        assert again.stats.stage == "warm-up"

    on_ranks(2, work)


# errors that do not fit


def test_another_ranks_errors_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> Any:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        train(optimizer, params, range(6), transport.rank)
        return snapshot(params), copy.deepcopy(optimizer.state_dict())

    kept, state = on_ranks(3, work)[1]

    def resumed(transport: LocalTransport) -> list[Tensor]:
        params = [torch.nn.Parameter(x.clone()) for x in kept]
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        optimizer.load_state_dict(copy.deepcopy(state))
        errors = optimizer.state_dict()["onebit"]["errors"].values()
        assert not any(each["worker_error"].any() for each in errors)
        train(optimizer, params, range(6, 9), transport.rank)
        return snapshot(params)

    with caplog.at_level(logging.WARNING, "hvd_onebit"):
        assert_replicas_equal(on_ranks(2, resumed))
    assert "saved by rank 1 of 3" in caplog.text
    assert "dropped" in caplog.text


def test_one_rank_resumes_as_plain_adam() -> None:
    def work(transport: LocalTransport) -> Any:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        train(optimizer, params, range(6), transport.rank)
        return snapshot(params), copy.deepcopy(optimizer.state_dict())

    kept, state = on_ranks(2, work)[0]

    def alone(transport: LocalTransport) -> None:
        params = [torch.nn.Parameter(x.clone()) for x in kept]
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        optimizer.load_state_dict(copy.deepcopy(state))
        train(optimizer, params, range(6, 9), 0)
        assert optimizer.stats.stage == "warm-up"
        assert all(torch.isfinite(p).all() for p in params)

    on_ranks(1, alone)


# checkpoints that are refused


def _damage(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        state.update(changes)
        return state

    return change


def _nan_in(name: str) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        state["state"][2][name].view(-1)[3] = float("nan")
        return state

    return change


def _reshaped(name: str) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        state["state"][2][name] = torch.zeros(3, 3)
        return state

    return change


def _without(*path: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return state

    return change


def _without_in_errors(name: str) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        del next(iter(state["onebit"]["errors"].values()))[name]
        return state

    return change


def _bad_error(value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> Any:
        next(iter(state["onebit"]["errors"].values()))["worker_error"] = value
        return state

    return change


def _one_group_short(state: dict[str, Any]) -> Any:
    state["param_groups"][0]["params"].pop()
    return state


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not a dict": (lambda state: [1, 2], "not an optimizer's state_dict"),
    "no state": (_without("state"), "no 'state'"),
    "no groups": (_without("param_groups"), "no 'param_groups'"),
    "a model's": (lambda state: {"weight": torch.zeros(3)}, "not an optimizer's state_dict"),
    "fewer parameters": (_one_group_short, "parameter groups of"),
    "NaN momentum": (_nan_in("exp_avg"), "exp_avg of parameter 2 holds NaN"),
    "NaN variance": (_nan_in("exp_avg_sq"), "exp_avg_sq of parameter 2 holds NaN"),
    "wrong shape": (_reshaped("exp_avg"), r"shape \(3, 3\)"),
    "newer format": (_damage(onebit={"version": 99}), "version 99"),
    "NaN error": (_bad_error(torch.tensor([float("nan")])), "worker_error of .* holds NaN"),
    "errors cut off": (_without("onebit", "errors"), "onebit"),
    "no rank": (_without("onebit", "rank"), "onebit"),
    "not said whether shared": (_without("onebit", "shared"), "has no shared"),
    "an error's sizes cut off": (_without_in_errors("sizes"), "have no sizes"),
    "foreign extra": (_damage(onebit="something else"), "onebit"),
    "momentum cut off": (_without("state", 2, "exp_avg"), "exp_avg"),
    "step cut off": (_without("state", 1, "step"), "step"),
}


@pytest.mark.parametrize("trained", [0, 6], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_checkpoint_is_refused_and_the_optimizer_stays_as_it_was(name: str, trained: int) -> None:
    damage, says = REFUSED[name]

    def source(transport: LocalTransport) -> Any:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        train(optimizer, params, range(5), transport.rank)
        return optimizer.state_dict()

    states = on_ranks(2, source)

    def work(disturbed: bool) -> Callable[[LocalTransport], list[Tensor]]:
        def on_rank(transport: LocalTransport) -> list[Tensor]:
            params = parameters()
            optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
            train(optimizer, params, range(trained), transport.rank)
            if disturbed:
                damaged = damage(copy.deepcopy(states[transport.rank]))
                with pytest.raises(ValueError, match=says):
                    optimizer.load_state_dict(damaged)
            train(optimizer, params, range(trained, trained + 6), transport.rank)
            return snapshot(params)

        return on_rank

    assert_bit_equal(on_ranks(2, work(True))[0], on_ranks(2, work(False))[0])


# to and from plain Adam


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_a_plain_checkpoint_goes_in(cls: type) -> None:
    """Trained alone with torch's optimizer, then distributed: warm-up goes on from there."""
    params = parameters()
    optimizer = cls(params, lr=0.01)
    for step in range(3):
        for index, p in enumerate(params):
            p.grad = mean_gradient(step, 2, index, p)
        optimizer.step()
    kept, state = snapshot(params), copy.deepcopy(optimizer.state_dict())
    for step in range(3, 6):
        for index, p in enumerate(params):
            p.grad = mean_gradient(step, 2, index, p)
        optimizer.step()

    def work(transport: LocalTransport) -> list[Tensor]:
        mine = [torch.nn.Parameter(x.clone()) for x in kept]
        distributed = distribute(onebit.OneBitAdam(mine) if cls is Adam else cls(mine), transport, freeze_step=6)
        distributed.load_state_dict(copy.deepcopy(state))
        assert distributed.stats.step == 3
        train(distributed, mine, range(3, 6), transport.rank)
        assert distributed.stats.stage == "compression"
        return snapshot(mine)

    for found in on_ranks(2, work):
        assert_bit_equal(found, params)


@pytest.mark.parametrize("stop", [2, 6], ids=["warm-up", "compression"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_checkpoint_goes_out_to_plain_adam(stop: int, dtype: torch.dtype) -> None:
    def work(transport: LocalTransport) -> Any:
        params = parameters(dtype=dtype)
        optimizer = distribute(Adam(params, lr=0.01, eps=1e-4), transport, freeze_step=FREEZE)
        train(optimizer, params, range(stop), transport.rank)
        return snapshot(params), saved_and_loaded(optimizer.state_dict())

    kept, state = on_ranks(2, work)[0]
    params = [torch.nn.Parameter(x.clone()) for x in kept]
    optimizer = Adam(params, lr=0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert {int(optimizer.state[p]["step"]) for p in params} == {stop}
    train(optimizer, params, range(stop, stop + 3), 0)
    for p, before in zip(params, kept, strict=True):
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before)
        assert (p - before).abs().max() < 0.5


def test_a_state_dict_is_not_collective() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE)
        for step in range(8):
            train(optimizer, params, [step], transport.rank)
            if transport.rank == 0:
                optimizer.state_dict()
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))
