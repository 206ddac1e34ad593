"""Packed pages: one layer's keys or values as attention reads them, without unpacking them first.

A page is a blob of one batch row's keys or values over some tokens. Where it is at level 1, or
stored raw, its *regions* say at which bytes each KV head's rows, bit planes and escapes lie, so
that a kernel finds them by itself. docs/format.md specifies the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gaac import codec
from gaac.errors import UnsupportedTensor
from gaac.frame import Coded
from gaac.header import FLAG_FLAT, FLAG_STORED, Header, Segment
from gaac.levels.base import plane_bytes
from gaac.levels.packed import TILE_ROWS

# What a region is: rows of words as they are, level 1, level 1 of rows that repeat, or rows of
# words that repeat.
RAW, PACKED, REPEATED, RAW_REPEATED = 0, 1, 2, 3

# The numbers that describe a region, in this order: `low` is the first row where the region is raw;
# `stride` lies between rows, or between bit planes. Places are bytes from the start of the payload
# in a page, addresses in a table; -1 where there is nothing.
FIELDS = ("kind", "rows", "low", "stride", "planes", "base", "offsets", "escapes", "repeats")
KIND, ROWS, LOW, STRIDE, PLANES, BASE, OFFSETS, ESCAPES, REPEATS = range(len(FIELDS))
PLACES = (LOW, PLANES, BASE, OFFSETS, ESCAPES, REPEATS)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_RAW_LEVEL, _PACKED_LEVEL = 0, 1


@dataclass(frozen=True, eq=False)
class Page:
    """One packed [1, kv_heads, tokens, head_dim] tensor. Nothing ever writes into it.

    payload: uint8, one axis, its storage exactly as long as the blob.
    """

    payload: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, blob: Any) -> Page:
        """A page of a blob that `gaac.encode` made of a [1, kv_heads, tokens, head_dim] tensor.

        blob: bytes-like, or a uint8 tensor, which is then kept and not copied.
        Raises CorruptFrame for a damaged blob, UnsupportedTensor for another shape or dtype.
        """
        info = codec.inspect(blob)
        if len(info.shape) != 4 or info.shape[0] != 1 or info.dtype not in _DTYPES:
            raise UnsupportedTensor(
                f"The blob holds {info.dtype} {info.shape}: a page is float16 or bfloat16, "
                "[1, kv_heads, tokens, head_dim]."
            )
        if not isinstance(blob, torch.Tensor):
            blob = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return cls(blob, info.shape, _DTYPES[info.dtype])

    def __deepcopy__(self, memo: dict[int, Any]) -> Page:
        return self

    @property
    def tokens(self) -> int:
        return self.shape[2]

    @cached_property
    def regions(self) -> np.ndarray | None:
        """int64 [kv_heads, regions, len(FIELDS)] in the order of tokens; None if kernels cannot
        read this page in place (another level, or a blob of another codec).

        The page is decoded once, so that what a kernel follows later has been checked.
        Raises CorruptFrame for a damaged page.
        """
        blob = self.payload.cpu().numpy()
        if bytes(blob[:4]) != b"GAAC":
            return None
        header, pieces, _ = codec.read(blob)
        if header.flags & FLAG_FLAT or header.shape != self.shape or header.dtype not in _DTYPES:
            return None
        if header.flags & FLAG_STORED:
            return _stored_regions(header)
        if any(coded.level not in (_RAW_LEVEL, _PACKED_LEVEL) for _, coded in pieces):
            return None
        codec.decode(blob)
        return _coded_regions(header, pieces, blob)

    def to(self, device: torch.device) -> Page:
        """This page with its payload on `device`; itself if it is there already."""
        if self.payload.device == device:
            return self
        moved = Page(self.payload.to(device), self.shape, self.dtype)
        if "regions" in self.__dict__:
            moved.__dict__["regions"] = self.regions
        return moved


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of a layer's keys or values, as many in each batch row, and where they lie.

    rows: per batch row its pages, oldest first; rows may share pages.
    """

    rows: tuple[tuple[Page, ...], ...]

    @cached_property
    def tokens(self) -> int:
        """Tokens in the pages of a row."""
        return sum(page.tokens for page in self.rows[0]) if self.rows else 0

    @cached_property
    def regions(self) -> np.ndarray | None:
        """int64 [batch, kv_heads, regions, len(FIELDS)] with addresses; None as `Page.regions`.

        The addresses are valid while this table lives, for it holds the payloads.
        """
        found: dict[int, np.ndarray] = {}
        for page in (page for row in self.rows for page in row):
            if id(page) in found:
                continue
            places = page.regions
            if places is None:
                return None
            regions = places.copy()
            for field in PLACES:
                present = regions[..., field] >= 0
                regions[..., field][present] += page.payload.data_ptr()
            found[id(page)] = regions
        if not found:
            return None
        rows = [np.concatenate([found[id(page)] for page in row], axis=1) for row in self.rows]
        if len({row.shape for row in rows}) > 1:
            return None  # a page was stored as one region where another row's was cut into several
        return np.stack(rows)

    def __getstate__(self) -> dict[str, Any]:
        """The pages alone: addresses are no use to another process, nor to a copy."""
        return {"rows": self.rows}

    def __deepcopy__(self, memo: dict[int, Any]) -> PageTable:
        return self  # pages are immutable

    @cached_property
    def device_regions(self) -> torch.Tensor | None:
        """`regions` as an int64 tensor on the device of the payloads."""
        if self.regions is None:
            return None
        return torch.from_numpy(self.regions).to(self.rows[0][0].payload.device)


