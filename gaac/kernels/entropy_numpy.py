"""Level 3 in numpy: what anyone can read, and what the compiled kernels are measured against.

Each exponent is a code for its distance from the base of its channel. Which distances are short is
said by the channel's shape, one of four. A code starts with a bit `first`, which lies in a dense
plane. A bit `second` follows if first is set, or if the shape is flat. Where both are set, eight
levels of "further?" follow, one bit each until one is 0; a value that says "further" eight times is
a patch, a byte with its exponent. `second` and the levels are compacted: they hold bits only for
the values that come so far, in row order, so whole levels are coded and decoded at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac.errors import CorruptFrame
from gaac.levels.base import WordFormat, join, pack_planes, plane_bytes, planes_clean, split
from gaac.levels.entropy import LEVELS, SHAPE_BITS

STEEP = 1  # the bit of a shape that is set where `second` needs `first`

# The distances (exponent less base) of a channel's codes, for each shape: of the codes 00, 01 and
# 10 (first, second), then of the values that leave at levels 0 to 7. A steep shape has no code 01.
# These are orders of probability of the exponent of |x|, x normal, for ratios of its mean to its
# deviation from 0 up: of all such orders, the four that together coded the keys and values of
# SmolLM2-135M shortest.
DISTANCES = np.array(
    [
        [0, 1, -1, -2, -3, 2, -4, -5, -6, -7, -8],
        [0, 0, -1, -2, 1, -3, -4, -5, -6, -7, -8],
        [0, -1, -2, 1, -3, -4, -5, -6, -7, 2, -8],
        [0, 0, 1, -1, -2, -3, -4, -5, -6, 2, -7],
    ],
    np.int8,
)
SHAPES, CODES = DISTANCES.shape
FIRST_LEVEL = CODES - LEVELS

# A patch takes the longest of the codes and a byte; what each code saves against that, in bits,
# for each shape. The code that a steep shape lacks saves nothing.
PATCH_LENGTH = 2 + LEVELS + 8
_FLAT = [PATCH_LENGTH - length for length in (2, 2, 2, *range(3, 3 + LEVELS))]
_STEEP = [PATCH_LENGTH - 1, 0, *_FLAT[2:]]
SAVINGS = np.array([_FLAT, _STEEP, _FLAT, _STEEP], np.uint16)

# The encoder's choice. Bases are tried from a middle exponent, the median of a few rows, upward
# and downward; exponents are counted as far from there as the distances reach. The counts are of
# at most 256 rows and end at 255, so that a byte holds them.
MIDDLE_ROWS = 16
COUNTED_ROWS = 256
LOWEST, HIGHEST = -2, 2
CANDIDATES = HIGHEST - LOWEST + 1
REACH_DOWN, REACH_UP = 8, 2
COUNTS = REACH_DOWN + CANDIDATES + REACH_UP


def encode(words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
    """The streams of a segment: base, shapes, second, levels, patches, planes, low, all uint8.

    words: uint16, or uint8 for one-byte dtypes, (blocks, rows, width), strided or not.
    """
    blocks = len(words)
    exponent, low, extra = split(words, fmt)
    base, shape = choose(exponent, fmt.exponent_max)
    tables = exponents_of_codes(base, shape, fmt.exponent_max)
    hits = [exponent == tables[code][:, None, :] for code in range(CODES)]
    flat = np.broadcast_to(((shape & STEEP) == 0)[:, None, :], exponent.shape)
    hits[1] = hits[1] & flat
    first = ~(hits[0] | hits[1])
    further = first & ~hits[2]
    second = pick(hits[1] | further, first | flat)
    levels = []
    undecided = further
    for level in range(LEVELS):
        further = undecided & ~hits[FIRST_LEVEL + level]
        levels.append(pack(pick(further, undecided)))
        undecided = further
    planes = [first.reshape(blocks, -1), *(bits.reshape(blocks, -1) for bits in extra)]
    return (
        base.reshape(-1),
        pack_planes([shape & np.uint8(1 << bit) for bit in range(SHAPE_BITS)]).reshape(-1),
        pack(second),
        np.concatenate(levels),
        pick(exponent, undecided),
        pack_planes(planes).reshape(-1),
        low.reshape(-1),
    )


def decode(streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
    """Write the words of a segment into `out`, (blocks, rows, width), strided or not.

    streams: as `encode` gives them, of lengths that `lengths_fit` allows. Raises CorruptFrame if
    they contradict each other, or hold what `encode` would not have written.
    """
    blocks, rows, width = out.shape
    values = rows * width
    base, shapes, second, levels, patches, planes, low = streams
    shape = unpack_shapes(shapes.reshape(blocks, SHAPE_BITS, -1), width)
    base = base.reshape(blocks, width)
    if max(base.max(), patches.max(initial=0)) > fmt.exponent_max:
        raise CorruptFrame("An exponent lies outside the range of its dtype.")
    packed = planes.reshape(blocks, 1 + fmt.extra_bits, plane_bytes(values))
    if not planes_clean(packed, values):
        raise CorruptFrame("The bit planes hold bits behind their last value.")
    bits = np.unpackbits(packed, axis=2, count=values, bitorder="little")
    first = bits[:, 0].reshape(-1)
    code = 2 * first
    flat = np.broadcast_to(((shape & STEEP) == 0)[:, None, :], out.shape).reshape(-1)
    has_second = np.flatnonzero(flat | first.view(bool))
    code[has_second] += unpack(second, len(has_second), "second bits")
    patched = climb(code, levels)
    if len(patched) != len(patches):
        raise CorruptFrame("The patches are not as many as the codes ask for.")
    tables = exponents_of_codes(base, shape, fmt.exponent_max)
    # What is taken for a patch is a placeholder: they are written below.
    code = np.minimum(code, CODES - 1).reshape(1, *out.shape)
    exponent = np.take_along_axis(tables[:, :, None, :], code, axis=0)[0]
    exponent.reshape(-1)[patched] = patches
    extra = [bits[:, 1 + i].reshape(out.shape) for i in range(fmt.extra_bits)]
    join(exponent, low, extra, out, fmt)


def exponents_of_codes(base: np.ndarray, shape: np.ndarray, exponent_max: int) -> np.ndarray:
    """The exponent of each code in each channel, uint8 (codes, blocks, width).

    base, shape: uint8 (blocks, width). Exponents are modulo exponent_max + 1.
    """
    distances = DISTANCES.view(np.uint8).T[:, shape]
    exponents: np.ndarray = (base + distances) & np.uint8(exponent_max)
    return exponents


def climb(code: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Raise the codes, uint8, that go on by their levels; return the indices of the patches.

    Raises CorruptFrame if `levels` is longer or shorter than the codes demand.
    """
    undecided = np.flatnonzero(code == np.uint8(FIRST_LEVEL))
    position = 0
    for level in range(LEVELS):
        end = position + plane_bytes(len(undecided))
        further = unpack(levels[position:end], len(undecided), "levels").view(bool)
        undecided = undecided[further]
        code[undecided] = FIRST_LEVEL + 1 + level
        position = end
    if position != len(levels):
        raise CorruptFrame("The levels are longer than the codes ask for.")
    return undecided


