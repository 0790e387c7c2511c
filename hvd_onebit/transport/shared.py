"""Memory that the processes of one host show each other: values pass between them with one copy, and no socket.

Every process has an anonymous file of its own (memfd_create), which the others open by the process's number. Nothing
has a name in the file system, so nothing is left behind, however a process ends.

A file is mapped in regions, of which each is as long as all before it: a mapping costs a file descriptor, and one for
every array would use them up. Arrays lie inside regions; what of these is not used takes no memory.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_onebit import notices

if TYPE_CHECKING:
    from hvd_onebit.transport import Transport

__all__ = ["SharedMemory", "share_memory"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_CACHED = 1 << 15  # elements that stay in the cache while they are summed
_FLOAT_BYTES = 4
_FIRST_REGION = 1 << 20  # bytes
_ALIGNMENT = 4096
_TOKEN_BYTES = 16  # at the start of the file: proves that it is the one that was meant


def share_memory(memory: SharedMemory, transport: Transport[Any], ranks: Sequence[int]) -> bool:
    """Collective: opens the memory of `ranks`, which are on one host, to each other.

    Args:
        memory: this rank's.
        transport: among all ranks.
        ranks: this rank's group; every rank is in one.

    Returns:
        False on every rank when it cannot be done on one of them.
    """
    keys = transport.allgather_bytes(memory.key, name="memory.keys").wait()
    works = memory.open_peers([keys[rank] for rank in ranks])
    all_work = transport.allgather_bytes(bytes([works]), name="memory.works").wait()
    if set(all_work) == {b"\x01"}:
        return True
    if transport.rank == 0:
        notices.no_shared_memory()
    return False


def _take_back(owner: weakref.ref[SharedMemory], address: int, num_elements: int) -> None:
    if (shared := owner()) is not None:
        with shared._lock:
            shared._free.setdefault(num_elements, []).append(shared._places.pop((address, num_elements)))


def _region(at: int) -> tuple[int, int]:
    """Where the region that holds byte `at` starts and ends."""
    size = _FIRST_REGION << max((at // _FIRST_REGION).bit_length() - 1, 0)
    return (0, size) if at < size else (size, 2 * size)


class SharedMemory:
    """This process's file and, after `open_peers`, those of others."""

    def __init__(self) -> None:
        self._file = None
        # TensorFlow calls from several threads; a finalizer may run in the midst of what is locked
        self._lock = threading.RLock()
        self._places: dict[tuple[int, int], int] = {}
        self._free: dict[int, list[int]] = {}
        self._copies: dict[tuple[str, int], Floats] = {}
        self._twins: dict[tuple[str, int], list[Floats]] = {}
        self._regions: dict[tuple[int | None, int], mmap.mmap] = {}
        self._peers: list[int] = []
        self._token = secrets.token_hex(_TOKEN_BYTES // 2).encode()
        self._num_bytes = _ALIGNMENT
        if hasattr(os, "memfd_create"):
            self._file = open(os.memfd_create("hvd_onebit"), "r+b", buffering=0)  # noqa: SIM115 - as long as this lives
            self._file.write(self._token)

    @property
    def is_there(self) -> bool:
        """False where there are no such files."""
        return self._file is not None

    @property
    def key(self) -> bytes:
        """What other processes need to open this one's file; empty where there are no such files."""
        if self._file is None:
            return b""
        return json.dumps([os.getpid(), self._file.fileno(), self._token.decode()]).encode()

    def open_peers(self, keys: Sequence[bytes]) -> bool:
        """Opens the files of these processes, this one's own included; False when one cannot be opened from here."""
        try:
            for key in keys:
                pid, number, token = json.loads(key)
                peer = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
                self._peers.append(peer)
                if os.pread(peer, _TOKEN_BYTES, 0) != token.encode():
                    return False  # another process of that number, in another container
        except (OSError, ValueError):
            return False
        return True

    def zeros(self, num_elements: int) -> Floats:
        """Zeros (float32, shape (num_elements,)) that the peers can read where they lie; freed as any array is."""
        with self._lock:
            free = self._free.get(num_elements)
            at = free.pop() if free else self._allocate(4 * num_elements)
            array = self._view(None, at, num_elements)
            address = array.ctypes.data
            self._places[address, num_elements] = at
        array[:] = 0
        # not a method of self: what a finalizer holds lives as long as the array, which may be self's own
        weakref.finalize(array, _take_back, weakref.ref(self), address, num_elements).atexit = False
        return array

    def expose(self, name: str, values: Floats) -> int:
        """Where the peers can read `values` (float32, shape (n,)): where they lie, if `zeros` made them, or in a copy.

        A copy overwrites that of the same name and length that was made before.
        """
        at = self._places.get((values.ctypes.data, len(values)))
        if at is not None:
            return at
        key = (name, len(values))
        if key not in self._copies:
            self._copies[key] = self.zeros(len(values))
        copy = self._copies[key]
        copy[:] = values
        return self._places[copy.ctypes.data, len(copy)]

    def expose_bytes(self, name: str, data: Bytes) -> int:
        """Where the peers can read a copy of `data` (uint8, shape (n,), n > 0).

        It overwrites the last copy but one of that name and length: whoever says to all where the new one is, once all
        have said where their last one was, knows that they have read the one before.
        """
        twins = self._twins.setdefault((name, len(data)), [])
        copy = twins.pop(0) if len(twins) == 2 else self.zeros(-(-len(data) // _FLOAT_BYTES))
        twins.append(copy)
        copy.view(np.uint8)[: len(data)] = data
        return self._places[copy.ctypes.data, len(copy)]

    def gathered(self, places: Sequence[int], lengths: Sequence[int]) -> Bytes:
        """A copy of what all peers have at `places`, end to end.

        Args:
            places: what `expose_bytes` returned to each peer, in the order of `open_peers`; anything where it is empty.
            lengths: bytes of each peer.
        """
        parts = [
            self._view(peer, at, -(-length // _FLOAT_BYTES)).view(np.uint8)[:length]
            for peer, (at, length) in enumerate(zip(places, lengths, strict=True))
            if length
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def parts(self, rank: int, own: slice, num_elements: int, places: Sequence[int]) -> list[Floats]:
        """Elements `own` of what every peer has at `places`, where they lie; only this process's are writable.

        Args:
            rank: this process's number among the peers.
            own: the part.
            num_elements: the elements at each place.
            places: what `expose` returned to each peer, in the order of `open_peers`.
        """
        views = (self._view(None if peer == rank else peer, at, num_elements) for peer, at in enumerate(places))
        return [view[own] for view in views]

    def mean(self, rank: int, own: slice, num_elements: int, places: Sequence[int]) -> Floats:
        """The mean of what all peers have at `places`, elements `own` of each, which no other peer averages.

        The sum is made in the peers' order. It is written where this process has its part, so that it takes no memory,
        and costs reading the parts once. Arguments as in `parts`.
        """
        parts = self.parts(rank, own, num_elements, places)
        mean = parts[rank]
        if len(parts) == 1:
            return mean
        count = np.float32(len(parts))
        is_power_of_two = len(parts) & (len(parts) - 1) == 0  # then a multiplication gives the same bits, sooner
        # later parts must not be overwritten before they are added
        sums = None if rank < 2 else np.empty(min(_CACHED, len(mean)), np.float32)
        for start in range(0, len(mean), _CACHED):
            here = slice(start, start + _CACHED)
            total = mean[here] if sums is None else sums[: len(mean[here])]
            np.add(parts[0][here], parts[1][here], out=total)
            for part in parts[2:]:
                total += part[here]
            if is_power_of_two:
                np.multiply(total, 1 / count, out=mean[here])
            else:
                np.divide(total, count, out=mean[here])
        return mean

    def _view(self, peer: int | None, at: int, num_elements: int) -> Floats:
        """What the peer has there, to be read; None: what this process has, to be written, too."""
        start, stop = _region(at)
        if (peer, start) not in self._regions:
            if peer is None:
                assert self._file is not None
                if os.fstat(self._file.fileno()).st_size < stop:
                    os.ftruncate(self._file.fileno(), stop)
                memory = mmap.mmap(self._file.fileno(), stop - start, offset=start)
            else:
                memory = mmap.mmap(self._peers[peer], stop - start, prot=mmap.PROT_READ, offset=start)
            self._regions[peer, start] = memory
        return np.frombuffer(self._regions[peer, start], np.float32, num_elements, at - start)

    def _allocate(self, num_bytes: int) -> int:
        """A new place, inside one region."""
        at = self._num_bytes
        while at + num_bytes > (stop := _region(at)[1]):
            at = stop
        self._num_bytes = at + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return at

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()
        for peer in self._peers:
            os.close(peer)
