"""Level 1 in numpy: the reading of the format that the compiled kernels must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac.errors import CorruptFrame
from gaac.levels.base import (
    WordFormat,
    add_rows,
    halve_rows,
    join,
    pack_planes,
    plane_bytes,
    planes_clean,
    split,
    subtract_rows,
)
from gaac.levels.packed import ALIGN, BASE_CANDIDATES, CODE_BITS, ESCAPE, TILE_ROWS

# Sums of flags in uint8 hold while no more than 255 rows are added up.
ROWS_HALVED = 4096


def encode(words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
    """The streams of words, (blocks, rows, width)."""
    blocks, rows, width = words.shape
    exponent, low, extra = split(words, fmt)
    base = best_base(exponent)
    code = subtract_rows(exponent, base).reshape(blocks, -1)
    where = np.flatnonzero(code > np.uint8(ESCAPE - 1))
    code.reshape(-1)[where] = ESCAPE
    planes = [code & np.uint8(1 << bit) for bit in range(CODE_BITS)]
    planes += [bits.reshape(blocks, -1) for bits in extra]
    offsets = np.searchsorted(where, tile_starts(blocks, rows, width)).astype("<u4")
    spare = -(base.size + 4 * offsets.size + len(where)) % ALIGN
    escapes = np.zeros(len(where) + spare, np.uint8)
    escapes[: len(where)] = exponent.reshape(-1)[where]
    return (
        base.reshape(-1),
        offsets.view(np.uint8),
        escapes,
        pack_planes(planes).reshape(-1),
        low.reshape(-1),
    )


def decode(streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
    """Write the words into `out`, (blocks, rows, width); the streams have the right lengths.

    Raises CorruptFrame if they contradict each other.
    """
    blocks, rows, width = out.shape
    values = rows * width
    base, offsets, escapes, planes, low = streams
    packed = planes.reshape(blocks, CODE_BITS + fmt.extra_bits, plane_bytes(values))
    if not planes_clean(packed, values):
        raise CorruptFrame("The bit planes hold bits behind their last value.")
    bits = np.unpackbits(packed, axis=2, count=values, bitorder="little")
    code = bits[:, 2] + bits[:, 2]
    code += bits[:, 1]
    code += code
    code += bits[:, 0]
    where = np.flatnonzero(code == np.uint8(ESCAPE))
    starts = np.searchsorted(where, tile_starts(blocks, rows, width))
    base = base.reshape(blocks, width)
    _check(base, np.frombuffer(offsets, "<u4"), escapes, len(where), starts, fmt)
    exponent = add_rows(code.reshape(blocks, rows, width), base)
    exponent.reshape(-1)[where] = escapes[: len(where)]
    extra = [bits[:, CODE_BITS + i].reshape(out.shape) for i in range(fmt.extra_bits)]
    join(exponent, low, extra, out, fmt)


def _check(
    base: np.ndarray,
    offsets: np.ndarray,
    escapes: np.ndarray,
    count: int,
    starts: np.ndarray,
    fmt: WordFormat,
) -> None:
    spare = len(escapes) - count
    if not 0 <= spare < ALIGN or escapes[count:].any() or not np.array_equal(offsets, starts):
        raise CorruptFrame("The escapes are not as many as the codes ask for.")
    limit = fmt.exponent_max
    if base.max(initial=0) > limit - ESCAPE + 1 or escapes.max(initial=0) > limit:
        raise CorruptFrame("An exponent lies outside the range of its dtype.")


def best_base(exponent: np.ndarray) -> np.ndarray:
    """The base of each channel, uint8 (blocks, width), for exponents (blocks, rows, width).

    Codes 0 to 6 reach from the base to base + 6. Tried are the four bases that put the largest
    exponent at code 6, 7, 8 or 9; the one with fewest escapes wins, the highest among equals.
    """
    largest = halve_rows(np.maximum, exponent).max(axis=1)
    best = np.zeros(0, np.uint8)
    fewest = np.zeros(0, np.uint32)
    for above in range(BASE_CANDIDATES):
        reach = np.uint8(ESCAPE - 1 + above)
        base = np.maximum(largest, reach) - reach
        escaped = subtract_rows(exponent, base) > np.uint8(ESCAPE - 1)
        count = count_rows(escaped)
        if above == 0:
            best, fewest = base, count
            continue
        better = count < fewest
        best = np.where(better, base, best)
        fewest = np.where(better, count, fewest)
    return best


def count_rows(flags: np.ndarray) -> np.ndarray:
    """How many flags are set in each channel, uint32 (blocks, width), for (blocks, rows, width)."""
    values = flags.view(np.uint8)
    if flags.shape[1] <= ROWS_HALVED:
        values = halve_rows(np.add, values)
    counts: np.ndarray = np.add.reduce(values, axis=1, dtype=np.uint32)
    return counts


def tile_starts(blocks: int, rows: int, width: int) -> np.ndarray:
    """Index of the first value of each tile of 64 rows, over all blocks of a segment."""
    in_block = np.arange(0, rows, TILE_ROWS) * width
    starts: np.ndarray = np.arange(blocks)[:, None] * (rows * width) + in_block
    return starts.reshape(-1)
