"""Level 1, compiled: streams to words (see `gaac.kernels.packed_parts` for the terms).

The kernels check all that the format demands, and read and write nothing outside the arrays they
are given, whatever those hold.
"""

from __future__ import annotations

from typing import Any

from numba import int64

from gaac.kernels import vector
from gaac.kernels.cpu import inlined, kernel
from gaac.kernels.packed_parts import STEP, address_of, aligned, repeat, row_skip
from gaac.levels.packed import ALIGN, ESCAPE, TILE_ROWS

# What a kernel returns if the streams are wrong.
FAULTS = {
    -2: "The streams do not have the lengths that the shape demands.",
    -3: "The bit planes hold bits behind their last value.",
    -4: "The escapes are not as many as the codes ask for.",
    -5: "An exponent lies outside the range of its dtype.",
}
LENGTHS, SPARE_BITS, ESCAPES, RANGE = FAULTS

SIGNATURE = (
    "int64(UniTuple(Array(uint8, 1, 'A', readonly=True), 5), "
    "Array(uint16, 3, 'A'), Array(uint8, 1, 'C'), int64, int64)"
)


@inlined
def load_bits(place: Any, count: Any) -> Any:
    """Eight bytes of a plane, or `count` if the step is the last and short."""
    if count == 8:
        return vector.load_u64(place)
    return vector.load_part_u64(place, count)


@inlined
def add_bits(bytes_: Any, bits: Any, number: Any) -> Any:
    """Add a number in the lanes of a mask."""
    return vector.select(bits, vector.add(bytes_, vector.splat_u8x64(number)), bytes_)


@inlined
def load_base(base: Any, width: Any, table: Any, repeats: Any, half: Any) -> Any:
    """Fill a table with bases (float16: where they lie in a word's high byte), check their range.

    Returns whether one is out of range.
    """
    most = vector.splat_u8x64((31 if half else 255) - ESCAPE + 1)
    beyond = vector.bits(0)
    for channel in range(0, width, STEP):
        if width - channel >= STEP:
            step = vector.load_u8x64(base + channel)
        else:
            step = vector.load_part_u8x64(base + channel, width - channel)
        beyond |= vector.greater(step, most)
        if half:
            step = vector.shift_left(step, vector.splat_u8x64(2))
        vector.store(table + channel, step)
    repeat(table, width, repeats)
    return beyond != vector.bits(0)


@inlined
def add_codes(base: Any, codes: Any, half: Any) -> Any:
    """Add three masks, the bits of the codes, to bases as in load_base."""
    bit0, bit1, bit2 = codes
    unit = 4 if half else 1
    return add_bits(add_bits(add_bits(base, bit0, unit), bit1, 2 * unit), bit2, 4 * unit)


@inlined
def load_planes(place: Any, plane: Any, count: Any) -> Any:
    """The bits of a step in three planes, `plane` bytes apart, as masks."""
    bit0, bit1 = load_bits(place, count), load_bits(place + plane, count)
    return bit0, bit1, load_bits(place + 2 * plane, count)


@inlined
def words_of(low: Any, exponent: Any, extra: Any, half: Any) -> Any:
    """64 words; exponent: as in load_base; extra: masks of mantissa bits 8, 9 and sign."""
    if half:
        mantissa8, mantissa9, sign = extra
        high = add_bits(add_bits(add_bits(exponent, mantissa8, 1), mantissa9, 2), sign, 0x80)
        return vector.join_first(low, high), vector.join_second(low, high)
    first, second = vector.join_first(low, exponent), vector.join_second(low, exponent)
    return vector.rotate_right_1(first), vector.rotate_right_1(second)


@inlined
def put_words(into: Any, low: Any, exponent: Any, extra: Any, half: Any) -> None:
    """Write 64 words, as `words_of` has them."""
    first, second = words_of(low, exponent, extra, half)
    vector.store(into, first)
    vector.store(into + STEP, second)


