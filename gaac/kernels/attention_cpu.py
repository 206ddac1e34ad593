"""Decode attention on a CPU, compiled: what calls `gaac.kernels.attention_kernels`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from gaac import codec
from gaac.kernels import attention_kernels as kernels
from gaac.kernels.attention_parts import HEADS
from gaac.kernels.attention_regions import MAX_REGION_ROWS
from gaac.kernels.cpu import Kernel, has_feature, path
from gaac.kernels.packed_parts import STEP
from gaac.pages import FIELDS, KIND, RAW, ROWS, Page, Pages, PageTable
from gaac.pool import map_all

UNIT_TOKENS = 1024  # of a unit of work: a dozen microseconds of it or more
UNIT_REGIONS = UNIT_TOKENS // MAX_REGION_ROWS
THREAD_TOKENS = 4096  # query heads times tokens below which a second thread costs more than it does

HEAD_DIMS = (64, 128, 192, 256)

# The tables of keys, with those of values they were last read beside, and what came of it.
_PAIRED: weakref.WeakKeyDictionary[PageTable, Any] = weakref.WeakKeyDictionary()
_NO_SINKS = np.zeros(0, np.float32)


class Plan(NamedTuple):
    """How query heads are taken together, and how tokens are cut into runs."""

    heads: int  # of a KV head, filled up
    together: int
    region_units: int
    runs: int
    scratch_bytes: int


@lru_cache(1024)
def plan(
    real_heads: int, key_slices: int, value_slices: int, regions: int, tail_tokens: int
) -> Plan:
    """The plan of one shape."""
    passes = -(-real_heads // HEADS)
    together = -(-real_heads // passes)
    heads = passes * together
    region_units = -(-regions // UNIT_REGIONS)
    runs = region_units + -(-tail_tokens // UNIT_TOKENS)
    scratch = kernels.scratch_bytes(heads, key_slices, value_slices)
    return Plan(heads, together, region_units, runs, scratch)


def attend(
    q: torch.Tensor,
    keys: Pages,
    values: Pages,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    threads: int,
) -> torch.Tensor | None:
    """See `gaac.attention.decode_attention`; None for pages that the kernels cannot read."""
    if keys.dtype != values.dtype or not (_readable(keys) and _readable(values)):
        return None
    keys, values = _opened(keys), _opened(values)
    tables = _tables(keys, values)
    if tables is None:
        return None
    key_table, value_table = tables
    batch, query_heads, key_width = q.shape
    kv_heads, tokens, value_width = keys.shape[1], keys.tokens, values.shape[3]
    real_heads = query_heads // kv_heads
    regions = max(key_table.shape[2], value_table.shape[2])
    packed = keys.table.tokens, values.table.tokens
    sizes = key_width // STEP, value_width // STEP
    shape = plan(real_heads, *sizes, regions, tokens - max(packed))
    units = batch * kv_heads * shape.runs
    queries = q.reshape(batch, kv_heads, real_heads, key_width).float()
    if shape.heads > real_heads:
        padding = queries.new_zeros(batch, kv_heads, shape.heads - real_heads, key_width)
        queries = torch.cat([queries, padding], dim=2)
    if bias is not None:
        # A kernel reads whole tiles.
        bias = torch.nn.functional.pad(bias, (0, STEP))
    numbers = (
        kv_heads, shape.heads, *sizes, tokens, units, shape.region_units,
        UNIT_REGIONS, UNIT_TOKENS, *_tail(keys), *_tail(values),
        0 if bias is None else bias.data_ptr(), 0 if bias is None else 4 * bias.shape[1],
    )  # fmt: skip
    partials = np.empty(units * shape.heads * (value_width + 2), np.float32)
    counter = np.zeros(1, np.int64)
    flat = queries.numpy().reshape(-1)
    entry = _kernel(_way(q.dtype, keys.dtype), keys.dtype, shape.together)

    def work(_: int) -> None:
        scratch = np.empty(shape.scratch_bytes, np.uint8)
        entry(
            (key_table, value_table, numbers, flat, partials, scratch, counter, scaling,
             softcap or 0.0)
        )  # fmt: skip

    if tokens * batch * query_heads < THREAD_TOKENS:
        threads = 1
    map_all(work, range(min(threads, units)), threads)
    out = torch.empty(batch, query_heads, value_width, dtype=torch.float32)
    sink_scores = _NO_SINKS if sinks is None else sinks.detach().float().reshape(-1).numpy()
    kernels.merge(
        partials, np.ascontiguousarray(sink_scores), out.numpy().reshape(-1), batch, kv_heads,
        shape.heads, real_heads, shape.runs, sizes[1],
    )  # fmt: skip
    return out.to(q.dtype)


def _way(q_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Which kernels: those of the path, or those that multiply bfloat16 words as they are."""
    if q_dtype == dtype == torch.bfloat16 and path() == "vbmi2" and has_feature("avx512bf16"):
        return "dots"
    return path()


