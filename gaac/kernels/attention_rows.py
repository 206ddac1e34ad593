"""Rows of keys or values in Triton programs: read as they lie, or decoded from level 1.

Where they lie is told by a region of pages (`gaac.pages.FIELDS`), an address being an int64, or,
behind the pages, by the tensor of the tail.

Eight neighbouring values of a row are decoded at a time, as the bytes of one int64: a byte of each
plane spreads to the lowest bits of eight bytes, and eight bases, or bytes of `low`, lie like that.

WIDTH: the head_dim, a multiple of 16. ALIGNED: whether all rows and bases lie at multiples of 16
bytes (and so offsets at multiples of 4), so that whole words can be loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gaac import pages
from gaac.levels.packed import TILE_ROWS

# Numbers as a program sees them: it reads globals only if they are constexpr.
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_RAW = tl.constexpr(pages.RAW)
_REPEATED = tl.constexpr(pages.REPEATED)
_FIELDS = tl.constexpr(len(pages.FIELDS))
_KIND = tl.constexpr(pages.KIND)
_LOW = tl.constexpr(pages.LOW)
_STRIDE = tl.constexpr(pages.STRIDE)
_PLANES = tl.constexpr(pages.PLANES)
_BASE = tl.constexpr(pages.BASE)
_OFFSETS = tl.constexpr(pages.OFFSETS)
_ESCAPES = tl.constexpr(pages.ESCAPES)
_REPEATS = tl.constexpr(pages.REPEATS)

# Of the eight bytes of an int64: their lowest bits, all but their highest bits, every other byte.
_LOWEST_BITS = tl.constexpr(0x0101010101010101)
_LOWER_BITS = tl.constexpr(0x7F7F7F7F7F7F7F7F)
_EVEN_BYTES = tl.constexpr(0x00FF00FF00FF00FF)
_TO_BYTES = tl.constexpr(0x00204081)  # times four bits: bit i comes to lie at 8 i, and elsewhere


@triton.jit
def rows_of(
    regions: tl.tensor,
    region: tl.tensor,
    tail: tl.tensor,
    tail_row_stride: tl.tensor,
    row: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """`count` rows from `row` on, of a region, or of the tail if that is -1.

    regions: int64 (regions, fields) of one KV head. tail: its first row, of float16 or bfloat16;
    tail_row_stride, in values. Returns (64, WIDTH, padded to a power of two) in the tail's dtype,
    zero where there is nothing.
    """
    region_fields = regions + region * _FIELDS
    if region < 0:
        kind, low = tl.full((), _RAW, tl.int64), tail.to(tl.int64)
        stride = tail_row_stride.to(tl.int64) * 2
    else:
        kind, low = tl.load(region_fields + _KIND), tl.load(region_fields + _LOW)
        stride = tl.load(region_fields + _STRIDE)
    if kind == _RAW:
        rows = _raw_rows(low, stride, row, count, tail.dtype.element_ty, WIDTH, ALIGNED)
    else:
        rows = _packed_rows(region_fields, row, count, tail.dtype.element_ty, WIDTH, ALIGNED)
    return rows


@triton.jit
def _raw_rows(
    low: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    count: tl.tensor,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Rows that lie as they are, see `rows_of`. low: address. stride: bytes from row to row."""
    lane, channel = tl.arange(0, _TILE_ROWS), tl.arange(0, triton.next_power_of_2(WIDTH))
    start, step = (low + row * stride).to(tl.pointer_type(DTYPE)), stride // 2
    if ALIGNED:
        start, step = tl.multiple_of(start, 16), tl.multiple_of(step, 8)
    place = start + lane[:, None] * step + channel[None, :]
    inside = (lane < count)[:, None] & (channel < WIDTH)[None, :]
    return tl.load(place, mask=inside, other=0)


