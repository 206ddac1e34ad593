"""Decode attention, compiled: whole requests (see `gaac.kernels.attention_parts` for a tile).

The work is cut into *units*: one KV head of one batch row over one run of tokens, in an order that
depends on shapes alone. A unit leaves its maximum, its sum and what it gathered in `partials`;
`merge` puts the units of a head together, in order. So any number of threads may take units as
they come, and the result is the same.

The larger pieces are compiled apart. That is smaller and faster to compile; and when all of it was
inlined into one function, LLVM 20 at -O3 left out the loops over packed rows.
"""

from __future__ import annotations

import math
from typing import Any

from numba import float32, int64

from gaac.kernels import vector
from gaac.kernels import vector_float as floats
from gaac.kernels.attention_parts import (
    FLOATS,
    HEADS,
    NEVER,
    PARTIALS,
    RUN_ROWS,
    SCORES,
    add_rows,
    score_tile,
    sum_tile,
    weigh,
)
from gaac.kernels.attention_regions import MAX_REGION_ROWS, source_of, table_rows
from gaac.kernels.cpu import kernel, outlined
from gaac.kernels.packed_parts import STEP, address_of, aligned
from gaac.levels.packed import TILE_ROWS
from gaac.pages import ROWS

# The numbers that a kernel is told, in this order. heads: query heads of a KV head, filled up to a
# multiple of `together`. A lane's tail: address, then bytes between rows of the batch, KV heads and
# tokens. packed_tokens: of each lane. bias: address (0 for none) and bytes between batch rows.
NUMBERS = (
    "kv_heads", "heads", "key_slices", "value_slices", "tokens", "units",
    "region_units", "unit_regions", "unit_tail_tokens", "key_tail", "key_batch", "key_head",
    "key_row", "key_packed_tokens", "value_tail", "value_batch", "value_head", "value_row",
    "value_packed_tokens", "bias", "bias_batch",
)  # fmt: skip

ATTEND = (
    "int64(Tuple((Array(int64, 4, 'C'), Array(int64, 4, 'C'), UniTuple(int64, 21), "
    "Array(float32, 1, 'C'), Array(float32, 1, 'C'), Array(uint8, 1, 'C'), "
    "Array(int64, 1, 'C'), float32, float32)))"
)
MERGE = (
    "int64(Array(float32, 1, 'C'), Array(float32, 1, 'C'), Array(float32, 1, 'C'), int64, int64, "
    "int64, int64, int64, int64)"
)


def scratch_bytes(heads: int, key_slices: int, value_slices: int) -> int:
    """What a thread needs to work in."""
    rows = MAX_REGION_ROWS * 2 * STEP
    return (
        heads * (key_slices + value_slices) * FLOATS
        + heads * 64
        + HEADS * (PARTIALS + SCORES)
        + 64
        + rows * (key_slices + value_slices)
        + 16 * STEP
    )


@outlined
def attend_rows(
    key: Any,
    key_packed: Any,
    value: Any,
    value_packed: Any,
    rows: Any,
    bias: Any,
    scaling: Any,
    softcap: Any,
    places: Any,
    sizes: Any,
    heads: Any,
    half: Any,
    dots: Any,
) -> None:
    """Take `rows` tokens into account, for `heads` query heads.

    key_packed, value_packed, heads, half and dots are constants.
    """
    queries, state, gathered, partials, scores, factors = places
    key_slices, value_slices = sizes
    for start in range(0, rows, RUN_ROWS):
        count = min(rows - start, RUN_ROWS)
        for row in range(0, count, TILE_ROWS):
            tile, tile_rows = start + row, min(count - row, TILE_ROWS)
            if key_slices == 1:
                score_tile(
                    key, tile, tile_rows, 1, queries, FLOATS, partials, heads, half, key_packed,
                    dots,
                )  # fmt: skip
            else:
                score_tile(
                    key, tile, tile_rows, key_slices, queries, FLOATS * key_slices, partials,
                    heads, half, key_packed, dots,
                )  # fmt: skip
            for head in range(heads):
                sum_tile(partials + PARTIALS * head, scores + SCORES * head + 4 * row)
        run_bias = bias + 4 * start if bias != 0 else int64(0)
        for head in range(heads):
            factor = weigh(
                scores + SCORES * head, state + 8 * head, count, run_bias, scaling, softcap
            )
            floats.store_f32(factors + 4 * head, factor)
        if value_slices == 1:
            add_rows(
                value, start, count, 1, scores, factors, gathered, FLOATS, heads, half,
                value_packed,
            )  # fmt: skip
        else:
            add_rows(
                value, start, count, value_slices, scores, factors, gathered,
                FLOATS * value_slices, heads, half, value_packed,
            )  # fmt: skip


