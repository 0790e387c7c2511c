"""torch ranks to which things happen: python fault_ranks.py FOLDER, then what `forked_ranks.py` says."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from forked_ranks import die, scenario, serve
from horovod.common.exceptions import HorovodInternalError
from torch_training import assert_bit_equal, gradient, parameters, snapshot

import hvd_onebit.torch as onebit
from hvd_onebit.checkpoint import save_atomically
from hvd_onebit.errors import OneBitError

FOLDER = Path(sys.argv[1])
FREEZE_STEP = 3


def make(**options: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    hvd.init()
    params = parameters()
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    options = {"freeze_step": FREEZE_STEP, "exchange": "two_phase", "check_every": 1, **options}
    return onebit.DistributedOptimizer(torch.optim.Adam(params, lr=0.01), named_parameters=names, **options), params


def train(optimizer: Any, params: Sequence[torch.Tensor], steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        terms = [(p * gradient(step, hvd.rank(), i, p)).sum() for i, p in enumerate(params)]
        torch.stack(terms).sum().backward()
        optimizer.step()


def is_victim() -> bool:
    return bool(hvd.rank() == 1)


def outcome(optimizer: Any, params: Sequence[torch.Tensor], steps: Sequence[int]) -> str:
    """Horovod's error is what a rank is to end with when another is gone."""
    try:
        train(optimizer, params, steps)
    except HorovodInternalError as error:
        return f"HorovodInternalError in step {optimizer.stats.step}: {error}"
    return "no error"


def assert_replicas(params: Sequence[torch.Tensor]) -> None:
    everyone = hvd.allgather_object(snapshot(params))
    for replica in everyone:
        assert_bit_equal(replica, everyone[0])


# -- a rank is killed --


@scenario
def killed_in_warm_up() -> str:
    optimizer, params = make()
    train(optimizer, params, [0])
    if is_victim():
        params[2].register_hook(die)
    return outcome(optimizer, params, range(1, 9))


@scenario
def killed_at_the_freeze() -> str:
    optimizer, params = make()
    if is_victim():
        optimizer._onebit._new_buckets = die
    return outcome(optimizer, params, range(9))


@scenario
def killed_mid_exchange() -> str:
    """After its first collective of the step, before its second."""
    optimizer, params = make()
    train(optimizer, params, range(5))
    assert optimizer.stats.stage == "compression"
    if is_victim():
        optimizer._transport.allgather = die
    return outcome(optimizer, params, range(5, 9))


# -- a rank stalls --


@scenario
def stopped_for_a_while() -> str:
    optimizer, params = make()
    train(optimizer, params, range(5))
    if is_victim():
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        stop = params[2].register_hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    start = time.monotonic()
    train(optimizer, params, [5])
    waited = time.monotonic() - start
    if is_victim():
        stop.remove()
    train(optimizer, params, range(6, 9))
    assert_replicas(params)
    return "waited, and went on" if waited > 0.5 else f"did not wait: {waited:.1f} s"


@scenario
def stopped_for_good() -> str:
    """The whole process stands still: nothing but Horovod's time-out for messages can notice."""
    optimizer, params = make()
    train(optimizer, params, range(5))
    if is_victim():
        os.kill(os.getpid(), signal.SIGSTOP)
    return outcome(optimizer, params, range(5, 9))


# -- memory and disk --


@scenario
def no_memory_at_the_freeze_on_one_rank() -> str:
    optimizer, params = make()
    engine = optimizer._onebit
    allocate = engine._new_buckets

    def fail(*_: Any) -> Any:
        raise MemoryError("injected")

    if is_victim():
        engine._new_buckets = fail
    try:
        train(optimizer, params, range(9))
    except OneBitError as error:
        said = str(error)
    assert optimizer.stats.stage == "warm-up"
    assert optimizer.stats.step == FREEZE_STEP
    engine._new_buckets = allocate
    train(optimizer, params, range(FREEZE_STEP, 9))
    assert optimizer.stats.stage == "compression"
    assert optimizer.stats.step == 9
    assert_replicas(params)
    return said


@scenario
def full_disk() -> str:
    """Saves onto a file system that gets full, in a name space of this process's own."""
    optimizer, params = make()
    train(optimizer, params, range(5))
    disk = FOLDER / f"disk.{hvd.rank()}"
    disk.mkdir()
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    file = disk / "optimizer.pt"
    save_atomically(lambda out: torch.save(optimizer.state_dict(), out), file)
    before = file.read_bytes()
    (disk / "others").write_bytes(b"x" * (256 * 1024 - 2 * len(before)))
    said = ""
    try:
        save_atomically(lambda out: torch.save({"a": torch.zeros(30000), **optimizer.state_dict()}, out), file)
    except OSError as error:
        said = str(error)
    assert file.read_bytes() == before
    assert sorted(each.name for each in disk.iterdir()) == ["optimizer.pt", "others"]
    train(optimizer, params, range(5, 8))
    assert_replicas(params)
    return said


if __name__ == "__main__":
    serve(FOLDER, lambda: torch.set_num_threads(1))
