"""Run by test_torch_triton.py in a pytest of its own: Triton's interpreter must be asked for before Triton is imported.

Every result is compared with that of the core's kernels, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hvd_onebit import bench_device, kernels
from hvd_onebit.torch import triton_kernels
from hvd_onebit.torch.codec import TritonCodec
from hvd_onebit.wire import message_num_bytes

Array = npt.NDArray[Any]

SMALL = (0, 1, 7, 8, 9, 63, 64, 65)
# blocks that share bytes, that start at bytes of their own, that are longer than a sub-block or than all there is
BLOCKS = (1, 8, 100, 2048, 5000)


def values(seed: int, n: int) -> Array:
    """Numbers of many magnitudes, among them zeros of both signs and denormals."""
    rng = np.random.default_rng([seed, n])
    array = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 7, n)).astype(np.float32)
    array[::11] = 0.0
    array[3::7] = -0.0
    array[5::13] = np.float32(1e-45) * rng.integers(-9, 10, len(array[5::13]))
    return array


def half(n: int) -> Array:
    live = (np.random.default_rng(n).random(n) < 0.5).astype(np.float32)
    live[:8] = 0.0  # a block of held elements, where blocks are that short
    return live


def tensor(array: Array | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array.copy())


def assert_same(found: Tensor | None, expected: Array | None) -> None:
    if expected is not None:
        assert found is not None
        np.testing.assert_array_equal(found.numpy().view(np.uint8), expected.view(np.uint8))


def sent(n: int, block: int, count: int) -> list[Array]:
    """Messages of `count` ranks."""
    messages = [np.empty(message_num_bytes(n, block), np.uint8) for _ in range(count)]
    for rank, message in enumerate(messages):
        kernels.compress(values(100 + rank, n), None, 0.0, None, message, block=block)
        if n % 2:
            message[:4] = 0  # the first block decodes to zeros of both signs
    return messages


def tensors(messages: list[Array], gathered: bool, shift: int = 0) -> list[Tensor]:
    """The messages end to end in one buffer, as a collective leaves them, `shift` bytes from its start; or not."""
    if not gathered:
        return [torch.from_numpy(message.copy()) for message in reversed(messages)][::-1]
    buffer = torch.from_numpy(np.concatenate([np.zeros(shift, np.uint8), *messages]))
    size = len(messages[0])
    return [buffer[shift + rank * size : shift + (rank + 1) * size] for rank in range(len(messages))]


def in_turns(pairs: list[tuple[int, int]]) -> list[Any]:
    """(n, block, scale, held, start of the message in its buffer) for each (n, block)."""
    return [(n, block, kernels.SCALES[i % 2], i // 2 % 2 == 0, i % 3) for i, (n, block) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("n", "block", "scale", "held", "shift"),
    in_turns(
        [(n, block) for n in SMALL for block in BLOCKS]
        + [(1023, 8), (1023, 100), (1023, 2048), (4099, 1000), (4099, 2048), (4099, 5000)]
    ),
)
def test_compress(n: int, block: int, scale: str, held: bool, shift: int) -> None:
    inputs: list[tuple[Array | None, Array | None]] = [(values(2, n), values(3, n))]
    if n in SMALL:
        inputs += [(None, None), (None, values(3, n)), (values(2, n), None)]
    for momentum, error in inputs:
        gradient, live = values(1, n), half(n) if held else None
        message = np.zeros(message_num_bytes(n, block), np.uint8)
        found = torch.zeros(shift + len(message), dtype=torch.uint8)
        found_gradient, found_error, found_live = tensor(gradient), tensor(error), tensor(live)
        TritonCodec("cpu").compress(
            found_gradient, tensor(momentum), 0.9, found_error, found[shift:], block=block, scale=scale, live=found_live
        )  # type: ignore[arg-type]
        kernels.compress(gradient, momentum, 0.9, error, message, block=block, scale=scale, live=live)
        assert_same(found[shift:], message)
        assert_same(found_error, error)
        assert_same(found_gradient, gradient)
        assert not found[:shift].any()


@pytest.mark.parametrize(
    ("n", "block", "scale", "held", "shift"),
    in_turns(
        [(n, block) for n in (1, 7, 9, 63, 64, 65) for block in (1, 8, 100)]
        + [(1023, 100), (1023, 1000), (4099, 2048), (4099, 5000)]
    ),
)
def test_reduce_and_average(n: int, block: int, scale: str, held: bool, shift: int) -> None:
    for count in (1, 2, 3, 4, 5) if n == 65 else (2,) if n > 1023 else (1 + n % 5,):
        messages, live, error = sent(n, block, count), half(n) if held else None, values(4, n)
        theirs = tensors(messages, gathered=count != 2, shift=shift)
        reply, result = np.zeros(len(messages[0]), np.uint8), np.empty(n, np.float32)
        found_reply, found_error, found = tensor(reply), tensor(error), torch.empty(n)
        codec, kind = TritonCodec("cpu"), {"num_elements": n, "block": block, "scale": scale}
        codec.reduce(theirs, found_error, found_reply, live=tensor(live), **kind)  # type: ignore[arg-type]
        codec.average(theirs, found, block=block, live=tensor(live))
        kernels.reduce(messages, error, reply, live=live, **kind)  # type: ignore[arg-type]
        kernels.average(messages, result, block=block, live=live)
        assert_same(found_reply, reply)
        assert_same(found_error, error)
        assert_same(found, result)


def test_nothing_is_reduced_to_nothing() -> None:
    empty, nothing = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    triton_kernels.reduce([nothing, nothing], empty, nothing, num_elements=0, block=2048)
    triton_kernels.average([nothing], empty, block=2048)


@pytest.mark.parametrize("where", ["in a lane", "across lanes", "across sub-blocks"])
def test_the_order_of_a_scales_sum(where: str) -> None:
    """The sum is half way between two float32, and a little more if what is little is added up before the rest."""
    lanes, sub, little = triton_kernels.LANES, triton_kernels.SUB_BLOCK, np.float32(2.0**-54)
    gradient = np.zeros(16 * lanes if where != "across sub-blocks" else 4 * sub, np.float32)
    gradient[0], gradient[lanes] = 1.0, 2.0**-24
    if where == "in a lane":
        gradient[2 * lanes :: lanes] = little
    elif where == "across lanes":
        gradient[1:6:2] = little
    else:
        gradient[sub::sub] = little
    n = len(gradient)
    assert gradient.sum(dtype=np.longdouble) > 1 + 2.0**-24
    message = np.zeros(message_num_bytes(n, n), np.uint8)
    found = torch.from_numpy(message.copy())
    triton_kernels.compress(torch.from_numpy(gradient), None, 0.0, None, found, block=n, scale="mean")
    kernels.compress(gradient, None, 0.0, None, message, block=n, scale="mean")
    assert_same(found, message)
    up = where == "across lanes"  # of the two sums added last, one is that of the odd lanes
    assert float(message[:4].view("<f4")[0]) * n == (1 + 2.0**-23 if up else 1.0)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # the interpreter is NumPy
@pytest.mark.parametrize("block", [8, 100, 2048])
def test_what_is_not_finite_spoils_its_block_alone(block: int) -> None:
    n = 300
    for bad in (np.nan, np.inf, -np.inf, np.float32(3e38)):  # the last gives a scale that is finite
        gradient, error = values(1, n), values(3, n)
        gradient[150:152] = bad
        error[150:152] = 3e38
        message = np.zeros(message_num_bytes(n, block), np.uint8)
        found, found_error = tensor(message), tensor(error)
        triton_kernels.compress(tensor(gradient), None, 0.0, found_error, found, block=block)  # type: ignore[arg-type]
        kernels.compress(gradient, None, 0.0, error, message, block=block)
        assert_same(found, message)
        assert_same(found_error, error)
        assert not TritonCodec("cpu").scales_finite([found], num_elements=n, block=block)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    ("n", "block", "start", "stop"), [(65, 8, 3, 64), (300, 100, 0, 300), (4099, 2048, 2001, 4099)]
)
def test_the_fused_updates(n: int, block: int, start: int, stop: int, hold: bool) -> None:
    count = 3 if hold else 1
    messages, size = sent(n, block, count), stop - start
    theirs = tensors(messages, gathered=True)
    for correction, decay in ((1.0, 1.0), (0.7, 0.99)):
        parameter, momentum, variance = values(5, size), values(6, size), np.abs(values(7, size))
        ours = [tensor(array) for array in (parameter, momentum, variance)]
        numbers = {"step_size": 1e-3, "eps": 1e-8, "variance_correction": correction, "decay": decay, "hold": hold}
        kind = {"num_elements": n, "block": block}
        triton_kernels.adam_apply(theirs, start, *ours, **kind, **numbers)  # type: ignore[arg-type]
        kernels.adam_apply(messages, start, parameter, momentum, variance, **kind, **numbers)  # type: ignore[arg-type]
        for found, expected in zip(ours, (parameter, momentum, variance), strict=True):
            assert_same(found, expected)
        numbers = {"step_size": 1e-3, "decay": decay}
        triton_kernels.momentum_apply(theirs, start, *ours[:2], **kind, **numbers)  # type: ignore[arg-type]
        kernels.momentum_apply(messages, start, parameter, momentum, **kind, **numbers)  # type: ignore[arg-type]
        for found, expected in zip(ours, (parameter, momentum), strict=False):
            assert_same(found, expected)


def test_what_does_not_fit_is_refused() -> None:
    ten, message = torch.zeros(10), torch.zeros(message_num_bytes(10, 8), dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"momentum must be float32 on cpu, got torch\.float64"):
        triton_kernels.compress(ten, ten.double(), 0.9, None, message, block=8)
    with pytest.raises(ValueError, match=r"error must be contiguous, of shape \(10,\), got \(10,\), \(2,\)"):
        triton_kernels.compress(ten, None, 0.9, torch.zeros(20)[::2], message, block=8)
    with pytest.raises(ValueError, match="10 bytes long"):
        triton_kernels.compress(ten, None, 0.9, None, message[1:], block=8)
    with pytest.raises(TypeError, match="a message must be uint8"):
        triton_kernels.average([ten], ten, block=8)
    with pytest.raises(ValueError, match="scale must be 'rms' or 'mean', got 'max'"):
        triton_kernels.compress(ten, None, 0.9, None, message, block=8, scale="max")
    with pytest.raises(ValueError, match="one rank at least"):
        triton_kernels.average([], ten, block=8)
    with pytest.raises(ValueError, match="elements 1 to 11 reach beyond a message of 10 elements"):
        triton_kernels.adam_apply([message], 1, ten, ten.clone(), ten, num_elements=10, block=8, step_size=1, eps=0)


def test_the_benchmark_compares_bits_before_it_takes_times() -> None:
    report = bench_device.bench_device("cpu", 300, repeats=1, block=8, sizes=(1, 9))
    assert (report.checks, report.differing) == (2 * 3 * 6, ())
    assert [each.name for each in report.times][:3] == ["copy", "compress", "reduce, 8 ranks"]
    assert report.times[0].share_of_copy == 1.0
    for each in report.times:
        assert each.seconds > 0
        rate, copied = each.num_bytes / each.seconds, report.times[0].num_bytes / report.times[0].seconds
        assert each.share_of_copy == pytest.approx(rate / copied)


def test_the_benchmark_sees_a_wrong_bit() -> None:
    class Wrong:
        adam_apply, average, reduce = (
            staticmethod(each) for each in (triton_kernels.adam_apply, triton_kernels.average, triton_kernels.reduce)
        )

        @staticmethod
        def compress(*args: Any, **kwargs: Any) -> None:
            triton_kernels.compress(*args, **kwargs)
            args[4][-1] ^= 1

    found = list(bench_device.differences(Wrong, torch.device("cpu"), (9,)))
    assert {name.split(",")[0] for name, equal in found if not equal} == {"compress"}
