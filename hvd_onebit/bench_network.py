"""`hvd-onebit bench network`: compressed against plain communication, over links as slow as real ones.

Hosts are network namespaces on this machine (`netlab.py`), joined by links of each rate in turn, and the real
horovodrun runs across them. In each run two things are measured, in rounds through all methods, each of which runs
twice in its turn and is timed the second time:

    exchange    averaging N float32: Horovod's allreduce of one tensor, in place; the same through float16, casts
                included; ours, with compression, error feedback and decoding
    loop        training steps of a perceptron with AdamW: without communication, with Horovod's optimizer as float32
                and as float16, and with ours in its compression stage, without and with overlap

Where there are several hosts with several ranks each, ours is measured in both ways, flat and hierarchical.

Bytes are those that a host's interface has sent, with TCP's and Ethernet's headers as far as it counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hvd_onebit._arguments import as_count, as_rate, as_seconds
from hvd_onebit._bench_network_worker import EXCHANGE_METHODS, HIERARCHICAL, LOOP_METHODS, Observed, Task
from hvd_onebit._processes import CommandError
from hvd_onebit._progress import Progress, log_tail
from hvd_onebit.bench import Machine, this_machine
from hvd_onebit.netlab import LabError, NetworkLab, Rate, parse_rate
from hvd_onebit.options import AUTO, CompressionOptions

__all__ = ["LoopReport", "NetworkReport", "RateReport", "add_command", "bench_network"]

_WORKER = "hvd_onebit._bench_network_worker"
_PARTS = ("exchange", "loop")
_TITLES = {
    "no_communication": "no communication",
    "horovod_float32": "Horovod float32",
    "horovod_float16": "Horovod float16",
    "onebit": "1-bit",
    "onebit_overlap": "1-bit, overlap",
    HIERARCHICAL: "1-bit, hierarchical",
}


@dataclass(frozen=True)
class LoopReport:
    """A training loop at one rate.

    Attributes:
        model_elements: the model's parameters.
        batch: samples a rank takes a step.
        samples_per_second: of all ranks together, by method, from the median step.
        bytes_on_link: bytes that a host sends a step, by method, the median.
        step_seconds: each counted step, by method.
    """

    model_elements: int
    batch: int
    samples_per_second: dict[str, float]
    bytes_on_link: dict[str, float]
    step_seconds: dict[str, list[float]]


@dataclass(frozen=True)
class RateReport:
    """What was measured at one rate; medians, None where it was not measured.

    Attributes:
        rate: the rate's name.
        bits_per_second: None: unshaped.
        num_elements: float32 elements that the exchanges average.
        horovod_float32_seconds: Horovod's allreduce of them.
        horovod_float16_seconds: through hvd.Compression.fp16.
        onebit_seconds: compressed, from the gradients to the average, on all ranks; all ranks alike.
        onebit_hierarchical_seconds: the same, averaged inside the hosts first.
        horovod_float32_bytes_on_link: bytes that a host sends for it.
        horovod_float16_bytes_on_link: the same.
        onebit_bytes_on_link: the same.
        onebit_hierarchical_bytes_on_link: the same.
        onebit_split: seconds that a rank is busy with compress, reduce, decode and other things, or waits.
        onebit_hierarchical_split: the same of the hierarchical exchange; empty where there is none.
        onebit_link_busy: the share of onebit_seconds in which a host's link is sending; None if unshaped.
        onebit_hierarchical_link_busy: the same of the hierarchical exchange; None where there is none.
        speedup: of ours over Horovod's float32: below 1, compression does not pay.
        exchange_seconds: each counted round, by method.
        loop: the training loop.
    """

    rate: str
    bits_per_second: float | None
    num_elements: int
    horovod_float32_seconds: float | None = None
    horovod_float16_seconds: float | None = None
    onebit_seconds: float | None = None
    onebit_hierarchical_seconds: float | None = None
    horovod_float32_bytes_on_link: float | None = None
    horovod_float16_bytes_on_link: float | None = None
    onebit_bytes_on_link: float | None = None
    onebit_hierarchical_bytes_on_link: float | None = None
    onebit_split: dict[str, float] = field(default_factory=dict)
    onebit_hierarchical_split: dict[str, float] = field(default_factory=dict)
    onebit_link_busy: float | None = None
    onebit_hierarchical_link_busy: float | None = None
    speedup: float | None = None
    exchange_seconds: dict[str, list[float]] = field(default_factory=dict)
    loop: LoopReport | None = None


@dataclass(frozen=True)
class NetworkReport:
    """All rates, and on what they were measured."""

    machine: Machine
    hosts: int
    ranks_per_host: int
    repeats: int
    bucket_elements: int
    exchange: str
    rates: tuple[RateReport, ...] = ()


def bench_network(
    rates: Sequence[Rate],
    *,
    hosts: int,
    ranks_per_host: int,
    task: Task,
    log: Path,
    progress: Progress,
    timeout_seconds: float | None = None,
) -> Generator[RateReport, None, None]:
    """Makes the network, measures at each rate, and yields what it found; the network is there until the end.

    Args:
        rates: of every host's link.
        hosts: number of hosts.
        ranks_per_host: ranks on each.
        task: what to measure.
        log: file that the ranks' output is appended to.
        progress: where to say how far it has come.
        timeout_seconds: limit for one rate; None for none.

    Raises:
        LabError: there can't be such a network here.
        CommandError: a run failed.
    """
    with NetworkLab(hosts) as lab:
        for rate in rates:
            lab.set_rate(rate)
            with progress.phase(f"{hosts} hosts with {_ranks(ranks_per_host)} each, {rate.name}"):
                by_rank = _run(lab, task, ranks_per_host, log, progress, timeout_seconds)
            yield _report(rate, task, by_rank)


def _run(
    lab: NetworkLab, task: Task, ranks_per_host: int, log: Path, progress: Progress, timeout_seconds: float | None
) -> list[dict[str, Observed]]:
    """What each rank observed."""
    with tempfile.TemporaryDirectory(prefix="hvd-onebit-bench-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
        lab.horovodrun(
            [sys.executable, "-m", _WORKER, str(folder / "task.json"), name],
            ranks_per_host=ranks_per_host,
            log=log,
            cwd=Path.cwd(),
            environment={"OMP_NUM_THREADS": "1"},
            timeout_seconds=timeout_seconds,
            on_tick=progress.tick,
        )
        ranks = range(len(lab.hosts) * ranks_per_host)
        written = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in ranks]
    return [{part: Observed.load(values) for part, values in each.items()} for each in written]


def _report(rate: Rate, task: Task, by_rank: Sequence[Mapping[str, Observed]]) -> RateReport:
    measured: dict[str, Any] = {}
    if "exchange" in task.what:
        measured.update(_exchange_figures(rate, [each["exchange"] for each in by_rank]))
    if "loop" in task.what:
        measured["loop"] = _loop_report([each["loop"] for each in by_rank])
    return RateReport(rate.name, rate.bits_per_second, task.num_elements, **measured)


def _exchange_figures(rate: Rate, by_rank: Sequence[Observed]) -> dict[str, Any]:
    seconds = {method: _slowest(by_rank, method) for method in EXCHANGE_METHODS if method in by_rank[0].seconds}
    figures: dict[str, Any] = {"exchange_seconds": seconds}
    for method in seconds:
        figures[f"{method}_seconds"] = statistics.median(seconds[method])
        figures[f"{method}_bytes_on_link"] = _bytes_on_link(by_rank, method)
    for method, parts in by_rank[0].split.items():
        figures[f"{method}_split"] = {
            part: statistics.mean(statistics.median(each.split[method][part]) for each in by_rank) for part in parts
        }
    for method in by_rank[0].split if rate.bits_per_second is not None else ():
        sending = 8 * figures[f"{method}_bytes_on_link"] / rate.bits_per_second
        figures[f"{method}_link_busy"] = sending / figures[f"{method}_seconds"]
    figures["speedup"] = figures["horovod_float32_seconds"] / figures["onebit_seconds"]
    return figures


def _loop_report(by_rank: Sequence[Observed]) -> LoopReport:
    first = by_rank[0]
    seconds = {method: _slowest(by_rank, method) for method in first.seconds}
    samples = first.batch * len(by_rank)
    return LoopReport(
        model_elements=first.num_elements,
        batch=first.batch,
        samples_per_second={method: samples / statistics.median(each) for method, each in seconds.items()},
        bytes_on_link={method: _bytes_on_link(by_rank, method) for method in seconds},
        step_seconds=seconds,
    )


def _slowest(by_rank: Sequence[Observed], method: str) -> list[float]:
    """Each round's time until the last rank was done."""
    return [max(each) for each in zip(*(rank.seconds[method] for rank in by_rank), strict=True)]


