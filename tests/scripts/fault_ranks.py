"""torch ranks to which things happen: python fault_ranks.py FOLDER, then what `forked_ranks.py` says."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
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
from hvd_onebit.stall import StallLimits

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


def sleep_for_ever(*_: Any, **__: Any) -> Any:
    """Its Horovod thread goes on."""
    time.sleep(1000)


def outcome(optimizer: Any, params: Sequence[torch.Tensor], steps: Sequence[int]) -> str:
    """Horovod's error is what a rank is to end with when another is gone."""
    try:
        train(optimizer, params, steps)
    except HorovodInternalError as error:
        return f"HorovodInternalError in step {optimizer.stats.step} of {optimizer.stats.stage}: {error}"
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


def train_until_the_limit(optimizer: Any, params: Sequence[torch.Tensor], steps: Sequence[int]) -> str:
    # not before: ranks may take long to start
    optimizer._transport._limits = StallLimits(None, 2.0)
    try:
        train(optimizer, params, steps)
    except OneBitError as error:
        return str(error)
    except HorovodInternalError as error:  # of a rank that began to wait later: another one has ended
        return "".join(error.__notes__)
    return "no error"


@scenario
def asleep_in_warm_up() -> str:
    optimizer, params = make()
    train(optimizer, params, [0])
    if is_victim():
        params[2].register_hook(sleep_for_ever)
    return train_until_the_limit(optimizer, params, range(1, 9))


@scenario
def asleep_before_a_group() -> str:
    hvd.init()
    params = parameters()
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(params), named_parameters=names, freeze_step=9, groups=[[params[1], params[2]]]
    )
    train(optimizer, params, [0])
    if is_victim():
        # after the comparison, before the group's last gradient
        params[1].register_hook(lambda _: (optimizer._onebit._start_agreement(), sleep_for_ever()))
    return train_until_the_limit(optimizer, params, range(1, 9))


@scenario
def asleep_mid_exchange() -> str:
    """After its first collective of the step, before its second."""
    optimizer, params = make()
    train(optimizer, params, range(5))
    if is_victim():
        optimizer._transport.allgather = sleep_for_ever
    return train_until_the_limit(optimizer, params, range(5, 9))


@scenario
def late_for_a_second() -> str:
    """Without a limit a long wait is told of, and goes on."""
    optimizer, params = make()
    train(optimizer, params, range(5))
    optimizer._transport._limits = StallLimits(1.0, None)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hvd_onebit").addHandler(handler)
    if is_victim():
        time.sleep(1.6)
    train(optimizer, params, range(5, 8))
    assert_replicas(params)
    return "; ".join(record.getMessage() for record in records)


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
def too_little_memory_at_the_freeze_on_one_rank() -> str:
    """The system refuses it, since the process may not grow."""
    hvd.init()
    p = torch.nn.Parameter(torch.ones(12_000_000))  # above what malloc serves from memory that it has
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam([p], lr=0.01), named_parameters=[("p", p)], freeze_step=2, check_every=1
    )
    engine = optimizer._onebit
    freeze_when_due = engine._freeze_when_due
    before = resource.getrlimit(resource.RLIMIT_AS)

    def limited() -> None:
        if is_victim() and optimizer.stats.step == 2:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 20_000_000, before[1]))
        freeze_when_due()

    def step() -> None:
        optimizer.zero_grad()
        (p * (1.0 + hvd.rank())).sum().backward()
        optimizer.step()

    engine._freeze_when_due = limited
    said = ""
    try:
        for _ in range(4):
            step()
    except OneBitError as error:
        said = str(error)
    assert (optimizer.stats.stage, optimizer.stats.step) == ("warm-up", 2)
    file = FOLDER / f"memory.{hvd.rank()}.pt"
    save_atomically(lambda out: torch.save(optimizer.state_dict(), out), file)  # in what memory there is
    resource.setrlimit(resource.RLIMIT_AS, before)
    engine._freeze_when_due = freeze_when_due
    saved = torch.load(file)
    file.unlink()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(saved["state"][0][name], optimizer.state[p][name])
    step()
    assert (optimizer.stats.stage, optimizer.stats.step) == ("compression", 3)
    step()
    assert_replicas([p])
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
