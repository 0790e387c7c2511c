"""What a run measures, in TensorFlow: reported once by every optimizer."""

from __future__ import annotations

import logging
from typing import Any

import keras
import pytest
from tf_training import distribute, on_ranks, train, variables

import hvd_onebit.tensorflow as onebit
from hvd_onebit.planner import RunPlan
from hvd_onebit.transport.local import LocalTransport


def plans_of(size: int, make: Any, steps: int = 4, **options: Any) -> list[list[RunPlan | None]]:
    """Each rank's plan after each step."""

    def work(transport: LocalTransport) -> list[RunPlan | None]:
        trained = variables()
        optimizer = distribute(make(), transport, **{"measure": True, **options})
        optimizer.build(trained)
        plans = []
        for step in range(steps):
            train(optimizer, trained, [step], transport.rank)
            plans.append(optimizer.stats.plan)
        return plans

    return on_ranks(size, work)


@pytest.mark.parametrize("freeze_step", [2, 20])
def test_every_run_measures_once_and_says_whether_it_pays(freeze_step: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_onebit")
    by_rank = plans_of(2, lambda: keras.optimizers.Adam(0.01), freeze_step=freeze_step)
    assert by_rank[0] == by_rank[1]
    plans = by_rank[0]
    first = min(freeze_step, 3) - 1
    assert plans[:first] == [None] * first
    assert plans[first] is not None
    assert (plans[first].num_elements, plans[first].best.method) == (273, "one_shot")
    assert all(plan is plans[first] for plan in plans[first:])
    assert caplog.text.count("measured in ") == caplog.text.count("Expected: float32 ") == 1


@pytest.mark.parametrize("make", [onebit.ZeroOneAdam, onebit.OneBitSGD])
def test_those_without_a_warm_up_report_too(make: Any) -> None:
    by_rank = plans_of(3, lambda: make(0.01))
    plan = by_rank[0][-1]
    assert plan is not None
    assert plan.best.method == "two_phase"
    assert by_rank[0] == by_rank[1] == by_rank[2]


def test_it_can_be_left_out() -> None:
    assert plans_of(2, lambda: keras.optimizers.Adam(0.01), measure=False) == [[None] * 4] * 2
    assert plans_of(1, lambda: keras.optimizers.Adam(0.01)) == [[None] * 4]


def test_nothing_can_be_left_to_it() -> None:
    with pytest.raises(ValueError, match="is not there for TensorFlow"):
        onebit.DistributedOptimizer(keras.optimizers.Adam(0.01), exchange="measured")
