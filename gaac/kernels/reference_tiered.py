"""The oracle's part for level 2, from docs/format.md alone, one value at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterator

EXPONENT = {1: (10, 31), 2: (7, 255), 3: (3, 15), 4: (2, 31)}  # by dtype: lowest bit, largest
EXTRA_BITS = {1: (8, 9, 15), 2: (), 3: (0, 1, 2, 7), 4: (0, 1, 7)}
CODE_PLANES = 2


def decode(streams: list[bytes], dtype: int, shape: tuple[int, int, int]) -> Iterator[int]:
    """The words of a segment of (blocks, rows, width), block by block, row by row."""
    blocks, rows, width = shape
    base, ranks, offsets, second, third, escapes, planes, low = streams
    shift, largest = EXPONENT[dtype]
    tiles = (rows + 63) // 64
    for block in range(blocks):
        for row in range(rows):
            if row % 64 == 0:
                place = 12 * (block * tiles + row // 64)
                to_second, to_third, to_escapes = struct.unpack_from("<3I", offsets, place)
            for channel in range(width):
                value = row * width + channel
                rank = _plane_bit(planes, dtype, shape, block, 0, value)
                rank += 2 * _plane_bit(planes, dtype, shape, block, 1, value)
                if rank == 3:
                    rank += _code(second, to_second)
                    to_second += 1
                    if rank == 6:
                        rank += _code(third, to_third)
                        to_third += 1
                if rank == 9:
                    exponent = escapes[to_escapes]
                    to_escapes += 1
                else:
                    exponent = (base[block * width + channel] + ranks[rank]) % (largest + 1)
                word = exponent << shift
                for i, position in enumerate(EXTRA_BITS[dtype]):
                    bit = _plane_bit(planes, dtype, shape, block, CODE_PLANES + i, value)
                    word |= bit << position
                if dtype in (1, 2):
                    byte = low[block * rows * width + value]
                    word |= byte if dtype == 1 else byte >> 1 | (byte & 1) << 15
                yield word


def _plane_bit(
    planes: bytes, dtype: int, shape: tuple[int, int, int], block: int, plane: int, value: int
) -> int:
    """Bit `value` of a plane: planes lie (block, plane, byte), least significant bit first."""
    plane_bytes = (shape[1] * shape[2] + 7) // 8
    count = CODE_PLANES + len(EXTRA_BITS[dtype])
    return planes[(block * count + plane) * plane_bytes + value // 8] >> value % 8 & 1


def _code(strings: bytes, index: int) -> int:
    """A code of two strings of equal length: the low bits, then the high bits."""
    half = len(strings) // 2
    low, high = strings[index // 8], strings[half + index // 8]
    return (low >> index % 8 & 1) + 2 * (high >> index % 8 & 1)
