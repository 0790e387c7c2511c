"""What a run measures: reported by every optimizer, decides what was left to it, and stays decided in checkpoints."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch_training
from test_torch_checkpoints import saved_and_loaded
from torch import Tensor
from torch_training import assert_bit_equal, assert_replicas_equal, on_ranks, parameters, snapshot, train

import hvd_onebit.torch as onebit
from hvd_onebit.planner import Cluster, KernelSpeeds, Measurement, RunPlan
from hvd_onebit.torch import engine
from hvd_onebit.transport.local import LocalTransport, run_ranks

Adam = torch.optim.Adam
FREEZE, STEPS = 5, 8
NETWORK = Cluster(3, 1, 1e9, latency_seconds=1e-3).network()
ONE_SHOT = Measurement(NETWORK, KernelSpeeds(0.0, 0.0, 0.0), 0.1)
TWO_PHASE = Measurement(NETWORK, KernelSpeeds(0.0, 1.0, 0.0), 0.1)
"""Decoding takes a second an element: one message is better than three."""


def distribute(optimizer: Any, transport: LocalTransport, **options: Any) -> Any:
    return torch_training.distribute(optimizer, transport, **{"measure": True, **options})


def plan_of(optimizer: Any) -> RunPlan | None:
    plan: RunPlan | None = optimizer.stats.plan
    return plan


def run(
    transport: LocalTransport, steps: int = STEPS, *, state: Any = None, **options: Any
) -> tuple[Any, list[Tensor]]:
    """An optimizer after `steps` steps, or what is left of them after a checkpoint's, and its parameters."""
    params = parameters() if state is None else [torch.nn.Parameter(x.clone()) for x in state[1]]
    optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=FREEZE, **options)
    if state is not None:
        optimizer.load_state_dict(state[0])
    train(optimizer, params, range(optimizer.stats.step, steps), transport.rank)
    return optimizer, snapshot(params)


