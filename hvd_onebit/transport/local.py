"""n workers as threads of one process: for tests, for experiments, and for trying n ranks on one machine.

They may pretend to run on several hosts.

A raising worker wakes all others with an error: nothing hangs.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvd_onebit.errors import OneBitError
from hvd_onebit.hosts import Place, place_of

__all__ = ["LocalTransport", "run_ranks"]

HostArray = npt.NDArray[Any]
Result = TypeVar("Result")


class _Meeting:
    """The deposits of one collective; dropped when every rank has taken its result."""

    def __init__(self, size: int) -> None:
        self.deposits: dict[int, Any] = {}
        self.left_to_read = size


class _Group:
    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.condition = threading.Condition()
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.failure: str | None = None
        self.subgroups: dict[tuple[str, int, tuple[int, ...]], _Group] = {}

    def abort(self, reason: str) -> None:
        with self.condition:
            if self.failure is None:
                self.failure = reason
            self.condition.notify_all()
            subgroups = list(self.subgroups.values())
        for subgroup in subgroups:
            subgroup.abort(reason)

    def subgroup(self, key: tuple[str, int, tuple[int, ...]]) -> _Group:
        with self.condition:
            if key not in self.subgroups:
                self.subgroups[key] = made = _Group(len(key[2]), self.timeout_seconds)
                made.failure = self.failure
            return self.subgroups[key]

    def deposit(self, key: tuple[str, int], rank: int, value: Any) -> None:
        with self.condition:
            meeting = self.meetings.setdefault(key, _Meeting(self.size))
            meeting.deposits[rank] = value
            self.condition.notify_all()

    def is_complete(self, key: tuple[str, int]) -> bool:
        with self.condition:
            return self.failure is not None or len(self.meetings[key].deposits) == self.size

    def collect(self, key: tuple[str, int]) -> list[Any]:
        with self.condition:
            meeting = self.meetings[key]
            complete = self.condition.wait_for(
                lambda: self.failure is not None or len(meeting.deposits) == self.size, self.timeout_seconds
            )
            if len(meeting.deposits) < self.size:
                missing = sorted(set(range(self.size)) - set(meeting.deposits))
                reason = self.failure if complete else f"not reached within {self.timeout_seconds} s"
                raise OneBitError(f"collective {key[0]!r}: ranks {missing} did not take part ({reason})")
            meeting.left_to_read -= 1
            if meeting.left_to_read == 0:
                del self.meetings[key]
            return [meeting.deposits[rank] for rank in range(self.size)]


class _LocalPending:
    def __init__(self, group: _Group, key: tuple[str, int], combine: Callable[[list[Any]], Any]) -> None:
        self._group = group
        self._key = key
        self._combine = combine

    def ready(self) -> bool:
        return self._group.is_complete(self._key)

    def wait(self) -> Any:
        return self._combine(self._group.collect(self._key))


class LocalTransport:
    """One worker's end of a group of threads; made by `run_ranks`."""

    def __init__(self, group: _Group, rank: int, *, ranks_per_host: int | None = None) -> None:
        self._group = group
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._ranks_per_host = ranks_per_host
        self.rank = rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def place(self) -> Place:
        return place_of(self.rank, [rank // (self._ranks_per_host or self.size) for rank in range(self.size)])

    def subgroup(self, ranks: Sequence[int], *, name: str, same_host: bool = False) -> LocalTransport:
        self._calls[name] += 1
        group = self._group.subgroup((name, self._calls[name], tuple(ranks)))
        return LocalTransport(group, list(ranks).index(self.rank))

    def shared_zeros(self, num_elements: int) -> None:
        return None

    def alltoall(
        self, message: HostArray, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str
    ) -> _LocalPending:
        cuts = np.cumsum(send_bytes)[:-1]
        parts = np.split(message.copy(), cuts)
        rank = self.rank

        def combine(all_parts: list[list[HostArray]]) -> HostArray:
            received = [parts[rank] for parts in all_parts]
            assert [len(part) for part in received] == list(receive_bytes)
            return np.concatenate(received)

        return self._start(name, parts, combine)

    def allgather(self, message: HostArray, receive_bytes: Sequence[int], *, name: str) -> _LocalPending:
        def combine(messages: list[HostArray]) -> HostArray:
            assert [len(message) for message in messages] == list(receive_bytes)
            return np.concatenate(messages)

        return self._start(name, message.copy(), combine)

    def allreduce(self, values: HostArray, *, name: str) -> _LocalPending:
        size = self.size

        def combine(all_values: list[HostArray]) -> HostArray:
            total = all_values[0].copy()
            for other in all_values[1:]:
                total += other
            return np.asarray(total / total.dtype.type(size))  # dividing an array without dimensions gives a scalar

        return self._start(name, values.copy(), combine)

    def gather_parts(self, values: HostArray, lengths: Sequence[int], *, name: str) -> _LocalPending:
        stop = sum(lengths[: self.rank + 1])
        own = slice(stop - lengths[self.rank], stop)

        def combine(all_values: list[HostArray]) -> list[HostArray]:
            return [each[own] for each in all_values]

        return self._start(name, values, combine)  # read where they lie, as by processes that share memory

    def allgather_bytes(self, data: bytes, *, name: str) -> _LocalPending:
        return self._start(name, data, list)

    def _start(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> _LocalPending:
        self._calls[name] += 1
        key = (name, self._calls[name])
        self._group.deposit(key, self.rank, value)
        return _LocalPending(self._group, key, combine)


def run_ranks(
    size: int,
    work: Callable[[LocalTransport], Result],
    *,
    ranks_per_host: int | None = None,
    timeout_seconds: float = 60.0,
) -> list[Result]:
    """Runs `work(transport)` on `size` threads and returns their results in rank order.

    Args:
        size: number of ranks.
        work: what each of them does.
        ranks_per_host: as many consecutive ranks say that they are on one host; None: all of them.
        timeout_seconds: a collective that not all ranks reach in that time ends the run.

    Raises:
        The first rank's own exception, when one raised; ranks that were waiting for it end with OneBitError.
    """
    group = _Group(size, timeout_seconds)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(LocalTransport(group, rank, ranks_per_host=ranks_per_host))
        except BaseException as error:  # handed to the caller below
            errors.append((rank, error))
            group.abort(f"rank {rank} raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results
