"""Decode attention, compiled: where a kernel finds the rows of a region (see `gaac.pages`).

What cannot be read in registers - rows that repeat, and packed pages where the CPU lacks "vbmi2" or
more query heads share a KV head than pass through a tile together - is first decoded into scratch,
a region (up to 256 rows of one KV head) at a time, and then read as raw rows.
"""

from __future__ import annotations

from typing import Any

from numba import int64

from gaac.kernels import vector
from gaac.kernels.cpu import inlined, outlined
from gaac.kernels.packed_decode import decode_step, expand_step, load_base, patch_step
from gaac.kernels.packed_parts import STEP
from gaac.pages import (
    BASE,
    ESCAPES,
    KIND,
    LOW,
    OFFSETS,
    PACKED,
    PLANES,
    RAW,
    RAW_REPEATED,
    REPEATS,
    ROWS,
    STRIDE,
)

MAX_REGION_ROWS = 256  # of what has to be opened


@inlined
def coded_rows(region: Any) -> Any:
    """How many rows of a region are coded; the others repeat one of them."""
    rows = region[ROWS]
    if region[KIND] == PACKED:
        return rows
    most = int64(0)
    for row in range(rows):
        most = max(most, vector.load_u8(region[REPEATS] + row))
    return most + 1


@outlined
def open_region(region: Any, into: Any, slices: Any, half: Any, fused: Any, table: Any) -> None:
    """Decode a region into raw rows at `into`; table: room for the bases, aligned."""
    row_bytes = 2 * STEP * slices
    coded = coded_rows(region)
    low, bits, plane = region[LOW], region[PLANES], region[STRIDE]
    if region[KIND] == RAW_REPEATED:
        vector.copy(into, low, coded * row_bytes)
    else:
        load_base(region[BASE], STEP * slices, table, 1, half)
        escape = region[ESCAPES] + vector.load_u32(region[OFFSETS])
        place = into
        for _ in range(coded):
            for part in range(slices):
                bases = vector.load_u8x64(table + STEP * part)
                if fused:
                    escape += decode_step(place, bits, plane, low, bases, escape, half, expand_step)
                else:
                    escape += decode_step(place, bits, plane, low, bases, escape, half, patch_step)
                place += 2 * STEP
                bits += 8
                low += STEP
    if region[KIND] != PACKED:
        # From the last row on: a row's coded one has an index no higher than its own, so nothing
        # is overwritten that is still wanted.
        rows = region[ROWS]
        for back in range(rows):
            row = rows - 1 - back
            source = into + vector.load_u8(region[REPEATS] + row) * row_bytes
            if source != into + row * row_bytes:
                vector.copy(into + row * row_bytes, source, row_bytes)


@outlined
def source_of(
    table: Any,
    b: Any,
    head: Any,
    number: Any,
    raw: Any,
    row_bytes: Any,
    slices: Any,
    stash: Any,
    bases: Any,
    in_place: Any,
    half: Any,
    fused: Any,
) -> Any:
    """The source of a region and whether it is packed; region `number`, or raw rows at `raw`."""
    if number >= table.shape[2]:
        return (raw, row_bytes, raw, raw, raw, raw), False
    region = table[b, head, number]
    kind = region[KIND]
    if kind == RAW:
        low = region[LOW]
        return (low, region[STRIDE], low, low, low, low), False
    if kind == PACKED and in_place:
        return (
            region[LOW],
            region[STRIDE],
            region[PLANES],
            region[BASE],
            region[OFFSETS],
            region[ESCAPES],
        ), True
    open_region(region, stash, slices, half, fused, bases)
    return (stash, 2 * STEP * slices, stash, stash, stash, stash), False


@inlined
def table_rows(keys: Any, values: Any, b: Any, head: Any, number: Any) -> Any:
    """The rows of region `number` of whichever lane has it."""
    if number < keys.shape[2]:
        return keys[b, head, number, ROWS]
    return values[b, head, number, ROWS]
