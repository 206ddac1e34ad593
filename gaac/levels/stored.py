"""Level 0: the words as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac.levels.base import Hints, WordFormat


class Stored:
    """Level 0: one stream, the words in little-endian order."""

    number = 0
    name = "stored"
    streams = ("words",)

    def encode(self, words: np.ndarray, fmt: WordFormat, hints: Hints) -> Sequence[np.ndarray]:
        return (np.ascontiguousarray(words).reshape(-1).view(np.uint8),)

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        return lengths[0] == fmt.word_bytes * blocks * rows * width

    def decode(
        self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> None:
        out[...] = streams[0].view(out.dtype).reshape(out.shape)
