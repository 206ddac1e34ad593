"""Level 2, compiled: streams to words (see `tiered_parts` for the terms).

The kernels check all that the format demands, and read and write nothing outside the arrays they
are given, whatever those hold: strings and escapes are copied to where there is room for one tile
to read on behind them, and no tile begins where they have already ended.
"""

from __future__ import annotations

from typing import Any

from numba import int64

from gaac.kernels import bit_strings, vector
from gaac.kernels.cpu import inlined, kernel
from gaac.kernels.entropy_decode import in_range, tails_clean
from gaac.kernels.entropy_parts import STEP, load_bytes, load_mask, next_channel, sizes_of
from gaac.kernels.packed_decode import escapes_end, expand_step, patch_step
from gaac.kernels.packed_parts import address_of, aligned, row_skip
from gaac.kernels.tiered_parts import fill_bases, load_ranks
from gaac.kernels.tiered_ranks import add_by_lookup, add_by_steps
from gaac.levels.packed import ALIGN, TILE_ROWS
from gaac.levels.tiered import CODE_BITS, OFFSET_BYTES, OFFSETS, RANKS

# What a kernel returns if the streams are wrong.
FAULTS = {
    -2: "The streams do not have the lengths that the shape demands.",
    -3: "The bit planes hold bits behind their last value.",
    -4: "An exponent lies outside the range of its dtype.",
    -5: "The offsets are not those of the codes.",
    -6: "The second codes are not as many as the codes ask for.",
    -7: "The third codes are not as many as the codes ask for.",
    -8: "The escapes are not as many as the codes ask for.",
}
LENGTHS, SPARE_BITS, RANGE, OFFSET, SECOND, THIRD, ESCAPES = FAULTS

SIGNATURE = (
    "int64(UniTuple(Array(uint8, 1, 'A', readonly=True), 8), "
    "Array(uint16, 3, 'A'), Array(uint8, 1, 'C'))"
)


@inlined
def decode(
    streams: Any,
    out: Any,
    scratch: Any,
    half: Any,
    deposit: Any,
    add_ranks: Any,
    put_step: Any,
) -> Any:
    """Write the words into `out`, uint16 (blocks, rows, width).

    scratch: as `tiered_simd.scratch_bytes` says; half: whether float16; deposit, add_ranks and
    put_step: of the path. Returns 0, STRIDED (nothing was written) or one of FAULTS (out holds
    anything).
    """
    if not lengths_fit(streams, out, half):
        return LENGTHS
    status, skip = row_skip(out)
    if status:
        return status
    base, ranks, offsets, second, third, escapes, planes, low = streams
    sizes = sizes_of(out.shape, half)
    if half and not (in_range(base, sizes) and in_range(ranks, sizes) and in_range(escapes, sizes)):
        return RANGE
    block_planes = CODE_BITS + sizes.planes - 1
    if not tails_clean(planes, sizes.blocks * block_planes, sizes.plane, sizes.values):
        return SPARE_BITS
    tile_values = min(TILE_ROWS, sizes.rows) * sizes.width
    table = aligned(address_of(scratch))
    words = table + sizes.pitch
    strings, first_escape = copy_coded(words + 2 * STEP, second, third, escapes)
    of_ranks = load_ranks(address_of(ranks))
    offset, place, low_at = address_of(offsets), address_of(planes), address_of(low)
    whole = sizes.values - sizes.values % STEP
    done = (0, 0, first_escape)
    for block in range(sizes.blocks):
        into = address_of(out) + block * out.strides[0]
        bases = address_of(base) + block * sizes.width
        fill_bases(table, bases, sizes.width, of_ranks[0], 2 if half else 0)
        channel = 0
        for tile in range(0, sizes.values, tile_values):
            if not starts_right(offset, done, first_escape, strings, escapes):
                return OFFSET
            offset += OFFSETS * OFFSET_BYTES
            at, count = (into, place, low_at, channel), min(tile + tile_values, whole) - tile
            if sizes.width == STEP:
                at, done = decode_steps(
                    at,
                    count,
                    sizes,
                    table,
                    True,
                    skip,
                    of_ranks,
                    strings,
                    done,
                    half,
                    deposit,
                    add_ranks,
                    put_step,
                )
            else:
                at, done = decode_steps(
                    at,
                    count,
                    sizes,
                    table,
                    False,
                    skip,
                    of_ranks,
                    strings,
                    done,
                    half,
                    deposit,
                    add_ranks,
                    put_step,
                )
            into, place, low_at, channel = at
        if whole < sizes.values:
            exponent = vector.load_u8x64(table + channel)
            rest = sizes.values - whole
            done = decode_step(
                words,
                place,
                sizes.plane,
                low_at,
                exponent,
                of_ranks,
                strings,
                done,
                rest,
                half,
                deposit,
                add_ranks,
                put_step,
            )
            vector.copy(into, words, 2 * rest)
            low_at += rest
        place += block_planes * sizes.plane - whole // 8
    if not pair_ends(strings[0], done[0]):
        return SECOND
    if not pair_ends(strings[1], done[1]):
        return THIRD
    left = first_escape + int64(escapes.size) - done[2]
    return 0 if left >= 0 and escapes_end(done[2], left) else ESCAPES


