"""Words to coded segments and back, each segment by itself and so by any number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaac import repeats
from gaac.frame import Coded
from gaac.header import Header, Segment
from gaac.levels.base import Hints
from gaac.levels.registry import REGISTRY, STORED
from gaac.pool import map_all

# The levels that may code a segment of a frame, best first: a level may decline one.
_CANDIDATES = {
    number: [REGISTRY[lower] for lower in sorted(REGISTRY, reverse=True) if 0 < lower <= number]
    for number in REGISTRY
}


def encode_segments(
    header: Header, words: np.ndarray, hints: Hints, *, seek_repeats: bool, threads: int
) -> list[Coded]:
    """Code words, (matrices, tokens, width) with any strides, as the header cuts them."""

    def encode(segment: Segment) -> Coded:
        cut = words[segment.matrices, segment.tokens]
        if seek_repeats and segment.has_one_block:
            found = repeats.find(cut)
            if found is not None:
                index, first_rows = found
                level, streams = _encode(header, cut[:, first_rows], hints)
                return Coded(level, len(first_rows), (index, *streams))
        level, streams = _encode(header, cut.reshape(segment.shape), hints)
        return Coded(level, 0, streams)

    return map_all(encode, list(header.segments), threads)


def _encode(header: Header, words: np.ndarray, hints: Hints) -> tuple[int, Sequence[np.ndarray]]:
    """The number of the level that codes (blocks, rows, width) words, and its streams."""
    for level in _CANDIDATES[header.level]:
        streams = level.encode(words, header.format, hints)
        if streams is not None:
            if sum(map(len, streams)) < words.nbytes:
                return level.number, streams
            break
    return STORED.number, STORED.encode(words, header.format, hints)


def decode_segments(
    header: Header, pieces: Sequence[tuple[Segment, Coded]], words: np.ndarray, *, threads: int
) -> None:
    """Write all segments into `words`, (matrices, tokens, width) with any strides.

    Raises CorruptFrame if the streams of a segment contradict each other.
    """

    def decode(piece: tuple[Segment, Coded]) -> None:
        segment, coded = piece
        cut = words[segment.matrices, segment.tokens]
        if coded.unique_rows:
            _decode_repeats(header, coded, cut)
        elif cut.shape == segment.shape:
            REGISTRY[coded.level].decode(coded.streams, cut, header.format, header.hints)
        else:
            blocks = cut.reshape(segment.shape)
            REGISTRY[coded.level].decode(coded.streams, blocks, header.format, header.hints)
            if not np.may_share_memory(blocks, cut):
                cut[...] = blocks.reshape(cut.shape)

    map_all(decode, pieces, threads)


def _decode_repeats(header: Header, coded: Coded, out: np.ndarray) -> None:
    """Write a segment of one block, (matrices, rows, width), some of whose rows are repeated."""
    index, *streams = coded.streams
    repeats.check(index, coded.unique_rows)
    unique = np.empty((out.shape[0], coded.unique_rows, out.shape[2]), out.dtype)
    REGISTRY[coded.level].decode(streams, unique, header.format, header.hints)
    np.take(unique, index, axis=1, out=out, mode="clip")
