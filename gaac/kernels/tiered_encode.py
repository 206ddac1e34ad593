"""Level 2, compiled: words to streams (see `tiered_parts` for the terms)."""

from __future__ import annotations

from typing import Any

from gaac.kernels import bit_strings, vector
from gaac.kernels.cpu import inlined, kernel
from gaac.kernels.entropy_encode import count_around, find_middle, split_block
from gaac.kernels.entropy_numpy import CANDIDATES, COUNTS, LOWEST, REACH_DOWN
from gaac.kernels.entropy_parts import (
    STEP,
    lines_of,
    next_channel,
    sizes_of,
    store_bytes,
    store_mask,
)
from gaac.kernels.packed_encode import compress_escapes, copy_escapes
from gaac.kernels.packed_parts import address_of, aligned
from gaac.kernels.tiered_numpy import EXPECTED, NUMBERS, SAVINGS
from gaac.kernels.tiered_parts import fill_bases, load_ranks
from gaac.levels.packed import TILE_ROWS
from gaac.levels.tiered import CODE_BITS, OFFSET_BYTES, OFFSETS, RANKS

STRIDED = (-1, 0, 0)

# Scratch for the choice, in bytes: what 64 channels need, and the totals of a segment.
COUNTS_BYTES = COUNTS * 2 * STEP
CANDIDATES_BYTES = STEP
TOTALS_BYTES = STEP
assert 4 * NUMBERS <= TOTALS_BYTES

SIGNATURE = (
    "UniTuple(int64, 3)(Array(uint16, 3, 'A', readonly=True), "
    "Array(uint8, 1, 'C'), Array(uint8, 1, 'C'), UniTuple(int64, 8))"
)


@inlined
def encode(
    words: Any, made: Any, scratch: Any, starts: Any, half: Any, extract: Any, put_escapes: Any
) -> Any:
    """Write the streams of uint16 (blocks, rows, width), each from its own of `starts` in `made`.

    made, starts and scratch: as `tiered_simd.room` says; half: whether float16; extract and
    put_escapes: of the path. Returns the bytes of second and third and the number of escapes,
    behind which at least 63 bytes are zero, or STRIDED if the words must be copied first.
    """
    sizes, lines = sizes_of(words.shape, half), lines_of(words)
    if lines.number == 0:
        return STRIDED
    base, ranks, offset, second, third, escape, plane, low = starts
    origin = address_of(made)
    base, ranks, plane = origin + base, origin + ranks, origin + plane
    choice = aligned(address_of(scratch))
    table = choice + COUNTS_BYTES + CANDIDATES_BYTES + TOTALS_BYTES
    exponents = table + sizes.pitch
    high = exponents + (sizes.blocks * sizes.steps + 1) * STEP
    string_bytes = (sizes.blocks * sizes.values + 7) // 8
    planes = CODE_BITS * sizes.plane + (sizes.planes - 1) * sizes.plane
    for block in range(sizes.blocks):
        # Level 3 has one plane before the extra planes, here there are CODE_BITS.
        before = plane + block * planes + (CODE_BITS - 1) * sizes.plane
        first_word = lines.start + block * lines.block_stride
        of_block = exponents + block * sizes.steps * STEP
        low_of_block = origin + low + block * sizes.values
        split_block(first_word, lines, sizes, of_block, low_of_block, before)
    choose(exponents, sizes, choice, base, ranks)
    strings = (
        start_pair(origin + second, high),
        start_pair(origin + third, high + string_bytes + 8),
    )
    done = (0, 0, origin + escape)
    offset += origin
    of_ranks = load_ranks(ranks)
    for block in range(sizes.blocks):
        fill_bases(table, base + block * sizes.width, sizes.width, 0, 0)
        of_block = exponents + block * sizes.steps * STEP
        channel = 0
        for tile in range(0, sizes.values, TILE_ROWS * sizes.width):
            store_offsets(offset, done[0], done[1], done[2] - (origin + escape))
            offset += OFFSETS * OFFSET_BYTES
            end = min(tile + TILE_ROWS * sizes.width, sizes.values)
            for value in range(tile, end, STEP):
                place, count = plane + block * planes + value // 8, min(STEP, end - value)
                bases = vector.load_u8x64(table + channel)
                strings, done = encode_step(
                    of_block + value,
                    bases,
                    sizes,
                    of_ranks,
                    place,
                    strings,
                    done,
                    count,
                    extract,
                    put_escapes,
                )
                channel = next_channel(channel, sizes)
    vector.store(done[2], vector.splat_u8x64(0))
    second_bytes = finish_pair(strings[0], origin + second, high)
    third_bytes = finish_pair(strings[1], origin + third, high + string_bytes + 8)
    return second_bytes, third_bytes, done[2] - (origin + escape)


