"""The example runs as its first lines say, under every launcher; the guide's table of options is the real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from launch import Completed, rank_environment, run_horovod

from hvd_onebit.options import CompressionOptions

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pytorch_mnist.py"
METHODS = ["Adam", "1-bit Adam", "1-bit Adam, no error feedback", "naive 1-bit Adam"]
FIGURES = {"final_loss", "accuracy", "warmup_bytes_per_step", "compressed_bytes_per_step"}
FEW_STEPS = ("--steps", "12", "--freeze-step", "6")

pytestmark = pytest.mark.timeout(330)  # seconds of work, but two frameworks start in every process


@pytest.fixture(autouse=True)
def _what_the_example_needs() -> None:
    for module in ("horovod.torch", "matplotlib", "mlxtend", "rich"):
        pytest.importorskip(module)


def run_alone(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *args],
        cwd=cwd, env=rank_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def figures_of(path: Path, *, ranks: int, seeds: int = 1) -> dict[str, dict[str, Any]]:
    content = json.loads(path.read_text())
    assert (content["ranks"], content["seeds"]) == (ranks, seeds)
    for figures in content["methods"].values():
        assert figures.keys() >= FIGURES
        assert 0 < figures["final_loss"] < 10
        assert 0 <= figures["accuracy"] <= 1
    methods: dict[str, dict[str, Any]] = content["methods"]
    return methods


def assert_compressed(figures: dict[str, Any]) -> None:
    assert figures["warmup_bytes_per_step"] >= 30 * figures["compressed_bytes_per_step"] > 0


def test_one_process_trains_and_says_that_nothing_is_sent(tmp_path: Path) -> None:
    done = run_alone(*FEW_STEPS, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    methods = figures_of(tmp_path / "figures.json", ranks=1)
    assert list(methods) == ["1-bit Adam"]
    assert methods["1-bit Adam"]["compressed_bytes_per_step"] == 0
    assert "one rank" in done.stdout


def test_the_comparison_gives_table_figures_and_plot(tmp_path: Path) -> None:
    arguments = (*FEW_STEPS, "--compare", "--seeds", "2", "--json", "out/figures.json", "--out", "out")
    done = run_horovod(EXAMPLE, 2, *arguments, launcher="gloo", timeout=300, cwd=tmp_path).check()
    methods = figures_of(tmp_path / "out" / "figures.json", ranks=2, seeds=2)
    assert list(methods) == METHODS
    for name in METHODS[1:]:
        assert_compressed(methods[name])
        assert methods[name]["warmup_bytes_per_step"] == methods["Adam"]["warmup_bytes_per_step"]
    assert methods["Adam"]["compressed_bytes_per_step"] == methods["Adam"]["warmup_bytes_per_step"]
    assert_is_an_image(tmp_path / "out" / "training_loss.png")
    assert_table_shown(done)


def test_mpirun_runs_it_unchanged(tmp_path: Path) -> None:
    arguments = (*FEW_STEPS, "--json", "figures.json")
    run_horovod(EXAMPLE, 2, *arguments, launcher="mpirun", timeout=300, cwd=tmp_path).check()
    assert_compressed(figures_of(tmp_path / "figures.json", ranks=2)["1-bit Adam"])


def assert_is_an_image(path: Path) -> None:
    import matplotlib.image

    height, width, _ = matplotlib.image.imread(path).shape
    assert height > 300
    assert width > 300


def assert_table_shown(done: Completed) -> None:
    """Rank 0 alone speaks, and no line is too long for a terminal once the launcher has put the rank before it."""
    assert "naive 1-bit Adam" in done.ranks[0]
    assert "training" not in done.ranks[1]
    table = done.ranks[0][done.ranks[0].index("2 ranks") :]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80


@pytest.mark.parametrize("arguments", [("--seeds", "none"), ("--steps", "5", "--epochs", "1")])
def test_a_wrong_argument_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_alone(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert arguments[-2] in done.stderr
    assert "Traceback" not in done.stderr


def test_the_guide_lists_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs" / "guide.md").read_text(), flags=re.MULTILINE)
    shown = dict(rows)
    real = {field.name: str(field.default).replace("'", '"') for field in fields(CompressionOptions)}
    assert {name: default.strip('"') for name, default in shown.items()} == real
