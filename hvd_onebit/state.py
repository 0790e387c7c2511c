"""Compression errors in checkpoints: what a run of another size needs, by parameter and not by bucket.

What matters to training is the mean of the ranks' worker errors plus the server errors, which are the shards of one
vector (the exchange's errors telescope). Given to every rank as its worker error, that vector is a checkpoint that any
rank can save and any number of ranks can restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_onebit.codec import Array, Codec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.transport import Transport

__all__ = ["owed_by_parameter", "share_errors", "share_owed", "take_shared_errors"]


def share_errors(exchange: CompressedAllreduce[Array], transport: Transport[Array], codec: Codec[Array]) -> None:
    """Makes every rank's worker error the mean of all plus the whole server error; server errors become zero.

    Collective. The error that training still owes is the same before and after, to rounding.
    """
    if exchange.worker_error is None:
        return
    name = exchange.bucket.name
    total = transport.allreduce(exchange.worker_error, name=f"{name}.worker_error").wait()
    if exchange.server_error is not None:
        lengths = [4 * (chunk.stop - chunk.start) for chunk in exchange.chunks]
        shards = codec.as_bytes(exchange.server_error)
        gathered = transport.allgather(shards, lengths, name=f"{name}.server_error").wait()
        total = total + codec.as_floats(gathered)
        exchange.server_error[:] = 0.0
    exchange.worker_error[:] = total


def take_shared_errors(
    exchange: CompressedAllreduce[Array], saved: Mapping[str, tuple[Sequence[str], Sequence[int], Any]]
) -> list[str]:
    """Restores shared errors into an exchange of any size, parameter by parameter.

    Args:
        exchange: its errors are written; parameters that `saved` does not have are left.
        saved: by the checkpoint's buckets: parameter names, their sizes, and the worker error of the bucket.

    Returns:
        The names of parameters for which nothing of the right size was saved.
    """
    if exchange.worker_error is None:
        return []
    parts: dict[str, Any] = {}
    for names, sizes, error in saved.values():
        start = 0
        for name, size in zip(names, sizes, strict=True):
            parts[name] = error[start : start + size]
            start += size
    missing = []
    bucket = exchange.bucket
    for name, offset, size in zip(bucket.parameters, bucket.offsets, bucket.sizes, strict=True):
        part = parts.get(name)
        if part is None or len(part) != size:
            missing.append(name)
        else:
            exchange.worker_error[offset : offset + size] = part
    return missing


def owed_by_parameter(errors: Mapping[str, Mapping[str, Any]], size: int) -> dict[str, Any]:
    """What one rank owes, by parameter name: the sum over ranks, divided by `size`, is what training still owes.

    A server error is a shard of one vector and counts in full; a worker error counts as one of `size`.

    Args:
        errors: by bucket: "parameters", "sizes", "worker_error", "server_error" and "server_start", the element of the
            bucket at which the server error starts.
        size: how many ranks there were when these errors arose.
    """
    owed: dict[str, Any] = {}
    for each in errors.values():
        if each["worker_error"] is None:
            continue
        total = each["worker_error"] * 1.0
        if each["server_error"] is not None:
            first = each["server_start"]
            total[first : first + len(each["server_error"])] += each["server_error"] * float(size)
        start = 0
        for name, length in zip(each["parameters"], each["sizes"], strict=True):
            owed[name] = total[start : start + length]
            start += length
    return owed


def share_owed(
    exchange: CompressedAllreduce[Array],
    owed: Mapping[str, Any],
    weight: float,
    transport: Transport[Array],
    codec: Codec[Array],
) -> None:
    """Makes every rank's worker error the mean over ranks of `weight * owed`; server errors become zero.

    Collective. For a world that has just been made: each rank that was in the old one, of n ranks, gives what
    `owed_by_parameter` says with the weight (ranks now)/n, and newcomers give nothing. What is owed is then the same as
    before, or that part of it which the ranks that are still there have owed.

    Args:
        exchange: of the new world.
        owed: by parameter; what it does not have counts as zero.
        weight: of this rank.
        transport: among the ranks of the new world.
        codec: for the exchange's arrays.
    """
    if exchange.worker_error is None:
        return
    bucket = exchange.bucket
    mine = codec.zeros(bucket.num_elements)
    for name, offset, size in zip(bucket.parameters, bucket.offsets, bucket.sizes, strict=True):
        part = owed.get(name)
        if weight and part is not None and len(part) == size:
            mine[offset : offset + size] = part * weight
    exchange.worker_error[:] = transport.allreduce(mine, name=f"{bucket.name}.owed").wait()
    if exchange.server_error is not None:
        exchange.server_error[:] = 0.0
