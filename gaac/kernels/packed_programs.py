"""Level 1 as Triton programs; `packed_triton` starts them.

All see a segment as (blocks, rows, width) and cut a block into tiles of 64 rows. A tile is worked
through in parts of BYTES * 8 values, as a matrix (bytes, 8): row n holds the eight values whose
bits make byte n of each plane, so that one thread loads eight neighbouring values and packs their
bits by itself. Tiles start at whole bytes, because 64 rows are a multiple of 8 values.

Constants of the format (see WordFormat): the exponent is `word >> SHIFT & MAX`; EXTRA has a bit set
for each bit of a word that has a plane of its own, and PLANES counts them and those of the code;
LOW_BYTES is 1 where there is a low byte, ROTATED where it is the mantissa with the sign behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gaac.levels.packed import ALIGN, BASE_CANDIDATES, CODE_BITS, ESCAPE, TILE_ROWS

# What `read_streams` finds wrong; the largest number of several is kept.
FAULTS = {
    1: "The bit planes hold bits behind their last value.",
    2: "The escapes are not as many as the codes ask for.",
    3: "An exponent lies outside the range of its dtype.",
}

# Numbers as a program sees them: it reads globals only if they are constexpr.
_SPARE_BITS = tl.constexpr(1)
_ESCAPE_COUNT = tl.constexpr(2)
_EXPONENT_RANGE = tl.constexpr(3)
_ALIGN = tl.constexpr(ALIGN)
_BASE_CANDIDATES = tl.constexpr(BASE_CANDIDATES)
_CODE_BITS = tl.constexpr(CODE_BITS)
_ESCAPE = tl.constexpr(ESCAPE)
_TILE_ROWS = tl.constexpr(TILE_ROWS)


@triton.jit
def choose_bases(
    words: tl.tensor,  # int16 or uint8, read at the strides that follow
    base: tl.tensor,  # uint8 (blocks, width), written
    counts: tl.tensor,  # int32 (blocks, tiles, channel parts), written: escapes
    block_stride: tl.tensor,
    row_stride: tl.tensor,
    channel_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    SHIFT: tl.constexpr,
    MAX: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Choose the base of CHANNELS channels of one block, and count their escapes by tile.

    Grid (blocks, channel parts). The base is one of four that put the largest exponent at code 6,
    7, 8 or 9: the one with fewest escapes, the highest among equals.
    """
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    channels = words + block * block_stride + channel.to(tl.int64) * channel_stride

    largest = tl.zeros((CHANNELS,), tl.int32)
    for row in range(0, rows, _TILE_ROWS):
        inside, place = _tile(row, rows, channel, width, row_stride)
        exponent = _exponents(channels[None, :] + place, inside, SHIFT, MAX)
        largest = tl.maximum(largest, tl.max(exponent, axis=0))

    best = tl.zeros((CHANNELS,), tl.int32)
    fewest = tl.zeros((CHANNELS,), tl.int32) + (rows + 1)
    for above in tl.static_range(_BASE_CANDIDATES):
        candidate = tl.maximum(largest - (_ESCAPE - 1 + above), 0)
        count = tl.zeros((CHANNELS,), tl.int32)
        for row in range(0, rows, _TILE_ROWS):
            inside, place = _tile(row, rows, channel, width, row_stride)
            exponent = _exponents(channels[None, :] + place, inside, SHIFT, MAX)
            count += tl.sum(_escaped(exponent - candidate[None, :], inside), axis=0)
        best = tl.where(count < fewest, candidate, best)
        fewest = tl.minimum(fewest, count)
    tl.store(base + block * width + channel, best.to(tl.uint8), mask=channel < width)

    count_place = counts + block * tl.cdiv(rows, _TILE_ROWS) * tl.num_programs(1) + part
    for row in range(0, rows, _TILE_ROWS):
        inside, place = _tile(row, rows, channel, width, row_stride)
        exponent = _exponents(channels[None, :] + place, inside, SHIFT, MAX)
        tl.store(count_place, _total(_escaped(exponent - best[None, :], inside)))
        count_place += tl.num_programs(1)


