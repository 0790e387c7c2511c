"""One message on the wire, bit by bit.

A message holds `num_elements` compressed values, cut into blocks of `block` consecutive elements (the last block may be
shorter; one block over everything, `block >= num_elements`, is one scale per tensor). With `num_blocks` blocks:

    bytes [0, 4 * num_blocks)             one scale per block, IEEE float32, little-endian
    bytes [4 * num_blocks, end)           one sign bit per element, ceil(num_elements / 8) bytes

Element `i` is bit `i % 8` (bit 0 is the least significant) of sign byte `i // 8`; 1 means `value >= 0`, so that -0.0 is
1 and NaN is 0. It decodes to `+scale` or `-scale` of block `i // block`. Bits run on through block borders: a block
whose size isn't a multiple of 8 shares a byte with its neighbour. The unused high bits of the last byte are 1.

No header, no padding, no alignment: a message of 0 elements is 0 bytes long, and its length follows from `num_elements`
and `block`, which both ends know. A block that held a NaN or an infinity has the scale NaN, always the bits 0x7fc00000:
that is how every rank learns that a step must be skipped.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "DEFAULT_BLOCK",
    "bits_view",
    "check_block",
    "check_message",
    "message_num_bytes",
    "message_ranges",
    "num_blocks",
    "pack_signs",
    "scales_view",
    "unpack_signs",
]

DEFAULT_BLOCK = 2048
"""Elements that share a scale unless a caller says otherwise: 0.016 bit an element, and one pass over memory."""

_SCALE = np.dtype("<f4")


def check_block(block: SupportsIndex) -> int:
    """`block` as an int.

    Raises:
        TypeError: `block` isn't an integer.
        ValueError: `block` is less than 1.
    """
    try:
        size = operator.index(block)
    except TypeError:
        raise TypeError(f"block must be an integer, got {block!r}") from None
    if size < 1:
        raise ValueError(f"block must be at least 1 element, got {size}")
    return size


def num_blocks(num_elements: SupportsIndex, block: SupportsIndex = DEFAULT_BLOCK) -> int:
    """Number of blocks, and so of scales, in a message of `num_elements` elements.

    Raises:
        TypeError: an argument isn't an integer.
        ValueError: `num_elements` is negative or `block` is less than 1.
    """
    return -(-_check_num_elements(num_elements) // check_block(block))


def message_num_bytes(num_elements: SupportsIndex, block: SupportsIndex = DEFAULT_BLOCK) -> int:
    """Length in bytes of a message of `num_elements` elements.

    Raises:
        TypeError: an argument isn't an integer.
        ValueError: `num_elements` is negative or `block` is less than 1.

    Example:
        >>> message_num_bytes(4096, block=2048)  # 2 scales and 512 bytes of signs
        520
    """
    return _SCALE.itemsize * num_blocks(num_elements, block) + _bits_num_bytes(operator.index(num_elements))


def check_message(
    message: NDArray[np.uint8] | Buffer, num_elements: SupportsIndex, block: SupportsIndex = DEFAULT_BLOCK
) -> NDArray[np.uint8]:
    """`message` as an array that shares its memory, once it's sure to be one message of `num_elements` elements.

    Returns:
        uint8, shape (message_num_bytes(num_elements, block),), contiguous; a view, never a copy.

    Raises:
        TypeError: `message` has no buffer, or its items aren't uint8.
        ValueError: it isn't one-dimensional and contiguous, or its length is wrong (a truncated message, another block
            size, or another number of elements).
    """
    array = message if isinstance(message, np.ndarray) else _array_of_buffer(message)
    if array.dtype != np.uint8:
        raise TypeError(f"a message is made of uint8, got {array.dtype}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"a message is one-dimensional and contiguous, got shape {array.shape}, strides {array.strides}"
        )
    expected = message_num_bytes(num_elements, block)
    if array.size != expected:
        raise ValueError(
            f"a message of {operator.index(num_elements)} elements in blocks of {operator.index(block)} is {expected} "
            f"bytes long, got {array.size}: truncated, or made with another block or number of elements"
        )
    return array


def scales_view(
    message: NDArray[np.uint8] | Buffer, num_elements: SupportsIndex, block: SupportsIndex = DEFAULT_BLOCK
) -> NDArray[np.float32]:
    """The scales of a message.

    Returns:
        Little-endian float32, shape (num_blocks(num_elements, block),): a view that shares the message's memory and may
        be unaligned.

    Raises:
        TypeError, ValueError: as `check_message`.
    """
    array = check_message(message, num_elements, block)
    return array[: _SCALE.itemsize * num_blocks(num_elements, block)].view(_SCALE)


def bits_view(
    message: NDArray[np.uint8] | Buffer, num_elements: SupportsIndex, block: SupportsIndex = DEFAULT_BLOCK
) -> NDArray[np.uint8]:
    """The bytes of sign bits of a message.

    Returns:
        uint8, shape (ceil(num_elements / 8),): a view that shares the message's memory.

    Raises:
        TypeError, ValueError: as `check_message`.
    """
    array = check_message(message, num_elements, block)
    return array[_SCALE.itemsize * num_blocks(num_elements, block) :]


def message_ranges(num_elements: int, block: int, low: int, high: int) -> tuple[slice, slice]:
    """Where elements [low, high) of a message stand in it: the bytes of their scales, and of their bits.

    Laid end to end, these are a message of high - low elements. `low` is a multiple of the block and of 8, and so is
    `high`, unless it is the end.
    """
    start = _SCALE.itemsize * num_blocks(num_elements, block)
    scales = slice(_SCALE.itemsize * (low // block), _SCALE.itemsize * num_blocks(high, block))
    return scales, slice(start + low // 8, start + _bits_num_bytes(high))


def pack_signs(signs: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The sign bytes of elements of which `signs` (bool, shape (n,)) says whether they are >= 0.

    Returns:
        uint8, shape (ceil(n / 8),); the pad bits are 1.
    """
    packed = np.packbits(signs, bitorder="little")
    if signs.size % 8:
        packed[-1] |= 0xFF << signs.size % 8 & 0xFF
    return packed


def unpack_signs(bits: NDArray[np.uint8], begin: int, end: int) -> NDArray[np.bool_]:
    """Whether elements `begin` to `end` (not included) are >= 0, from the sign bytes `bits` of a whole message.

    Returns:
        bool, shape (end - begin,).
    """
    first = begin // 8
    unpacked = np.unpackbits(bits[first : _bits_num_bytes(end)], bitorder="little")
    return unpacked[begin - 8 * first : end - 8 * first].view(np.bool_)


def _bits_num_bytes(num_elements: int) -> int:
    return -(-num_elements // 8)


def _check_num_elements(num_elements: SupportsIndex) -> int:
    try:
        count = operator.index(num_elements)
    except TypeError:
        raise TypeError(f"num_elements must be an integer, got {num_elements!r}") from None
    if count < 0:
        raise ValueError(f"num_elements must not be negative, got {count}")
    return count


def _array_of_buffer(buffer: Any) -> NDArray[Any]:
    try:
        return np.asarray(memoryview(buffer))
    except TypeError:
        raise TypeError(
            f"expected an array or another object with a buffer, got {type(buffer).__name__}; "
            "of a framework's tensor in host memory pass its NumPy view"
        ) from None
