"""How long a rank waits for the others: the limits that Horovod's users set, and what is said when they are reached.

A rank can stand still while its Horovod thread lives: a data loader that hangs, a deadlock, an evaluation on one rank
alone. Horovod has a check for that, in which rank 0 names the missing ranks, but over Gloo it never finds anything:
0.28.1's gloo_controller.cc reserves room for the list of ranks without giving it a size, so that the check goes through
no rank at all. `install-horovod` mends that; our own waits keep Horovod's settings themselves, whoever has built it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hvd_onebit import notices
from hvd_onebit.errors import OneBitError, stalled

__all__ = ["StallLimits", "StallWatch", "Wait"]

_WARN_SECONDS = 60.0  # Horovod's default


@dataclass(frozen=True)
class StallLimits:
    """When a wait is told of, and when it ends.

    There is no end by default, as in Horovod: ranks may rightly wait for hours for one that evaluates or prepares data.
    Where both are set the end need not lie after the warning; Horovod would ignore it then.

    Attributes:
        warn_seconds: a wait this long is told of; None: never.
        end_seconds: a wait this long ends with an error; None: never.
    """

    warn_seconds: float | None = _WARN_SECONDS
    end_seconds: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> StallLimits:
        """What Horovod's HOROVOD_STALL_* variables say, which `horovodrun --stall-check-...` sets.

        Raises:
            ValueError: a variable holds something else than seconds.
        """
        if environment.get("HOROVOD_STALL_CHECK_DISABLE", "").strip().lower() not in ("", "0", "false"):
            return cls(None, None)
        warn = _number(environment, "HOROVOD_STALL_CHECK_TIME_SECONDS", _WARN_SECONDS)
        end = _number(environment, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        return cls(warn if warn > 0.0 else None, end if end > 0.0 else None)

    @property
    def shortest(self) -> float | None:
        """The smaller of the two."""
        return min((each for each in (self.warn_seconds, self.end_seconds) if each is not None), default=None)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "").strip()
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{name} takes a number, not {text!r}") from None


class Wait:
    """One rank's wait for the others.

    Args:
        limits: when to warn, and when to end.
        rank: this rank.
        what: what is waited for.
    """

    def __init__(self, limits: StallLimits, rank: int, what: str) -> None:
        self._limits = limits
        self._rank = rank
        self._what = what
        self._start = time.monotonic()
        self._warn_at = limits.warn_seconds

    def check(self) -> None:
        """Warns when it is time, again after twice as long, and so on.

        Raises:
            OneBitError: the wait has reached its end.
        """
        waited = time.monotonic() - self._start
        end = self._limits.end_seconds
        if end is not None and waited >= end:
            raise stalled(self._rank, self._what, end)
        if self._warn_at is not None and waited >= self._warn_at:
            notices.waiting(self._rank, self._what, waited, end)
            self._warn_at = 2.0 * waited

    def told(self, error: BaseException) -> None:
        """Adds to an error which has ended the wait what was waited for."""
        seconds = time.monotonic() - self._start
        error.add_note(
            f"hvd_onebit: rank {self._rank} had waited {seconds:.0f} s for other ranks {self._what}. One of them has "
            "failed or is gone: look for the first traceback in the launcher's output. Go on from a checkpoint"
        )


class StallWatch:
    """Watches waits that Python cannot leave, such as those of a graph's operations, from a thread.

    When a wait's time is up it logs the error, and makes the operations fail by `give_up`.

    Args:
        rank: this rank.
        give_up: ends what is waited for; called in the thread, once.
        limits: when to warn, and when to end.
    """

    def __init__(self, rank: int, give_up: Callable[[], None], limits: StallLimits) -> None:
        self._rank = rank
        self._give_up = give_up
        self._limits = limits
        self._wait: Wait | None = None
        self._thread: threading.Thread | None = None

    def begin(self, what: str) -> None:
        """From now on this rank waits; what it waited for before is here."""
        if self._limits.shortest is None:
            return
        self._wait = Wait(self._limits, self._rank, what)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), min(1.0, self._limits.shortest / 4)), daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Nothing is waited for any more."""
        self._wait = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around one wait, which may lie within another."""
        before = self._wait
        self.begin(what)
        try:
            yield
        finally:
            self._wait = before

    def _look(self) -> bool:
        """False when there is nothing left to watch."""
        wait = self._wait
        if wait is None:
            return True
        try:
            wait.check()
        except OneBitError as error:
            logging.getLogger("hvd_onebit").error("%s", error)
            # the main thread may get to Horovod's own end meanwhile, which is not to come between
            atexit.register(threading.current_thread().join)
            self._give_up()
            return False
        return True


def _watch(reference: weakref.ref[StallWatch], seconds: float) -> None:
    while (watch := reference()) is not None and watch._look():
        del watch  # or it would live as long as this thread
        time.sleep(seconds)
