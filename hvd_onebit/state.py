"""Compression errors in checkpoints: what a run of another size needs, by parameter and not by bucket.

What matters to training is the mean of the ranks' worker errors plus the server errors, which are the shards of one
vector (the exchange's errors telescope). Given to every rank as its worker error, that vector is a checkpoint that any
rank can save and any number of ranks can restore.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_onebit.codec import Array, Codec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.hosts import HostGroups
from hvd_onebit.transport import Collectives

__all__ = ["owed_by_parameter", "share_errors", "share_owed", "take_shared_errors", "weight_of_owed"]


def share_errors(
    exchange: CompressedAllreduce[Array],
    transport: Collectives[Array],
    codec: Codec[Array],
    groups: HostGroups[Array] | None = None,
) -> Array | None:
    """Makes every rank's worker error the mean of all plus the whole server error; server errors become zero.

    Collective. The error that training still owes is the same before and after, to rounding.

    Args:
        exchange: its errors are written.
        transport: among all ranks.
        codec: of its arrays.
        groups: connected; for a hierarchical exchange.

    Returns:
        float32, shape (num_elements,): the shared error of the whole bucket, what a checkpoint needs; None without
        error feedback.
    """
    if exchange.worker_error is None:
        return None
    name = exchange.bucket.name
    group: Collectives[Array] = transport
    if exchange.is_hierarchical:
        assert groups is not None
        group = groups.across
    total = group.allreduce(exchange.worker_error, name=f"{name}.worker_error").wait()
    if exchange.server_error is not None:
        lengths = [4 * (chunk.stop - chunk.start) for chunk in exchange.chunks]
        shards = codec.as_bytes(exchange.server_error)
        gathered = group.allgather(shards, lengths, name=f"{name}.server_error").wait()
        total = total + codec.as_floats(gathered)
        exchange.server_error[:] = 0.0
    exchange.worker_error[:] = total
    if not exchange.is_hierarchical or groups is None:
        return exchange.worker_error
    lengths = [4 * length for length in exchange.shard_lengths]
    return codec.as_floats(
        groups.inside.allgather(codec.as_bytes(exchange.worker_error), lengths, name=f"{name}.inside_error").wait()
    )


def take_shared_errors(
    exchange: CompressedAllreduce[Array],
    saved: Mapping[str, tuple[Sequence[str], Sequence[int], Any]],
    whole: Array | None = None,
) -> list[str]:
    """Restores shared errors into an exchange of any size, parameter by parameter.

    Args:
        exchange: its errors are written; parameters that `saved` does not have are left.
        saved: by the checkpoint's buckets: parameter names, their sizes, and the worker error of the bucket.
        whole: float32, shape (num_elements,): is written with the errors of the whole bucket.

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
    first, last = exchange.shard
    for name, offset, size in zip(bucket.parameters, bucket.offsets, bucket.sizes, strict=True):
        part = parts.get(name)
        if part is None or len(part) != size:
            missing.append(name)
        else:
            if whole is not None:
                whole[offset : offset + size] = part
            low, high = max(offset, first), min(offset + size, last)
            if low < high:
                exchange.worker_error[low - first : high - first] = part[low - offset : high - offset]
    return missing


def owed_by_parameter(
    errors: Mapping[str, Mapping[str, Any]], size: int, zeros: Callable[[int], Any] = np.zeros
) -> dict[str, Any]:
    """What one rank owes, by parameter name: the sum over ranks, divided by `size`, is what training still owes.

    A server error is a shard of one vector and counts in full; a worker error counts as one of `size`, or of a
    hierarchical exchange, where it is a shard of one of `hosts` vectors, as one of those.

    Args:
        errors: by bucket: "parameters", "sizes", "worker_error", "server_error" and "server_start", the element of the
            bucket at which the server error starts; of a hierarchical exchange also "hosts", and "worker_start", at
            which the worker error starts.
        size: how many ranks there were when these errors arose.
        zeros: makes an array of the errors' kind.
    """
    owed: dict[str, Any] = {}
    for each in errors.values():
        if each["worker_error"] is None:
            continue
        if each.get("hosts") is None:
            total = each["worker_error"] * 1.0
        else:
            total = zeros(sum(each["sizes"]))
            first = each["worker_start"]
            total[first : first + len(each["worker_error"])] += each["worker_error"] * (size / each["hosts"])
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
    transport: Collectives[Array],
    codec: Codec[Array],
) -> Array | None:
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

    Returns:
        float32, shape (num_elements,): the shared error of the whole bucket; None without error feedback.
    """
    if exchange.worker_error is None:
        return None
    bucket = exchange.bucket
    mine = codec.zeros(bucket.num_elements)
    for name, offset, size in zip(bucket.parameters, bucket.offsets, bucket.sizes, strict=True):
        part = owed.get(name)
        if weight and part is not None and len(part) == size:
            mine[offset : offset + size] = part * weight
    mean = transport.allreduce(mine, name=f"{bucket.name}.owed").wait()
    start, stop = exchange.shard
    exchange.worker_error[:] = mean[start:stop]
    if exchange.server_error is not None:
        exchange.server_error[:] = 0.0
    return mean


def weight_of_owed(mine: Mapping[str, Any], root: Mapping[str, Any], *, rank: int, size: int) -> float:
    """By what this rank's part of what is owed is multiplied, in a mean over the `size` ranks of a new world.

    Args:
        mine: of this rank: "step", "size" of the world in which its errors arose, whether they are "shared", and
            whether it "owes" anything.
        root: the same of rank 0.
        rank: this rank now.
        size: ranks now.
    """
    if root["shared"]:
        return float(size) if rank == 0 else 0.0
    # errors of another step are not those that rank 0's parameters still lack
    counts = mine["owes"] and (mine["step"], mine["size"], mine["shared"]) == (root["step"], root["size"], False)
    return size / root["size"] if counts else 0.0
