"""The container: a checked header, a table of stream lengths, then the streams.

docs/format.md is the specification. Everything is little endian. Reading is strict: every length
is derived from the header or compared with it before anything is allocated, so that a header that
claims more than the blob holds costs nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash

from gaac.errors import CorruptFrame, UnsupportedFrame
from gaac.header import PREFIX_BYTES, Header, Segment, read_header
from gaac.levels.base import Level
from gaac.repeats import MAX_ROWS

MAGIC = b"GAAC"
VERSION = 1
START = MAGIC + bytes([VERSION, 0, 0, 0])
PREFIX = struct.Struct("<8sQ")  # START, and the checksum of everything behind these 16 bytes
ALIGN = 64
ENTRY_BYTES = 4

Stream = np.ndarray  # uint8, one axis

# A table entry, by the number of its streams: the level and the unique rows, then the lengths.
_ENTRIES = [struct.Struct(f"<HH{streams}I") for streams in range(16)]
_LEVEL_AND_ROWS = _ENTRIES[0]


@dataclass(frozen=True)
class FrameInfo:
    """What a blob holds, read from its header: sizes in bytes, streams as name -> bytes."""

    level: int
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    streams: dict[str, int] = field(default_factory=dict)


class Coded(NamedTuple):
    """One segment as a frame holds it.

    unique_rows: 0, or how many rows of each block are coded; then `repeats` comes before the
    streams of the level.
    """

    level: int
    unique_rows: int
    streams: Sequence[Stream]


def store(header: Header, content: np.ndarray) -> bytes:
    """The blob that holds the content as it is."""
    return _seal(header.stored, [np.ascontiguousarray(content).reshape(-1).view(np.uint8)])


def pack(header: Header, pieces: Sequence[Coded], tail: Stream) -> bytes | None:
    """The blob of coded segments; None where it would not be shorter than the stored content."""
    parts = [*_pack_segments(header, pieces), tail]
    if header.size + sum(map(len, parts)) >= header.stored.size + header.raw_bytes:
        return None
    return _seal(header, parts)


def _seal(header: Header, parts: Sequence[Any]) -> bytes:
    """Join a header and the parts behind it into a blob, with the checksum over all of it.

    parts: bytes, or uint8 arrays of one axis without gaps.
    """
    digest = xxhash.xxh3_64(header.packed)
    for part in parts:
        digest.update(part)
    return b"".join([PREFIX.pack(START, digest.intdigest()), header.packed, *parts])


def _pack_segments(header: Header, pieces: Sequence[Coded]) -> list[Stream | bytes]:
    """The parts behind the header: the table, then each segment at a multiple of 64 bytes."""
    lengths = [[len(stream) for stream in piece.streams] for piece in pieces]
    table = b"".join(
        _ENTRIES[len(row)].pack(piece.level, piece.unique_rows, *row)
        for piece, row in zip(pieces, lengths, strict=True)
    )
    parts: list[Stream | bytes] = [table]
    position = header.size + len(table)
    for piece, row in zip(pieces, lengths, strict=True):
        padding = -position % ALIGN
        parts.append(bytes(padding))
        parts.extend(piece.streams)
        position += padding + sum(row)
    return parts


def unseal(blob: Stream) -> Header:
    """Read and check the header of a blob given as uint8.

    Raises CorruptFrame if the checksum or any field is wrong, UnsupportedFrame if the blob is
    intact but of another version, or of a dtype or flag that this version does not know.
    """
    view = blob.data
    if len(view) < PREFIX_BYTES:
        raise CorruptFrame("This is not a gaac blob: it is shorter than any.")
    start, checksum = PREFIX.unpack_from(view)
    if start[:4] != MAGIC:
        raise CorruptFrame("This is not a gaac blob: it does not begin as every blob does.")
    if checksum != xxhash.xxh3_64_intdigest(view[PREFIX_BYTES:]):
        raise CorruptFrame("The checksum does not match: the blob was damaged, cut or extended.")
    if start[4] != VERSION:
        raise UnsupportedFrame(
            f"The blob has format version {start[4]}, this gaac reads {VERSION}: update gaac."
        )
    if start != START:
        raise CorruptFrame("The header contradicts itself: a reserved byte is not zero.")
    return read_header(view)


def read_segments(
    header: Header, blob: Stream, levels: Mapping[int, Level]
) -> tuple[list[tuple[Segment, Coded]], Stream]:
    """The segments of a coded frame and the bytes behind them, all as views of the blob.

    Raises CorruptFrame unless the table, the shape and the length of the blob agree.
    """
    view = blob.data
    # A segment takes an entry of two words at least, and starts at a multiple of 64 of its own.
    room = len(view) - header.size + ALIGN
    if not header.raw_bytes or header.segment_count * (2 * ENTRY_BYTES + ALIGN) > room:
        raise CorruptFrame("The header asks for segments that the blob has no room for.")
    position = header.size
    entries = []
    for segment in header.segments:
        entry = _read_entry(header, view, position, segment, levels)
        position += ENTRY_BYTES * (1 + len(entry[2]))
        entries.append((segment, *entry))
    pieces = []
    for segment, level, unique_rows, lengths in entries:
        start = position + -position % ALIGN
        if view[position:start] != bytes(start - position):
            raise CorruptFrame("The padding before a segment is missing or not zero.")
        ends = list(accumulate(lengths, initial=start))
        position = ends[-1]
        if position > len(view):
            raise CorruptFrame("The blob ends before its last stream does.")
        streams = [blob[a:b] for a, b in pairwise(ends)]
        pieces.append((segment, Coded(level, unique_rows, streams)))
    if len(view) - position != header.tail_bytes:
        raise CorruptFrame("The blob goes on behind its last stream, or ends before it.")
    return pieces, blob[position:]


def _read_entry(
    header: Header, view: memoryview, position: int, segment: Segment, levels: Mapping[int, Level]
) -> tuple[int, int, tuple[int, ...]]:
    """The level, the unique rows and the lengths of the streams, all checked against the shape."""
    if position + ENTRY_BYTES > len(view):
        raise CorruptFrame("The blob ends inside its table of segments.")
    number, unique_rows = _LEVEL_AND_ROWS.unpack_from(view, position)
    level = levels.get(number)
    if level is None or number > header.level:
        raise CorruptFrame("A segment names a level that its frame does not allow.")
    blocks, rows, width = segment.shape
    entry = _ENTRIES[len(level.streams) + (unique_rows > 0)]
    if position + entry.size > len(view):
        raise CorruptFrame("The blob ends inside its table of segments.")
    lengths = entry.unpack_from(view, position)[2:]
    of_level = lengths
    if unique_rows:
        of_level = lengths[1:]
        if not (segment.has_one_block and unique_rows < rows <= MAX_ROWS and lengths[0] == rows):
            raise CorruptFrame("A segment repeats rows that it cannot have.")
    if not level.lengths_fit(of_level, (blocks, unique_rows or rows, width), header.format):
        raise CorruptFrame("The streams of a segment do not have the lengths it demands.")
    return number, unique_rows, lengths
