"""Level 5 in numpy: the slow twin of `context_simd`, for every step the same results.

Symbols are coded by range asymmetric numeral systems (rANS, Duda 2013, arXiv 1311.2540) with 64-bit
states and 32-bit words; value i of a segment belongs to state i % 8.
"""

from __future__ import annotations

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels.context_model import LOG_OF_ONE, Model, Rotation
from gaac.kernels.context_tables import (
    FRACTIONS,
    RATIO_ONE,
    RATIOS,
    STEPS,
    SUBS,
    TOTAL_BITS,
    cumulative,
    step_shift,
)
from gaac.levels.base import WordFormat

LANES = 8
STATE_LOW = 1 << 32
SHIFTS = np.array([step_shift(ratio) for ratio in range(RATIOS)], np.int32)

Coded = tuple[np.ndarray, np.ndarray, np.ndarray]


def part_bits(fmt: WordFormat) -> int:
    """How many bits of the mantissa belong to the symbol; the others are kept as they are."""
    return 3 if fmt.name == "bfloat16" else 2


def table(fmt: WordFormat) -> np.ndarray:
    """Cumulative frequencies for a dtype, uint64 (contexts, symbols + 1)."""
    return cumulative()[:, :: SUBS >> part_bits(fmt)].astype(np.uint64)


def sums(words: np.ndarray, fmt: WordFormat, turn: Rotation) -> np.ndarray:
    """Sums over the rows of (blocks, rows, width) words, float64 (blocks, 3, width); see `fit`.

    Infinities, NaNs and denormals count as zero. Added row by row, so that the twin, which does
    the same, comes to the same bits.
    """
    exponent = (words >> fmt.exponent_shift) & fmt.exponent_max
    mantissa = words & ((1 << fmt.exponent_shift) - 1)
    magnitude = np.ldexp(
        1.0 + mantissa / (1 << fmt.exponent_shift),
        exponent.astype(np.int32) - fmt.exponent_max // 2,
    )
    magnitude = np.where((exponent > 0) & (exponent < fmt.exponent_max), magnitude, 0.0)
    values = np.where(words >> 15, -magnitude, magnitude)
    total = np.zeros((len(words), 3, words.shape[2]))
    for row in range(words.shape[1]):
        value = values[:, row]
        total[:, 0] += value * value
        turned = min(row, len(turn.cosine) - 1)
        total[:, 1] += value * turn.cosine[turned].astype(np.float64)
        total[:, 2] += value * turn.sine[turned].astype(np.float64)
    return total


def contexts(model: Model, block: int, turn: Rotation, rows: int) -> tuple[np.ndarray, ...]:
    """For each value of a block, int32 (rows, width): context, predicted sign, exponent window."""
    mean, other = model.mean[block].astype(np.float32), model.other[block].astype(np.float32)
    # Whole numbers below 2^24, which float32 holds exactly.
    predicted = mean * turn.cosine + other * turn.sine
    # The exponent and the first three mantissa bits of a float32: 8 * log2, linear in between.
    log = (np.abs(predicted).view(np.int32) >> 20) - 127 * FRACTIONS
    log += model.offset[block] - LOG_OF_ONE
    ratio = np.clip((log >> 2) + RATIO_ONE, 0, RATIOS - 1)
    context = ratio * FRACTIONS + model.fraction[block]
    found = context, (predicted < 0).astype(np.int32), model.window[block] + SHIFTS[ratio]
    return tuple(np.broadcast_to(part, (rows, part.shape[1])) for part in found)


def encode(words: np.ndarray, fmt: WordFormat, model: Model, turn: Rotation) -> Coded:
    """Code words, (blocks, rows, width): 8 states uint64, words uint32, escapes uint16."""
    parts = part_bits(fmt)
    symbols, chosen = [], []
    for block, raw in enumerate(words.astype(np.int32)):
        context, negative, window = contexts(model, block, turn, words.shape[1])
        exponent = (raw >> fmt.exponent_shift) & fmt.exponent_max
        step = exponent - window
        agrees = (raw >> 15) == negative
        part = (raw >> (fmt.exponent_shift - parts)) & ((1 << parts) - 1)
        symbol = (((agrees * STEPS + step) << parts) + part) * ((step > 0) & (step < STEPS))
        symbols.append(symbol.reshape(-1))
        chosen.append(context.reshape(-1))
    symbol, context = np.concatenate(symbols), np.concatenate(chosen)
    escapes = words.reshape(-1)[symbol == 0]
    states, stream = push(symbol, context, table(fmt))
    return states, stream, escapes.astype("<u2")


