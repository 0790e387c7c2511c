"""The hierarchical exchange in torch: its bits, its state, and two hosts with two ranks each under horovodrun."""

from __future__ import annotations

import copy
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import on_two_hosts
from test_torch_family import FAMILY, FREEZE, gradients, parameters, wrap

from hvd_onebit import netlab
from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport, run_ranks

MISSING = None if importlib.util.find_spec("horovod") else "Horovod is not installed"
WHY_NOT = netlab.why_impossible() or MISSING
SCRIPT = Path(__file__).parent / "scripts" / "torch_hierarchical.py"


@pytest.fixture(autouse=True)
def _hierarchical_with_two_ranks_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_onebit.hosts.AUTO_LEAST_RANKS", 2)


def dyadic(step: int, rank: int) -> list[torch.Tensor]:
    """Gradients whose mean over two or four ranks is exact."""
    return [(8 * each).round() / 8 for each in gradients(step, rank)]


def host_mean(step: int, host: int) -> list[torch.Tensor]:
    pairs = zip(dyadic(step, 2 * host), dyadic(step, 2 * host + 1), strict=True)
    return [(one + other) / 2 for one, other in pairs]


def train(optimizer: Any, ps: list[torch.nn.Parameter], steps: range, rank: int, give: Any = dyadic) -> None:
    for step in steps:
        optimizer.zero_grad()
        for p, gradient in zip(ps, give(step, rank), strict=True):
            p.grad = gradient
        optimizer.step()


def values(ps: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ps]


def assert_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
@pytest.mark.parametrize("name", [name for name in FAMILY if name != "zero one adam"])
def test_two_hosts_train_as_two_ranks_with_the_hosts_mean_gradients(name: str, exchange: str) -> None:
    """Bit for bit where gradients are what is sent; where it is more, the hosts' means are rounded."""
    is_exact = name == "adamw"
    steps = range(40 if is_exact else FREEZE + 2)
    # shards start where scales do
    options: dict[str, Any] = {"exchange": exchange, "block": 64, "bucket_elements": 700, "check_every": 1}

    def on_hosts(transport: LocalTransport) -> list[torch.Tensor]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, hierarchical=True, **options)
        train(optimizer, ps, steps, transport.rank)
        assert optimizer.stats.inside_bytes_per_step["compression"] > 0
        return values(ps)

    def alone(transport: LocalTransport) -> list[torch.Tensor]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, **options)
        train(optimizer, ps, steps, transport.rank, host_mean)
        assert optimizer.stats.inside_bytes_per_step["compression"] == 0
        return values(ps)

    replicas = run_ranks(4, on_hosts, ranks_per_host=2)
    expected = run_ranks(2, alone)[0]
    for replica in replicas:
        assert_bits(replica, expected if is_exact else replicas[0])
    if not is_exact:
        moved = torch.cat([(a - b).abs().flatten() for a, b in zip(replicas[0], expected, strict=True)])
        # a value next to zero may go the other way
        assert (moved > 1e-5).float().mean() < 0.01


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("name", ["adam", "zero one adam"])
def test_replicas_are_bit_equal_and_resume_bit_for_bit(name: str, hosts: int, ranks: int) -> None:
    options: dict[str, Any] = {"check_every": 1, "bucket_elements": 700}
    last = FREEZE + 10

    def work(transport: LocalTransport) -> list[list[torch.Tensor]]:
        ps = parameters()
        optimizer = wrap(FAMILY[name](ps), transport, **options)
        train(optimizer, ps, range(last), transport.rank)
        state, at = copy.deepcopy(optimizer.state_dict()), values(ps)
        train(optimizer, ps, range(last, last + 40), transport.rank)
        resumed = [torch.nn.Parameter(value) for value in at]
        second = wrap(FAMILY[name](resumed), transport, **options)
        second.load_state_dict(state)
        train(second, resumed, range(last, last + 40), transport.rank)
        if name == "zero one adam":
            optimizer.synchronize_for_checkpoint()
            second.synchronize_for_checkpoint()
        assert_bits(values(resumed), values(ps))
        return values(ps)

    replicas = run_ranks(hosts * ranks, work, ranks_per_host=ranks)
    for replica in replicas[1:]:
        assert_bits(replica, replicas[0])


