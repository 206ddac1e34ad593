"""Level 1, compiled: words to streams (see `gaac.kernels.packed_parts` for the terms)."""

from __future__ import annotations

from typing import Any

from gaac.kernels import vector
from gaac.kernels.cpu import inlined, kernel
from gaac.kernels.packed_parts import STEP, address_of, aligned, repeat, row_skip
from gaac.levels.packed import BASE_CANDIDATES, CODE_BITS, ESCAPE, TILE_ROWS

# Escapes of a channel are counted in bytes that stop at 255. Only 256 rows can reach that, and then
# the choice is the same as with true counts: the largest exponent does not escape from the first
# base, so its count is at most 255, and no other count of 255 or 256 is less.
MAX_ROWS = 256


def escape_table(low: int, high: int) -> tuple[int, int]:
    """A byte for each distance, 0 to 15, below the largest exponent, eight to an integer.

    It has bit 0 set if what lies there escapes from candidate `low`, bit 4 if from `high`.
    """
    entries = [
        sum(bit for i, bit in ((low, 1), (high, 16)) if below < i or below > ESCAPE - 1 + i)
        for below in range(16)
    ]
    return int.from_bytes(entries[:8], "little"), int.from_bytes(entries[8:], "little")


ESCAPES_01 = escape_table(0, 1)
ESCAPES_23 = escape_table(2, 3)

SIGNATURE = (
    "int64(Array(uint16, 3, 'A', readonly=True), Array(uint8, 1, 'C'), Array(uint8, 1, 'C'), "
    "int64, int64)"
)


@inlined
def split_words(first: Any, second: Any, half: Any) -> Any:
    """The exponents of 64 words, their bytes for stream `low`, and their high bytes."""
    if half:
        high = vector.high_bytes(first, second)
        exponent = vector.shift_right(high, vector.splat_u8x64(2))
        exponent = vector.both(exponent, vector.splat_u8x64(31))
        return exponent, vector.low_bytes(first, second), high
    first, second = vector.rotate_left_1(first), vector.rotate_left_1(second)
    exponent = vector.high_bytes(first, second)
    return exponent, vector.low_bytes(first, second), exponent


@inlined
def put_bits(place: Any, values: Any, bit: Any, count: Any) -> None:
    """Write one bit of each of 64 bytes to a plane: eight bytes of it, or `count`, if fewer."""
    bits = vector.any_bit(values, vector.splat_u8x64(bit))
    if count == 8:
        vector.store_u64(place, bits)
    else:
        vector.store_part_u64(place, bits, count)


@inlined
def put_extra(place: Any, plane: Any, high: Any, count: Any) -> None:
    """Write mantissa bits 8 and 9 and the sign of 64 float16 to planes `plane` bytes apart."""
    put_bits(place, high, 1, count)
    put_bits(place + plane, high, 2, count)
    put_bits(place + 2 * plane, high, 0x80, count)


@inlined
def split_step(words: Any, exponent: Any, low: Any, extra: Any, plane: Any, half: Any) -> Any:
    """Split 64 words at an address; write and return their exponents."""
    first, second = vector.load_u16x32(words), vector.load_u16x32(words + STEP)
    step, low_step, high = split_words(first, second, half)
    vector.store(exponent, step)
    vector.store(low, low_step)
    if half:
        put_extra(extra, plane, high, 8)
    return step