def push(symbol: np.ndarray, context: np.ndarray, cumulated: np.ndarray) -> tuple[np.ndarray, ...]:
    """rANS from the last value to the first: the states at the end, and the words in the order of
    reading."""
    start = cumulated[context, symbol]
    frequency = cumulated[context, symbol + 1] - start
    states = np.full(LANES, STATE_LOW, np.uint64)
    stream: list[int] = []
    for first in reversed(range(0, len(symbol), LANES)):
        f, c = frequency[first : first + LANES], start[first : first + LANES]
        state = states[: len(f)]
        full = state >= f << np.uint64(64 - TOTAL_BITS)
        stream.extend((state[full] & np.uint64(0xFFFFFFFF)).tolist()[::-1])
        state = np.where(full, state >> np.uint64(32), state)
        states[: len(f)] = (state // f << np.uint64(TOTAL_BITS)) + state % f + c
    return states, np.array(stream[::-1], "<u4")


def decode(coded: Coded, out: np.ndarray, fmt: WordFormat, model: Model, turn: Rotation) -> None:
    """Write the words, less their low bits, into `out`, (blocks, rows, width).

    Escaped words are written whole. Raises CorruptFrame if the streams contradict each other.
    """
    states, stream, escapes = coded
    parts = part_bits(fmt)
    reader = _Reader(states, stream, table(fmt))
    used = 0
    for block in range(len(out)):
        context, negative, window = contexts(model, block, turn, out.shape[1])
        symbol = reader.pull(context.reshape(-1)).reshape(context.shape)
        part = symbol & ((1 << parts) - 1)
        step = (symbol >> parts) % STEPS
        exponent = window + step
        escaped = symbol == 0
        if ((exponent < 0) | (exponent > fmt.exponent_max))[~escaped].any():
            raise CorruptFrame("An exponent lies outside the range of its dtype.")
        sign = negative ^ 1 ^ (symbol >> parts) // STEPS
        word = (sign << 15) + (exponent << fmt.exponent_shift)
        word += part << (fmt.exponent_shift - parts)
        count = int(escaped.sum())
        if used + count > len(escapes):
            raise CorruptFrame("The escapes are fewer than the codes ask for.")
        word[escaped] = escapes[used : used + count]
        used += count
        out[block] = word
    if used != len(escapes) or not reader.done():
        raise CorruptFrame("The streams are longer than the codes ask for, or end elsewhere.")


def pack_low(words: np.ndarray) -> np.ndarray:
    """The low four bits of all words, uint8; of two words, the first is in the lower half."""
    nibbles = (words.astype(np.uint8) & np.uint8(15)).reshape(-1)
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    packed: np.ndarray = nibbles[::2] | (nibbles[1::2] << np.uint8(4))
    return packed


def add_low(low: np.ndarray, out: np.ndarray) -> None:
    """Put the low four bits into words, uint16, whose own are overwritten."""
    nibbles = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=1).reshape(-1)
    out &= np.uint16(0xFFF0)
    out |= nibbles[: out.size].reshape(out.shape)


class _Reader:
    """The eight states on their way through a stream of words, over the blocks of a segment."""

    def __init__(self, states: np.ndarray, stream: np.ndarray, cumulated: np.ndarray) -> None:
        self.states = states.astype(np.uint64)
        self.stream = stream
        self.cumulated = cumulated
        self.position = 0
        self.lane = 0

    def pull(self, context: np.ndarray) -> np.ndarray:
        """The next symbols, int32, one for each context."""
        symbols = np.empty(len(context), np.int32)
        first = 0
        while first < len(context):
            count = min(LANES - self.lane, len(context) - first)
            symbols[first : first + count] = self._step(context[first : first + count])
            first += count
        return symbols

    def _step(self, context: np.ndarray) -> np.ndarray:
        """One symbol from each of the next lanes, at most up to the last lane."""
        last = self.lane + len(context)
        state = self.states[self.lane : last]
        slot = state & np.uint64((1 << TOTAL_BITS) - 1)
        rows = self.cumulated[context]
        symbol = (rows <= slot[:, None]).sum(axis=1) - 1
        pick = np.arange(len(context))
        start, end = rows[pick, symbol], rows[pick, symbol + 1]
        state = (end - start) * (state >> np.uint64(TOTAL_BITS)) + slot - start
        low = np.flatnonzero(state < np.uint64(STATE_LOW))
        if self.position + len(low) > len(self.stream):
            raise CorruptFrame("The words are fewer than the codes ask for.")
        taken = self.stream[self.position : self.position + len(low)].astype(np.uint64)
        state[low] = (state[low] << np.uint64(32)) | taken
        self.position += len(low)
        self.states[self.lane : last] = state
        self.lane = last % LANES
        return symbol

    def done(self) -> bool:
        """Whether every word was read and every state is back where the encoder started."""
        return self.position == len(self.stream) and bool((self.states == STATE_LOW).all())