@dataclass(frozen=True, eq=False)
class Pages:
    """One layer's keys or values: packed pages, then a raw tail.

    tail: [batch, kv_heads, tokens, head_dim], the tokens behind the pages, perhaps none; values of
    a row lie side by side, else its strides are free.
    """

    table: PageTable
    tail: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]], tail: torch.Tensor) -> Pages:
        """Pages of blobs, per batch row and oldest first; see `Page.of`.

        Raises UnsupportedTensor unless all fit together.
        """
        pages = tuple(tuple(Page.of(blob) for blob in row) for row in rows)
        made = cls(PageTable(pages), tail)
        made.check()
        return made

    @property
    def tokens(self) -> int:
        return self.table.tokens + self.tail.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.dtype

    @property
    def device(self) -> torch.device:
        return self.tail.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, kv_heads, tokens, head_dim)."""
        batch, kv_heads, _, head_dim = self.tail.shape
        return batch, kv_heads, self.tokens, head_dim

    def check(self) -> None:
        """Raise UnsupportedTensor unless pages and tail have the shapes of one layer."""
        rows, tail = self.table.rows, self.tail
        if tail.ndim != 4:
            raise UnsupportedTensor("The tail is [batch, kv_heads, tokens, head_dim].")
        if rows and (len(rows) != tail.shape[0] or len({len(row) for row in rows}) > 1):
            raise UnsupportedTensor(
                "Every batch row of the tail needs as many pages as the others."
            )
        fits = (tail.shape[1], tail.shape[3], tail.dtype)
        for column in zip(*rows, strict=True):
            if any((p.shape[1], p.shape[3], p.dtype) != fits for p in column):
                raise UnsupportedTensor("Pages and tail need the same heads, head_dim and dtype.")
            if len({page.tokens for page in column}) > 1:
                raise UnsupportedTensor("Pages at the same place need as many tokens in every row.")


def raw_regions(tail: torch.Tensor, lengths: Sequence[int]) -> np.ndarray:
    """Regions, with addresses, of the rows of a raw tensor cut into runs of these many tokens.

    tail: [batch, kv_heads, tokens, head_dim], values of a row side by side.
    """
    batch, kv_heads = tail.shape[:2]
    regions = np.full((batch, kv_heads, len(lengths), len(FIELDS)), -1, np.int64)
    starts = np.cumsum([0, *lengths[:-1]])
    size = tail.element_size()
    row_bytes = tail.stride(2) * size
    regions[..., KIND], regions[..., ROWS], regions[..., STRIDE] = RAW, lengths, row_bytes
    regions[..., LOW] = (
        tail.data_ptr()
        + np.arange(batch)[:, None, None] * (tail.stride(0) * size)
        + np.arange(kv_heads)[:, None] * (tail.stride(1) * size)
        + starts * row_bytes
    )
    return regions


def _stored_regions(header: Header) -> np.ndarray:
    """Of raw rows, cut into blocks as if they were coded, so that kernels take equal portions."""
    matrices, tokens, width = header.rows_shape
    starts = np.arange(0, tokens, header.block_rows)
    regions = np.full((matrices, len(starts), len(FIELDS)), -1, np.int64)
    row_bytes = width * header.value_bytes
    regions[..., KIND], regions[..., STRIDE] = RAW, row_bytes
    regions[..., ROWS] = np.minimum(header.block_rows, tokens - starts)
    matrix = np.arange(matrices)[:, None]
    regions[..., LOW] = header.size + (matrix * tokens + starts) * row_bytes
    return regions


def _coded_regions(
    header: Header, pieces: Sequence[tuple[Segment, Coded]], blob: np.ndarray
) -> np.ndarray:
    matrices, tokens, _ = header.rows_shape
    count = -(-tokens // header.block_rows)
    regions = np.full((matrices, count, len(FIELDS)), -1, np.int64)
    for segment, coded in pieces:
        blocks = segment.shape[0]
        first = segment.tokens.start // header.block_rows
        height = segment.matrices.stop - segment.matrices.start
        described = _segment_regions(header, segment, coded, blob)
        regions[segment.matrices, first : first + blocks // height] = described.reshape(
            height, blocks // height, len(FIELDS)
        )
    return regions


def _segment_regions(
    header: Header, segment: Segment, coded: Coded, blob: np.ndarray
) -> np.ndarray:
    """int64 [blocks, len(FIELDS)] of one segment; places from the start of the blob."""
    blocks, rows, width = segment.shape
    streams = list(coded.streams)
    start = blob.ctypes.data
    regions = np.full((blocks, len(FIELDS)), -1, np.int64)
    number = np.arange(blocks)
    regions[:, ROWS] = rows
    raw = coded.level == _RAW_LEVEL
    regions[:, KIND] = RAW if raw else PACKED
    if coded.unique_rows:
        regions[:, KIND] = RAW_REPEATED if raw else REPEATED
        regions[:, REPEATS] = streams.pop(0).ctypes.data - start
        rows = coded.unique_rows
    if raw:
        regions[:, STRIDE] = width * 2
        regions[:, LOW] = streams[0].ctypes.data - start + number * (rows * width * 2)
        return regions
    values = rows * width
    regions[:, STRIDE] = plane_bytes(values)
    base, offsets, escapes, planes, low = (stream.ctypes.data - start for stream in streams)
    plane_count = 3 + header.format.extra_bits
    regions[:, BASE] = base + number * width
    regions[:, OFFSETS] = offsets + number * (4 * -(-rows // TILE_ROWS))
    regions[:, ESCAPES] = escapes
    regions[:, PLANES] = planes + number * (plane_count * plane_bytes(values))
    regions[:, LOW] = low + number * values
    return regions
