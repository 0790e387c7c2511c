"""What every rank of `hvd-onebit bench network` runs: python -m hvd_onebit._bench_network_worker TASK.json RESULTS_DIR.

Every measurement goes in rounds through all methods, with a barrier before each, so that noise on the machine hits all
alike. A rank writes what it saw to RESULTS_DIR/rank-N.json.
"""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_onebit.errors import OneBitError
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.hosts import HostGroups, hierarchical_place
from hvd_onebit.layout import Bucket
from hvd_onebit.options import CompressionOptions
from hvd_onebit.stats import Stats
from hvd_onebit.step import Inputs, StepExchange

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["EXCHANGE_METHODS", "HIERARCHICAL", "LOOP_METHODS", "Observed", "Task"]

HIERARCHICAL = "onebit_hierarchical"  # measured where there are several hosts with several ranks each
EXCHANGE_METHODS = ("horovod_float32", "horovod_float16", "onebit", HIERARCHICAL)
LOOP_METHODS = ("no_communication", "horovod_float32", "horovod_float16", "onebit", "onebit_overlap", HIERARCHICAL)
SPLIT = ("compress", "wait", "reduce", "decode", "other")

_FREEZE_STEP = 1
_WARM_UP_STEPS = 3  # more than _FREEZE_STEP: nothing of the full-precision stage is measured
_LEARNING_RATE = 1e-7  # so short a warm-up leaves no variance to train with: steps are timed, and the loss stays finite
_MAX_CALIBRATIONS = 8


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes:
        num_elements: float32 elements that the exchanges average.
        repeats: rounds that count; one more goes before them.
        bucket_elements: CompressionOptions.bucket_elements.
        exchange: CompressionOptions.exchange.
        model_elements: parameters of the training loop's model, about.
        step_seconds: least time that a training step computes.
        what: "exchange" and "loop", or one of them.
    """

    num_elements: int
    repeats: int
    bucket_elements: int | str
    exchange: str
    model_elements: int
    step_seconds: float
    what: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> Task:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "what": tuple(values["what"])})

    def options(self, *, hierarchical: bool = False) -> CompressionOptions:
        """What our exchanges are made with."""
        return CompressionOptions(
            exchange=self.exchange, bucket_elements=self.bucket_elements, hierarchical=hierarchical
        )


@dataclass
class Observed:
    """One rank's measurements, a list of rounds for each method.

    Attributes:
        seconds: from the barrier until this rank had the result.
        bytes_sent: by this rank's host, as the interface counts them.
        split: seconds of the parts of our exchanges, by method and part.
        num_elements: elements averaged, or parameters of the model.
        batch: samples a rank takes a step.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    bytes_sent: dict[str, list[int]] = field(default_factory=dict)
    split: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    num_elements: int = 0
    batch: int = 0

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Observed:
        return cls(**{each.name: values[each.name] for each in fields(cls)})


def main(arguments: Sequence[str]) -> None:
    """Measures what the task asks for. Collective: every rank runs it with the same task."""
    import horovod.torch as hvd
    import torch

    task, results = Task.load(Path(arguments[0])), Path(arguments[1])
    hvd.init()
    torch.manual_seed(hvd.rank())
    measure = {"exchange": _measure_exchange, "loop": _measure_loop}
    observed = {what: vars(measure[what](task)) for what in task.what}
    (results / f"rank-{hvd.rank()}.json").write_text(json.dumps(observed), encoding="utf-8")
    hvd.shutdown()


def _rounds(
    methods: Mapping[str, Callable[[], None]],
    repeats: int,
    observed: Observed,
    take_split: Callable[[str], Mapping[str, float]] = lambda name: {},
) -> None:
    """Times each method once a round; the first round does not count.

    A method runs once more right before, untimed, as in a training, where the last step has used the same memory: a
    virtual machine may be slow with memory that was left alone for seconds, while the other methods had their turn.

    Args:
        methods: by name.
        repeats: the rounds that count.
        observed: gets the seconds, the bytes, and the split.
        take_split: gives the seconds of a method's parts since it was asked last.
    """
    import horovod.torch as hvd

    for number in range(repeats + 1):
        for name, method in methods.items():
            method()
            take_split(name)
            hvd.barrier()
            sent, begin = _bytes_sent(), time.perf_counter()
            method()
            seconds = time.perf_counter() - begin
            hvd.barrier()
            if number:
                observed.seconds.setdefault(name, []).append(seconds)
                observed.bytes_sent.setdefault(name, []).append(_bytes_sent() - sent)
                for part, spent in take_split(name).items():
                    observed.split.setdefault(name, {}).setdefault(part, []).append(spent)


def _bytes_sent() -> int:
    """Bytes that this host's interface has sent."""
    with open("/proc/self/net/dev", encoding="ascii") as lines:
        for line in lines:
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
    raise OneBitError("this host has no interface eth0")


