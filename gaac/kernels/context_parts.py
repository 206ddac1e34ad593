"""What level 5's compiled encoder and decoder share: the contexts of a row, and the table.

Work goes row by row, in buffers of whole vectors of 16 channels. Predictions are float32, because
every product and sum in them is a whole number below 2^24, and so exact.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gaac.kernels import vector
from gaac.kernels.context_model import LOG_OF_ONE
from gaac.kernels.context_numpy import STATE_LOW
from gaac.kernels.context_tables import (
    FRACTIONS,
    RATIO_ONE,
    RATIOS,
    SHIFT_FROM,
    STEPS,
    SUBS,
    TOTAL_BITS,
    cumulative,
)
from gaac.kernels.cpu import inlined

VECTOR = 16  # channels, in 32 bits each
COARSE = 2 * STEPS
ROOM = 32  # words behind the last frequency, so that a whole vector can be read there
ROW_WORDS = COARSE + 2 * STEPS * SUBS + ROOM
FULL_AT = np.uint64(64 - TOTAL_BITS)
SLOT = np.uint64((1 << TOTAL_BITS) - 1)
HALF = np.uint64(32)
LOW = np.uint64(STATE_LOW)

# The exponent and the first three mantissa bits of a float32, which are 8 * log2 of it, linear in
# between, start at this bit; a class of ratios is four of them.
LOG_BIT = 20
RATIO_BIT = 22
# What to take from those bits, so that classes start at zero.
FLOOR = LOG_OF_ONE + 127 * FRACTIONS - 4 * RATIO_ONE

# What both kernels are given of the model (see context_simd.facts): mean, other, floor, fraction,
# window, cosine, sine.
FACTS = (
    "float32[:,::1], float32[:,::1], int32[:,::1], int32[:,::1], int32[:,::1],"
    "float32[:,::1], float32[:,::1]"
)


@lru_cache(maxsize=2)
def table(parts: int) -> np.ndarray:
    """uint16 (contexts, words of a row): where each sign and step starts, then each symbol."""
    starts = cumulative()[:, :: SUBS >> parts].astype(np.uint16)  # the last, 65536, becomes 0
    made = np.zeros((len(starts), ROW_WORDS), np.uint16)
    made[:, :COARSE] = starts[:, : COARSE << parts : 1 << parts]
    made[:, COARSE : COARSE + starts.shape[1]] = starts
    return made


@inlined
def _predict(mean, other, block, cosine, sine, row, predicted):  # type: ignore[no-untyped-def]
    """Predictions for a row: whole numbers below 2^24, so float32 holds them exactly."""
    for c in range(len(predicted)):
        # + 0 makes a plain zero of -0, so that the sign bit tells what is less than zero.
        turned = mean[block, c] * cosine[row, c] + other[block, c] * sine[row, c]
        predicted[c] = turned + np.float32(0)


@inlined
def _classify(predicted, floor, fraction, window, context, below):  # type: ignore[no-untyped-def]
    """The contexts of 16 channels, and the exponents just below their windows; all by address."""
    last = vector.splat_u32x16(RATIOS - 1)
    shift_from = vector.splat_u32x16(SHIFT_FROM)
    bits = vector.both(vector.load_u32x16(predicted), vector.splat_u32x16(0x7FFFFFFF))
    bits = vector.subtract_saturated(bits, vector.load_u32x16(floor))
    ratio = vector.smallest(vector.shift_right(bits, vector.splat_u32x16(RATIO_BIT)), last)
    eighths = vector.shift_left(ratio, vector.splat_u32x16(3))
    vector.store(context, vector.add(eighths, vector.load_u32x16(fraction)))
    shift = vector.subtract_saturated(ratio, shift_from)
    shift = vector.shift_right(shift, vector.splat_u32x16(1))
    vector.store(below, vector.add(shift, vector.load_u32x16(window)))


@inlined
def find_contexts(facts, block, row, found):  # type: ignore[no-untyped-def]
    """Fill in what is predicted for a row, its contexts, and the exponents below its windows.

    facts: as FACTS has them. found: predicted float32, context and below int32, each (room,).
    """
    mean, other, floor, fraction, window, cosine, sine = facts
    predicted, context, below = found
    room = mean.shape[1]
    turned = min(row, cosine.shape[0] - 1)  # one row serves all where nothing turns
    _predict(mean, other, block, cosine, sine, turned, predicted)
    for c in range(0, room, VECTOR):
        _classify(
            predicted.ctypes.data + 4 * c,
            floor.ctypes.data + 4 * (block * room + c),
            fraction.ctypes.data + 4 * (block * room + c),
            window.ctypes.data + 4 * (block * room + c),
            context.ctypes.data + 4 * c,
            below.ctypes.data + 4 * c,
        )
