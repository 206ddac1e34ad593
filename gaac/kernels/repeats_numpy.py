"""Finding tokens that repeat, without compiled code; `repeats_scan` gives the same results."""

from __future__ import annotations

import numpy as np


def count_samples(words: np.ndarray, block_rows: int, sample_bytes: int) -> int:
    """How many tokens look like an earlier one of their block, by a sample of their rows.

    words: (matrices, tokens, width). A sample is the first sample_bytes of a token's row in the
    first matrix and the last in the last; a row has at least as many.
    """
    values = sample_bytes // words.itemsize
    samples = np.concatenate([words[0, :, :values], words[-1, :, -values:]], axis=1)
    keys = [sample.tobytes() for sample in samples]
    blocks = [keys[start : start + block_rows] for start in range(0, len(keys), block_rows)]
    return sum(len(block) - len(set(block)) for block in blocks)


def index_rows(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the different tokens of one block, (matrices, rows, width), as they first appear.

    Gives the number of each row, uint8 (rows,), and where each number first appears, int64. Rows
    are the same if they are so in every matrix.
    """
    numbers: dict[bytes, int] = {}
    index = np.empty(words.shape[1], np.uint8)
    first_rows: list[int] = []
    for row in range(words.shape[1]):
        number = numbers.setdefault(words[:, row].tobytes(), len(numbers))
        if number == len(first_rows):
            first_rows.append(row)
        index[row] = number
    return index, np.array(first_rows, np.int64)
