"""Decode attention, compiled: the work on one tile of up to 64 tokens.

A row of head_dim values is `slices` steps of 64. For up to four query heads at a time, a tile goes
through three passes: scores (each key row times the queries), weights (the running maximum and
sum), and the weighted sum of value rows. A row comes from a *source*, (low, stride, planes, base,
offsets, escapes), which is packed or raw; packed rows are decoded in registers, by the
instructions of path "vbmi2". Either way the words are the same, and so is all arithmetic on them.

`half`, `packed` and `heads` are constants wherever they are passed, and so cost nothing.
"""

from __future__ import annotations

import math
from typing import Any

from numba import float32

from gaac.kernels import vector
from gaac.kernels import vector_float as floats
from gaac.kernels.cpu import inlined, outlined
from gaac.kernels.packed_decode import add_codes, load_planes, words_of
from gaac.kernels.packed_parts import STEP
from gaac.levels.packed import TILE_ROWS

HEADS = 4  # query heads that go through a tile together, at most
WORDS = 2 * STEP  # bytes of a step of words
FLOATS = 4 * STEP  # bytes of a step of floats
PARTIAL = 64  # bytes of a score before its 16 lanes are added up
PARTIALS = TILE_ROWS * PARTIAL
RUN_ROWS = 256  # rows whose scores are turned into weights together
SCORES = 4 * RUN_ROWS  # bytes of a head's
NEVER = float32(-math.inf)


@inlined
def sevens(planes: Any, plane: Any) -> Any:
    """The mask of a step's escapes."""
    codes = load_planes(planes, plane, 8)
    return codes[0] & codes[1] & codes[2]


