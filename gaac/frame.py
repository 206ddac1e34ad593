"""The container: a checked header, a table of stream lengths, then the streams.

docs/format.md is the specification. Everything is little endian. Reading is strict: every length
is derived from the header or compared with it before anything is allocated, so that a header that
claims more than the blob holds costs nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import xxhash

from gaac.errors import CorruptFrame, UnsupportedFrame
from gaac.levels.base import Level, WordFormat

MAGIC = b"GAAC"
VERSION = 1
FIXED = struct.Struct("<4sBBBBBBHIII")  # up to the checksum; see docs/format.md
CHECKSUM = struct.Struct("<Q")
FIXED_BYTES = FIXED.size + CHECKSUM.size
ALIGN = 64
MAX_NDIM = 8
MAX_RAW_BYTES = 2**62

FLAG_BYTES = 1  # the content is a run of bytes, the shape its length
FLAG_STORED = 2  # the payload is the content itself: it did not shrink, or level 0 was asked for
FLAG_FLAT = 4  # the words are cut into rows of `width` without regard to the shape
KNOWN_FLAGS = FLAG_BYTES | FLAG_STORED | FLAG_FLAT

DTYPES = {1: "float16", 2: "bfloat16"}
DTYPE_CODES = {name: code for code, name in DTYPES.items()}

Stream = np.ndarray  # uint8, one axis


@dataclass(frozen=True)
class FrameInfo:
    """What a blob holds, read from its header: sizes in bytes, streams as name -> bytes."""

    level: int
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    streams: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """One piece of the content coded by itself: a rectangle of matrices by tokens.

    `matrices` and `tokens` are half-open ranges; the tokens are cut into `blocks` blocks of `rows`
    rows per matrix, ordered by matrix, then by token.
    """

    matrix_start: int
    matrix_stop: int
    token_start: int
    token_stop: int
    rows: int
    width: int

    @property
    def blocks(self) -> int:
        tokens = self.token_stop - self.token_start
        return (self.matrix_stop - self.matrix_start) * (tokens // self.rows)

    @property
    def values(self) -> int:
        return self.blocks * self.rows * self.width


@dataclass(frozen=True)
class Header:
    """The header of a frame, and the geometry that follows from it."""

    level: int
    dtype: str
    flags: int
    shape: tuple[int, ...]
    width: int
    block_rows: int
    segment_blocks: int
    segment_matrices: int

    @property
    def raw_bytes(self) -> int:
        return math.prod(self.shape) * (1 if self.flags & FLAG_BYTES else 2)

    @property
    def matrices(self) -> int:
        return 1 if self.flags & FLAG_FLAT else math.prod(self.shape[:-2])

    @property
    def tokens(self) -> int:
        return self.raw_bytes // 2 // self.width if self.flags & FLAG_FLAT else self.shape[-2]

    @property
    def tail_bytes(self) -> int:
        """Bytes behind the last whole row of a flat frame."""
        return self.raw_bytes - 2 * self.matrices * self.tokens * self.width

    @property
    def segment_count(self) -> int:
        per_column = -(-self.matrices // self.segment_matrices)
        full, short = divmod(self.tokens, self.block_rows)
        return per_column * (-(-full // self.segment_blocks) + (short > 0))

    def segments(self) -> Iterator[Segment]:
        """The segments in the order in which the frame holds them."""
        whole = self.tokens - self.tokens % self.block_rows
        step = self.block_rows * self.segment_blocks
        for start in range(0, whole, step):
            yield from self._column(start, min(start + step, whole), self.block_rows)
        if whole < self.tokens:
            yield from self._column(whole, self.tokens, self.tokens - whole)

    def _column(self, start: int, stop: int, rows: int) -> Iterator[Segment]:
        for matrix in range(0, self.matrices, self.segment_matrices):
            last = min(matrix + self.segment_matrices, self.matrices)
            yield Segment(matrix, last, start, stop, rows, self.width)

    def pack(self) -> bytes:
        """The bytes before the checksum."""
        return FIXED.pack(
            MAGIC,
            VERSION,
            self.level,
            DTYPE_CODES[self.dtype],
            self.flags,
            len(self.shape),
            0,
            self.block_rows,
            self.width,
            self.segment_blocks,
            self.segment_matrices,
        )

    def pack_shape(self) -> bytes:
        return struct.pack(f"<{len(self.shape)}Q", *self.shape)

    @property
    def header_bytes(self) -> int:
        return FIXED_BYTES + 8 * len(self.shape)


def padding(position: int) -> int:
    """Zero bytes needed behind `position` to reach the next multiple of 64."""
    return -position % ALIGN


def seal(header: Header, parts: Sequence[Stream]) -> bytes:
    """Join a header and the parts behind it into a blob, with the checksum over all of it."""
    fixed, shape = header.pack(), header.pack_shape()
    digest = xxhash.xxh64(fixed)
    digest.update(shape)
    views = [part.data for part in parts]
    for view in views:
        digest.update(view)
    return b"".join([fixed, CHECKSUM.pack(digest.intdigest()), shape, *views])


def unseal(blob: Stream) -> Header:
    """Read and check the header of a blob given as uint8.

    Raises CorruptFrame if the checksum or any field is wrong, UnsupportedFrame if the blob is
    intact but of another version, or of a dtype or flag that this version does not know.
    """
    view = blob.data
    if len(view) < FIXED_BYTES or view[:4] != MAGIC:
        raise CorruptFrame("This is not a gaac blob: the header that every blob has is missing.")
    digest = xxhash.xxh64(view[: FIXED.size])
    digest.update(view[FIXED_BYTES:])
    if CHECKSUM.unpack_from(view, FIXED.size)[0] != digest.intdigest():
        raise CorruptFrame("The checksum does not match: the blob was damaged, cut or extended.")
    _, version, level, dtype, flags, ndim, reserved, *numbers = FIXED.unpack_from(view)
    if version != VERSION:
        raise UnsupportedFrame(
            f"The blob has format version {version}, this gaac reads {VERSION}: update gaac."
        )
    if dtype not in DTYPES or flags & ~KNOWN_FLAGS:
        raise UnsupportedFrame("The blob has a dtype or flag unknown to this gaac: update gaac.")
    if not 1 <= ndim <= MAX_NDIM or reserved or len(blob) < FIXED_BYTES + 8 * ndim:
        raise CorruptFrame("The header contradicts itself: its shape is missing or out of range.")
    shape = struct.unpack_from(f"<{ndim}Q", view, FIXED_BYTES)
    block_rows, width, segment_blocks, segment_matrices = numbers
    header = Header(
        level, DTYPES[dtype], flags, shape, width, block_rows, segment_blocks, segment_matrices
    )
    _check(header)
    return header


def _check(header: Header) -> None:
    """Refuse a header whose fields contradict each other."""
    flat = bool(header.flags & FLAG_FLAT)
    ok = (
        math.prod(max(n, 1) for n in header.shape) <= MAX_RAW_BYTES // 2
        and header.block_rows > 0
        and header.width > 0
        and header.segment_blocks > 0
        and header.segment_matrices > 0
        and (flat or not header.flags & FLAG_BYTES)
        and (len(header.shape) == 1 or not header.flags & FLAG_BYTES)
        and (flat or (len(header.shape) >= 2 and header.shape[-1] == header.width))
    )
    if not ok:
        raise CorruptFrame("The header contradicts itself: its shape and its blocks do not fit.")


@dataclass(frozen=True)
class Piece:
    """One segment as it lies in a blob: how it is coded, and its streams in the level's order."""

    segment: Segment
    level: int
    streams: tuple[Stream, ...]


