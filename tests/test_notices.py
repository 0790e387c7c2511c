"""What the user is told when compression never began, or began too early: the same words in both frameworks."""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hvd_onebit import notices
from hvd_onebit.options import CompressionOptions
from hvd_onebit.planner import Cluster, KernelSpeeds, Measurement, plan_run
from hvd_onebit.schedule import FreezeSchedule
from hvd_onebit.stats import COMPRESSION, WARM_UP

SCRIPT = """
from hvd_onebit import notices
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats
stats = Stats()
notices.started({freeze_step!r}, 0.9, stats)
for stage in {stages}:
    stats.count(8)
    stats.end_step(stage, skipped=False)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("freeze_step", "stages", "told"),
    [
        (50, [WARM_UP, WARM_UP], "at step 2, so that nothing was compressed: freeze_step=50;"),
        ("auto", [WARM_UP], 'at step 1, so that nothing was compressed: freeze_step="auto";'),
        (1, [WARM_UP, COMPRESSION], ""),
        (50, [], ""),
    ],
)
def test_a_run_that_ends_in_warm_up_is_told_of_at_its_end(freeze_step: Any, stages: list[str], told: str) -> None:
    script = SCRIPT.format(freeze_step=freeze_step, stages=stages)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"
    assert done.stderr.count("the run ended in its warm-up") == bool(told)
    assert told in done.stderr


def test_a_run_that_an_error_has_ended_is_told_of_that_alone() -> None:
    script = SCRIPT.format(freeze_step=50, stages=[WARM_UP]) + "raise SystemError('the cause')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("SystemError: the cause")


@pytest.mark.parametrize("on_one_host", [True, False])
def test_a_measurement_on_one_host_is_called_that(on_one_host: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    network, speeds = Cluster(2, 1, 1e9).network(), KernelSpeeds(1e-9, 3e-10, 1e-10)
    options = CompressionOptions()
    notices.measured(plan_run(Measurement(network, speeds, 0.1, on_one_host=on_one_host), 10**6, options), options)
    assert ("All ranks are on one host" in caplog.text) == on_one_host


@pytest.mark.parametrize(
    ("rates", "rises"),
    [
        ([1.0, 2.0, 3.0], True),
        ([2.0, 1.0, 3.0], True),
        ([1.0, 2.0, 2.0], False),
        ([3.0, 2.0, 1.0], False),
        ([1.0], False),
    ],
)
def test_the_schedule_knows_whether_the_learning_rate_rises(rates: list[float], rises: bool) -> None:
    schedule = FreezeSchedule(CompressionOptions(freeze_step=len(rates)), 0.9)
    for step, lr in enumerate(rates, start=1):
        schedule.load(schedule.state())
        assert schedule.should_freeze(step, lr, None) == (step == len(rates))
    assert schedule.lr_rises == rises


def _train_torch(lr: Callable[[int], float], freeze_step: int, steps: int) -> None:
    pytest.importorskip("horovod.torch")
    import torch
    from torch_training import distribute, on_ranks, parameters, train

    def work(transport: Any) -> None:
        params = parameters()
        optimizer = distribute(torch.optim.Adam(params, lr=1.0), transport, freeze_step=freeze_step)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr(step)
            train(optimizer, params, [step], transport.rank)

    on_ranks(2, work)


def _train_tensorflow(lr: Callable[[int], float], freeze_step: int, steps: int) -> None:
    pytest.importorskip("horovod.tensorflow")
    import keras
    from tf_training import distribute, on_ranks, train, variables

    def work(transport: Any) -> None:
        trained = variables()
        optimizer = distribute(keras.optimizers.Adam(1.0), transport, freeze_step=freeze_step)
        for step in range(steps):
            optimizer.learning_rate = lr(step)
            train(optimizer, trained, [step], transport.rank)

    on_ranks(2, work)


frameworks = pytest.mark.parametrize("train", [_train_torch, _train_tensorflow], ids=["torch", "tensorflow"])


@frameworks
@pytest.mark.parametrize("rises", [True, False])
def test_a_freeze_while_the_learning_rate_rises_is_told_of(
    train: Callable[..., None], rises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    train(lambda step: 1e-3 * ((step if rises else min(step, 2)) + 1), 4, 7)
    assert ("step 4: the learning rate still rises" in caplog.text) == rises


@frameworks
@pytest.mark.parametrize(("freeze_steps", "told"), [((2, 50), 1), ((50, 2), 0)], ids=["in warm-up", "compressed"])
def test_the_last_training_is_looked_at_when_the_interpreter_ends(
    train: Callable[..., None],
    freeze_steps: tuple[int, int],
    told: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *given: registered.append(given))
    monkeypatch.setattr(
        atexit, "unregister", lambda function: registered.__setitem__(slice(None), _others(registered, function))
    )
    caplog.set_level(logging.WARNING)
    for freeze_step in freeze_steps:
        train(lambda step: 1e-3, freeze_step, 3)
    for function, *given in registered:
        function(*given)
    assert caplog.text.count("the run ended in its warm-up, at step 3,") == told


def _others(registered: list[tuple[Any, ...]], function: Any) -> list[tuple[Any, ...]]:
    return [given for given in registered if given[0] is not function]


@pytest.mark.parametrize(
    ("by_hand", "options", "told"), [(True, {}, 1), (False, {}, 0), (True, {"local_clip_norm": 1.0}, 0)]
)
def test_clipping_after_synchronize_is_told_of_at_the_freeze(
    by_hand: bool, options: dict[str, Any], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("horovod.torch")
    import torch
    from torch_training import distribute, on_ranks, parameters, set_gradients

    def work(transport: Any) -> None:
        params = parameters()
        optimizer = distribute(torch.optim.Adam(params, lr=1e-3), transport, freeze_step=2, **options)
        for step in range(4):
            set_gradients(params, step, transport.rank)
            if by_hand:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    on_ranks(2, work)
    assert caplog.text.count("on which clipping hardly acts") == told
