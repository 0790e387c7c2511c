"""What the examples show: progress, a table, a plot, and the same figures as JSON."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from hvd_onebit.stats import COMPRESSION, WARM_UP

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Progress", "Run", "report"]

LAST_STEPS = 50  # the final loss is the mean over so many updates
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        losses: of every update, the mean over ranks; NaN from where the training diverged.
        accuracy: on the digits held out.
        bytes_per_step: what a rank sent in the last step of each stage.
    """

    losses: list[float]
    accuracy: float
    bytes_per_step: dict[str, float]

    @property
    def final_loss(self) -> float:
        return fmean(self.losses[-LAST_STEPS:])


class Progress(AbstractContextManager["Progress"]):
    """A live bar in a terminal, plain lines elsewhere; silent but on rank 0.

    Launchers put the rank's number before every line, and mpirun shows its ranks a terminal that is none: with several
    ranks it is always lines.
    """

    def __init__(self, rank: int, size: int, num_runs: int, num_steps: int) -> None:
        self._speaks = rank == 0
        self._num_runs, self._num_steps = num_runs, num_steps
        self._run = 0
        self._title = ""
        self._began = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None
        console = Console()
        if self._speaks and size == 1 and console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
                TimeElapsedColumn(), console=console,
            )  # fmt: skip
            self._bar.start()

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, name: str, seed: int) -> None:
        """Announces a training."""
        self._run += 1
        self._title = f"{self._run}/{self._num_runs} {name}, seed {seed}"
        self._began = self._last_line = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(self._title, total=self._num_steps, loss="")

    def step(self, step: int, losses: Tensor) -> None:
        """Shows how far it is, now and then."""
        if not self._speaks:
            return
        due = time.monotonic() - self._last_line > (0.1 if self._bar is not None else _SECONDS_BETWEEN_LINES)
        if due or (step == self._num_steps and self._bar is not None):
            self._last_line = time.monotonic()
            loss = f"loss {losses[max(0, step - LAST_STEPS) : step].mean():.3f}"
            if self._bar is not None:
                self._bar.update(self._task, completed=step, loss=loss)
            else:
                self.say(f"{self._title}: step {step} of {self._num_steps}, {loss}")

    def end(self, run: Run) -> None:
        """Shows how a training ended."""
        if self._bar is None:
            took = time.monotonic() - self._began
            self.say(f"{self._title}: final loss {_shown(run.final_loss)}, {took:.1f} s")

    def say(self, text: str) -> None:
        """One line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._speaks:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def report(
    runs: dict[str, list[Run]], size: int, freeze_step: int, *, json_file: Path | None, out_dir: Path | None
) -> None:
    """Prints the table and writes the files that were asked for."""
    rows = {name: _row(of_seeds) for name, of_seeds in runs.items()}
    num_seeds = len(next(iter(runs.values())))
    # mpirun's terminal is none, see Progress
    console = Console(highlight=False) if size == 1 else Console(highlight=False, force_terminal=False, width=80)
    console.print(_table(rows, size, num_seeds))
    if size == 1:
        console.print("one rank: nothing is sent, so nothing is compressed")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        content = {"ranks": size, "seeds": num_seeds, "freeze_step": freeze_step, "methods": rows}
        json_file.write_text(json.dumps(content, indent=2) + "\n")
        console.print(f"figures: {json_file}", soft_wrap=True)
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        path = out_dir / "training_loss.png"
        _plot(runs, rows, size, freeze_step, path)
        console.print(f"plot: {path}", soft_wrap=True)


def _row(runs: list[Run]) -> dict[str, float | None]:
    """A method's figures: means over seeds, None for the loss of a method that diverged."""
    loss = fmean(run.final_loss for run in runs)
    return {
        "final_loss": loss if math.isfinite(loss) else None,
        "accuracy": fmean(run.accuracy for run in runs),
        "warmup_bytes_per_step": fmean(run.bytes_per_step[WARM_UP] for run in runs),
        "compressed_bytes_per_step": fmean(run.bytes_per_step[COMPRESSION] for run in runs),
    }


def _table(rows: dict[str, dict[str, Any]], size: int, num_seeds: int) -> Table:
    seeds = "one seed" if num_seeds == 1 else f"mean of {num_seeds} seeds"
    table = Table(
        title=f"{size} rank{'s' if size > 1 else ''}, {seeds}; bytes are those that a rank sends in a step",
        box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False,
    )  # fmt: skip
    table.add_column("method", max_width=17)
    for heading in ("training\nloss", "test\naccuracy", "bytes in\nwarm-up", "bytes after\nfreeze", "times\nfewer"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        warmup, compressed = row["warmup_bytes_per_step"], row["compressed_bytes_per_step"]
        table.add_row(
            name, _shown(row["final_loss"]), f"{row['accuracy']:.1%}", f"{warmup:,.0f}",
            f"{compressed:,.0f}" if compressed else "-", f"{warmup / compressed:.1f}" if compressed else "-",
            style="bold" if name == "1-bit Adam" else None,
        )  # fmt: skip
    return table


def _shown(loss: float | None) -> str:
    return "diverged" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def _plot(runs: dict[str, list[Run]], rows: dict[str, dict[str, Any]], size: int, freeze_step: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    looks = {  # colours that colour-blind readers can tell apart
        "Adam": {"color": "black", "linestyle": "--", "zorder": 4},
        "1-bit Adam": {"color": "#0072B2", "linewidth": 2.4},
        "1-bit Adam, no error feedback": {"color": "#D55E00"},
        "naive 1-bit Adam": {"color": "#009E73"},
    }
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    curves = []
    for name, of_seeds in runs.items():
        mean = [fmean(losses) for losses in zip(*(run.losses for run in of_seeds), strict=True)]
        curves.append(_running_mean(mean, window=25))
        axes.plot(
            range(1, len(mean) + 1), curves[-1], label=f"{name}: {_shown(rows[name]['final_loss'])}", **looks[name]
        )
    if size > 1 and freeze_step < len(mean):
        axes.axvline(freeze_step, color="0.5", linestyle=":")
        axes.annotate(
            f" step {freeze_step}: variance frozen,\n compression starts", (freeze_step, 0.99), color="0.35", va="top",
            xycoords=("data", "axes fraction"),
        )  # fmt: skip
    axes.set_yscale("log")
    # a method that diverges must not squeeze the others
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.5 * max(smooth[0] for smooth in curves)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(1, len(mean))
    axes.set_xlabel("update")
    axes.set_ylabel("training loss (cross-entropy, mean of the last 25 updates)")
    axes.grid(visible=True, which="both", color="0.92")
    num_seeds = len(next(iter(runs.values())))
    seeds = f", mean of {num_seeds} seeds" if num_seeds > 1 else ""
    axes.set_title(f"MNIST digits on {size} rank{'s' if size > 1 else ''}{seeds}")
    axes.legend(title=f"method: loss over the last {LAST_STEPS} updates", loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _running_mean(values: list[float], window: int) -> list[float]:
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
