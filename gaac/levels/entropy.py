"""Level 3: a short prefix code for each exponent, by its rank in the block.

In each block the exponents, less a base per channel, are ranked by frequency. Ranks 0, 1 and 2
take two bits, which lie in two bit planes; the rest say 3 there and go on in unary: one bit for
each further rank, 1 for "higher still", up to rank 9. What is higher than that is a patch, a byte
with the exponent. The unary bits lie level by level, each level holding one bit for every value
still undecided, in row order: so whole levels are coded and decoded at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac.errors import CorruptFrame
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

PLANES = 2
MORE = 3  # what the planes say of ranks 3 and above
LEVELS = 7
RANKS = MORE + LEVELS
PATCH = RANKS

# Bits of each rank; a patch costs the longest code and a byte.
COST = np.array([2, 2, 2, 3, 4, 5, 6, 7, 8, 9], np.int32)
PATCH_COST = 9 + 8
# The search for a base looks this far from a channel's commonest exponent, and counts exponents
# this near to it.
SHIFT = 3
NEAR = 8


class Entropy:
    """Level 3 (see the module)."""

    number = 3
    name = "entropy"
    streams = ("base", "ranks", "levels", "patches", "planes", "low")

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        blocks = len(words)
        exponent, low, extra = split(words, fmt)
        base, values = choose(exponent)
        delta = subtract_rows(exponent, base).reshape(blocks, -1)
        rank = np.empty_like(delta)
        for block in range(blocks):
            rank_of = np.full(256, PATCH, np.uint8)
            rank_of[values[block]] = np.arange(RANKS, dtype=np.uint8)
            np.take(rank_of, delta[block], out=rank[block], mode="clip")
        more = rank >= np.uint8(MORE)
        planes = [more | (rank == np.uint8(bit)) for bit in (1, 2)]
        planes += [bits.reshape(blocks, -1) for bits in extra]
        return (
            base.reshape(-1),
            values.reshape(-1),
            unary(pick(rank, more)),
            pick(exponent, rank == np.uint8(PATCH)),
            pack_planes(planes).reshape(-1),
            low.reshape(-1),
        )

    def lengths_fit(
        self, lengths: Sequence[int], shape: tuple[int, int, int], fmt: WordFormat
    ) -> bool:
        blocks, rows, width = shape
        values = rows * width
        base, ranks, levels, patches, planes, low = lengths
        return (
            base == blocks * width
            and ranks == blocks * RANKS
            and levels <= LEVELS * plane_bytes(blocks * values)
            and patches <= blocks * values
            and planes == blocks * (PLANES + fmt.extra_bits) * plane_bytes(values)
            and low == blocks * values
        )

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        blocks, rows, width = out.shape
        values = rows * width
        base, ranks, levels, patches, planes, low = streams
        packed = planes.reshape(blocks, PLANES + fmt.extra_bits, plane_bytes(values))
        if not planes_clean(packed, values):
            raise CorruptFrame("The bit planes hold bits behind their last value.")
        bits = np.unpackbits(packed, axis=2, count=values, bitorder="little")
        rank = bits[:, 1] + bits[:, 1]
        rank += bits[:, 0]
        patched = climb(rank.reshape(-1), levels)
        if len(patched) != len(patches):
            raise CorruptFrame("The patches are not as many as the codes ask for.")
        delta = np.empty_like(rank)
        for block, table in enumerate(ranks.reshape(blocks, RANKS)):
            # The entry for patches is a placeholder: they are overwritten below.
            np.take(np.append(table, np.uint8(0)), rank[block], out=delta[block], mode="clip")
        exponent = add_rows(delta.reshape(out.shape), base.reshape(blocks, width))
        exponent.reshape(-1)[patched] = patches
        if fmt.exponent_max < 255 and exponent.max() > fmt.exponent_max:
            raise CorruptFrame("An exponent lies outside the range of its dtype.")
        extra = [bits[:, PLANES + i].reshape(out.shape) for i in range(fmt.extra_bits)]
        join(exponent, low.reshape(out.shape), extra, out, fmt)


def pick(values: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """The values where flags are set, as one axis: by index, which no pattern of flags slows."""
    picked: np.ndarray = values.reshape(-1)[np.flatnonzero(flags)]
    return picked


def unary(rank: np.ndarray) -> np.ndarray:
    """The unary levels of the ranks that go on, in order, packed one behind the other."""
    packed = []
    for level in range(LEVELS):
        higher = rank > np.uint8(MORE + level)
        packed.append(np.packbits(higher, bitorder="little"))
        rank = pick(rank, higher)
    return np.concatenate(packed)


def climb(rank: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Raise the ranks that say "more" by their unary levels; return the indices of the patches.

    Raises CorruptFrame if `levels` is longer or shorter than the ranks demand.
    """
    alive = np.flatnonzero(rank == np.uint8(MORE))
    position = 0
    for level in range(LEVELS):
        end = position + plane_bytes(len(alive))
        part = levels[position:end]
        if end > len(levels) or not planes_clean(part, len(alive)):
            raise CorruptFrame("The unary levels are not as long as the codes ask for.")
        higher = np.unpackbits(part, count=len(alive), bitorder="little").view(bool)
        alive = pick(alive, higher)
        rank[alive] = MORE + 1 + level
        position = end
    if position != len(levels):
        raise CorruptFrame("The unary levels are longer than the codes ask for.")
    return alive


