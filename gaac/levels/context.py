"""Level 5: each value's sign, exponent and first mantissa bits by what its channel lets expect.

A block tells a scale and a mean for each channel. Keys that carry a rotary position embedding have
a mean that turns with the position: where the frame has the frequencies (`Hints.rope`), the mean is
turned with them. The ratio of what is predicted to the scale, and the scale's place between two
powers of two, are a value's context; the contexts' probabilities are fixed (see
`kernels.context_tables`), and rANS codes by them. The lower mantissa bits are kept as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import context_numpy, cpu
from gaac.kernels.context_model import Fit, Rotation, fit, model, quantise, rotation
from gaac.kernels.context_numpy import LANES, part_bits
from gaac.levels.base import Hints, WordFormat

STATE_BYTES = 8 * LANES
# What level 3 takes for a sign and an exponent, roughly; what costs more is left to it.
LEVEL_3_BITS = 4
STILL = 1 << 15  # in the tops of a segment whose means do not turn, though the frame has a rope


class Context:
    """Level 5 (see the module)."""

    number = 5
    name = "context"
    streams = ("states", "codes", "escapes", "tops", "scales", "means", "low")

    def encode(
        self, words: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> Sequence[np.ndarray] | None:
        """See Level. None for one-byte dtypes, which have no mantissa to speak of, and for values
        that no scale describes, such as constants."""
        if fmt.word_bytes == 1:
            return None
        words = np.require(words, requirements=["C", "A"])
        coder = _coder()
        turn, fitted = _best_fit(words, fmt, hints, coder)
        tops, scales, means = quantise(fitted, turn, fmt)
        known = model(tops, scales, means, turn.partner)
        states, stream, escapes = coder.encode(words, fmt, known, turn)
        if 8 * (stream.nbytes + escapes.nbytes) > (LEVEL_3_BITS + part_bits(fmt)) * words.size:
            return None
        if hints.rope is not None and not turn.turns:
            tops |= STILL
        return (
            states.astype("<u8").view(np.uint8),
            stream.view(np.uint8),
            (escapes & ~low_mask(fmt)).view(np.uint8),
            tops.view(np.uint8),
            scales.reshape(-1),
            means.reshape(-1).view(np.uint8),
            pack_low(words, fmt, coder),
        )

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        values = blocks * rows * width
        states, codes, escapes, tops, scales, means, low = lengths
        return (
            fmt.word_bytes == 2
            and tops == 2 * blocks
            and scales == means == blocks * width
            and states == STATE_BYTES
            and codes % 4 == 0
            and codes <= 4 * values
            and escapes % 2 == 0
            and escapes <= 2 * values
            and low == low_bytes(values, fmt)
        )

    def decode(
        self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat, hints: Hints
    ) -> None:
        blocks, rows, width = out.shape
        states, stream, escapes, tops, scales, means, low = streams
        top, rope = tops.view("<u2").astype(np.int32), hints.rope
        if rope is not None and (top & STILL).all():
            top, rope = top - STILL, None
        codes = scales.reshape(blocks, width)
        if (codes > top[:, None]).any() or (top > 8 * fmt.exponent_max + 7).any():
            raise CorruptFrame("A scale lies outside the range of its dtype.")
        words = escapes.view("<u2")
        if (words & low_mask(fmt)).any():
            raise CorruptFrame("An escape holds bits that belong to another stream.")
        turn = rotation(rows, width, rope)
        known = model(top, codes, means.view(np.int8).reshape(blocks, width), turn.partner)
        coded = (states.view("<u8"), stream.view("<u4"), words)
        coder = _coder()
        target = out if out.flags.c_contiguous else np.empty(out.shape, np.uint16)
        coder.decode(coded, target, fmt, known, turn)
        add_low(low, target, fmt, coder)
        if target is not out:
            out[...] = target


def _coder() -> ModuleType:
    """The module that codes: compiled, or the numpy twin where that is asked for."""
    if cpu.path() == "numpy":
        return context_numpy
    from gaac.kernels import context_simd

    return context_simd


def _best_fit(
    words: np.ndarray, fmt: WordFormat, hints: Hints, coder: ModuleType
) -> tuple[Rotation, Fit]:
    """Whether means turn or stay: a hint may be wrong, as for a layer without positions."""
    _, rows, width = words.shape
    ropes = [None] if hints.rope is None else [hints.rope, None]
    turns = [rotation(rows, width, rope) for rope in ropes]
    fits = [fit(coder.sums(words, fmt, turn), rows, turn, fmt) for turn in turns]
    return min(zip(turns, fits, strict=True), key=lambda pair: pair[1].cost)


def low_bits(fmt: WordFormat) -> int:
    """How many bits of the mantissa are kept as they are: 4 for bfloat16, 8 for float16."""
    return fmt.exponent_shift - part_bits(fmt)


def low_mask(fmt: WordFormat) -> np.uint16:
    """The bits of a word that lie in the stream of low bits."""
    return np.uint16((1 << low_bits(fmt)) - 1)


def low_bytes(values: int, fmt: WordFormat) -> int:
    """Length of the stream of low bits."""
    return -(-values * low_bits(fmt) // 8)


def pack_low(words: np.ndarray, fmt: WordFormat, coder: ModuleType) -> np.ndarray:
    """The low bits of all words, uint8: a byte for each value, or half of one."""
    if low_bits(fmt) == 8:
        return words.astype(np.uint8).reshape(-1)
    packed: np.ndarray = coder.pack_low(words)
    return packed


def add_low(low: np.ndarray, out: np.ndarray, fmt: WordFormat, coder: ModuleType) -> None:
    """Put the low bits into the words of `out`, (blocks, rows, width), whose own count for nothing.

    Raises CorruptFrame if half a byte behind the last value is not zero.
    """
    if low_bits(fmt) == 8:
        out &= np.uint16(0xFF00)
        out |= low.reshape(out.shape)
        return
    if out.size % 2 and low[-1] >> 4:
        raise CorruptFrame("The low bits go on behind their last value.")
    coder.add_low(low, out)
