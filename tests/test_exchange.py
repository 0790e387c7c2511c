"""The compressed allreduce among 1 to 4 ranks in one process, against the float64 oracle and its invariants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from exchanging import ALGORITHMS, BUCKET, EPS, Array, Worker, assert_same_on_all_ranks, inputs

from hvd_onebit import reference
from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket, Chunk
from hvd_onebit.options import CompressionOptions
from hvd_onebit.stats import COMPRESSION, Stats
from hvd_onebit.step import Inputs, StepExchange
from hvd_onebit.transport.local import LocalTransport, run_ranks
from hvd_onebit.wire import message_num_bytes

RANKS = (1, 2, 3, 4)
BLOCKS = (1, 8, 100, 2048, "tensor")
SCALES = ("rms", "mean")
SMALL = Bucket("small", ("p0", "p1", "p2", "p3"), (130, 1, 0, 150))  # for the blocks that take the oracle long


def scale_borders(chunks: Sequence[Chunk], block: int | str) -> list[int]:
    """The first element of every run that shares a scale, and the end."""
    starts = [
        start
        for chunk in chunks
        for segment in chunk.segments
        for start in range(segment.start, segment.stop, block if isinstance(block, int) else segment.num_elements)
    ]
    return [*starts, chunks[-1].stop]


def oracle_step(
    given: Sequence[Array],
    worker_errors: Sequence[Array],
    server_error: Array,
    borders: Sequence[int],
    live: Array,
    *,
    two_phase: bool,
    scale: str,
) -> tuple[Array, list[Array], Array]:
    """One exchange by the oracle, scale by scale over the live elements: result, worker errors, server error."""
    result = np.zeros_like(server_error)
    workers = [np.array(error, np.float64) for error in worker_errors]
    servers = np.array(server_error, np.float64)
    for low, high in itertools.pairwise(borders):
        at = low + np.flatnonzero(live[low:high])
        if not at.size:
            continue
        part = [np.asarray(each, np.float64)[at] for each in given]
        part_workers, part_servers = [each[at] for each in workers], [servers[at]]
        if two_phase:
            result[at] = reference.compressed_allreduce_two_phase(
                part, part_workers, part_servers, (0, at.size), at.size, scale
            )
        else:
            result[at] = reference.compressed_allreduce_one_shot(part, part_workers, at.size, scale)
        servers[at] = part_servers[0]
        for each, new in zip(workers, part_workers, strict=True):
            each[at] = new
    return result, workers, servers


@pytest.mark.parametrize("masked", [False, True], ids=["all-live", "some-held"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_every_step_follows_the_oracle(size: int, algorithm: str, block: int | str, scale: str, masked: bool) -> None:
    """Each step starts from the state that the fast path is in, so that float32 rounding cannot flip later signs."""
    options = CompressionOptions(exchange=algorithm, block=block, scale=scale)
    bucket = SMALL if block in (1, 8) else BUCKET
    live = np.ones(bucket.num_elements, np.float32)
    if masked:
        live[np.random.default_rng(5).random(live.size) < 0.3] = 0
        live[102:140] = 0  # whole blocks of 8 without a live element
    steps, beta1 = 3, 0.9

    def work(transport: LocalTransport) -> list[tuple[Array, Array, Array]]:
        worker = Worker(transport, options, bucket)
        if masked:
            worker.exchange.live = live
        momentum = np.zeros(bucket.num_elements, np.float32)
        kept = [(momentum, *worker.errors())]
        for step in range(steps):
            momentum = worker.run(inputs(step, transport.rank, bucket.num_elements), momentum, beta1)
            kept.append((momentum, *worker.errors()))
        return kept

    by_rank = run_ranks(size, work)
    two_phase = algorithm == "two_phase"
    exchange = CompressedAllreduce[Array](bucket, rank=0, size=size, codec=HostCodec(), options=options)
    borders = scale_borders(exchange._chunks, block)
    for step in range(steps):
        before, after = [kept[step] for kept in by_rank], [kept[step + 1] for kept in by_rank]
        given = [
            np.float32(beta1) * before[rank][0] + np.float32(1 - beta1) * inputs(step, rank, bucket.num_elements)
            for rank in range(size)
        ]
        server = np.concatenate([kept[2] for kept in before]) if two_phase else np.zeros(bucket.num_elements)
        result, workers, servers = oracle_step(
            given,
            [kept[1] for kept in before],
            server.astype(np.float64),
            borders,
            live,
            two_phase=two_phase,
            scale=scale,
        )
        tolerance = {"rtol": 3e-6, "atol": 3e-6}
        assert_same_on_all_ranks([kept[0] for kept in after])
        np.testing.assert_allclose(after[0][0], result, **tolerance)
        for rank in range(size):
            np.testing.assert_allclose(after[rank][1], workers[rank], **tolerance)
        if two_phase:
            np.testing.assert_allclose(np.concatenate([kept[2] for kept in after]), servers, **tolerance)
    assert not (after[0][0][live == 0]).any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [1, 8, 100, 2048])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_the_first_exchange_is_the_papers_box(size: int, algorithm: str, block: int, scale: str) -> None:
    options = CompressionOptions(exchange=algorithm, block=block, scale=scale)
    results = run_ranks(size, lambda transport: Worker(transport, options).run(inputs(0, transport.rank)))
    given = [inputs(0, rank).astype(np.float64) for rank in range(size)]
    errors = [np.zeros(BUCKET.num_elements) for _ in range(size)]
    if algorithm == "one_shot":
        expected = reference.compressed_allreduce_one_shot(given, errors, block, scale)
    else:
        chunks = CompressedAllreduce[Array](BUCKET, rank=0, size=size, codec=HostCodec(), options=options)._chunks
        cuts = [0, *(chunk.stop for chunk in chunks)]
        servers = [np.zeros(high - low) for low, high in itertools.pairwise(cuts)]
        expected = reference.compressed_allreduce_two_phase(given, errors, servers, cuts, block, scale)
    assert_same_on_all_ranks(results)
    np.testing.assert_allclose(results[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_ones_come_back_as_exactly_one(size: int, algorithm: str) -> None:
    """The scale counts real elements only: a padded one would give less than 1."""

    def work(transport: LocalTransport) -> list[tuple[int | str, int, Array]]:
        results = []
        for block in (8, 2048, "tensor"):
            options = CompressionOptions(exchange=algorithm, block=block)
            for length in range(1, 101):
                bucket = Bucket(f"{block}.{length}", ("p",), (length,))
                worker = Worker(transport, options, bucket)
                results.append((block, length, worker.run(np.ones(length, np.float32))))
        return results

    for results in run_ranks(size, work):
        for block, length, result in results:
            assert result.tolist() == [1.0] * length, (block, length)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("size", "block"), [(1, 2048), (2, 2048), (3, 2048), (2, "tensor"), (3, 8), (4, 100)])
def test_the_error_telescopes_over_300_steps(size: int, algorithm: str, block: int | str) -> None:
    """Sum of results + server error + mean worker error = sum of mean inputs, to float32 rounding of each step."""
    options = CompressionOptions(exchange=algorithm, block=block)
    steps = 300

    def work(transport: LocalTransport) -> tuple[Array, Array, Array, Array, Array]:
        worker = Worker(transport, options)
        given, received, bound = (np.zeros(BUCKET.num_elements) for _ in range(3))
        own = slice(worker.exchange.own_chunk.start, worker.exchange.own_chunk.stop)
        for step in range(steps):
            gradient = inputs(step, transport.rank)
            old_worker, old_server = worker.errors()
            result = worker.run(gradient)
            new_worker, new_server = worker.errors()
            given += gradient
            received += result
            # what is rounded: z and z - C(z) here, and at this rank's chunk the sum over ranks, y and y - C(y)
            bound += EPS * (2 * np.abs(gradient) + 2 * np.abs(old_worker) + np.abs(new_worker))
            # |C(z_i)| <= |z_i| + |e_i|: rounded once for each rank's addition, and in the division
            bound += EPS * (size + 1) * (np.abs(gradient) + np.abs(old_worker) + np.abs(new_worker))
            if algorithm == "two_phase":
                bound[own] += EPS * size * (2 * np.abs(result[own]) + 2 * np.abs(new_server) + np.abs(old_server))
        return (given, received, bound, *worker.errors())

    results = run_ranks(size, work)
    given = np.mean([each[0] for each in results], axis=0)
    owed = np.mean([each[3].astype(np.float64) for each in results], axis=0)
    if algorithm == "two_phase":
        owed = owed + np.concatenate([each[4] for each in results])
    bound = np.sum([each[2] for each in results], axis=0)
    assert_same_on_all_ranks([each[1].astype(np.float32) for each in results])
    assert np.all(np.abs(results[0][1] + owed - given) <= bound)
    assert bound.max() < 1e-2 * np.abs(owed).max(), "a bound that large would prove nothing"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_without_error_feedback_every_step_stands_alone(size: int, algorithm: str) -> None:
    options = CompressionOptions(exchange=algorithm, error_feedback=False)

    def work(transport: LocalTransport) -> list[Array]:
        worker = Worker(transport, options)
        assert worker.exchange.worker_error is None
        assert worker.exchange.server_error is None
        return [worker.run(inputs(0, transport.rank)) for _ in range(3)]

    for results in run_ranks(size, work):
        assert_same_on_all_ranks(results)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_rollback_puts_the_errors_back(size: int, algorithm: str, block: int | str) -> None:
    options = CompressionOptions(exchange=algorithm, block=block)

    def work(transport: LocalTransport) -> tuple[Any, ...]:
        worker = Worker(transport, options)
        for step in range(3):
            worker.run(inputs(step, transport.rank))
        before = worker.errors()
        gradient, momentum = inputs(3, transport.rank), inputs(4, 99)
        worker.start(gradient, momentum, 0.9)
        assert worker.step.finish()
        mean = worker.mean()
        during = worker.errors()
        worker.step.rollback()
        again = worker.errors()
        return before, during, again, np.abs(gradient) + np.abs(momentum), mean

    for before, during, again, magnitude, mean in run_ranks(size, work):
        bounds = (
            8 * EPS * (magnitude + np.abs(before[0]) + np.abs(during[0])),
            16 * EPS * (np.abs(mean).max() + np.abs(before[1]) + np.abs(during[1]) + magnitude.max()),
        )
        for name, old, changed, new, bound in zip(("worker", "server"), before, during, again, bounds, strict=True):
            if block != 1 and name == "worker":
                assert not np.array_equal(old, changed), "the step must have changed something"
            assert np.all(np.abs(old - new) <= bound), name


@pytest.mark.parametrize("masked", [False, True], ids=["all-live", "some-held"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_a_value_that_is_not_finite_on_one_rank_is_seen_by_all(
    size: int, algorithm: str, bad: float, masked: bool
) -> None:
    options = CompressionOptions(exchange=algorithm)

    def work(transport: LocalTransport) -> tuple[bool, Array, Array, Array, Array]:
        worker = Worker(transport, options)
        if masked:
            worker.exchange.live = np.ones(BUCKET.num_elements, np.float32)
            worker.exchange.live[:7] = 0
        worker.run(inputs(0, transport.rank))
        before = worker.errors()
        gradient = inputs(1, transport.rank)
        if transport.rank == size - 1:
            gradient[[300, 2700]] = bad
        worker.start(gradient)
        finite = worker.step.finish()
        worker.step.rollback()
        after = worker.errors()
        next_result = worker.run(inputs(2, transport.rank))
        return finite, np.concatenate(before), np.concatenate(after), next_result, np.concatenate(worker.errors())

    results = run_ranks(size, work)
    for finite, before, after, next_result, last in results:
        assert finite is False
        assert np.isfinite(after).all()
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-4)
        assert np.isfinite(next_result).all()
        assert np.isfinite(last).all()
    assert_same_on_all_ranks([each[3] for each in results])


def test_a_huge_finite_value_whose_square_overflows_float32_is_no_overflow() -> None:
    gradient = np.full(100, 1e30, np.float32)
    bucket = Bucket("b", ("p",), (100,))
    for result in run_ranks(2, lambda transport: Worker(transport, CompressionOptions(), bucket).run(gradient)):
        np.testing.assert_allclose(result, gradient)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", RANKS)
def test_any_part_of_the_mean_can_be_had(size: int, algorithm: str, block: int | str) -> None:
    options = CompressionOptions(exchange=algorithm, block=block)

    def work(transport: LocalTransport) -> None:
        worker = Worker(transport, options)
        worker.start(inputs(0, transport.rank))
        worker.step.finish()
        whole = worker.mean()
        for low, high in [(0, 300), (300, 301), (301, 365), (365, 2865), (2865, 2874), (7, 2000), (100, 100)]:
            part = np.full(high - low, np.nan, np.float32)
            worker.exchange.average(part, low)
            np.testing.assert_array_equal(part, whole[low:high], err_msg=f"{low}:{high}")

    run_ranks(size, work)


def test_an_all_zero_block_stays_exactly_zero() -> None:
    def work(transport: LocalTransport) -> Array:
        worker = Worker(transport, CompressionOptions(block=100, exchange="two_phase"))
        gradient = inputs(0, transport.rank)
        gradient[:100] = 0
        for _ in range(5):
            result = worker.run(gradient)
        return result

    for result in run_ranks(3, work):
        assert not result[:100].any()
        assert result[100:].all()


def test_many_buckets_go_out_in_one_step_and_their_bytes_are_counted() -> None:
    buckets = [Bucket(f"b{i}", ("p",), (length,)) for i, length in enumerate((1000, 0, 1, 5000))]
    options = CompressionOptions(exchange="two_phase")

    def work(transport: LocalTransport) -> tuple[list[Array], float, int]:
        stats = Stats()
        step = StepExchange[Array](transport, stats)
        exchanges = [
            CompressedAllreduce[Array](
                bucket, rank=transport.rank, size=transport.size, codec=HostCodec(), options=options
            )
            for bucket in buckets
        ]
        for exchange in exchanges:
            gradient = inputs(0, transport.rank, exchange.bucket.num_elements)
            step.start(exchange, Inputs.of(gradient))
        assert step.finish()
        results = [np.empty(exchange.bucket.num_elements, np.float32) for exchange in exchanges]
        for exchange, result in zip(exchanges, results, strict=True):
            exchange.average(result)
        step.commit()
        stats.end_step(COMPRESSION, skipped=False)
        return results, stats.bytes_per_step[COMPRESSION], sum(exchange.bytes_sent for exchange in exchanges)

    by_rank = run_ranks(3, work)
    for i in range(len(buckets)):
        assert_same_on_all_ranks([results[i] for results, _, _ in by_rank])
    for _, counted, expected in by_rank:
        assert counted == expected
    chunk_bytes = sum(message_num_bytes(length, 2048) for length in (384, 384, 232, 1, 1728, 1728, 1544))
    assert sum(counted for _, counted, _ in by_rank) == 2 * 2 * chunk_bytes, "nothing padded: the bytes are exact"


def test_the_checksum_bytes_are_equal_on_all_ranks() -> None:
    def work(transport: LocalTransport) -> bytes:
        worker = Worker(transport, CompressionOptions())
        worker.start(inputs(0, transport.rank))
        worker.step.finish()
        return worker.exchange.checksum_bytes()

    assert len(set(run_ranks(3, work))) == 1


class SmallRanges(HostCodec):
    """The codec with a cache of almost nothing, so that a segment takes many ranges."""

    range_elements = 16


@pytest.mark.parametrize("masked", [False, True], ids=["all-live", "some-held"])
@pytest.mark.parametrize("codec", [HostCodec(), SmallRanges()], ids=["one range", "small ranges"])
@pytest.mark.parametrize("block", [1, 12, 2048, "tensor"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_kept_result_is_the_momentum_of_the_next_step(
    size: int, algorithm: str, block: int | str, codec: HostCodec, masked: bool
) -> None:
    options = CompressionOptions(exchange=algorithm, block=block)

    def work(transport: LocalTransport) -> None:
        explicit, kept = Worker(transport, options), Worker(transport, options)
        kept.exchange = CompressedAllreduce(BUCKET, rank=transport.rank, size=size, codec=codec, options=options)
        for worker in (explicit, kept):
            if masked:
                worker.exchange.live = np.ones(BUCKET.num_elements, np.float32)
                worker.exchange.live[::7] = 0
        momentum = explicit.run(inputs(0, transport.rank))
        kept.step.start(kept.exchange, Inputs.of(inputs(0, transport.rank)))
        assert kept.step.finish()
        assert not kept.exchange.has_kept
        kept.step.commit(keep=True)
        assert kept.exchange.has_kept
        for step in range(1, 5):
            gradient = inputs(step, transport.rank)
            found = np.empty_like(momentum)
            kept.exchange.kept(found)
            np.testing.assert_array_equal(found.view(np.uint32), momentum.view(np.uint32))
            kept.step.start(kept.exchange, Inputs(lambda gradient=gradient: gradient, None, 0.9, from_kept=True))
            assert kept.step.finish()
            before = explicit.errors()
            momentum = explicit.run(gradient, momentum, 0.9)
            for name, mine, theirs in zip(("worker", "server"), kept.errors(), explicit.errors(), strict=True):
                np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32), err_msg=name)
            if step == 2:  # taken back, and done again
                kept.step.rollback()
                assert kept.exchange.has_kept
                for name, mine, theirs in zip(("worker", "server"), kept.errors(), before, strict=True):
                    np.testing.assert_allclose(mine, theirs, atol=1e-4, err_msg=name)
                for mine, theirs in (
                    (kept.exchange.worker_error, before[0]),
                    (kept.exchange.server_error, before[1]),
                ):
                    if mine is not None:
                        mine[:] = theirs
                kept.step.start(kept.exchange, Inputs(lambda gradient=gradient: gradient, None, 0.9, from_kept=True))
                assert kept.step.finish()
            kept.step.commit(keep=True)
        kept.step.start(kept.exchange, Inputs.of(inputs(5, transport.rank)))
        assert kept.step.finish()
        kept.step.commit()
        assert not kept.exchange.has_kept

    run_ranks(size, work)