@triton.jit
def _packed_rows(
    region_fields: tl.tensor,
    row: tl.tensor,
    count: tl.tensor,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Rows at level 1, see `rows_of`; docs/format.md, "Level 1" and "Repeats"."""
    ROW_BYTES: tl.constexpr = WIDTH // 8  # of a plane
    BYTES: tl.constexpr = triton.next_power_of_2(ROW_BYTES)
    lane, byte = tl.arange(0, _TILE_ROWS), tl.arange(0, BYTES)
    present = lane < count
    inside = present[:, None] & (byte < ROW_BYTES)[None, :]

    coded_row = row + lane
    repeated = tl.load(region_fields + _KIND) == _REPEATED
    if repeated:
        repeats = tl.load(region_fields + _REPEATS).to(tl.pointer_type(tl.uint8))
        coded_row = tl.load(repeats + coded_row, mask=present, other=0).to(tl.int32)
    place = coded_row[:, None] * ROW_BYTES + byte[None, :]
    stride = tl.load(region_fields + _STRIDE)
    planes = tl.load(region_fields + _PLANES).to(tl.pointer_type(tl.uint8))
    bit_0, bit_1, bit_2 = _three_planes(planes, stride, place, inside)
    seven = bit_0 & bit_1 & bit_2

    # Where the escapes of each row, then of each byte, start.
    offsets = tl.load(region_fields + _OFFSETS)
    seven_count = _ones_in_byte(seven)
    if repeated | (row % _TILE_ROWS != 0):
        start = _gathered_starts(planes, stride, offsets, coded_row, present, ROW_BYTES, ALIGNED)
    else:
        start = _starts(offsets, row // _TILE_ROWS, seven_count, ALIGNED)
    escape = start[:, None] + (tl.cumsum(seven_count, axis=1) - seven_count)

    # No byte overflows, since a base is at most six below the largest exponent.
    base = _numbers(tl.load(region_fields + _BASE), byte * 8, byte < ROW_BYTES, ALIGNED)[None, :]
    exponent = tl.where(inside, base, 0) & ~(_spread(seven) * 255)
    exponent += _spread(bit_0 & ~seven)
    exponent += _spread(bit_1 & ~seven) << 1
    exponent += _spread(bit_2 & ~seven) << 2
    # Few bytes hold more than one seven: the first of each byte is mended, then the second, ...
    escapes = tl.load(region_fields + _ESCAPES).to(tl.pointer_type(tl.uint8))
    while tl.max(seven) > 0:
        first = seven & -seven
        value = tl.load(escapes + escape, mask=seven > 0, other=0)
        exponent |= value.to(tl.int64) * _spread(first)
        escape += 1
        seven ^= first

    low = _numbers(tl.load(region_fields + _LOW), place * 8, inside, ALIGNED)
    if DTYPE.is_fp16():
        bit_8, bit_9, sign = _three_planes(planes + 3 * stride, stride, place, inside)
        high = (exponent << 2) | _spread(bit_8) | (_spread(bit_9) << 1) | (_spread(sign) << 7)
    else:
        high = ((exponent >> 1) & _LOWER_BITS) | ((low & _LOWEST_BITS) << 7)
        low = ((low >> 1) & _LOWER_BITS) | ((exponent & _LOWEST_BITS) << 7)

    # Words 0, 2, 4, 6 of eight as one number, and words 1, 3, 5, 7; then one after the other.
    even = (low & _EVEN_BYTES) | ((high & _EVEN_BYTES) << 8)
    odd = ((low >> 8) & _EVEN_BYTES) | (high & ~_EVEN_BYTES)
    shift = (16 * tl.arange(0, 4)).to(tl.int64)[None, None, :, None]
    word = (tl.join(even, odd)[:, :, None, :] >> shift).to(tl.int16)
    return tl.reshape(word, (_TILE_ROWS, 8 * BYTES)).to(DTYPE, bitcast=True)


@triton.jit
def _three_planes(
    planes: tl.tensor, stride: tl.tensor, place: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The bytes of three planes, `stride` apart, at these places; int32, 0 where not inside."""
    return (
        tl.load(planes + place, mask=inside, other=0).to(tl.int32),
        tl.load(planes + stride + place, mask=inside, other=0).to(tl.int32),
        tl.load(planes + 2 * stride + place, mask=inside, other=0).to(tl.int32),
    )


@triton.jit
def _starts(
    offsets: tl.tensor, tile: tl.tensor, seven_count: tl.tensor, ALIGNED: tl.constexpr
) -> tl.tensor:
    """Where in the escapes those of each row of a tile start, int32 (64,).

    offsets: their address. seven_count: int32 (64, bytes), the sevens of each byte of all rows of
    the tile.
    """
    if ALIGNED:
        offset = tl.load(offsets.to(tl.pointer_type(tl.int32)) + tile)
    else:
        byte = tl.arange(0, 4)
        parts = tl.load(offsets.to(tl.pointer_type(tl.uint8)) + tile * 4 + byte)
        offset = tl.sum(parts.to(tl.int32) << (8 * byte), axis=0)
    in_row = tl.sum(seven_count, axis=1)
    return offset + (tl.cumsum(in_row, axis=0) - in_row)


@triton.jit
def _gathered_starts(
    planes: tl.tensor,
    stride: tl.tensor,
    offsets: tl.tensor,
    coded_row: tl.tensor,
    present: tl.tensor,
    ROW_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """As `_starts`, for any coded rows: it goes through the tiles that may hold them."""
    lane, byte = tl.arange(0, _TILE_ROWS), tl.arange(0, triton.next_power_of_2(ROW_BYTES))
    last = tl.max(tl.where(present, coded_row, 0))
    start = tl.zeros((_TILE_ROWS,), tl.int32)
    for tile in range(0, last // _TILE_ROWS + 1):
        row = tile * _TILE_ROWS + lane
        inside = (row <= last)[:, None] & (byte < ROW_BYTES)[None, :]
        place = row[:, None] * ROW_BYTES + byte[None, :]
        bit_0, bit_1, bit_2 = _three_planes(planes, stride, place, inside)
        start_of = _starts(offsets, tile, _ones_in_byte(bit_0 & bit_1 & bit_2), ALIGNED)
        found = tl.gather(start_of, coded_row % _TILE_ROWS, axis=0)
        start = tl.where(coded_row // _TILE_ROWS == tile, found, start)
    return start


@triton.jit
def _numbers(
    address: tl.tensor, place: tl.tensor, inside: tl.tensor, ALIGNED: tl.constexpr
) -> tl.tensor:
    """Eight bytes each, as int64, so many bytes behind an address; 0 where not inside."""
    if ALIGNED:
        number = tl.load(address.to(tl.pointer_type(tl.int64)) + place // 8, mask=inside, other=0)
    else:
        number = tl.zeros(place.shape, tl.int64)
        for index in tl.static_range(8):
            byte = address.to(tl.pointer_type(tl.uint8)) + place + index
            number |= tl.load(byte, mask=inside, other=0).to(tl.int64) << (8 * index)
    return number


@triton.jit
def _spread(bits: tl.tensor) -> tl.tensor:
    """A byte's bit i as bit 0 of byte i. bits: int32, of one byte; int64 comes back."""
    bits = bits.to(tl.int64)
    nibbles = (bits & 15) | ((bits & 0xF0) << 28)
    return nibbles * _TO_BYTES & _LOWEST_BITS


@triton.jit
def _ones_in_byte(bits: tl.tensor) -> tl.tensor:
    """How many bits of a byte are set. bits: int32, of one byte."""
    pairs = bits - (bits >> 1 & 0x55)
    nibbles = (pairs & 0x33) + (pairs >> 2 & 0x33)
    return (nibbles + (nibbles >> 4)) & 15
