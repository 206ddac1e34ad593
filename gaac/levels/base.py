"""What every level offers, and the split of a word that levels share.

A level codes one segment at a time: `words`, uint16, shape (blocks, rows, width). It returns its
streams in a fixed order; the frame keeps their lengths. A level never sees a header, a file or a
tensor, and it never writes to its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class WordFormat:
    """Where a 16-bit float keeps its exponent.

    `low` takes eight of the other bits; what is left over goes bit by bit into `extra_bits`
    planes: none for bfloat16 (low is mantissa << 1 | sign), and for float16, whose low byte is the
    low byte of the word, mantissa bits 8 and 9 and the sign.
    """

    name: str
    exponent_shift: int
    exponent_max: int
    extra_bits: int


FORMATS = {
    "bfloat16": WordFormat("bfloat16", exponent_shift=7, exponent_max=255, extra_bits=0),
    "float16": WordFormat("float16", exponent_shift=10, exponent_max=31, extra_bits=3),
}

# The bits of a float16's high byte that are not exponent: mantissa bits 8 and 9, sign.
FP16_EXTRA = (0x01, 0x02, 0x80)


class Level(Protocol):
    """One way to code a segment; `streams` names its streams in the order they are stored."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def streams(self) -> tuple[str, ...]: ...

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        """Code words, uint16 (blocks, rows, width), into uint8 streams, one for each name."""
        ...

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        """Whether streams of these lengths can code (blocks, rows, width) words.

        Called before anything is allocated for the words: a level must demand at least one byte
        of stream for each word.
        """
        ...

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        """Write the words into `out`, uint16 (blocks, rows, width), which may be strided.

        Raises CorruptFrame if the streams contradict each other.
        """
        ...


def split(words: np.ndarray, fmt: WordFormat) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Split words, uint16, into exponent and low byte (uint8, same shape) and the extra bits.

    Each extra bit is a uint8 array that is non-zero where the bit is set.
    """
    if fmt.name == "bfloat16":
        exponent = (words >> np.uint16(7)).astype(np.uint8)
        rotated = words << np.uint16(1)
        rotated |= words >> np.uint16(15)
        return exponent, rotated.astype(np.uint8), []
    high = (words >> np.uint16(8)).astype(np.uint8)
    exponent = ((words >> np.uint16(10)) & np.uint16(31)).astype(np.uint8)
    return exponent, words.astype(np.uint8), [high & np.uint8(bit) for bit in FP16_EXTRA]


def join(
    exponent: np.ndarray,
    low: np.ndarray,
    extra: Sequence[np.ndarray],
    out: np.ndarray,
    fmt: WordFormat,
) -> None:
    """Undo `split` into `out`; extra bits are uint8 arrays of 0 and 1, overwritten on the way."""
    high_word = exponent.astype(np.uint16)
    low_word = low.astype(np.uint16)
    high_word <<= np.uint16(fmt.exponent_shift)
    if fmt.name == "bfloat16":
        high_word |= low_word >> np.uint16(1)
        low_word <<= np.uint16(15)
    else:
        mantissa8, mantissa9, sign = extra
        mantissa9 += mantissa9
        mantissa9 |= mantissa8
        sign *= np.uint8(0x80)
        mantissa9 |= sign
        top = mantissa9.astype(np.uint16)
        top <<= np.uint16(8)
        high_word |= top
    np.bitwise_or(high_word, low_word, out=out)


def pack_planes(planes: Sequence[np.ndarray]) -> np.ndarray:
    """Pack bit arrays, each (blocks, values), into uint8 (blocks, planes, ceil(values / 8)).

    Value i is bit i % 8 of byte i // 8; bits behind the last value are zero.
    """
    return np.stack([np.packbits(plane, axis=1, bitorder="little") for plane in planes], axis=1)


def plane_bytes(values: int) -> int:
    """Bytes of one bit plane over `values` values."""
    return -(-values // 8)


def planes_clean(planes: np.ndarray, values: int) -> bool:
    """Whether the bits behind the last value of each plane, uint8 (..., bytes), are zero."""
    spare = values % 8
    return not spare or not bool((planes[..., -1] >> np.uint8(spare)).any())


def halve_rows(operation: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Combine the rows of (blocks, rows, width) in pairs while they are many and even.

    A reduction over what is left costs numpy less: its inner loop is only one row long.
    """
    while values.shape[1] % 2 == 0 and values.shape[1] > 32:
        half = values.shape[1] // 2
        values = operation(values[:, :half], values[:, half:])
    return values


def fold(rows: int, width: int) -> int:
    """How many rows to treat as one: numpy is slow on short inner loops."""
    times = 1
    while rows % (2 * times) == 0 and times * width < 1024:
        times *= 2
    return times


def subtract_rows(values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """values - base for each row, modulo 256: (blocks, rows, width) and (blocks, width), uint8."""
    return _by_row(np.subtract, values, base)


def add_rows(values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """values + base for each row, modulo 256: (blocks, rows, width) and (blocks, width), uint8."""
    return _by_row(np.add, values, base)


def _by_row(operation: np.ufunc, values: np.ndarray, base: np.ndarray) -> np.ndarray:
    blocks, rows, width = values.shape
    times = fold(rows, width)
    wide = np.broadcast_to(base[:, None, :], (blocks, times, width)).reshape(blocks, 1, -1)
    result: np.ndarray = operation(values.reshape(blocks, rows // times, times * width), wide)
    return result.reshape(blocks, rows, width)