def _bytes_on_link(by_rank: Sequence[Observed], method: str) -> float:
    """The median bytes of the host that sends most."""
    return max(float(statistics.median(rank.bytes_sent[method])) for rank in by_rank)


# -- the command -------------------------------------------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """Add `network` to the subcommands of `bench`."""
    command = commands.add_parser(
        "network",
        help="measure exchanges and training between hosts with slow links (Linux, root)",
        description="Measure Horovod's float32 and float16 and 1-bit compression between hosts whose links have a "
        "given rate, alone and in a training loop. The hosts are network namespaces on this machine: making them needs "
        "root. They are removed at the end, also when interrupted.",
    )
    command.add_argument("--hosts", type=as_count, default=2, metavar="H", help="default: %(default)s")
    command.add_argument("--ranks-per-host", type=as_count, default=1, metavar="K", help="default: %(default)s")
    command.add_argument(
        "--rate",
        type=as_rate,
        action="append",
        metavar="RATE",
        help='of every link: "100mbit", "1gbit", ... or "unshaped"; may be given several times; default: 1gbit',
    )
    command.add_argument(
        "--num-elements",
        type=as_count,
        default=25_000_000,
        metavar="N",
        help="to average; default: %(default)s",
    )
    command.add_argument("--repeats", type=as_count, default=5, metavar="R", help="default: %(default)s")
    command.add_argument("--what", choices=[*_PARTS, "all"], default="all", help="default: %(default)s")
    command.add_argument(
        "--model-elements",
        type=as_count,
        default=25_000_000,
        metavar="M",
        help="parameters of the loop's model, about; default: %(default)s",
    )
    command.add_argument(
        "--step-seconds",
        type=as_seconds,
        default=0.5,
        metavar="S",
        help="the batch is made as large as a training step without communication takes; default: %(default)s",
    )
    defaults = CompressionOptions()
    command.add_argument(
        "--bucket-elements",
        type=lambda text: text if text == AUTO else as_count(text),
        default=defaults.bucket_elements,
        metavar="B",
        help="elements of a compressed bucket, or auto; default: %(default)s",
    )
    command.add_argument(
        "--exchange", choices=["auto", "one_shot", "two_phase"], default=defaults.exchange, help="default: %(default)s"
    )
    command.add_argument(
        "--timeout",
        type=as_seconds,
        default=1800.0,
        metavar="S",
        help="seconds for one rate; default: %(default)g",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    command.add_argument("--out", type=Path, metavar="DIR", help="write network.log and the plot network.png there")
    command.set_defaults(run_bench=_main)


def _main(args: argparse.Namespace) -> int:
    task = Task(
        num_elements=args.num_elements,
        repeats=args.repeats,
        bucket_elements=args.bucket_elements,
        exchange=args.exchange,
        model_elements=args.model_elements,
        step_seconds=args.step_seconds,
        what=_PARTS if args.what == "all" else (args.what,),
    )
    report = NetworkReport(
        machine=this_machine(),
        hosts=args.hosts,
        ranks_per_host=args.ranks_per_host,
        repeats=task.repeats,
        bucket_elements=task.options().bucket_size(task.num_elements),
        exchange=task.options().algorithm(args.hosts * args.ranks_per_host),
    )
    progress = Progress(sys.stderr)
    status = 0
    try:
        with _log_file(args.out) as log:
            measuring = bench_network(
                args.rate or [parse_rate("1gbit")],
                hosts=args.hosts,
                ranks_per_host=args.ranks_per_host,
                task=task,
                log=log,
                progress=progress,
                timeout_seconds=args.timeout,
            )
            try:
                with contextlib.closing(measuring):
                    for measured in measuring:
                        report = replace(report, rates=(*report.rates, measured))
                        # after every rate: what took minutes to measure is not lost with the next one
                        if args.json is not None:
                            args.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
            except CommandError as error:
                status = 1
                progress.say(f"{error}. The end of the ranks' output:")
                for line in log_tail(log):
                    _say(line, sys.stderr)
        if report.rates:
            for line in _lines(report):
                _say(line)
            if args.out is not None:
                _say(_plot(report, args.out / "network.png"))
    except (LabError, ValueError, OSError) as error:
        _say(f"hvd-onebit: {error}", sys.stderr)
        return 1
    return status


@contextlib.contextmanager
def _log_file(folder: Path | None) -> Iterator[Path]:
    """The file for the ranks' output: in `folder`, or one that is removed at the end."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "network.log"
        log.write_text("", encoding="utf-8")
        yield log
        return
    with tempfile.TemporaryDirectory(prefix="hvd-onebit-bench-") as name:
        log = Path(name) / "network.log"
        log.touch()
        yield log


def _lines(report: NetworkReport) -> Iterator[str]:
    machine = report.machine
    yield f"{machine.cpu}, {machine.cores} cores; kernels: {machine.kernels}; NumPy {machine.numpy}"
    yield (
        f"{report.hosts} hosts with {_ranks(report.ranks_per_host)} each, all on this machine; 1-bit: "
        f"{report.exchange}; median of {report.repeats}"
    )
    measured = [each for each in report.rates if each.onebit_seconds is not None]
    if measured:
        yield ""
        yield (
            f"Averaging {measured[0].num_elements} float32 elements, 1-bit in buckets of {report.bucket_elements}: "
            "seconds (bytes that a host sends)"
        )
        methods = _measured_exchanges(measured[0])
        yield from _table(
            ("rate", *(_TITLES[method] for method in methods)), [_exchange_row(each, methods) for each in measured]
        )
        yield ""
        yield "Where a rank's time goes in the 1-bit exchange, in seconds; share of the time that the link is busy"
        parts = list(measured[0].onebit_split)
        rows = []
        for each in measured:
            rows.append((each.rate, *_cells(each.onebit_split, parts), _share(each.onebit_link_busy)))
            if each.onebit_hierarchical_split:
                busy = _share(each.onebit_hierarchical_link_busy)
                rows.append((f"{each.rate}, hierarchical", *_cells(each.onebit_hierarchical_split, parts), busy))
        yield from _table(("rate", *parts, "link busy"), rows)
        yield ""
        for each in measured:
            yield _exchange_verdict(each)
            if each.onebit_hierarchical_seconds is not None:
                yield _hierarchical_verdict(each)
    loops = [(each.rate, each.loop) for each in report.rates if each.loop is not None]
    if loops:
        methods = _measured(loops[0][1].samples_per_second)
        yield ""
        elements = loops[0][1].model_elements
        yield f"Training {elements} parameters with AdamW: samples a second (bytes that a host sends a step)"
        yield from _table(
            ("rate", *(_TITLES[method] for method in methods)),
            [
                (rate, *(f"{loop.samples_per_second[m]:.1f} ({_short(loop.bytes_on_link[m])})" for m in methods))
                for rate, loop in loops
            ],
        )
        yield ""
        yield from (_loop_verdict(rate, loop) for rate, loop in loops)


def _measured_exchanges(report: RateReport) -> list[str]:
    return [method for method in EXCHANGE_METHODS if method in report.exchange_seconds]


def _exchange_row(report: RateReport, methods: Sequence[str]) -> tuple[str, ...]:
    values = asdict(report)
    cells = [f"{values[f'{m}_seconds']:.4f} ({_short(values[f'{m}_bytes_on_link'])})" for m in methods]
    return (report.rate, *cells)


def _cells(split: Mapping[str, float], parts: Sequence[str]) -> list[str]:
    return [f"{split[part]:.4f}" for part in parts]


def _hierarchical_verdict(report: RateReport) -> str:
    assert report.onebit_hierarchical_seconds is not None
    assert report.onebit_hierarchical_bytes_on_link is not None
    assert report.onebit_seconds is not None
    assert report.onebit_bytes_on_link is not None
    speed = report.onebit_seconds / report.onebit_hierarchical_seconds
    sent = report.onebit_hierarchical_bytes_on_link / report.onebit_bytes_on_link
    return (
        f"{report.rate}: hierarchical, a host sends {_share(sent)} of the bytes of 1-bit among all ranks alike, and it "
        f"is {speed:.2f} times as fast"
    )


def _exchange_verdict(report: RateReport) -> str:
    assert report.onebit_seconds is not None
    assert report.horovod_float32_seconds is not None
    assert report.horovod_float16_seconds is not None
    plain = {"float32": report.horovod_float32_seconds, "float16": report.horovod_float16_seconds}
    best = min(plain, key=lambda name: plain[name])
    ratio = plain[best] / report.onebit_seconds
    if ratio < 1.0:
        return (
            f"{report.rate}: compression does not pay: it takes {1 / ratio:.2f} times as long as Horovod's {best}, "
            f"{1e3 * (report.onebit_seconds - plain[best]):.1f} ms more"
        )
    faster = [
        f"{seconds / report.onebit_seconds:.1f} times as fast as Horovod's {name}" for name, seconds in plain.items()
    ]
    return f"{report.rate}: 1-bit is {' and '.join(faster)}"


def _loop_verdict(rate: str, loop: LoopReport) -> str:
    speeds = loop.samples_per_second
    ours = max((method for method in speeds if method.startswith("onebit")), key=lambda method: speeds[method])
    plain = max(("horovod_float32", "horovod_float16"), key=lambda method: speeds[method])
    ratio = speeds[ours] / speeds[plain]
    reached = f"{_share(speeds[ours] / speeds['no_communication'])} of the speed without communication"
    if ratio < 1.0:
        return (
            f"{rate}: compression does not pay: {_TITLES[ours]} trains at {_share(ratio)} of the speed of "
            f"{_TITLES[plain]}; it reaches {reached}"
        )
    return f"{rate}: {_TITLES[ours]} trains {ratio:.2f} times as fast as {_TITLES[plain]}; it reaches {reached}"


def _table(header: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Iterator[str]:
    """Names in the first column, figures in the others."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        figures = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        yield "  ".join([line[0].ljust(widths[0]), *figures])


def _measured(by_method: Mapping[str, float]) -> list[str]:
    return [method for method in LOOP_METHODS if method in by_method]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _short(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _plot(report: NetworkReport, path: Path) -> str:
    """Draws seconds and samples a second over the rates; returns what to tell the user."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return 'No plot: matplotlib is not installed (pip install "hvd-onebit[demo]")'
    exchanges = [each for each in report.rates if each.onebit_seconds is not None]
    loops = [(each.rate, each.loop.samples_per_second) for each in report.rates if each.loop is not None]
    figure = Figure(figsize=(6.4 * (bool(exchanges) + bool(loops)), 4.8), layout="constrained")
    axes = iter(figure.subplots(1, bool(exchanges) + bool(loops), squeeze=False)[0])
    if exchanges:
        methods = _measured_exchanges(exchanges[0])
        by_method = {m: [asdict(each)[f"{m}_seconds"] for each in exchanges] for m in methods}
        title = f"averaging {exchanges[0].num_elements:,} float32 elements"
        _bars(next(axes), [each.rate for each in exchanges], by_method, title, "seconds", log=True)
    if loops:
        by_method = {m: [speeds[m] for _, speeds in loops] for m in _measured(loops[0][1])}
        _bars(next(axes), [rate for rate, _ in loops], by_method, "training", "samples a second", log=False)
    figure.suptitle(f"{report.hosts} hosts, {_ranks(report.ranks_per_host)} each")
    figure.savefig(path, dpi=120)
    return f"Plot: {path}"


def _bars(
    axes: Any, rates: Sequence[str], by_method: Mapping[str, Sequence[float]], title: str, unit: str, *, log: bool
) -> None:
    width = 0.8 / len(by_method)
    for i, (method, values) in enumerate(by_method.items()):
        places = [place + (i - (len(by_method) - 1) / 2) * width for place in range(len(rates))]
        bars = axes.bar(places, values, width, label=_TITLES[method])
        axes.bar_label(bars, fmt=_three_digits, fontsize="small")
    if log:
        axes.set_yscale("log", subs=[2, 5])
        axes.margins(y=0.15)
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(_three_digits)
    axes.set_xticks(range(len(rates)), rates)
    axes.set(title=title, ylabel=unit, xlabel="rate of every host's link")
    axes.legend()


def _three_digits(value: float, _position: object = None) -> str:
    """0.221, 3.47, 540: numbers as people write them."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _say(line: str, stream: Any = None) -> None:
    (stream or sys.stdout).write(line + "\n")
