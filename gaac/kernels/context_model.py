"""What level 5 knows of a value before it reads it: integers from a block's side information.

The compiled kernels and their numpy twin both start from what is made here. docs/format.md has the
definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gaac.kernels.context_tables import ANGLES, FRACTIONS, ONE, TOP, sines
from gaac.levels.base import WordFormat
from gaac.rope import TURN, Rope

MEAN_UNIT = 4  # a mean is told in quarters of the larger scale of its pair
MEAN_MAX = 127
CODE_MAX = 255
# log2 of a prediction of one scale, in eighths of an octave: means are in quarters, sines in 2^-14.
LOG_OF_ONE = FRACTIONS * 16

_KEPT_VALUES = 1 << 18  # of a rotation; larger ones are made anew each time
_QUARTERS = (2.0**0.25, 2.0**0.5, 2.0**0.75)
# The middle of each eighth of an octave from 1 to 2.
_MIDDLES = np.exp2((2 * np.arange(FRACTIONS) + 1) / (2 * FRACTIONS))
# A mean of more than 30 scales raises its scale, so that it keeps within 127 quarters of it.
_MEAN_SQUARE_MAX = 900.0


@dataclass(frozen=True, eq=False)
class Rotation:
    """How the means of a block's channels turn from row to row.

    cosine, sine: float32 (rows, width), or (1, width) for all rows where nothing turns; whole
    numbers, in units of 2^-14. partner: int64 (width,),
    the other channel of a pair, or the channel itself, whose sine is then 0. In row r, channel c is
    predicted as mean[c] * cosine[r, c] + mean[partner[c]] * sine[r, c].
    squares: float64 (3, width), sums over the rows of cosine^2, cosine * sine and sine^2.
    turns: whether any mean does.
    """

    cosine: np.ndarray
    sine: np.ndarray
    partner: np.ndarray
    squares: np.ndarray
    turns: bool


@dataclass(frozen=True, eq=False)
class Model:
    """The side information of a segment's blocks as the coder uses it, each int32 (blocks, width).

    mean, other: a channel's mean and its partner's. window: the exponent below the lowest that a
    small mean's context tells apart. fraction: eighths of an octave of the scale, 0 to 7.
    offset: by how much the unit of the mean exceeds the channel's own scale, in eighths.
    """

    mean: np.ndarray
    other: np.ndarray
    window: np.ndarray
    fraction: np.ndarray
    offset: np.ndarray


def rotation(rows: int, width: int, rope: Rope | None) -> Rotation:
    """The rotation of a block; without a rope every mean stays as it is."""
    if rope is None:
        return _rotation(rows, width, b"", False)
    turns = rope.turns.astype("<u2").tobytes()
    if rows * width > _KEPT_VALUES:
        return _rotation.__wrapped__(rows, width, turns, rope.interleaved)
    return _rotation(rows, width, turns, rope.interleaved)


@lru_cache(maxsize=16)
def _rotation(rows: int, width: int, turns: bytes, interleaved: bool) -> Rotation:
    step = np.frombuffer(turns, "<u2").astype(np.int64)
    different = rows if len(step) else 1
    cosine = np.full((different, width), ONE, np.float32)
    sine = np.zeros((different, width), np.float32)
    partner = np.arange(width)
    pair = np.arange(len(step))
    first = 2 * pair if interleaved else pair
    second = first + 1 if interleaved else pair + len(step)
    angle = (np.arange(different)[:, None] * step) % TURN // (TURN // ANGLES)
    cosine[:, first] = cosine[:, second] = sines()[(angle + ANGLES // 4) % ANGLES]
    sine[:, second] = sines()[angle]
    sine[:, first] = -sine[:, second]
    partner[first], partner[second] = second, first
    products = ((cosine, cosine), (cosine, sine), (sine, sine))
    squares = np.stack([(a.astype(np.float64) * b).sum(axis=0) for a, b in products])
    squares *= rows // different
    for table in (cosine, sine, partner, squares):
        table.flags.writeable = False
    return Rotation(cosine, sine, partner, squares, turns=len(step) > 0)


@dataclass(frozen=True, eq=False)
class Fit:
    """What the channels of blocks are like, each (blocks, width).

    mean: float64. scale: int64, floor(8 * log2 of the deviation from the mean), counted from
    2^-bias and not below 0.
    """

    mean: np.ndarray
    scale: np.ndarray

    @property
    def cost(self) -> int:
        """The lower, the shorter the code: an eighth of a bit for each unit and row."""
        return int(self.scale.sum())


def fit(sums: np.ndarray, rows: int, turn: Rotation, fmt: WordFormat) -> Fit:
    """Estimate from sums over the rows, float64 (blocks, 3, width): value^2, value * cosine and
    value * sine. This is the encoder's business: whatever it comes to, decodes."""
    squares, along, across = sums[:, 0], sums[:, 1], sums[:, 2]
    paired = turn.partner != np.arange(len(turn.partner))
    mean = (along + across[:, turn.partner]) / (rows * float(ONE))
    other = np.where(paired, mean[:, turn.partner], 0.0)
    cc, cs, ss = turn.squares / float(ONE) ** 2
    explained = 2 * (mean * along + other * across) / ONE
    explained -= mean * mean * cc + 2 * mean * other * cs + other * other * ss
    variance = np.maximum(squares - explained, 0.0) / rows
    variance = np.maximum(variance, (mean * mean + other * other) / _MEAN_SQUARE_MAX)
    limit = FRACTIONS * fmt.exponent_max + FRACTIONS - 1
    scale = _quarter_log2(variance) + FRACTIONS * (fmt.exponent_max // 2)
    return Fit(mean, np.clip(scale, 0, limit))


def quantise(
    fitted: Fit, turn: Rotation, fmt: WordFormat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The side information: tops uint16 (blocks,), codes uint8 and means int8 (blocks, width).

    The scale of a channel is top - code eighths of an octave above 2^-bias; a mean is in quarters
    of the larger scale of its pair.
    """
    top = fitted.scale.max(axis=1)
    code = np.minimum(top[:, None] - fitted.scale, CODE_MAX)
    scale = top[:, None] - code
    unit = np.maximum(scale, scale[:, turn.partner])
    octave = (unit // FRACTIONS - fmt.exponent_max // 2).astype(np.float64)
    size = _MIDDLES[unit % FRACTIONS] * np.exp2(octave)
    means = np.clip(np.rint(MEAN_UNIT * fitted.mean / size), -MEAN_MAX, MEAN_MAX)
    return top.astype("<u2"), code.astype(np.uint8), means.astype(np.int8)


def _quarter_log2(values: np.ndarray) -> np.ndarray:
    """floor(4 * log2(value)) of float64 values, int64; far below any scale for 0."""
    mantissa, exponent = np.frexp(values)  # mantissa from 1/2 to 1
    quarters = sum((2 * mantissa >= root).astype(np.int64) for root in _QUARTERS)
    return np.where(values > 0, 4 * (exponent.astype(np.int64) - 1) + quarters, -(2**20))


def model(tops: np.ndarray, codes: np.ndarray, means: np.ndarray, partner: np.ndarray) -> Model:
    """The model that side information (see `quantise`) stands for; no code may exceed its top."""
    scale = tops[:, None].astype(np.int32) - codes
    mean = means.astype(np.int32)
    return Model(
        mean=mean,
        other=mean[:, partner],
        window=scale // FRACTIONS - TOP,
        fraction=scale % FRACTIONS,
        offset=np.maximum(scale, scale[:, partner]) - scale,
    )
