"""The hierarchical exchange among ranks that say where they are, against the oracle over the means of the hosts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from exchanging import ALGORITHMS, BUCKET, EPS, Array, Worker, assert_same_on_all_ranks, inputs

from hvd_onebit import reference
from hvd_onebit.codec import HostCodec
from hvd_onebit.errors import OneBitError
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.hosts import AUTO_LEAST_RANKS, HostGroups, Place, hierarchical_place, place_of
from hvd_onebit.layout import Bucket, cut_evenly
from hvd_onebit.options import CompressionOptions
from hvd_onebit.state import owed_by_parameter, share_errors, share_owed, take_shared_errors
from hvd_onebit.stats import COMPRESSION
from hvd_onebit.transport.local import LocalTransport, run_ranks

HOSTS = [(2, 2), (3, 2), (2, 3)]  # hosts, ranks on each


@pytest.fixture(autouse=True)
def _hierarchical_with_two_ranks_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_onebit.hosts.AUTO_LEAST_RANKS", 2)


def owed_by(exchanges: Sequence[CompressedAllreduce[Array]]) -> Array:
    """What all ranks together still owe, float64, of the whole bucket; `exchanges` in rank order."""
    owed = np.zeros(exchanges[0].bucket.num_elements)
    for each in exchanges:
        start, stop = each.shard
        assert each.worker_error is not None
        owed[start:stop] += each.worker_error.astype(np.float64) / each.size
        if each.server_error is not None:
            owed[each.own_chunk.start : each.own_chunk.stop] += each.server_error
    return owed


# -- the exchange ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [8, 2048])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "ranks"), HOSTS)
def test_it_is_the_flat_exchange_of_the_hosts_means(hosts: int, ranks: int, algorithm: str, block: int) -> None:
    options = CompressionOptions(exchange=algorithm, block=block)
    steps = 3

    def work(transport: LocalTransport) -> list[Array]:
        worker = Worker(transport, options)
        momentum = inputs(99, 0)
        results = []
        for step in range(steps):
            momentum = worker.run(inputs(step, transport.rank), momentum, 0.9)
            results.append(momentum)
        return results

    by_rank = run_ranks(hosts * ranks, work, ranks_per_host=ranks)
    shards = cut_evenly(0, BUCKET.num_elements, ranks)
    cuts = [[0, *(high - start for _, high in cut_evenly(start, stop, hosts))] for start, stop in shards]
    workers = [[np.zeros(stop - start) for _ in range(hosts)] for start, stop in shards]
    servers = [[np.zeros(high - low) for low, high in itertools.pairwise(cut)] for cut in cuts]
    momentum = inputs(99, 0).astype(np.float64)
    for step in range(steps):
        means = [np.mean([inputs(step, h * ranks + i) for i in range(ranks)], axis=0) for h in range(hosts)]
        given = [0.9 * momentum + 0.1 * mean for mean in means]
        expected = np.empty_like(momentum)
        for (start, stop), cut, worker, server in zip(shards, cuts, workers, servers, strict=True):
            part = [each[start:stop].astype(np.float64) for each in given]
            expected[start:stop] = (
                reference.compressed_allreduce_one_shot(part, worker, block)
                if algorithm == "one_shot"
                else reference.compressed_allreduce_two_phase(part, worker, server, cut, block)
            )
        assert_same_on_all_ranks([each[step] for each in by_rank])
        np.testing.assert_allclose(by_rank[0][step], expected, rtol=3e-6, atol=3e-6)
        momentum = by_rank[0][step].astype(np.float64)


@pytest.mark.parametrize("block", [100, "tensor"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "ranks"), HOSTS)
def test_the_error_telescopes(hosts: int, ranks: int, algorithm: str, block: int | str) -> None:
    """Sum of results + what is owed = sum of mean inputs, to float32 rounding of each of 100 steps."""
    options = CompressionOptions(exchange=algorithm, block=block)

    def work(transport: LocalTransport) -> tuple[Array, Array, CompressedAllreduce[Array]]:
        worker = Worker(transport, options)
        given, received = np.zeros(BUCKET.num_elements), np.zeros(BUCKET.num_elements)
        for step in range(100):
            gradient = inputs(step, transport.rank)
            given += gradient
            received += worker.run(gradient)
        return given, received, worker.exchange

    results = run_ranks(hosts * ranks, work, ranks_per_host=ranks)
    given = np.mean([each[0] for each in results], axis=0)
    owed = owed_by([each[2] for each in results])
    # every step rounds values of at most this magnitude about 8 times
    magnitude = max(float(np.abs(inputs(step, rank)).max()) for step in range(100) for rank in range(hosts * ranks))
    bound = 100 * 8 * EPS * (magnitude + np.abs(owed).max())
    assert np.abs(results[0][1] + owed - given).max() <= bound
    assert bound < 1e-2 * np.abs(owed).max(), "a bound that large would prove nothing"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "ranks"), HOSTS)
def test_a_step_that_is_not_finite_on_one_rank_is_rolled_back_on_all(hosts: int, ranks: int, algorithm: str) -> None:
    options = CompressionOptions(exchange=algorithm)
    size = hosts * ranks

    def work(transport: LocalTransport) -> tuple[bool, CompressedAllreduce[Array], Array, Array, Array]:
        worker = Worker(transport, options)
        worker.exchange.live = np.ones(BUCKET.num_elements, np.float32)
        worker.exchange.live[290:310] = 0
        for step in range(3):
            worker.run(inputs(step, transport.rank))
        exchange = worker.exchange
        before = [None if e is None else e.copy() for e in (exchange.worker_error, exchange.server_error)]
        gradient = inputs(3, transport.rank)
        if transport.rank == size - 1:
            gradient[[280, 2700]] = [np.nan, np.inf]
        worker.start(gradient, inputs(4, 99), 0.9)
        finite = worker.step.finish()
        worker.step.rollback()
        for old, new in zip(before, (exchange.worker_error, exchange.server_error), strict=True):
            if old is not None and new is not None:
                np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-4)
        return finite, exchange, worker.run(inputs(5, transport.rank)), gradient, gradient

    results = run_ranks(size, work, ranks_per_host=ranks)
    assert not any(each[0] for each in results)
    assert_same_on_all_ranks([each[2] for each in results])
    assert np.isfinite(results[0][2]).all()
    assert not results[0][2][290:310].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "ranks"), HOSTS)
def test_any_part_of_the_mean_can_be_had(hosts: int, ranks: int, algorithm: str) -> None:
    def work(transport: LocalTransport) -> None:
        worker = Worker(transport, CompressionOptions(exchange=algorithm, block=100))
        worker.start(inputs(0, transport.rank))
        worker.step.finish()
        whole = worker.mean()
        for low, high in [(0, 300), (300, 301), (365, 2865), (2865, 2874), (7, 2000), (100, 100)]:
            part = np.full(high - low, np.nan, np.float32)
            worker.exchange.average(part, low)
            np.testing.assert_array_equal(part, whole[low:high], err_msg=f"{low}:{high}")

    run_ranks(hosts * ranks, work, ranks_per_host=ranks)


def test_ones_of_any_length_come_back_as_exactly_one() -> None:
    def work(transport: LocalTransport) -> None:
        for length in (0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 1023):
            worker = Worker(transport, CompressionOptions(), Bucket(f"b{length}", ("p",), (length,)))
            assert worker.run(np.ones(length, np.float32)).tolist() == [1.0] * length

    run_ranks(4, work, ranks_per_host=2)


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_not_overwritten_while_a_slow_rank_still_reads_them(keeps: bool) -> None:
    """A rank may do what it likes with its gradients once its step is undone, or once it has kept what was sent."""

    def work(transport: LocalTransport) -> None:
        worker = Worker(transport, CompressionOptions())
        for step in range(3):
            worker.run(inputs(step, transport.rank))
        exchange = worker.exchange
        before = worker.errors()
        gradient = inputs(3, transport.rank)
        worker.start(gradient)
        assert worker.step.finish()
        if transport.rank == 0:
            slow(exchange, "copy_of" if keeps else "rollback")
        if keeps:
            worker.step.keep_inputs()
            gradient[:] = 1e6
        worker.step.rollback()
        gradient[:] = 1e6
        for old, new in zip(before, worker.errors(), strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-4)

    def slow(exchange: CompressedAllreduce[Array], name: str) -> None:
        run = getattr(exchange, name)

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.3)
            return run(*args, **kwargs)

        setattr(exchange, name, late)

    run_ranks(4, work, ranks_per_host=2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_inside_and_between_hosts_are_counted_apart(algorithm: str) -> None:
    bucket = Bucket("b", ("p",), (8192,))

    def work(transport: LocalTransport) -> tuple[float, float]:
        worker = Worker(transport, CompressionOptions(exchange=algorithm), bucket)
        worker.run(inputs(0, transport.rank, 8192))
        return worker.stats.bytes_per_step[COMPRESSION], worker.stats.inside_bytes_per_step[COMPRESSION]

    message = 4096 // 8 + 2 * 4  # of a shard; the same in both ways, as 2048 elements share a scale
    gathered = message if algorithm == "two_phase" else 2 * message
    for sent, inside in run_ranks(4, work, ranks_per_host=2):
        assert inside == 4 * 4096 + gathered
        assert sent - inside == message


def test_without_error_feedback_nothing_is_kept() -> None:
    def work(transport: LocalTransport) -> list[Array]:
        worker = Worker(transport, CompressionOptions(error_feedback=False))
        assert worker.exchange.worker_error is None
        assert share_errors(worker.exchange, transport, HostCodec(), worker.groups) is None
        return [worker.run(inputs(0, transport.rank)) for _ in range(2)]

    for first, second in run_ranks(4, work, ranks_per_host=2):
        np.testing.assert_array_equal(first, second)


def test_a_rank_keeps_the_errors_of_its_shard_only() -> None:
    def work(transport: LocalTransport) -> int:
        exchange = Worker(transport, CompressionOptions(exchange="one_shot")).exchange
        assert exchange.worker_error is not None
        return len(exchange.worker_error)

    assert run_ranks(4, work, ranks_per_host=2) == [1472, 1402, 1472, 1402]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("target", [(2, None), (4, 2), (6, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("source", [(3, None), (4, 2), (6, 2)], ids=str)
def test_shared_errors_go_to_any_layout(
    source: tuple[int, int | None], target: tuple[int, int | None], algorithm: str
) -> None:
    options = CompressionOptions(exchange=algorithm)

    def save(transport: LocalTransport) -> tuple[CompressedAllreduce[Array], Array, Array]:
        worker = Worker(transport, options)
        for step in range(5):
            worker.run(inputs(step, transport.rank))
        owed = owed_together(transport, worker.exchange)
        shared = share_errors(worker.exchange, transport, HostCodec(), worker.groups)
        assert shared is not None
        return worker.exchange, owed, shared.copy()

    saved = run_ranks(source[0], save, ranks_per_host=source[1])
    owed = saved[0][1]
    assert np.abs(owed).max() > 1
    for _, _, shared in saved:
        np.testing.assert_allclose(shared, owed, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(owed_by([each[0] for each in saved]), owed, rtol=1e-5, atol=1e-5)

    def load(transport: LocalTransport) -> CompressedAllreduce[Array]:
        exchange = Worker(transport, options).exchange
        assert take_shared_errors(exchange, {"b": (BUCKET.parameters, BUCKET.sizes, saved[0][2])}) == []
        return exchange

    loaded = run_ranks(target[0], load, ranks_per_host=target[1])
    np.testing.assert_allclose(owed_by(loaded), saved[0][2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "ranks"), HOSTS)
def test_what_each_rank_owes_goes_to_another_world(hosts: int, ranks: int, algorithm: str) -> None:
    """As Horovod Elastic needs it: by parameter, from ranks that each have a shard, into two hosts with two ranks."""
    options = CompressionOptions(exchange=algorithm)
    size = hosts * ranks

    def save(transport: LocalTransport) -> tuple[CompressedAllreduce[Array], dict[str, Array]]:
        exchange = (worker := Worker(transport, options)).exchange
        for step in range(5):
            worker.run(inputs(step, transport.rank))
        errors = {
            "parameters": BUCKET.parameters,
            "sizes": BUCKET.sizes,
            "worker_error": exchange.worker_error,
            "worker_start": exchange.shard[0],
            "hosts": hosts,
            "server_error": exchange.server_error,
            "server_start": exchange.own_chunk.start,
        }
        return exchange, owed_by_parameter({"b": errors}, size)

    saved = run_ranks(size, save, ranks_per_host=ranks)
    owed = owed_by([each[0] for each in saved])

    def load(transport: LocalTransport) -> tuple[CompressedAllreduce[Array], Array]:
        worker = Worker(transport, options)
        mine = saved[transport.rank][1] if transport.rank < size else {}
        shared = share_owed(worker.exchange, mine, 4 / size, transport, HostCodec())
        assert shared is not None
        return worker.exchange, shared

    if size <= 4:  # else some of what is owed stays with ranks that are gone
        loaded = run_ranks(4, load, ranks_per_host=2)
        np.testing.assert_allclose(owed_by([each[0] for each in loaded]), owed, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(loaded[0][1], owed, rtol=1e-5, atol=1e-5)
    total = np.mean([np.concatenate([each[name] for name in BUCKET.parameters]) for _, each in saved], axis=0)
    np.testing.assert_allclose(total, owed, rtol=1e-5, atol=1e-5)


def owed_together(transport: LocalTransport, exchange: CompressedAllreduce[Array]) -> Array:
    """`owed_by` all ranks, which are in this process; they wait for each other before and after."""
    EXCHANGES[transport.rank] = exchange
    transport.allgather_bytes(b"", name="before").wait()
    owed = owed_by([EXCHANGES[rank] for rank in range(transport.size)])
    transport.allgather_bytes(b"", name="after").wait()
    return owed


EXCHANGES: dict[int, CompressedAllreduce[Array]] = {}


# -- where ranks are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ([0, 0, 1, 1], [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        ([7, 3, 7, 3], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        ([0, 0, 0], [(0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3)]),
        ([5], [(0, 1, 0, 1)]),
    ],
)
def test_places(hosts: list[int], places: list[tuple[int, int, int, int]]) -> None:
    assert [place_of(rank, hosts) for rank in range(len(hosts))] == [Place(*place) for place in places]


@pytest.mark.parametrize("hierarchical", ["auto", True, False])
@pytest.mark.parametrize(
    ("hosts", "obstacle"),
    [
        ([0, 0, 1, 1], ""),
        ([0, 1, 0, 1], ""),
        ([0, 0, 0, 0, 1, 1, 1, 1], ""),
        ([0], ""),
        ([0, 0, 0], "all 3 ranks are on one host"),
        ([0, 1, 2], "each of the 3 hosts has one rank only"),
        ([0, 0, 1], "the hosts have different numbers of ranks: 2, 1"),
    ],
)
def test_when_the_exchange_is_hierarchical(
    hosts: list[int], obstacle: str, hierarchical: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_onebit.hosts.AUTO_LEAST_RANKS", AUTO_LEAST_RANKS)
    options = CompressionOptions(hierarchical=hierarchical)
    messages = set()
    for rank in range(len(hosts)):
        place = place_of(rank, hosts)
        if hierarchical is True and obstacle:
            with pytest.raises(ValueError, match=obstacle) as refused:
                hierarchical_place(options, place)
            messages.add(str(refused.value))
        else:
            wanted = hierarchical is not False and len(hosts) > 1 and not obstacle
            if hierarchical == "auto":
                wanted = wanted and place.local_size >= AUTO_LEAST_RANKS
            assert hierarchical_place(options, place) == (place if wanted else None)
    assert len(messages) <= 1, "the same error on every rank"


def test_ranks_that_are_numbered_by_local_rank_first_work_too() -> None:
    def work(transport: LocalTransport) -> tuple[list[bytes], list[bytes]]:
        groups = HostGroups[Array](transport, place_of(transport.rank, [0, 1, 0, 1]))
        groups.connect()
        mine = np.full(1, transport.rank, np.uint8)
        return tuple(  # type: ignore[return-value]
            group.allgather(mine, [1, 1], name="x").wait().tolist() for group in (groups.inside, groups.across)
        )

    assert run_ranks(4, work) == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]


def test_ranks_that_are_numbered_in_no_order_are_refused_on_all_ranks() -> None:
    places = [Place(0, 2, 0, 2), Place(0, 2, 1, 2), Place(1, 2, 1, 2), Place(1, 2, 0, 2)]

    def work(transport: LocalTransport) -> str:
        with pytest.raises(OneBitError, match="use hierarchical=False") as refused:
            HostGroups[Array](transport, places[transport.rank]).connect()
        return str(refused.value)

    messages = run_ranks(4, work)
    assert len(set(messages)) == 1
    assert json.dumps(messages[0])
