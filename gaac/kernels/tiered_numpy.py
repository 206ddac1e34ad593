"""Level 2 in numpy: the reading of the format that the compiled kernels must agree with.

The rank of a value is the sum of its codes: 0 to 2 if its first code says so, 3 and its second code
if that first code is 3, and so on. Rank 9 is an escape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels.entropy_numpy import (
    CANDIDATES,
    LOWEST,
    REACH_DOWN,
    REACH_UP,
    count_around,
    middles,
    pack,
    unpack,
)
from gaac.kernels.packed_numpy import tile_starts
from gaac.levels.base import (
    WordFormat,
    add_rows,
    join,
    pack_planes,
    plane_bytes,
    planes_clean,
    split,
    subtract_rows,
)
from gaac.levels.packed import ALIGN
from gaac.levels.tiered import CODE_BITS, FURTHER, RANKS

# What the code of each rank saves against that of an escape, which takes all codes and a byte.
ESCAPE_LENGTH = 3 * CODE_BITS + 8
SAVINGS = tuple(ESCAPE_LENGTH - CODE_BITS * (1 + rank // FURTHER) for rank in range(RANKS))

# The encoder's choice. Distances of -8 to 2 may have a rank, and are numbered from 0. Bases are
# chosen as if ranks went in this order, which suits values without a mean. To choose them anew by
# the ranks that come of it made nothing shorter: neither keys and values, nor normal values of any
# mean.
NUMBERS = REACH_DOWN + 1 + REACH_UP
EXPECTED = tuple(REACH_DOWN + distance for distance in (0, -1, 1, -2, -3, 2, -4, -5, -6))


def encode(words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
    """The streams of words, (blocks, rows, width), in the order of `Tiered.streams`."""
    blocks, rows, width = words.shape
    exponent, low, extra = split(words, fmt)
    base, ranks = choose(exponent, fmt.exponent_max)
    rank_of = np.full(256, RANKS, np.uint8)
    rank_of[ranks] = np.arange(RANKS)
    distance = subtract_rows(exponent, base) & np.uint8(fmt.exponent_max)
    rank = rank_of[distance].reshape(blocks, -1)
    planes = code_bits(rank, 0) + [bits.reshape(blocks, -1) for bits in extra]
    flat = rank.reshape(-1)
    further = [np.flatnonzero(flat >= tier * FURTHER) for tier in (1, 2, 3)]
    strings = [
        np.concatenate([pack(bits) for bits in code_bits(flat[where], tier)])
        for tier, where in ((1, further[0]), (2, further[1]))
    ]
    starts = tile_starts(blocks, rows, width)
    offsets = np.stack([np.searchsorted(where, starts) for where in further], axis=1).astype("<u4")
    front = (base.reshape(-1), ranks, offsets.reshape(-1).view(np.uint8), *strings)
    escaped = exponent.reshape(-1)[further[2]]
    spare = -(sum(len(stream) for stream in front) + len(escaped)) % ALIGN
    return (
        *front,
        np.concatenate([escaped, np.zeros(spare, np.uint8)]),
        pack_planes(planes).reshape(-1),
        low.reshape(-1),
    )


def code_bits(rank: np.ndarray, tier: int) -> list[np.ndarray]:
    """The two bits, not 0 where set, of the codes of a tier for ranks that come so far."""
    code = np.minimum(rank - np.uint8(FURTHER * tier), np.uint8(FURTHER))
    return [code & np.uint8(1), code & np.uint8(2)]


def decode(streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
    """Write the words into `out`, (blocks, rows, width); the streams have the right lengths.

    Raises CorruptFrame if they contradict each other.
    """
    blocks, rows, width = out.shape
    values = rows * width
    base, ranks, offsets, second, third, escapes, planes, low = streams
    if max(base.max(), ranks.max(), escapes.max(initial=0)) > fmt.exponent_max:
        raise CorruptFrame("An exponent lies outside the range of its dtype.")
    packed = planes.reshape(blocks, CODE_BITS + fmt.extra_bits, plane_bytes(values))
    if not planes_clean(packed, values):
        raise CorruptFrame("The bit planes hold bits behind their last value.")
    bits = np.unpackbits(packed, axis=2, count=values, bitorder="little")
    rank = (bits[:, 0] + 2 * bits[:, 1]).reshape(-1)
    further = [np.flatnonzero(rank == np.uint8(FURTHER))]
    for string, what in ((second, "second codes"), (third, "third codes")):
        where = further[-1]
        code = unpack_codes(string, len(where), what)
        rank[where] += code
        further.append(where[code == np.uint8(FURTHER)])
    starts = tile_starts(blocks, rows, width)
    expected = np.stack([np.searchsorted(where, starts) for where in further], axis=1)
    if not np.array_equal(np.frombuffer(offsets, "<u4"), expected.reshape(-1)):
        raise CorruptFrame("The offsets are not those of the codes.")
    escaped = further[-1]
    if not 0 <= len(escapes) - len(escaped) < ALIGN or escapes[len(escaped) :].any():
        raise CorruptFrame("The escapes are not as many as the codes ask for.")
    distance = np.append(ranks, np.uint8(0))[rank].reshape(out.shape)
    exponent = add_rows(distance, base.reshape(blocks, width)) & np.uint8(fmt.exponent_max)
    exponent.reshape(-1)[escaped] = escapes[: len(escaped)]
    extra = [bits[:, CODE_BITS + i].reshape(out.shape) for i in range(fmt.extra_bits)]
    join(exponent, low, extra, out, fmt)


def unpack_codes(strings: np.ndarray, count: int, what: str) -> np.ndarray:
    """The codes, uint8, 0 to 3, of two strings of exactly `count` bits each; else CorruptFrame."""
    half = len(strings) // 2
    code = unpack(strings[:half], count, what)
    code += 2 * unpack(strings[half:], count, what)
    return code


def choose(exponent: np.ndarray, exponent_max: int) -> tuple[np.ndarray, np.ndarray]:
    """Bases, uint8 (blocks, width), and ranks, uint8 (9), for exponents (blocks, rows, width).

    Each channel takes the base under which its codes are expected to be shortest, the lowest among
    equals; then ranks go to the distances by how often they occur in the segment, the lowest first
    among equals. Bases are tried and exponents counted as at level 3 (see `entropy_numpy`).
    Integers throughout: the same on every machine.
    """
    middle = middles(exponent)
    counts = count_around(exponent, middle, exponent_max).astype(np.uint16)
    saved = np.zeros((*middle.shape, CANDIDATES), np.uint16)
    for number, saving in zip(EXPECTED, SAVINGS, strict=True):
        saved += counts[:, :, number : number + CANDIDATES] * np.uint16(saving)
    candidate = saved.argmax(axis=2)
    reached = candidate[:, :, None] + np.arange(NUMBERS)
    totals = np.take_along_axis(counts, reached, axis=2).sum(axis=(0, 1), dtype=np.int64)
    numbers = np.argsort(-totals, kind="stable")[:RANKS]
    base = (middle + candidate + LOWEST) & exponent_max
    return base.astype(np.uint8), ((numbers - REACH_DOWN) & exponent_max).astype(np.uint8)
