"""Where ranks run, and the groups of a hierarchical exchange: the ranks of one host, and their likes on the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from hvd_onebit.codec import Array
from hvd_onebit.errors import OneBitError
from hvd_onebit.options import AUTO, CompressionOptions

if TYPE_CHECKING:
    from hvd_onebit.transport import Group, Transport

__all__ = ["AUTO_LEAST_RANKS", "HostGroups", "Place", "hierarchical_place", "horovods_place", "place_of", "shard_key"]


AUTO_LEAST_RANKS = 4
"""Ranks on a host from which "auto" is hierarchical: the more there are, the fewer of the flat exchange's bytes a host
sends (57 % with two on each of two hosts, 20 % with eight); with two, averaging inside costs about what that saves."""


@dataclass(frozen=True)
class Place:
    """A rank's place among hosts that all have the same number of ranks.

    Attributes:
        host: the number of this rank's host.
        num_hosts: number of hosts.
        local_rank: this rank's number on its host.
        local_size: number of ranks on every host.
        obstacle: what keeps an exchange from being hierarchical here, the same text on every rank; empty for nothing.
    """

    host: int
    num_hosts: int
    local_rank: int
    local_size: int
    obstacle: str = ""


def shard_key(place: Place | None) -> list[int] | None:
    """Which part of every bucket a rank's errors are of, by its place; None, unless hierarchical: of the whole."""
    return None if place is None else [place.local_rank, place.local_size, place.host, place.num_hosts]


def place_of(rank: int, hosts: Sequence[int]) -> Place:
    """The place of `rank`, when `hosts[i]` names the host of rank i; hosts are numbered by their first rank."""
    order = list(dict.fromkeys(hosts))
    sizes = {host: hosts.count(host) for host in order}
    own = hosts[rank]
    if len(set(sizes.values())) > 1:
        listed = ", ".join(str(sizes[host]) for host in order)
        return Place(0, 1, rank, len(hosts), f"the hosts have different numbers of ranks: {listed}")
    return Place(order.index(own), len(order), hosts[:rank].count(own), sizes[own])


def horovods_place(hvd: Any, process_set: Any, *, is_homogeneous: bool) -> Place:
    """The place of this rank as Horovod says it.

    Args:
        hvd: one of Horovod's modules, initialised.
        process_set: of which this rank is a member.
        is_homogeneous: what Horovod says of its hosts.
    """
    rank, size = int(process_set.rank()), int(process_set.size())
    if process_set.process_set_id != 0:
        return Place(0, 1, rank, size, "the optimizer is on a process set, which need not lie evenly on hosts")
    if not is_homogeneous or hvd.cross_size() * hvd.local_size() != size:
        return Place(0, 1, rank, size, "the hosts have different numbers of ranks")
    return Place(hvd.cross_rank(), hvd.cross_size(), hvd.local_rank(), hvd.local_size())


def hierarchical_place(options: CompressionOptions, place: Place) -> Place | None:
    """`place` if gradients are averaged inside hosts first, None if all ranks exchange alike.

    The same decision on every rank: it rests on what is common to all.

    Raises:
        ValueError: `options.hierarchical` is True, and the ranks do not lie in a way that allows it.
    """
    size = place.num_hosts * place.local_size
    if options.hierarchical is False or size == 1:
        return None
    obstacle = place.obstacle
    if not obstacle and place.num_hosts == 1:
        obstacle = f"all {size} ranks are on one host"
    if not obstacle and place.local_size == 1:
        obstacle = f"each of the {size} hosts has one rank only"
    if not obstacle:
        return place if options.hierarchical != AUTO or place.local_size >= AUTO_LEAST_RANKS else None
    if options.hierarchical != AUTO:
        raise ValueError(
            f"hierarchical=True needs several hosts with the same number of ranks, two or more, on each, and all "
            f'ranks in one optimizer, but {obstacle}: use hierarchical="auto", or launch as many ranks on every host'
        )
    return None


class HostGroups(Generic[Array]):
    """The two groups of ranks that a hierarchical exchange uses, made when all ranks are there to make them.

    Args:
        transport: among all ranks.
        place: of this rank.
    """

    def __init__(self, transport: Transport[Array], place: Place) -> None:
        self.place = place
        self._transport = transport
        self._groups: tuple[Group[Array], Group[Array]] | None = None

    @property
    def is_connected(self) -> bool:
        """True when `connect` was called."""
        return self._groups is not None

    @property
    def inside(self) -> Group[Array]:
        """The ranks of this host, by local rank."""
        assert self._groups is not None
        return self._groups[0]

    @property
    def across(self) -> Group[Array]:
        """The ranks with this local rank, by host."""
        assert self._groups is not None
        return self._groups[1]

    def connect(self) -> None:
        """Collective, once: finds out which ranks lie where.

        Raises:
            OneBitError: ranks are not numbered as the hosts and the ranks on them are; the same on every rank.
        """
        if self._groups is not None:
            return
        own = json.dumps([self.place.host, self.place.local_rank]).encode()
        places = [tuple(json.loads(each)) for each in self._transport.allgather_bytes(own, name="hosts").wait()]
        self._groups = (
            self._transport.subgroup(_members(places, 0, self.place), name="inside", same_host=True),
            self._transport.subgroup(_members(places, 1, self.place), name="across"),
        )


def _members(places: Sequence[Any], axis: int, own: Place) -> list[int]:
    """The ranks that share this rank's host (axis 0) or its local rank (axis 1), ordered by the other one."""
    for value in range((own.num_hosts, own.local_size)[axis]):
        found = [place[1 - axis] for place in places if place[axis] == value]
        if found != list(range((own.local_size, own.num_hosts)[axis])):
            raise OneBitError(
                f"the hierarchical exchange needs ranks that are numbered in the order of hosts and of local ranks, "
                f"but (host, local rank) of ranks 0 to {len(places) - 1} are {places}: use hierarchical=False"
            )
    mine = (own.host, own.local_rank)[axis]
    return [rank for rank, place in enumerate(places) if place[axis] == mine]
