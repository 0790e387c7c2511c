"""What an experiment shows: a table, a plot, and the same figures as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from .training import Run, Variant
from .variants import Experiment

__all__ = ["figures", "plot", "table", "write_json"]

Figures = dict[str, Any]

_POINTS = 100  # of a curve in the JSON file
_HIGHEST = 6.0  # times the typical difference: what lies beyond is drawn at the plot's edge


def figures(experiment: Experiment, runs: dict[str, list[Run]]) -> Figures:
    """The experiment's figures as plain JSON values: mean and spread over seeds, None for what is not finite."""
    final = {name: [_final(run.losses, experiment.plan.final_steps) for run in each] for name, each in runs.items()}
    reference = final[experiment.reference]
    rows = {}
    for name, of_seeds in runs.items():
        variant = experiment.variants[name]
        apart = [mine - theirs for mine, theirs in zip(final[name], reference, strict=True)]
        rows[name] = {
            "optimizer": variant.optimizer.__name__,
            "options": _plain(variant),
            "final_loss": _summary(final[name]),
            "held_out_loss": _summary([run.held_out_loss for run in of_seeds]),
            "final_loss_minus_reference": _summary(apart),
            "dead_share": fmean(run.dead_share for run in of_seeds),
            "floored_share": fmean(run.floored_share for run in of_seeds),
            "bytes_after_freeze": fmean(run.bytes_after_freeze for run in of_seeds),
            "losses": _curve([run.losses for run in of_seeds]),
        }
    return {
        "title": experiment.title,
        "plan": asdict(experiment.plan),
        "seeds": len(reference),
        "reference": experiment.reference,
        "variants": rows,
    }


def _final(losses: list[float], num_steps: int) -> float:
    return fmean(losses[-num_steps:])


def _plain(variant: Variant) -> dict[str, Any]:
    return {**variant.options, "lr_factor": variant.lr_factor, "compressed": variant.compressed}


def _summary(by_seed: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation."""
    finite = all(map(math.isfinite, by_seed))
    return {
        "mean": fmean(by_seed) if finite else None,
        "spread": (stdev(by_seed) if len(by_seed) > 1 else 0.0) if finite else None,
        "by_seed": [value if math.isfinite(value) else None for value in by_seed],
    }


def _curve(by_seed: list[list[float]]) -> list[list[float | None]]:
    """[update, mean loss of the updates up to it] at most `_POINTS` times, averaged over seeds."""
    mean = [fmean(each) for each in zip(*by_seed, strict=True)]
    stride = max(1, math.ceil(len(mean) / _POINTS))
    parts = [mean[start : start + stride] for start in range(0, len(mean), stride)]
    ends = [min(start + stride, len(mean)) for start in range(0, len(mean), stride)]
    return [[end, fmean(part) if math.isfinite(fmean(part)) else None] for end, part in zip(ends, parts, strict=True)]


def table(found: Figures) -> str:
    """The figures as a Markdown table."""
    lines = [
        f"{found['title']}; {found['plan']['num_ranks']} ranks, {_seeds(found)}: mean ± standard deviation.",
        "",
        f"| variant | training loss | minus {found['reference']} | held-out loss | dead | floored | bytes a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["variants"].items():
        cells = (
            _shown(row["final_loss"]), _shown(row["final_loss_minus_reference"], sign="+"),
            _shown(row["held_out_loss"]), f"{row['dead_share']:.1%}", f"{row['floored_share']:.1%}",
            f"{row['bytes_after_freeze']:,.0f}" if row["bytes_after_freeze"] else "-",
        )  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seeds(found: Figures) -> str:
    return "one seed" if found["seeds"] == 1 else f"{found['seeds']} seeds"


def _shown(summary: dict[str, Any], sign: str = "") -> str:
    if summary["mean"] is None:
        diverged = sum(value is None for value in summary["by_seed"])
        return f"diverged ({diverged} of {len(summary['by_seed'])})"
    digits = ".4f" if abs(summary["mean"]) < 100.0 else ".3g"
    return f"{summary['mean']:{sign}{digits}} ± {summary['spread']:{digits}}"


def write_json(found: Figures, path: Path) -> None:
    """Writes the figures, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def plot(found: Figures, shown: tuple[str, ...], path: Path) -> None:
    """Training loss over time of the variants `shown`, and the others' distances to the reference, seed by seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    _plot_curves(left, found, shown)
    _plot_apart(right, found)
    figure.suptitle(f"{found['title']}, {found['plan']['num_ranks']} ranks, {_seeds(found)}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _plot_curves(axes: Any, found: Figures, shown: tuple[str, ...]) -> None:
    colours = ("black", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")  # colour-blind readers' too
    for colour, name in zip(colours, shown, strict=False):
        steps, losses = zip(*found["variants"][name]["losses"], strict=True)
        axes.plot(
            steps, [math.nan if loss is None else loss for loss in losses], color=colour, label=name,
            linestyle="--" if colour == "black" else "-", linewidth=1.3,
        )  # fmt: skip
    axes.axvline(found["plan"]["freeze_step"], color="0.5", linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("update (dotted: the variance is frozen)")
    axes.set_ylabel("training loss")
    axes.legend(fontsize=8)


def _plot_apart(axes: Any, found: Figures) -> None:
    reference = found["variants"][found["reference"]]
    names = [name for name in found["variants"] if name != found["reference"]]
    apart = {
        key: [_apart(found["variants"][name][key]["by_seed"], reference[key]["by_seed"]) for name in names]
        for key in ("final_loss", "held_out_loss")
    }
    typical = median(abs(fmean(each)) for each in apart["final_loss"] if all(map(math.isfinite, each)))
    limit = _HIGHEST * typical
    for key, colour, offset in (("final_loss", "#0072B2", -0.15), ("held_out_loss", "#D55E00", 0.15)):
        for row, values in enumerate(apart[key]):
            inside = [max(-limit, min(value, limit)) for value in values]
            axes.plot(inside, [row + offset] * len(inside), "o", color=colour, markersize=4, alpha=0.7)
        axes.plot([], [], "o", color=colour, label={"final_loss": "training", "held_out_loss": "held out"}[key])
    axes.axvline(0.0, color="0.5")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"loss minus {found['reference']}'s, a point a seed\n(right edge: beyond, or diverged)")
    axes.grid(axis="x", color="0.92")
    axes.legend(fontsize=8)


def _apart(by_seed: list[float | None], reference: list[float | None]) -> list[float]:
    """Differences seed by seed, infinite where one of the two is."""
    return [
        math.inf if mine is None or theirs is None else mine - theirs
        for mine, theirs in zip(by_seed, reference, strict=True)
    ]
