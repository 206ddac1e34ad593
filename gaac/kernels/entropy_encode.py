"""Level 3, compiled: encoding a segment (see entropy_parts for steps, tables and masks)."""

from __future__ import annotations

from typing import Any

from gaac.kernels import bit_strings, vector
from gaac.kernels.cpu import inlined
from gaac.kernels.entropy_numpy import (
    CANDIDATES,
    CODES,
    COUNTED_ROWS,
    COUNTS,
    DISTANCES,
    FIRST_LEVEL,
    LOWEST,
    MIDDLE_ROWS,
    REACH_DOWN,
    SAVINGS,
    SHAPES,
)
from gaac.kernels.entropy_parts import (
    HALF_EXTRA,
    STEP,
    TABLE_ROWS,
    fill_table,
    flat_lanes,
    lines_of,
    load_words,
    next_channel,
    sizes_of,
    store_bytes,
    store_mask,
    store_words,
)
from gaac.kernels.packed_parts import address_of, aligned
from gaac.levels.entropy import LEVELS, SHAPE_BITS

AT_ONCE = 5  # counts kept in registers: enough to be bound by comparing, few enough for any CPU
assert COUNTS % AT_ONCE == 0
STRIDED = (-1, 0, 0, 0, 0, 0, 0)


@inlined
def encode_segment(
    words: Any, made: Any, scratch: Any, half: Any, extract: Any, gather: Any
) -> Any:
    """Code a segment into `made`; returns where its streams end there.

    They lie in the order base, shapes, planes, low, second, levels, patches. The sizes of `made`
    and `scratch` are `entropy_simd.room`. STRIDED if the words must be copied first. extract and
    gather: of the path.
    """
    sizes, lines = sizes_of(words.shape, half), lines_of(words)
    if lines.number == 0:
        return STRIDED
    base = address_of(made)
    shapes = base + sizes.blocks * sizes.width
    planes = shapes + sizes.blocks * SHAPE_BITS * sizes.shape_plane
    low = planes + sizes.blocks * sizes.planes * sizes.plane
    second = low + sizes.blocks * sizes.values
    counts = aligned(address_of(scratch))
    tables = counts + COUNTS * 2 * STEP
    exponents = tables + sizes.blocks * TABLE_ROWS * sizes.pitch
    undecided = exponents + sizes.blocks * sizes.steps * STEP
    string = bit_strings.start(second)
    for block in range(sizes.blocks):
        plane = planes + block * sizes.planes * sizes.plane
        table = tables + block * TABLE_ROWS * sizes.pitch
        of_block = exponents + block * sizes.steps * STEP
        bases = base + block * sizes.width
        block_shapes = shapes + block * SHAPE_BITS * sizes.shape_plane
        first_word = lines.start + block * lines.block_stride
        split_block(first_word, lines, sizes, of_block, low + block * sizes.values, plane)
        choose(of_block, sizes, counts, bases, block_shapes)
        fill_table(table, bases, block_shapes, sizes)
        masks = undecided + block * sizes.steps * 8
        string = encode_starts(of_block, sizes, table, plane, masks, string, extract)
    levels = bit_strings.finish(string)
    patches = encode_levels(exponents, sizes, tables, undecided, levels, extract)
    end = encode_patches(exponents, sizes, undecided, patches, gather)
    return (
        shapes - base,
        planes - base,
        low - base,
        second - base,
        levels - base,
        patches - base,
        end - base,
    )


# The parts of a word.


@inlined
def split_block(words: Any, lines: Any, sizes: Any, exponents: Any, low: Any, plane: Any) -> None:
    """Write the exponents of a block, its low bytes, and the extra planes behind `plane`."""
    whole = lines.values - lines.values % STEP
    done = 0
    for _ in range(lines.number):
        for value in range(0, whole, STEP):
            split_step(words + 2 * value, sizes, exponents, low, plane, done, STEP)
            done += STEP
        if whole < lines.values:
            rest = lines.values - whole
            split_step(words + 2 * whole, sizes, exponents, low, plane, done, rest)
        words += lines.stride