def pick(values: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """The values where flags are set, as one axis: by index, which no pattern of flags slows."""
    picked: np.ndarray = values.reshape(-1)[np.flatnonzero(flags)]
    return picked


def pack(flags: np.ndarray) -> np.ndarray:
    """Flags as bits, least significant first, the last byte filled up with zeros."""
    return np.packbits(flags, bitorder="little")


def unpack(packed: np.ndarray, count: int, what: str) -> np.ndarray:
    """The bits, uint8, 0 or 1, of a string of exactly `count`; else CorruptFrame."""
    if len(packed) != plane_bytes(count) or not planes_clean(packed, count):
        raise CorruptFrame(f"The {what} are not as many as the codes ask for.")
    return np.unpackbits(packed, count=count, bitorder="little")


def unpack_shapes(packed: np.ndarray, width: int) -> np.ndarray:
    """Shapes, uint8 (blocks, width), of their bits, uint8 (blocks, 2, ceil(width / 8))."""
    if not planes_clean(packed, width):
        raise CorruptFrame("The shapes hold bits behind their last channel.")
    bits = np.unpackbits(packed, axis=2, count=width, bitorder="little")
    shape: np.ndarray = bits[:, 0] + 2 * bits[:, 1]
    return shape


def choose(exponent: np.ndarray, exponent_max: int) -> tuple[np.ndarray, np.ndarray]:
    """Base and shape of each channel, uint8 (blocks, width), for exponents (blocks, rows, width).

    The pair that saves most over patches, by the counts described above; among equals the lower
    shape, then the lower base. Integers throughout: the same on every machine.
    """
    middle = middles(exponent)
    counts = count_around(exponent, middle, exponent_max).astype(np.uint16)
    savings = np.stack([score(counts, shape) for shape in range(SHAPES)], axis=2)
    best = savings.reshape(*middle.shape, -1).argmax(axis=2)
    shape, candidate = np.divmod(best, CANDIDATES)
    base = (middle + candidate + LOWEST) & exponent_max
    return base.astype(np.uint8), shape.astype(np.uint8)


def middles(exponent: np.ndarray) -> np.ndarray:
    """The median, uint8 (blocks, width), of at most 16 rows of each block; of two, the higher."""
    few = exponent[:, :: -(-exponent.shape[1] // MIDDLE_ROWS)]
    half = few.shape[1] // 2
    median: np.ndarray = np.partition(few, half, axis=1)[:, half]
    return median


def count_around(exponent: np.ndarray, middle: np.ndarray, exponent_max: int) -> np.ndarray:
    """How often a channel holds the exponents around its middle: uint8 (blocks, width, COUNTS).

    The first count is of middle + LOWEST - REACH_DOWN, the last of middle + HIGHEST + REACH_UP.
    """
    counted = exponent[:, :: -(-exponent.shape[1] // COUNTED_ROWS)]
    blocks, _, width = counted.shape
    size = exponent_max + 1
    channel = np.arange(blocks * width).reshape(blocks, 1, width)
    keys = (channel * size + counted).reshape(-1)
    histogram = np.bincount(keys, minlength=blocks * width * size).reshape(blocks, width, size)
    offset = np.arange(LOWEST - REACH_DOWN, HIGHEST + REACH_UP + 1)
    near = np.take_along_axis(histogram, (middle[:, :, None] + offset) & exponent_max, axis=2)
    return np.minimum(near, 255).astype(np.uint8)


def score(counts: np.ndarray, shape: int) -> np.ndarray:
    """Bits that a shape saves over patches, uint16 (blocks, width, CANDIDATES), for each base."""
    saved = np.zeros((*counts.shape[:2], CANDIDATES), np.uint16)
    for distance, saving in zip(DISTANCES[shape], SAVINGS[shape], strict=True):
        start = REACH_DOWN + int(distance)
        saved += counts[:, :, start : start + CANDIDATES] * saving
    return saved
