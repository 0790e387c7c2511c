"""`hvd-onebit bench kernels --device cuda`: do the Triton kernels give the host's bits, and how fast are they?

Bits first: what is fast and wrong is of no use. Times are set against torch's own copy of the same floats on the same
device in the same run, which moves bytes about as fast as the device's memory can: a kernel's share is the bytes that
it has to move, each once, over its time, as a part of what the copy reaches.

Horovod need not be there.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hvd_onebit import kernels, wire

__all__ = ["DeviceReport", "KernelTime", "bench_device", "differences", "torch_layer"]

_RANKS = 8  # messages that reduce and average are given
_CALLS = 10  # between two looks at the clock, so that starting a kernel is hidden behind the one before
_SIZES = (1, 9, 65, 1023, 4099, (1 << 20) + 7)


@dataclass(frozen=True)
class KernelTime:
    """Median seconds of one kernel, the bytes that it has to move, and how that compares with a plain copy."""

    name: str
    seconds: float
    num_bytes: int
    share_of_copy: float


@dataclass(frozen=True)
class DeviceReport:
    """What was measured, and on what; `differing` names the checks whose bits were not the host's."""

    device: str
    torch: str
    triton: str
    host_kernels: str
    num_elements: int
    block: int
    repeats: int
    ranks: int
    checks: int
    differing: tuple[str, ...]
    times: tuple[KernelTime, ...]


def bench_device(
    device: str,
    num_elements: int,
    *,
    repeats: int = 9,
    block: int = wire.DEFAULT_BLOCK,
    sizes: Sequence[int] = _SIZES,
) -> DeviceReport:
    """Compares bits with the host's on `sizes`, then times the kernels on `num_elements`; 80 bytes an element.

    Raises:
        RuntimeError: torch cannot use the device, or Triton is not installed.
    """
    torch = _module("torch")
    triton = _module("triton")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU (torch.cuda.is_available() is False)")
    layer = torch_layer("triton_kernels")
    found = list(differences(layer, where, sizes))
    return DeviceReport(
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else str(where),
        torch=torch.__version__,
        triton=triton.__version__,
        host_kernels=list(kernels.implementations())[-1],
        num_elements=num_elements,
        block=block,
        repeats=repeats,
        ranks=_RANKS,
        checks=len(found),
        differing=tuple(name for name, equal in found if not equal),
        times=_times(layer, torch_layer("codec"), where, num_elements, block, repeats),
    )