@inlined
def expand_step(
    into: Any, low: Any, exponent: Any, extra: Any, where: Any, escape: Any, half: Any
) -> None:
    """Write 64 words, the mask `where` saying which take their exponents from `escape`. VBMI2."""
    escapes = vector.load_u8x64(escape)
    if half:
        escapes = vector.shift_left(escapes, vector.splat_u8x64(2))
    put_words(into, low, vector.expand(escapes, where, exponent), extra, half)


@inlined
def patch_step(
    into: Any, low: Any, exponent: Any, extra: Any, where: Any, escape: Any, half: Any
) -> None:
    """As expand_step, on any CPU: the words that escaped are changed one by one."""
    if half:
        # A base and code 7 may be more than five bits, and then would change the sign.
        exponent = vector.select(where, vector.splat_u8x64(0), exponent)
    put_words(into, low, exponent, extra, half)
    shift, others = (10, 0x83FF) if half else (7, 0x807F)
    while where:
        word = into + 2 * vector.trailing_zeros(where)
        vector.store_u16(word, vector.load_u16(word) & others | vector.load_u8(escape) << shift)
        where &= where - vector.bits(1)
        escape += 1


@inlined
def decode_step(
    into: Any,
    place: Any,
    plane: Any,
    low: Any,
    base: Any,
    escape: Any,
    half: Any,
    put_step: Any,
) -> Any:
    """Write 64 words; return how many took an escape."""
    codes = load_planes(place, plane, 8)
    where = codes[0] & codes[1] & codes[2]
    extra = load_planes(place + 3 * plane, plane, 8) if half else codes
    put_step(into, vector.load_u8x64(low), add_codes(base, codes, half), extra, where, escape, half)
    return vector.popcount(where)