@inlined
def store_offsets(at: Any, second: Any, third: Any, escapes: Any) -> None:
    """Write the three offsets of a tile."""
    vector.store_u32(at, second)
    vector.store_u32(at + OFFSET_BYTES, third)
    vector.store_u32(at + 2 * OFFSET_BYTES, escapes)


# The choice of bases and ranks.


@inlined
def choose(exponents: Any, sizes: Any, choice: Any, base: Any, ranks: Any) -> None:
    """Write the bases and ranks of a segment; as `tiered_numpy.choose`, and `choice` is scratch."""
    candidates = choice + COUNTS_BYTES
    totals = candidates + CANDIDATES_BYTES
    vector.store(totals, vector.splat_u8x64(0))
    limit = vector.splat_u8x64(sizes.exponent_mask)
    for block in range(sizes.blocks):
        of_block = exponents + block * sizes.steps * STEP
        for channel in range(0, sizes.width, STEP):
            # Lanes behind the last channel hold what follows in memory; nothing comes of it.
            count = min(STEP, sizes.width - channel)
            middle = find_middle(of_block + channel, sizes)
            count_around(of_block + channel, sizes, middle, choice)
            candidate = best_candidate(choice)
            lowest = vector.add(middle, vector.splat_u8x64(LOWEST))
            bases = vector.both(vector.add(lowest, candidate), limit)
            store_bytes(base + block * sizes.width + channel, bases, count)
            vector.store(candidates, candidate)
            add_totals(choice, candidates, count, totals)
    rank(totals, ranks, sizes)


@inlined
def best_candidate(counts: Any) -> Any:
    """The number of the base that saves most in each of 64 channels, the lowest among equals."""
    best_first = best_second = vector.splat_u16x32(0)
    best = vector.splat_u8x64(0)
    for candidate in range(CANDIDATES):
        first = second = vector.splat_u16x32(0)
        for expected in range(RANKS):
            place = counts + (candidate + EXPECTED[expected]) * 2 * STEP
            saving = vector.splat_u16x32(SAVINGS[expected])
            first = vector.add(first, vector.multiply(vector.load_u16x32(place), saving))
            second = vector.add(second, vector.multiply(vector.load_u16x32(place + STEP), saving))
        better = vector.greater(first, best_first)
        better |= vector.greater(second, best_second) << 32
        best_first = vector.largest(first, best_first)
        best_second = vector.largest(second, best_second)
        best = vector.select(better, vector.splat_u8x64(candidate), best)
    return best


@inlined
def add_totals(counts: Any, candidates: Any, channels: Any, totals: Any) -> None:
    """Add to the totals, u32, how often channels hold each distance from their candidates."""
    for channel in range(channels):
        place = counts + 2 * channel + vector.load_u8(candidates + channel) * 2 * STEP
        for number in range(NUMBERS):
            total = totals + 4 * number
            count = vector.load_u16(place + number * 2 * STEP)
            vector.store_u32(total, vector.load_u32(total) + count)