def measuring(found: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every later measurement find this."""
    measure = engine.measure

    def measured(*args: Any) -> Measurement:
        measure(*args)
        return found

    monkeypatch.setattr(engine, "measure", measured)


def test_every_run_measures_once_and_says_whether_it_pays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_onebit")

    def work(transport: LocalTransport) -> list[RunPlan | None]:
        plans = []
        for freeze_step in (1, 2, 20):
            params = parameters()
            optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step)
            for step in range(6):
                train(optimizer, params, [step], transport.rank)
                assert (plan_of(optimizer) is None) == (step + 1 < min(3, freeze_step))
            plans.append(plan_of(optimizer))
        return plans

    by_rank = on_ranks(2, work)
    assert by_rank[0] == by_rank[1]
    assert caplog.text.count("measured in ") == caplog.text.count("Expected: float32 ") == 3
    for plan in by_rank[0]:
        assert plan is not None
        assert (plan.num_elements, plan.best.method) == (273, "one_shot")


@pytest.mark.parametrize(
    "make", [onebit.ZeroOneAdam, onebit.OneBitSGD, onebit.OneBitLamb], ids=["ZeroOneAdam", "OneBitSGD", "OneBitLamb"]
)
def test_those_without_a_warm_up_report_too(make: Any) -> None:
    def work(transport: LocalTransport) -> RunPlan | None:
        params = parameters()
        optimizer = distribute(make(params, lr=0.01), transport)
        train(optimizer, params, range(4), transport.rank)
        return plan_of(optimizer)

    plans = on_ranks(3, work)
    assert plans[0] is not None
    assert plans[0].best.method == "two_phase"
    assert plans[0] == plans[1] == plans[2]


def test_a_hierarchical_run_reports_its_own_exchange() -> None:
    def work(transport: LocalTransport) -> RunPlan | None:
        return plan_of(run(transport, 3, hierarchical=True)[0])

    plans = run_ranks(4, work, ranks_per_host=2, timeout_seconds=20.0)
    assert plans[0] is not None
    assert plans[0].measurement.network.inside is not None
    assert (plans[0].best.method, plans[0].measurement.network.num_peers) == ("one_shot", 2)


def test_it_can_be_left_out() -> None:
    assert on_ranks(2, lambda transport: plan_of(run(transport, measure=False)[0])) == [None, None]


def test_one_rank_has_nothing_to_measure() -> None:
    (plan,) = on_ranks(1, lambda transport: plan_of(run(transport)[0]))
    assert plan is None


@pytest.mark.parametrize(("found", "name"), [(ONE_SHOT, "one_shot"), (TWO_PHASE, "two_phase")])
def test_what_was_measured_decides_as_if_it_had_been_named(
    found: Measurement, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = on_ranks(3, lambda transport: run(transport, exchange=name)[1])
    measuring(found, monkeypatch)

    def work(transport: LocalTransport) -> tuple[str, list[Tensor]]:
        optimizer, params = run(transport, exchange="measured", bucket_elements="measured")
        plan = plan_of(optimizer)
        assert plan is not None
        assert {b.exchange.is_two_phase for b in optimizer._onebit._all_buckets()} == {name == "two_phase"}
        return plan.best.method, params

    found_by_rank = on_ranks(3, work)
    assert [method for method, _ in found_by_rank] == [name] * 3
    assert_replicas_equal([params for _, params in found_by_rank])
    assert_bit_equal(found_by_rank[0][1], named[0])


def test_what_is_named_is_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(ONE_SHOT, monkeypatch)

    def work(transport: LocalTransport) -> tuple[int, bool]:
        optimizer, _ = run(transport, exchange="two_phase", bucket_elements=200)
        plan = plan_of(optimizer)
        assert plan is not None
        assert plan.faster is not None
        assert plan.faster[0].method == "one_shot"
        buckets = optimizer._onebit._all_buckets()
        return len(buckets), all(bucket.exchange.is_two_phase for bucket in buckets)

    assert on_ranks(3, work) == [(3, True)] * 3


@pytest.mark.parametrize("stop", [3, FREEZE, FREEZE + 1])
def test_a_resumed_run_keeps_what_was_decided(stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it finds another network, its bits are those of the run that was not stopped."""
    options = {"exchange": "measured", "bucket_elements": "measured"}
    measuring(ONE_SHOT, monkeypatch)
    whole = on_ranks(3, lambda transport: run(transport, **options)[1])

    def until(transport: LocalTransport) -> Any:
        optimizer, params = run(transport, stop, **options)
        return saved_and_loaded(optimizer.state_dict()), params

    saved = on_ranks(3, until)
    measuring(TWO_PHASE, monkeypatch)
    resumed = on_ranks(3, lambda transport: run(transport, state=saved[transport.rank], **options)[1])
    assert_bit_equal(resumed[0], whole[0])
    assert_replicas_equal(resumed)


def test_other_ranks_decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that was chosen for two ranks says nothing about three."""
    options = {"exchange": "measured"}
    measuring(TWO_PHASE, monkeypatch)

    def until(transport: LocalTransport) -> Any:
        optimizer, params = run(transport, 3, **options)
        return saved_and_loaded(optimizer.state_dict()), params

    saved = on_ranks(2, until)[0]
    measuring(ONE_SHOT, monkeypatch)

    def work(transport: LocalTransport) -> bool:
        optimizer, _ = run(transport, state=saved, **options)
        return any(bucket.exchange.is_two_phase for bucket in optimizer._onebit._all_buckets())

    assert on_ranks(3, work) == [False] * 3


def test_zero_one_adam_has_nothing_to_measure_in() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        with pytest.raises(ValueError, match="no warm-up to measure in"):
            distribute(onebit.ZeroOneAdam(params, lr=0.01), transport, exchange="measured")
        with pytest.raises(ValueError, match="no warm-up to measure in"):
            onebit.ZeroOneAdam(params, lr=0.01, bucket_elements="measured")

    on_ranks(2, work)


def test_a_run_that_is_resumed_in_the_compression_stage_claims_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_onebit")

    def work(transport: LocalTransport) -> Any:
        optimizer, values = run(transport)
        resumed, _ = run(
            transport,
            STEPS + 4,
            state=(optimizer.state_dict(), values),
            exchange="measured",
            bucket_elements="measured",
        )
        assert resumed.param_groups[0]["onebit_choice"] == {}
        return snapshot(resumed.param_groups[0]["params"])

    assert_replicas_equal(on_ranks(2, work))
    assert caplog.text.count("Expected: float32") == 2
    assert "as chosen by the measurement" not in caplog.text