@pytest.mark.parametrize("later", [4, 5])
def test_zero_one_adam_is_measured_before_its_next_round(later: int) -> None:
    """Resumed between two rounds, it has not exchanged anything yet when it is measured."""
    last = FREEZE + 10 + later

    def work(transport: LocalTransport) -> None:
        ps = parameters()
        optimizer = wrap(FAMILY["zero one adam"](ps), transport)
        train(optimizer, ps, range(last), transport.rank)
        resumed = [torch.nn.Parameter(value) for value in values(ps)]
        second = wrap(FAMILY["zero one adam"](resumed), transport)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(second, resumed, range(last, last + 4), transport.rank)
        assert second.stats.plan is not None

    run_ranks(4, work, ranks_per_host=2)


@pytest.mark.parametrize("target", [(2, None), (4, 2), (6, 2)], ids=str)
def test_rank_0_alone_restores_any_layout(target: tuple[int, int | None], caplog: pytest.LogCaptureFixture) -> None:
    def save(transport: LocalTransport) -> tuple[dict[str, Any], list[torch.Tensor]]:
        ps = parameters()
        optimizer = wrap(FAMILY["adam"](ps), transport, exchange="two_phase")
        train(optimizer, ps, range(FREEZE + 7), transport.rank)
        optimizer.synchronize_for_checkpoint()
        return copy.deepcopy(optimizer.state_dict()), values(ps)

    runs = run_ranks(4, save, ranks_per_host=2)
    saved = runs[0][0]["onebit"]["errors"]
    whole = {name: each["worker_error"] for name, each in saved.items()}
    assert all(len(error) == sum(saved[name]["sizes"]) and error.any() for name, error in whole.items())
    for state, _ in runs:  # any rank could have saved it
        for name, each in state["onebit"]["errors"].items():
            assert torch.equal(each["worker_error"], whole[name])

    def restore(transport: LocalTransport) -> tuple[dict[str, Any], list[torch.Tensor]]:
        ps = [torch.nn.Parameter(value.clone()) for value in runs[0][1]]
        optimizer = wrap(FAMILY["adam"](ps), transport, exchange="two_phase")
        optimizer.load_state_dict(copy.deepcopy(runs[0][0]))
        optimizer.synchronize_for_checkpoint()
        errors = copy.deepcopy(optimizer.state_dict()["onebit"]["errors"])
        train(optimizer, ps, range(FREEZE + 7, FREEZE + 12), transport.rank)
        return errors, values(ps)

    restored = run_ranks(target[0], restore, ranks_per_host=target[1])
    assert "dropped" not in caplog.text
    for errors, replica in restored:
        for name, error in whole.items():
            torch.testing.assert_close(errors[name]["worker_error"], error, rtol=1e-6, atol=1e-7)
        assert_bits(replica, restored[0][1])


