"""The oracle: a reader of blobs written from docs/format.md alone, one value at a time.

Slow and obvious on purpose. It shares no code with the codec, it checks nothing that an intact
blob makes true, and every faster decoder must give what it gives.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

STREAM_COUNT = {0: 1, 1: 5, 3: 6}


@dataclass(frozen=True)
class Block:
    """Where one block lies: its matrix, its first token, its rows."""

    matrix: int
    token: int
    rows: int


def decode(blob: bytes) -> bytes:
    """The content of an intact blob: for a tensor, its values in C order, little endian."""
    dtype, flags, ndim = blob[6], blob[7], blob[8]
    block_rows, width, segment_blocks, segment_matrices = struct.unpack_from("<HIII", blob, 10)
    shape = struct.unpack_from(f"<{ndim}Q", blob, 32)
    position = 32 + 8 * ndim
    if flags & 2:
        return blob[position:]
    values = math.prod(shape) // 2 if flags & 1 else math.prod(shape)
    matrices, tokens = (1, values // width) if flags & 4 else (math.prod(shape[:-2]), shape[-2])
    segments = list(_segments(matrices, tokens, block_rows, segment_blocks, segment_matrices))
    table = []
    for _ in segments:
        (level,) = struct.unpack_from("<I", blob, position)
        table.append((level, struct.unpack_from(f"<{STREAM_COUNT[level]}I", blob, position + 4)))
        position += 4 + 4 * STREAM_COUNT[level]
    words = [0] * (matrices * tokens * width)
    for blocks, (level, lengths) in zip(segments, table, strict=True):
        position += -position % 64
        streams = []
        for length in lengths:
            streams.append(blob[position : position + length])
            position += length
        values = _segment(level, dtype, streams, len(blocks), blocks[0].rows, width)
        for block in blocks:
            start = (block.matrix * tokens + block.token) * width
            for i in range(block.rows * width):
                words[start + i] = next(values)
    return struct.pack(f"<{len(words)}H", *words) + blob[position:]


def _segments(
    matrices: int, tokens: int, block_rows: int, segment_blocks: int, segment_matrices: int
) -> Iterator[list[Block]]:
    """The blocks of each segment, in the order of the frame."""
    full = tokens // block_rows
    columns = [
        [block * block_rows for block in range(first, min(first + segment_blocks, full))]
        for first in range(0, full, segment_blocks)
    ]
    if tokens % block_rows:
        columns.append([full * block_rows])
    for column in columns:
        for first in range(0, matrices, segment_matrices):
            yield [
                Block(matrix, token, min(block_rows, tokens - token))
                for matrix in range(first, min(first + segment_matrices, matrices))
                for token in column
            ]


def _segment(
    level: int, dtype: int, streams: list[bytes], blocks: int, rows: int, width: int
) -> Iterator[int]:
    """The words of one segment, block by block, row by row."""
    if level == 0:
        yield from struct.unpack(f"<{len(streams[0]) // 2}H", streams[0])
        return
    extra = 3 if dtype == 1 else 0
    planes, low = streams[-2], streams[-1]
    code_bits = 3 if level == 1 else 2
    exponents_of = _packed if level == 1 else _entropy
    exponents = exponents_of(streams, blocks, rows, width, extra)
    for index, exponent in enumerate(exponents):
        block, value = divmod(index, rows * width)
        byte = low[index]
        if dtype == 2:
            yield (byte & 1) << 15 | exponent << 7 | byte >> 1
        else:
            bits = [
                _bit(planes, rows * width, code_bits + extra, block, code_bits + i, value)
                for i in range(3)
            ]
            yield bits[2] << 15 | exponent << 10 | bits[1] << 9 | bits[0] << 8 | byte


def _bit(planes: bytes, values: int, count: int, block: int, plane: int, value: int) -> int:
    """Bit `value` of a plane: planes lie (block, plane, byte), least significant bit first."""
    plane_bytes = (values + 7) // 8
    return planes[(block * count + plane) * plane_bytes + value // 8] >> value % 8 & 1


def _packed(streams: list[bytes], blocks: int, rows: int, width: int, extra: int) -> list[int]:
    """The exponents of a segment at level 1."""
    base, offsets, escapes, planes, _ = streams
    values, tiles = rows * width, (rows + 63) // 64
    exponents = []
    for block in range(blocks):
        for tile in range(tiles):
            (escape,) = struct.unpack_from("<I", offsets, 4 * (block * tiles + tile))
            for value in range(tile * 64 * width, min((tile + 1) * 64, rows) * width):
                code = sum(_bit(planes, values, 3 + extra, block, i, value) << i for i in range(3))
                if code == 7:
                    exponents.append(escapes[escape])
                    escape += 1
                else:
                    exponents.append(base[block * width + value % width] + code)
    return exponents


def _entropy(streams: list[bytes], blocks: int, rows: int, width: int, extra: int) -> list[int]:
    """The exponents of a segment at level 3."""
    base, ranks, levels, patches, planes, _ = streams
    values = rows * width
    rank = [
        sum(_bit(planes, values, 2 + extra, block, i, value) << i for i in range(2))
        for block in range(blocks)
        for value in range(values)
    ]
    undecided = [index for index, code in enumerate(rank) if code == 3]
    position = 0
    for _ in range(7):
        higher = [
            index for i, index in enumerate(undecided) if levels[position + i // 8] >> i % 8 & 1
        ]
        position += (len(undecided) + 7) // 8
        for index in higher:
            rank[index] += 1
        undecided = higher
    exponents = []
    patch = iter(patches)
    for index, r in enumerate(rank):
        block, value = divmod(index, values)
        if r == 10:
            exponents.append(next(patch))
        else:
            exponents.append((base[block * width + value % width] + ranks[block * 10 + r]) % 256)
    return exponents
