"""The header of a frame: its fields, and how they cut the content into segments.

docs/format.md is the specification. A header is parsed once and kept: KV caches open thousands of
blobs whose headers are equal but for the checksum, which lies in the prefix before them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from gaac.errors import CorruptFrame, UnsupportedFrame
from gaac.levels.base import FORMATS, Hints, WordFormat
from gaac.rope import Rope

PREFIX_BYTES = 16  # magic, version, checksum: what frame.py reads
FIELDS = struct.Struct("<BBBBHHHHI")
FIXED_BYTES = PREFIX_BYTES + FIELDS.size
NDIM_AT, ROPE_PAIRS_AT = 19, 26

MAX_NDIM = 8
MAX_RAW_BYTES = 2**62
MAX_BLOCKS = 4096  # of a segment: readers keep a table for each
MAX_WIDTH = 65536  # that the writer uses; a header may hold more
BLOCK_ROWS = 256
FLAT_WIDTH = 64
SEGMENT_VALUES = 1 << 18  # larger: fewer calls for as many bytes; smaller: work for more threads

FLAG_BYTES = 1  # the content is a run of bytes, the shape its length
FLAG_STORED = 2  # the payload is the content itself: it did not shrink, or level 0 was asked for
FLAG_FLAT = 4  # the words are cut into rows of `width` without regard to the shape
FLAG_INTERLEAVED = 8  # the pairs of the rope hint are neighbours
KNOWN_FLAGS = FLAG_BYTES | FLAG_STORED | FLAG_FLAT | FLAG_INTERLEAVED

DTYPES = {1: "float16", 2: "bfloat16", 3: "float8_e4m3fn", 4: "float8_e5m2", 5: "int8"}
DTYPE_CODES = {name: code for code, name in DTYPES.items()}
VALUE_BYTES = {name: 2 if name.endswith("float16") else 1 for name in DTYPE_CODES}
ROPE_LEVEL = 5  # the one level that uses a rope hint

# Above these, geometry is worked out anew each time instead of being kept.
_KEPT_HEADERS = 64
_KEPT_SEGMENTS = 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the content coded by itself: a rectangle of matrices by tokens.

    shape: (blocks, rows, width). The tokens are cut into blocks of `rows` rows per matrix, ordered
    by matrix, then by token.
    """

    matrices: slice
    tokens: slice
    shape: tuple[int, int, int]

    @property
    def has_one_block(self) -> bool:
        """Whether each of its matrices has one block in it: what repeats are defined for."""
        return bool(self.tokens.stop - self.tokens.start == self.shape[1])


