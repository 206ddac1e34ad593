"""Level 3, compiled: decoding a segment (see entropy_parts for steps, tables and masks).

First all bits are read into masks, level by level, and every count is checked; only then are words
written. A value's exponent is found by overlaying: the one of code 00, then in turn those of each
later code, wherever the value came so far.
"""

from __future__ import annotations

from typing import Any

from gaac.kernels import bit_strings, vector
from gaac.kernels.cpu import inlined
from gaac.kernels.entropy_parts import (
    HALF_EXTRA,
    STEP,
    TABLE_ROWS,
    fill_table,
    flat_lanes,
    lines_of,
    load_bytes,
    load_mask,
    next_channel,
    sizes_of,
    store_words,
)
from gaac.kernels.packed_parts import address_of, aligned
from gaac.levels.entropy import LEVELS, SHAPE_BITS

# The masks of a segment: what `second` says, who enters each level, and who is a patch.
MASKS = 1 + LEVELS + 1
PATCHED = MASKS - 1

# What decoding returns: 0 if all is well.
STRIDED = -1
FAULTS = {
    1: "The streams do not have the lengths that the shape demands.",
    2: "An exponent lies outside the range of its dtype.",
    3: "The bit planes or shapes hold bits behind their last value.",
    4: "The second bits are not as many as the codes ask for.",
    5: "The levels are not as many as the codes ask for.",
    6: "The patches are not as many as the codes ask for.",
}
LENGTHS, RANGE, SPARE_BITS, SECOND, TOO_MANY_LEVELS, PATCHES = FAULTS


