"""The TensorFlow optimizer under the real launchers: many checks in one launch each, as starting one costs seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import Launches, checks_in

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

SCRIPT = Path(__file__).parent / "scripts" / "tf_checks.py"
EVERY_CHECK = checks_in(SCRIPT)

# Horovod's torch and TensorFlow libraries in one process can't both meet through Gloo
WITH_TORCH = ["same_as_torch", "sgd_is_the_same_as_torchs", "lamb_is_the_same_as_torchs"]
OF_THREE = ["a_process_set_trains_alone"]
EVERYWHERE = [
    "a_run_measures_its_network",
    "fit_keeps_replicas_equal",
    "nan_on_one_rank",
    "a_checkpoint_of_one_rank_is_broadcast",
]

LAUNCHES: dict[str, tuple[str, int, list[str]]] = {
    "gloo-2": ("gloo", 2, [name for name in EVERY_CHECK if name not in (*WITH_TORCH, *OF_THREE)]),
    "gloo-3": ("gloo", 3, [*EVERYWHERE, *OF_THREE]),
    "mpirun-2": ("mpirun", 2, [*WITH_TORCH, "nan_on_one_rank"]),
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(
        SCRIPT, LAUNCHES, tmp_path_factory.mktemp("launches"), timeout=780.0, env={"TF_CPP_MIN_LOG_LEVEL": "3"}
    )


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    ("launch", "name"), [(launch, name) for launch, (_, _, names) in LAUNCHES.items() for name in names]
)
def test_on_every_rank(launch: str, name: str, launches: Launches) -> None:
    launches.assert_passed(launch, name)
