"""The compressed allreduce of one bucket, and the error feedback that belongs to it.

Written as the steps between the collectives, so that any framework can put its own collectives in between: a loop over
buckets (`step.py`), gradient hooks, or the ops of a graph.

    one_shot    compress -> allgather -> average of all messages
    two_phase   compress -> alltoall -> reduce -> allgather -> concatenation of all replies

Hierarchical, on several hosts with several ranks each: the ranks of a host average in full precision first, each of
them one shard of the bucket (gather of parts inside the host: a rank gets all ranks' values of its shard). Then those
of the same local rank exchange their shard by one of the two algorithms above (between hosts), and at last the ranks of
a host give each other the bytes that they got (allgather inside). Error feedback covers a rank's shard only, and what
is averaged between hosts are the hosts' means.

Tang et al., "1-bit Adam", 2021, arXiv 2102.02888, section 5 and algorithm 1 (two_phase, with error feedback on both
sides). Whatever the algorithm, the result is computed from the same bytes on every rank, hence the same floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Generic

from hvd_onebit.codec import Array, Codec, ordered_mean
from hvd_onebit.hosts import Place
from hvd_onebit.layout import Bucket, Chunk, Segment, cut_chunks, cut_evenly
from hvd_onebit.memory import keep_freed_blocks
from hvd_onebit.options import CompressionOptions
from hvd_onebit.wire import message_num_bytes, message_ranges

__all__ = ["CompressedAllreduce", "Piece"]


@dataclass(frozen=True)
class Piece:
    """Where elements [low, high) of a slice of the bucket stand: element `start` onwards of one segment's messages.

    Attributes:
        byte_ranges: bytes of the gathered buffer, one range a message to average.
        num_elements: elements of the segment, which the messages cover.
        block: elements a scale in these messages.
    """

    low: int
    high: int
    start: int
    num_elements: int
    block: int
    byte_ranges: tuple[tuple[int, int], ...]


class CompressedAllreduce(Generic[Array]):
    """One bucket's mean over ranks, one bit an element, with error feedback.

    A step calls, in this order: (the gather of parts inside the host, if `is_hierarchical`), `compress`, (the alltoall
    and `reduce`, if `is_two_phase`), the allgather, (the allgather inside the host, if `is_hierarchical`), `accept`,
    then `average` or the pieces, and `commit`; `rollback` undoes the step's change of the error feedback.

    What a step gave is a scale and a sign bit an element. Kept as such by `commit(keep=True)`, it is the momentum that
    the next step starts from, in an eighth of a byte an element for every message that was averaged.

    Attributes:
        rank: this rank's number among those that it exchanges messages with: its host's, if hierarchical.
        size: the number of those.
        worker_error: float32, shape (elements of this rank's shard,), the whole bucket unless hierarchical: what is
            still owed; None without error feedback.
        server_error: float32, shape (elements of this rank's chunk,): None for one_shot or without error feedback.
        live: float32, shape (num_elements,) or None: coordinates that are 0 in it are held: they take no part.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        rank: int,
        size: int,
        codec: Codec[Array],
        options: CompressionOptions,
        place: Place | None = None,
    ) -> None:
        keep_freed_blocks()
        self.bucket = bucket
        self.place = place
        self.rank, self.size = (rank, size) if place is None else (place.host, place.num_hosts)
        self.is_two_phase = options.algorithm(self.size) == "two_phase"
        self.worker_error: Array | None = None
        self.server_error: Array | None = None
        self.live: Array | None = None
        self._codec = codec
        self._scale = options.scale
        self._shards = cut_evenly(0, bucket.num_elements, 1 if place is None else place.local_size)
        self._chunks_of_shards = [
            cut_chunks(bucket, self.size if self.is_two_phase else 1, options.block, start=start, stop=stop)
            for start, stop in self._shards
        ]
        local_rank = 0 if place is None else place.local_rank
        self._shard = self._shards[local_rank]
        self._chunks = self._chunks_of_shards[local_rank]
        self._own_chunk = self._chunks[self.rank if self.is_two_phase else 0]
        if options.error_feedback:
            self.worker_error = codec.zeros(self._shard[1] - self._shard[0])
            if self.is_two_phase:
                self.server_error = codec.zeros(self._own_chunk.stop - self._own_chunk.start)
        self._sent: Array | None = None
        self._received: Array | None = None
        self._reply: Array | None = None
        self._gathered: Array | None = None
        self._kept: Array | None = None
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}

    @property
    def is_hierarchical(self) -> bool:
        """True when the ranks of a host average in full precision first."""
        return self.place is not None

    @property
    def shard(self) -> tuple[int, int]:
        """The elements [start, stop) of the bucket that this rank sends to other hosts; all, unless hierarchical."""
        return self._shard

    @property
    def shard_lengths(self) -> list[int]:
        """The elements of every local rank's shard."""
        return [stop - start for start, stop in self._shards]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The parts of the shard that are averaged by one rank each (two_phase), or the whole shard (one_shot)."""
        return self._chunks

    @property
    def own_chunk(self) -> Chunk:
        """The part of the shard that this rank averages (two_phase) or the whole shard (one_shot)."""
        return self._own_chunk

    @property
    def alltoall_bytes(self) -> tuple[list[int], list[int]]:
        """Bytes to and from each rank in the alltoall of two_phase."""
        return [chunk.num_bytes for chunk in self._chunks], [self._own_chunk.num_bytes] * self.size

    @property
    def allgather_bytes(self) -> list[int]:
        """Bytes that each rank contributes to the allgather."""
        if self.is_two_phase:
            return [chunk.num_bytes for chunk in self._chunks]
        return [self._own_chunk.num_bytes] * self.size

    @property
    def inside_bytes(self) -> list[int]:
        """Bytes that each local rank contributes to the allgather inside the host: what it has got from all hosts."""
        return [self._copies * sum(chunk.num_bytes for chunk in chunks) for chunks in self._chunks_of_shards]

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sends to others in one exchange; if hierarchical, to other hosts."""
        if not self.is_two_phase:
            return self._own_chunk.num_bytes * (self.size - 1)
        to_servers = sum(chunk.num_bytes for chunk in self._chunks) - self._own_chunk.num_bytes
        return to_servers + self._own_chunk.num_bytes * (self.size - 1)

    @property
    def bytes_sent_inside(self) -> int:
        """Bytes this rank sends to others on its host, in full precision and as bits; 0 unless hierarchical."""
        if self.place is None:
            return 0
        start, stop = self._shard
        shared = self.inside_bytes[self.place.local_rank] * (self.place.local_size - 1)
        return 4 * (self.bucket.num_elements - (stop - start)) + shared

    @property
    def _copies(self) -> int:
        """Messages that are averaged for every element of the result."""
        return 1 if self.is_two_phase else self.size

    def compress(
        self, gradient: Array | Sequence[Array], momentum: Array | None, beta1: float, *, from_kept: bool = False
    ) -> Array:
        """The message to send of z = beta1*momentum + (1-beta1)*gradient + worker_error; the error becomes z - C(z).

        Blocks that hold a non-finite value keep their error and get a non-finite scale.

        Args:
            gradient: float32, shape (elements of the shard,): this rank's own; or those of all ranks of its host, in
                their order, of which the mean is taken. Not written.
            momentum: float32, shape (num_elements,), or None; not written.
            beta1: momentum's weight.
            from_kept: the momentum is what the last step gave, decoded on the way.
        """
        message = self._codec.empty_bytes(sum(chunk.num_bytes for chunk in self._chunks))
        for base, chunk in _with_bases(self._chunks):
            for segment in chunk.segments:
                part = message[base + segment.byte_start : base + segment.byte_stop]
                if from_kept:
                    self._compress_from_kept(segment, gradient, beta1, part)
                else:
                    momenta = _part(momentum, segment.start, segment.stop)
                    self._compress(segment, segment.start, segment.stop, gradient, momenta, beta1, part)
        self._sent = message
        return message

    def _compress(
        self,
        segment: Segment,
        low: int,
        high: int,
        gradient: Array | Sequence[Array],
        momentum: Array | None,
        beta1: float,
        message: Array,
        kept: Sequence[Array] | None = None,
    ) -> None:
        first, _ = self._shard
        here = slice(low - first, high - first)
        self._codec.compress(
            [each[here] for each in gradient] if isinstance(gradient, list | tuple) else gradient[here],
            momentum,
            beta1,
            _part(self.worker_error, here.start, here.stop),
            message,
            block=segment.block,
            scale=self._scale,
            live=_part(self.live, low, high),
            kept=kept,
        )

    def _compress_from_kept(
        self, segment: Segment, gradient: Array | Sequence[Array], beta1: float, message: Array
    ) -> None:
        """A range at a time, so that little of the momentum is ever there as floats."""
        ranges = self._ranges(segment)
        for low, high in ranges:
            kept = self._kept_messages(segment, low, high)
            if len(ranges) == 1:
                self._compress(segment, low, high, gradient, None, beta1, message, kept)
                continue
            scales, bits = _message_ranges(segment, low, high)
            part = self._codec.empty_bytes(message_num_bytes(high - low, segment.block))
            self._compress(segment, low, high, gradient, None, beta1, part, kept)
            num_scale_bytes = scales.stop - scales.start
            message[scales], message[bits] = part[:num_scale_bytes], part[num_scale_bytes:]

    @property
    def has_kept(self) -> bool:
        """Whether the last step's result was kept."""
        return self._kept is not None

    def kept(self, values: Array) -> None:
        """Writes what the last step gave (float32, shape (num_elements,)), if it was kept."""
        for chunk in chain.from_iterable(self._chunks_of_shards):
            for segment in chunk.segments:
                low, high = segment.start, segment.stop
                messages = self._kept_messages(segment, low, high)
                live = _part(self.live, low, high)
                self._codec.average(messages, values[low:high], block=segment.block, live=live)

    def _kept_messages(self, segment: Segment, low: int, high: int) -> list[Array]:
        assert self._kept is not None
        (piece,) = self.pieces(segment.start, segment.stop)
        messages = [self._kept[start:stop] for start, stop in piece.byte_ranges]
        if high - low < segment.num_elements:
            scales, bits = _message_ranges(segment, low, high)
            messages = [self._codec.concatenate([message[scales], message[bits]]) for message in messages]
        return messages

    def _ranges(self, segment: Segment) -> list[tuple[int, int]]:
        step = math.lcm(segment.block, 8)
        step *= max(1, self._codec.range_elements // step)
        edges = [*range(segment.start, segment.stop, step), segment.stop]
        return list(pairwise(edges))

    def reduce(self, received: Array) -> Array:
        """The reply of this rank as server: C(mean of all ranks' chunks + server_error)."""
        chunk = self._own_chunk
        reply = self._codec.empty_bytes(chunk.num_bytes)
        for segment in chunk.segments:
            low, high = segment.start - chunk.start, segment.stop - chunk.start
            self._codec.reduce(
                self._from_each_rank(received, segment.byte_start, segment.byte_stop),
                _part(self.server_error, low, high),
                reply[segment.byte_start : segment.byte_stop],
                num_elements=segment.num_elements,
                block=segment.block,
                scale=self._scale,
                live=_part(self.live, segment.start, segment.stop),
            )
        self._received, self._reply = received, reply
        return reply

    def accept(self, gathered: Array) -> bool:
        """Takes the bytes gathered last; False when some rank's gradient was not finite, the same answer on all."""
        self._gathered = gathered
        return all(
            self._codec.scales_finite(self.messages(piece), num_elements=piece.num_elements, block=piece.block)
            for piece in self.pieces(0, self.bucket.num_elements)
        )

    def average(self, values: Array, start: int = 0) -> None:
        """Writes elements [start, start + len(values)) of the mean that all ranks agreed on."""
        stop = start + len(values)
        for piece in self.pieces(start, stop):
            if piece.num_elements == piece.high - piece.low:
                self._codec.average(
                    self.messages(piece),
                    values[piece.low : piece.high],
                    block=piece.block,
                    live=_part(self.live, start + piece.low, start + piece.high),
                )
            else:
                whole = self._codec.zeros(piece.num_elements)
                first = start + piece.low - piece.start
                live = _part(self.live, first, first + piece.num_elements)
                self._codec.average(self.messages(piece), whole, block=piece.block, live=live)
                length = piece.high - piece.low
                values[piece.low : piece.high] = whole[piece.start : piece.start + length]

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Where elements [start, stop) of the bucket are found in the gathered bytes."""
        key = (start, stop)
        if key not in self._pieces:
            self._pieces[key] = tuple(self._find_pieces(start, stop))
        return self._pieces[key]

    def rollback(
        self, gradient: Array | Sequence[Array], momentum: Array | None, beta1: float, *, from_kept: bool = False
    ) -> None:
        """Puts the error feedback back to what it was before `compress`, to rounding; the same inputs as it got."""
        if self.worker_error is not None and self._sent is not None:
            if from_kept:
                momentum = self._codec.zeros(self.bucket.num_elements)
                self.kept(momentum)
            first, stop = self._shard
            own = _part(momentum, first, stop)
            mean = _mean(gradient)
            given = mean if own is None else own * beta1 + mean * (1.0 - beta1)
            sent = self._codec.zeros(stop - first)
            for base, chunk in _with_bases(self._chunks):
                decoded = sent[chunk.start - first : chunk.stop - first]
                self._decode(chunk, [self._sent[base : base + chunk.num_bytes]], decoded)
            self._codec.restore(self.worker_error, sent, given, _part(self.live, first, stop))
        if self.server_error is not None and self._reply is not None and self._received is not None:
            chunk = self._own_chunk
            mean = self._codec.zeros(chunk.stop - chunk.start)
            self._decode(chunk, self._from_each_rank(self._received, 0, chunk.num_bytes), mean)
            replied = self._codec.zeros(chunk.stop - chunk.start)
            self._decode(chunk, [self._reply], replied)
            self._codec.restore(self.server_error, replied, mean, _part(self.live, chunk.start, chunk.stop))
        self._forget_step()

    def commit(self, *, keep: bool = False) -> None:
        """Forgets the step's messages, but for its result, if that is kept for the next step."""
        self._kept = self._gathered if keep else None
        self._forget_step()

    def _forget_step(self) -> None:
        self._sent = self._received = self._reply = self._gathered = None

    def copy_of(self, gradient: Array | Sequence[Array]) -> Array:
        """A gradient, or the mean of several, in memory of its own."""
        mean: Array = _mean(gradient)
        return mean if isinstance(gradient, list | tuple) else self._codec.concatenate([mean])

    def checksum_bytes(self) -> bytes:
        """The gathered bytes, equal on all ranks."""
        assert self._gathered is not None
        return self._codec.to_bytes(self._gathered)

    def _from_each_rank(self, received: Array, byte_start: int, byte_stop: int) -> list[Array]:
        stride = self._own_chunk.num_bytes
        return [received[i * stride + byte_start : i * stride + byte_stop] for i in range(self.size)]

    def messages(self, piece: Piece) -> list[Array]:
        """The gathered messages of one piece, in rank order."""
        assert self._gathered is not None
        return [self._gathered[low:high] for low, high in piece.byte_ranges]

    def _decode(self, chunk: Chunk, messages: Sequence[Array], values: Array) -> None:
        for segment in chunk.segments:
            self._codec.average(
                [message[segment.byte_start : segment.byte_stop] for message in messages],
                values[segment.start - chunk.start : segment.stop - chunk.start],
                block=segment.block,
                live=_part(self.live, segment.start, segment.stop),
            )

    def _find_pieces(self, start: int, stop: int) -> Iterator[Piece]:
        shard_bases = (0, *accumulate(self.inside_bytes))
        for shard_base, chunks in zip(shard_bases, self._chunks_of_shards, strict=False):
            for base, chunk in _with_bases(chunks, shard_base):
                for segment in chunk.segments:
                    low, high = max(start, segment.start), min(stop, segment.stop)
                    if low < high:
                        copies = range(base, base + self._copies * chunk.num_bytes, chunk.num_bytes)
                        ranges = tuple((at + segment.byte_start, at + segment.byte_stop) for at in copies)
                        yield Piece(
                            low - start, high - start, low - segment.start, segment.num_elements, segment.block, ranges
                        )


def _with_bases(chunks: Sequence[Chunk], first: int = 0) -> list[tuple[int, Chunk]]:
    """Each chunk with the byte at which its message starts when all are laid end to end from byte `first` on."""
    bases = accumulate((chunk.num_bytes for chunk in chunks), initial=first)
    return list(zip(bases, chunks, strict=False))


def _message_ranges(segment: Segment, low: int, high: int) -> tuple[slice, slice]:
    first = segment.start
    return message_ranges(segment.num_elements, segment.block, low - first, high - first)


def _mean(gradient: Array | Sequence[Array]) -> Array:
    mean: Any = ordered_mean(gradient) if isinstance(gradient, list | tuple) else gradient
    found: Array = mean
    return found


def _part(array: Array | None, low: int, high: int) -> Array | None:
    return None if array is None else array[low:high]
