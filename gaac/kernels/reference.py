"""The oracle: a reader of blobs written from docs/format.md alone, one value at a time.

Slow and obvious on purpose. It shares no code with the codec, it checks nothing that an intact
blob makes true, and every faster decoder must give what it gives.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from gaac.kernels import reference_context, reference_tiered

STREAM_COUNT = {0: 1, 1: 5, 2: 8, 3: 7, 5: 7}
CODE_PLANES = {1: 3, 3: 1}
EXTRA_BITS = {1: (8, 9, 15), 2: (), 3: (0, 1, 2, 7), 4: (0, 1, 7)}
EXPONENT_SHIFT = {1: 10, 2: 7, 3: 3, 4: 2}


@dataclass(frozen=True)
class Block:
    """Where one block lies: its matrix, its first token, its rows."""

    matrix: int
    token: int
    rows: int


def decode(blob: bytes) -> bytes:
    """The content of an intact blob: for a tensor, its values in C order, little endian."""
    _, dtype, flags, ndim = blob[16:20]
    steps = struct.unpack_from("<HHH", blob, 20)
    rope_pairs, width = struct.unpack_from("<HI", blob, 26)
    shape = struct.unpack_from(f"<{ndim}Q", blob, 32)
    turns = struct.unpack_from(f"<{rope_pairs}H", blob, 32 + 8 * ndim)
    position = 32 + 8 * ndim + 2 * rope_pairs
    if flags & 2:
        return blob[position:]
    size = 2 if dtype in (1, 2) else 1
    values = math.prod(shape) // size if flags & 1 else math.prod(shape)
    matrices, tokens = (1, values // width) if flags & 4 else (math.prod(shape[:-2]), shape[-2])
    segments = list(_segments(matrices, tokens, *steps))
    table = []
    for _ in segments:
        level, unique_rows = struct.unpack_from("<HH", blob, position)
        count = STREAM_COUNT[level] + (unique_rows > 0)
        lengths = struct.unpack_from(f"<{count}I", blob, position + 4)
        table.append((level, unique_rows, lengths))
        position += 4 + 4 * count
    words = [0] * (matrices * tokens * width)
    for blocks, (level, unique_rows, lengths) in zip(segments, table, strict=True):
        position += -position % 64
        streams = []
        for length in lengths:
            streams.append(blob[position : position + length])
            position += length
        repeats = streams.pop(0) if unique_rows else b""
        coded_rows = unique_rows or blocks[0].rows
        cut = len(blocks), coded_rows, width
        if level == 5:
            words_of = reference_context.decode(streams, dtype, cut, turns, bool(flags & 8))
        elif level == 2:
            words_of = reference_tiered.decode(streams, dtype, cut)
        else:
            words_of = _segment(level, dtype, streams, *cut)
        coded = list(words_of)
        for number, block in enumerate(blocks):
            for row in range(block.rows):
                source = number * coded_rows + (repeats[row] if unique_rows else row)
                start = (block.matrix * tokens + block.token + row) * width
                words[start : start + width] = coded[source * width : (source + 1) * width]
    return struct.pack(f"<{len(words)}{'H' if size == 2 else 'B'}", *words) + blob[position:]


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
        size = 2 if dtype in (1, 2) else 1
        for i in range(0, len(streams[0]), size):
            yield int.from_bytes(streams[0][i : i + size], "little")
        return
    extra, code_planes = EXTRA_BITS[dtype], CODE_PLANES[level]
    planes, low = streams[-2], streams[-1]
    exponents_of = _packed if level == 1 else _entropy
    exponents = exponents_of(streams, blocks, rows, width, len(extra))
    for index, exponent in enumerate(exponents):
        block, value = divmod(index, rows * width)
        word = exponent << EXPONENT_SHIFT[dtype]
        for i, position in enumerate(extra):
            count = code_planes + len(extra)
            word |= _bit(planes, rows * width, count, block, code_planes + i, value) << position
        if dtype == 1:
            word |= low[index]
        elif dtype == 2:
            word |= (low[index] & 1) << 15 | low[index] >> 1
        yield word


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


# Level 3: for each shape, the distances of the codes 00, 01 and 10, and of levels 0 to 7. Steep
# shapes have no code 01.
_DISTANCES = (
    (0, 1, -1, -2, -3, 2, -4, -5, -6, -7, -8),
    (0, 0, -1, -2, 1, -3, -4, -5, -6, -7, -8),
    (0, -1, -2, 1, -3, -4, -5, -6, -7, 2, -8),
    (0, 0, 1, -1, -2, -3, -4, -5, -6, 2, -7),
)


def _entropy(streams: list[bytes], blocks: int, rows: int, width: int, extra: int) -> list[int]:
    """The exponents of a segment at level 3."""
    base, shapes, second, levels, patches, planes, _ = streams
    values = rows * width
    channels = [(block, value % width) for block in range(blocks) for value in range(values)]
    shape = [
        sum(_bit(shapes, width, 2, block, i, channel) << i for i in range(2))
        for block, channel in channels
    ]
    code = []
    asked = 0
    for index, (block, _) in enumerate(channels):
        first = _bit(planes, values, 1 + extra, block, 0, index % values)
        code.append(2 * first)
        if first or shape[index] % 2 == 0:
            code[-1] += second[asked // 8] >> asked % 8 & 1
            asked += 1
    undecided = [index for index, number in enumerate(code) if number == 3]
    position = 0
    for _ in range(8):
        further = [
            index for i, index in enumerate(undecided) if levels[position + i // 8] >> i % 8 & 1
        ]
        position += (len(undecided) + 7) // 8
        for index in further:
            code[index] += 1
        undecided = further
    exponents = []
    patch = iter(patches)
    for index, (block, channel) in enumerate(channels):
        if code[index] == 11:
            exponents.append(next(patch))
        else:
            distance = _DISTANCES[shape[index]][code[index]]
            exponents.append((base[block * width + channel] + distance) % 2 ** (8 - extra))
    return exponents
