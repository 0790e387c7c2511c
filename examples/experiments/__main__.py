"""Trains, compares, and writes the figures: see README.md."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from statistics import fmean

import torch

from .report import figures, plot, table, write_json
from .training import Run, train
from .variants import EXPERIMENTS, Experiment


def main() -> None:
    args = _parse_arguments()
    torch.set_num_threads(1)  # the ranks are threads
    if args.seeds < 3 and not args.quick:
        sys.stderr.write(f"note: {args.seeds} seed(s) cannot tell a small difference from chance\n")
    logging.getLogger("hvd_onebit").setLevel(logging.ERROR)  # short trainings freeze early, knowingly
    for name in EXPERIMENTS if args.experiment == "all" else [args.experiment]:
        experiment = EXPERIMENTS[name].quick() if args.quick else EXPERIMENTS[name]
        found = figures(experiment, _train_all(experiment, args.seeds))
        write_json(found, args.out / f"{name}.json")
        plot(found, experiment.shown, args.out / f"{name}.png")
        print(f"\n{table(found)}\n\nplot: {args.out / name}.png, figures: {args.out / name}.json\n")


def _train_all(experiment: Experiment, num_seeds: int) -> dict[str, list[Run]]:
    task = experiment.make_task()
    runs: dict[str, list[Run]] = {name: [] for name in experiment.variants}
    for seed in range(num_seeds):
        for name, variant in experiment.variants.items():
            began = time.monotonic()
            run = train(task, experiment.plan, variant, seed)
            runs[name].append(run)
            final = fmean(run.losses[-experiment.plan.final_steps :])
            print(f"seed {seed}, {name}: {final:.4f}, {time.monotonic() - began:.1f} s", flush=True)
    return runs


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.experiments",
        description="Compares the optimizers and their options on simulated ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiment", choices=(*EXPERIMENTS, "all"))
    parser.add_argument("--seeds", type=_positive, default=3, metavar="N", help="trainings of each variant")
    parser.add_argument("--quick", action="store_true", help="a few updates only: shows that it runs, not who wins")
    parser.add_argument(
        "--out", type=Path, default=Path("demo/experiments"), metavar="DIR", help="for plots and figures"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


if __name__ == "__main__":
    main()
