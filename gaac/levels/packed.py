"""Level 1: three bits for each exponent, counted from a base per channel.

Fixed width, so that a reader finds any row without decoding those before it. In each block the
base of a channel is the smallest exponent that has a code; code 7 is an escape, and the true
exponent is then a byte in `escapes`, in row order. `offsets` says where the escapes of each tile
of 64 rows start. `escapes` is filled up with zeros, so that `planes` and `low` start at a multiple
of 64 bytes.

The base is that one of four, which put the largest exponent of the channel at code 6, 7, 8 or 9
(at most; a base is at least zero), under which the fewest values escape; the highest among equals.
`gaac.kernels.packed_numpy` shows all of it in numpy; `packed_simd` does the same, compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from gaac.kernels import cpu
from gaac.levels.base import Hints, Kernels, WordFormat, plane_bytes

TILE_ROWS = 64
ESCAPE = 7
CODE_BITS = 3
ALIGN = 64
BASE_CANDIDATES = 4


class Packed:
    """Level 1 (see the module)."""

    number = 1
    name = "packed"
    streams = ("base", "offsets", "escapes", "planes", "low")

    def encode(self, words: np.ndarray, fmt: WordFormat, hints: Hints) -> Sequence[np.ndarray]:
        return kernels_of(cpu.path(), fmt.name).encode(words, fmt)

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        values = rows * width
        base, offsets, escapes, planes, low = lengths
        return (
            base == blocks * width
            and offsets == 4 * blocks * -(-rows // TILE_ROWS)
            and escapes < blocks * values + ALIGN
            and (base + offsets + escapes) % ALIGN == 0
            and planes == blocks * (CODE_BITS + fmt.extra_bits) * plane_bytes(values)
            and low == blocks * values * fmt.low_bytes
        )

    def decode(
        self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> None:
        kernels_of(cpu.path(), fmt.name).decode(streams, out, fmt)


@functools.cache
def kernels_of(path: str, dtype: str) -> Kernels:
    """The kernels of a path (see `gaac.kernels.cpu`); those of numpy for one-byte dtypes."""
    if path != "numpy" and dtype in ("bfloat16", "float16"):
        from gaac.kernels import packed_simd

        return packed_simd.KERNELS[path, dtype]
    from gaac.kernels import packed_numpy

    return packed_numpy
