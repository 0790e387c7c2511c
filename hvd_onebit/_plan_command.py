"""The command `hvd-onebit plan`: what the cost model says about a cluster, with this machine's kernels."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from hvd_onebit import planner
from hvd_onebit._arguments import as_count, as_rate, as_seconds
from hvd_onebit.bench import kernel_seconds, print_table
from hvd_onebit.hosts import AUTO_LEAST_RANKS
from hvd_onebit.threads import num_threads

__all__ = ["add_arguments", "main"]

_MEASURED_ELEMENTS = 4 * 2**20  # larger than a cache, and timed in a second
_SERVED_RANKS = 8  # of the benchmark's reduce


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `hvd-onebit plan`."""
    parser.add_argument(
        "--num-elements",
        type=as_count,
        required=True,
        metavar="N",
        help="parameters of the model: 25000000, 25M, ...",
    )
    parser.add_argument("--hosts", type=as_count, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--ranks-per-host", type=as_count, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rate", type=as_rate, default="1gbit", help="of a host's link (default: %(default)s)")
    parser.add_argument(
        "--latency-us",
        type=as_seconds,
        default=50.0,
        metavar="US",
        help="of a message, in microseconds (default: 50)",
    )
    parser.add_argument(
        "--compute-seconds",
        type=as_seconds,
        metavar="S",
        help="of a step without communication, to predict the whole",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Measures the kernels, and prints the estimates and the verdict."""
    try:
        if args.rate.bits_per_second is None:
            raise ValueError("the model needs a rate; for what this machine's memory does: hvd-onebit bench network")
        cluster = planner.Cluster(
            args.hosts, args.ranks_per_host, args.rate.bits_per_second, latency_seconds=1e-6 * args.latency_us
        )
        threads = num_threads()
        plan = planner.make_plan(cluster, args.num_elements, _measure(threads))
    except ValueError as error:
        print(f"hvd-onebit plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        found = {**asdict(plan), "best": plan.best.method, "saved_seconds": plan.saved_seconds, "pays": plan.pays}
        print(json.dumps(found, indent=2))
        return 0
    ranks = f"{args.ranks_per_host} rank{'s' if args.ranks_per_host > 1 else ''} each"
    hosts = f"{args.hosts} host{'s' if args.hosts > 1 else ''}"
    print(
        f"{args.num_elements:,} parameters, {hosts} with {ranks}, {args.rate.name}, {args.latency_us:g} us; "
        f"kernels as fast as timed here just now, {threads} thread{'s' if threads > 1 else ''} a rank"
    )
    if args.hosts == 1:
        print("Ranks of one host do not use a link: compression does not pay there.")
        return 0
    rows = [
        (each.method, *(f"{value:,.1f}" for value in (each.link_bytes / 1e6, *_milliseconds(each))))
        for each in (plan.float32, *plan.compressed)
    ]
    print_table(("a step", "MB a host sends", "wire, ms", "kernels, ms", "together, ms"), rows)
    print(planner.verdict(plan))
    if args.compute_seconds is not None:
        print(_prediction(plan, args.compute_seconds))
    if args.ranks_per_host >= AUTO_LEAST_RANKS:
        megabytes = planner.hierarchical_bytes(cluster, args.num_elements) / 1e6
        print(
            f"Counted among all ranks alike. By default {args.ranks_per_host} ranks of a host exchange hierarchically: "
            f"a host then sends {megabytes:,.1f} MB."
        )
    print(
        "A model, not a measurement: of float32 only the wire is counted, not its own work on the processor. "
        "hvd-onebit bench network measures on this machine."
    )
    return 0


def _measure(threads: int) -> planner.KernelSpeeds:
    seconds = kernel_seconds(_MEASURED_ELEMENTS, threads=threads)
    per_element = {name: each / _MEASURED_ELEMENTS for name, each in seconds.items()}
    compress = per_element["compress"]
    served = per_element[f"reduce, {_SERVED_RANKS} ranks"] - compress
    return planner.KernelSpeeds(
        compress=per_element["compress, momentum"],
        decode=per_element["average, 2 ranks"] / 2,
        reduce=max(served, 0.0) / _SERVED_RANKS,
    )


def _milliseconds(estimate: planner.Estimate) -> tuple[float, float, float]:
    return 1e3 * estimate.wire_seconds, 1e3 * estimate.kernel_seconds, 1e3 * estimate.seconds


def _prediction(plan: planner.Plan, compute_seconds: float) -> str:
    float32, best = plan.float32, plan.best
    in_turn = (compute_seconds + float32.seconds) / (compute_seconds + best.seconds)
    overlapped = max(compute_seconds, float32.wire_seconds) / max(
        compute_seconds + best.kernel_seconds, best.wire_seconds
    )
    text = (
        f"With {compute_seconds:g} s of computation a step is {in_turn:.2f} times as fast if nothing overlaps, "
        f"{overlapped:.2f} times if the network works while the processor does."
    )
    if plan.pays and overlapped < 1.0:
        text += " So it does not pay where float32's allreduce hides behind the computation."
    return text
