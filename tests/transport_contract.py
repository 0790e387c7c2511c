"""What every transport promises, as functions of one; each is run on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CONTRACT"]

HostArray = npt.NDArray[Any]
Convert = Callable[[HostArray], Any]
"""From NumPy to the transport's own arrays."""

CONTRACT: dict[str, Callable[[Any, Convert], None]] = {}


def _promise(function: Callable[[Any, Convert], None]) -> Callable[[Any, Convert], None]:
    CONTRACT[function.__name__] = function
    return function


def _part(source: int, target: int, length: int) -> HostArray:
    """What rank `source` sends to rank `target`."""
    return np.random.default_rng([source, target, length]).integers(0, 256, length).astype(np.uint8)


def _assert_equal(found: Any, expected: HostArray) -> None:
    found = np.asarray(found)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    np.testing.assert_array_equal(found, expected)


@_promise
def knows_rank_and_size(transport: Any, convert: Convert) -> None:
    assert 0 <= transport.rank < transport.size
    ranks = transport.allgather_bytes(bytes([transport.rank]), name="ranks").wait()
    assert ranks == [bytes([rank]) for rank in range(transport.size)]


@_promise
def alltoall_delivers_each_part(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    for scale in (1, 100):
        # parts of all lengths, some empty; what j sends to i has the length that i expects from j
        lengths = [[scale * ((3 * i + 5 * j) % 7) for j in range(size)] for i in range(size)]
        message = np.concatenate([_part(rank, j, lengths[rank][j]) for j in range(size)])
        receive = [lengths[j][rank] for j in range(size)]
        found = transport.alltoall(convert(message), lengths[rank], receive, name=f"alltoall{scale}").wait()
        _assert_equal(found, np.concatenate([_part(j, rank, receive[j]) for j in range(size)]))


@_promise
def allgather_lays_messages_end_to_end(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    for scale in (1, 1000):
        lengths = [scale * (i % 3) for i in range(size)]
        message = convert(_part(rank, 0, lengths[rank]))
        found = transport.allgather(message, lengths, name=f"allgather{scale}").wait()
        _assert_equal(found, np.concatenate([_part(i, 0, lengths[i]) for i in range(size)]))


@_promise
def nothing_at_all_is_delivered_too(transport: Any, convert: Convert) -> None:
    size = transport.size
    nothing = convert(np.empty(0, np.uint8))
    assert len(transport.allgather(nothing, [0] * size, name="empty.allgather").wait()) == 0
    assert len(transport.alltoall(nothing, [0] * size, [0] * size, name="empty.alltoall").wait()) == 0
    assert transport.allgather_bytes(b"", name="empty.bytes").wait() == [b""] * size


@_promise
def allreduce_is_the_mean(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    for shape in ((), (1,), (0,), (7,), (3, 5)):
        for dtype in (np.float32, np.float64):
            values = [np.random.default_rng(i).normal(size=shape).astype(dtype) for i in range(size)]
            name = f"mean.{len(shape)}.{np.prod(shape)}.{np.dtype(dtype).name}"
            found = np.asarray(transport.allreduce(convert(np.asarray(values[rank])), name=name).wait())
            assert found.shape == shape
            assert found.dtype == dtype
            np.testing.assert_allclose(found, np.mean(values, axis=0), rtol=1e-5, atol=1e-6)


@_promise
def what_is_given_is_not_written(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    values = convert(np.full(5, rank, np.float32))
    message = convert(np.full(size, rank, np.uint8))
    transport.allreduce(values, name="kept.mean").wait()
    transport.allgather(message, [size] * size, name="kept.allgather").wait()
    transport.alltoall(message, [1] * size, [1] * size, name="kept.alltoall").wait()
    _assert_equal(values, np.full(5, rank, np.float32))
    _assert_equal(message, np.full(size, rank, np.uint8))


@_promise
def bytes_of_any_length_arrive_in_rank_order(transport: Any, convert: Convert) -> None:
    size = transport.size
    mine = bytes(range(transport.rank * 3 % 7)) * (transport.rank + 1)
    found = transport.allgather_bytes(mine, name="bytes").wait()
    assert found == [bytes(range(i * 3 % 7)) * (i + 1) for i in range(size)]


@_promise
def many_may_be_under_way_at_once(transport: Any, convert: Convert) -> None:
    """Started in one order on all ranks, and waited for in another."""
    rank, size = transport.rank, transport.size
    pending: list[tuple[int, Any]] = []
    for i in range(6):
        message = convert(np.full(4 + i, rank + i, np.uint8))
        pending.append((i, transport.allgather(message, [4 + i] * size, name=f"many{i}")))
    for i, each in reversed(pending):
        _assert_equal(each.wait(), np.repeat(np.arange(size) + i, 4 + i).astype(np.uint8))


@_promise
def a_name_may_be_used_again(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    for i in range(5):
        message = convert(np.full(3, 10 * i + rank, np.uint8))
        found = transport.allgather(message, [3] * size, name="again").wait()
        _assert_equal(found, np.repeat(np.arange(size) + 10 * i, 3).astype(np.uint8))


@_promise
def a_view_into_the_middle_can_be_sent(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    whole = convert(np.arange(40, dtype=np.uint8) + rank)
    found = transport.allgather(whole[7:12], [5] * size, name="view").wait()
    _assert_equal(found, np.concatenate([np.arange(7, 12, dtype=np.uint8) + i for i in range(size)]))


@_promise
def each_rank_gets_its_part_of_all_values(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    for scale in (1, 1000):
        lengths = [scale * ((i + 1) % 3) for i in range(size)]
        values = [np.random.default_rng(i).normal(size=sum(lengths)).astype(np.float32) for i in range(size)]
        found = transport.gather_parts(convert(values[rank].copy()), lengths, name=f"parts{scale}").wait()
        start = sum(lengths[:rank])
        assert len(found) == size
        for part, whole in zip(found, values, strict=True):
            _assert_equal(part, whole[start : start + lengths[rank]])


@_promise
def every_other_rank_makes_a_group(transport: Any, convert: Convert) -> None:
    """Groups of even and odd ranks: each keeps the promises that it can, at the same time as the other."""
    members = list(range(transport.rank % 2, transport.size, 2))
    for name, same_host in (("apart", False), ("together", True)):
        group = transport.subgroup(members, name=name, same_host=same_host)
        assert (group.rank, group.size) == (members.index(transport.rank), len(members))
        for promise in (
            alltoall_delivers_each_part,
            allgather_lays_messages_end_to_end,
            many_may_be_under_way_at_once,
            a_name_may_be_used_again,
            a_view_into_the_middle_can_be_sent,
            each_rank_gets_its_part_of_all_values,
        ):
            promise(group, convert)
        for step in range(3):
            # what is overwritten is not what another rank still reads
            values = transport.shared_zeros(40)
            values = convert(np.zeros(40, np.float32)) if values is None else values
            values[:] = transport.rank + 10.0 * step
            lengths = [40 // group.size] * group.size
            lengths[0] += 40 - sum(lengths)
            parts = group.gather_parts(values, lengths, name=f"{name}.steps").wait()
            for part, member in zip(parts, members, strict=True):
                _assert_equal(part, np.full(lengths[group.rank], member + 10.0 * step, np.float32))
            group.allgather(convert(np.zeros(1, np.uint8)), [1] * group.size, name=f"{name}.read").wait()


@_promise
def ready_comes_true_without_a_wait(transport: Any, convert: Convert) -> None:
    rank, size = transport.rank, transport.size
    pending = [
        transport.allgather(convert(np.full(3, rank, np.uint8)), [3] * size, name="ready.allgather"),
        transport.alltoall(convert(np.full(size, rank, np.uint8)), [1] * size, [1] * size, name="ready.alltoall"),
        transport.allreduce(convert(np.full(3, rank, np.float32)), name="ready.mean"),
    ]
    deadline = time.monotonic() + 10
    while not all(each.ready() for each in pending):
        assert time.monotonic() < deadline, "never ready"
        time.sleep(0.001)
    assert all(each.ready() for each in pending), "and stays"
    _assert_equal(pending[0].wait(), np.repeat(np.arange(size), 3).astype(np.uint8))
    _assert_equal(pending[1].wait(), np.arange(size).astype(np.uint8))
