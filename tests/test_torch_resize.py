"""Checkpoints that rank 0 alone saves, restored on another number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_family import FAMILY, FREEZE, gradients, parameters, step_once, wrap

from hvd_onebit.state import owed_by_parameter
from hvd_onebit.transport.local import LocalTransport, run_ranks


def owed(errors: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Mean worker error plus server errors, over the ranks' `onebit` sections of state_dict."""
    total = []
    for name in errors[0]["errors"]:
        workers = [each["errors"][name]["worker_error"].numpy().astype(np.float64) for each in errors]
        servers = [each["errors"][name]["server_error"] for each in errors]
        owed_here = np.mean(workers, axis=0)
        if servers[0] is not None:
            owed_here = owed_here + np.concatenate([server.numpy() for server in servers])
        total.append(owed_here)
    return np.concatenate(total)


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
@pytest.mark.parametrize("name", FAMILY)
def test_rank_0_alone_restores_any_number_of_ranks(name: str, exchange: str) -> None:
    steps = FREEZE + 11

    def first_run(transport: LocalTransport) -> tuple[Any, Any, Any, list[torch.Tensor]]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, exchange=exchange)
        for step in range(steps):
            step_once(optimizer, ps, step, transport.rank)
        before = copy.deepcopy(optimizer.state_dict()["onebit"])
        optimizer.synchronize_for_checkpoint()
        state = copy.deepcopy(optimizer.state_dict())
        values = copy.deepcopy([p.detach() for p in ps])
        for step in range(steps, steps + 60):
            step_once(optimizer, ps, step, transport.rank)
        return before, state, values, [p.detach() for p in ps]

    runs = run_ranks(3, first_run)
    before = owed([run[0] for run in runs])
    assert np.abs(before).max() > 0
    for _, state, values, _ in runs:
        # every rank could have saved it
        for mine, theirs in zip(values, runs[0][2], strict=True):
            assert torch.equal(mine, theirs)
        assert all(e["server_error"] is None or not e["server_error"].any() for e in state["onebit"]["errors"].values())
    np.testing.assert_allclose(owed([run[1]["onebit"] for run in runs]), before, rtol=0, atol=2e-6)
    assert all(torch.isfinite(p).all() for p in runs[0][3])

    for size in (2, 4):

        def second_run(transport: LocalTransport) -> tuple[Any, list[torch.Tensor], bool]:
            ps = [torch.nn.Parameter(value.clone()) for value in runs[0][2]]
            optimizer = wrap(FAMILY[name](ps), transport, exchange=exchange)
            optimizer.load_state_dict(copy.deepcopy(runs[0][1]))
            restored = copy.deepcopy(optimizer.state_dict()["onebit"])
            rounds = optimizer.stats.rounds
            step = steps
            while optimizer.stats.rounds < rounds + 6:
                step_once(optimizer, ps, step, transport.rank)
                step += 1
            return restored, [p.detach() for p in ps], optimizer.stats.stage == "compression"

        resumed = run_ranks(size, second_run)
        np.testing.assert_allclose(owed([run[0] for run in resumed]), before, rtol=0, atol=2e-6)
        for _, ps, is_compressing in resumed:
            assert is_compressing
            for mine, theirs in zip(ps, resumed[0][1], strict=True):
                assert torch.equal(mine, theirs)


def test_without_it_the_errors_are_dropped_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def first_run(transport: LocalTransport) -> Any:
        ps = parameters()
        optimizer = wrap(FAMILY["adam"](ps), transport)
        for step in range(FREEZE + 5):
            step_once(optimizer, ps, step, transport.rank)
        return copy.deepcopy(optimizer.state_dict()), copy.deepcopy([p.detach() for p in ps])

    state, values = run_ranks(2, first_run)[0]

    def second_run(transport: LocalTransport) -> Any:
        ps = [torch.nn.Parameter(value.clone()) for value in values]
        optimizer = wrap(FAMILY["adam"](ps), transport)
        optimizer.load_state_dict(copy.deepcopy(state))
        errors = copy.deepcopy(optimizer.state_dict()["onebit"])
        step_once(optimizer, ps, 99, transport.rank)
        return errors, [p.detach() for p in ps]

    resumed = run_ranks(3, second_run)
    assert "dropped" in caplog.text
    assert np.abs(owed([errors for errors, _ in resumed])).max() == 0
    for _, ps in resumed:
        for mine, theirs in zip(ps, resumed[0][1], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "zero one adam"])
def test_one_rank_alone_settles_what_was_owed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its next momentum is the one that an exchange without rounding would have given."""
    steps = FREEZE + 11

    def first_run(transport: LocalTransport) -> Any:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, block=64)
        for step in range(steps):
            step_once(optimizer, ps, step, transport.rank)
        optimizer.synchronize_for_checkpoint()
        return copy.deepcopy(optimizer.state_dict()), [p.detach() for p in ps]

    state, values = run_ranks(3, first_run)[0]
    owed_parts = owed_by_parameter(state["onebit"]["errors"], 3)

    def second_run(transport: LocalTransport) -> None:
        ps = [torch.nn.Parameter(value.clone()) for value in values]
        optimizer = wrap(FAMILY[name](ps), transport, block=64)
        optimizer.load_state_dict(copy.deepcopy(state))
        key = "momentum_buffer" if "sgd" in name else "exp_avg"
        group = optimizer.param_groups[0]
        beta1 = group["momentum"] if "sgd" in name else group["betas"][0]
        decay = 0.0 if name in ("adamw", "lamb") else group["weight_decay"]
        expected = []
        for i, (p, gradient) in enumerate(zip(ps, gradients(steps, 0), strict=True)):
            saved = state["state"][i]
            part = owed_parts[f"p{i}"].view(p.shape)
            if "scaling" in saved:
                part = part / saved["scaling"]
            if "update space" in name:
                correction = 1 - group["betas"][1] ** saved["onebit_variance_steps"]
                part = part * ((saved["exp_avg_sq"] / correction).sqrt() + group["eps"])
            share = 1.0 if "sgd" in name else 1 - beta1
            expected.append(beta1 * saved[key] + share * (gradient + decay * p.detach()) + part)
        step_once(optimizer, ps, steps, 0)
        assert optimizer.stats.stage == "warm-up"
        for p, momentum in zip(ps, expected, strict=True):
            torch.testing.assert_close(optimizer.state[p][key], momentum, rtol=1e-4, atol=1e-5)

    run_ranks(1, second_run)
    assert "dropped" not in caplog.text


def test_ranks_without_a_part_of_their_own_share_too() -> None:
    """Fewer elements than would give every rank a chunk: some have an empty server error."""

    def work(transport: LocalTransport) -> Any:
        p = torch.nn.Parameter(torch.zeros(40))
        optimizer = wrap(torch.optim.Adam([p]), transport, freeze_step=1, exchange="two_phase")
        for step in range(4):
            p.grad = torch.linspace(-1.0, 1.0 + step, 40) * (1 + transport.rank)
            optimizer.step()
        before = copy.deepcopy(optimizer.state_dict()["onebit"])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.synchronize_for_checkpoint()
        return before, copy.deepcopy(optimizer.state_dict()["onebit"])

    runs = run_ranks(3, work)
    np.testing.assert_allclose(owed([run[1] for run in runs]), owed([run[0] for run in runs]), rtol=0, atol=1e-6)
