"""Tokens whose rows repeat an earlier token's in every matrix of a segment.

They do in the values of a model's first layer, which depend on the token alone, and in padding.
Such a segment codes each different row once, with a byte for each token that says which it has.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import cpu

MAX_ROWS = 256
SAMPLE_BYTES = 8
LEAST_SHARE = 16  # one token in so many must repeat: what a copy of the rows costs


def likely(words: np.ndarray, block_rows: int) -> bool:
    """Whether repeats may pay in words cut into blocks of block_rows, at most 256, tokens.

    words: (matrices, tokens, width), the last axis contiguous. Looks at 16 bytes of each token.
    """
    _, tokens, width = words.shape
    if tokens < 2 or width * words.itemsize < SAMPLE_BYTES:
        return False
    return _kernels().count_samples(words, block_rows, SAMPLE_BYTES) * LEAST_SHARE >= tokens


def find(words: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The repeats in one block of tokens that `likely` speaks for, or None if they do not pay.

    words: (matrices, rows, width), the last axis contiguous, 256 rows or fewer. Gives for each row
    which of the coded rows it equals, uint8 (rows,), and for each coded row where it first stands.
    """
    matrices, rows, width = words.shape
    index, first_rows = _kernels().index_rows(words)
    repeated = rows - len(first_rows)
    # A value that need not be coded saves about a byte.
    if repeated * LEAST_SHARE < rows or repeated * matrices * width <= rows:
        return None
    return index, first_rows


def check(index: np.ndarray, unique_rows: int) -> None:
    """Raise CorruptFrame unless every coded row is named, in the order of its first appearance."""
    largest = np.maximum.accumulate(index)
    steps = np.diff(largest)  # of what never falls: no overflow
    if index[0] != 0 or largest[-1] != unique_rows - 1 or (steps > 1).any():
        raise CorruptFrame("A segment's repeats do not name its rows in their order.")


@cache
def _kernels() -> ModuleType:
    if cpu.path() == "numpy":
        from gaac.kernels import repeats_numpy

        return repeats_numpy
    from gaac.kernels import repeats_scan

    return repeats_scan
