"""Level 5's compiled encoder: sums for the model, symbols and contexts, and rANS backwards."""

from __future__ import annotations

import numpy as np

from gaac.kernels import vector
from gaac.kernels.context_numpy import LANES
from gaac.kernels.context_parts import COARSE, FACTS, FULL_AT, HALF, VECTOR, find_contexts
from gaac.kernels.context_tables import STEPS, TOTAL_BITS
from gaac.kernels.cpu import kernel


@kernel("void(uint16[:,:,::1], int64, int64, float32[:,::1], float32[:,::1], float64[:,:,::1])")
def sum_up(words, shift, exponent_max, cosine, sine, total):  # type: ignore[no-untyped-def]
    width = words.shape[2]
    bits = np.empty(width, np.uint64)
    values = bits.view(np.float64)
    rebias = 1023 - exponent_max // 2
    for block in range(words.shape[0]):
        for row in range(words.shape[1]):
            for c in range(width):
                word = np.int64(words[block, row, c])
                exponent = (word >> shift) & exponent_max
                mantissa = word & ((1 << shift) - 1)
                double = (exponent + rebias) << 52 | mantissa << (52 - shift) | (word >> 15) << 63
                normal = exponent != 0 and exponent != exponent_max
                bits[c] = np.uint64(double if normal else 0)
            turned = min(row, cosine.shape[0] - 1)
            for c in range(width):
                value = values[c]
                total[block, 0, c] += value * value
                total[block, 1, c] += value * np.float64(cosine[turned, c])
                total[block, 2, c] += value * np.float64(sine[turned, c])


@kernel(
    f"int64(uint16[:,:,::1], int64, int64, int64, {FACTS}, uint8[::1], uint8[::1], uint16[::1])"
)
def find_symbols(  # type: ignore[no-untyped-def]
    words,
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
    symbols,
    chosen,
    escapes,
):
    """Fill in the symbol and the context of each value; the number of escapes."""
    blocks, rows, width = words.shape
    room = mean.shape[1]
    predicted = np.zeros(room, np.float32)
    context, below = np.zeros(room, np.int32), np.zeros(room, np.int32)
    row_words, row_symbols = np.zeros(room, np.int32), np.zeros(room, np.int32)
    escaped = at = 0
    for block in range(blocks):
        for row in range(rows):
            find_contexts(
                (mean, other, floor, fraction, window, cosine, sine),
                block,
                row,
                (predicted, context, below),
            )
            for c in range(width):
                row_words[c] = words[block, row, c]
            some = vector.bits(0)
            for c in range(0, room, VECTOR):
                word = vector.load_u32x16(row_words.ctypes.data + 4 * c)
                sign = vector.shift_right(word, vector.splat_u32x16(15))
                exponent = vector.both(
                    vector.shift_right(word, vector.splat_u32x16(shift)),
                    vector.splat_u32x16(exponent_max),
                )
                part = vector.both(
                    vector.shift_right(word, vector.splat_u32x16(shift - parts)),
                    vector.splat_u32x16((1 << parts) - 1),
                )
                step = vector.subtract(exponent, vector.load_u32x16(below.ctypes.data + 4 * c))
                negative = vector.shift_right(
                    vector.load_u32x16(predicted.ctypes.data + 4 * c), vector.splat_u32x16(31)
                )
                coarse = vector.select(
                    vector.equal(sign, negative),
                    vector.add(step, vector.splat_u32x16(STEPS)),
                    step,
                )
                symbol = vector.either(vector.shift_left(coarse, vector.splat_u32x16(parts)), part)
                # Steps 1 to 15 are coded: step - 1 is less than 15, negative ones wrapping around.
                inside = vector.greater(
                    vector.splat_u32x16(STEPS - 1),
                    vector.subtract(step, vector.splat_u32x16(1)),
                )
                symbol = vector.select(inside, symbol, vector.splat_u32x16(0))
                vector.store(row_symbols.ctypes.data + 4 * c, symbol)
                some |= inside ^ vector.first_bits(min(VECTOR, width - c))
            for c in range(width):
                symbols[at + c] = row_symbols[c]
                chosen[at + c] = context[c]
            if some:
                for c in range(width):
                    if row_symbols[c] == 0:
                        escapes[escaped] = words[block, row, c]
                        escaped += 1
            at += width
    return escaped


@kernel("int64(uint8[::1], uint8[::1], uint16[:,::1], uint64[::1], uint32[::1])")
def push(symbols, chosen, frequencies, states, stream):  # type: ignore[no-untyped-def]
    """Write the words from the end of `stream`; where they start, at least at 1."""
    first = len(stream)
    for at in range(len(symbols) - 1, -1, -1):
        row = frequencies[chosen[at]]
        place = COARSE + np.int64(symbols[at])
        start = row[place]
        frequency = np.uint64(np.uint16(row[place + 1] - start))
        state = states[at % LANES]
        full = state >= frequency << FULL_AT
        stream[first - 1] = np.uint32(state & np.uint64(0xFFFFFFFF))
        first -= int(full)
        state = state >> HALF if full else state
        quotient = state // frequency
        rest = state - quotient * frequency
        states[at % LANES] = (quotient << np.uint64(TOTAL_BITS)) + rest + np.uint64(start)
    return first


@kernel("void(uint16[::1], uint8[::1])")
def pack_low(words, packed):  # type: ignore[no-untyped-def]
    for pair in range(len(words) // 2):
        packed[pair] = (words[2 * pair] & 15) | (words[2 * pair + 1] & 15) << 4
    if len(words) % 2:
        packed[-1] = words[-1] & 15
