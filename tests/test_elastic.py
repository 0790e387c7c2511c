"""Horovod Elastic: one launch whose ranks come, leave and die, in warm-up and in compression.

Several hosts on one machine are several of its names: Horovod never again uses a host on which a rank has died.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import Completed, run_horovod

pytest.importorskip("horovod.torch")

TESTS = Path(__file__).parent
SCRIPT = TESTS / "scripts" / "elastic_training.py"
FREEZE_STEP, LAST_STEP = 4, 18
EVENTS = [
    "hosts=localhost,127.0.0.1,127.1@2",
    "hosts=localhost,127.0.0.1,127.1,127.0.1@6",
    "hosts=localhost,127.0.0.1,127.0.1@8",
    "kill@10",
    "kill@13",
]
# step at which ranks came or went: how many there were before and after
CHANGES = {2: (2, 3), 6: (3, 4), 8: (4, 3), 10: (3, 2), 13: (2, 1)}
ORDERLY = (6, 8)
KILLED, ALONE = 10, 13

pytestmark = pytest.mark.timeout(240)


class Training:
    """What every rank saw, by step."""

    def __init__(self, completed: Completed, folder: Path) -> None:
        self.output = completed.check().output
        self.entered: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self.after: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in folder.glob("*.jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines():
                seen = json.loads(line)
                kind = self.entered if seen["kind"] == "entered" else self.after
                kind[seen["step"]].append(seen)

    def owed(self, seen: list[dict[str, Any]], *, size: int) -> np.ndarray[Any, Any]:
        return np.sum([each["owes"] for each in seen], axis=0) / size

    def loss(self, step: int) -> float:
        return float(np.square(self.after[step][0]["parameters"]).sum())


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n", encoding="utf-8")
    discover = folder / "discover"
    discover.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n", encoding="utf-8")
    discover.chmod(0o755)
    options = (
        *("--min-np", "1", "--max-np", "4", "--host-discovery-script", str(discover)),
        *("--network-interface", "lo", "--elastic-timeout", "100"),
    )
    completed = run_horovod(
        SCRIPT,
        2,
        *(str(folder), str(FREEZE_STEP), str(LAST_STEP), *EVENTS),
        timeout=200,
        cwd=folder,
        env={"PYTHONPATH": str(TESTS), "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"},
        options=options,
    )
    return Training(completed, folder)


@pytest.mark.parametrize("step", CHANGES)
def test_training_goes_on_with_other_ranks(training: Training, step: int) -> None:
    before, now = CHANGES[step]
    assert sorted(each["rank"] for each in training.after[step]) == list(range(before))
    assert sorted(each["rank"] for each in training.entered[step]) == list(range(now))
    assert {each["size"] for each in training.after[step + 1]} == {now}


def test_replicas_are_equal_after_every_step_and_every_change(training: Training) -> None:
    assert set(training.after) == set(range(1, LAST_STEP + 1))
    for seen in (*training.after.values(), *training.entered.values()):
        for each in seen:
            assert each["parameters"] == seen[0]["parameters"], (each["kind"], each["step"], each["rank"])


@pytest.mark.parametrize("step", CHANGES)
def test_nothing_that_was_committed_is_undone_by_a_change(training: Training, step: int) -> None:
    assert training.entered[step][0]["parameters"] == training.after[step][0]["parameters"]


def test_the_stage_is_everybodys(training: Training) -> None:
    for step, seen in training.after.items():
        stages = {(each["stage"], each["frozen_step"]) for each in seen}
        alone = {each["size"] for each in training.after[step]} == {1}
        compressed = step >= FREEZE_STEP and not alone
        assert stages == {("compression", FREEZE_STEP) if compressed else ("warm-up", 0)}, step
        if step > FREEZE_STEP and not alone:
            assert all(each["bytes"] > 0 for each in seen)


@pytest.mark.parametrize("step", ORDERLY)
def test_an_orderly_change_keeps_what_is_owed(training: Training, step: int) -> None:
    before, now = CHANGES[step]
    owed = training.owed(training.after[step], size=before)
    assert np.abs(owed).max() > 0.01
    np.testing.assert_allclose(training.owed(training.entered[step], size=now), owed, rtol=1e-4, atol=1e-6)


def test_a_death_loses_the_dead_ranks_part_and_no_more(training: Training) -> None:
    survivors = [each for each in training.after[KILLED] if each["rank"] < 2]
    owed = training.owed(survivors, size=3)
    np.testing.assert_allclose(training.owed(training.entered[KILLED], size=2), owed, rtol=1e-4, atol=1e-6)
    assert np.abs(owed - training.owed(training.after[KILLED], size=3)).max() > 0.01
    assert "1 of 3 ranks are gone with their compression errors" in training.output


def test_the_last_rank_goes_on_uncompressed(training: Training) -> None:
    assert "one rank: there is nothing to send" in training.output
    # what it owed is in its momentum: without it the parameters run away from their optimum
    losses = [training.loss(step) for step in range(ALONE, LAST_STEP + 1)]
    assert losses == sorted(losses, reverse=True)


def test_the_loss_falls_all_the_way(training: Training) -> None:
    assert training.loss(LAST_STEP) < 0.8 * training.loss(1)
    for step in CHANGES:
        assert training.loss(step + 2) < 1.15 * training.loss(step), "a dead rank's part of what is owed is a jolt"
