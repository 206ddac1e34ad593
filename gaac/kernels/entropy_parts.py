"""What both directions of level 3's kernels share: sizes, tables, and 64 values at a time.

A block is one run of rows * width values in *steps* of 64, whatever its width; step i starts in
channel 64 * i % width. A *table* has, for each of the codes, the exponent that it means in each
channel, and a last row that is not zero where the channel's shape is flat. Each row repeats its
channels up to 64 beyond the width, so that a step is one load from its first channel on. Masks say
which of the 64 values of a step they speak of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gaac.kernels import vector
from gaac.kernels.cpu import inlined
from gaac.kernels.entropy_numpy import CODES, DISTANCES
from gaac.kernels.packed_parts import address_of

STEP = 64  # values
TABLE_ROWS = CODES + 1
HALF_EXTRA = 3  # extra bits of float16


class Sizes(NamedTuple):
    """A segment in numbers; `plane`, `shape_plane` and `pitch` (of a table's rows) are bytes.

    advance: channels from the first of a step to that of the next, round the end of a row.
    """

    blocks: int
    rows: int
    width: int
    values: int  # of a block
    steps: int  # of a block
    planes: int  # of a block
    plane: int
    shape_plane: int
    pitch: int
    advance: int
    exponent_mask: int


@inlined
def sizes_of(shape: Any, half: Any) -> Any:
    """The sizes of a segment of (blocks, rows, width) words; half: not 0 for float16."""
    blocks, rows, width = shape
    values = rows * width
    return Sizes(
        blocks,
        rows,
        width,
        values,
        (values + STEP - 1) // STEP,
        1 + HALF_EXTRA if half else 1,
        (values + 7) // 8,
        (width + 7) // 8,
        (width + 3 * STEP - 1) // STEP * STEP,
        STEP % width,
        31 if half else 255,
    )


class Lines(NamedTuple):
    """Where words lie: in each block `number` lines of `values` words without gaps. In bytes."""

    start: int
    block_stride: int
    stride: int
    number: int
    values: int


@inlined
def lines_of(words: Any) -> Any:
    """The lines of uint16 (blocks, rows, width); number is 0 if kernels cannot follow the strides.

    Where rows have gaps between them, no step may hold parts of two.
    """
    _, rows, width = words.shape
    block_stride, row_stride, stride = words.strides
    start = address_of(words)
    if stride != 2 and width > 1:
        return Lines(start, block_stride, 0, 0, 0)
    if rows == 1 or row_stride == 2 * width:
        return Lines(start, block_stride, 0, 1, rows * width)
    if width % STEP == 0:
        return Lines(start, block_stride, row_stride, rows, width)
    return Lines(start, block_stride, 0, 0, 0)


@inlined
def fill_table(table: Any, base: Any, shapes: Any, sizes: Any) -> None:
    """Make the table of a block whose bases and shapes lie at these addresses."""
    limit = vector.splat_u8x64(sizes.exponent_mask)
    for channel in range(0, sizes.width, STEP):
        count = min(STEP, sizes.width - channel)
        bases = vector.load_part_u8x64(base + channel, count)
        place, size = shapes + channel // 8, (count + 7) // 8
        odd = vector.load_part_u64(place, size)
        high = vector.load_part_u64(place + sizes.shape_plane, size)
        row = table + channel
        for code in range(CODES):
            exponent = vector.add(bases, distances(code, odd, high))
            vector.store(row, vector.both(exponent, limit))
            row += sizes.pitch
        vector.store(row, vector.select(odd, vector.splat_u8x64(0), vector.splat_u8x64(1)))
    if sizes.width % STEP:
        for i in range(TABLE_ROWS):
            _repeat(table + i * sizes.pitch, sizes.width)


@inlined
def distances(code: Any, odd: Any, high: Any) -> Any:
    """The distance of a code in 64 channels, whose shapes have these bits."""
    even_shape = vector.splat_u8x64(DISTANCES[0, code])
    odd_shape = vector.splat_u8x64(DISTANCES[1, code])
    low = vector.select(odd, odd_shape, even_shape)
    even_shape = vector.splat_u8x64(DISTANCES[2, code])
    odd_shape = vector.splat_u8x64(DISTANCES[3, code])
    return vector.select(high, vector.select(odd, odd_shape, even_shape), low)


@inlined
def _repeat(row: Any, width: Any) -> None:
    """Repeat the first `width` bytes of a row up to width + 64, and perhaps 64 more."""
    filled = width
    while filled < width + STEP:
        vector.store(row + filled, vector.load_u8x64(row))
        filled *= 2


@inlined
def next_channel(channel: Any, sizes: Any) -> Any:
    """The first channel of the step behind the one that starts in `channel`."""
    following = channel + sizes.advance
    return following - sizes.width if following >= sizes.width else following


@inlined
def flat_lanes(table: Any, channel: Any, pitch: Any) -> Any:
    """The lanes of a step, from its first channel on, whose channels have a flat shape."""
    flat = vector.load_u8x64(table + CODES * pitch + channel)
    return vector.any_bit(flat, flat)


# Parts of a step: the first `count` of 64 values, 1 to 64. Where `count` is the constant STEP, the
# compiler drops the slow half.


@inlined
def load_words(where: Any, count: Any) -> Any:
    """Words as two vectors, zero behind the last; nothing beyond it is read."""
    if count == STEP:
        return vector.load_u16x32(where), vector.load_u16x32(where + STEP)
    first = vector.load_part_u16x32(where, min(2 * count, STEP))
    return first, vector.load_part_u16x32(where + STEP, max(2 * count - STEP, 0))


@inlined
def store_words(where: Any, first: Any, second: Any, count: Any) -> None:
    """Write words, and nothing beyond the last."""
    if count == STEP:
        vector.store(where, first)
        vector.store(where + STEP, second)
    else:
        vector.store_part(where, first, min(2 * count, STEP))
        vector.store_part(where + STEP, second, max(2 * count - STEP, 0))


@inlined
def load_bytes(where: Any, count: Any) -> Any:
    """Bytes, zero behind the last; nothing beyond it is read."""
    if count == STEP:
        return vector.load_u8x64(where)
    return vector.load_part_u8x64(where, count)


@inlined
def store_bytes(where: Any, values: Any, count: Any) -> None:
    """Write bytes, and nothing beyond the last."""
    if count == STEP:
        vector.store(where, values)
    else:
        vector.store_part(where, values, count)


@inlined
def load_mask(where: Any, count: Any) -> Any:
    """A mask of a bit plane, zero behind its last byte; nothing beyond that is read."""
    if count == STEP:
        return vector.load_u64(where)
    return vector.load_part_u64(where, (count + 7) // 8)


@inlined
def store_mask(where: Any, lanes: Any, count: Any) -> None:
    """Write a mask to a bit plane, with zeros behind the last value, and no byte beyond."""
    if count == STEP:
        vector.store_u64(where, lanes)
    else:
        vector.store_part_u64(where, lanes & vector.first_bits(count), (count + 7) // 8)