@dataclass(frozen=True, eq=False)
class Header:
    """The fields of a header, and the geometry that follows from them."""

    level: int
    dtype: str
    flags: int
    shape: tuple[int, ...]
    width: int
    block_rows: int
    segment_blocks: int
    segment_matrices: int
    rope: Rope | None = None

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of a word."""
        return VALUE_BYTES[self.dtype]

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.shape) * (1 if self.flags & FLAG_BYTES else self.value_bytes)

    @cached_property
    def rows_shape(self) -> tuple[int, int, int]:
        """The words that lie in rows: (matrices, tokens, width)."""
        if self.flags & FLAG_FLAT:
            return 1, self.raw_bytes // self.value_bytes // self.width, self.width
        return math.prod(self.shape[:-2]), self.shape[-2], self.width

    @cached_property
    def tail_bytes(self) -> int:
        """Bytes behind the last whole row of a flat frame."""
        return self.raw_bytes - self.value_bytes * math.prod(self.rows_shape)

    @cached_property
    def format(self) -> WordFormat:
        """The split of a word; KeyError for int8, which is always stored."""
        return FORMATS[self.dtype]

    @cached_property
    def hints(self) -> Hints:
        """What the frame itself tells the levels."""
        return Hints(self.rope)

    @cached_property
    def segment_count(self) -> int:
        matrices, tokens, _ = self.rows_shape
        full, short = divmod(tokens, self.block_rows)
        per_column = -(-matrices // self.segment_matrices)
        return per_column * (-(-full // self.segment_blocks) + (short > 0))

    @property
    def segments(self) -> Iterable[Segment]:
        """The segments in the order in which the frame holds them."""
        return self._kept_segments if self.segment_count <= _KEPT_SEGMENTS else self._cut()

    @cached_property
    def _kept_segments(self) -> tuple[Segment, ...]:
        return tuple(self._cut())

    def _cut(self) -> Iterator[Segment]:
        _, tokens, _ = self.rows_shape
        whole = tokens - tokens % self.block_rows
        step = self.block_rows * self.segment_blocks
        for start in range(0, whole, step):
            yield from self._column(start, min(start + step, whole), self.block_rows)
        if whole < tokens:
            yield from self._column(whole, tokens, tokens - whole)

    def _column(self, start: int, stop: int, rows: int) -> Iterator[Segment]:
        matrices = self.rows_shape[0]
        for matrix in range(0, matrices, self.segment_matrices):
            last = min(matrix + self.segment_matrices, matrices)
            blocks = (last - matrix) * ((stop - start) // rows)
            yield Segment(slice(matrix, last), slice(start, stop), (blocks, rows, self.width))

    @cached_property
    def packed(self) -> bytes:
        """The header from behind the prefix on."""
        pairs = 0 if self.rope is None else self.rope.turns.size
        interleaved = self.rope is not None and self.rope.interleaved
        fields = FIELDS.pack(
            self.level,
            DTYPE_CODES[self.dtype],
            self.flags | (FLAG_INTERLEAVED if interleaved else 0),
            len(self.shape),
            self.block_rows,
            self.segment_blocks,
            self.segment_matrices,
            pairs,
            self.width,
        )
        shape = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        turns = b"" if self.rope is None else self.rope.turns.astype("<u2").tobytes()
        return fields + shape + turns

    @cached_property
    def stored(self) -> Header:
        """The header of a frame that holds the same content as it is."""
        return replace(self, flags=self.flags | FLAG_STORED, rope=None)

    @cached_property
    def size(self) -> int:
        """Bytes of the header with its prefix."""
        return PREFIX_BYTES + len(self.packed)


def read_header(view: memoryview) -> Header:
    """The header of a blob whose prefix has been checked.

    Raises CorruptFrame if a field is wrong, UnsupportedFrame for a dtype or flag that this version
    does not know.
    """
    if len(view) < FIXED_BYTES:
        raise CorruptFrame("The blob ends inside its header.")
    pairs = view[ROPE_PAIRS_AT] | view[ROPE_PAIRS_AT + 1] << 8
    size = FIXED_BYTES + 8 * view[NDIM_AT] + 2 * pairs
    if size > len(view):
        raise CorruptFrame("The blob ends inside its header.")
    return _parse(bytes(view[PREFIX_BYTES:size]))


@lru_cache(_KEPT_HEADERS)
def _parse(packed: bytes) -> Header:
    fields = FIELDS.unpack_from(packed)
    level, dtype, flags, ndim, block_rows, segment_blocks, segment_matrices, pairs, width = fields
    if dtype not in DTYPES or flags & ~KNOWN_FLAGS:
        raise UnsupportedFrame("The blob has a dtype or flag unknown to this gaac: update gaac.")
    shape = struct.unpack_from(f"<{ndim}Q", packed, FIELDS.size)
    rope = None
    if pairs:
        turns = np.frombuffer(packed, "<u2", pairs, FIELDS.size + 8 * ndim)
        rope = Rope(turns.astype(np.uint16), bool(flags & FLAG_INTERLEAVED))
    elif flags & FLAG_INTERLEAVED:
        raise CorruptFrame("The header contradicts itself: it says how a hint lies that it lacks.")
    header = Header(
        level=level,
        dtype=DTYPES[dtype],
        flags=flags & ~FLAG_INTERLEAVED,
        shape=shape,
        width=width,
        block_rows=block_rows,
        segment_blocks=segment_blocks,
        segment_matrices=segment_matrices,
        rope=rope,
    )
    if not _agrees(header):
        raise CorruptFrame("The header contradicts itself: its fields do not fit together.")
    return header


def _agrees(header: Header) -> bool:
    """Whether the fields of a header can stand together."""
    flat, stored = header.flags & FLAG_FLAT, header.flags & FLAG_STORED
    shape, rope = header.shape, header.rope
    return bool(
        1 <= len(shape) <= MAX_NDIM
        and math.prod(max(n, 1) for n in shape) <= MAX_RAW_BYTES // 2
        and min(header.block_rows, header.segment_blocks, header.segment_matrices) > 0
        and header.segment_blocks * header.segment_matrices <= MAX_BLOCKS
        and header.width > 0
        and (not header.flags & FLAG_BYTES or (flat and len(shape) == 1))
        and (flat or (len(shape) >= 2 and shape[-1] == header.width))
        and (stored or (header.level > 0 and header.dtype in FORMATS))
        and (
            rope is None
            or (
                not (stored or flat)
                and header.level == ROPE_LEVEL
                and 2 * rope.turns.size <= header.width
            )
        )
    )


def is_coded(header: Header) -> bool:
    """Whether there is anything that the level of a planned header would code."""
    return header.level > 0 and header.dtype in FORMATS and header.raw_bytes > 0


@lru_cache(_KEPT_HEADERS)
def plan(
    shape: tuple[int, ...],
    dtype: str,
    level: int,
    *,
    row: int | None = None,
    one_block: bool = False,
) -> Header:
    """Choose how the content is cut into rows and segments.

    row: None for a tensor, whose rows are its last axis where there is one worth the name and 64
    values else; a number for bytes. one_block: keep each segment to one block of tokens, so that
    repeats may be used.
    """
    if row is not None:
        return _plan_segments(shape, dtype, level, FLAG_BYTES | FLAG_FLAT, row, one_block)
    if len(shape) == 1 or math.prod(shape) == 0 or shape[-1] > MAX_WIDTH:
        return _plan_segments(shape, dtype, level, FLAG_FLAT, FLAT_WIDTH, one_block)
    return _plan_segments(shape, dtype, level, 0, shape[-1], one_block)


def _plan_segments(
    shape: tuple[int, ...], dtype: str, level: int, flags: int, width: int, one_block: bool
) -> Header:
    """Segments of about SEGMENT_VALUES values, whose blocks lie evenly in the tensor.

    That is, several blocks of one matrix, one block of several matrices, or whole matrices: then
    a segment is a view of the tensor with one stride for its blocks, and nothing is copied.
    """
    trial = Header(level, dtype, flags, shape, width, BLOCK_ROWS, 1, 1)
    matrices, tokens, _ = trial.rows_shape
    full, short = divmod(tokens, BLOCK_ROWS)
    room = max(SEGMENT_VALUES // max(min(tokens, BLOCK_ROWS) * width, 1), 1)
    room = min(room, MAX_BLOCKS)
    blocks = 1 if one_block else max(min(full, room), 1)
    together = 1
    if blocks == 1 or (blocks == full and not short):
        together = max(min(matrices, room // blocks), 1)
    return Header(
        level,
        dtype,
        flags,
        shape,
        width,
        BLOCK_ROWS,
        blocks,
        together,
    )