@inlined
def decode_segment(
    base: Any,
    shapes: Any,
    second: Any,
    levels: Any,
    patches: Any,
    planes: Any,
    low: Any,
    out: Any,
    scratch: Any,
    half: Any,
    deposit: Any,
    scatter: Any,
) -> Any:
    """Decode a segment into `out`; returns 0, or STRIDED or a fault, with `out` untouched.

    All but `out`, uint16 (blocks, rows, width), are uint8 arrays of one axis; the size of `scratch`
    is `entropy_simd.room`. deposit and scatter: of the path.
    """
    sizes, lines = sizes_of(out.shape, half), lines_of(out)
    if lines.number == 0:
        return STRIDED
    if not fixed_lengths_fit(base, shapes, planes, low, sizes):
        return LENGTHS
    if half and not (in_range(base, sizes) and in_range(patches, sizes)):
        return RANGE
    tidy = tails_clean(planes, sizes.blocks * sizes.planes, sizes.plane, sizes.values)
    if not tidy or not tails_clean(
        shapes, sizes.blocks * SHAPE_BITS, sizes.shape_plane, sizes.width
    ):
        return SPARE_BITS
    # Strings are read eight bytes at a time, and patches 64: from a copy with room behind it.
    tables = aligned(address_of(scratch))
    masks = tables + sizes.blocks * TABLE_ROWS * sizes.pitch
    copied = masks + MASKS * 8 * sizes.blocks * sizes.steps
    if len(second) > sizes.blocks * sizes.plane:
        return SECOND
    vector.copy(copied, address_of(second), len(second))
    for block in range(sizes.blocks):
        block_shapes = address_of(shapes) + block * SHAPE_BITS * sizes.shape_plane
        bases = address_of(base) + block * sizes.width
        fill_table(tables + block * TABLE_ROWS * sizes.pitch, bases, block_shapes, sizes)
    position, entering = decode_starts(address_of(planes), sizes, tables, masks, copied, deposit)
    if (position + 7) // 8 != len(second) or not bit_strings.tail_clean(copied, position):
        return SECOND
    if len(levels) > LEVELS * ((entering + 7) // 8):
        return TOO_MANY_LEVELS
    vector.copy(copied, address_of(levels), len(levels))
    patched = decode_levels(masks, sizes, copied, len(levels), entering, deposit)
    if patched < 0:
        return TOO_MANY_LEVELS
    if patched != len(patches):
        return PATCHES
    vector.copy(copied, address_of(patches), len(patches))
    write_words(address_of(planes), address_of(low), sizes, tables, masks, copied, lines, scatter)
    return 0


# Checks.


@inlined
def fixed_lengths_fit(base: Any, shapes: Any, planes: Any, low: Any, sizes: Any) -> Any:
    """Whether the streams whose lengths the shape alone decides have those."""
    return (
        len(base) == sizes.blocks * sizes.width
        and len(shapes) == sizes.blocks * SHAPE_BITS * sizes.shape_plane
        and len(planes) == sizes.blocks * sizes.planes * sizes.plane
        and len(low) == sizes.blocks * sizes.values
    )


@inlined
def in_range(exponents: Any, sizes: Any) -> Any:
    """Whether no byte of a stream exceeds the largest exponent."""
    most = vector.splat_u8x64(0)
    for i in range(0, len(exponents), STEP):
        part = vector.load_part_u8x64(address_of(exponents) + i, min(STEP, len(exponents) - i))
        most = vector.largest(most, part)
    limit = vector.splat_u8x64(sizes.exponent_mask)
    return vector.greater(most, limit) == vector.bits(0)


@inlined
def tails_clean(planes: Any, count: Any, plane: Any, values: Any) -> Any:
    """Whether the bits behind the last value of each of `count` planes are zero."""
    clean = True
    for i in range(count):
        clean &= bit_strings.tail_clean(address_of(planes) + i * plane, values)
    return clean


# Reading bits into masks.


@inlined
def decode_starts(
    planes: Any, sizes: Any, tables: Any, masks: Any, string: Any, deposit: Any
) -> Any:
    """Write the masks of `second`, the string, and of level 0.

    Returns how many bits the string has, and how many values enter level 0.
    """
    whole = sizes.values - sizes.values % STEP
    stride = 8 * sizes.blocks * sizes.steps
    position = entering = 0
    for block in range(sizes.blocks):
        plane = planes + block * sizes.planes * sizes.plane
        table = tables + block * TABLE_ROWS * sizes.pitch
        channel = 0
        for value in range(0, whole, STEP):
            first = vector.load_u64(plane + value // 8)
            asked = first | flat_lanes(table, channel, sizes.pitch)
            count = vector.popcount(asked)
            second = deposit(bit_strings.peek(string, position, count), asked)
            position += count
            entering += vector.popcount(first & second)
            vector.store_u64(masks, second)
            vector.store_u64(masks + stride, first & second)
            masks += 8
            channel = next_channel(channel, sizes)
        if whole < sizes.values:
            rest = sizes.values - whole
            first = load_mask(plane + whole // 8, rest)
            asked = first | flat_lanes(table, channel, sizes.pitch) & vector.first_bits(rest)
            count = vector.popcount(asked)
            second = deposit(bit_strings.peek(string, position, count), asked)
            position += count
            entering += vector.popcount(first & second)
            vector.store_u64(masks, second)
            vector.store_u64(masks + stride, first & second)
            masks += 8
    return position, entering


@inlined
def decode_levels(
    masks: Any, sizes: Any, strings: Any, length: Any, entering: Any, deposit: Any
) -> Any:
    """Write the masks behind each level; returns how many values are patches.

    -1 if the strings of the levels do not have this length in bytes, or bits behind their last.
    """
    stride = 8 * sizes.blocks * sizes.steps
    start = 0
    for _ in range(LEVELS):
        end = start + (entering + 7) // 8
        if end > length or not bit_strings.tail_clean(strings + start, entering):
            return -1
        masks += stride
        position = entering = 0
        for mask in range(masks, masks + stride, 8):
            asked = vector.load_u64(mask)
            count = vector.popcount(asked)
            further = deposit(bit_strings.peek(strings + start, position, count), asked)
            position += count
            entering += vector.popcount(further)
            vector.store_u64(mask + stride, further)
        start = end
    return entering if start == length else -1


# Writing words.


@inlined
def write_words(
    planes: Any,
    low: Any,
    sizes: Any,
    tables: Any,
    masks: Any,
    patches: Any,
    lines: Any,
    scatter: Any,
) -> None:
    """Write all words of a segment."""
    whole = lines.values - lines.values % STEP
    for block in range(sizes.blocks):
        plane = planes + block * sizes.planes * sizes.plane
        table = tables + block * TABLE_ROWS * sizes.pitch
        words = lines.start + block * lines.block_stride
        channel = 0
        for _ in range(lines.number):
            for value in range(0, whole, STEP):
                row, target = table + channel, words + 2 * value
                patches = write_step(plane, low, sizes, row, masks, patches, target, STEP, scatter)
                channel = next_channel(channel, sizes)
                plane += 8
                masks += 8
                low += STEP
            if whole < lines.values:
                row, target, rest = table + channel, words + 2 * whole, lines.values - whole
                patches = write_step(plane, low, sizes, row, masks, patches, target, rest, scatter)
                masks += 8
                low += rest
            words += lines.stride


@inlined
def write_step(
    plane: Any,
    low: Any,
    sizes: Any,
    row: Any,
    masks: Any,
    patches: Any,
    words: Any,
    count: Any,
    scatter: Any,
) -> Any:
    """Write the first `count` of 64 words; returns where the next patch lies."""
    stride = 8 * sizes.blocks * sizes.steps
    exponent = vector.load_u8x64(row)
    exponent = overlay(exponent, vector.load_u64(masks), row + sizes.pitch)
    exponent = overlay(exponent, load_mask(plane, count), row + 2 * sizes.pitch)
    for level in range(1, 1 + LEVELS):
        lanes = vector.load_u64(masks + level * stride)
        exponent = overlay(exponent, lanes, row + (2 + level) * sizes.pitch)
    patched = vector.load_u64(masks + PATCHED * stride)
    if patched != vector.bits(0):
        exponent = scatter(patches, exponent, patched)
        patches += vector.popcount(patched)
    rest = load_bytes(low, count)
    if sizes.planes > 1:
        high = vector.shift_left(exponent, vector.splat_u8x64(2))
        for bit in range(HALF_EXTRA):
            plane += sizes.plane
            flag = vector.splat_u8x64(128 if bit == 2 else 1 << bit)
            high = vector.select(load_mask(plane, count), vector.either(high, flag), high)
        first, second = vector.join_first(rest, high), vector.join_second(rest, high)
    else:
        first = vector.rotate_right_1(vector.join_first(rest, exponent))
        second = vector.rotate_right_1(vector.join_second(rest, exponent))
    store_words(words, first, second, count)
    return patches


@inlined
def overlay(exponent: Any, lanes: Any, row: Any) -> Any:
    """The exponents of a table's row in these lanes, the others as they were."""
    return vector.select(lanes, vector.load_u8x64(row), exponent)
