"""Ways to damage a blob: at random, or knowing the format, with the checksum made right again.

Everything follows from the random generator that is passed in, so a case can be made again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from gaac.kernels.reference import STREAM_COUNT

CHECKED_FROM = 16  # the checksum, at offset 8, covers every byte from here to the end
SHAPE_AT = 32

# (offset, format) of the header's fields from the level to the width; see docs/format.md.
FIELDS = [
    *((16, "<B"), (17, "<B"), (18, "<B"), (19, "<B")),
    *((20, "<H"), (22, "<H"), (24, "<H"), (26, "<H"), (28, "<I")),
]
LARGE = [2**8 - 1, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**62, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Sample:
    """An intact blob, and where its parts lie.

    table: offset of each u32 of the table, segment by segment. streams: (start, stop) of each
    stream, in the order of the blob. Both are empty for a stored blob.
    """

    name: str
    blob: bytes
    table: Sequence[int] = ()
    lengths: Sequence[int] = ()
    streams: Sequence[tuple[int, int]] = ()

    @property
    def ndim(self) -> int:
        return self.blob[19]


Mutation = Callable[[np.random.Generator, Sample, Sequence[Sample]], bytes]


def sample(name: str, blob: bytes) -> Sample:
    """Read where the parts of an intact blob lie, as docs/format.md says."""
    if blob[18] & 2:
        return Sample(name, blob)
    (pairs,) = struct.unpack_from("<H", blob, 26)
    position = SHAPE_AT + 8 * blob[19] + 2 * pairs
    table, lengths, rows = [], [], []
    for _ in range(_segment_count(blob)):
        level, unique_rows = struct.unpack_from("<HH", blob, position)
        count = STREAM_COUNT[level] + (unique_rows > 0)
        row = struct.unpack_from(f"<{count}I", blob, position + 4)
        table.append(position)
        lengths += [position + 4 * (1 + index) for index in range(count)]
        position += 4 * (1 + count)
        rows.append(row)
    streams = []
    for row in rows:
        position += -position % 64
        for length in row:
            streams.append((position, position + length))
            position += length
    return Sample(name, blob, table, lengths, streams)


def _segment_count(blob: bytes) -> int:
    flags, ndim, dtype = blob[18], blob[19], blob[17]
    block_rows, segment_blocks, segment_matrices = struct.unpack_from("<HHH", blob, 20)
    (width,) = struct.unpack_from("<I", blob, 28)
    shape = struct.unpack_from(f"<{ndim}Q", blob, SHAPE_AT)
    values = math.prod(shape) // (2 if flags & 1 and dtype in (1, 2) else 1)
    matrices, tokens = (1, values // width) if flags & 4 else (math.prod(shape[:-2]), shape[-2])
    full, short = divmod(tokens, block_rows)
    return -(-matrices // segment_matrices) * (-(-full // segment_blocks) + (short > 0))


def reseal(blob: bytes) -> bytes:
    """The blob with the right checksum, as a malicious writer would make it."""
    if len(blob) < CHECKED_FROM:
        return blob
    digest = xxhash.xxh3_64_intdigest(blob[CHECKED_FROM:])
    return blob[:8] + struct.pack("<Q", digest) + blob[CHECKED_FROM:]


def flip_bits(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    forged = bytearray(chosen.blob)
    for _flip in range(int(rng.integers(1, 9))):
        forged[_below(rng, len(forged))] ^= 1 << _below(rng, 8)
    return bytes(forged)


def write_bytes(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    """A run of bytes overwritten with noise, zeros or ones."""
    forged = bytearray(chosen.blob)
    start = _below(rng, len(forged))
    length = min(1 + _below(rng, 64), len(forged) - start)
    forged[start : start + length] = _filling(rng, length)
    return bytes(forged)


def truncate(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    return chosen.blob[: _below(rng, len(chosen.blob))]


def extend(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    return chosen.blob + _filling(rng, 1 + _below(rng, 130))


def splice(rng: np.random.Generator, chosen: Sample, others: Sequence[Sample]) -> bytes:
    """The start of one blob and the end of another, cut at the same place or anywhere."""
    other = others[_below(rng, len(others))].blob
    cut = _below(rng, min(len(chosen.blob), len(other)))
    resume = cut if rng.random() < 0.5 else _below(rng, len(other))
    return chosen.blob[:cut] + other[resume:]


def swap_parts(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    """Two parts of equal length exchanged, each within a stream where there are any."""
    spans = [span for span in chosen.streams if span[0] < span[1]] or [(0, len(chosen.blob))]
    one, two = (spans[_below(rng, len(spans))] for _ in range(2))
    length = 1 + _below(rng, min(one[1] - one[0], two[1] - two[0]))
    first = one[0] + _below(rng, one[1] - one[0] - length + 1)
    second = two[0] + _below(rng, two[1] - two[0] - length + 1)
    forged = bytearray(chosen.blob)
    forged[first : first + length] = chosen.blob[second : second + length]
    forged[second : second + length] = chosen.blob[first : first + length]
    return bytes(forged)


def edit_table(rng: np.random.Generator, chosen: Sample, others: Sequence[Sample]) -> bytes:
    """A word of the table changed: by a little, to something large, or moved to its neighbour."""
    if not chosen.table:
        return edit_header(rng, chosen, others)
    words = [*chosen.table, *chosen.lengths]
    at = words[_below(rng, len(words))]
    (value,) = struct.unpack_from("<I", chosen.blob, at)
    step = int(rng.choice([1, 2, 4, 8, 64, 1 << 16]))
    forged = bytearray(chosen.blob)
    if rng.random() < 0.4 and at + 4 in chosen.lengths:
        (neighbour,) = struct.unpack_from("<I", chosen.blob, at + 4)
        moved = min(step, value)
        struct.pack_into("<II", forged, at, value - moved, (neighbour + moved) % 2**32)
    else:
        choices = [0, value + step, value - step, int(rng.choice(LARGE[:4])), 2 * value]
        struct.pack_into("<I", forged, at, choices[_below(rng, len(choices))] % 2**32)
    return bytes(forged)


def resize_stream(rng: np.random.Generator, chosen: Sample, others: Sequence[Sample]) -> bytes:
    """Bytes put into a stream or taken out of it, with its length in the table made to fit."""
    if not chosen.streams:
        return edit_shape(rng, chosen, others)
    number = _below(rng, len(chosen.streams))
    start, stop = chosen.streams[number]
    place = start + _below(rng, stop - start + 1)
    forged = bytearray(chosen.blob)
    if rng.random() < 0.5:
        forged[place:place] = added = _filling(rng, 1 + _below(rng, 70))
        change = len(added)
    else:
        change = -min(1 + _below(rng, 70), stop - place)
        del forged[place : place - change]
    struct.pack_into("<I", forged, chosen.lengths[number], stop - start + change)
    return bytes(forged)


def edit_stream(rng: np.random.Generator, chosen: Sample, others: Sequence[Sample]) -> bytes:
    """A stream chosen evenly, so that short ones are hit too, overwritten in part or as a whole."""
    spans = [span for span in chosen.streams if span[0] < span[1]]
    if not spans:
        return write_bytes(rng, chosen, others)
    start, stop = spans[_below(rng, len(spans))]
    if rng.random() < 0.7:
        start += _below(rng, stop - start)
        stop = min(stop, start + 1 + _below(rng, 16))
    forged = bytearray(chosen.blob)
    forged[start:stop] = _filling(rng, stop - start)
    return bytes(forged)


def edit_header(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    """A field of the header changed: by one, to something small or to something large."""
    offset, fmt = FIELDS[_below(rng, len(FIELDS))]
    (value,) = struct.unpack_from(fmt, chosen.blob, offset)
    limit = 256 ** struct.calcsize(fmt)
    choices = [value + 1, value - 1, 2 * value, value // 2, value ^ 1 << _below(rng, 8)]
    choices += [0, 1, 5, 256, limit - 1, _below(rng, min(limit, 300))]
    forged = bytearray(chosen.blob)
    struct.pack_into(fmt, forged, offset, choices[_below(rng, len(choices))] % limit)
    return bytes(forged)


def edit_shape(rng: np.random.Generator, chosen: Sample, _: Sequence[Sample]) -> bytes:
    """Axes made huge, small or zero, or exchanged, or a factor moved from one to another."""
    shape = list(struct.unpack_from(f"<{chosen.ndim}Q", chosen.blob, SHAPE_AT))
    one, two = _below(rng, len(shape)), _below(rng, len(shape))
    kind = _below(rng, 4)
    if kind == 0:
        shape[one] = int(rng.choice(np.array(LARGE, np.uint64)))
    elif kind == 1:
        shape[one] = max(shape[one] + int(rng.integers(-2, 3)), 0)
    elif kind == 2:
        shape[one], shape[two] = shape[two], shape[one]
    else:
        factor = 1 << _below(rng, 60)
        shape[one], shape[two] = shape[one] * factor, max(shape[two] // factor, _below(rng, 2))
    forged = bytearray(chosen.blob)
    struct.pack_into(f"<{chosen.ndim}Q", forged, SHAPE_AT, *(axis % 2**64 for axis in shape))
    return bytes(forged)


MUTATIONS: Sequence[Mutation] = (
    flip_bits,
    write_bytes,
    truncate,
    extend,
    splice,
    swap_parts,
    edit_table,
    resize_stream,
    edit_stream,
    edit_header,
    edit_shape,
)


def _below(rng: np.random.Generator, bound: int) -> int:
    return int(rng.integers(bound))


def _filling(rng: np.random.Generator, length: int) -> bytes:
    kind = _below(rng, 4)
    if kind == 0:
        return bytes(length)
    return b"\xff" * length if kind == 1 else rng.bytes(length)
