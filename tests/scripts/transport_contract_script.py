"""Runs the contract on launched transports: python transport_contract_script.py FOLDER KIND..."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transport_contract import CONTRACT


def _mpi() -> tuple[Any, Callable[[Any], Any]]:
    from hvd_onebit.transport.mpi import MPITransport

    return MPITransport(), np.asarray


def _torch_mpi() -> tuple[Any, Callable[[Any], Any]]:
    import torch

    from hvd_onebit.torch.transport import HostTransport
    from hvd_onebit.transport.mpi import MPITransport

    return HostTransport(MPITransport()), torch.from_numpy


def _horovod() -> tuple[Any, Callable[[Any], Any]]:
    import horovod.torch as hvd
    import torch

    from hvd_onebit.torch.transport import HorovodTransport

    hvd.init()
    return HorovodTransport(hvd.global_process_set), torch.from_numpy


MAKERS = {"mpi": _mpi, "torch-mpi": _torch_mpi, "horovod": _horovod}


def main() -> int:
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, str] = {}
    rank, status = 0, 0
    for kind in kinds:
        transport, convert = MAKERS[kind]()
        rank = transport.rank
        for name, promise in CONTRACT.items():
            try:
                promise(transport, convert)
                results[f"{kind}: {name}"] = "ok"
            except Exception:
                results[f"{kind}: {name}"] = traceback.format_exc()
                status = 1
    (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