# -- the exchange alone ------------------------------------------------------------------------------------------------


def _measure_exchange(task: Task) -> Observed:
    """Averaging `num_elements` float32: one tensor in place by Horovod, buckets by us, the error feedback included."""
    import horovod.torch as hvd
    import torch

    from hvd_onebit.torch.codec import codec_for

    gradient = codec_for(torch.device("cpu")).zeros(task.num_elements).normal_()  # in memory as the buckets' own
    observed = Observed(num_elements=task.num_elements)

    def horovod_float32() -> None:
        hvd.allreduce_(gradient, op=hvd.Average, name="bench.float32")

    def horovod_float16() -> None:
        half, kind = hvd.Compression.fp16.compress(gradient)
        gradient.copy_(
            hvd.Compression.fp16.decompress(hvd.allreduce_(half, op=hvd.Average, name="bench.float16"), kind)
        )

    ours = {
        name: _OneBitExchange(name, task.options(hierarchical=name == HIERARCHICAL), gradient)
        for name in _present(("onebit", HIERARCHICAL))
    }
    methods: dict[str, Callable[[], None]] = {"horovod_float32": horovod_float32, "horovod_float16": horovod_float16}
    methods.update((name, exchange.run) for name, exchange in ours.items())
    _rounds(methods, task.repeats, observed, lambda name: ours[name].take_split() if name in ours else {})
    for name, exchange in ours.items():
        values: Any = exchange.values.numpy()
        checksums = hvd.allgather(torch.tensor([zlib.crc32(values)]), name=f"bench.checksum.{name}")
        if len(set(checksums.tolist())) != 1:
            raise OneBitError(f"ranks hold different averages after the exchange {name}")
    return observed


def _present(methods: Sequence[str]) -> list[str]:
    """Those that can be measured here."""
    import horovod.torch as hvd

    return [name for name in methods if name != HIERARCHICAL or (hvd.cross_size() > 1 and hvd.local_size() > 1)]


