"""Rank 1 comes late, and then never: mpirun -np 2 python mpi_waits.py asleep|gone."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_onebit.errors import OneBitError
from hvd_onebit.stall import StallLimits
from hvd_onebit.transport.mpi import MPITransport

PATIENT = StallLimits(0.3, None)
LIMITED = StallLimits(None, 0.5)


def meet(transport: MPITransport) -> None:
    found = transport.allgather(np.full(2, transport.rank, np.uint8), [2, 2], name="late").wait()
    assert found.tolist() == [0, 0, 1, 1]


def main() -> None:
    logging.basicConfig(format="%(message)s")
    transport = MPITransport(limits=PATIENT)
    if transport.rank == 1:
        time.sleep(1.0)
    meet(transport)
    transport.limits = LIMITED
    transport.allgather_bytes(b"", name="both").wait()
    if transport.rank == 1:
        print("stands still", flush=True)
        if sys.argv[1] == "gone":
            return  # into MPI_Finalize, which waits for all
        time.sleep(1000)
    nothing, some = np.zeros(2, np.uint8), np.zeros(2, np.float32)
    waits: dict[str, Callable[[], Any]] = {
        "mean": lambda: transport.allreduce(some, name="mean").wait(),
        "bits": lambda: transport.alltoall(nothing, [1, 1], [1, 1], name="bits").wait(),
        "digest": lambda: transport.allgather_bytes(b"digest", name="digest").wait(),
        "a group": lambda: transport.subgroup([0, 1], name="a group"),
        "the transport": lambda: MPITransport(limits=LIMITED),
    }
    for wait in waits.values():
        try:
            wait()
        except OneBitError as error:
            print(error, flush=True)
    raise SystemExit("the end of rank 0")


if __name__ == "__main__":
    main()
