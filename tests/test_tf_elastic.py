"""Horovod Elastic under model.fit: one launch in which a rank comes and another dies, both in compression."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_horovod

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

TESTS = Path(__file__).parent
SCRIPT = TESTS / "scripts" / "tf_elastic_training.py"
FREEZE_STEP, LAST_STEP = 3, 10
GROWS, KILLED = 5, 7
# step at which ranks came or went: how many there were before and after
CHANGES = {GROWS: (2, 3), KILLED: (3, 2)}

pytestmark = pytest.mark.timeout(240)

Seen = defaultdict[int, list[dict[str, Any]]]


class Training:
    """What every rank saw, by step: on entering the elastic function, and after a step."""

    def __init__(self, folder: Path, output: str) -> None:
        self.output = output
        self.entered: Seen = defaultdict(list)
        self.after: Seen = defaultdict(list)
        for file in folder.glob("*.jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines():
                seen = json.loads(line)
                (self.entered if seen["kind"] == "entered" else self.after)[seen["step"]].append(seen)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n", encoding="utf-8")
    discover = folder / "discover"
    discover.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n", encoding="utf-8")
    discover.chmod(0o755)
    completed = run_horovod(
        SCRIPT,
        2,
        *(str(folder), str(FREEZE_STEP), str(LAST_STEP)),
        *(f"hosts=localhost,127.0.0.1,127.1@{GROWS}", f"kill@{KILLED}"),
        timeout=200,
        cwd=folder,
        env={"PYTHONPATH": str(TESTS), "HOROVOD_GLOO_TIMEOUT_SECONDS": "45", "TF_CPP_MIN_LOG_LEVEL": "3"},
        options=(
            *("--min-np", "1", "--max-np", "3", "--host-discovery-script", str(discover)),
            *("--network-interface", "lo", "--elastic-timeout", "100"),
        ),
    )
    return Training(folder, completed.check().output)


def owed(seen: list[dict[str, Any]], *, size: int) -> Any:
    return np.sum([each["owes"] for each in seen], axis=0) / size


@pytest.mark.parametrize("step", CHANGES)
def test_training_goes_on_with_other_ranks(training: Training, step: int) -> None:
    before, now = CHANGES[step]
    assert sorted(each["rank"] for each in training.after[step]) == list(range(before))
    assert sorted(each["rank"] for each in training.entered[step]) == list(range(now))
    assert {each["size"] for each in training.after[step + 1]} == {now}
    assert training.entered[step][0]["parameters"] == training.after[step][0]["parameters"], "nothing is undone"


def test_replicas_are_equal_and_in_one_stage_after_every_step(training: Training) -> None:
    assert set(training.after) == set(range(1, LAST_STEP + 1))
    for seen in (*training.after.values(), *training.entered.values()):
        for each in seen:
            assert each["parameters"] == seen[0]["parameters"], (each["kind"], each["step"], each["rank"])
    for step, seen in training.after.items():
        expected = ("compression", FREEZE_STEP) if step >= FREEZE_STEP else ("warm-up", 0)
        assert {(each["stage"], each["frozen_step"]) for each in seen} == {expected}, step
        assert all((each["bytes"] > 0) == (step > FREEZE_STEP) for each in seen)


def test_a_newcomer_costs_nothing_that_is_owed(training: Training) -> None:
    before = owed(training.after[GROWS], size=2)
    assert np.abs(before).max() > 1e-3
    np.testing.assert_allclose(owed(training.entered[GROWS], size=3), before, rtol=1e-4, atol=1e-6)


def test_a_death_loses_the_dead_ranks_part_and_no_more(training: Training) -> None:
    survivors = owed([each for each in training.after[KILLED] if each["rank"] < 2], size=3)
    np.testing.assert_allclose(owed(training.entered[KILLED], size=2), survivors, rtol=1e-4, atol=1e-6)
    assert np.abs(survivors - owed(training.after[KILLED], size=3)).max() > 1e-4
    assert "1 of 3 ranks are gone with their compression errors" in training.output
