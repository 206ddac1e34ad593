"""Level 5's fixed probabilities, made by integers alone: the same on every machine.

A value is taken for `mean + scale * t`, where t follows Student's t with eight degrees of freedom:
near a normal distribution, but with tails that forgive an outlier, and with a distribution function
that is algebraic. What is known of a value before it is read is the ratio of its mean to its scale
and where its scale lies between two powers of two; the two together are its context. docs/format.md
says how the numbers below come about.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

RATIOS = 20  # classes of |mean| / scale, half an octave each
RATIO_ONE = 8  # the class that starts at |mean| = scale
FRACTIONS = 8  # steps of the scale within an octave
CONTEXTS = RATIOS * FRACTIONS
STEPS = 16  # exponents a context tells apart; step 0 is the escape
SUBS = 8  # parts of each exponent: the first three bits of the mantissa
SYMBOLS = 2 * STEPS * SUBS  # (sign agrees with the mean's, step, part)
TOTAL_BITS = 16
TOTAL = 1 << TOTAL_BITS
ESCAPE_FREQUENCY = 24
TOP = 12  # step of an exponent that equals its scale's, where the mean is small
SHIFT_FROM = 12  # from this class of ratios on, windows lie higher
ANGLES = 4096  # of the sine table, for one turn
ONE = 1 << 14  # the sine table's unit

_Q = 1 << 16
_ROOT_4_3 = 75674  # 65536 * sqrt(4/3): t with 8 degrees of freedom has variance 4/3
_FREEDOM = 8


def step_shift(ratio: int) -> int:
    """By how many exponents a context's window lies higher, for its class of |mean| / scale."""
    return max(0, (ratio - SHIFT_FROM) // 2)


@lru_cache(maxsize=1)
def cumulative() -> np.ndarray:
    """Cumulative frequencies, uint32 (contexts, symbols + 1), from 0 to 65536.

    Symbol (agrees * 16 + step) * 8 + part. Step 0 is the escape: it is symbol 0, and the other
    symbols with step 0 have no frequency. Context ratio * 8 + fraction.
    """
    table = np.zeros((CONTEXTS, SYMBOLS + 1), np.uint32)
    for context in range(CONTEXTS):
        frequencies = _frequencies(*divmod(context, FRACTIONS))
        table[context, 1:] = np.cumsum(frequencies)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=1)
def sines() -> np.ndarray:
    """int32 (4096,): the nearest integer to 16384 * sin(2 pi k / 4096)."""
    table = np.array(
        [round(ONE * math.sin(math.tau * k / ANGLES)) for k in range(ANGLES)], np.int32
    )
    table.flags.writeable = False
    return table


def scale_q16(fraction: int) -> int:
    """65536 times the scale in the middle of its eighth of an octave, of [1, 2)."""
    return round(_Q * 2.0 ** ((2 * fraction + 1) / 16))


def ratio_q16(ratio: int) -> int:
    """65536 times |mean| / scale in the middle of its half octave; for class 0 half its end."""
    if ratio == 0:
        return round(_Q * 2.0 ** ((1 - RATIO_ONE) / 2 - 1))
    return round(_Q * 2.0 ** ((2 * (ratio - RATIO_ONE) + 1) / 4))


def distribution_q30(x_q16: int) -> int:
    """2^30 times the probability that a t of unit variance stays below x; x times 65536."""
    t = x_q16 * _ROOT_4_3 // _Q
    square = t * t + _FREEDOM * _Q * _Q
    sine = (abs(t) << 30) // math.isqrt(square)
    cosine2 = (_FREEDOM << 62) // square
    # 1 + c/2 + 3/8 c^2 + 5/16 c^3, by Horner's rule, in units of 2^-30.
    series = (1 << 30) + (
        (cosine2 * ((1 << 29) + ((cosine2 * ((3 << 27) + ((5 * cosine2) >> 4))) >> 30))) >> 30
    )
    half = (sine * series) >> 31
    return (1 << 29) + (half if t >= 0 else -half)


def _frequencies(ratio: int, fraction: int) -> list[int]:
    """The frequency of each symbol in a context, together 65536."""
    scale = scale_q16(fraction)
    mean = ratio_q16(ratio) * scale // _Q

    def below(value: int) -> int:
        return distribution_q30((value - mean) * _Q // scale)

    edges = [
        (SUBS + part) * _Q * 2 ** (step + step_shift(ratio)) // (SUBS * 2**TOP)
        for step in range(1, STEPS)
        for part in range(SUBS)
    ]
    edges.append(_Q * 2 ** (STEPS + step_shift(ratio)) // 2**TOP)
    above, under = [below(edge) for edge in edges], [below(-edge) for edge in edges]
    # Far out, rounding may turn the difference of two equal probabilities negative.
    agree = [max(0, above[i + 1] - above[i]) for i in range(len(edges) - 1)]
    differ = [max(0, under[i] - under[i + 1]) for i in range(len(edges) - 1)]
    weights = differ + agree
    spare = TOTAL - ESCAPE_FREQUENCY - len(weights)
    shared = [1 + weight * spare // sum(weights) for weight in weights]
    shared[shared.index(max(shared))] += TOTAL - ESCAPE_FREQUENCY - sum(shared)
    half = len(differ)
    none = [0] * (SUBS - 1)
    return [ESCAPE_FREQUENCY, *none, *shared[:half], 0, *none, *shared[half:]]
