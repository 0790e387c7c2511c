"""The codec in torch ops, tried on the CPU, and the one without copies, against the core's kernels: the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket
from hvd_onebit.options import CompressionOptions
from hvd_onebit.stats import Stats
from hvd_onebit.step import Inputs, StepExchange
from hvd_onebit.torch.codec import CpuCodec, DeviceCodec, codec_for
from hvd_onebit.torch.transport import HostTransport
from hvd_onebit.transport.local import LocalTransport, run_ranks
from hvd_onebit.wire import message_num_bytes, num_blocks

Array = npt.NDArray[Any]

SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 1023, 4099)
BLOCKS = (1, 8, 100, 2048)
CODECS = [pytest.param(CpuCodec, id="cpu"), pytest.param(lambda: DeviceCodec("cpu"), id="device")]


def dyadic(seed: int, num_elements: int) -> Array:
    """Values whose squares add up without rounding, whatever the order: then scales are equal to the bit."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-512, 513, num_elements) / 256).astype(np.float32)


def specials(num_elements: int) -> Array:
    values = dyadic(1, num_elements)
    values[::3] = 0.0
    values[1::5] = -0.0
    return values


def tensor(array: Array | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array.copy())


def held(num_elements: int) -> Array:
    return (np.random.default_rng(7).random(num_elements) < 0.6).astype(np.float32)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("scale", ["rms", "mean"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("num_elements", SIZES)
def test_compress_writes_the_kernels_bytes(make: Any, num_elements: int, block: int, scale: str) -> None:
    codec, host = make(), HostCodec()
    cases: list[tuple[Array, Array | None, float, Array | None, Array | None]] = [
        (dyadic(0, num_elements), None, 0.0, None, None),
        (specials(num_elements), None, 0.0, np.zeros(num_elements, np.float32), None),
        (dyadic(2, num_elements), dyadic(3, num_elements), 0.5, dyadic(4, num_elements), None),
        (dyadic(2, num_elements), dyadic(3, num_elements), 0.5, dyadic(4, num_elements), held(num_elements)),
    ]
    for gradient, momentum, beta1, error, live in cases:
        message = host.empty_bytes(message_num_bytes(num_elements, block))
        host_error = None if error is None else error.copy()
        host.compress(gradient, momentum, beta1, host_error, message, block=block, scale=scale, live=live)
        found = codec.empty_bytes(len(message))
        found_error = tensor(error)
        given = tensor(gradient)
        codec.compress(given, tensor(momentum), beta1, found_error, found, block=block, scale=scale, live=tensor(live))
        assert codec.to_bytes(found) == message.tobytes()
        np.testing.assert_array_equal(given, gradient, err_msg="the gradient must not be written")
        if error is not None:
            assert found_error is not None
            np.testing.assert_array_equal(found_error, host_error)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("num_messages", [1, 2, 3])
@pytest.mark.parametrize("num_elements", SIZES)
def test_each_decodes_and_reduces_the_others_messages(
    make: Any, num_elements: int, num_messages: int, block: int
) -> None:
    codec, host = make(), HostCodec()
    for live in (None, held(num_elements)):
        messages = []
        for rank in range(num_messages):
            message = host.empty_bytes(message_num_bytes(num_elements, block))
            host.compress(
                np.random.default_rng(rank).normal(size=num_elements).astype(np.float32),
                None, 0.0, None, message, block=block, scale="rms", live=live,
            )  # fmt: skip
            messages.append(message)
        theirs = [torch.from_numpy(message) for message in messages]
        values, found = np.empty(num_elements, np.float32), torch.empty(num_elements)
        host.average(messages, values, block=block, live=live)
        codec.average(theirs, found, block=block, live=tensor(live))
        np.testing.assert_array_equal(found, values)
        error, reply = dyadic(4, num_elements), host.empty_bytes(message_num_bytes(num_elements, block))
        found_error, found_reply = tensor(error), codec.empty_bytes(len(reply))
        assert found_error is not None
        kind = {"num_elements": num_elements, "block": block, "scale": "mean"}
        host.reduce(messages, error, reply, live=live, **kind)  # type: ignore[arg-type]
        codec.reduce(theirs, found_error, found_reply, live=tensor(live), **kind)
        prefix = 4 * num_blocks(num_elements, block)
        assert codec.to_bytes(found_reply)[prefix:] == reply.tobytes()[prefix:], "signs"
        np.testing.assert_allclose(
            np.frombuffer(codec.to_bytes(found_reply)[:prefix], "<f4"), reply[:prefix].view("<f4"), rtol=2e-7
        )
        np.testing.assert_allclose(found_error, error, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("block", BLOCKS)
def test_kept_messages_are_the_momentum(make: Any, block: int) -> None:
    codec, host, num_elements = make(), HostCodec(), 4099
    kept = []
    for rank in range(3):
        message = host.empty_bytes(message_num_bytes(num_elements, block))
        host.compress(dyadic(rank, num_elements), None, 0.0, None, message, block=block, scale="rms", live=None)
        kept.append(torch.from_numpy(message))
    gradient, momentum = torch.from_numpy(dyadic(5, num_elements)), codec.zeros(num_elements)
    codec.average(kept, momentum, block=block, live=None)
    found, expected = (codec.empty_bytes(message_num_bytes(num_elements, block)) for _ in range(2))
    errors = [torch.ones(num_elements) for _ in range(2)]
    options: dict[str, Any] = {"block": block, "scale": "rms", "live": None}
    codec.compress(gradient, momentum, 0.9, errors[0], expected, **options)
    codec.compress(gradient, None, 0.9, errors[1], found, kept=kept, **options)
    assert torch.equal(found, expected)
    assert torch.equal(*errors)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_finite_makes_its_blocks_scale_nan(make: Any, block: int, bad: float) -> None:
    codec, host = make(), HostCodec()
    gradient, error = dyadic(0, 300), dyadic(1, 300)
    gradient[150] = bad
    message = host.empty_bytes(message_num_bytes(300, block))
    host_error, found, found_error = error.copy(), codec.empty_bytes(len(message)), tensor(error)
    host.compress(gradient, None, 0.0, host_error, message, block=block, scale="rms", live=None)
    codec.compress(tensor(gradient), None, 0.0, found_error, found, block=block, scale="rms", live=None)
    assert codec.to_bytes(found) == message.tobytes(), "NaN has one form on the wire"
    np.testing.assert_array_equal(found_error, host_error)
    assert not codec.scales_finite([found], num_elements=300, block=block)
    good = codec.empty_bytes(len(message))
    codec.compress(tensor(dyadic(0, 300)), None, 0.0, None, good, block=block, scale="rms", live=None)
    assert codec.scales_finite([good], num_elements=300, block=block)
    assert not codec.scales_finite([good, found], num_elements=300, block=block)


@pytest.mark.parametrize("make", CODECS)
def test_restore_leaves_alone_what_is_held_or_not_finite(make: Any) -> None:
    host = HostCodec()
    error, sent, given = (np.random.default_rng(i).normal(size=50).astype(np.float32) for i in range(3))
    sent[:5] = np.nan
    for live in (None, held(50)):
        expected, found = error.copy(), tensor(error)
        host.restore(expected, sent, given, live)
        make().restore(found, tensor(sent), tensor(given), tensor(live))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(expected[:5], error[:5])


def test_the_cpu_codec_makes_no_copy() -> None:
    codec = CpuCodec()
    error, message = torch.zeros(100), codec.empty_bytes(message_num_bytes(100, 2048))
    codec.compress(torch.linspace(-1, 1, 100), None, 0.0, error, message, block=2048, scale="rms", live=None)
    assert error.any(), "written in place"
    assert isinstance(codec_for(torch.device("cpu")), CpuCodec)
    assert isinstance(codec_for(torch.device("meta")), DeviceCodec)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
@pytest.mark.parametrize("block", [8, 2048, "tensor"])
def test_a_rank_on_a_device_and_ranks_on_the_host_understand_each_other(algorithm: str, block: int | str) -> None:
    """Rank 0 compresses with torch ops, rank 1 with the kernels on tensors, rank 2 with the kernels on arrays."""
    bucket = Bucket("b", ("p", "q"), (3000, 77))
    options = CompressionOptions(exchange=algorithm, block=block)

    def work(transport: LocalTransport) -> Array:
        codec: Any = (DeviceCodec("cpu"), CpuCodec(), HostCodec())[transport.rank]
        own = transport if transport.rank == 2 else HostTransport(transport)
        convert = np.asarray if transport.rank == 2 else torch.from_numpy
        step = StepExchange[Any](own, Stats())
        exchange = CompressedAllreduce[Any](
            bucket, rank=transport.rank, size=transport.size, codec=codec, options=options
        )
        for seed in range(4):
            gradient = np.random.default_rng([seed, transport.rank]).normal(size=bucket.num_elements)
            given = convert(gradient.astype(np.float32))
            step.start(exchange, Inputs.of(given))
            assert step.finish()
            values = codec.zeros(bucket.num_elements)
            exchange.average(values)
            step.commit()
        return np.asarray(values)

    results = run_ranks(3, work, timeout_seconds=20)
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("make", CODECS)
def test_ones_are_exactly_one(make: Any) -> None:
    codec = make()
    for length in range(1, 101):
        for block in (8, 2048):
            message, values = codec.empty_bytes(message_num_bytes(length, block)), torch.empty(length)
            codec.compress(torch.ones(length), None, 0.0, None, message, block=block, scale="rms", live=None)
            codec.average([message], values, block=block, live=None)
            assert values.tolist() == [1.0] * length
