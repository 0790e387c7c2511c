"""The torch optimizer under the real launchers: many checks in one launch each, as starting one costs seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from launch import Launches, checks_in
from torch_training import assert_bit_equal, distribute, on_ranks, parameters, snapshot, train

from hvd_onebit.transport.local import LocalTransport

pytest.importorskip("horovod.torch")

SCRIPT = Path(__file__).parent / "scripts" / "torch_checks.py"
EVERY_CHECK = checks_in(SCRIPT)

SETS_OF_ANY_SIZE = ["process_set"]  # for three ranks and HOROVOD_DYNAMIC_PROCESS_SETS
EVERYWHERE = [
    "warm_up_is_torchs_optimizer",
    "replicas_stay_equal",
    "same_bits",
    "nan_on_one_rank",
    "broadcast_carries_a_restored_stage",
    "resume_bit_for_bit",
]
DISAGREEMENTS = [name for name in EVERY_CHECK if name.startswith("disagree_")]

LAUNCHES: dict[str, tuple[str, int, list[str]]] = {
    "gloo-2": ("gloo", 2, [name for name in EVERY_CHECK if name not in SETS_OF_ANY_SIZE]),
    "gloo-3": ("gloo", 3, [*EVERYWHERE, *SETS_OF_ANY_SIZE, *DISAGREEMENTS]),
    "mpirun-2": ("mpirun", 2, EVERYWHERE),
    "mpirun-3": ("mpirun", 3, [*EVERYWHERE, *DISAGREEMENTS]),
    "mpi-2": ("mpi", 2, ["same_bits"]),
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(SCRIPT, LAUNCHES, tmp_path_factory.mktemp("launches"), timeout=300.0)


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("launch", "name"), [(launch, name) for launch, (_, _, checks) in LAUNCHES.items() for name in checks]
)
def test_check_holds_on_every_rank(launches: Launches, launch: str, name: str) -> None:
    launches.assert_passed(launch, name)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_launcher_ends_well(launches: Launches, launch: str) -> None:
    launches(launch).check()


@pytest.mark.timeout(320)
@pytest.mark.parametrize("launch", ["gloo-2", "mpirun-2", "mpi-2"])
def test_the_same_seeds_give_the_same_bits_as_the_local_transport(launches: Launches, launch: str) -> None:
    def work(transport: LocalTransport) -> list[torch.Tensor]:
        params = parameters()
        train(
            distribute(torch.optim.Adam(params, lr=0.01), transport, freeze_step=4), params, range(12), transport.rank
        )
        return snapshot(params)

    launches(launch)
    expected = on_ranks(2, work)[0]
    for rank in range(2):
        found = torch.load(launches.folder(launch) / f"same_bits.{rank}.pt", weights_only=True)
        assert_bit_equal(found, expected, f"on rank {rank}")


@pytest.mark.timeout(320)
def test_a_process_set_trains_as_a_world_of_its_size(launches: Launches) -> None:
    def work(transport: LocalTransport) -> list[torch.Tensor]:
        params = parameters()
        train(distribute(torch.optim.Adam(params, lr=0.01), transport, freeze_step=2), params, range(6), transport.rank)
        return snapshot(params)

    launches("gloo-3")
    expected = on_ranks(2, work)[0]
    for rank in range(2):
        found = torch.load(launches.folder("gloo-3") / f"process_set.{rank}.pt", weights_only=True)
        assert_bit_equal(found, expected, f"on member {rank}")


@pytest.mark.timeout(320)
def test_every_check_is_run_somewhere() -> None:
    assert set(EVERY_CHECK) == {name for _, _, checks in LAUNCHES.values() for name in checks}


def test_nothing_is_left_behind() -> None:
    """The launchers' processes all end with them."""
    mine = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _runs(entry, SCRIPT)]
    assert not mine


def _runs(entry: Path, script: Path) -> bool:
    try:
        return str(script).encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid()
    except OSError:
        return False