def differences(layer: Any, device: Any, sizes: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Each check of the kernels of `layer` on `device` against the host's: its name, and whether bits were equal."""
    torch = _module("torch")

    def there(array: Any) -> Any:
        return None if array is None else torch.from_numpy(array.copy()).to(device)

    for n in sizes:
        rng = np.random.default_rng(n)
        live = (rng.random(n) < 0.7).astype(np.float32)
        for block, held, scale in ((2048, None, "rms"), (100, live, "mean"), (max(n, 1), None, "mean")):
            case = f"{n} elements in blocks of {block}, {scale}"
            gradient, momentum, error, parameter = (
                (rng.standard_normal(n) * 10.0 ** rng.integers(-30, 10, n)).astype(np.float32) for _ in range(4)
            )
            messages = [np.zeros(wire.message_num_bytes(n, block), np.uint8) for _ in range(3)]
            for message in messages:
                given, kept = there(message), there(error)
                inputs = there(gradient), there(momentum)
                layer.compress(*inputs, 0.9, kept, given, block=block, scale=scale, live=there(held))
                kernels.compress(gradient, momentum, 0.9, error, message, block=block, scale=scale, live=held)
                yield f"compress, {case}", _same(given, message) and _same(kept, error)
                gradient = gradient[::-1].copy()
            theirs = [there(message) for message in messages]
            kind: dict[str, Any] = {"num_elements": n, "block": block}
            reply, result = np.zeros_like(messages[0]), np.zeros(n, np.float32)
            given, kept, values = there(reply), there(error), there(result)
            layer.reduce(theirs, kept, given, scale=scale, live=there(held), **kind)
            kernels.reduce(messages, error, reply, scale=scale, live=held, **kind)
            yield f"reduce, {case}", _same(given, reply) and _same(kept, error)
            layer.average(theirs, values, block=block, live=there(held))
            kernels.average(messages, result, block=block, live=held)
            yield f"average, {case}", _same(values, result)
            variance = np.abs(gradient)
            numbers = kind | {"step_size": 1e-3, "eps": 1e-8, "variance_correction": 0.7, "decay": 0.99}
            x, m = there(parameter), there(momentum)
            layer.adam_apply(theirs, 0, x, m, there(variance), **numbers)
            kernels.adam_apply(messages, 0, parameter, momentum, variance, **numbers)
            yield f"apply, {case}", _same(x, parameter) and _same(m, momentum)


def _same(found: Any, expected: Any) -> bool:
    return bool(found.cpu().numpy().tobytes() == expected.tobytes())


def _times(layer: Any, codec: Any, device: Any, n: int, block: int, repeats: int) -> tuple[KernelTime, ...]:
    torch = _module("torch")
    torch.manual_seed(0)
    gradient, momentum, error, parameter, target = (torch.randn(n, device=device) for _ in range(5))
    variance = gradient * gradient
    size = wire.message_num_bytes(n, block)
    scales = 4 * wire.num_blocks(n, block)
    gathered = torch.randint(0, 256, (_RANKS, size), dtype=torch.uint8, device=device)
    gathered[:, :scales] = torch.ones(scales // 4, device=device).view(torch.uint8)
    messages, message = list(gathered.unbind()), torch.zeros(size, dtype=torch.uint8, device=device)
    by_operations = codec.DeviceCodec(device)
    options = {"block": block, "scale": "rms", "live": None}
    numbers = {"num_elements": n, "block": block, "step_size": 1e-3, "eps": 1e-8}
    tasks: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (8 * n, lambda: target.copy_(gradient)),
        "compress": (16 * n + size, lambda: layer.compress(gradient, momentum, 0.9, error, message, **options)),
        f"reduce, {_RANKS} ranks": (
            8 * n + (_RANKS + 1) * size,
            lambda: layer.reduce(messages, error, message, num_elements=n, **options),
        ),
        f"average, {_RANKS} ranks": (4 * n + _RANKS * size, lambda: layer.average(messages, target, block=block)),
        "apply": (
            16 * n + size,
            lambda: layer.adam_apply(messages[:1], 0, parameter, target, variance, **numbers),
        ),
        "compress by torch operations": (
            16 * n + size,
            lambda: by_operations.compress(gradient, momentum, 0.9, error, message, **options),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):  # the first round compiles, and does not count
        for name, (_bytes, task) in tasks.items():
            seconds[name].append(_seconds(task, device))
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    rates = {name: tasks[name][0] / medians[name] for name in tasks}
    return tuple(KernelTime(name, medians[name], tasks[name][0], rates[name] / rates["copy"]) for name in tasks)


def _seconds(task: Callable[[], object], device: Any) -> float:
    """Seconds that one call takes, the mean of several on a GPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        task()
        return time.perf_counter() - begin
    torch = _module("torch")
    with torch.cuda.device(device):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        for _ in range(_CALLS):
            task()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1e3 / _CALLS


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise RuntimeError(f"{name} is not installed (pip install {name})") from None


def torch_layer(name: str) -> ModuleType:
    """A module of the torch layer by itself, since the layer as a whole imports Horovod."""
    layer = importlib.util.find_spec("hvd_onebit.torch")
    assert layer is not None
    assert layer.origin is not None
    alias = f"hvd_onebit._torch_{name}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, Path(layer.origin).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module
        spec.loader.exec_module(module)
    return sys.modules[alias]