def join_pieces(header: Header, pieces: Sequence[tuple[int, Sequence[Stream]]]) -> list[Stream]:
    """The parts behind the shape: the table, then each segment at a multiple of 64 bytes."""
    table = b"".join(
        struct.pack(f"<{1 + len(streams)}I", level, *(len(stream) for stream in streams))
        for level, streams in pieces
    )
    parts: list[Stream] = [np.frombuffer(table, np.uint8)]
    position = header.header_bytes + len(table)
    for _, streams in pieces:
        parts.append(np.zeros(padding(position), np.uint8))
        parts.extend(streams)
        position += len(parts[-1 - len(streams)]) + sum(len(stream) for stream in streams)
    return parts


def split_pieces(
    header: Header, blob: Stream, levels: Mapping[int, Level], fmt: WordFormat
) -> tuple[list[Piece], Stream]:
    """The segments of a coded frame and the bytes behind them, all as views of the blob.

    Raises CorruptFrame unless the table, the shape and the length of the blob agree.
    """
    position = header.header_bytes
    if not header.raw_bytes or header.segment_count * 8 > len(blob):
        raise CorruptFrame("The header asks for segments that the blob has no room for.")
    entries: list[tuple[Segment, int, tuple[int, ...]]] = []
    for segment in header.segments():
        number = _read_u32(blob, position, 1)[0]
        if number not in (0, header.level):
            raise CorruptFrame("A segment names a level that its frame does not.")
        level = levels[number]
        lengths = _read_u32(blob, position + 4, len(level.streams))
        shape = (segment.blocks, segment.rows, segment.width)
        if not level.lengths_fit(lengths, shape, fmt):
            raise CorruptFrame("The streams of a segment do not have the lengths it demands.")
        entries.append((segment, number, lengths))
        position += 4 + 4 * len(lengths)
    pieces = []
    for segment, number, lengths in entries:
        start = position + padding(position)
        if start > len(blob) or blob[position:start].any():
            raise CorruptFrame("The padding before a segment is missing or not zero.")
        cuts = [start, *(start + end for end in accumulate(lengths))]
        position = cuts[-1]
        if position > len(blob):
            raise CorruptFrame("The blob ends before its last stream does.")
        streams = tuple(blob[a:b] for a, b in pairwise(cuts))
        pieces.append(Piece(segment, number, streams))
    if len(blob) - position != header.tail_bytes:
        raise CorruptFrame("The blob goes on behind its last stream, or ends before it.")
    return pieces, blob[position:]


def _read_u32(blob: Stream, position: int, count: int) -> tuple[int, ...]:
    if position + 4 * count > len(blob):
        raise CorruptFrame("The blob ends inside its table of segments.")
    return struct.unpack_from(f"<{count}I", blob.data, position)