@triton.jit
def write_streams(
    words: tl.tensor,  # int16 or uint8, read at the strides that follow the streams
    base: tl.tensor,  # uint8 (blocks, width), read
    offsets: tl.tensor,  # int32 (blocks, tiles), read
    escapes: tl.tensor,  # uint8, written
    planes: tl.tensor,  # uint8 (blocks, planes, plane bytes), written
    low: tl.tensor,  # uint8 (blocks, rows * width), written where the format has low bytes
    block_stride: tl.tensor,
    row_stride: tl.tensor,
    channel_stride: tl.tensor,
    rows: tl.tensor,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    PLANES: tl.constexpr,
    SHIFT: tl.constexpr,
    MAX: tl.constexpr,
    EXTRA: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    ROTATED: tl.constexpr,
) -> None:
    """Write low, planes and escapes of one tile. Grid (blocks, tiles)."""
    block, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = rows * WIDTH
    plane_bytes = tl.cdiv(values, 8)
    start = tile * _TILE_ROWS * WIDTH
    stop = tl.minimum(start + _TILE_ROWS * WIDTH, values)
    escape = escapes + tl.load(offsets + block * tl.num_programs(1) + tile)

    for first in range(start, stop, 8 * BYTES):
        byte = first // 8 + tl.arange(0, BYTES)
        index = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = index < stop
        channel = index % WIDTH
        place = (index // WIDTH).to(tl.int64) * row_stride + channel.to(tl.int64) * channel_stride
        word = tl.load(words + block * block_stride + place, mask=inside, other=0)
        word = word.to(tl.int32) & 0xFFFF
        exponent = word >> SHIFT & MAX
        channel_base = tl.load(base + block * WIDTH + channel, mask=inside, other=0).to(tl.int32)

        escaped = _escaped(exponent - channel_base, inside)
        tl.store(escape + _rank(escaped), exponent.to(tl.uint8), mask=escaped == 1)
        escape += _total(escaped)

        # Where the values do not fill the block's last byte, those missing count as words of 0
        # with base 0, and the spare bits come out as 0.
        code = tl.where(escaped == 1, _ESCAPE, exponent - channel_base)
        present = byte * 8 < stop
        plane = planes + block * PLANES * plane_bytes + byte
        for bit in tl.static_range(_CODE_BITS):
            tl.store(plane, _pack(code >> bit & 1), mask=present)
            plane += plane_bytes
        for position in tl.static_range(8 + 8 * LOW_BYTES):
            if EXTRA >> position & 1:
                tl.store(plane, _pack(word >> position & 1), mask=present)
                plane += plane_bytes

        if LOW_BYTES:
            rest = word << 1 | word >> 15 if ROTATED else word
            tl.store(low + block * values + index, rest.to(tl.uint8), mask=inside)


@triton.jit
def read_streams(
    base: tl.tensor,  # uint8 (blocks, width)
    offsets: tl.tensor,  # uint8, a u32 for each of (blocks, tiles), perhaps not aligned
    escapes: tl.tensor,  # uint8
    planes: tl.tensor,  # uint8 (blocks, planes, plane bytes)
    low: tl.tensor,  # uint8 (blocks, rows * width) where the format has low bytes
    words: tl.tensor,  # int16 or uint8, written at the strides that follow
    fault: tl.tensor,  # int32, one: raised to the number of what is wrong
    block_stride: tl.tensor,
    row_stride: tl.tensor,
    channel_stride: tl.tensor,
    rows: tl.tensor,
    escape_bytes: tl.tensor,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    PLANES: tl.constexpr,
    SHIFT: tl.constexpr,
    MAX: tl.constexpr,
    EXTRA: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    ROTATED: tl.constexpr,
) -> None:
    """Decode and check one tile, reading nothing outside the streams. Grid (blocks, tiles).

    Each tile checks that the next one's escapes start where its own end, the first that they start
    at 0, and the last that only padding follows: together, that all offsets are right.
    """
    block, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = rows * WIDTH
    plane_bytes = tl.cdiv(values, 8)
    start = tile * _TILE_ROWS * WIDTH
    stop = tl.minimum(start + _TILE_ROWS * WIDTH, values)
    number = block * tl.num_programs(1) + tile
    escape = _load_u32(offsets, number)
    count_wrong = (number == 0) & (escape != 0)
    wrong = tl.zeros((BYTES, 8), tl.int32)

    for first in range(start, stop, 8 * BYTES):
        byte = first // 8 + tl.arange(0, BYTES)
        index = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = index < stop
        channel = index % WIDTH

        present = byte * 8 < stop
        plane = planes + block * PLANES * plane_bytes + byte
        code = tl.zeros((BYTES, 8), tl.int32)
        for bit in tl.static_range(_CODE_BITS):
            code |= _unpack(tl.load(plane, mask=present, other=0)) << bit
            plane += plane_bytes
        word = tl.zeros((BYTES, 8), tl.int32)
        for position in tl.static_range(8 + 8 * LOW_BYTES):
            if EXTRA >> position & 1:
                word |= _unpack(tl.load(plane, mask=present, other=0)) << position
                plane += plane_bytes
        wrong = tl.maximum(wrong, tl.where(~inside & ((code | word) != 0), _SPARE_BITS, 0))

        escaped = tl.where(inside & (code == _ESCAPE), 1, 0)
        escape_place = escape + _rank(escaped)
        readable = (escaped == 1) & (escape_place < escape_bytes)
        escape_value = tl.load(escapes + escape_place, mask=readable, other=0).to(tl.int32)
        escape += _total(escaped)

        channel_base = tl.load(base + block * WIDTH + channel, mask=inside, other=0).to(tl.int32)
        too_high = (channel_base > MAX - (_ESCAPE - 1)) | (escape_value > MAX)
        wrong = tl.maximum(wrong, tl.where(too_high, _EXPONENT_RANGE, 0))
        word |= tl.where(escaped == 1, escape_value, channel_base + code) << SHIFT

        if LOW_BYTES:
            rest = tl.load(low + block * values + index, mask=inside, other=0).to(tl.int32)
            word |= rest >> 1 | (rest & 1) << 15 if ROTATED else rest
        place = (index // WIDTH).to(tl.int64) * row_stride + channel.to(tl.int64) * channel_stride
        word = word.to(words.dtype.element_ty)
        tl.store(words + block * block_stride + place, word, mask=inside)

    if number < tl.num_programs(0) * tl.num_programs(1) - 1:
        count_wrong |= escape != _load_u32(offsets, number + 1)
    else:
        spare = escape_bytes - escape
        behind = escape + tl.arange(0, _ALIGN)
        padding = tl.load(escapes + behind, mask=behind < escape_bytes, other=0).to(tl.int32)
        count_wrong |= (spare < 0) | (spare >= _ALIGN) | (tl.max(padding, axis=0) != 0)
    worst = tl.max(tl.max(wrong, axis=1), axis=0)
    worst = tl.maximum(worst, tl.where(count_wrong, _ESCAPE_COUNT, 0))
    tl.atomic_max(fault, worst, mask=worst > 0, sem="relaxed")


@triton.jit
def _tile(
    first_row: tl.tensor,
    rows: tl.tensor,
    channel: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Of the 64 rows from first_row: which values lie inside the block, bool (64, channels), and
    how far each row lies from the first of the block, int64 (64, 1).
    """
    row = first_row + tl.arange(0, _TILE_ROWS)
    inside = (row < rows)[:, None] & (channel < width)[None, :]
    return inside, (row.to(tl.int64) * row_stride)[:, None]


@triton.jit
def _exponents(
    place: tl.tensor, inside: tl.tensor, SHIFT: tl.constexpr, MAX: tl.constexpr
) -> tl.tensor:
    """The exponents, int32, of the words at these places; 0 for those not inside."""
    return tl.load(place, mask=inside, other=0).to(tl.int32) >> SHIFT & MAX


@triton.jit
def _escaped(code: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """1 where a value inside needs an escape, else 0, int32; code: exponent - base, int32."""
    return tl.where(inside & ((code < 0) | (code >= _ESCAPE)), 1, 0)


@triton.jit
def _rank(flags: tl.tensor) -> tl.tensor:
    """How many flags of 1 lie before each place, in row order; int32 (bytes, 8) both."""
    in_byte = tl.sum(flags, axis=1)
    before_byte = tl.cumsum(in_byte, axis=0) - in_byte
    return before_byte[:, None] + tl.cumsum(flags, axis=1) - flags


@triton.jit
def _total(flags: tl.tensor) -> tl.tensor:
    """How many flags, int32 with two axes, are 1."""
    return tl.sum(tl.sum(flags, axis=1), axis=0)


@triton.jit
def _pack(bits: tl.tensor) -> tl.tensor:
    """Bits, int32 (bytes, 8), as uint8 (bytes,), the first bit lowest."""
    return tl.sum(bits << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def _unpack(packed: tl.tensor) -> tl.tensor:
    """Undo `_pack`."""
    return packed.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :] & 1


@triton.jit
def _load_u32(numbers: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Number `index` of little-endian u32 that need not be aligned, as int64."""
    byte = tl.arange(0, 4)
    parts = tl.load(numbers + index * 4 + byte).to(tl.int64)
    return tl.sum(parts << (8 * byte).to(tl.int64), axis=0)
