"""What a user sees while something takes minutes, and what of the log if it fails."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["Progress", "log_tail"]

_TAIL_LINES = 30
_FIRST_ERRORS = 5
_REASON_LINES = 2
_PERCENT = re.compile(r"\[\s*(\d{1,3})%\]")
_ERROR_LINE = re.compile(r"\berror:|CMake Error|^\s*\S*Error: ")


class Progress:
    """Lines with the time since the start; on a terminal, also a live line while something long runs.

    Args:
        stream: where to write.
        interval_seconds: how often a long phase reports where the stream is no terminal.
    """

    def __init__(self, stream: TextIO, *, interval_seconds: float = 30.0) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._interval = interval_seconds
        self._start = time.monotonic()
        self._last_report = self._start
        self._phase = ""
        self._percent = ""

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the start."""
        return _minutes(time.monotonic() - self._start)

    def say(self, text: str) -> None:
        """Writes one lasting line."""
        self._clear()
        self._stream.write(f"[{self.elapsed:>5}] {text}\n")
        self._stream.flush()
        self._last_report = time.monotonic()

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Announces a phase and, once it has gone well, how long it took."""
        start = time.monotonic()
        self._phase, self._percent = text, ""
        if self._live:
            self.tick()
        else:
            self.say(f"{text} ...")
        try:
            yield
        finally:
            self._phase = ""
            self._clear()
        self.say(f"{text}: done in {_minutes(time.monotonic() - start)}")

    def line(self, output: str) -> None:
        """Looks at a line that the running command wrote for how far it has come."""
        match = _PERCENT.search(output)
        if match is not None:
            self._percent = f"{match.group(1)} %"

    def tick(self) -> None:
        """Refreshes the live line, or reports from time to time where there is none."""
        if self._live:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[2K{f'[{self.elapsed:>5}] {self._where}'[: columns - 1]}")
            self._stream.flush()
        elif time.monotonic() - self._last_report >= self._interval:
            self.say(self._where)

    @property
    def _where(self) -> str:
        return f"{self._percent} {self._phase}".strip()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[2K")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def log_tail(log: Path, *, lines: int = _TAIL_LINES) -> list[str]:
    """Returns the last lines of a log, after the first few that look like the error itself and what follows them.

    A parallel build goes on for a while after its first error, so that the end alone often does not show it. CMake
    gives the place of an error in the first line, and the reason in the next ones.
    """
    tail: deque[tuple[int, str]] = deque(maxlen=lines)
    errors: list[tuple[int, str]] = []
    num_errors = last_shown = 0
    with log.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            entry = (number, line.rstrip("\n"))
            tail.append(entry)
            if num_errors < _FIRST_ERRORS and _ERROR_LINE.search(line):
                num_errors += 1
                last_shown = number + _REASON_LINES
            if number <= last_shown and line.strip():
                errors.append(entry)
    first_in_tail = tail[0][0] if tail else 0
    shown = [f"line {number}: {text}" for number, text in errors if number < first_in_tail]
    return [*shown, *(["..."] if shown else []), *(text for _, text in tail)]