@outlined
def attend(work: Any, together: Any, half: Any, fused: Any, dots: Any) -> Any:
    """Do units until none is left; `queries` are scaled, float32 (units of heads, padded)."""
    keys, values, numbers, queries, partials, scratch, counter, scaling, softcap = work
    (
        kv_heads, heads, key_slices, value_slices, tokens, units, region_units,
        unit_regions, unit_tail_tokens, key_tail, key_batch, key_head, key_row, key_packed,
        value_tail, value_batch, value_head, value_row, value_packed, bias, bias_batch,
    ) = numbers  # fmt: skip
    key_bytes, value_bytes = FLOATS * key_slices, FLOATS * value_slices
    query_place = aligned(address_of(scratch))
    gathered = query_place + heads * key_bytes
    state = gathered + heads * value_bytes
    partial = state + heads * 64
    scores = partial + HEADS * PARTIALS
    factors = scores + HEADS * SCORES
    bases = factors + 64
    key_stash = bases + 8 * STEP
    value_stash = key_stash + MAX_REGION_ROWS * 2 * STEP * key_slices
    key_in_place = fused and heads <= together
    regions = max(keys.shape[2], values.shape[2])
    sizes = (key_slices, value_slices)
    runs = units // (kv_heads * (queries.size // (kv_heads * heads * STEP * key_slices)))
    while True:
        unit = floats.take_turn(address_of(counter))
        if unit >= units:
            return 0
        run = unit % runs
        head = unit // runs % kv_heads
        b = unit // runs // kv_heads
        source = address_of(queries) + (b * kv_heads + head) * heads * key_bytes
        for step in range(heads * key_slices):
            query = floats.load_f32x64(source + FLOATS * step)
            place = query_place + FLOATS * step
            if dots:
                vector.store(place, floats.narrow(query))
            elif half:
                vector.store(place, query)
            else:
                vector.store(place, floats.spread(query))
        for step in range(heads * value_slices):
            vector.store(gathered + FLOATS * step, floats.splat_f32x64(float32(0.0)))
        for index in range(heads):
            floats.store_f32(state + 8 * index, NEVER)
            floats.store_f32(state + 8 * index + 4, float32(0.0))
        # The regions of this run, or one piece of the tail behind them.
        token = int64(0)
        if run < region_units:
            first, last = run * unit_regions, min((run + 1) * unit_regions, regions)
            table = keys if keys.shape[2] else values
            for number in range(first):
                token += table[b, head, number, ROWS]
        else:
            first, last = regions, regions + 1
            token = max(key_packed, value_packed) + (run - region_units) * unit_tail_tokens
        for number in range(first, last):
            if number < regions:
                rows = table_rows(keys, values, b, head, number)
            else:
                rows = min(unit_tail_tokens, tokens - token)
            raw_key = key_tail + b * key_batch + head * key_head + (token - key_packed) * key_row
            raw_value = (
                value_tail
                + b * value_batch
                + head * value_head
                + (token - value_packed) * value_row
            )
            key, key_is_packed = source_of(
                keys, b, head, number, raw_key, key_row, key_slices, key_stash, bases,
                key_in_place, half, fused,
            )  # fmt: skip
            value, value_is_packed = source_of(
                values, b, head, number, raw_value, value_row, value_slices, value_stash, bases,
                key_in_place, half, fused,
            )  # fmt: skip
            rows_bias = bias + b * bias_batch + 4 * token if bias != 0 else int64(0)
            for start in range(0, heads, together):
                places = (
                    query_place + start * key_bytes,
                    state + 8 * start,
                    gathered + start * value_bytes,
                    partial,
                    scores,
                    factors,
                )
                if fused and key_is_packed and value_is_packed:
                    attend_rows(
                        key, True, value, True, rows, rows_bias, scaling, softcap, places, sizes,
                        together, half, dots,
                    )  # fmt: skip
                elif fused and key_is_packed:
                    attend_rows(
                        key, True, value, False, rows, rows_bias, scaling, softcap, places, sizes,
                        together, half, dots,
                    )  # fmt: skip
                elif fused and value_is_packed:
                    attend_rows(
                        key, False, value, True, rows, rows_bias, scaling, softcap, places, sizes,
                        together, half, dots,
                    )  # fmt: skip
                else:
                    attend_rows(
                        key, False, value, False, rows, rows_bias, scaling, softcap, places, sizes,
                        together, half, dots,
                    )  # fmt: skip
            token += rows
        into = address_of(partials) + unit * heads * (value_bytes + 8)
        for index in range(heads):
            for part in range(value_slices):
                total = floats.load_f32x64(gathered + index * value_bytes + FLOATS * part)
                if not half:
                    total = floats.gather(total)
                vector.store(into + FLOATS * part, total)
            floats.store_f32(into + value_bytes, floats.load_f32(state + 8 * index))
            floats.store_f32(into + value_bytes + 4, floats.load_f32(state + 8 * index + 4))
            into += value_bytes + 8


