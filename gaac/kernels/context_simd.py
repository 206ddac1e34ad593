"""Level 5 compiled: `context_numpy` says what each step means, and gives the same results."""

from __future__ import annotations

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import context_decode, context_encode
from gaac.kernels.context_model import Model, Rotation
from gaac.kernels.context_numpy import LANES, Coded, part_bits
from gaac.kernels.context_parts import FLOOR, LOG_BIT, LOW, VECTOR, table
from gaac.levels.base import WordFormat

_REFUSALS = {
    context_decode.FEW_WORDS: "The words are fewer than the codes ask for.",
    context_decode.FEW_ESCAPES: "The escapes are fewer than the codes ask for.",
    context_decode.BAD_EXPONENT: "An exponent lies outside the range of its dtype.",
    context_decode.LEFT_OVER: "The streams are longer than the codes ask for, or end elsewhere.",
}


def sums(words: np.ndarray, fmt: WordFormat, turn: Rotation) -> np.ndarray:
    """See context_numpy.sums."""
    blocks, _, width = words.shape
    total = np.zeros((blocks, 3, width))
    context_encode.sum_up(
        words, fmt.exponent_shift, fmt.exponent_max, turn.cosine, turn.sine, total
    )
    return total


def encode(words: np.ndarray, fmt: WordFormat, model: Model, turn: Rotation) -> Coded:
    """See context_numpy.encode."""
    count, parts = words.size, part_bits(fmt)
    symbols, chosen = np.empty(count, np.uint8), np.empty(count, np.uint8)
    escapes = np.empty(count, np.uint16)
    form = (fmt.exponent_shift, fmt.exponent_max, parts)
    escaped = context_encode.find_symbols(
        words, *form, *facts(model, turn), symbols, chosen, escapes
    )
    states, stream = np.full(LANES, LOW), np.empty(count + 1, np.uint32)
    first = context_encode.push(symbols, chosen, table(parts), states, stream)
    return states, stream[first:].astype("<u4"), escapes[:escaped].copy()


def decode(coded: Coded, out: np.ndarray, fmt: WordFormat, model: Model, turn: Rotation) -> None:
    """See context_numpy.decode; `out` must be contiguous."""
    states, *streams = coded
    # A slice of a blob may lie at any address.
    stream, escapes = (np.require(part, requirements=["C", "A"]) for part in streams)
    form = (fmt.exponent_shift, fmt.exponent_max, part_bits(fmt))
    tables = (table(part_bits(fmt)), *form, *facts(model, turn))
    refusal = context_decode.pull(states.astype(np.uint64), stream, escapes, *tables, out)
    if refusal != context_decode.OK:
        raise CorruptFrame(_REFUSALS[refusal])


def pack_low(words: np.ndarray) -> np.ndarray:
    """See context_numpy.pack_low."""
    packed = np.empty(-(-words.size // 2), np.uint8)
    context_encode.pack_low(words.reshape(-1), packed)
    return packed


def add_low(low: np.ndarray, out: np.ndarray) -> None:
    """See context_numpy.add_low."""
    context_decode.add_low(np.ascontiguousarray(low), out.reshape(-1))


def facts(model: Model, turn: Rotation) -> tuple[np.ndarray, ...]:
    """What the kernels want to know of blocks and rows, filled up to whole vectors of channels.

    mean and other float32, floor, fraction and window int32, each (blocks, room); cosine and sine
    float32 (rows, room).
    """
    floor = (FLOOR - model.offset) << LOG_BIT
    made: tuple[np.ndarray, ...] = (
        model.mean.astype(np.float32),
        model.other.astype(np.float32),
        floor,
        model.fraction,
        model.window,
        turn.cosine,
        turn.sine,
    )
    spare = -model.mean.shape[1] % VECTOR
    if spare:
        made = tuple(np.pad(fact, ((0, 0), (0, spare))) for fact in made)
    # Kernels take the order of an array for granted; picking channels may have turned it.
    return tuple(map(np.ascontiguousarray, made))
