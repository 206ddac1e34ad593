"""What every level offers, and the split of a word that levels share.

A level codes one segment at a time: `words`, shape (blocks, rows, width), uint16 or, for one-byte
dtypes, uint8. It returns its streams in a fixed order; the frame keeps their lengths. A level never
sees a header, a file or a tensor, and it never writes to its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gaac.rope import Rope


@dataclass(frozen=True)
class WordFormat:
    """Where a float keeps its exponent, and where the rest of its bits goes.

    exponent_shift: the exponent's lowest bit in the word. exponent_max: all its bits set.
    low_bytes: 1 if a byte of the rest goes into stream `low` (bfloat16: mantissa << 1 | sign,
    float16: the low byte of the word), 0 for one-byte dtypes, which have no such stream content.
    extra: the bits of the word, by position, that become planes of their own.
    """

    name: str
    exponent_shift: int
    exponent_max: int
    low_bytes: int
    extra: tuple[int, ...] = ()

    @property
    def extra_bits(self) -> int:
        """Planes behind those of the code."""
        return len(self.extra)

    @property
    def word_bytes(self) -> int:
        """Bytes of a word: 2, or 1 for one-byte dtypes."""
        return 1 + self.low_bytes


# float8 as in "FP8 Formats for Deep Learning" (arXiv 2209.05433): E4M3 without infinities, E5M2.
FORMATS = {
    "float16": WordFormat("float16", 10, 31, low_bytes=1, extra=(8, 9, 15)),
    "bfloat16": WordFormat("bfloat16", 7, 255, low_bytes=1),
    "float8_e4m3fn": WordFormat("float8_e4m3fn", 3, 15, low_bytes=0, extra=(0, 1, 2, 7)),
    "float8_e5m2": WordFormat("float8_e5m2", 2, 31, low_bytes=0, extra=(0, 1, 7)),
}


@dataclass(frozen=True, eq=False)
class Hints:
    """What a level may be told about a segment besides its words.

    rope: the rotation that keys carry; the frame keeps it, so encode and decode see the same.
    """

    rope: Rope | None = None


class Level(Protocol):
    """One way to code a segment; `streams` names its streams in the order they are stored."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def streams(self) -> tuple[str, ...]: ...

    def encode(
        self, words: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> Sequence[np.ndarray] | None:
        """Code words, (blocks, rows, width), into uint8 streams, one for each name.

        words may be strided. None if this level does not code such words: the next lower one is
        then asked.
        """
        ...

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        """Whether streams of these lengths, in bytes, can code (blocks, rows, width) words.

        Called before anything is allocated for the words: a level must demand at least a quarter of
        a byte of stream for each byte of them.
        """
        ...

    def decode(
        self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> None:
        """Write the words into `out`, (blocks, rows, width), which may be strided.

        Raises CorruptFrame if the streams contradict each other.
        """
        ...


class Kernels(Protocol):
    """The two directions of a level on one path of `gaac.kernels.cpu`, for one dtype or all."""

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        """The streams of the level for words, (blocks, rows, width)."""
        ...

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        """Write the words into `out`; the streams have the lengths that its shape demands.

        Raises CorruptFrame if they contradict each other.
        """
        ...


def split(words: np.ndarray, fmt: WordFormat) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Split words, uint16 or uint8, into exponent, low byte and the extra bits.

    Exponent and low byte are uint8 of the words' shape; for one-byte dtypes low has no values. Each
    extra bit is a uint8 array of the words' shape that is non-zero where the bit is set.
    """
    if fmt.low_bytes == 0:
        exponent = (words >> np.uint8(fmt.exponent_shift)) & np.uint8(fmt.exponent_max)
        bits = [words & np.uint8(1 << position) for position in fmt.extra]
        return exponent, np.zeros(0, np.uint8), bits
    if fmt.name == "bfloat16":
        exponent = (words >> np.uint16(7)).astype(np.uint8)
        rotated = words << np.uint16(1)
        rotated |= words >> np.uint16(15)
        return exponent, rotated.astype(np.uint8), []
    high = (words >> np.uint16(8)).astype(np.uint8)
    exponent = ((words >> np.uint16(10)) & np.uint16(31)).astype(np.uint8)
    bits = [high & np.uint8(1 << position - 8) for position in fmt.extra]
    return exponent, words.astype(np.uint8), bits


def join(
    exponent: np.ndarray,
    low: np.ndarray,
    extra: Sequence[np.ndarray],
    out: np.ndarray,
    fmt: WordFormat,
) -> None:
    """Undo `split` into `out`, uint16 or uint8; low may be flat, extra bits are uint8, 0 or 1."""
    words = exponent.astype(out.dtype)
    words <<= out.dtype.type(fmt.exponent_shift)
    for position, bits in zip(fmt.extra, extra, strict=True):
        words |= bits.astype(out.dtype) << out.dtype.type(position)
    if fmt.low_bytes:
        low_word = low.reshape(out.shape).astype(np.uint16)
        if fmt.name == "bfloat16":
            words |= low_word >> np.uint16(1)
            low_word <<= np.uint16(15)
        words |= low_word
    out[...] = words


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
