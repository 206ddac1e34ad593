"""What the two directions of level 1's compiled kernels share.

A block of rows x width values is one run of 64-value steps, whatever its width: which channels a
step holds repeats every `width // gcd(width, 64)` steps. A *table* keeps a byte for each value
until they repeat ("lanes"), so step i meets its channels at `64 * i % lanes`; and channel c lies at
c, c + width, c + 2 * width and so on, `repeats` times. The last step of a block may be short: then
memory is read and written by parts, and a mask leaves out the lanes that hold no value.

`half` says float16, else bfloat16; it is a constant wherever it is passed, and so costs nothing.
"""

from __future__ import annotations

import math
from typing import Any

from numba import int64

from gaac.kernels import vector
from gaac.kernels.cpu import inlined

STEP = 64  # values
STRIDED = -1  # what a kernel returns if it cannot follow the strides


def table_shape(rows: int, width: int) -> tuple[int, int]:
    """Lanes and repeats of a table (see the module).

    A block too short for the channels to repeat needs no longer table than itself.
    """
    shared = math.gcd(width, STEP)
    whole = -(-rows * width // STEP) * STEP
    return min(width * (STEP // shared), whole), min(STEP // shared, rows)


@inlined
def address_of(array: Any) -> Any:
    """The address of an array's first value, as the signed integer that addresses are here."""
    return int64(array.ctypes.data)


@inlined
def aligned(place: Any) -> Any:
    """The next address that is a multiple of 64: vectors there never lie across cache lines."""
    return (place + STEP - 1) // STEP * STEP


@inlined
def row_skip(words: Any) -> Any:
    """Bytes between the end of a row and the next, -1 if kernels cannot follow the strides.

    Between rows there may be a gap only where a step never holds two of them.
    """
    rows, width = words.shape[1:]
    skip = words.strides[1] - 2 * width
    if rows == 1:
        skip = 0
    if (words.strides[2] != 2 and width > 1) or (skip != 0 and width % STEP):
        return STRIDED, int64(0)
    return int64(0), skip


@inlined
def repeat(table: Any, width: Any, repeats: Any) -> None:
    """Copy the channels at the front of a table to their other places in it."""
    for again in range(1, repeats):
        for channel in range(0, width, STEP):
            # What a last, short step writes too much, the next round overwrites.
            vector.store(table + again * width + channel, vector.load_u8x64(table + channel))
