"""Level 2: a code of two, four or six bits for each exponent, by how frequent its distance is.

A value's distance from the base of its channel has a *rank* in the segment: ranks 0 to 2 take a
code of two bits, ranks 3 to 5 another two, ranks 6 to 8 two more, and every other exponent is then
a byte. First codes lie in planes, as at level 1; the later ones in strings of bits, and `offsets`
says where those of each tile of 64 rows start, so that a reader finds any tile without decoding
those before it. `gaac.kernels.tiered_numpy` shows all of it in numpy; `tiered_simd` does the same,
compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from gaac.kernels import cpu
from gaac.levels.base import Hints, Kernels, WordFormat, plane_bytes
from gaac.levels.packed import ALIGN, TILE_ROWS

CODE_BITS = 2
FURTHER = 3  # the code of what goes on to the next tier, and the number of ranks of each tier
TIERS = 3
RANKS = TIERS * FURTHER
OFFSETS = 3  # of a tile: into second, third and escapes
OFFSET_BYTES = 4


class Tiered:
    """Level 2 (see the module)."""

    number = 2
    name = "tiered"
    streams = ("base", "ranks", "offsets", "second", "third", "escapes", "planes", "low")

    def encode(self, words: np.ndarray, fmt: WordFormat, hints: Hints) -> Sequence[np.ndarray]:
        return kernels_of(cpu.path(), fmt.name).encode(words, fmt)

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        values = rows * width
        base, ranks, offsets, second, third, escapes, planes, low = lengths
        return (
            base == blocks * width
            and ranks == RANKS
            and offsets == OFFSET_BYTES * OFFSETS * blocks * tiles_of(rows)
            and second % CODE_BITS == third % CODE_BITS == 0
            and third <= second <= CODE_BITS * plane_bytes(blocks * values)
            and escapes < blocks * values + ALIGN
            and (base + ranks + offsets + second + third + escapes) % ALIGN == 0
            and planes == blocks * (CODE_BITS + fmt.extra_bits) * plane_bytes(values)
            and low == blocks * values * fmt.low_bytes
        )

    def decode(
        self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> None:
        kernels_of(cpu.path(), fmt.name).decode(streams, out, fmt)


def tiles_of(rows: int) -> int:
    """Tiles of a block; the last may have fewer rows."""
    return -(-rows // TILE_ROWS)


@functools.cache
def kernels_of(path: str, dtype: str) -> Kernels:
    """The kernels of a path (see `gaac.kernels.cpu`); those of numpy for one-byte dtypes."""
    if path != "numpy" and dtype in ("bfloat16", "float16"):
        from gaac.kernels import tiered_simd

        return tiered_simd.CODERS[path, dtype]
    from gaac.kernels import tiered_numpy

    return tiered_numpy