@inlined
def first_escape(source: Any, tile: Any, slices: Any, part: Any) -> Any:
    """Where the escapes of slice `part` of a tile's first row begin."""
    _, plane, planes, _, offsets, escapes = source
    escape = escapes + vector.load_u32(offsets + 4 * (tile // TILE_ROWS))
    for before in range(part):
        escape += vector.popcount(sevens(planes + 8 * (tile * slices + before), plane))
    return escape


@inlined
def load_bases(base: Any, half: Any) -> Any:
    """The bases of a step's channels, for float16 where they lie in a word's high byte."""
    bases = vector.load_u8x64(base)
    return vector.shift_left(bases, vector.splat_u8x64(2)) if half else bases


@inlined
def decode_words(low: Any, planes: Any, plane: Any, bases: Any, escape: Any, half: Any) -> Any:
    """64 words in registers, and how many took an escape."""
    codes = load_planes(planes, plane, 8)
    where = codes[0] & codes[1] & codes[2]
    extra = load_planes(planes + 3 * plane, plane, 8) if half else codes
    escapes = vector.load_u8x64(escape)
    if half:
        escapes = vector.shift_left(escapes, vector.splat_u8x64(2))
    exponent = vector.expand(escapes, where, add_codes(bases, codes, half))
    first, second = words_of(vector.load_u8x64(low), exponent, extra, half)
    return first, second, vector.popcount(where)


@inlined
def widen(first: Any, second: Any, half: Any) -> Any:
    """64 words as floats, in the lane order of their dtype."""
    if half:
        return floats.widen_float16(first, second)
    return floats.widen_bfloat16(first, second)


@inlined
def skip_slices(planes: Any, plane: Any, slices: Any) -> Any:
    """How many escapes lie between a slice's step and that of the next row."""
    count = vector.popcount(sevens(planes + 8, plane))
    if slices > 2:
        count += vector.popcount(sevens(planes + 16, plane))
    if slices > 3:
        count += vector.popcount(sevens(planes + 24, plane))
    return count


@inlined
def put_score(
    partial: Any, first: Any, second: Any, query: Any, part: Any, half: Any, dots: Any
) -> None:
    """Add the product of a row's slice and a query's to the row's partial score."""
    if dots:
        product = floats.dot_narrow(first, second, query)
    else:
        product = floats.fold_product(widen(first, second, half), query)
    if part > 0:
        product = floats.plus_16(floats.load_f32x16(partial), product)
    vector.store(partial, product)


@outlined
def score_tile(
    source: Any,
    tile: Any,
    count: Any,
    slices: Any,
    queries: Any,
    query_bytes: Any,
    partials: Any,
    heads: Any,
    half: Any,
    packed: Any,
    dots: Any,
) -> None:
    """Partial scores of `count` key rows, 16 lanes each, for each of `heads` queries."""
    floats.apart()
    low, stride, planes, base, _, _ = source
    for part in range(slices):
        query = queries + FLOATS * part
        query0 = floats.load_f32x64(query)
        query1 = floats.load_f32x64(query + query_bytes) if heads > 1 else query0
        query2 = floats.load_f32x64(query + 2 * query_bytes) if heads > 2 else query0
        query3 = floats.load_f32x64(query + 3 * query_bytes) if heads > 3 else query0
        step = tile * slices + part
        bits = planes + 8 * step
        if packed:
            place = low + STEP * step
            escape = first_escape(source, tile, slices, part)
            bases = load_bases(base + STEP * part, half)
        else:
            place = low + tile * stride + WORDS * part
        for index in range(count):
            if packed:
                first, second, taken = decode_words(place, bits, stride, bases, escape, half)
                escape += taken
                if slices > 1:
                    escape += skip_slices(bits, stride, slices)
                prefetch_packed(place, bits, stride, slices, index)
                bits += 8 * slices
                place += STEP * slices
            else:
                first, second = vector.load_u16x32(place), vector.load_u16x32(place + STEP)
                prefetch_raw(place, stride)
                place += stride
            partial = partials + PARTIAL * index
            put_score(partial, first, second, query0, part, half, dots)
            if heads > 1:
                put_score(partial + PARTIALS, first, second, query1, part, half, dots)
            if heads > 2:
                put_score(partial + 2 * PARTIALS, first, second, query2, part, half, dots)
            if heads > 3:
                put_score(partial + 3 * PARTIALS, first, second, query3, part, half, dots)


@inlined
def prefetch_packed(low: Any, bits: Any, plane: Any, slices: Any, index: Any) -> None:
    """Ask for what is read about a tile later."""
    floats.prefetch(low + PREFETCH_LOW * slices)
    if index % 8 == 0:
        for number in range(3):
            floats.prefetch(bits + number * plane + PREFETCH_PLANE * slices)


@inlined
def prefetch_raw(place: Any, stride: Any) -> None:
    """Ask for a row that is read some rows later."""
    floats.prefetch(place + PREFETCH_ROWS * stride)
    floats.prefetch(place + PREFETCH_ROWS * stride + STEP)


PREFETCH_PLANE = 512
PREFETCH_LOW = 4096
PREFETCH_ROWS = 32


@inlined
def exponential(x: Any) -> Any:
    """e^x for x up to 0; exactly 0 below -87.

    Cody and Waite's reduction by ln 2 in two parts, and the polynomial of Cephes' expf (Moshier,
    Methods and Programs for Mathematical Functions, 1989), whose relative error is about 1e-7.
    """
    least = floats.splat_f32x64(float32(-87.0))
    cut = floats.larger(x, least)
    n = floats.nearest(floats.times(cut, floats.splat_f32x64(float32(1.44269504088896341))))
    rest = floats.times_plus(n, floats.splat_f32x64(float32(-0.693359375)), cut)
    rest = floats.times_plus(n, floats.splat_f32x64(float32(2.12194440e-4)), rest)
    power = floats.splat_f32x64(float32(1.9875691500e-4))
    power = floats.times_plus(power, rest, floats.splat_f32x64(float32(1.3981999507e-3)))
    power = floats.times_plus(power, rest, floats.splat_f32x64(float32(8.3334519073e-3)))
    power = floats.times_plus(power, rest, floats.splat_f32x64(float32(4.1665795894e-2)))
    power = floats.times_plus(power, rest, floats.splat_f32x64(float32(1.6666665459e-1)))
    power = floats.times_plus(power, rest, floats.splat_f32x64(float32(5.0000001201e-1)))
    one = floats.splat_f32x64(float32(1.0))
    power = floats.times_plus(floats.times(rest, rest), power, floats.plus(rest, one))
    return floats.zero_below(floats.times_power_of_2(power, n), x, least)


@inlined
def capped(scores: Any, softcap: Any) -> Any:
    """softcap * tanh(scores / softcap), with tanh(y) = 1 - 2 / (e^2y + 1) taken at -|y|."""
    cap, zero = floats.splat_f32x64(softcap), floats.splat_f32x64(float32(0.0))
    one, two = floats.splat_f32x64(float32(1.0)), floats.splat_f32x64(float32(2.0))
    y = floats.over(scores, cap)
    size = floats.larger(y, floats.minus(zero, y))
    grown = exponential(floats.times(floats.minus(zero, two), size))  # e^-2|y|
    tanh = floats.over(floats.minus(one, grown), floats.plus(one, grown))
    return floats.times(cap, floats.with_sign_of(tanh, y))


@outlined
def sum_tile(partials: Any, scores: Any) -> None:
    """Add up the lanes of a tile's 64 partial scores; those beyond its rows hold anything."""
    floats.apart()
    for sixteen in range(4):
        vector.store(scores + 64 * sixteen, floats.sum_rows(partials + 16 * PARTIAL * sixteen))


@outlined
def weigh(scores: Any, state: Any, count: Any, bias: Any, scaling: Any, softcap: Any) -> Any:
    """Turn one head's `count` scores into weights; the factor for what was gathered before.

    state: the address of its running maximum and, behind it, its sum. bias: the address of what is
    added to the scores, 0 for nothing.
    """
    floats.apart()
    never = floats.splat_f32x64(NEVER)
    tops = never
    for start in range(0, count, STEP):
        place = scores + 4 * start
        some = floats.times(floats.load_f32x64(place), floats.splat_f32x64(scaling))
        if softcap > 0:
            some = capped(some, softcap)
        if bias != 0:
            some = floats.plus(some, floats.load_f32x64(bias + 4 * start))
        some = floats.choose(vector.first_bits(count - start), some, never)
        tops = floats.larger(some, tops)
        vector.store(place, some)
    before = floats.load_f32(state)
    top = max(before, floats.highest(tops))
    sums = floats.splat_f32x64(float32(0.0))
    if top == NEVER:  # nothing here is attended to, nor was anything before
        for start in range(0, count, STEP):
            vector.store(scores + 4 * start, sums)
        return float32(1.0)
    highest = floats.splat_f32x64(top)
    for start in range(0, count, STEP):
        place = scores + 4 * start
        weights = exponential(floats.minus(floats.load_f32x64(place), highest))
        sums = floats.plus(sums, weights)
        vector.store(place, weights)
    factor = float32(math.exp(before - top))
    floats.store_f32(state, top)
    floats.store_f32(state + 4, floats.load_f32(state + 4) * factor + floats.total(sums))
    return factor


@outlined
def add_rows(
    source: Any,
    start: Any,
    count: Any,
    slices: Any,
    weights: Any,
    factors: Any,
    gathered: Any,
    gathered_bytes: Any,
    heads: Any,
    half: Any,
    packed: Any,
) -> None:
    """Scale what each head has gathered by its factor and add its `count` weighted value rows."""
    floats.apart()
    low, stride, planes, base, _, _ = source
    for part in range(slices):
        into = gathered + FLOATS * part
        sum0 = scaled(into, factors)
        sum1 = scaled(into + gathered_bytes, factors + 4) if heads > 1 else sum0
        sum2 = scaled(into + 2 * gathered_bytes, factors + 8) if heads > 2 else sum0
        sum3 = scaled(into + 3 * gathered_bytes, factors + 12) if heads > 3 else sum0
        step = start * slices + part
        bits = planes + 8 * step
        if packed:
            place = low + STEP * step
            escape = first_escape(source, start, slices, part)
            bases = load_bases(base + STEP * part, half)
        else:
            place = low + start * stride + WORDS * part
        for index in range(count):
            if packed:
                first, second, taken = decode_words(place, bits, stride, bases, escape, half)
                escape += taken
                if slices > 1:
                    escape += skip_slices(bits, stride, slices)
                prefetch_packed(place, bits, stride, slices, index)
                bits += 8 * slices
                place += STEP * slices
            else:
                first, second = vector.load_u16x32(place), vector.load_u16x32(place + STEP)
                prefetch_raw(place, stride)
                place += stride
            row = widen(first, second, half)
            weight = weights + 4 * index
            sum0 = floats.times_plus(splat_at(weight), row, sum0)
            if heads > 1:
                sum1 = floats.times_plus(splat_at(weight + SCORES), row, sum1)
            if heads > 2:
                sum2 = floats.times_plus(splat_at(weight + 2 * SCORES), row, sum2)
            if heads > 3:
                sum3 = floats.times_plus(splat_at(weight + 3 * SCORES), row, sum3)
        vector.store(into, sum0)
        if heads > 1:
            vector.store(into + gathered_bytes, sum1)
        if heads > 2:
            vector.store(into + 2 * gathered_bytes, sum2)
        if heads > 3:
            vector.store(into + 3 * gathered_bytes, sum3)


@inlined
def splat_at(where: Any) -> Any:
    return floats.splat_f32x64(floats.load_f32(where))


@inlined
def scaled(where: Any, factor: Any) -> Any:
    return floats.times(floats.load_f32x64(where), splat_at(factor))
