"""Parameters -> buckets -> chunks -> segments: where every element travels, the same on every rank.

A bucket is a run of whole tensors laid end to end. A chunk is the part of a bucket that one rank averages. A segment is
the part of a chunk that is one wire message: the whole chunk when scales go by block, one tensor's part when they go by
tensor. Nothing is padded: chunks start at multiples of 64 elements and the last ones may be shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hvd_onebit.options import CompressionOptions
from hvd_onebit.wire import message_num_bytes

__all__ = ["CHUNK_ALIGNMENT", "Bucket", "Chunk", "Segment", "cut_chunks", "cut_evenly", "make_buckets"]

CHUNK_ALIGNMENT = 64


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that are compressed and sent together.

    Attributes:
        name: fixed name, part of the names of its collectives.
        parameters: the tensors' names, in the order in which they lie in the bucket.
        sizes: number of elements of each.
    """

    name: str
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor in the bucket."""
        return (0, *accumulate(self.sizes))[:-1]

    @cached_property
    def num_elements(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a bucket: one wire message, at bytes [byte_start, byte_stop) of its chunk's."""

    start: int
    stop: int
    block: int
    byte_start: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def byte_stop(self) -> int:
        return self.byte_start + message_num_bytes(self.num_elements, self.block)


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a bucket, averaged by one rank."""

    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return self.segments[-1].byte_stop if self.segments else 0


def make_buckets(
    parameters: Sequence[tuple[str, int]], options: CompressionOptions, *, prefix: str = "bucket"
) -> tuple[Bucket, ...]:
    """Buckets over whole tensors in reverse order: the order in which backward finishes gradients.

    Args:
        parameters: (name, number of elements) in registration order.
        options: a bucket is closed before it would grow past their `bucket_size`; a larger tensor gets its own bucket.
        prefix: buckets are called prefix.0, prefix.1, ...
    """
    bucket_elements = options.bucket_size(sum(num_elements for _, num_elements in parameters))
    buckets: list[Bucket] = []
    names: list[str] = []
    sizes: list[int] = []

    def close() -> None:
        if names:
            buckets.append(Bucket(f"{prefix}.{len(buckets)}", tuple(names), tuple(sizes)))
            names.clear()
            sizes.clear()

    for name, num_elements in reversed(parameters):
        if sum(sizes) + num_elements > bucket_elements:
            close()
        names.append(name)
        sizes.append(num_elements)
    close()
    return tuple(buckets)


def cut_chunks(
    bucket: Bucket, num_chunks: int, block: int | str, *, start: int = 0, stop: int | None = None
) -> tuple[Chunk, ...]:
    """`num_chunks` chunks that cover elements [start, stop) of the bucket in order.

    Args:
        bucket: what is cut.
        num_chunks: number of chunks, some of which may be empty.
        block: elements that share a scale, or "tensor".
        start: first element; a multiple of 64.
        stop: the element after the last one; None: the bucket's end.
    """
    edges = cut_evenly(start, bucket.num_elements if stop is None else stop, num_chunks)
    return tuple(_chunk(bucket, low, high, block) for low, high in edges)


def cut_evenly(start: int, stop: int, num_parts: int) -> list[tuple[int, int]]:
    """[start, stop) in `num_parts` ranges, which start at multiples of 64 after `start`; the last may be shorter."""
    per_part = -(-(stop - start) // num_parts)
    if num_parts > 1:
        per_part = -(-per_part // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    return list(pairwise(min(start + i * per_part, stop) for i in range(num_parts + 1)))


def _chunk(bucket: Bucket, start: int, stop: int, block: int | str) -> Chunk:
    if isinstance(block, int):
        runs = [(start, stop)]
    else:
        edges = zip(bucket.offsets, bucket.sizes, strict=True)
        runs = [(max(start, offset), min(stop, offset + size)) for offset, size in edges]
    segments: list[Segment] = []
    byte_start = 0
    for low, high in runs:
        if low < high:
            segment = Segment(low, high, block if isinstance(block, int) else high - low, byte_start)
            byte_start = segment.byte_stop
            segments.append(segment)
    return Chunk(start, stop, tuple(segments))
