"""When the variance freezes: at the step given, or when it has settled."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from hvd_onebit.options import CompressionOptions
from hvd_onebit.schedule import FreezeSchedule, delay_of, stride_of

BETA2 = 0.99  # remembers 100 updates


def freeze_step_of(
    schedule: FreezeSchedule, norm: Callable[[int], float], *, lr: Callable[[int], float] = lambda step: 1.0,
    start: int = 1, most: int = 2000,
) -> int | None:  # fmt: skip
    for step in range(start, most + 1):
        if schedule.should_freeze(step, lr(step), lambda: norm(step)):  # noqa: B023 - called at once
            return step
    return None


@pytest.mark.parametrize("freeze_step", [0, 1, 2, 7])
def test_a_number_freezes_after_exactly_that_many_updates(freeze_step: int) -> None:
    schedule = FreezeSchedule(CompressionOptions(freeze_step=freeze_step), BETA2)
    never: list[int] = []

    def norm() -> float:
        never.append(1)
        return 1.0

    frozen = [schedule.should_freeze(step, 1.0, norm) for step in range(1, 10)]
    assert frozen == [step >= freeze_step for step in range(1, 10)]
    assert not never, "the variance's norm costs a pass and is not needed"


@pytest.mark.parametrize(("beta2", "delay"), [(0.999, 1000), (0.99, 100), (0.9, 10), (0.0, 1), (0.997, 333)])
def test_delay_and_stride(beta2: float, delay: int) -> None:
    assert delay_of(beta2) == delay
    stride = stride_of(delay)
    assert delay % stride == 0
    assert 1 <= stride <= max(1, delay / 20)


def test_a_settled_variance_freezes_after_two_memories() -> None:
    schedule = FreezeSchedule(CompressionOptions(), BETA2)
    assert freeze_step_of(schedule, lambda step: 5.0) == 105  # the first multiple of 5 with one 100 updates back


def test_a_falling_variance_freezes_once_it_falls_slowly() -> None:
    threshold = 0.96

    def norm(step: int) -> float:
        return 1.0 + 10.0 * np.exp(-step / 100)

    step = freeze_step_of(FreezeSchedule(CompressionOptions(freeze_threshold=threshold), BETA2), norm)
    assert step is not None
    assert norm(step) / norm(step - 100) >= threshold
    assert norm(step - 5) / norm(step - 105) < threshold


def test_the_rule_waits_for_the_learning_rates_warm_up() -> None:
    schedule = FreezeSchedule(CompressionOptions(), BETA2)
    step = freeze_step_of(schedule, lambda step: 5.0, lr=lambda step: min(step, 300) / 300)
    assert step == 400


def test_a_rule_that_never_holds_is_ended_by_the_latest_step() -> None:
    norms = 0.5 ** (np.arange(3000) / 20)
    assert freeze_step_of(FreezeSchedule(CompressionOptions(), BETA2), lambda step: norms[step]) is None
    schedule = FreezeSchedule(CompressionOptions(freeze_latest_step=321), BETA2)
    assert freeze_step_of(schedule, lambda step: norms[step]) == 321


def test_a_variance_of_zero_or_nan_is_not_settled() -> None:
    for value in (0.0, float("nan")):
        schedule = FreezeSchedule(CompressionOptions(), BETA2)
        assert freeze_step_of(schedule, lambda step, value=value: value, most=500) is None


def test_a_raw_variance_would_pass_where_the_corrected_one_does_not() -> None:
    """The trap of ALGORITHMS.md: a variance that started at zero rises, so its raw ratio passes at once."""
    falling = [np.exp(-step / 150) for step in range(2000)]
    raw = 0.0
    raws = {}
    for step in range(1, 1001):
        raw = BETA2 * raw + (1 - BETA2) * falling[step]
        raws[step] = raw
    early = freeze_step_of(FreezeSchedule(CompressionOptions(), BETA2), lambda step: raws[step], most=1000)
    right = freeze_step_of(
        FreezeSchedule(CompressionOptions(), BETA2), lambda step: raws[step] / (1 - BETA2**step), most=1000
    )
    assert early == 105
    assert right is None


@pytest.mark.parametrize("stop", [1, 99, 100, 101, 149])
def test_state_goes_through_json_and_changes_nothing(stop: int) -> None:
    def norm(step: int) -> float:
        return 1.0 + np.exp(-step / 50)

    options = CompressionOptions()
    uninterrupted = freeze_step_of(FreezeSchedule(options, BETA2), norm)
    assert uninterrupted is not None
    assert uninterrupted > stop
    first, second = FreezeSchedule(options, BETA2), FreezeSchedule(options, BETA2)
    assert freeze_step_of(first, norm, most=stop) is None
    second.load(json.loads(json.dumps(first.state())))
    assert freeze_step_of(second, norm, start=stop + 1) == uninterrupted
