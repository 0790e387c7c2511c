"""Waits for other ranks: limits from Horovod's variables, warnings, and an end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from hvd_onebit.errors import OneBitError
from hvd_onebit.stall import StallLimits, StallWatch, Wait


@pytest.mark.parametrize(
    ("environment", "limits"),
    [
        ({}, (60.0, None)),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}, (60.0, 30.0)),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0", "HOROVOD_STALL_CHECK_TIME_SECONDS": " 5 "}, (5.0, None)),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"}, (None, None)),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}, (None, None)),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ""}, (60.0, None)),
    ],
)
def test_horovods_variables_are_the_limits(environment: dict[str, str], limits: tuple[float | None, ...]) -> None:
    found = StallLimits.from_environment(environment)
    assert (found.warn_seconds, found.end_seconds) == limits


def test_a_variable_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS takes a number, not 'never'"):
        StallLimits.from_environment({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "never"})


def test_a_wait_warns_ever_more_rarely_and_then_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("hvd_onebit.stall.time.monotonic", lambda: now[0])
    wait = Wait(StallLimits(10.0, 90.0), 3, "in step 7 at 'agreement.digest'")
    for second in range(1, 90):
        now[0] = 100.0 + second
        wait.check()
    assert [record.args[1] for record in caplog.records] == [10.0, 20.0, 40.0, 80.0]
    assert "rank 3 has waited 10 s for other ranks in step 7 at 'agreement.digest'" in caplog.records[0].getMessage()
    assert "after 90 s this ends with an error" in caplog.records[0].getMessage()
    now[0] = 190.0
    with pytest.raises(OneBitError, match=r"rank 3 has waited 90 s for other ranks in step 7 .*some rank stands still"):
        wait.check()


def test_a_watch_gives_up_once_and_only_while_something_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    given_up = threading.Event()
    watch = StallWatch(1, given_up.set, StallLimits(None, 0.1))
    watch.begin("in step 1")
    watch.end()
    assert not given_up.wait(0.4)
    watch.begin("in step 2")
    assert given_up.wait(20.0)
    assert "rank 1 has waited 0.1 s for other ranks in step 2" in caplog.text
    assert watch._thread is not None
    watch._thread.join(20.0)
    assert not watch._thread.is_alive()


def test_a_wait_within_another_has_its_own_name_and_time_and_then_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("hvd_onebit.stall.time.monotonic", lambda: now[0])
    monkeypatch.setattr("hvd_onebit.stall._watch", lambda *_: None)  # nobody looks but this test
    watch = StallWatch(1, lambda: None, StallLimits(None, 10.0))

    def look() -> None:
        assert watch._wait is not None
        watch._wait.check()

    watch.begin("in step 4")
    now[0] += 8.0
    with watch.waiting("at 'measured'"):
        now[0] += 8.0
        look()
        now[0] += 3.0
        with pytest.raises(OneBitError, match=r"rank 1 has waited 10 s for other ranks at 'measured'"):
            look()
    with pytest.raises(OneBitError, match="in step 4"):
        look()
    watch.end()
    with pytest.raises(ZeroDivisionError), watch.waiting("at 'shared'"):
        raise ZeroDivisionError
    assert watch._wait is None, "nothing is waited for after an error"


def test_a_watch_without_limits_has_no_thread_and_one_that_is_dropped_ends_its_own() -> None:
    watch = StallWatch(0, lambda: None, StallLimits(None, None))
    watch.begin("in step 1")
    assert watch._thread is None
    watch = StallWatch(0, lambda: None, StallLimits(0.2, None))
    watch.begin("in step 1")
    thread, reference = watch._thread, weakref.ref(watch)
    del watch
    gc.collect()
    assert thread is not None
    thread.join(20.0)
    assert not thread.is_alive()
    assert reference() is None