@inlined
def rank(totals: Any, ranks: Any, sizes: Any) -> None:
    """Write the distances with the largest totals, in that order, the lowest first among equals."""
    taken = 0
    for place in range(RANKS):
        most, best = -1, 0
        for number in range(NUMBERS):
            total = vector.load_u32(totals + 4 * number)
            if total > most and not taken >> number & 1:
                most, best = total, number
        taken |= 1 << best
        vector.store_u8(ranks + place, (best - REACH_DOWN) & sizes.exponent_mask)


# The codes.


@inlined
def encode_step(
    exponent: Any,
    bases: Any,
    sizes: Any,
    ranks: Any,
    place: Any,
    strings: Any,
    done: Any,
    count: Any,
    extract: Any,
    put_escapes: Any,
) -> Any:
    """Write all codes of the first `count` of 64 values, whose exponents lie at an address.

    place: where the first plane goes on. strings: of second and third codes. done: how many values
    went on to second and to third before, and where the next escape goes. Returns the new strings
    and done.
    """
    second, third = strings
    passed_first, passed_second, escape = done
    limit = vector.splat_u8x64(sizes.exponent_mask)
    distance = vector.both(vector.subtract(vector.load_u8x64(exponent), bases), limit)
    low, high, further = code_of(distance, ranks[0], ranks[1], ranks[2], vector.first_bits(count))
    store_mask(place, low, count)
    store_mask(place + sizes.plane, high, count)
    asked = further
    low, high, further = code_of(distance, ranks[3], ranks[4], ranks[5], asked)
    second = push_pair(second, extract(low, asked), extract(high, asked), vector.popcount(asked))
    passed_first += vector.popcount(asked)
    asked = further
    low, high, further = code_of(distance, ranks[6], ranks[7], ranks[8], asked)
    third = push_pair(third, extract(low, asked), extract(high, asked), vector.popcount(asked))
    passed_second += vector.popcount(asked)
    escape += put_escapes(escape, exponent, further)
    return (second, third), (passed_first, passed_second, escape)


@inlined
def code_of(distance: Any, zero: Any, one: Any, two: Any, asked: Any) -> Any:
    """The two bits of a tier's codes, whose distances are given, and which of `asked` go on.

    The bits count only for those asked.
    """
    ones = vector.equal(distance, vector.splat_u8x64(one))
    twos = vector.equal(distance, vector.splat_u8x64(two))
    further = asked & ~(vector.equal(distance, vector.splat_u8x64(zero)) | ones | twos)
    return ones | further, twos | further, further


# Two strings of equal length, of the low and high bits of codes.


@inlined
def start_pair(low: Any, high: Any) -> Any:
    """Two empty strings that begin at these addresses."""
    return bit_strings.start(low), bit_strings.start(high)


@inlined
def push_pair(pair: Any, low: Any, high: Any, count: Any) -> Any:
    """The strings with `count` bits more each."""
    return bit_strings.push(pair[0], low, count), bit_strings.push(pair[1], high, count)


@inlined
def finish_pair(pair: Any, low: Any, high: Any) -> Any:
    """Put the high string, which lies at `high`, behind the low one; returns the bytes of both."""
    length = bit_strings.finish(pair[0]) - low
    bit_strings.finish(pair[1])
    vector.copy(low + length, high, length)
    return 2 * length


@kernel(SIGNATURE)
def encode_bfloat16_vbmi2(words: Any, made: Any, scratch: Any, starts: Any) -> Any:
    return encode(words, made, scratch, starts, False, vector.pext, compress_escapes)


@kernel(SIGNATURE)
def encode_bfloat16_plain(words: Any, made: Any, scratch: Any, starts: Any) -> Any:
    return encode(words, made, scratch, starts, False, bit_strings.extract_portable, copy_escapes)


@kernel(SIGNATURE)
def encode_float16_vbmi2(words: Any, made: Any, scratch: Any, starts: Any) -> Any:
    return encode(words, made, scratch, starts, True, vector.pext, compress_escapes)


@kernel(SIGNATURE)
def encode_float16_plain(words: Any, made: Any, scratch: Any, starts: Any) -> Any:
    return encode(words, made, scratch, starts, True, bit_strings.extract_portable, copy_escapes)
