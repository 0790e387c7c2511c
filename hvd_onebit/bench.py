"""Benchmarks behind `hvd-onebit bench`.

`kernels` times the compute kernels on this machine against memcpy and a triad, a = b + s*c, of the same floats in the
same run. Memory bandwidth is what bounds them: the share of the triad's says how much is left to win, on any machine.
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
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hvd_onebit import kernels, wire
from hvd_onebit._arguments import as_count
from hvd_onebit.threads import num_threads

if TYPE_CHECKING:
    from hvd_onebit.bench_device import DeviceReport

__all__ = ["KernelsReport", "Machine", "Timing", "add_arguments", "bench_kernels", "main", "this_machine"]

_Name = TypeVar("_Name")

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
class Timing:
    """Median seconds of one kernel, and what it reads and writes, each array once.

    Attributes:
        triad_share: its bytes a second over those of the triad on as many threads.
        speed_up: over the same kernel on one thread.
    """

    kernel: str
    threads: int
    seconds: float
    num_bytes: int
    triad_share: float
    speed_up: float


@dataclass(frozen=True)
class KernelsReport:
    """Timings on `num_elements` elements; those of NumPy, on one thread, are scaled from `numpy_num_elements`."""

    machine: Machine
    num_elements: int
    block: int
    repeats: int
    ranks: int
    timings: tuple[Timing, ...]
    numpy_num_elements: int
    numpy_timings: tuple[Timing, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks as subcommands of `parser`."""
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    command = commands.add_parser(
        "kernels",
        help="time the compute kernels on this machine",
        description="Time the compute kernels against memcpy and a triad, a = b + s*c, of the same floats. On a GPU, "
        "compare the Triton kernels' bits with the host's, then time them against a copy.",
    )
    command.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu, or a GPU as torch names it: cuda, cuda:1; default: cpu"
    )
    command.add_argument("--num-elements", type=as_count, default=1 << 25, metavar="N", help="default: %(default)s")
    command.add_argument("--repeats", type=as_count, default=9, metavar="R", help="default: %(default)s")
    command.add_argument(
        "--block",
        type=as_count,
        default=wire.DEFAULT_BLOCK,
        metavar="B",
        help="elements per scale; N or more for one scale; default: %(default)s",
    )
    command.add_argument(
        "--threads",
        type=as_count,
        default=num_threads(),
        metavar="T",
        help="time them on T threads, too; default: what this process may use, %(default)s",
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


def bench_kernels(
    num_elements: int, *, repeats: int = 9, block: int = wire.DEFAULT_BLOCK, threads: int = 1
) -> KernelsReport:
    """Time memcpy, a triad, and the kernels on `num_elements` float32, on one thread and on `threads`.

    The repeats go round all of them, so that noise on the machine hits all alike. Memory: 24 bytes an element.

    Raises:
        ValueError: a number is less than 1.
    """
    if min(num_elements, repeats, threads) < 1:
        raise ValueError(
            f"num_elements, repeats and threads must be at least 1, got {num_elements}, {repeats} and {threads}"
        )
    numpy_num_elements = min(num_elements, _NUMPY_NUM_ELEMENTS)
    tasks = _tasks(_fastest(), num_elements, block)
    numpy_tasks = _tasks(kernels.implementations()["numpy"], numpy_num_elements, block)
    runs: dict[_Key, Callable[[], object]] = {}
    for count in sorted({1, threads}):
        for name, task in tasks.items():
            if count == 1 or name != _MEMCPY:  # which knows no threads
                runs["native", name, count] = partial(task.run, count)
    for name, task in numpy_tasks.items():
        runs["numpy", name, 1] = partial(task.run, 1)
    medians = _interleaved_medians(runs, repeats)
    return KernelsReport(
        machine=this_machine(),
        num_elements=num_elements,
        block=block,
        repeats=repeats,
        ranks=_RANKS,
        timings=_timings("native", tasks, medians, 1.0),
        numpy_num_elements=numpy_num_elements,
        numpy_timings=_timings("numpy", numpy_tasks, medians, num_elements / numpy_num_elements),
    )


_Key = tuple[str, str, int]  # native or NumPy, kernel, threads
_MEMCPY, _TRIAD = "memcpy", "triad"


@dataclass(frozen=True)
class _Task:
    """What is timed: a function of the number of threads, and the bytes that it reads and writes."""

    run: Callable[[int], object]
    num_bytes: int


def _timings(
    backend: str, tasks: Mapping[str, _Task], medians: Mapping[_Key, float], grown: float
) -> tuple[Timing, ...]:
    found = []
    for (of, name, threads), seconds in medians.items():
        if of == backend:
            work, triad = tasks[name].num_bytes, tasks[_TRIAD].num_bytes
            share = work / seconds / (triad / medians[of, _TRIAD, threads])
            speed_up = medians[of, name, 1] / seconds
            found.append(Timing(name, threads, grown * seconds, round(grown * work), share, speed_up))
    return tuple(found)


def _tasks(chosen: kernels.Kernels, num_elements: int, block: int) -> dict[str, _Task]:
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

    def compress(momentum: kernels.Floats | None, threads: int) -> None:
        chosen.compress(gradient, momentum, 0.9, error, message, block=block, threads=threads)

    def reduce(threads: int) -> None:
        chosen.reduce(messages, error, message, num_elements=num_elements, block=block, threads=threads)

    def average(threads: int) -> None:
        chosen.average(messages[:2], target, block=block, threads=threads)

    def apply(threads: int) -> None:
        chosen.adam_apply(
            messages[:2],
            0,
            parameter,
            target,
            variance,
            num_elements=num_elements,
            block=block,
            step_size=1e-3,
            eps=1e-8,
            threads=threads,
        )

    floats, bits = gradient.nbytes, message.nbytes
    return {
        _MEMCPY: _Task(lambda _: np.copyto(target, gradient), 2 * floats),
        _TRIAD: _Task(lambda threads: chosen.triad(target, gradient, momentum, 0.5, threads=threads), 3 * floats),
        "compress": _Task(partial(compress, None), 3 * floats + bits),
        "compress, momentum": _Task(partial(compress, momentum), 4 * floats + bits),
        f"reduce, {_RANKS} ranks": _Task(reduce, 2 * floats + (_RANKS + 1) * bits),
        "average, 2 ranks": _Task(average, floats + 2 * bits),
        "apply, 2 ranks": _Task(apply, 4 * floats + 2 * bits),
    }


def kernel_seconds(num_elements: int, *, repeats: int = 7, threads: int = 1) -> dict[str, float]:
    """Seconds of each of the fastest kernels on `num_elements` float32, by name: the least of `repeats` rounds."""
    tasks = _tasks(_fastest(), num_elements, wire.DEFAULT_BLOCK)
    rounds = _interleaved({name: partial(task.run, threads) for name, task in tasks.items()}, repeats)
    return {name: min(seconds) for name, seconds in rounds.items()}


def _interleaved_medians(tasks: Mapping[_Name, Callable[[], object]], repeats: int) -> dict[_Name, float]:
    return {name: statistics.median(seconds) for name, seconds in _interleaved(tasks, repeats).items()}


def _interleaved(tasks: Mapping[_Name, Callable[[], object]], repeats: int) -> dict[_Name, list[float]]:
    """Seconds of each task in `repeats` rounds through all of them, after one round that doesn't count."""
    seconds: dict[_Name, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - begin)
    return {name: rounds[1:] for name, rounds in seconds.items()}


def _main_kernels(args: argparse.Namespace) -> int:
    if args.device != "cpu":
        return _main_device_kernels(args)
    report = bench_kernels(args.num_elements, repeats=args.repeats, block=args.block, threads=args.threads)
    if args.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print_kernels(report)
    return 0


def _print_kernels(report: KernelsReport) -> None:
    machine = report.machine
    print(f"{machine.cpu}, {machine.cores} cores; kernels: {machine.kernels}; NumPy {machine.numpy}")
    print(
        f"{report.num_elements} float32 elements in blocks of {report.block}, median of {report.repeats}; "
        "GB/s counts what is read and written, each array once"
    )
    if report.numpy_num_elements != report.num_elements:
        print(f"NumPy fallback: measured on {report.numpy_num_elements} elements and scaled up")
    named = [(each.kernel, each) for each in report.timings]
    named += [(f"NumPy {each.kernel}", each) for each in report.numpy_timings]
    rows = [
        (
            name,
            str(each.threads),
            f"{1e3 * each.seconds:.3f}",
            f"{1e-9 * each.num_bytes / each.seconds:.2f}",
            f"{each.triad_share:.2f}",
            f"{each.speed_up:.2f}",
        )
        for name, each in named
    ]
    print_table(("kernel", "threads", "ms", "GB/s", "of triad", "x 1 thread"), rows)


def _main_device_kernels(args: argparse.Namespace) -> int:
    from hvd_onebit import bench_device

    try:
        report = bench_device.bench_device(args.device, args.num_elements, repeats=args.repeats, block=args.block)
    except RuntimeError as error:
        print(f"hvd-onebit: {args.device} cannot be measured: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(report), indent=2)) if args.json else _print_device_kernels(report)
    return 1 if report.differing else 0


def _print_device_kernels(report: DeviceReport) -> None:
    print(f"{report.device}; torch {report.torch}; Triton {report.triton}; on the host: {report.host_kernels}")
    for name in report.differing:
        print(f"NOT the host's bits: {name}")
    print(f"{report.checks - len(report.differing)} of {report.checks} checks gave the host's bits")
    print(
        f"{report.num_elements} float32 elements in blocks of {report.block}, median of {report.repeats}; GB/s counts "
        "what a kernel must read and write, each byte once"
    )
    rows = [
        (
            each.name,
            f"{1e3 * each.seconds:.3f}",
            f"{1e-9 * each.num_bytes / each.seconds:.1f}",
            f"{each.share_of_copy:.2f}",
        )
        for each in report.times
    ]
    print_table(("kernel", "ms", "GB/s", "share of copy"), rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
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
