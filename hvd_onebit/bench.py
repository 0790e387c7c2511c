"""Benchmarks behind `hvd-onebit bench`.

`kernels` times the compute kernels on this machine, one thread, against copying the same floats in the same run: memory
bandwidth is what bounds them, so that the ratio says how much is left to win and can be compared between machines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hvd_onebit import kernels, wire

__all__ = ["KernelsReport", "Machine", "add_arguments", "bench_kernels", "main", "this_machine"]

_RANKS = 8  # messages that the reduce kernel is given
_NUMPY_NUM_ELEMENTS = 1 << 21  # enough to leave the caches; the fallback's time grows linearly from there


@dataclass(frozen=True)
class Machine:
    """What a figure was measured on."""

    cpu: str
    cores: int
    kernels: str
    numpy: str


@dataclass(frozen=True)
class KernelsReport:
    """Median seconds of each kernel on `num_elements` elements; the NumPy ones are scaled from `numpy_num_elements`."""

    machine: Machine
    num_elements: int
    block: int
    repeats: int
    ranks: int
    memcpy_seconds: float
    compress_seconds: float
    reduce_seconds: float
    apply_seconds: float
    numpy_num_elements: int
    numpy_compress_seconds: float
    numpy_reduce_seconds: float
    numpy_apply_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks as subcommands of `parser`."""
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    command = commands.add_parser(
        "kernels",
        help="time the compute kernels on this machine",
        description="Time the compute kernels, one thread, against memcpy of the same floats in the same run.",
    )
    command.add_argument("--num-elements", type=_positive, default=1 << 25, metavar="N", help="default: %(default)s")
    command.add_argument("--repeats", type=_positive, default=9, metavar="R", help="default: %(default)s")
    command.add_argument(
        "--block",
        type=_positive,
        default=wire.DEFAULT_BLOCK,
        metavar="B",
        help="elements per scale; N or more for one scale; default: %(default)s",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.set_defaults(run_bench=_main_kernels)
    importlib.import_module("hvd_onebit.bench_network").add_command(commands)
    importlib.import_module("hvd_onebit.bench_exchange").add_command(commands)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark that `args`, parsed with `add_arguments`, asks for; returns the exit status."""
    run_bench: Callable[[argparse.Namespace], int] = args.run_bench
    return run_bench(args)


def this_machine() -> Machine:
    """The machine this process runs on, and the kernels it uses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(_cpu_model(), cores, _fastest().name, np.__version__)


def bench_kernels(num_elements: int, *, repeats: int = 9, block: int = wire.DEFAULT_BLOCK) -> KernelsReport:
    """Time memcpy, compress, reduce of 8 messages, and adam_apply of one, on `num_elements` float32 each.

    The repeats go round all of them, so that noise on the machine hits all alike. Memory: 24 bytes an element.

    Raises:
        ValueError: a number is less than 1.
    """
    if min(num_elements, repeats) < 1:
        raise ValueError(f"num_elements and repeats must be at least 1, got {num_elements} and {repeats}")
    numpy_num_elements = min(num_elements, _NUMPY_NUM_ELEMENTS)
    numpy_kernels = kernels.implementations()["numpy"]
    tasks = _tasks(_fastest(), num_elements, block)
    numpy_tasks = _tasks(numpy_kernels, numpy_num_elements, block)
    del numpy_tasks["memcpy"]
    medians = _interleaved_medians({**tasks, **{f"numpy_{name}": task for name, task in numpy_tasks.items()}}, repeats)
    grown = num_elements / numpy_num_elements
    return KernelsReport(
        machine=this_machine(),
        num_elements=num_elements,
        block=block,
        repeats=repeats,
        ranks=_RANKS,
        memcpy_seconds=medians["memcpy"],
        compress_seconds=medians["compress"],
        reduce_seconds=medians["reduce"],
        apply_seconds=medians["apply"],
        numpy_num_elements=numpy_num_elements,
        numpy_compress_seconds=grown * medians["numpy_compress"],
        numpy_reduce_seconds=grown * medians["numpy_reduce"],
        numpy_apply_seconds=grown * medians["numpy_apply"],
    )


def _tasks(chosen: kernels.Kernels, num_elements: int, block: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name, on memory that is allocated and touched here."""
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal(num_elements, dtype=np.float32)
    momentum = rng.standard_normal(num_elements, dtype=np.float32)
    parameter = rng.standard_normal(num_elements, dtype=np.float32)
    error = np.full(num_elements, 0.5, np.float32)
    variance = gradient * gradient
    target = np.full(num_elements, 0.5, np.float32)
    message = np.full(wire.message_num_bytes(num_elements, block), 0xFF, np.uint8)
    messages = rng.integers(0, 256, (_RANKS, message.size), dtype=np.uint8)
    for one in messages:
        wire.scales_view(one, num_elements, block)[:] = 1.0

    def memcpy() -> None:
        np.copyto(target, gradient)

    def compress() -> None:
        chosen.compress(gradient, momentum, 0.9, error, message, block=block)

    def reduce() -> None:
        chosen.reduce(messages, error, message, num_elements=num_elements, block=block)

    def apply() -> None:
        chosen.adam_apply(
            messages[:1],
            0,
            parameter,
            target,
            variance,
            num_elements=num_elements,
            block=block,
            step_size=1e-3,
            eps=1e-8,
        )

    return {"memcpy": memcpy, "compress": compress, "reduce": reduce, "apply": apply}


def _interleaved_medians(tasks: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each task over `repeats` rounds through all of them, after one round that doesn't count."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(rounds[1:]) for name, rounds in seconds.items()}


def _main_kernels(args: argparse.Namespace) -> int:
    report = bench_kernels(args.num_elements, repeats=args.repeats, block=args.block)
    if args.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print_kernels(report)
    return 0


def _print_kernels(report: KernelsReport) -> None:
    machine = report.machine
    print(f"{machine.cpu}, {machine.cores} cores; kernels: {machine.kernels}; NumPy {machine.numpy}")
    print(
        f"{report.num_elements} float32 elements in blocks of {report.block}, one thread, median of {report.repeats}; "
        "GB/s counts an element's 4 bytes once"
    )
    if report.numpy_num_elements != report.num_elements:
        print(f"NumPy fallback: measured on {report.numpy_num_elements} elements and scaled up")
    seconds = {
        "memcpy": report.memcpy_seconds,
        "compress": report.compress_seconds,
        f"reduce, {report.ranks} ranks": report.reduce_seconds,
        "apply": report.apply_seconds,
        "NumPy compress": report.numpy_compress_seconds,
        f"NumPy reduce, {report.ranks} ranks": report.numpy_reduce_seconds,
        "NumPy apply": report.numpy_apply_seconds,
    }
    rows = [
        (
            name,
            f"{time_taken:.6f}",
            f"{4e-9 * report.num_elements / time_taken:.2f}",
            f"{time_taken / report.memcpy_seconds:.2f}",
        )
        for name, time_taken in seconds.items()
    ]
    _print_table(("kernel", "seconds", "GB/s", "x memcpy"), rows)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print names in the first column and numbers in the others, with rich on a terminal if it's there."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table()
            for index, title in enumerate(header):
                table.add_column(title, justify="right" if index else "left")
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *numbers]))


def _fastest() -> kernels.Kernels:
    return list(kernels.implementations().values())[-1]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return number