@inlined
def decode_part(
    into: Any,
    place: Any,
    plane: Any,
    low: Any,
    base: Any,
    escape: Any,
    count: Any,
    half: Any,
    put_step: Any,
    words: Any,
) -> Any:
    """Write `count` words, fewer than 64, by way of `words`, room for 64.

    Returns how many took an escape, and whether the planes hold bits behind the last of them.
    """
    valid = vector.first_bits(count)
    codes = load_planes(place, plane, (count + 7) // 8)
    where = codes[0] & codes[1] & codes[2] & valid
    used = codes[0] | codes[1] | codes[2]
    extra = codes
    if half:
        extra = load_planes(place + 3 * plane, plane, (count + 7) // 8)
        used |= extra[0] | extra[1] | extra[2]
    step = vector.load_part_u8x64(low, count)
    put_step(words, step, add_codes(base, codes, half), extra, where, escape, half)
    vector.copy(into, words, 2 * count)
    return vector.popcount(where), (used & ~valid) != vector.bits(0)


@inlined
def escapes_end(escape: Any, left: Any) -> Any:
    """Whether behind the last escape used there are fewer than 64 left, and all zero."""
    if not 0 <= left < ALIGN:
        return False
    spare = vector.greater(vector.load_u8x64(escape), vector.splat_u8x64(0))
    return (spare & vector.first_bits(left)) == vector.bits(0)


@inlined
def escapes_in_range(escapes: Any, size: Any) -> Any:
    """Whether no escape of a float16 is greater than its exponents can be; zeros behind them."""
    beyond, most = vector.bits(0), vector.splat_u8x64(31)
    for at in range(0, size, STEP):
        beyond |= vector.greater(vector.load_u8x64(escapes + at), most)
    return beyond == vector.bits(0)


@inlined
def lengths_fit(streams: Any, out: Any, half: Any) -> Any:
    """Whether the streams have the lengths that the shape of `out` demands, and no gaps.

    A shape without values has none.
    """
    blocks, rows, width = out.shape
    values = rows * width
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    base, offsets, escapes, planes, low = streams
    for stream in streams:
        if stream.strides[0] != 1 and stream.size > 1:
            return False
    return (
        blocks * values > 0
        and base.size == blocks * width
        and offsets.size == 4 * blocks * tiles
        and planes.size == blocks * (6 if half else 3) * ((values + 7) // 8)
        and low.size == blocks * values
        and escapes.size < low.size + ALIGN
        and (base.size + offsets.size + escapes.size) % ALIGN == 0
    )


@inlined
def decode(
    streams: Any, out: Any, scratch: Any, lanes: Any, repeats: Any, half: Any, put_step: Any
) -> Any:
    """Write the words into `out`, uint16 (blocks, rows, width).

    scratch has room for an aligned table, 64 words, the escapes and 64 bytes more.
    Returns 0, STRIDED (nothing was written) or one of FAULTS (out holds anything).
    """
    if not lengths_fit(streams, out, half):
        return LENGTHS
    status, skip = row_skip(out)
    if status:
        return status
    base, offsets, escapes, planes, low = streams
    blocks, rows, width = out.shape
    values, tile_values = rows * width, TILE_ROWS * width
    whole = values - values % STEP
    plane = (values + 7) // 8
    place, low_at = address_of(planes), address_of(low)
    base_at, offset = address_of(base), address_of(offsets)
    table = aligned(address_of(scratch))
    words = table + lanes + STEP
    # A copy of the escapes with zeros behind them may be read 64 bytes at a time, wherever a
    # damaged blob's codes lead, as long as each step starts within it.
    first_escape = words + 2 * STEP
    size = int64(escapes.size)
    vector.copy(first_escape, address_of(escapes), size)
    end = first_escape + size
    vector.store(end, vector.splat_u8x64(0))
    escape = first_escape
    wrong_bits, wrong_base, wrong_offset = False, False, False
    for block in range(blocks):
        into = address_of(out) + block * out.strides[0]
        wrong_base |= load_base(base_at, width, table, repeats, half)
        bases = vector.load_u8x64(table)
        lane = 0
        for tile in range(0, values, tile_values):
            wrong_offset |= vector.load_u32(offset) != escape - first_escape
            offset += 4
            last = min(tile + tile_values, whole)
            if lanes == STEP:
                for _ in range(tile, last, STEP):
                    escape += decode_step(
                        into, place, plane, low_at, bases, min(escape, end), half, put_step
                    )
                    into += 2 * STEP + skip
                    place += STEP // 8
                    low_at += STEP
            else:
                for _ in range(tile, last, STEP):
                    bases = vector.load_u8x64(table + lane)
                    escape += decode_step(
                        into, place, plane, low_at, bases, min(escape, end), half, put_step
                    )
                    into += 2 * STEP
                    place += STEP // 8
                    low_at += STEP
                    lane += STEP
                    if lane == lanes:
                        lane = 0
                        into += skip
        if whole < values:
            bases = vector.load_u8x64(table + lane)
            count = values - whole
            escaped, wrong = decode_part(
                into, place, plane, low_at, bases, min(escape, end), count, half, put_step, words
            )
            escape += escaped
            wrong_bits |= wrong
            place += plane - whole // 8
            low_at += count
        base_at += width
        place += (5 if half else 2) * plane
    if wrong_bits:
        return SPARE_BITS
    if wrong_offset or not escapes_end(min(escape, end), end - escape):
        return ESCAPES
    if wrong_base or (half and not escapes_in_range(first_escape, size)):
        return RANGE
    return 0


@kernel(SIGNATURE)
def decode_bfloat16_vbmi2(streams: Any, out: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return decode(streams, out, scratch, lanes, repeats, False, expand_step)


@kernel(SIGNATURE)
def decode_bfloat16_plain(streams: Any, out: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return decode(streams, out, scratch, lanes, repeats, False, patch_step)


@kernel(SIGNATURE)
def decode_float16_vbmi2(streams: Any, out: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return decode(streams, out, scratch, lanes, repeats, True, expand_step)


@kernel(SIGNATURE)
def decode_float16_plain(streams: Any, out: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return decode(streams, out, scratch, lanes, repeats, True, patch_step)
