"""One contract for every transport: local threads, mpi4py under mpirun, and torch's two over them and over Horovod."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interpreter import switch_interval
from launch import run_horovod
from transport_contract import CONTRACT

from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport, run_ranks
from hvd_onebit.transport.shared import SharedMemory

SCRIPT = Path(__file__).parent / "scripts" / "transport_contract_script.py"

MPI_WAITS = SCRIPT.with_name("mpi_waits.py")

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONTRACT)
def test_local_transport_keeps_the_contract(name: str, size: int) -> None:
    run_ranks(size, lambda transport: CONTRACT[name](transport, np.asarray), timeout_seconds=10)


@needs_torch
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CONTRACT)
def test_host_transport_keeps_the_contract(name: str, size: int) -> None:
    import torch

    from hvd_onebit.torch.transport import HostTransport

    run_ranks(size, lambda transport: CONTRACT[name](HostTransport(transport), torch.from_numpy), timeout_seconds=10)


@needs_torch
def test_host_transport_averages_half_precision_as_float32() -> None:
    import torch

    from hvd_onebit.torch.transport import HostTransport

    def work(transport: LocalTransport) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            values = torch.tensor([1.0, 300.0, 0.1], dtype=dtype) * (transport.rank + 1)
            mean = HostTransport(transport).allreduce(values, name=str(dtype)).wait()
            assert mean.dtype == dtype
            expected = sum((torch.tensor([1.0, 300.0, 0.1], dtype=dtype) * (r + 1)).float() for r in range(3)) / 3
            torch.testing.assert_close(mean, expected.to(dtype))

    run_ranks(3, work, timeout_seconds=10)


LAUNCHES = [
    pytest.param("mpirun", 2, ["mpi"], marks=needs_mpi),
    pytest.param("mpirun", 3, ["mpi", "torch-mpi", "horovod"], marks=[needs_mpi, needs_torch, needs_horovod]),
    pytest.param("gloo", 2, ["horovod"], marks=[needs_torch, needs_horovod]),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("launcher", "size", "kinds"), LAUNCHES)
def test_launched_transports_keep_the_contract(tmp_path: Path, launcher: str, size: int, kinds: list[str]) -> None:
    completed = run_horovod(
        SCRIPT,
        size,
        str(tmp_path),
        *kinds,
        launcher=launcher,
        timeout=150,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )
    for rank in range(size):
        file = tmp_path / f"{rank}.json"
        assert file.exists(), completed.output
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found == {f"{kind}: {name}": "ok" for kind in kinds for name in CONTRACT}, f"rank {rank}"
    completed.check()


@needs_mpi
@pytest.mark.parametrize("how", ["asleep", "gone"])
def test_waits_over_mpi_say_what_they_wait_for_and_end(tmp_path: Path, how: str) -> None:
    """The others come late at first, and then never: everything that is waited for has its limit, and then the run."""
    completed = run_horovod(MPI_WAITS, 2, how, launcher="mpirun", timeout=30, cwd=tmp_path)
    assert not completed.timed_out, completed.output
    assert completed.returncode != 0
    assert "stands still" in completed.ranks[1]
    said = completed.ranks[0]
    assert "rank 0 has waited 0 s for other ranks at 'late'" in said, said
    for what in ("mean", "bits", "digest", "a group", "the transport"):
        assert f"rank 0 has waited 0.5 s for other ranks at '{what}', and they have not come" in said, said
    assert "the end of rank 0" in said


# what only the local transport promises


def test_results_come_in_rank_order() -> None:
    assert run_ranks(4, lambda transport: transport.rank * 10) == [0, 10, 20, 30]


def test_a_rank_that_raises_ends_those_that_wait_for_it() -> None:
    waited: list[str] = []

    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("rank 1's own fault")
        try:
            transport.allgather_bytes(b"x", name="x").wait()
        except OneBitError as error:
            waited.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="rank 1's own fault"):
        run_ranks(3, work, timeout_seconds=10)
    assert len(waited) == 2
    assert all("ZeroDivisionError: rank 1's own fault" in each for each in waited)


def test_a_rank_that_does_not_come_ends_the_others() -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.allgather_bytes(b"x", name="x").wait()

    with pytest.raises(OneBitError, match=r"collective 'x': ranks \[1, 2\] did not take part"):
        run_ranks(3, work, timeout_seconds=0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.allgather(np.zeros(2 + t.rank, np.uint8), [2, 2], name="a").wait(),
        lambda t: t.alltoall(np.zeros(2, np.uint8), [1, 1], [2, 0], name="a").wait(),
    ],
    ids=["allgather", "alltoall"],
)
def test_lengths_other_than_announced_are_found(wrong: Callable[[Any], Any]) -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, wrong, timeout_seconds=10)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
def test_bytes_that_peers_may_still_read_outlive_the_next_ones() -> None:
    """A rank may show its next message before the slowest peer has read the last one, but not the one after."""
    memory = SharedMemory()
    assert memory.open_peers([memory.key])
    shown = [np.full(5, number, np.uint8) for number in range(4)]
    before = memory.expose_bytes("m", shown[0])
    for number in (1, 2, 3):
        now = memory.expose_bytes("m", shown[number])
        assert (memory.gathered([before], [5]) == number - 1).all()
        assert (memory.gathered([now], [5]) == number).all()
        before = now


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_mean_is_written_over_the_own_part_alone(size: int) -> None:
    """Whichever rank takes it, with all parts added in one order, and before any of them is overwritten."""
    length, rng = 100_000, np.random.default_rng(size)
    given = [rng.normal(size=length).astype(np.float32) for _ in range(size)]
    own = slice(7, 90_001)
    expected = given[0][own].copy()
    for other in given[1:]:
        expected += other[own]
    expected /= np.float32(size)
    for rank in range(size):
        memory = SharedMemory()
        assert memory.open_peers([memory.key] * size)
        shown = [memory.zeros(length) for _ in range(size)]
        for array, values in zip(shown, given, strict=True):
            array[:] = values
        places = [memory.expose("m", array) for array in shown]
        parts = memory.parts(rank, own, length, places)
        assert [part.flags.writeable for part in parts] == [peer == rank for peer in range(size)]
        for part, values in zip(parts, given, strict=True):
            np.testing.assert_array_equal(part, values[own])
        np.testing.assert_array_equal(memory.mean(rank, own, length, places), expected)
        np.testing.assert_array_equal(shown[rank][own], expected)
        for peer, array in enumerate(shown):
            outside = [slice(0, own.start), slice(own.stop, None)] if peer == rank else [slice(None)]
            for part in outside:
                np.testing.assert_array_equal(array[part], given[peer][part])


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
def test_memory_is_shown_from_several_threads_at_once() -> None:
    """TensorFlow's operations run beside each other: every array has a place of its own, inside the file."""
    memory = SharedMemory()
    assert memory.open_peers([memory.key])

    def show(number: int) -> list[tuple[int, Any]]:
        arrays = [memory.zeros(1000 + number) for _ in range(50)]
        for k, array in enumerate(arrays):
            array[:] = 100 * number + k
        return [(memory.expose("m", array), array) for array in arrays]

    with switch_interval(1e-6), ThreadPoolExecutor(8) as threads:
        shown = [each for part in threads.map(show, range(8)) for each in part]
    assert len({at for at, _ in shown}) == len(shown)
    for at, array in shown:
        assert at + array.nbytes <= os.fstat(memory._file.fileno()).st_size
        assert (memory.parts(0, slice(0, len(array)), len(array), [at])[0] == array).all()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
def test_many_arrays_need_few_files() -> None:
    """A hundred small buckets, as layer-wise learning rates make them, and some that are larger than all before."""
    memory = SharedMemory()
    assert memory.open_peers([memory.key] * 4)
    files = len(os.listdir("/proc/self/fd"))
    lengths = [640] * 200 + [3_000_000, 1, 2_000_000, 262_144] + [300_000] * 5
    arrays = [memory.zeros(length) for length in lengths]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, array in enumerate(arrays):
        at = memory.expose("m", array)
        for peer, part in enumerate(memory.parts(0, slice(0, len(array)), len(array), [at] * 4)):
            assert len(part) == len(array)
            assert (part == number).all()
            assert part.flags.writeable == (peer == 0)
    assert len(os.listdir("/proc/self/fd")) - files < 40
    assert sum(map(len, arrays)) * 4 < os.fstat(memory._file.fileno()).st_size < sum(map(len, arrays)) * 4 * 4


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
def test_memory_that_was_shown_to_peers_goes_with_its_owner() -> None:
    memory = SharedMemory()
    memory.expose_bytes("m", np.zeros(5, np.uint8))
    memory.expose("f", np.zeros(5, np.float32))
    files = len(os.listdir("/proc/self/fd"))
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/fd")) < files
