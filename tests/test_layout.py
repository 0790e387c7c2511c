"""Buckets and chunks cover every element once, in the same way on every rank, and pad nothing."""

from __future__ import annotations

import itertools

import pytest

from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import CHUNK_ALIGNMENT, Bucket, cut_chunks, make_buckets
from hvd_onebit.options import CompressionOptions
from hvd_onebit.wire import message_num_bytes

SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 1023, 4099)
COUNTS = (1, 2, 3, 4, 64)


def bucket_of(*sizes: int) -> Bucket:
    return Bucket("b", tuple(f"p{i}" for i in range(len(sizes))), sizes)


@pytest.mark.parametrize("bucket_elements", [1, 10, 100, 1000])
def test_buckets_hold_whole_tensors_in_reverse_order(bucket_elements: int) -> None:
    parameters = [("a", 30), ("b", 7), ("c", 100), ("d", 1), ("e", 64)]
    buckets = make_buckets(parameters, CompressionOptions(bucket_elements=bucket_elements), prefix="x")
    members = [pair for bucket in buckets for pair in zip(bucket.parameters, bucket.sizes, strict=True)]
    assert members == parameters[::-1]
    assert [bucket.name for bucket in buckets] == [f"x.{i}" for i in range(len(buckets))]
    for bucket in buckets:
        assert bucket.num_elements <= bucket_elements or len(bucket.parameters) == 1
        assert bucket.offsets == tuple(itertools.accumulate((0, *bucket.sizes)))[:-1]
    for bucket, following in itertools.pairwise(buckets):
        assert bucket.num_elements + following.sizes[0] > bucket_elements, "closed too early"


def test_no_parameters_make_no_buckets() -> None:
    assert make_buckets([], CompressionOptions(bucket_elements=10)) == ()


@pytest.mark.parametrize("block", [1, 8, 100, 2048, "tensor"])
@pytest.mark.parametrize("num_chunks", COUNTS)
@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), (5, 64, 1, 1023, 64)], ids=str)
def test_chunks_cover_every_element_once(sizes: tuple[int, ...], num_chunks: int, block: int | str) -> None:
    bucket = bucket_of(*sizes)
    chunks = cut_chunks(bucket, num_chunks, block)
    assert len(chunks) == num_chunks
    assert [e for chunk in chunks for e in range(chunk.start, chunk.stop)] == list(range(bucket.num_elements))
    for chunk in chunks:
        assert chunk.start % CHUNK_ALIGNMENT == 0 or chunk.start == bucket.num_elements
        covered = [e for segment in chunk.segments for e in range(segment.start, segment.stop)]
        assert covered == list(range(chunk.start, chunk.stop))
        byte = 0
        for segment in chunk.segments:
            assert segment.byte_start == byte
            assert segment.num_elements > 0
            byte += message_num_bytes(segment.num_elements, segment.block)
        assert chunk.num_bytes == byte
        if isinstance(block, str):
            borders = [*bucket.offsets, bucket.num_elements]
            assert all(segment.block == segment.num_elements for segment in chunk.segments)
            assert {segment.start for segment in chunk.segments} <= {chunk.start, *borders}


@pytest.mark.parametrize("num_chunks", COUNTS)
@pytest.mark.parametrize("num_elements", [0, 1, 9, 65, 4099, 1_000_000, 1_000_003])
def test_no_element_is_padded(num_elements: int, num_chunks: int) -> None:
    chunks = cut_chunks(bucket_of(num_elements), num_chunks, 2048)
    assert sum(chunk.num_bytes for chunk in chunks) == sum(
        message_num_bytes(chunk.stop - chunk.start, 2048) for chunk in chunks
    )
    longest = max(chunk.stop - chunk.start for chunk in chunks)
    assert longest <= -(-num_elements // num_chunks) + CHUNK_ALIGNMENT


@pytest.mark.parametrize("size", [2, 3, 64])
def test_bytes_on_the_wire_stay_within_one_percent_of_one_bit_an_element(size: int) -> None:
    num_elements = 1_000_003
    options = CompressionOptions(exchange="two_phase")
    exchanges = [
        CompressedAllreduce(bucket_of(num_elements), rank=rank, size=size, codec=HostCodec(), options=options)
        for rank in range(size)
    ]
    scales = 4 * num_elements / 2048
    ideal = 2 * (size - 1) / size * (num_elements / 8 + scales)
    assert sum(exchange.bytes_sent for exchange in exchanges) / size == pytest.approx(ideal, rel=0.01)
    received = [
        (size - 1) * exchange.alltoall_bytes[1][exchange.rank]
        + sum(exchange.allgather_bytes)
        - exchange.allgather_bytes[exchange.rank]
        for exchange in exchanges
    ]
    assert sum(received) == sum(exchange.bytes_sent for exchange in exchanges), "what is sent is received"


def test_one_shot_sends_the_whole_message_to_every_other_rank() -> None:
    for size in (1, 2, 3):
        exchange = CompressedAllreduce(
            bucket_of(5, 4100), rank=0, size=size, codec=HostCodec(), options=CompressionOptions(exchange="one_shot")
        )
        assert exchange.bytes_sent == (size - 1) * message_num_bytes(4105, 2048)
