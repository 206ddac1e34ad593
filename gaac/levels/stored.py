"""Level 0: the words as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac.levels.base import WordFormat


class Stored:
    """Level 0: one stream, the words in little-endian order."""

    number = 0
    name = "stored"
    streams = ("words",)

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        return (np.ascontiguousarray(words, dtype="<u2").reshape(-1).view(np.uint8),)

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        return lengths[0] == 2 * blocks * rows * width

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        out[...] = streams[0].view("<u2").reshape(out.shape)
