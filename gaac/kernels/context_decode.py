"""Level 5's compiled decoder: symbol by symbol, the eight rANS states in turn.

So the CPU works at eight chains at once. The frequencies of a context lie together: 32 cumulative
ones, for each sign and step, then those of all symbols, so that two comparisons of vectors find a
symbol.
"""

from __future__ import annotations

import numpy as np

from gaac.kernels import vector
from gaac.kernels.context_numpy import LANES
from gaac.kernels.context_parts import (
    COARSE,
    FACTS,
    HALF,
    LOW,
    ROW_WORDS,
    SLOT,
    VECTOR,
    find_contexts,
)
from gaac.kernels.context_tables import STEPS, TOTAL_BITS
from gaac.kernels.cpu import inlined, kernel

OK, FEW_WORDS, FEW_ESCAPES, BAD_EXPONENT, LEFT_OVER = range(5)


@inlined
def _take(state, table_at, context, parts, sub_mask):  # type: ignore[no-untyped-def]
    """The symbol that a state holds, and the state without it, which may be short of a word."""
    slot = np.int64(state & SLOT)
    at = table_at + 2 * ROW_WORDS * np.int64(context)
    above = vector.greater(vector.load_u16x32(at), vector.splat_u16x32(slot))
    coarse = COARSE - 1 - vector.popcount(above)
    at += 2 * (COARSE + (coarse << parts))
    above = vector.greater(vector.load_u16x8(at), vector.splat_u16x8(slot))
    sub = (1 << parts) - 1 - vector.popcount(above & sub_mask)
    at += 2 * sub
    start = vector.load_u16(at)
    frequency = (vector.load_u16(at + 2) - start) & 0xFFFF
    state = np.uint64(frequency) * (state >> np.uint64(TOTAL_BITS))
    return (coarse << parts) + sub, state + np.uint64(slot - start)


@kernel(
    "int64(uint64[::1], uint32[::1], uint16[::1], uint16[:,::1], int64, int64, int64,"
    f"{FACTS}, uint16[:,:,::1])"
)
def pull(  # type: ignore[no-untyped-def]
    states,
    stream,
    escapes,
    frequencies,
    shift,
    exponent_max,
    parts,
    mean,
    other,
    floor,
    fraction,
    window,
    cosine,
    sine,
    out,
):
    """Decode all values into `out`; OK or the reason to refuse the streams."""
    blocks, rows, width = out.shape
    room = mean.shape[1]
    predicted = np.zeros(room, np.float32)
    context, below = np.zeros(room, np.int32), np.zeros(room, np.int32)
    symbols, words = np.ones(room, np.int32), np.zeros(room, np.int32)
    table_at = frequencies.ctypes.data
    subs = 1 << parts
    sub_mask = vector.first_bits(subs)
    position = escaped = lane = 0
    for block in range(blocks):
        for row in range(rows):
            find_contexts(
                (mean, other, floor, fraction, window, cosine, sine),
                block,
                row,
                (predicted, context, below),
            )
            if position + width <= len(stream):
                for c in range(width):
                    symbol, state = _take(states[lane], table_at, context[c], parts, sub_mask)
                    # Without a branch: nobody could predict it. In one of six cases a word is read.
                    short = state < LOW
                    all_ones = np.uint64(0) - np.uint64(short)
                    word = np.uint64(stream[position]) & all_ones
                    state = state << (HALF & all_ones) | word
                    position += int(short)
                    states[lane] = state
                    symbols[c] = symbol
                    lane = (lane + 1) % LANES
            else:
                for c in range(width):
                    symbol, state = _take(states[lane], table_at, context[c], parts, sub_mask)
                    if state < LOW:
                        if position >= len(stream):
                            return FEW_WORDS
                        state = state << HALF | np.uint64(stream[position])
                        position += 1
                    states[lane] = state
                    symbols[c] = symbol
                    lane = (lane + 1) % LANES
            bad = escape = vector.bits(0)
            for c in range(0, room, VECTOR):
                symbol = vector.load_u32x16(symbols.ctypes.data + 4 * c)
                coarse = vector.shift_right(symbol, vector.splat_u32x16(parts))
                step = vector.both(coarse, vector.splat_u32x16(STEPS - 1))
                exponent = vector.add(step, vector.load_u32x16(below.ctypes.data + 4 * c))
                negative = vector.shift_right(
                    vector.load_u32x16(predicted.ctypes.data + 4 * c), vector.splat_u32x16(31)
                )
                # Bit 4 tells agreement; what agrees has the sign predicted.
                differs = vector.shift_right(
                    vector.subtract(vector.splat_u32x16(2 * STEPS - 1), coarse),
                    vector.splat_u32x16(4),
                )
                sign = vector.both(vector.add(negative, differs), vector.splat_u32x16(1))
                part = vector.both(symbol, vector.splat_u32x16(subs - 1))
                word = vector.either(
                    vector.shift_left(sign, vector.splat_u32x16(15)),
                    vector.either(
                        vector.shift_left(exponent, vector.splat_u32x16(shift)),
                        vector.shift_left(part, vector.splat_u32x16(shift - parts)),
                    ),
                )
                vector.store(words.ctypes.data + 4 * c, word)
                here = vector.first_bits(min(VECTOR, width - c))
                none = vector.equal(symbol, vector.splat_u32x16(0)) & here
                outside = vector.greater(exponent, vector.splat_u32x16(exponent_max))
                bad |= outside & here & ~none
                escape |= none
            if bad:
                return BAD_EXPONENT
            for c in range(width):
                out[block, row, c] = words[c]
            if escape:
                for c in range(width):
                    if symbols[c] == 0:
                        if escaped >= len(escapes):
                            return FEW_ESCAPES
                        out[block, row, c] = escapes[escaped]
                        escaped += 1
    done = position == len(stream) and escaped == len(escapes)
    for state in states:
        done &= state == LOW
    return OK if done else LEFT_OVER


@kernel("void(uint8[::1], uint16[::1])")
def add_low(low, out):  # type: ignore[no-untyped-def]
    for pair in range(len(out) // 2):
        out[2 * pair] = (out[2 * pair] & 0xFFF0) | (low[pair] & 15)
        out[2 * pair + 1] = (out[2 * pair + 1] & 0xFFF0) | low[pair] >> 4
    if len(out) % 2:
        out[-1] = (out[-1] & 0xFFF0) | (low[-1] & 15)