# Checks.


@inlined
def lengths_fit(streams: Any, out: Any, half: Any) -> Any:
    """Whether the streams have the lengths that the shape of `out` demands, and no gaps.

    A shape without values has none.
    """
    blocks, rows, width = out.shape
    values = rows * width
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    base, ranks, offsets, second, third, escapes, planes, low = streams
    for stream in streams:
        if stream.strides[0] != 1 and stream.size > 1:
            return False
    front = base.size + ranks.size + offsets.size + second.size + third.size + escapes.size
    return (
        blocks * values > 0
        and base.size == blocks * width
        and ranks.size == RANKS
        and offsets.size == OFFSET_BYTES * OFFSETS * blocks * tiles
        and second.size % 2 == 0
        and third.size % 2 == 0
        and escapes.size < blocks * values + ALIGN
        and front % ALIGN == 0
        and planes.size == blocks * (CODE_BITS + (3 if half else 0)) * ((values + 7) // 8)
        and low.size == blocks * values
    )


@inlined
def starts_right(offset: Any, done: Any, first_escape: Any, strings: Any, escapes: Any) -> Any:
    """Whether a tile starts where its offsets say, and nothing before it went beyond an end."""
    escape = done[2] - first_escape
    return (
        vector.load_u32(offset) == done[0]
        and vector.load_u32(offset + OFFSET_BYTES) == done[1]
        and vector.load_u32(offset + 2 * OFFSET_BYTES) == escape
        and done[0] <= 8 * strings[0][1]
        and done[1] <= 8 * strings[1][1]
        and escape <= escapes.size
    )


@inlined
def pair_ends(pair: Any, count: Any) -> Any:
    """Whether two strings have `count` bits each, with zeros behind them."""
    low, length = pair
    return (
        length == (count + 7) // 8
        and bit_strings.tail_clean(low, count)
        and bit_strings.tail_clean(low + length, count)
    )


# Second and third codes lie in pairs of strings, of their low and high bits: a pair is where the
# first begins and how many bytes each has.


@inlined
def copy_coded(at: Any, second: Any, third: Any, escapes: Any) -> Any:
    """Copy what no tile knows the end of to `at`; returns the two pairs and where escapes lie."""
    second_pair = (at, int64(second.size) // 2)
    vector.copy(at, address_of(second), second.size)
    at += int64(second.size)
    third_pair = (at, int64(third.size) // 2)
    vector.copy(at, address_of(third), third.size)
    at += int64(third.size)
    vector.copy(at, address_of(escapes), escapes.size)
    return (second_pair, third_pair), at


@inlined
def read_pair(pair: Any, position: Any, where: Any, count: Any, deposit: Any) -> Any:
    """The codes of the `count` values of a mask, as masks of their low and high bits."""
    low = deposit(bit_strings.peek(pair[0], position, count), where)
    return low, deposit(bit_strings.peek(pair[0] + pair[1], position, count), where)


# Words.


@inlined
def decode_steps(
    at: Any,
    count: Any,
    sizes: Any,
    table: Any,
    one_step: Any,
    skip: Any,
    ranks: Any,
    strings: Any,
    done: Any,
    half: Any,
    deposit: Any,
    add_ranks: Any,
    put_step: Any,
) -> Any:
    """Write the words of whole steps, `count` values; returns where all is then, and `done`.

    at: where words, planes and low go on, and the channel. one_step: whether a row is one step; a
    constant, as then there is less to do.
    """
    into, place, low, channel = at
    exponent = vector.load_u8x64(table)
    for _ in range(0, count, STEP):
        if not one_step:
            exponent = vector.load_u8x64(table + channel)
        done = decode_step(
            into,
            place,
            sizes.plane,
            low,
            exponent,
            ranks,
            strings,
            done,
            STEP,
            half,
            deposit,
            add_ranks,
            put_step,
        )
        into += 2 * STEP
        place += STEP // 8
        low += STEP
        if one_step:
            into += skip
        else:
            channel = next_channel(channel, sizes)
            if channel == 0:
                into += skip
    return (into, place, low, channel), done


@inlined
def decode_step(
    into: Any,
    place: Any,
    plane: Any,
    low: Any,
    exponent: Any,
    ranks: Any,
    strings: Any,
    done: Any,
    count: Any,
    half: Any,
    deposit: Any,
    add_ranks: Any,
    put_step: Any,
) -> Any:
    """Write 64 words, of which the first `count` count.

    exponent: of rank 0. done: how many values went on to second and to third before, and where the
    next escape lies; returned as it is then.
    """
    passed_first, passed_second, escape = done
    first = load_mask(place, count), load_mask(place + plane, count)
    further = first[0] & first[1]
    asked = vector.popcount(further)
    second = read_pair(strings[0], passed_first, further, asked, deposit)
    passed_first += asked
    further = second[0] & second[1]
    asked = vector.popcount(further)
    third = read_pair(strings[1], passed_second, further, asked, deposit)
    passed_second += asked
    escaped = third[0] & third[1]
    exponent = add_ranks(exponent, ranks, first, second, third, half)
    extra = (escaped, escaped, escaped)  # not used
    if half:
        exponent = vector.both(exponent, vector.splat_u8x64(31 << 2))
        extra = (
            load_mask(place + 2 * plane, count),
            load_mask(place + 3 * plane, count),
            load_mask(place + 4 * plane, count),
        )
    put_step(into, load_bytes(low, count), exponent, extra, escaped, escape, half)
    return passed_first, passed_second, escape + vector.popcount(escaped)


@kernel(SIGNATURE)
def decode_bfloat16_vbmi2(streams: Any, out: Any, scratch: Any) -> Any:
    return decode(streams, out, scratch, False, vector.pdep, add_by_lookup, expand_step)


@kernel(SIGNATURE)
def decode_bfloat16_plain(streams: Any, out: Any, scratch: Any) -> Any:
    return decode(
        streams, out, scratch, False, bit_strings.deposit_portable, add_by_steps, patch_step
    )


@kernel(SIGNATURE)
def decode_float16_vbmi2(streams: Any, out: Any, scratch: Any) -> Any:
    return decode(streams, out, scratch, True, vector.pdep, add_by_lookup, expand_step)


@kernel(SIGNATURE)
def decode_float16_plain(streams: Any, out: Any, scratch: Any) -> Any:
    return decode(
        streams, out, scratch, True, bit_strings.deposit_portable, add_by_steps, patch_step
    )
