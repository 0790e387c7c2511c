"""Steps that cannot be made and replicas that have parted: all or nothing, and the same on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import Adam
from torch_training import (
    assert_bit_equal,
    assert_replicas_equal,
    distribute,
    gradient,
    mean_gradient,
    on_ranks,
    parameters,
    set_gradients,
    snapshot,
    train,
)

import hvd_onebit.torch as onebit
from hvd_onebit.errors import OneBitError
from hvd_onebit.torch.engine import CompressionEngine
from hvd_onebit.torch.local_steps import ACCUMULATED, ANCHOR
from hvd_onebit.transport.local import LocalTransport

# 0/1 Adam: a synchronisation that overflows


def zero_one(params: Any, transport: LocalTransport, **options: Any) -> Any:
    optimizer = onebit.ZeroOneAdam(
        params,
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        decoupled_weight_decay=True,
        var_freeze_step=4,
        var_update_scaler=2,
        local_step_scaler=3,
        local_step_clipper=4,
    )
    return distribute(optimizer, transport, **options)


def everything(optimizer: Any, params: Any) -> dict[str, Any]:
    """Parameters and state, but for the error feedback, put back to rounding only, and checksums, compared by now."""
    state = copy.deepcopy({key: value for key, value in optimizer.state_dict().items() if key != "onebit"})
    del state["param_groups"][0]["onebit_checksums"]
    return {"parameters": snapshot(params), **state}


def assert_same(left: Any, right: Any, path: str = "") -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}.{i}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
@pytest.mark.parametrize("steps", [2, 13], ids=["with the variance", "in the local stage"])
def test_a_synchronisation_that_overflows_changes_nothing(exchange: str, steps: int) -> None:
    def work(transport: LocalTransport) -> Any:
        params = parameters()
        optimizer = zero_one(params, transport, exchange=exchange, full_precision=["p1"])
        train(optimizer, params, range(steps), transport.rank)
        rounds = optimizer.stats.rounds
        while True:  # up to the step before a synchronisation
            trial, rounds = optimizer.stats.step + 1, optimizer.stats.rounds
            lr = 0.01
            if optimizer._onebit._rounds.due(trial, lr).sync:
                break
            train(optimizer, params, [trial], transport.rank)
        accumulated = optimizer.state[params[0]][ACCUMULATED]
        kept = accumulated.clone()
        owed = [bucket.exchange.worker_error.clone() for bucket in optimizer._onebit._all_buckets()]
        if transport.rank == 1:
            accumulated.view(-1)[3] = float("inf")  # lr times momentum may well be too large for float32
        before = everything(optimizer, params)
        updates = optimizer.stats.variance_updates
        train(optimizer, params, [50], transport.rank)
        assert_same(everything(optimizer, params), before)
        assert (optimizer.stats.rounds, optimizer.stats.variance_updates) == (rounds, updates)
        assert optimizer.stats.skipped_in_a_row == 1
        for bucket, error in zip(optimizer._onebit._all_buckets(), owed, strict=True):
            torch.testing.assert_close(bucket.exchange.worker_error, error, rtol=1e-4, atol=1e-7)
        accumulated.copy_(kept)
        while optimizer.stats.rounds == rounds:
            train(optimizer, params, [51], transport.rank)
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


# 0/1 Adam: replicas that have parted


def test_replicas_that_part_in_the_local_stage_are_found_at_a_round() -> None:
    """Rounds seldom fall on a multiple of check_every, and most steps compare nothing."""

    def work(transport: LocalTransport) -> str:
        params = parameters()
        optimizer = zero_one(params, transport, check_every=10)
        train(optimizer, params, range(23), transport.rank)
        if transport.rank == 1:
            optimizer.state[params[0]][ANCHOR].view(-1)[0] += 0.5
        with pytest.raises(OneBitError) as caught:
            train(optimizer, params, range(23, 60), transport.rank)
        assert optimizer.stats.step < 40, "found no sooner than at a multiple of check_every"
        return str(caught.value)

    errors = on_ranks(2, work)
    assert errors[0] == errors[1]
    assert "checksum of the parameters: rank 0" in errors[0]


def test_replicas_that_are_equal_are_not_suspected() -> None:
    def work(transport: LocalTransport) -> Any:
        params = parameters()
        optimizer = zero_one(params, transport, check_every=3)
        train(optimizer, params, range(60), transport.rank)
        return optimizer.stats.step

    assert on_ranks(3, work) == [60, 60, 60]


# a parameter group that is taken out by hand


def two_groups(transport: LocalTransport, **options: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    return distribute(Adam(groups, lr=0.01), transport, **{"freeze_step": 3, **options}), params


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("steps", [1, 5], ids=["warm-up", "compression"])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)], ids=["everywhere", "on one rank"])
def test_a_group_that_is_taken_out_is_the_same_error_on_all_ranks(
    index: int, steps: int, ranks: tuple[int, ...]
) -> None:
    def work(transport: LocalTransport) -> str:
        optimizer, params = two_groups(transport)
        train(optimizer, params, range(steps), transport.rank)
        if transport.rank in ranks:
            del optimizer.param_groups[index]
            with pytest.raises(OneBitError, match="put their group back"):
                optimizer.state_dict()
        before = snapshot(params)
        set_gradients(params, steps, transport.rank)
        with pytest.raises(OneBitError) as caught:
            optimizer.step()
        assert_bit_equal(snapshot(params), before)
        return str(caught.value)

    errors = on_ranks(3, work)
    assert len(set(errors)) == 1
    if len(ranks) == 1:
        assert "parameters removed from param_groups: rank 0,2: null; rank 1: " in errors[0]
    else:
        assert f"removed from optimizer.param_groups: {'p0, p1' if index == 0 else 'p2, p3, p4'}." in errors[0]


@pytest.mark.parametrize("index", [0, 1])
def test_a_group_that_is_put_back_goes_on(index: int) -> None:
    def work(transport: LocalTransport) -> Any:
        optimizer, params = two_groups(transport)
        train(optimizer, params, range(5), transport.rank)
        group = optimizer.param_groups.pop(index)
        with pytest.raises(OneBitError, match="put their group back"):
            train(optimizer, params, [5], transport.rank)
        optimizer.param_groups.insert(index, group)
        train(optimizer, params, range(5, 8), transport.rank)
        assert optimizer.stats.step == 8
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


def test_one_rank_does_without_a_group() -> None:
    def work(transport: LocalTransport) -> None:
        optimizer, params = two_groups(transport)
        train(optimizer, params, range(5), transport.rank)
        del optimizer.param_groups[0]
        before = snapshot(params)
        train(optimizer, params, range(5, 8), transport.rank)
        assert_bit_equal(snapshot(params[:2]), before[:2])
        assert not torch.equal(params[2], before[2])
        assert optimizer.stats.step == 8

    on_ranks(1, work)


# float64


def test_float64_parameters_stay_in_full_precision_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> Any:
        wide, narrow = torch.nn.Parameter(torch.ones(40, dtype=torch.float64)), torch.nn.Parameter(torch.ones(40))
        plain = torch.nn.Parameter(wide.detach().clone())
        optimizer = distribute(Adam([wide, narrow], lr=1e-12), transport, freeze_step=2)
        reference = Adam([plain], lr=1e-12)
        for step in range(6):
            set_gradients([wide, narrow], step, transport.rank)
            plain.grad = mean_gradient(step, 2, 0, wide)
            optimizer.step()
            reference.step()
        assert optimizer.stats.full_precision_names == ("p0",)
        assert torch.equal(wide, plain)
        assert not torch.equal(wide, torch.ones(40, dtype=torch.float64)), "float32 would have lost such steps"
        assert gradient(0, 0, 0, wide).dtype == torch.float64
        return snapshot([wide, narrow])

    assert_replicas_equal(on_ranks(2, work))
    assert "float64 parameters stay in full precision" in caplog.text
    assert ": p0; make them float32" in caplog.text


def test_float64_parameters_that_were_compressed_when_saved_go_on_in_full_precision() -> None:
    """A checkpoint of a float32 model, or of a version that rounded."""

    def work(transport: LocalTransport) -> Any:
        narrow = parameters()
        optimizer = distribute(Adam(narrow, lr=0.01), transport, freeze_step=2)
        train(optimizer, narrow, range(4), transport.rank)
        assert optimizer.stats.stage == "compression"
        wide = [torch.nn.Parameter(p.detach().double()) for p in narrow]
        resumed = distribute(Adam(wide, lr=0.01), transport, freeze_step=2)
        resumed.load_state_dict(optimizer.state_dict())
        train(resumed, wide, range(4, 7), transport.rank)
        assert resumed.stats.stage == "warm-up"
        assert resumed.stats.compressed_elements == 0
        assert all(state["exp_avg_sq"].dtype == torch.float64 for state in resumed.state.values())
        return snapshot(wide)

    assert_replicas_equal(on_ranks(2, work))


def test_a_backward_pass_looks_for_removed_groups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as there are parameters: in every hook it would be quadratic."""
    looks: list[None] = []
    removed = CompressionEngine._removed

    def counted(self: CompressionEngine) -> list[str]:
        looks.append(None)
        return removed(self)

    def work(transport: LocalTransport) -> None:
        params = parameters([(3,)] * 50)
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=1)
        train(optimizer, params, range(2), transport.rank)
        if transport.rank == 0:
            monkeypatch.setattr(CompressionEngine, "_removed", counted)
        transport.allgather_bytes(b"", name="patched").wait()
        for p in params:
            optimizer._onebit.gradient_is_ready(p)
        assert len(looks) <= 2, "once on each rank"

    on_ranks(2, work)