@inlined
def split_part(
    words: Any, exponent: Any, low: Any, extra: Any, plane: Any, count: Any, half: Any
) -> Any:
    """As split_step, for `count` words, fewer than 64; the other exponents are zero."""
    first = vector.load_part_u16x32(words, min(2 * count, STEP))
    second = vector.load_part_u16x32(words + STEP, max(2 * count - STEP, 0))
    step, low_step, high = split_words(first, second, half)
    vector.store(exponent, step)
    vector.store_part(low, low_step, count)
    if half:
        put_extra(extra, plane, high, (count + 7) // 8)
    return step


@inlined
def split_block(
    words: Any,
    skip: Any,
    values: Any,
    lanes: Any,
    exponent: Any,
    low: Any,
    extra: Any,
    table: Any,
    half: Any,
) -> None:
    """Write a block's exponents, low bytes and extra planes, and the largest exponent of each lane.

    Behind the last exponent come zeros up to a whole step.
    """
    whole, plane = values - values % STEP, (values + 7) // 8
    lane = 0
    if lanes == STEP:
        best = vector.splat_u8x64(0)
        for value in range(0, whole, STEP):
            place = extra + value // 8
            step = split_step(words, exponent + value, low + value, place, plane, half)
            best = vector.largest(best, step)
            words += 2 * STEP + skip
        vector.store(table, best)
    else:
        for value in range(0, whole, STEP):
            place = extra + value // 8
            split_step(words, exponent + value, low + value, place, plane, half)
            words += 2 * STEP
            lane += STEP
            if lane == lanes:
                lane = 0
                words += skip
        for first in range(0, lanes, STEP):
            best = vector.splat_u8x64(0)
            for value in range(first, whole, lanes):
                best = vector.largest(best, vector.load_u8x64(exponent + value))
            vector.store(table + first, best)
    if whole < values:
        place = extra + whole // 8
        step = split_part(words, exponent + whole, low + whole, place, plane, values - whole, half)
        vector.store(table + lane, vector.largest(vector.load_u8x64(table + lane), step))


@inlined
def find_largest(table: Any, width: Any, repeats: Any) -> None:
    """Turn a table of the largest exponent of each lane into one of each channel."""
    for channel in range(0, width, STEP):
        best = vector.load_u8x64(table + channel)
        for again in range(1, repeats):
            best = vector.largest(best, vector.load_u8x64(table + again * width + channel))
        vector.store(table + channel, best)
    repeat(table, width, repeats)


@inlined
def candidate(largest: Any, above: Any) -> Any:
    """The base that puts the largest exponent at code 6 + above."""
    return vector.subtract_saturated(largest, vector.splat_u8x64(ESCAPE - 1 + above))


@inlined
def count_escape(count: Any, exponent: Any, base: Any, valid: Any) -> Any:
    """Add one, up to 255, in the valid lanes whose exponent escapes from this base."""
    escapes = vector.greater(vector.subtract(exponent, base), vector.splat_u8x64(ESCAPE - 1))
    more = vector.add_saturated(count, vector.splat_u8x64(1))
    return vector.select(escapes & valid, more, count)


@inlined
def count_by_comparing(exponent: Any, end: Any, lanes: Any, largest: Any) -> Any:
    """Escapes of the steps at exponent, exponent + lanes and so on, from each candidate."""
    every = vector.first_bits(STEP)
    base0, base1 = candidate(largest, 0), candidate(largest, 1)
    base2, base3 = candidate(largest, 2), candidate(largest, 3)
    count0 = vector.splat_u8x64(0)
    count1 = count2 = count3 = count0
    for place in range(exponent, end, lanes):
        step = vector.load_u8x64(place)
        count0 = count_escape(count0, step, base0, every)
        count1 = count_escape(count1, step, base1, every)
        count2 = count_escape(count2, step, base2, every)
        count3 = count_escape(count3, step, base3, every)
    return count0, count1, count2, count3


@inlined
def count_by_lookup(exponent: Any, end: Any, lanes: Any, largest: Any) -> Any:
    """As count_by_comparing, with the instructions of vbmi2, and the same choice.

    An exponent lying `below` the largest escapes from candidate i if below < i or below > 6 + i.
    Where the largest is so small that several candidates are base 0, this counts too many for all
    but the first of those; that one is the first to be tried, and wins among equals anyway.
    """
    most, nibble = vector.splat_u8x64(15), vector.splat_u8x64(4)
    count0 = vector.splat_u8x64(0)
    count1 = count2 = count3 = count0
    for first in range(exponent, end, 15 * lanes):
        pair01 = pair23 = vector.splat_u8x64(0)  # two counts in a byte, each up to 15
        for place in range(first, min(first + 15 * lanes, end), lanes):
            below = vector.smallest(vector.subtract(largest, vector.load_u8x64(place)), most)
            pair01 = vector.add(pair01, vector.lookup(ESCAPES_01[0], ESCAPES_01[1], below))
            pair23 = vector.add(pair23, vector.lookup(ESCAPES_23[0], ESCAPES_23[1], below))
        count0 = vector.add_saturated(count0, vector.both(pair01, most))
        count1 = vector.add_saturated(count1, vector.shift_right(pair01, nibble))
        count2 = vector.add_saturated(count2, vector.both(pair23, most))
        count3 = vector.add_saturated(count3, vector.shift_right(pair23, nibble))
    return count0, count1, count2, count3


@inlined
def count_escapes(exponent: Any, values: Any, table: Any, lanes: Any, count_steps: Any) -> None:
    """Fill the four tables behind that of the largest exponents: escapes from each candidate."""
    size = lanes + STEP
    whole = values - values % STEP
    for lane in range(0, lanes, STEP):
        largest = vector.load_u8x64(table + lane)
        counts = count_steps(exponent + lane, exponent + whole, lanes, largest)
        vector.store(table + lane + size, counts[0])
        vector.store(table + lane + 2 * size, counts[1])
        vector.store(table + lane + 3 * size, counts[2])
        vector.store(table + lane + 4 * size, counts[3])
    if whole < values:
        lane, valid = whole % lanes, vector.first_bits(values - whole)
        largest, step = vector.load_u8x64(table + lane), vector.load_u8x64(exponent + whole)
        for above in range(BASE_CANDIDATES):
            place = table + lane + (1 + above) * size
            count = vector.load_u8x64(place)
            vector.store(place, count_escape(count, step, candidate(largest, above), valid))


@inlined
def choose(table: Any, lanes: Any, width: Any, repeats: Any, base: Any) -> None:
    """Turn the table of largest exponents into that of bases, and write the stream `base`."""
    size = lanes + STEP
    for channel in range(0, width, STEP):
        largest = vector.load_u8x64(table + channel)
        best = candidate(largest, 0)
        fewest = total(table + size + channel, width, repeats)
        for above in range(1, BASE_CANDIDATES):
            count = total(table + (1 + above) * size + channel, width, repeats)
            better = vector.greater(fewest, count)
            best = vector.select(better, candidate(largest, above), best)
            fewest = vector.select(better, count, fewest)
        vector.store(table + channel, best)
        vector.store_part(base + channel, best, min(width - channel, STEP))
    repeat(table, width, repeats)


@inlined
def total(counts: Any, width: Any, repeats: Any) -> Any:
    """The counts of 64 channels, added up over their places in a table."""
    sums = vector.load_u8x64(counts)
    for again in range(1, repeats):
        sums = vector.add_saturated(sums, vector.load_u8x64(counts + again * width))
    return sums


@inlined
def put_codes(place: Any, plane: Any, exponent: Any, base: Any, valid: Any, count: Any) -> Any:
    """Write the codes of a step to three planes `plane` bytes apart: `count` bytes to each.

    Returns the mask of the values that escape; where not valid, all bits are zero.
    """
    code = vector.subtract(exponent, base)
    escapes = vector.greater(code, vector.splat_u8x64(ESCAPE - 1)) & valid
    code = vector.select(escapes, vector.splat_u8x64(ESCAPE), code)
    code = vector.select(valid, code, vector.splat_u8x64(0))
    put_bits(place, code, 1, count)
    put_bits(place + plane, code, 2, count)
    put_bits(place + 2 * plane, code, 4, count)
    return escapes


@inlined
def compress_escapes(into: Any, exponent: Any, escapes: Any) -> Any:
    """Write the escaped exponents at `exponent`, an address; return their number. VBMI2.

    Up to 64 bytes are written, whatever the number.
    """
    vector.store(into, vector.compress(vector.load_u8x64(exponent), escapes))
    return vector.popcount(escapes)


@inlined
def copy_escapes(into: Any, exponent: Any, escapes: Any) -> Any:
    """As compress_escapes, on any CPU, byte by byte."""
    count = 0
    while escapes:
        vector.store_u8(into + count, vector.load_u8(exponent + vector.trailing_zeros(escapes)))
        escapes &= escapes - vector.bits(1)
        count += 1
    return count


@inlined
def encode(
    words: Any,
    made: Any,
    scratch: Any,
    lanes: Any,
    repeats: Any,
    half: Any,
    count_steps: Any,
    put_escapes: Any,
) -> Any:
    """Write base, offsets, planes, low and escapes one behind the other into `made`.

    Behind the escapes, at least 63 bytes of `made` are zero. `made` has room for as many escapes as
    values and 64 bytes more; scratch, for a block's exponents and five tables, each aligned.
    Returns the number of escapes, or STRIDED.
    """
    status, skip = row_skip(words)
    if status:
        return status
    blocks, rows, width = words.shape
    values, tile_values = rows * width, TILE_ROWS * width
    whole = values - values % STEP
    plane = (values + 7) // 8
    base = address_of(made)
    offset = base + blocks * width
    place = offset + 4 * blocks * ((rows + TILE_ROWS - 1) // TILE_ROWS)
    low = place + blocks * (6 if half else 3) * plane
    first_escape = low + blocks * values
    escape = first_escape
    exponent = aligned(address_of(scratch))
    table = aligned(exponent + values)
    every = vector.first_bits(STEP)
    for block in range(blocks):
        source = address_of(words) + block * words.strides[0]
        extra = place + CODE_BITS * plane
        split_block(source, skip, values, lanes, exponent, low, extra, table, half)
        find_largest(table, width, repeats)
        count_escapes(exponent, values, table, lanes, count_steps)
        choose(table, lanes, width, repeats, base)
        lane = 0
        for tile in range(0, values, tile_values):
            vector.store_u32(offset, escape - first_escape)
            offset += 4
            for value in range(tile, min(tile + tile_values, whole), STEP):
                step = vector.load_u8x64(exponent + value)
                bases = vector.load_u8x64(table + lane)
                escapes = put_codes(place, plane, step, bases, every, 8)
                escape += put_escapes(escape, exponent + value, escapes)
                place += STEP // 8
                lane += STEP
                if lane == lanes:
                    lane = 0
        if whole < values:
            step, bases = vector.load_u8x64(exponent + whole), vector.load_u8x64(table + lane)
            valid, bytes_ = vector.first_bits(values - whole), plane - whole // 8
            escapes = put_codes(place, plane, step, bases, valid, bytes_)
            escape += put_escapes(escape, exponent + whole, escapes)
            place += bytes_
        base += width
        place += (5 if half else 2) * plane
        low += values
    vector.store(escape, vector.splat_u8x64(0))
    return escape - first_escape


@kernel(SIGNATURE)
def encode_bfloat16_vbmi2(words: Any, made: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return encode(words, made, scratch, lanes, repeats, False, count_by_lookup, compress_escapes)


@kernel(SIGNATURE)
def encode_bfloat16_plain(words: Any, made: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return encode(words, made, scratch, lanes, repeats, False, count_by_comparing, copy_escapes)


@kernel(SIGNATURE)
def encode_float16_vbmi2(words: Any, made: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return encode(words, made, scratch, lanes, repeats, True, count_by_lookup, compress_escapes)


@kernel(SIGNATURE)
def encode_float16_plain(words: Any, made: Any, scratch: Any, lanes: Any, repeats: Any) -> Any:
    return encode(words, made, scratch, lanes, repeats, True, count_by_comparing, copy_escapes)