def choose(exponent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bases, uint8 (blocks, width), and the values of ranks 0 to 9, uint8 (blocks, 10).

    A first ranking counts each channel from its commonest exponent; then each channel takes the
    base, at most three away from that, under which it is shortest; then the values are ranked
    again. Integers throughout, ties to the smaller value: the same on every machine.
    """
    counts = histogram(exponent)
    mode = counts.argmax(axis=2)
    reach = SHIFT + NEAR
    window = (mode[:, :, None] + np.arange(-reach, reach + 1)) & 255
    near = np.take_along_axis(counts, window, axis=2)
    cost = ranking_cost(near[:, :, SHIFT:-SHIFT].sum(axis=1))
    costs = [
        near[:, :, SHIFT + shift : near.shape[2] - SHIFT + shift] @ cost[:, :, None]
        for shift in range(-SHIFT, SHIFT + 1)
    ]
    shift = np.concatenate(costs, axis=2).argmin(axis=2) - SHIFT
    base = ((mode + shift) & 255).astype(np.uint8)
    around = shift[:, :, None] + np.arange(SHIFT, SHIFT + 2 * NEAR + 1)
    totals = np.take_along_axis(near, around, axis=2).sum(axis=1)
    order = np.argsort(-totals, axis=1, kind="stable")[:, :RANKS]
    return base, (order - NEAR).astype(np.uint8)


def histogram(exponent: np.ndarray) -> np.ndarray:
    """How often each channel holds each exponent: int32 (blocks, width, 256)."""
    blocks, _, width = exponent.shape
    keys = exponent.astype(np.int64)
    keys += (np.arange(blocks * width, dtype=np.int64) * 256).reshape(blocks, 1, width)
    counts = np.bincount(keys.reshape(-1), minlength=blocks * width * 256)
    return counts.reshape(blocks, width, 256).astype(np.int32)


def ranking_cost(totals: np.ndarray) -> np.ndarray:
    """What each value costs, less a patch: int32 (blocks, values), zero or below.

    Counted from the cost of a patch, what lies outside the window needs no count of its own.
    """
    order = np.argsort(-totals, axis=1, kind="stable")[:, :RANKS]
    cost = np.zeros(totals.shape, np.int32)
    np.put_along_axis(cost, order, np.broadcast_to(COST - PATCH_COST, order.shape), axis=1)
    return cost