@inlined
def split_step(
    words: Any, sizes: Any, exponents: Any, low: Any, plane: Any, done: Any, count: Any
) -> None:
    """The same for the `count` values behind `done` others."""
    first, second = load_words(words, count)
    if sizes.planes > 1:
        high = vector.high_bytes(first, second)
        for bit in range(HALF_EXTRA):
            plane += sizes.plane
            flag = vector.splat_u8x64(128 if bit == 2 else 1 << bit)
            store_mask(plane + done // 8, vector.any_bit(high, flag), count)
        exponent = vector.shift_right(high, vector.splat_u8x64(2))
        exponent = vector.both(exponent, vector.splat_u8x64(31))
    else:
        first, second = vector.rotate_left_1(first), vector.rotate_left_1(second)
        exponent = vector.high_bytes(first, second)
    vector.store(exponents + done, exponent)
    store_bytes(low + done, vector.low_bytes(first, second), count)


# The choice of bases and shapes, for 64 channels at a time. Where fewer are left, the lanes behind
# them hold what follows in memory, and nothing comes of it.


@inlined
def choose(exponents: Any, sizes: Any, counts: Any, base: Any, shapes: Any) -> None:
    """Write base and shape of each channel of a block."""
    for channel in range(0, sizes.width, STEP):
        count = min(STEP, sizes.width - channel)
        middle = find_middle(exponents + channel, sizes)
        count_around(exponents + channel, sizes, middle, counts)
        bases, odd, high = best_of(counts, middle)
        limit = vector.splat_u8x64(sizes.exponent_mask)
        store_bytes(base + channel, vector.both(bases, limit), count)
        place = shapes + channel // 8
        store_mask(place, odd, count)
        store_mask(place + sizes.shape_plane, high, count)


@inlined
def find_middle(exponents: Any, sizes: Any) -> Any:
    """The median of a few rows, found bit by bit: the largest number that enough of them reach."""
    every = -(-sizes.rows // MIDDLE_ROWS)
    few = -(-sizes.rows // every)
    enough = vector.splat_u8x64(few - few // 2)
    one, none = vector.splat_u8x64(1), vector.splat_u8x64(0)
    middle = none
    for bit in range(7, -1, -1):
        tried = vector.either(middle, vector.splat_u8x64(1 << bit))
        reached = none
        for row in range(0, sizes.rows, every):
            below = vector.greater(tried, vector.load_u8x64(exponents + row * sizes.width))
            reached = vector.add(reached, vector.select(below, none, one))
        middle = vector.select(vector.greater(enough, reached), middle, tried)
    return middle


@inlined
def count_around(exponents: Any, sizes: Any, middle: Any, counts: Any) -> None:
    """Write how often each channel holds each exponent around its middle: 64 words for each."""
    every = -(-sizes.rows // COUNTED_ROWS)
    lowest = vector.subtract(middle, vector.splat_u8x64(REACH_DOWN - LOWEST))
    limit = vector.splat_u8x64(sizes.exponent_mask)
    for start in range(0, COUNTS, AT_ONCE):
        a = b = c = d = e = vector.splat_u8x64(0)
        for row in range(0, sizes.rows, every):
            exponent = vector.load_u8x64(exponents + row * sizes.width)
            above = vector.both(vector.subtract(exponent, lowest), limit)
            above = vector.subtract(above, vector.splat_u8x64(start))
            a = tally(a, above, 0)
            b = tally(b, above, 1)
            c = tally(c, above, 2)
            d = tally(d, above, 3)
            e = tally(e, above, 4)
        store_as_words(counts, a)
        store_as_words(counts + 2 * STEP, b)
        store_as_words(counts + 4 * STEP, c)
        store_as_words(counts + 6 * STEP, d)
        store_as_words(counts + 8 * STEP, e)
        counts += AT_ONCE * 2 * STEP


@inlined
def tally(count: Any, values: Any, value: Any) -> Any:
    """One more where values == value, at most 255."""
    # Faster than with a mask: 1 less the difference, at least zero, is 1 where there is none.
    difference = vector.subtract(values, vector.splat_u8x64(value))
    same = vector.subtract_saturated(vector.splat_u8x64(1), difference)
    return vector.add_saturated(count, same)


@inlined
def store_as_words(where: Any, values: Any) -> None:
    """Write 64 bytes as words."""
    none = vector.splat_u8x64(0)
    store_words(where, vector.join_first(values, none), vector.join_second(values, none), STEP)


@inlined
def best_of(counts: Any, middle: Any) -> Any:
    """The bases, not yet cut to the exponent's bits, and the two bits of the shapes as masks."""
    best_first = best_second = vector.splat_u16x32(0)
    bases = vector.add(middle, vector.splat_u8x64(LOWEST))
    odd = high = vector.bits(0)
    for shape in range(SHAPES):
        for candidate in range(CANDIDATES):
            first, second = saved_bits(counts, shape, candidate)
            better = vector.greater(first, best_first)
            better |= vector.greater(second, best_second) << 32
            best_first = vector.largest(first, best_first)
            best_second = vector.largest(second, best_second)
            tried = vector.add(middle, vector.splat_u8x64(LOWEST + candidate))
            bases = vector.select(better, tried, bases)
            odd = odd | better if shape & 1 else odd & ~better
            high = high | better if shape & 2 else high & ~better
    return bases, odd, high


@inlined
def saved_bits(counts: Any, shape: Any, candidate: Any) -> Any:
    """What a shape and base save over patches in 64 channels: two vectors of words."""
    first = second = vector.splat_u16x32(0)
    for code in range(CODES):
        place = counts + (REACH_DOWN + candidate + DISTANCES[shape, code]) * 2 * STEP
        saving = vector.splat_u16x32(SAVINGS[shape, code])
        first = vector.add(first, vector.multiply(vector.load_u16x32(place), saving))
        second = vector.add(second, vector.multiply(vector.load_u16x32(place + STEP), saving))
    return first, second


# The codes.


@inlined
def encode_starts(
    exponents: Any, sizes: Any, table: Any, plane: Any, undecided: Any, string: Any, extract: Any
) -> Any:
    """Write plane `first` of a block and masks of what goes on; append to `second`, the string."""
    whole = sizes.values - sizes.values % STEP
    channel = 0
    for value in range(0, whole, STEP):
        row, place, mask = table + channel, plane + value // 8, undecided + value // 8
        exponent = vector.load_u8x64(exponents + value)
        string = encode_start(exponent, sizes, row, place, mask, string, STEP, extract)
        channel = next_channel(channel, sizes)
    if whole < sizes.values:
        row, place, mask = table + channel, plane + whole // 8, undecided + whole // 8
        exponent = vector.load_u8x64(exponents + whole)
        rest = sizes.values - whole
        string = encode_start(exponent, sizes, row, place, mask, string, rest, extract)
    return string


@inlined
def encode_start(
    exponent: Any,
    sizes: Any,
    row: Any,
    plane: Any,
    undecided: Any,
    string: Any,
    count: Any,
    extract: Any,
) -> Any:
    """The same for a step of `count` values; row: its first channel in the table."""
    valid = vector.first_bits(count)
    flat = flat_lanes(row, 0, sizes.pitch)
    code_00 = hits(exponent, row)
    code_01 = hits(exponent, row + sizes.pitch) & flat
    first = ~(code_00 | code_01) & valid
    further = first & ~hits(exponent, row + 2 * sizes.pitch)
    asked = (first | flat) & valid
    second = (code_01 & valid) | further
    store_mask(plane, first, count)
    vector.store_u64(undecided, further)
    return bit_strings.push(string, extract(second, asked), vector.popcount(asked))


@inlined
def hits(exponent: Any, row: Any) -> Any:
    """The lanes that hold the exponent of a table's row."""
    return vector.equal(exponent, vector.load_u8x64(row))


@inlined
def encode_levels(
    exponents: Any, sizes: Any, tables: Any, undecided: Any, at: Any, extract: Any
) -> Any:
    """Write the levels of a segment; returns their end. Undecided are then the patches."""
    for level in range(LEVELS):
        string = bit_strings.start(at)
        row = tables + (FIRST_LEVEL + level) * sizes.pitch
        exponent, mask = exponents, undecided
        for _ in range(sizes.blocks):
            channel = 0
            for _ in range(sizes.steps):
                asked = vector.load_u64(mask)
                further = asked & ~hits(vector.load_u8x64(exponent), row + channel)
                string = bit_strings.push(string, extract(further, asked), vector.popcount(asked))
                vector.store_u64(mask, further)
                channel = next_channel(channel, sizes)
                exponent += STEP
                mask += 8
            row += TABLE_ROWS * sizes.pitch
        at = bit_strings.finish(string)
    return at


@inlined
def encode_patches(exponents: Any, sizes: Any, undecided: Any, at: Any, gather: Any) -> Any:
    """Write the exponents of what is still undecided; returns the end of the patches."""
    for step in range(sizes.blocks * sizes.steps):
        patched = vector.load_u64(undecided + 8 * step)
        if patched != vector.bits(0):
            at = gather(at, vector.load_u8x64(exponents + STEP * step), patched)
    return at
