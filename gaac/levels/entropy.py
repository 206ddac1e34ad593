"""Level 3: a short prefix code for each exponent, by its distance from a base of its channel.

Each channel of each block chooses its base, and one of four shapes, which say how long the code of
each distance is. Codes are cut into planes and strings of bits so that whole vectors of values are
coded at once. `gaac.kernels.entropy_numpy` shows all of it in numpy; `entropy_simd` does the same,
compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from gaac.kernels import cpu
from gaac.levels.base import Hints, Kernels, WordFormat, plane_bytes

LEVELS = 8
SHAPE_BITS = 2


class Entropy:
    """Level 3 (see the module)."""

    number = 3
    name = "entropy"
    streams = ("base", "shapes", "second", "levels", "patches", "planes", "low")

    def encode(self, words: np.ndarray, fmt: WordFormat, hints: Hints) -> Sequence[np.ndarray]:
        return kernels_of(cpu.path(), fmt.name).encode(words, fmt)

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        values = rows * width
        base, shapes, second, levels, patches, planes, low = lengths
        return (
            base == blocks * width
            and shapes == blocks * SHAPE_BITS * plane_bytes(width)
            and second <= plane_bytes(blocks * values)
            and levels <= LEVELS * plane_bytes(blocks * values)
            and patches <= blocks * values
            and planes == blocks * (1 + fmt.extra_bits) * plane_bytes(values)
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
        from gaac.kernels import entropy_simd

        return entropy_simd.CODERS[path]
    from gaac.kernels import entropy_numpy

    return entropy_numpy