@cache
def _kernel(way: str, dtype: torch.dtype, together: int) -> Callable[..., int]:
    name = str(dtype).removeprefix("torch.")
    kernel: Kernel = getattr(kernels, f"attend_{name}_{way}_{together}")
    return kernel.compiled()


def _readable(pages: Pages) -> bool:
    """Whether kernels know the dtype, the head_dim and the strides."""
    tail = pages.tail
    return (
        tail.dtype in (torch.bfloat16, torch.float16)
        and tail.shape[3] in HEAD_DIMS
        and (tail.stride(3) == 1 or not tail.shape[2])
    )


def _tables(keys: Pages, values: Pages) -> tuple[np.ndarray, np.ndarray] | None:
    """The regions of both, if kernels can read them side by side; kept while blocks stay."""
    kept = _PAIRED.get(keys.table)
    if kept is None or kept[0]() is not values.table:
        kept = weakref.ref(values.table), _pair(keys, values)
        _PAIRED[keys.table] = kept
    return kept[1]


def _pair(keys: Pages, values: Pages) -> tuple[np.ndarray, np.ndarray] | None:
    """The regions of both; None where they differ in their rows, or in rows beyond the kernels'."""
    key_table, value_table = (_regions(pages) for pages in (keys, values))
    if key_table is None or value_table is None:
        return None
    for table in (key_table, value_table):
        opened = table[..., ROWS][table[..., KIND] != RAW]
        if opened.size and opened.max() > MAX_REGION_ROWS:
            return None
    if key_table.shape[2] and value_table.shape[2]:
        rows = key_table[..., ROWS], value_table[..., ROWS]
        if not np.array_equal(*rows):
            return None
    return key_table, value_table


def _regions(pages: Pages) -> np.ndarray | None:
    if not pages.table.tokens:
        return np.zeros((*pages.shape[:2], 0, len(FIELDS)), np.int64)
    return pages.table.regions


def _opened(pages: Pages) -> Pages:
    """The same keys or values in stored pages, where kernels cannot read them as they are."""
    if not pages.table.tokens or pages.table.regions is not None:
        return pages
    stored: dict[int, Page] = {}
    for page in (page for row in pages.table.rows for page in row):
        if id(page) not in stored:
            stored[id(page)] = Page.of(codec.encode(codec.decode(page.payload), level=0))
    rows = tuple(tuple(stored[id(page)] for page in row) for row in pages.table.rows)
    return Pages(PageTable(rows), pages.tail)


def _tail(pages: Pages) -> tuple[int, int, int, int, int]:
    """Address of the tail, bytes between batch rows, KV heads and tokens; tokens before it."""
    batch_stride, head_stride, row_stride, _ = pages.tail.stride()
    size = pages.tail.element_size()
    return (
        pages.tail.data_ptr(),
        batch_stride * size,
        head_stride * size,
        row_stride * size,
        pages.table.tokens,
    )
