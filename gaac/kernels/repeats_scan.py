"""Finding tokens that repeat, compiled: hash tables over at most 256 rows, and exact comparison.

`repeats_numpy` says what each function gives. Rows are contiguous and have at least eight bytes.
"""

from __future__ import annotations

import numpy as np

from gaac.kernels import vector
from gaac.kernels.cpu import inlined, kernel

EIGHT = 8
SLOTS = 512  # twice the rows of a block, so that some are always free
SLOT_SHIFT = np.uint64(64 - 9)
HALF = np.uint64(32)
# Odd multipliers without pattern: 2^64 divided by the golden ratio, and by the root of three.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
OTHER = np.uint64(0x93CD3A2C8198E269)


def count_samples(words: np.ndarray, block_rows: int, sample_bytes: int) -> int:
    """See repeats_numpy.count_samples; block_rows is at most 256, sample_bytes is eight."""
    assert sample_bytes == EIGHT
    matrices, tokens, width = words.shape
    matrix_step, token_step, _ = words.strides
    first = words.ctypes.data
    last = first + (matrices - 1) * matrix_step + width * words.itemsize - EIGHT
    count: int = _count_samples(first, last, tokens, token_step, block_rows)
    return count


def index_rows(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See repeats_numpy.index_rows; there are at most 256 rows."""
    matrices, rows, width = words.shape
    matrix_step, row_step, _ = words.strides
    index, first_rows = np.empty(rows, np.uint8), np.empty(rows, np.int64)
    count = _index_rows(
        words.ctypes.data,
        *(matrices, matrix_step, rows, row_step, width * words.itemsize),
        *(index.ctypes.data, first_rows.ctypes.data),
    )
    return index, first_rows[:count]


@kernel("int64(int64, int64, int64, int64, int64)")
def _count_samples(first: int, last: int, tokens: int, step: int, block_rows: int) -> int:
    slots = np.empty(SLOTS, np.int16)  # rows
    count = 0
    for start in range(0, tokens, block_rows):
        slots[:] = -1
        a_start, b_start = first + start * step, last + start * step
        for row in range(min(block_rows, tokens - start)):
            a, b = vector.load_u64(a_start + row * step), vector.load_u64(b_start + row * step)
            slot = np.int64((((a * GOLDEN) ^ b) * OTHER) >> SLOT_SHIFT)
            while slots[slot] >= 0:
                there = slots[slot] * step
                if vector.load_u64(a_start + there) == a and vector.load_u64(b_start + there) == b:
                    count += 1
                    break
                slot = (slot + 1) & (SLOTS - 1)
            else:
                slots[slot] = row
    return count


@inlined
def _hash_row(start: int, matrices: int, matrix_step: int, row_bytes: int) -> np.uint64:
    """A hash of one token's rows in all matrices."""
    total = np.uint64(row_bytes)
    for matrix in range(matrices):
        row = start + matrix * matrix_step
        for at in range(0, row_bytes - EIGHT, EIGHT):
            total = (total ^ vector.load_u64(row + at)) * GOLDEN
            total ^= total >> HALF
        total = (total ^ vector.load_u64(row + row_bytes - EIGHT)) * OTHER
        total ^= total >> HALF
    return total


@inlined
def _same_rows(one: int, other: int, matrices: int, matrix_step: int, row_bytes: int) -> bool:
    """Whether two tokens have the same rows in all matrices."""
    for matrix in range(matrices):
        a, b = one + matrix * matrix_step, other + matrix * matrix_step
        for at in range(0, row_bytes - EIGHT, EIGHT):
            if vector.load_u64(a + at) != vector.load_u64(b + at):
                return False
        end = row_bytes - EIGHT
        if vector.load_u64(a + end) != vector.load_u64(b + end):
            return False
    return True


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def _index_rows(
    start: int,
    matrices: int,
    matrix_step: int,
    rows: int,
    row_step: int,
    row_bytes: int,
    index: int,
    first_rows: int,
) -> int:
    """Fill index, a byte for each row, and first_rows, eight for each number; the numbers used."""
    slots = np.full(SLOTS, -1, np.int64)  # numbers
    hashes = np.empty(rows, np.uint64)
    count = 0
    for row in range(rows):
        here = start + row * row_step
        key = _hash_row(here, matrices, matrix_step, row_bytes)
        slot = np.int64((key * GOLDEN) >> SLOT_SHIFT)
        while slots[slot] >= 0:
            number = slots[slot]
            there = start + np.int64(vector.load_u64(first_rows + 8 * number)) * row_step
            if hashes[number] == key and _same_rows(here, there, matrices, matrix_step, row_bytes):
                break
            slot = (slot + 1) & (SLOTS - 1)
        else:
            slots[slot] = count
            hashes[count] = key
            vector.store_u64(first_rows + 8 * count, np.uint64(row))
            count += 1
        vector.store_u8(index + row, slots[slot])
    return count