def test_errors_of_another_layout_are_dropped_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def save(transport: LocalTransport) -> tuple[dict[str, Any], list[torch.Tensor]]:
        ps = parameters()
        optimizer = wrap(FAMILY["adam"](ps), transport)
        train(optimizer, ps, range(FREEZE + 3), transport.rank)
        return copy.deepcopy(optimizer.state_dict()), values(ps)

    saved = run_ranks(4, save, ranks_per_host=2)

    def restore(transport: LocalTransport) -> list[torch.Tensor]:
        state, at = saved[transport.rank]
        ps = [torch.nn.Parameter(value.clone()) for value in at]
        optimizer = wrap(FAMILY["adam"](ps), transport, hierarchical=False)
        optimizer.load_state_dict(copy.deepcopy(state))
        train(optimizer, ps, range(FREEZE + 3, FREEZE + 6), transport.rank)
        return values(ps)

    replicas = run_ranks(4, restore, ranks_per_host=2)
    assert "saved by a hierarchical exchange over other hosts, or by one that is not" in caplog.text
    for replica in replicas[1:]:
        assert_bits(replica, replicas[0])


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
def test_a_nan_on_one_rank_skips_the_step_on_all(exchange: str) -> None:
    def work(transport: LocalTransport) -> list[torch.Tensor]:
        ps = parameters()
        optimizer = wrap(FAMILY["adam"](ps), transport, exchange=exchange)
        train(optimizer, ps, range(FREEZE + 3), transport.rank)
        before, momentum = values(ps), optimizer.state[ps[0]]["exp_avg"].clone()
        optimizer.zero_grad()
        for p, gradient in zip(ps, dyadic(99, transport.rank), strict=True):
            p.grad = gradient
        if transport.rank == 2:
            assert ps[0].grad is not None
            ps[0].grad[0, 0] = float("nan")
        optimizer.step()
        assert optimizer.stats.steps_skipped == 1
        assert_bits(values(ps), before)
        assert torch.equal(optimizer.state[ps[0]]["exp_avg"], momentum)
        train(optimizer, ps, range(FREEZE + 3, FREEZE + 6), transport.rank)
        return values(ps)

    replicas = run_ranks(4, work, ranks_per_host=2)
    for replica in replicas[1:]:
        assert_bits(replica, replicas[0])


def test_it_says_whether_it_is_hierarchical(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> None:
        ps = parameters()
        train(wrap(FAMILY["adam"](ps), transport), ps, range(2), transport.rank)

    for size, ranks, said in [
        (4, 2, "hierarchical exchange: 2 hosts with 2 ranks each"),
        (3, 2, "the exchange is not hierarchical: the hosts have different numbers of ranks: 2, 1"),
        (2, 2, None),
    ]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "hvd_onebit"):
            run_ranks(size, work, ranks_per_host=ranks)
        assert [each.getMessage() for each in caplog.records if "hierarchical" in each.getMessage()] == (
            [said] if said else []
        )


@pytest.mark.parametrize("stage", ["warm-up", "compression"])
def test_ranks_that_want_it_and_ranks_that_do_not_all_raise(stage: str) -> None:
    def work(transport: LocalTransport) -> str:
        ps = parameters()
        optimizer = wrap(FAMILY["adam"](ps), transport)
        if stage == "compression":
            train(optimizer, ps, range(FREEZE + 3), transport.rank)
        state = copy.deepcopy(optimizer.state_dict())
        mixed = wrap(FAMILY["adam"](ps), transport, hierarchical=transport.rank != 1)
        mixed.load_state_dict(state)
        with pytest.raises(OneBitError, match="option hierarchical: rank 0,2,3: true; rank 1: false") as raised:
            train(mixed, ps, range(1), transport.rank)
        return str(raised.value)

    assert len(set(run_ranks(4, work, ranks_per_host=2, timeout_seconds=20))) == 1


# -- hosts -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.timeout(320)
def test_two_hosts_with_two_ranks_each(tmp_path: Path) -> None:
    found, text = on_two_hosts(SCRIPT, tmp_path, timeout=300)
    assert found[0]["threads"] == [found[0]["checksum"]] * 4
    for each in found:
        assert each["place"] == [each["rank"] // 2, 2, each["rank"] % 2, 2]
        assert each["memory"], "ranks of a host share memory"
        assert each["undone"] == [True, True]
        assert each["checksum"] == found[0]["checksum"]
        assert each["flat"] == found[0]["flat"]
        message = 4 * -(-each["num_elements"] // 2048) + each["num_elements"] / 8
        assert each["sent to other hosts"] == pytest.approx(message / 2, rel=0.05)
    assert "hierarchical exchange: 2 hosts with 2 ranks each" in text
    assert text.count("on rank 2 the gradients of p2 are NaN or infinite") == 2
    assert np.isfinite([each["loss"] for each in found]).all()