class _OneBitExchange:
    """The compressed allreduce of one flat tensor, cut into buckets, with the time of its parts."""

    def __init__(self, name: str, options: CompressionOptions, gradient: Tensor) -> None:
        import horovod.torch as hvd

        from hvd_onebit.torch.codec import codec_for
        from hvd_onebit.torch.transport import HorovodTransport

        self._seconds = dict.fromkeys(SPLIT, 0.0)
        transport: Any = _Watched(HorovodTransport(hvd.global_process_set), self._seconds)
        codec: Any = _Clocked(codec_for(gradient.device), self._seconds)
        self.values = codec.zeros(len(gradient))
        place = hierarchical_place(options, transport.place)
        groups: HostGroups[Any] | None = None if place is None else HostGroups(transport, place)
        if groups is not None:
            groups.connect()
        self._step: StepExchange[Any] = StepExchange(transport, Stats(), groups)
        self._parts: list[tuple[CompressedAllreduce[Any], Tensor, Tensor]] = []
        size = options.bucket_size(len(gradient))
        for start in range(0, len(gradient), size):
            part, values = (each[start : start + size] for each in (gradient, self.values))
            shared = None if place is None else transport.shared_zeros(len(part))
            if shared is not None:
                part = shared.copy_(part)  # as an optimizer's buckets lie
            bucket = Bucket(f"bench.{name}.{start}", ("gradient",), (len(part),))
            exchange = CompressedAllreduce(
                bucket, rank=hvd.rank(), size=hvd.size(), codec=codec, options=options, place=place
            )
            self._parts.append((exchange, part, values))

    def run(self) -> None:
        begin = time.perf_counter()
        for exchange, part, _ in self._parts:
            self._step.start(exchange, Inputs.of(part))
            self._step.progress()
        for (exchange, is_finite), (_, _, values) in zip(self._step.arrivals(), self._parts, strict=True):
            if not is_finite:
                raise OneBitError("the exchange met a value that is not finite")
            exchange.average(values)  # while later buckets are on the wire
        self._step.commit()
        self._seconds["other"] = time.perf_counter() - begin - sum(self._seconds.values())

    def take_split(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        split = dict(self._seconds)
        self._seconds.update(dict.fromkeys(SPLIT, 0.0))
        return split


class _Clocked:
    """A codec, with the time spent in each kernel."""

    def __init__(self, codec: Any, seconds: dict[str, float]) -> None:
        self._codec = codec
        self.compress = _clocked(codec.compress, "compress", seconds)
        self.reduce = _clocked(codec.reduce, "reduce", seconds)
        self.average = _clocked(codec.average, "decode", seconds)
        self.scales_finite = _clocked(codec.scales_finite, "decode", seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


class _Watched:
    """A transport, with the time spent waiting for results."""

    def __init__(self, transport: Any, seconds: dict[str, float]) -> None:
        self._transport = transport
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def subgroup(self, *args: Any, **kwargs: Any) -> _Watched:
        return _Watched(self._transport.subgroup(*args, **kwargs), self._seconds)

    def gather_parts(self, *args: Any, **kwargs: Any) -> _WatchedPending:
        return _WatchedPending(self._transport.gather_parts(*args, **kwargs), self._seconds)

    def alltoall(self, *args: Any, **kwargs: Any) -> _WatchedPending:
        return _WatchedPending(self._transport.alltoall(*args, **kwargs), self._seconds)

    def allgather(self, *args: Any, **kwargs: Any) -> _WatchedPending:
        return _WatchedPending(self._transport.allgather(*args, **kwargs), self._seconds)


class _WatchedPending:
    def __init__(self, pending: Any, seconds: dict[str, float]) -> None:
        self._pending = pending
        self.wait = _clocked(pending.wait, "wait", seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)


def _clocked(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - begin

    return run


# -- a training loop ---------------------------------------------------------------------------------------------------


def _measure_loop(task: Task) -> Observed:
    """Steps of AdamW on a multilayer perceptron, from clearing the gradients to the updated parameters."""
    loops = {name: _Loop(name, task) for name in _present(LOOP_METHODS)}
    batch = _calibrated_batch(loops["no_communication"], task.step_seconds)
    for loop in loops.values():
        loop.use_batch(batch)
        for _ in range(_WARM_UP_STEPS):
            loop.step()
    observed = Observed(num_elements=loops["no_communication"].num_elements, batch=batch)
    _rounds({name: loop.step for name, loop in loops.items()}, task.repeats, observed)
    for name, loop in loops.items():
        if not math.isfinite(loop.loss):
            raise OneBitError(f"the loop with {name} has diverged: its steps are not those of a training")
        if "onebit" in name and (loop.optimizer.stats.stage != "compression" or loop.optimizer.stats.steps_skipped):
            raise OneBitError(f"the loop with {name} was not in the compression stage, or skipped steps")
    return observed


class _Loop:
    """One method's model, optimizer and data."""

    def __init__(self, method: str, task: Task) -> None:
        import torch

        torch.manual_seed(0)
        self._model, self._width = _perceptron(task.model_elements)
        self.num_elements = sum(p.numel() for p in self._model.parameters())
        self.loss = 0.0
        self.optimizer = _optimizer(method, self._model, task)
        self.use_batch(1)

    def use_batch(self, batch: int) -> None:
        import torch

        self._inputs, self._targets = torch.randn(batch, self._width), torch.randn(batch, self._width)

    def step(self) -> None:
        from torch.nn.functional import mse_loss

        self.optimizer.zero_grad()
        loss = mse_loss(self._model(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss = float(loss)


def _perceptron(num_elements: int) -> tuple[nn.Module, int]:
    """Square layers with ReLU, about `num_elements` parameters, eight layers or more where that many allow it."""
    from torch import nn

    width = 2 ** max(2, int(math.log2(max(num_elements, 32) / 8) / 2))
    depth = max(1, round(num_elements / (width * width + width)))
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), width


def _optimizer(method: str, model: nn.Module, task: Task) -> Any:
    import horovod.torch as hvd
    import torch

    import hvd_onebit.torch as onebit

    adam = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    named = list(model.named_parameters())
    if method == "no_communication":
        return adam
    if method.startswith("horovod"):
        kind = hvd.Compression.fp16 if method == "horovod_float16" else hvd.Compression.none
        return hvd.DistributedOptimizer(adam, named_parameters=named, compression=kind)
    return onebit.DistributedOptimizer(
        adam,
        named_parameters=named,
        freeze_step=_FREEZE_STEP,
        exchange=task.exchange,
        bucket_elements=task.bucket_elements,
        overlap=method != "onebit",
        hierarchical=method == HIERARCHICAL,
        measure=False,
    )


def _calibrated_batch(loop: _Loop, least_seconds: float) -> int:
    """The batch with which a step takes at least `least_seconds` on the fastest rank; the same on all ranks."""
    import horovod.torch as hvd
    import torch

    batch = 1
    for _ in range(_MAX_CALIBRATIONS):
        loop.use_batch(batch)
        seconds = []
        for _ in range(3):
            hvd.barrier()
            begin = time.perf_counter()
            loop.step()
            seconds.append(time.perf_counter() - begin)
        fastest = float(hvd.allreduce(torch.tensor(min(seconds)), op=hvd.Min, name="bench.calibration"))
        if fastest >= least_seconds:
            break
        batch = max(batch + 1, math.ceil(1.05 * batch * least_seconds / fastest))
    return batch


if __name__ == "__main__":
    main(sys.argv[1:])
