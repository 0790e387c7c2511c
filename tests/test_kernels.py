"""One contract for every implementation of the kernels: NumPy, plain C, and each level of vector instructions here.

The oracle below follows the docstrings of `hvd_onebit.kernels` and `hvd_onebit.wire` element by element in Python
floats, and packs its own bits. Equality is by bits; only a NaN's sign and payload are left open, but for scales.
"""

from __future__ import annotations

import array
import math
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import switch_interval
from numpy.typing import NDArray

from hvd_onebit import kernels, wire
from hvd_onebit.kernels import Kernels

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

IMPLEMENTATIONS = kernels.implementations()
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1023, 2047, 2048, 2049, 4099, 5000]
BLOCKS = [1, 8, 100, 2048, 3000, 10**6]
SPECIALS = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -3e-39, 1e30, -1e30, 3e38, -3e38, 1.0, -1.0]
NAN_SCALE = bytes.fromhex("0000c07f")


@pytest.fixture(params=list(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> Kernels:
    return IMPLEMENTATIONS[request.param]


# ---- the oracle ----


def oracle_scale(z: Sequence[float | None], scale: str) -> bytes:
    """Scale of the live elements of a block, with None for the held ones: float64 sums in the order of the contract."""
    total, count = 0.0, 0
    for begin in range(0, len(z), 2048):
        lanes = [0.0] * 32
        for i, value in enumerate(z[begin : begin + 2048]):
            if value is not None:
                lanes[i % 32] += abs(value) if scale == "mean" else value * value
                count += 1
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        total += lanes[0]
    if count == 0:
        return struct.pack("<f", 0.0)
    mean = total / count
    if not math.isfinite(mean):
        return NAN_SCALE
    return struct.pack("<f", mean if scale == "mean" else math.sqrt(mean))


def oracle_compress(
    z: Floats, error: Floats | None, block: int, scale: str, live: Floats | None
) -> tuple[bytes, Floats | None]:
    """The message of float32 values `z`, and the error they leave."""
    alive = np.ones(z.size, bool) if live is None else live != 0
    masked = [value if keep else None for value, keep in zip(z.tolist(), alive.tolist(), strict=True)]
    scales, bits = bytearray(), bytearray(b"\xff" * -(-z.size // 8))
    left = None if error is None else error.copy()
    for begin in range(0, z.size, block):
        part = masked[begin : begin + block]
        packed = oracle_scale(part, scale)
        scales += packed
        (s,) = struct.unpack("<f", packed)
        for i, value in enumerate(part, begin):
            if value is None:
                continue
            if not value >= 0:
                bits[i // 8] &= ~(1 << i % 8)
            if left is not None and packed != NAN_SCALE:
                left[i] = np.float32(value) - np.float32(s if value >= 0 else -s)
    return bytes(scales + bits), left


def oracle_mean(messages: Bytes, num_elements: int, block: int) -> Floats:
    total = np.zeros(num_elements, np.float32)
    blocks = -(-num_elements // block)
    for rank, message in enumerate(messages):
        scales = np.frombuffer(message.tobytes()[: 4 * blocks], "<f4")
        bits = message.tobytes()[4 * blocks :]
        values = np.array(
            [scales[i // block] * (1 if bits[i // 8] >> i % 8 & 1 else -1) for i in range(num_elements)], np.float32
        )
        total = values if rank == 0 else total + values
    return total / np.float32(len(messages))


# ---- data ----


def floats_of(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)


def draw_floats(rng: np.random.Generator, num_elements: int, *, specials: Sequence[float] = ()) -> Floats:
    """Normal values of a random magnitude, so also denormals, some replaced by special ones."""
    with np.errstate(all="ignore"):
        values = (rng.standard_normal(num_elements) * 10.0 ** rng.integers(-44, 30)).astype(np.float32)
        if len(specials):
            chosen = rng.random(num_elements) < 0.2
            values[chosen] = rng.choice(specials, int(chosen.sum()))
    return values


def draw_messages(rng: np.random.Generator, ranks: int, num_elements: int, block: int) -> Bytes:
    messages = np.zeros((ranks, wire.message_num_bytes(num_elements, block)), np.uint8)
    for message in messages:
        wire.scales_view(message, num_elements, block)[:] = np.abs(
            draw_floats(rng, wire.num_blocks(num_elements, block), specials=[0, 1e-45, 1e30])
        )
        wire.bits_view(message, num_elements, block)[:] = wire.pack_signs(rng.random(num_elements) < 0.5)
    return messages


def assert_same_bits(actual: Floats, expected: Floats) -> None:
    """Equal bit for bit, but for what kind of NaN it is."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, (
        f"{wrong.size} differ, the first at {wrong[0]}: {actual[wrong[0]]!r}, {expected[wrong[0]]!r}"
    )


def new_message(num_elements: int, block: int) -> Bytes:
    """A message to be filled, with what must not be left in it."""
    return np.full(wire.message_num_bytes(num_elements, block), 0x55, np.uint8)


# ---- the definition ----


@pytest.mark.parametrize("num_elements", SIZES)
def test_compress_is_as_defined(implementation: Kernels, num_elements: int) -> None:
    rng = np.random.default_rng(num_elements)
    for block, scale, flags in product(BLOCKS, kernels.SCALES, product([True, False], repeat=3)):
        with_momentum, with_error, with_live = flags
        specials = [SPECIALS, [], [math.nan, math.inf, -math.inf, *SPECIALS]][rng.integers(3)]
        gradient = draw_floats(rng, num_elements, specials=specials)
        momentum = draw_floats(rng, num_elements, specials=specials) if with_momentum else None
        error = draw_floats(rng, num_elements, specials=SPECIALS) if with_error else None
        live = rng.choice(floats_of([0, 0, 1, 2, -0.0, math.nan]), num_elements) if with_live else None
        with np.errstate(all="ignore"):
            z = gradient
            if momentum is not None:
                z = np.float32(0.9) * momentum + np.float32(1.0 - 0.9) * gradient
            if error is not None:
                z = z + error
            expected, left = oracle_compress(z, error, block, scale, live)

        read_only = [a.copy() for a in (gradient, momentum, live) if a is not None]
        message = new_message(num_elements, block)
        implementation.compress(gradient, momentum, 0.9, error, message, block=block, scale=scale, live=live)
        assert message.tobytes() == expected
        if error is not None and left is not None:
            assert_same_bits(error, left)
        for before, after in zip(read_only, [a for a in (gradient, momentum, live) if a is not None], strict=True):
            assert_same_bits(after, before)


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 17])
def test_compress_decodes_a_momentum_that_is_kept_as_messages(
    implementation: Kernels, ranks: int, num_elements: int
) -> None:
    rng = np.random.default_rng(100 * num_elements + ranks)
    for block, with_live in product(BLOCKS, (False, True)):
        kept, gradient = draw_messages(rng, ranks, num_elements, block), draw_floats(rng, num_elements)
        live = rng.choice(floats_of([0, 1]), num_elements) if with_live else None
        momentum = oracle_mean(kept, num_elements, block)
        errors = [np.ones(num_elements, np.float32) for _ in range(2)]
        messages = [new_message(num_elements, block) for _ in range(2)]
        implementation.compress(gradient, momentum, 0.9, errors[0], messages[0], block=block, live=live)
        implementation.compress(gradient, None, 0.9, errors[1], messages[1], block=block, live=live, kept=list(kept))
        np.testing.assert_array_equal(messages[1], messages[0])
        assert_same_bits(errors[1], errors[0])


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_compress_takes_the_mean_of_several_gradients(implementation: Kernels, ranks: int, num_elements: int) -> None:
    rng = np.random.default_rng(100 * num_elements + ranks)
    for block, with_momentum, with_error, with_kept in product(BLOCKS, *[(False, True)] * 3):
        specials = [SPECIALS, [math.nan, math.inf, -math.inf, *SPECIALS]][rng.integers(2)]
        gradients = [draw_floats(rng, num_elements, specials=specials) for _ in range(ranks)]
        momentum = draw_floats(rng, num_elements) if with_momentum and not with_kept else None
        kept = draw_messages(rng, 2, num_elements, block) if with_kept else None
        with np.errstate(all="ignore"):
            mean = gradients[0].copy()
            for other in gradients[1:]:
                mean += other
            mean /= np.float32(ranks)
        errors = [draw_floats(rng, num_elements) if with_error else None] * 2
        errors = [None if error is None else error.copy() for error in errors]
        messages = [new_message(num_elements, block) for _ in range(2)]
        before = [each.copy() for each in gradients]
        for gradient, error, message in zip((mean, tuple(gradients)), errors, messages, strict=True):
            implementation.compress(gradient, momentum, 0.9, error, message, block=block, kept=kept)
        np.testing.assert_array_equal(messages[1], messages[0])
        if errors[0] is not None and errors[1] is not None:
            assert_same_bits(errors[1], errors[0])
        for old, new in zip(before, gradients, strict=True):
            assert_same_bits(new, old)


def test_several_gradients_are_checked(implementation: Kernels) -> None:
    ones, message = np.ones(20, np.float32), new_message(20, 8)
    with pytest.raises(ValueError, match="empty sequence"):
        implementation.compress([], None, 0.9, None, message, block=8)
    with pytest.raises(ValueError, match=r"gradient\[1\] must have 20 elements, got 19"):
        implementation.compress([ones, ones[1:]], None, 0.9, None, message, block=8)
    with pytest.raises(ValueError, match=r"error is written in place and must not overlap gradient\[1\]"):
        implementation.compress([ones.copy(), ones], None, 0.9, ones, message, block=8)


def test_a_momentum_is_given_once_and_kept_messages_are_checked(implementation: Kernels) -> None:
    ones, message = np.ones(20, np.float32), new_message(20, 8)
    sound = new_message(20, 8)
    with pytest.raises(ValueError, match="the momentum is given twice"):
        implementation.compress(ones, ones, 0.9, None, message, block=8, kept=[sound])
    with pytest.raises(ValueError, match="is 15 bytes long, got 14"):
        implementation.compress(ones, None, 0.9, None, message, block=8, kept=[sound[:-1]])
    with pytest.raises(ValueError, match=r"must not overlap kept\[0\]"):
        implementation.compress(ones, None, 0.9, None, message, block=8, kept=[message])


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 17, 33])
def test_reduce_is_as_defined(implementation: Kernels, ranks: int, num_elements: int) -> None:
    rng = np.random.default_rng(100 * num_elements + ranks)
    block, scale = BLOCKS[(num_elements + ranks) % len(BLOCKS)], kernels.SCALES[ranks % 2]
    messages = draw_messages(rng, ranks, num_elements, block)
    with np.errstate(all="ignore"):
        mean = oracle_mean(messages, num_elements, block)
    for with_error, with_live in product([True, False], [True, False]):
        error = draw_floats(rng, num_elements, specials=SPECIALS) if with_error else None
        live = rng.choice(floats_of([0, 1]), num_elements) if with_live else None
        with np.errstate(all="ignore"):
            expected, left = oracle_compress(mean if error is None else mean + error, error, block, scale, live)

        message, before = new_message(num_elements, block), messages.copy()
        implementation.reduce(messages, error, message, num_elements=num_elements, block=block, scale=scale, live=live)
        assert message.tobytes() == expected
        if error is not None and left is not None:
            assert_same_bits(error, left)
        np.testing.assert_array_equal(messages, before)


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 17, 33])
def test_average_is_as_defined(implementation: Kernels, ranks: int, num_elements: int) -> None:
    rng = np.random.default_rng(100 * num_elements + ranks)
    for block in (100, 2048, 10**6):
        messages = draw_messages(rng, ranks, num_elements, block)
        expected = oracle_mean(messages, num_elements, block)
        values = np.full(num_elements, 7, np.float32)
        implementation.average(messages, values, num_elements=num_elements, block=block)
        assert_same_bits(values, expected)

        live = rng.choice(floats_of([0, 1]), num_elements)
        implementation.average(list(messages), values, block=block, live=live)
        assert_same_bits(values, np.where(live != 0, expected, np.float32(0)))

        implementation.decompress(messages[-1], values, block=block)
        assert_same_bits(values, oracle_mean(messages[-1:], num_elements, block))


@pytest.mark.parametrize("offset", [0, 1, 15])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_average_is_its_parts_end_to_end(implementation: Kernels, offset: int, threads: int) -> None:
    """Where it is large it is written past the cache, line by line: wherever it begins, and nothing beside it."""
    rng = np.random.default_rng(offset)
    block, num_elements = 2048, (1 << 20) + 4099
    num_blocks, part = -(-num_elements // block), 1 << 18
    messages = rng.integers(0, 256, (2, wire.message_num_bytes(num_elements, block)), np.uint8)
    messages[:, : 4 * num_blocks] = rng.random((2, num_blocks), np.float32).view(np.uint8)
    scales, bits = messages[:, : 4 * num_blocks], messages[:, 4 * num_blocks :]
    live = (rng.random(num_elements, np.float32) < 0.9).astype(np.float32)
    for held in (None, live):
        expected = np.empty(num_elements, np.float32)
        for start in range(0, num_elements, part):
            stop = min(start + part, num_elements)
            parts = [
                np.concatenate([s[start // block * 4 : -(-stop // block) * 4], b[start // 8 : -(-stop // 8)]])
                for s, b in zip(scales, bits, strict=True)
            ]
            kernels.average(
                parts,
                expected[start:stop],
                num_elements=stop - start,
                block=block,
                live=None if held is None else held[start:stop],
            )
        around = np.full(num_elements + 32, 7.0, np.float32)
        values = around[offset : offset + num_elements]
        implementation.average(
            list(messages), values, num_elements=num_elements, block=block, live=held, threads=threads
        )
        assert_same_bits(values, expected)
        assert (around[:offset] == 7.0).all()
        assert (around[offset + num_elements :] == 7.0).all()


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_apply_is_as_defined(implementation: Kernels, ranks: int, num_elements: int) -> None:
    rng = np.random.default_rng(100 * num_elements + ranks)
    f = np.float32
    for block in BLOCKS:
        messages = draw_messages(rng, ranks, num_elements, block)
        start = int(rng.integers(num_elements + 1))
        stop = int(rng.integers(start, num_elements + 1))
        m = oracle_mean(messages, num_elements, block)[start:stop]
        parameter = draw_floats(rng, stop - start, specials=SPECIALS)
        momentum = draw_floats(rng, stop - start, specials=SPECIALS)
        variance = np.abs(draw_floats(rng, stop - start, specials=SPECIALS))
        for decay, correction, hold in product([1.0, 0.999], [1.0, 0.3], [False, True]):
            with np.errstate(all="ignore"):
                moved = (parameter if decay == 1 else parameter * f(decay)) - f(1e-3) * (
                    m / (np.sqrt(variance) / f(correction) + f(1e-8))
                )
            held = variance == 0 if hold else np.zeros(m.size, bool)
            for v in (momentum.copy(), None):
                x = parameter.copy()
                implementation.adam_apply(
                    messages,
                    start,
                    x,
                    v,
                    variance,
                    num_elements=num_elements,
                    block=block,
                    step_size=1e-3,
                    eps=1e-8,
                    variance_correction=correction,
                    decay=decay,
                    hold=hold,
                )
                assert_same_bits(x, np.where(held, parameter, moved))
                if v is not None:
                    assert_same_bits(v, np.where(held, momentum, m))
        for decay in (1.0, 0.999):
            with np.errstate(all="ignore"):
                decayed = parameter if decay == 1 else parameter * f(decay)
                moved = np.subtract(decayed, f(0.1) * m)
            for v in (momentum.copy(), None):
                x = parameter.copy()
                implementation.momentum_apply(
                    messages, start, x, v, num_elements=num_elements, block=block, step_size=0.1, decay=decay
                )
                assert_same_bits(x, moved)
                if v is not None:
                    assert_same_bits(v, m)


@pytest.mark.parametrize("start", [0, 1, 5, 8, 13, 2047, 2048, 3001])
def test_a_slice_of_an_apply_is_a_slice_of_the_whole(implementation: Kernels, start: int) -> None:
    rng = np.random.default_rng(start)
    messages = draw_messages(rng, 2, 7001, 1000)
    parameter, variance = rng.random(7001, np.float32), rng.random(7001, np.float32)

    def applied(begin: int, end: int) -> tuple[Floats, Floats]:
        x, m = parameter[begin:end].copy(), np.zeros(end - begin, np.float32)
        implementation.adam_apply(
            messages, begin, x, m, variance[begin:end], num_elements=7001, block=1000, step_size=0.1, eps=1e-3
        )
        return x, m

    for whole, part in zip(applied(0, 7001), applied(start, 6007), strict=True):
        assert_same_bits(part, whole[start:6007])


def test_triad_is_as_defined(implementation: Kernels) -> None:
    rng = np.random.default_rng(0)
    for num_elements in (0, 1, 2049, 5000):
        b, c = rng.standard_normal((2, num_elements)).astype(np.float32)
        a = np.full(num_elements, np.nan, np.float32)
        implementation.triad(a, b, c, 0.3)
        assert_same_bits(a, b + np.float32(0.3) * c)
    with pytest.raises(ValueError, match="a is written in place and must not overlap c"):
        implementation.triad(b, a, b, 1.0)


# ---- the order of sums ----


def sums_that_need_the_order(rng: np.random.Generator, num_elements: int) -> Floats:
    """Values whose mean lies so near to the middle of two floats that the order of the sum decides how it's rounded.

    2**24 + 1 is such a middle if the number of elements is a power of 2; what is added to it and is less than half a
    float64 ulp, 2**-29, is lost unless it was first added to another that is small.
    """
    values = np.zeros(num_elements, np.float32)
    values[0], values[32] = 2.0**24, 1.0
    small = rng.choice(num_elements - 33, rng.integers(1, 8), replace=False) + 33
    values[small] = rng.choice(floats_of([0.3, 0.55, 0.8]), small.size) * np.float32(2.0**-29)
    return values


@pytest.mark.parametrize("num_elements", [64, 256, 2048, 8192])
def test_scales_are_summed_in_the_one_order(implementation: Kernels, num_elements: int) -> None:
    rng = np.random.default_rng(num_elements)
    orders_seen = set()
    for _ in range(60):
        z = sums_that_need_the_order(rng, num_elements)
        message = new_message(num_elements, num_elements)
        implementation.compress(z, None, 0.9, None, message, block=num_elements, scale="mean")
        expected = oracle_scale(z.tolist(), "mean")
        assert message[:4].tobytes() == expected
        orders_seen.add(expected == struct.pack("<f", math.fsum(z.tolist()) / num_elements))
    assert orders_seen == {True, False}, "the data don't tell orders apart"


# ---- what must hold whatever the numbers ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", kernels.SCALES)
def test_ones_come_back_as_exactly_one(implementation: Kernels, scale: str, ranks: int) -> None:
    for num_elements, block in product(range(1, 101), (1, 8, 100, 2048)):
        ones = np.ones(num_elements, np.float32)
        messages = np.zeros((ranks, wire.message_num_bytes(num_elements, block)), np.uint8)
        for message in messages:
            implementation.compress(ones, None, 0.9, np.zeros_like(ones), message, block=block, scale=scale)
        values, error, reply = np.zeros_like(ones), np.zeros_like(ones), new_message(num_elements, block)
        implementation.average(messages, values, block=block)
        assert_same_bits(values, ones)
        implementation.reduce(messages, error, reply, num_elements=num_elements, block=block, scale=scale)
        implementation.decompress(reply, values, block=block)
        assert_same_bits(values, ones)
        assert not error.any()


@pytest.mark.parametrize("scale", kernels.SCALES)
def test_a_block_of_zeros_stays_exactly_zero(implementation: Kernels, scale: str) -> None:
    gradient = np.ones(300, np.float32)
    gradient[100:200] = 0
    gradient[150] = -0.0
    error, message, values = np.zeros(300, np.float32), new_message(300, 100), np.ones(300, np.float32)
    implementation.compress(gradient, np.zeros_like(gradient), 0.9, error, message, block=100, scale=scale)
    assert wire.scales_view(message, 300, 100)[1].tobytes() == bytes(4)
    reply, server_error = new_message(300, 100), np.zeros(300, np.float32)
    implementation.reduce([message] * 3, server_error, reply, num_elements=300, block=100, scale=scale)
    implementation.decompress(reply, values, block=100)
    for result in (error, server_error, values):
        assert not result[100:200].any()
    assert values[:100].all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", kernels.SCALES)
@pytest.mark.parametrize("block", [64, 100, 5000])
def test_what_is_not_finite_shows_and_touches_no_error(
    implementation: Kernels, block: int, scale: str, poison: float
) -> None:
    num_elements = 3 * block - 1
    rng = np.random.default_rng(0)
    gradient, error = rng.standard_normal((2, num_elements)).astype(np.float32)
    gradient[block + 3] = poison
    before, message = error.copy(), new_message(num_elements, block)
    implementation.compress(gradient, None, 0.9, error, message, block=block, scale=scale)
    scales = wire.scales_view(message, num_elements, block)
    assert np.isfinite(scales).tolist() == [True, False, True]
    assert scales[1].tobytes() == NAN_SCALE
    poisoned = slice(block, 2 * block)
    assert_same_bits(error[poisoned], before[poisoned])
    assert (error[:block] != before[:block]).all()
    assert (error[2 * block :] != before[2 * block :]).all()

    healthy, reply = new_message(num_elements, block), new_message(num_elements, block)
    implementation.compress(before, None, 0.9, None, healthy, block=block, scale=scale)
    assert implementation.scales_finite([healthy, healthy], num_elements, block)
    assert not implementation.scales_finite([healthy, message], num_elements, block)
    server_error = before.copy()
    implementation.reduce([healthy, message], server_error, reply, num_elements=num_elements, block=block, scale=scale)
    assert np.isfinite(wire.scales_view(reply, num_elements, block)).tolist() == [True, False, True]
    assert not implementation.scales_finite([reply], num_elements, block)
    assert_same_bits(server_error[poisoned], before[poisoned])


def test_huge_values_are_finite(implementation: Kernels) -> None:
    gradient = np.full(5000, np.finfo(np.float32).max, np.float32)
    for scale, block in product(kernels.SCALES, (1, 100, 5000)):
        error, message = np.zeros(5000, np.float32), new_message(5000, block)
        implementation.compress(gradient, None, 0.9, error, message, block=block, scale=scale)
        assert (wire.scales_view(message, 5000, block) == np.finfo(np.float32).max).all()
        assert not error.any()


@pytest.mark.parametrize("scale", kernels.SCALES)
@pytest.mark.parametrize("block", [8, 100, 2048, 5000])
def test_errors_telescope(implementation: Kernels, block: int, scale: str) -> None:
    # sum of what was sent + error = sum of what should have been sent, to the rounding of each step
    rng = np.random.default_rng(0)
    num_elements, steps = 5000, 20
    error, values = np.zeros(num_elements, np.float32), np.zeros(num_elements, np.float32)
    message = new_message(num_elements, block)
    wanted, sent, bound = np.zeros((3, num_elements))
    for _ in range(steps):
        gradient = rng.standard_normal(num_elements).astype(np.float32)
        z = gradient + error
        bound += 2.0**-24 * np.abs(z.astype(np.float64))
        implementation.compress(gradient, None, 0.9, error, message, block=block, scale=scale)
        implementation.decompress(message, values, block=block)
        wanted += gradient
        sent += values
        bound += 2.0**-24 * np.abs(error.astype(np.float64))
    assert (np.abs(sent + error - wanted) <= bound + 1e-12).all()


def test_held_elements_take_no_part(implementation: Kernels) -> None:
    rng = np.random.default_rng(0)
    for num_elements, block in product((9, 100, 2049, 5000), (8, 100, 2048, 5000)):
        live = (rng.random(num_elements) < 0.5).astype(np.float32)
        live[: block // 2] = 0
        gradient, error = rng.standard_normal((2, num_elements)).astype(np.float32)
        other_gradient = np.where(live != 0, gradient, np.float32(math.nan))
        results = []
        for one in (gradient, other_gradient):
            kept, message = error.copy(), new_message(num_elements, block)
            implementation.compress(one, None, 0.9, kept, message, block=block, live=live)
            assert_same_bits(kept[live == 0], error[live == 0])
            bits = wire.unpack_signs(wire.bits_view(message, num_elements, block), 0, num_elements)
            assert bits[live == 0].all()
            results.append((message.tobytes(), kept.tobytes()))
        assert results[0] == results[1]


def test_a_block_without_live_elements_has_scale_zero(implementation: Kernels) -> None:
    gradient, live = np.full(200, math.nan, np.float32), np.zeros(200, np.float32)
    live[100:] = 1
    gradient[100:] = -2
    message = new_message(200, 100)
    implementation.compress(gradient, None, 0.9, None, message, block=100, live=live)
    assert message.tobytes() == bytes.fromhex("00000000 00000040") + bytes([255] * 12 + [15] + [0] * 12)


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "numpy"])  # which obeys that mode
def test_flushing_of_denormals_has_no_effect_on_native_kernels(name: str) -> None:
    torch = pytest.importorskip("torch")  # which can set that mode of the processor
    implementation = IMPLEMENTATIONS[name]
    gradient = np.full(100, 1e-39, np.float32)
    error, message, values = np.full(100, 1e-40, np.float32), new_message(100, 100), np.zeros(100, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("no such mode here")
    try:
        implementation.compress(gradient, gradient, 0.5, error, message, block=100)
        implementation.decompress(message, values, block=100)
        flushes = float(gradient[:1].sum() * np.float32(0.5)) == 0
    finally:
        torch.set_flush_denormal(False)
    assert flushes, "the mode was restored"
    assert values.view(np.uint32)[0] == (np.float32(1e-39) + np.float32(1e-40)).view(np.uint32)


# ---- all implementations alike ----


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_elements=st.integers(0, 300) | st.integers(2000, 9000),
    block=st.integers(1, 9) | st.integers(1, 5000) | st.just(2048),
    ranks=st.integers(1, 20),
    scale=st.sampled_from(kernels.SCALES),
    given_arrays=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    offset=st.integers(0, 17),
    decay=st.sampled_from([1.0, 0.99]),
    hold=st.booleans(),
)
def test_implementations_agree_bit_for_bit(
    seed: int,
    num_elements: int,
    block: int,
    ranks: int,
    scale: str,
    given_arrays: tuple[bool, bool, bool],
    offset: int,
    decay: float,
    hold: bool,
) -> None:
    rng = np.random.default_rng(seed)
    specials = [[], SPECIALS, [math.nan, math.inf, -math.inf]][seed % 3]
    gradient, momentum, error, parameter = (draw_floats(rng, num_elements, specials=specials) for _ in range(4))
    variance = np.abs(draw_floats(rng, num_elements, specials=[0.0]))
    live = rng.choice(floats_of([0, 1]), num_elements)
    with_momentum, with_error, with_live = given_arrays
    messages = draw_messages(rng, ranks, num_elements, block)
    start = min(offset, num_elements)
    reference: list[Any] | None = None
    for implementation in IMPLEMENTATIONS.values():
        # the same values at addresses that differ in alignment
        kept = np.concatenate([np.zeros(offset, np.float32), error])[offset:]
        message = np.zeros(offset + messages.shape[1], np.uint8)[offset:]
        options: dict[str, Any] = {"block": block, "scale": scale, "live": live if with_live else None}
        implementation.compress(
            gradient, momentum if with_momentum else None, 0.9, kept if with_error else None, message, **options
        )
        results: list[Any] = [message.tobytes(), kept.copy()]
        implementation.reduce(messages, kept if with_error else None, message, num_elements=num_elements, **options)
        results += [message.tobytes(), kept.copy()]
        x, m = parameter[start:].copy(), momentum[start:].copy()
        implementation.adam_apply(
            messages,
            start,
            x,
            m,
            variance[start:],
            num_elements=num_elements,
            block=block,
            step_size=0.01,
            eps=1e-8,
            variance_correction=0.9,
            decay=decay,
            hold=hold,
        )
        results += [x, m]
        implementation.average(messages, kept, block=block)
        results.append(kept)
        if reference is None:
            reference = results
        for result, expected in zip(results, reference, strict=True):
            if isinstance(expected, bytes):
                assert result == expected
            else:
                assert_same_bits(result, expected)


# ---- threads ----


@pytest.mark.parametrize("block", [1, 8, 100, 2048, 3000, 4104, 10**6])
def test_threads_change_no_bit(implementation: Kernels, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(block)
    num_elements = 20011
    messages = draw_messages(rng, 3, num_elements, block)
    gradient, momentum, error, parameter = rng.standard_normal((4, num_elements)).astype(np.float32)
    gradient[7000] = np.inf
    variance, live = np.abs(gradient), rng.choice(floats_of([0, 1]), num_elements)

    def results(threads: int) -> list[bytes]:
        found: list[Floats | Bytes] = []
        for alive, scale in ((None, "rms"), (live, "mean")):
            kept, message = error.copy(), new_message(num_elements, block)
            options: dict[str, Any] = {"block": block, "scale": scale, "live": alive, "threads": threads}
            implementation.compress(gradient, momentum, 0.9, kept, message, **options)
            found += [kept.copy(), message.copy()]
            implementation.compress(gradient, None, 0.9, kept, message, kept=messages, **options)
            found += [kept.copy(), message.copy()]
            implementation.reduce(messages, kept, message, num_elements=num_elements, **options)
            found += [kept, message]
            values = np.empty(num_elements, np.float32)
            implementation.average(messages, values, block=block, live=alive, threads=threads)
            found.append(values)
        apply: dict[str, Any] = {"num_elements": num_elements, "block": block, "step_size": 0.1, "threads": threads}
        x, m = parameter[5:].copy(), momentum[5:].copy()
        implementation.adam_apply(messages, 5, x, m, variance[5:], eps=1e-3, hold=True, **apply)
        found += [x.copy(), m.copy()]
        implementation.momentum_apply(messages, 5, x, m, decay=0.9, **apply)
        implementation.triad(values, momentum, error, 0.3, threads=threads)
        found.append(values)
        return [array.tobytes() for array in [*found, x, m]]

    expected = results(1)
    monkeypatch.setattr(kernels, "_PART", 10)
    for threads in (2, 3, 7, 64):
        assert results(threads) == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_add_sub_blocks_in_the_one_order(
    implementation: Kernels, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_PART", 10)
    z = np.zeros(8 * 2048, np.float32)
    z[0], z[32] = 2.0**24, 1.0  # see sums_that_need_the_order
    z[[5 * 2048, 6 * 2048, 7 * 2048]] = np.float32(0.55 * 2.0**-29)  # each lost by itself, not if added up first
    message = new_message(z.size, z.size)
    implementation.compress(z, None, 0.9, None, message, block=z.size, scale="mean", threads=threads)
    assert message[:4].tobytes() == oracle_scale(z.tolist(), "mean")
    assert message[:4].tobytes() != oracle_scale(z[::-1].tolist(), "mean")


def test_threads_must_be_worth_it() -> None:
    assert [kernels._num_parts(8, n) for n in (0, 1, 1 << 19, 1 << 20, 1 << 30)] == [1, 1, 2, 4, 8]
    assert kernels._num_parts(1, 1 << 30) == 1
    assert kernels._num_parts(1000, 1 << 30) == 64
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        kernels._num_parts(0, 10)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_no_thread_outlives_a_call(implementation: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PART", 10)
    before = set(os.listdir("/proc/self/task"))
    ones, message = np.ones(10**5, np.float32), new_message(10**5, 2048)
    for block in (2048, 10**5):
        message = new_message(ones.size, block)
        implementation.compress(ones, None, 0.9, None, message, block=block, threads=8)
    assert set(os.listdir("/proc/self/task")) <= before


# ---- arguments ----


def test_any_buffer_will_do(implementation: Kernels) -> None:
    gradient = array.array("f", [3, -3, 3])
    error = array.array("f", [0, 0, 1])
    message = bytearray(5)
    implementation.compress(gradient, None, 0.9, error, memoryview(message), block=8, scale="mean")
    expected = np.zeros(5, np.uint8)
    IMPLEMENTATIONS["numpy"].compress(floats_of([3, -3, 4]), None, 0.9, None, expected, block=8, scale="mean")
    assert message == expected.tobytes()
    values = array.array("f", [0, 0, 0])
    implementation.average([bytes(message), message], values, block=8)
    assert values[0] == -values[1] == values[2] > 3
    assert implementation.scales_finite([bytes(message)], 3, 8)


def test_tensors_in_host_memory_are_written_through_their_view(implementation: Kernels) -> None:
    torch = pytest.importorskip("torch")
    gradient, error, message = torch.tensor([1.0, -1.0]), torch.ones(2), torch.zeros(5, dtype=torch.uint8)
    implementation.compress(gradient.numpy(), None, 0.9, error.numpy(), message.numpy(), block=2, scale="mean")
    assert message.tolist() == [0, 0, 128, 63, 255]
    assert error.tolist() == [1.0, -1.0]
    with pytest.raises(TypeError, match=r"gradient must be an array .* got Tensor; .* pass its NumPy view"):
        implementation.compress(gradient, None, 0.9, None, message.numpy(), block=2)


def test_messages_may_be_rows_of_a_larger_array(implementation: Kernels) -> None:
    rng = np.random.default_rng(0)
    messages = draw_messages(rng, 3, 100, 8)
    wide = np.zeros((3, messages.shape[1] + 3), np.uint8)
    wide[:, 1:-2] = messages
    expected, values = np.zeros((2, 100), np.float32)
    implementation.average(messages, expected, block=8)
    implementation.average(wide[:, 1:-2], values, block=8)
    assert_same_bits(values, expected)


class Arguments:
    """Sound arguments of every kernel, to be spoilt one at a time."""

    def __init__(self) -> None:
        self.floats = {name: np.ones(20, np.float32) for name in ("gradient", "momentum", "error", "live", "values")}
        self.floats |= {name: np.ones(20, np.float32) for name in ("parameter", "variance")}
        self.message = np.zeros(wire.message_num_bytes(20, 8), np.uint8)
        self.messages: Any = [np.zeros_like(self.message), np.zeros_like(self.message)]
        self.start, self.num_elements, self.block, self.scale = 0, 20, 8, "rms"

    def calls(self, of: Kernels) -> Iterator[Callable[[], object]]:
        """Calls of compress, reduce, average and adam_apply, in that order."""
        x = self.floats
        yield lambda: of.compress(
            x["gradient"],
            x["momentum"],
            0.9,
            x["error"],
            self.message,
            block=self.block,
            scale=self.scale,
            live=x["live"],
        )
        yield lambda: of.reduce(
            self.messages,
            x["error"],
            self.message,
            num_elements=self.num_elements,
            block=self.block,
            scale=self.scale,
            live=x["live"],
        )
        yield lambda: of.average(
            self.messages, x["values"], num_elements=self.num_elements, block=self.block, live=x["live"]
        )
        yield lambda: of.adam_apply(
            self.messages,
            self.start,
            x["parameter"],
            x["momentum"],
            x["variance"],
            num_elements=self.num_elements,
            block=self.block,
            step_size=0.1,
            eps=1e-8,
        )


COMPRESS, REDUCE, AVERAGE, APPLY = range(4)
READ = {COMPRESS: ["gradient", "momentum", "live"], REDUCE: ["live"], AVERAGE: ["live"], APPLY: ["variance"]}
WRITTEN = {COMPRESS: ["error"], REDUCE: ["error"], AVERAGE: ["values"], APPLY: ["parameter", "momentum"]}


def assert_refused(
    implementation: Kernels, arguments: Arguments, kernel: int, kind: type[Exception], message: str
) -> None:
    copies = {name: values.tobytes() for name, values in arguments.floats.items()}
    with pytest.raises(kind, match=message):
        list(arguments.calls(implementation))[kernel]()
    assert copies == {name: values.tobytes() for name, values in arguments.floats.items()}, "nothing was written"


def test_sound_arguments_are_accepted(implementation: Kernels) -> None:
    for call in Arguments().calls(implementation):
        call()


@pytest.mark.parametrize("kernel", range(4), ids=["compress", "reduce", "average", "apply"])
def test_bad_float_arrays_are_refused(implementation: Kernels, kernel: int) -> None:
    unaligned = np.zeros(81, np.uint8)[1:].view(np.float32)
    for name in READ[kernel] + WRITTEN[kernel]:
        cases: list[tuple[Any, type[Exception], str]] = [
            (np.ones(20), TypeError, f"{name} must be float32, got float64"),
            (np.ones(20, ">f4"), TypeError, f"{name} must be float32, got >f4"),
            (np.ones((4, 5), np.float32), ValueError, f"{name} must be one-dimensional and contiguous"),
            (np.ones(40, np.float32)[::2], ValueError, f"{name} must be one-dimensional and contiguous"),
            (unaligned, ValueError, f"{name} must be aligned to 4 bytes"),
        ]
        for spoilt, kind, message in cases:
            arguments = Arguments()
            arguments.floats[name] = spoilt
            assert_refused(implementation, arguments, kernel, kind, message)
        if name not in ("gradient", "parameter"):  # whose length is the one that counts
            arguments = Arguments()
            arguments.floats[name] = np.ones(19, np.float32)
            assert_refused(implementation, arguments, kernel, ValueError, f"{name} must have 20 elements, got 19")
    for name in WRITTEN[kernel]:
        arguments = Arguments()
        arguments.floats[name].flags.writeable = False
        assert_refused(implementation, arguments, kernel, ValueError, f"{name} is written in place, but is read-only")
    arguments = Arguments()
    arguments.block = 0
    assert_refused(implementation, arguments, kernel, ValueError, "block must be at least 1")


@pytest.mark.parametrize("kernel", [COMPRESS, REDUCE], ids=["compress", "reduce"])
def test_bad_outgoing_messages_are_refused(implementation: Kernels, kernel: int) -> None:
    arguments = Arguments()
    arguments.message = arguments.message[:-1]
    assert_refused(implementation, arguments, kernel, ValueError, "is 15 bytes long, got 14")
    arguments = Arguments()
    arguments.message.flags.writeable = False
    assert_refused(implementation, arguments, kernel, ValueError, "message is written in place, but is read-only")


@pytest.mark.parametrize("kernel", [REDUCE, AVERAGE, APPLY], ids=["reduce", "average", "apply"])
def test_bad_incoming_messages_are_refused(implementation: Kernels, kernel: int) -> None:
    sound = Arguments().message
    for spoilt, kind, message in [
        ([], ValueError, "messages must hold the message of one rank at least"),
        (sound, ValueError, r"or have shape \(n, bytes\), got shape \(15,\)"),
        ([sound, sound[:-1]], ValueError, "is 15 bytes long, got 14: truncated"),
        ([sound, np.zeros(16, np.uint8)], ValueError, "is 15 bytes long, got 16"),
        ([sound, sound.view(np.int8)], TypeError, "a message is made of uint8, got int8"),
        (np.zeros((2, 30), np.uint8)[:, ::2], ValueError, "one-dimensional and contiguous"),
    ]:
        arguments = Arguments()
        arguments.messages = spoilt
        assert_refused(implementation, arguments, kernel, kind, message)


@pytest.mark.parametrize("scale", ["RMS", "meen", "", None])
@pytest.mark.parametrize("kernel", [COMPRESS, REDUCE], ids=["compress", "reduce"])
def test_unknown_scales_are_refused(implementation: Kernels, kernel: int, scale: str) -> None:
    arguments = Arguments()
    arguments.scale = scale
    hint = "; did you mean 'mean'" if scale == "meen" else ""
    assert_refused(implementation, arguments, kernel, ValueError, f"scale must be 'rms' or 'mean', got {scale!r}{hint}")


@pytest.mark.parametrize(("start", "count"), [(-1, 20), (1, 20), (21, 0), (0, 21)])
def test_slices_beyond_the_message_are_refused(implementation: Kernels, start: int, count: int) -> None:
    arguments = Arguments()
    arguments.start = start
    for name in ("parameter", "momentum", "variance"):
        arguments.floats[name] = np.ones(count, np.float32)
    assert_refused(implementation, arguments, APPLY, ValueError, f"elements {start} to {start + count} reach beyond")


def test_average_checks_the_length_it_is_told(implementation: Kernels) -> None:
    arguments = Arguments()
    arguments.num_elements = 21
    assert_refused(implementation, arguments, AVERAGE, ValueError, "values must have 21 elements, got 20")


@pytest.mark.parametrize("kernel", range(4), ids=["compress", "reduce", "average", "apply"])
def test_overlap_with_what_is_written_is_refused(implementation: Kernels, kernel: int) -> None:
    memory = np.ones(21, np.float32)
    for written in WRITTEN[kernel]:
        for other in {*READ[kernel], *WRITTEN[kernel]} - {written}:
            arguments = Arguments()
            arguments.floats[written], arguments.floats[other] = memory[:20], memory[1:]
            expected = f"{written} is written in place and must not overlap {other}"
            swapped = f"{other} is written in place and must not overlap {written}"
            assert_refused(implementation, arguments, kernel, ValueError, f"{expected}|{swapped}")
        arguments = Arguments()
        num_bytes = arguments.message.size
        arguments.floats[written] = memory[:20]
        if kernel in (COMPRESS, REDUCE):
            arguments.message = memory.view(np.uint8)[79 : 79 + num_bytes].copy()
            arguments.message = memory.view(np.uint8)[84 - num_bytes :]
            assert_refused(implementation, arguments, kernel, ValueError, f"{written} .* must not overlap message")
        if kernel != COMPRESS:
            arguments = Arguments()
            arguments.floats[written] = memory[:20]
            arguments.messages[1] = memory.view(np.uint8)[:num_bytes]
            assert_refused(implementation, arguments, kernel, ValueError, rf"{written} .* not overlap messages\[1\]")


def test_a_message_is_not_reduced_into_itself(implementation: Kernels) -> None:
    arguments = Arguments()
    arguments.messages = np.zeros((2, arguments.message.size), np.uint8)
    arguments.message = arguments.messages[0]
    assert_refused(implementation, arguments, REDUCE, ValueError, r"message is .* must not overlap messages\[0\]")


def test_arrays_that_are_only_read_may_overlap(implementation: Kernels) -> None:
    arguments = Arguments()
    arguments.floats["momentum"] = arguments.floats["live"] = arguments.floats["gradient"]
    next(arguments.calls(implementation))()


def test_numbers_are_rounded_to_float32_without_a_warning(implementation: Kernels) -> None:
    message = new_message(1, 8)
    implementation.compress(floats_of([1.0]), None, 0.9, None, message, block=8)
    for step_size, expected in [(1e39, -math.inf), (1 + 2**-30, 0.0), (np.float64(0.5), 0.5)]:
        parameter, momentum = floats_of([1.0]), floats_of([0.0])
        implementation.momentum_apply([message], 0, parameter, momentum, num_elements=1, block=8, step_size=step_size)
        assert parameter[0] == expected


# ---- the module ----


def test_functions_are_those_of_the_fastest_implementation() -> None:
    order = ["numpy", "c", "neon"] if "neon" in IMPLEMENTATIONS else ["numpy", "c", "avx2", "avx512"]
    assert list(IMPLEMENTATIONS) == order[: len(IMPLEMENTATIONS)]
    fastest = list(IMPLEMENTATIONS.values())[-1]
    for name in kernels.__all__:
        function = getattr(kernels, name)
        if hasattr(function, "__self__"):
            assert function == getattr(fastest, name)
    assert (len(IMPLEMENTATIONS) > 1) == kernels.NATIVE
    assert repr(fastest) == f"<hvd_onebit kernels: {fastest.name}>"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def test_environment_variable_forces_numpy() -> None:
    code = """if True:
        import sys, numpy
        from hvd_onebit import kernels
        assert "hvd_onebit._kernels" not in sys.modules
        message = numpy.zeros(5, numpy.uint8)
        kernels.compress(numpy.float32([1, -1]), None, 0.9, None, message)
        print(kernels.NATIVE, list(kernels.implementations()), message.tolist())
    """
    result = run_python(code, HVD_ONEBIT_NATIVE="0")
    assert result.stdout == "False ['numpy'] [0, 0, 128, 63, 253]\n"
    assert result.stderr == ""


def test_a_missing_extension_is_logged_once_and_numpy_serves() -> None:
    code = """if True:
        import sys
        sys.modules["hvd_onebit._kernels"] = None
        from hvd_onebit import kernels
        print(kernels.NATIVE, list(kernels.implementations()))
    """
    result = run_python(code, HVD_ONEBIT_NATIVE="1")
    assert result.stdout == "False ['numpy']\n"
    assert result.stderr.count("no native kernels") == 1


native = pytest.mark.skipif(not kernels.NATIVE, reason="needs the native kernels")


@native
def test_native_kernels_let_other_threads_run() -> None:
    from hvd_onebit import _kernels  # type: ignore[attr-defined]  # called bare, as NumPy's checks release the GIL too

    gradient, message = np.ones(1 << 20, np.float32), np.zeros(wire.message_num_bytes(1 << 20, 1), np.uint8)
    calls = {"begun": False, "ended": False}

    def work() -> None:
        calls["begun"] = True
        _kernels.compress(0, [gradient], None, None, 0.9, 0.1, None, message, 1, False, None, 1)
        calls["ended"] = True

    with switch_interval(1000):  # a thread that doesn't release the GIL keeps it
        thread = threading.Thread(target=work)
        thread.start()
        while not calls["begun"]:
            time.sleep(1e-5)
        ended = calls["ended"]
        thread.join()
    assert not ended


@native
def test_the_extension_guards_memory_by_itself() -> None:
    from hvd_onebit import _kernels  # type: ignore[attr-defined]

    gradient, error, message = np.ones(20, np.float32), np.ones(20, np.float32), np.zeros(15, np.uint8)

    def compress(level: int = 0, **spoilt: Any) -> None:
        sound = {
            "gradients": [gradient, gradient],
            "momentum": None,
            "error": error,
            "message": message,
            "block": 8,
            "live": None,
        }
        sound |= {"kept": None, "threads": 1}
        a = sound | spoilt
        _kernels.compress(
            level,
            a["gradients"],
            a["momentum"],
            a["kept"],
            0.9,
            0.1,
            a["error"],
            a["message"],
            a["block"],
            False,
            a["live"],
            a["threads"],
        )

    compress()
    compress(kept=[message.copy(), bytes(15)])
    for spoilt in (
        {"level": -1},
        {"level": 3},
        {"gradients": [gradient[:19]]},
        {"gradients": [gradient, gradient[:19]]},
        {"gradients": [gradient, None]},
        {"gradients": []},
        {"gradients": None},
        {"momentum": gradient[:19]},
        {"error": error[1:]},
        {"live": error[1:]},
        {"message": message[1:]},
        {"message": None},
        {"message": bytes(15)},
        {"error": bytes(80)},
        {"block": 0},
        {"threads": 0},
        {"kept": []},
        {"kept": [message[1:]]},
        {"kept": 5},
        {"threads": 65},
        {"gradients": [bytes(79)]},
        {"gradients": [np.zeros(81, np.uint8)[1:]]},
        {"gradients": [gradient, np.zeros(81, np.uint8)[1:]]},
        {"gradients": [np.ones(40, np.float32)[::2]]},
    ):
        with pytest.raises((ValueError, TypeError, BufferError)):
            compress(**spoilt)

    def apply(messages: Any, start: int, count: int = 20) -> None:
        x = np.ones(count, np.float32)
        _kernels.apply(0, messages, start, x, x.copy(), None, 20, 8, 0.1, 0.0, 1.0, 1.0, False, 1)

    apply([message], 0)
    for messages, start, count in [([message], 1, 20), ([message], -1, 2), ([message], 21, 0), ([], 0, 20)]:
        with pytest.raises(ValueError, match=r"slice|one message"):
            apply(messages, start, count)
    with pytest.raises(ValueError, match="length"):
        _kernels.reduce(0, [message, message[1:]], None, message.copy(), 20, 8, False, None, 1)
    with pytest.raises(ValueError, match="length"):
        _kernels.average(0, [message], np.ones(25, np.float32), 8, None, 1)
    with pytest.raises(TypeError):
        _kernels.average(0, 5, np.ones(20, np.float32), 8, None, 1)
