"""The layout of a message: golden bytes pin it, so that ranks of different releases understand each other."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_onebit import kernels, wire

# Eleven values in blocks of 4: magnitudes 2, 0.5 and 8; signs + - - +, + + - -, - + + and five pad bits of 1.
GOLDEN_VALUES = [2, -2, -2, 2, 0.5, 0.5, -0.5, -0.5, -8, 8, 8]
GOLDEN_BYTES = "00000040 0000003f 00000041 39 fe"


def test_golden_bytes() -> None:
    values = np.array(GOLDEN_VALUES, np.float32)
    golden = bytes.fromhex(GOLDEN_BYTES)
    for implementation in kernels.implementations().values():
        for scale in kernels.SCALES:
            message = np.zeros(len(golden), np.uint8)
            implementation.compress(values, None, 0.9, None, message, block=4, scale=scale)
            assert message.tobytes() == golden
        decoded = np.zeros_like(values)
        implementation.decompress(np.frombuffer(golden, np.uint8), decoded, block=4)
        np.testing.assert_array_equal(decoded, values)


def test_golden_bytes_of_special_values() -> None:
    # -0.0 counts as positive, NaN as negative, and the block with a NaN has the scale NaN, always the same one.
    values = np.array([-0.0, 0.0, np.inf, np.nan, -1e-45], np.float32)
    for implementation in kernels.implementations().values():
        message = np.zeros(wire.message_num_bytes(5, 2), np.uint8)
        implementation.compress(values, None, 0.9, None, message, block=2, scale="mean")
        assert message.tobytes() == bytes.fromhex("00000000 0000c07f 01000000 e7")


@pytest.mark.parametrize(
    ("num_elements", "block", "blocks", "num_bytes"),
    [
        (0, 1, 0, 0),
        (0, 2048, 0, 0),
        (1, 2048, 1, 5),
        (8, 1, 8, 33),
        (9, 8, 2, 10),
        (2048, 2048, 1, 260),
        (2049, 2048, 2, 265),
        (4096, 2048, 2, 520),
        (5000, 10**30, 1, 629),
        (5000, 100, 50, 825),
        (2**40, 2048, 2**29, 2**31 + 2**37),
    ],
)
def test_sizes(num_elements: int, block: int, blocks: int, num_bytes: int) -> None:
    assert wire.num_blocks(num_elements, block) == blocks
    assert wire.message_num_bytes(num_elements, block) == num_bytes
    assert wire.message_num_bytes(np.int64(num_elements), block) == num_bytes


def test_default_block() -> None:
    assert wire.DEFAULT_BLOCK == 2048
    assert wire.message_num_bytes(10_000) == wire.message_num_bytes(10_000, 2048)


@pytest.mark.parametrize(
    ("num_elements", "block", "error", "message"),
    [
        (-1, 8, ValueError, "num_elements must not be negative, got -1"),
        (8, 0, ValueError, "block must be at least 1 element, got 0"),
        (8, -8, ValueError, "block must be at least 1 element, got -8"),
        (8.0, 8, TypeError, "num_elements must be an integer, got 8.0"),
        (8, 8.0, TypeError, "block must be an integer, got 8.0"),
        (8, None, TypeError, "block must be an integer, got None"),
    ],
)
def test_counts_that_make_no_sense(num_elements: int, block: int, error: type[Exception], message: str) -> None:
    for function in (wire.num_blocks, wire.message_num_bytes):
        with pytest.raises(error, match=message):
            function(num_elements, block)


def test_check_message_returns_a_view() -> None:
    backing = bytearray(wire.message_num_bytes(9, 8))
    array = wire.check_message(backing, 9, 8)
    array[3] = 77
    assert backing[3] == 77
    assert wire.check_message(array, 9, 8) is array


@pytest.mark.parametrize("num_bytes", [0, 9, 11, 20])
def test_wrong_length_is_refused(num_bytes: int) -> None:
    expected = f"a message of 9 elements in blocks of 8 is 10 bytes long, got {num_bytes}"
    for function in (wire.check_message, wire.scales_view, wire.bits_view):
        with pytest.raises(ValueError, match=expected):
            function(np.zeros(num_bytes, np.uint8), 9, 8)


def test_wrong_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="made of uint8, got int8"):
        wire.check_message(np.zeros(10, np.int8), 9, 8)
    with pytest.raises(TypeError, match="another object with a buffer, got list"):
        wire.check_message([0] * 10, 9, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one-dimensional and contiguous"):
        wire.check_message(np.zeros((1, 10), np.uint8), 9, 8)
    with pytest.raises(ValueError, match="one-dimensional and contiguous"):
        wire.check_message(np.zeros(20, np.uint8)[::2], 9, 8)


def test_views_share_the_memory_of_the_message() -> None:
    message = np.zeros(wire.message_num_bytes(20, 8) + 1, np.uint8)[1:]
    scales, bits = wire.scales_view(message, 20, 8), wire.bits_view(message, 20, 8)
    assert scales.shape == (3,)
    assert bits.shape == (3,)
    scales[:] = [1, 2, 0.5]
    bits[:] = [1, 2, 3]
    assert message.tobytes() == bytes.fromhex("0000803f 00000040 0000003f 010203")


@pytest.mark.parametrize("num_elements", [0, 1, 7, 8, 9, 63, 64, 65])
def test_signs_round_trip(num_elements: int) -> None:
    signs = np.arange(num_elements) % 3 == 0
    bits = wire.pack_signs(signs)
    assert [byte >> k & 1 for byte in bits.tolist() for k in range(8)] == [
        *signs.tolist(),
        *[1] * (-num_elements % 8),
    ]
    for begin in range(num_elements + 1):
        np.testing.assert_array_equal(wire.unpack_signs(bits, begin, num_elements), signs[begin:])
        np.testing.assert_array_equal(wire.unpack_signs(bits, 0, begin), signs[:begin])
