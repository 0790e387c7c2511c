"""`hvd-onebit bench exchange`: what a step of the compression stage costs in a framework, on the ranks it's started on.

    horovodrun -np 2 hvd-onebit bench exchange --framework tensorflow
    mpirun -np 2 hvd-onebit bench exchange

The optimizer is wrapped as a user would, its state frozen, and steps are timed that start from gradients already there:
compress, Horovod's collectives, decode, update. Without `--framework` the two are timed in turn in one run, so that the
machine's other load hits both alike. That takes MPI: Horovod's two libraries in one process can't meet through Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvd_onebit._arguments import as_count
from hvd_onebit.bench import Machine, this_machine

__all__ = ["ExchangeReport", "add_command", "bench_exchange"]

FRAMEWORKS = ("torch", "tensorflow")
_FREEZE_STEP = 1
_SAME_ON_ALL_RANKS = 12345  # a seed that's no rank


@dataclass(frozen=True)
class ExchangeReport:
    """Seconds of a step on this rank.

    Attributes:
        num_elements: parameters, in `num_tensors` equal tensors.
        ranks: how many took part.
        step_seconds: each timed step, by framework.
        median_seconds: the median of these.
        ratio: TensorFlow's median over torch's; None when only one was timed.
    """

    machine: Machine
    num_elements: int
    num_tensors: int
    ranks: int
    step_seconds: dict[str, list[float]]
    median_seconds: dict[str, float]
    ratio: float | None


def add_command(commands: Any) -> None:
    """Adds the benchmark to the subcommands of `hvd-onebit bench`."""
    command = commands.add_parser(
        "exchange",
        help="time a compressed step in a framework; start it with horovodrun",
        description="Time a step of the compression stage in torch, in TensorFlow, or in both in turn. Start it on "
        "ranks: mpirun -np 2 hvd-onebit bench exchange",
    )
    command.add_argument("--framework", choices=(*FRAMEWORKS, "both"), default="both", help="default: %(default)s")
    command.add_argument("--num-elements", type=as_count, default=1 << 24, metavar="N", help="default: %(default)s")
    command.add_argument("--num-tensors", type=as_count, default=8, metavar="T", help="default: %(default)s")
    command.add_argument("--repeats", type=as_count, default=7, metavar="R", help="timed steps; default: %(default)s")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    command.set_defaults(run_bench=_main)


def bench_exchange(
    frameworks: tuple[str, ...] = FRAMEWORKS,
    *,
    num_elements: int = 1 << 24,
    num_tensors: int = 8,
    repeats: int = 7,
) -> ExchangeReport:
    """Collective: times steps of all `frameworks` in turn; on every rank its own figures.

    Raises:
        ValueError: a number is less than 1; both frameworks, but Gloo.
    """
    if min(num_elements, num_tensors, repeats) < 1:
        raise ValueError("num_elements, num_tensors and repeats must be at least 1")
    if len(frameworks) > 1 and os.environ.get("HOROVOD_CONTROLLER") == "gloo":
        raise ValueError("both frameworks in one process take MPI: start this with mpirun or horovodrun --mpi")
    shape = (max(1, num_elements // num_tensors),)
    makers = {"torch": _torch_step, "tensorflow": _tensorflow_step}
    steps: dict[str, Callable[[], None]] = {}
    ranks = 1
    for name in frameworks:
        steps[name], ranks = makers[name](shape, num_tensors)
    for step in steps.values():
        for _ in range(_FREEZE_STEP + 2):  # warm-up, and the first compressed steps, which allocate
            step()
    seconds: dict[str, list[float]] = {name: [] for name in frameworks}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = medians["tensorflow"] / medians["torch"] if len(medians) == len(FRAMEWORKS) else None
    return ExchangeReport(this_machine(), shape[0] * num_tensors, num_tensors, ranks, seconds, medians, ratio)


def _arrays(rank: int, shape: tuple[int, ...], count: int) -> list[Any]:
    rng = np.random.default_rng(rank)
    return [rng.standard_normal(shape, np.float32) for _ in range(count)]


def _torch_step(shape: tuple[int, ...], count: int) -> tuple[Callable[[], None], int]:
    import horovod.torch as hvd
    import torch

    import hvd_onebit.torch as onebit

    hvd.init()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in _arrays(_SAME_ON_ALL_RANKS, shape, count)]
    gradients = [torch.from_numpy(array) for array in _arrays(hvd.rank(), shape, count)]
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(parameters, lr=1e-3),
        named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)],
        freeze_step=_FREEZE_STEP,
    )

    def step() -> None:
        optimizer.zero_grad()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        optimizer.step()

    return step, int(hvd.size())


def _tensorflow_step(shape: tuple[int, ...], count: int) -> tuple[Callable[[], None], int]:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    import hvd_onebit.tensorflow as onebit

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    variables = [keras.Variable(array) for array in _arrays(_SAME_ON_ALL_RANKS, shape, count)]
    gradients = [tf.constant(array) for array in _arrays(hvd.rank(), shape, count)]
    optimizer = onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), freeze_step=_FREEZE_STEP)
    optimizer.build(variables)

    def step() -> None:
        optimizer.apply(gradients)

    return step, int(hvd.size())


def _main(args: argparse.Namespace) -> int:
    frameworks = FRAMEWORKS if args.framework == "both" else (args.framework,)
    report = bench_exchange(
        frameworks, num_elements=args.num_elements, num_tensors=args.num_tensors, repeats=args.repeats
    )
    if _rank(frameworks[0]) != 0:
        return 0
    sys.stdout.write((json.dumps(asdict(report)) if args.json else "\n".join(_lines(report))) + "\n")
    return 0


def _lines(report: ExchangeReport) -> list[str]:
    lines = [
        f"{report.ranks} ranks, {report.num_elements:,} elements in {report.num_tensors} tensors, "
        f"{report.machine.kernels} kernels on {report.machine.cores} cores, {report.machine.cpu}"
    ]
    for name, median in report.median_seconds.items():
        low, high = 1e3 * min(report.step_seconds[name]), 1e3 * max(report.step_seconds[name])
        count = len(report.step_seconds[name])
        lines.append(f"{name:<11} {1e3 * median:8.1f} ms a step (median of {count}, {low:.1f} to {high:.1f})")
    if report.ratio is not None:
        lines.append(f"tensorflow / torch: {report.ratio:.2f}")
    if report.ranks == 1:
        lines.append("one rank: nothing was compressed; start it with mpirun -np 2 or horovodrun -np 2")
    return lines


def _rank(framework: str) -> int:
    if framework == "torch":
        import horovod.torch as hvd
    else:
        import horovod.tensorflow as hvd
    return int(hvd.rank())