@kernel(ATTEND)
def attend_bfloat16_vbmi2_1(work: Any) -> Any:
    return attend(work, 1, False, True, False)


@kernel(ATTEND)
def attend_bfloat16_vbmi2_2(work: Any) -> Any:
    return attend(work, 2, False, True, False)


@kernel(ATTEND)
def attend_bfloat16_vbmi2_3(work: Any) -> Any:
    return attend(work, 3, False, True, False)


@kernel(ATTEND)
def attend_bfloat16_vbmi2_4(work: Any) -> Any:
    return attend(work, 4, False, True, False)


@kernel(ATTEND)
def attend_bfloat16_plain_1(work: Any) -> Any:
    return attend(work, 1, False, False, False)


@kernel(ATTEND)
def attend_bfloat16_plain_2(work: Any) -> Any:
    return attend(work, 2, False, False, False)


@kernel(ATTEND)
def attend_bfloat16_plain_3(work: Any) -> Any:
    return attend(work, 3, False, False, False)


@kernel(ATTEND)
def attend_bfloat16_plain_4(work: Any) -> Any:
    return attend(work, 4, False, False, False)


@kernel(ATTEND)
def attend_float16_vbmi2_1(work: Any) -> Any:
    return attend(work, 1, True, True, False)


@kernel(ATTEND)
def attend_float16_vbmi2_2(work: Any) -> Any:
    return attend(work, 2, True, True, False)


@kernel(ATTEND)
def attend_float16_vbmi2_3(work: Any) -> Any:
    return attend(work, 3, True, True, False)


@kernel(ATTEND)
def attend_float16_vbmi2_4(work: Any) -> Any:
    return attend(work, 4, True, True, False)


@kernel(ATTEND)
def attend_float16_plain_1(work: Any) -> Any:
    return attend(work, 1, True, False, False)


@kernel(ATTEND)
def attend_float16_plain_2(work: Any) -> Any:
    return attend(work, 2, True, False, False)


@kernel(ATTEND)
def attend_float16_plain_3(work: Any) -> Any:
    return attend(work, 3, True, False, False)


@kernel(ATTEND)
def attend_float16_plain_4(work: Any) -> Any:
    return attend(work, 4, True, False, False)


@kernel(ATTEND)
def attend_bfloat16_dots_1(work: Any) -> Any:
    return attend(work, 1, False, True, True)


@kernel(ATTEND)
def attend_bfloat16_dots_2(work: Any) -> Any:
    return attend(work, 2, False, True, True)


@kernel(ATTEND)
def attend_bfloat16_dots_3(work: Any) -> Any:
    return attend(work, 3, False, True, True)


@kernel(ATTEND)
def attend_bfloat16_dots_4(work: Any) -> Any:
    return attend(work, 4, False, True, True)


@kernel(MERGE)
def merge(
    partials: Any,
    sinks: Any,
    out: Any,
    batch: Any,
    kv_heads: Any,
    heads: Any,
    real_heads: Any,
    runs: Any,
    slices: Any,
) -> Any:
    """Put the runs of each head together, in order, and divide.

    sinks: one score for each query head, or none. out: [batch, kv_heads, real_heads, head_dim].
    """
    size = FLOATS * slices + 8
    place = address_of(out)
    for row in range(batch * kv_heads):
        for head in range(real_heads):
            first = address_of(partials) + (row * runs * heads + head) * size
            step = heads * size
            top = NEVER
            if sinks.size:
                top = sinks[row % kv_heads * real_heads + head]
            for run in range(runs):
                top = max(top, floats.load_f32(first + run * step + size - 8))
            total = float32(0.0)
            if sinks.size:
                total = float32(math.exp(sinks[row % kv_heads * real_heads + head] - top))
            for part in range(slices):
                vector.store(place + FLOATS * part, floats.splat_f32x64(float32(0.0)))
            if top != NEVER:
                for run in range(runs):
                    source = first + run * step
                    factor = float32(math.exp(floats.load_f32(source + size - 8) - top))
                    total += factor * floats.load_f32(source + size - 4)
                    factors = floats.splat_f32x64(factor)
                    for part in range(slices):
                        into = place + FLOATS * part
                        more = floats.load_f32x64(source + FLOATS * part)
                        sums = floats.times_plus(factors, more, floats.load_f32x64(into))
                        vector.store(into, sums)
                totals = floats.splat_f32x64(total)
                for part in range(slices):
                    into = place + FLOATS * part
                    vector.store(into, floats.over(floats.load_f32x64(into), totals))
            place += FLOATS * slices
    return 0
