"""The TensorFlow optimizer under the real launchers: many checks in one launch each, as starting one costs seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import Completed, run_horovod

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

TESTS = Path(__file__).parent
SCRIPT = TESTS / "scripts" / "tf_checks.py"
EVERY_CHECK = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)

# Horovod's torch and TensorFlow libraries in one process can't both meet through Gloo
WITH_TORCH = ["same_as_torch", "sgd_is_the_same_as_torchs", "lamb_is_the_same_as_torchs"]
OF_THREE = ["a_process_set_trains_alone"]
EVERYWHERE = ["fit_keeps_replicas_equal", "nan_on_one_rank", "a_checkpoint_of_one_rank_is_broadcast"]

LAUNCHES: dict[str, tuple[str, int, list[str]]] = {
    "gloo-2": ("gloo", 2, [name for name in EVERY_CHECK if name not in (*WITH_TORCH, *OF_THREE)]),
    "gloo-3": ("gloo", 3, [*EVERYWHERE, *OF_THREE]),
    "mpirun-2": ("mpirun", 2, [*WITH_TORCH, "nan_on_one_rank"]),
}


class Launches:
    """Each launch is made once, when the first test asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Completed] = {}

    def folder(self, name: str) -> Path:
        return self._folder / name

    def __call__(self, name: str) -> Completed:
        if name not in self._done:
            launcher, size, checks = LAUNCHES[name]
            folder = self.folder(name)
            folder.mkdir()
            self._done[name] = run_horovod(
                SCRIPT,
                size,
                str(folder),
                *checks,
                launcher=launcher,
                timeout=280.0,
                cwd=folder,
                env={"PYTHONPATH": str(TESTS), "TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
            )
        return self._done[name]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("launches"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launch", "name"), [(launch, name) for launch, (_, _, names) in LAUNCHES.items() for name in names]
)
def test_on_every_rank(launch: str, name: str, launches: Launches) -> None:
    completed = launches(launch)
    for rank in range(LAUNCHES[launch][1]):
        path = launches.folder(launch) / f"{rank}.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        outcome = results.get(name, "not reached")
        assert outcome == "passed", f"rank {rank}: {outcome}\n{completed.output[-8000:]}"
