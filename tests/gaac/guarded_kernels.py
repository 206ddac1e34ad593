"""Run the kernels of levels 1, 2 and 3 between guard pages: python -m tests.gaac.guarded_kernels
LEVEL PATH.

Ends with "done", or by a signal at the first touch of memory outside an array.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import entropy_simd, packed_simd, tiered_simd
from gaac.levels import entropy, packed, tiered
from gaac.levels.base import FORMATS, Kernels
from tests.gaac import guarded

LEVELS = {1: (packed, packed_simd), 2: (tiered, tiered_simd), 3: (entropy, entropy_simd)}
SHAPES = [
    *((1, 1, 1), (1, 1, 7), (2, 3, 5), (1, 64, 64), (3, 65, 64), (1, 256, 64), (2, 70, 9)),
    *((1, 200, 80), (2, 130, 128), (1, 3, 511), (1, 33, 65), (1, 1, 4097), (2, 128, 8)),
    (1, 1024, 8),
]
OFFSETS, SECOND, THIRD, ESCAPES, PLANES, LOW = range(2, 8)  # of level 2


def words_of(shape: tuple[int, int, int], rng: np.random.Generator) -> Iterator[np.ndarray]:
    yield rng.integers(0, 65536, shape, dtype=np.uint16)
    yield (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    yield rng.normal(size=shape).astype(np.float16).view(np.uint16)
    yield np.zeros(shape, np.uint16)


def hostile(
    level: int, streams: list[np.ndarray], rng: np.random.Generator
) -> Iterator[list[np.ndarray]]:
    """Streams, one or all of them replaced, that ask for more, or other, than there is.

    At levels 1 and 2 the lengths are what the shape demands; at level 3 the kernels check them.
    """
    random = [rng.integers(0, 256, stream.size, dtype=np.uint8) for stream in streams]
    full = [np.full(stream.size, 255, np.uint8) for stream in streams]
    replaced = [random, full]
    if level == 3:
        replaced.append([stream[: len(stream) // 2] for stream in streams])
        replaced.append([np.append(stream, full[0]) for stream in streams])
    for made in replaced:
        yield made
        for stream in range(len(streams)):
            yield [made[i] if i == stream else part for i, part in enumerate(streams)]
    if level == 1:
        for escapes in (0, 1, 63, 64, 65):
            yield [*streams[:2], np.zeros(escapes, np.uint8), full[3], streams[4]]
    if level == 2:
        yield from endless(streams, full)


def endless(streams: list[np.ndarray], full: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Streams in which all values go on, as the offsets say, and the codes or escapes soon end."""
    tiles, values = len(streams[OFFSETS]) // 12, len(streams[LOW])
    string = np.full(2 * -(-values // 8), 255, np.uint8)
    starts = np.arange(tiles, dtype="<u4")[:, None] * np.uint32(values // tiles)
    none, whole = string[:0], string
    for second, third, reached in (
        (none, none, (1, 0, 0)),
        (string[:2], none, (1, 0, 0)),
        (whole, none, (1, 1, 0)),
        (whole, whole, (1, 1, 1)),
    ):
        made = [*streams[:SECOND], second, third, *streams[ESCAPES:]]
        made[OFFSETS] = (starts * np.array(reached, "<u4")).reshape(-1).view(np.uint8)
        front = sum(len(part) for part in made[:ESCAPES])
        made[ESCAPES], made[PLANES] = np.zeros(-front % 64, np.uint8), full[PLANES]
        yield made


def check(
    level: int, kernels: Kernels, dtype: str, words: np.ndarray, rng: np.random.Generator
) -> None:
    fmt = FORMATS[dtype]
    streams: list[np.ndarray] = []
    for source in guarded.copies(words):
        streams = [np.array(stream) for stream in kernels.encode(source, fmt)]
    for at_end in (True, False):
        placed = [guarded.copies(stream)[not at_end] for stream in streams]
        out = guarded.empty(words.shape, np.uint16, at_end)
        kernels.decode(placed, out, fmt)
        assert np.array_equal(out, words)
        for wrong in hostile(level, streams, rng):
            placed = [guarded.copies(stream)[not at_end] for stream in wrong]
            try:
                kernels.decode(placed, out, fmt)
            except CorruptFrame:
                continue


def main(level: int, path: str) -> None:
    module, compiled = LEVELS[level]
    compiled.np = guarded.Allocator()  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    for dtype in ("bfloat16", "float16"):
        kernels = module.kernels_of(path, dtype)
        for shape in SHAPES:
            for words in words_of(shape, rng):
                check(level, kernels, dtype, words, rng)
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
