"""Decode attention on a CUDA device, by Triton kernels that read level-1 and raw pages in place.

The sequence is split over programs: how often follows from the shapes and the number of the
device's multiprocessors, so the same call gives the same bits. The kernels never see how a page is
coded but through its rows: raw pages give the same bits as packed ones.

The kernels run on the CPU, slowly, if TRITON_INTERPRET=1 is set before Triton is first imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton

from gaac.kernels.attention_programs import TILE_FIELDS, attend_tiles, merge_splits
from gaac.levels.packed import TILE_ROWS
from gaac.pages import BASE, KIND, LOW, RAW, RAW_REPEATED, ROWS, STRIDE, Pages, PageTable

MAX_WIDTH = 256
WIDTH_STEP = 16
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 512
INTERPRETED_MULTIPROCESSORS = 3

_OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns where this is left open.

# Addresses, and distances between raw rows, at multiples of this let a program load whole words.
_ALIGN_BYTES = 16


@dataclass(frozen=True, eq=False)
class Side:
    """The pages of keys, or of values, as a program reads them.

    regions: int64, as `PageTable.device_regions`, or one number where there are no pages.
    count: regions of a KV head. aligned: whether all addresses are multiples of 16.
    """

    regions: torch.Tensor
    count: int
    aligned: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """What follows from the pages of a layer, and is kept until they change.

    schedule: int32 [tiles, len(TILE_FIELDS)], the tiles of tokens that lie in pages of keys or of
    values. paged: how many tokens those are.
    """

    keys: Side
    values: Side
    schedule: torch.Tensor
    paged: int


_PLANS: WeakKeyDictionary[PageTable, WeakKeyDictionary[PageTable, Plan | None]] = (
    WeakKeyDictionary()
)


def attend(
    q: torch.Tensor,
    keys: Pages,
    values: Pages,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """See `gaac.attention.decode_attention`; bias: float32 [batch, tokens], added to the scores.

    None if the kernels cannot read these pages in place, or do not know the dtypes or head_dims:
    see `supports`.
    """
    if not supports(q, keys, values):
        return None
    plan = _plan(keys.table, values.table, keys.device)
    if plan is None:
        return None
    batch, query_heads, head_dim = q.shape
    _, kv_heads, tokens, value_dim = values.shape
    with torch.cuda.device_of(q):
        tiles = len(plan.schedule) + triton.cdiv(tokens - plan.paged, TILE_ROWS)
        splits, tiles_per_split = _split(batch * kv_heads, tiles, _multiprocessors(q.device))
        highest, total = (
            torch.empty((batch, query_heads, splits), dtype=torch.float32, device=q.device)
            for _ in range(2)
        )
        gathered = highest.new_empty((batch, query_heads, splits, value_dim))
        # Triton's interpreter cuts bits off where it should round.
        out = (q if q.is_cuda else highest).new_empty((batch, query_heads, value_dim))
        attend_tiles[(batch * kv_heads, splits)](
            q.contiguous(), plan.keys.regions, plan.values.regions, plan.schedule,
            keys.tail, values.tail, q if bias is None else bias.contiguous(),
            highest, total, gathered, scaling, 1.0 if softcap is None else softcap,
            kv_heads, plan.keys.count, plan.values.count,
            *keys.tail.stride()[:3], *values.tail.stride()[:3],
            tokens, plan.paged, keys.table.tokens, values.table.tokens,
            len(plan.schedule), tiles, tiles_per_split,
            HEADS=query_heads // kv_heads, K_WIDTH=head_dim, V_WIDTH=value_dim,
            K_ALIGNED=plan.keys.aligned and _is_aligned(keys.tail),
            V_ALIGNED=plan.values.aligned and _is_aligned(values.tail),
            NARROW=_is_narrow(q, keys.dtype),
            BIASED=bias is not None, CAPPED=softcap is not None,
            num_warps=_warps(max(head_dim, value_dim)), **_OPTIONS,
        )  # fmt: skip
        merge_splits[(batch * query_heads,)](
            highest, total, gathered, q if sinks is None else sinks.contiguous(), out,
            query_heads, splits, V_WIDTH=value_dim, SUNK=sinks is not None, **_OPTIONS,
        )  # fmt: skip
    return out.to(q.dtype)


def supports(q: torch.Tensor, keys: Pages, values: Pages) -> bool:
    """Whether the kernels know these dtypes and head_dims, and rows of the tails are contiguous."""
    return (
        q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and keys.dtype == values.dtype
        and keys.dtype in (torch.bfloat16, torch.float16)
        and all(pages.shape[3] % WIDTH_STEP == 0 for pages in (keys, values))
        and all(0 < pages.shape[3] <= MAX_WIDTH for pages in (keys, values))
        and all(pages.tail.stride(3) == 1 for pages in (keys, values))
    )


def schedule(k_rows: Sequence[int], v_rows: Sequence[int]) -> np.ndarray:
    """Cut the tokens of regions of so many rows into tiles: int32 [tiles, len(TILE_FIELDS)].

    A tile ends where one of 64 rows ends in a region of keys or of values. Where one of the two
    has no more regions, its region is -1 and its row is one of the tail.
    """
    k_cuts, v_cuts = _cuts(k_rows), _cuts(v_rows)
    cuts = np.union1d(k_cuts, v_cuts)
    tiles = np.empty((len(cuts) - 1, len(TILE_FIELDS)), np.int32)
    token = cuts[:-1]
    tiles[:, 0], tiles[:, 1] = token, np.diff(cuts)
    for column, rows in ((2, k_rows), (4, v_rows)):
        ends = np.cumsum([0, *rows])
        region = np.searchsorted(ends, token, side="right") - 1
        tiles[:, column] = np.where(region < len(rows), region, -1)
        tiles[:, column + 1] = token - ends[region]
    return tiles


def _cuts(rows: Sequence[int]) -> np.ndarray:
    """The tokens at which the tiles of regions start, and the one at which the last ends."""
    count = -(-np.asarray(rows, np.int64) // TILE_ROWS)
    first = np.cumsum([0, *rows])
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.append(np.repeat(first[:-1], count) + number * TILE_ROWS, first[-1])


def _plan(keys: PageTable, values: PageTable, device: torch.device) -> Plan | None:
    """The plan for these pages; None if one cannot be read in place. Made once for each pair."""
    plans = _PLANS.setdefault(keys, WeakKeyDictionary())
    if values not in plans:
        plans[values] = _made_plan(keys, values, device)
    return plans[values]


def _made_plan(keys: PageTable, values: PageTable, device: torch.device) -> Plan | None:
    rows = [_region_rows(table) for table in (keys, values)]
    if rows[0] is None or rows[1] is None:
        return None
    tiles = schedule(rows[0], rows[1])
    return Plan(
        _side(keys, device),
        _side(values, device),
        torch.from_numpy(tiles).to(device),
        max(keys.tokens, values.tokens),
    )


def _region_rows(table: PageTable) -> list[int] | None:
    """The rows of each region, which all batch rows and KV heads must share; None if not so."""
    if not table.tokens:
        return []
    if table.regions is None:
        return None
    rows = table.regions[..., ROWS].reshape(-1, table.regions.shape[2])
    if (rows != rows[0]).any() or (table.regions[..., KIND] == RAW_REPEATED).any():
        return None
    counts: list[int] = rows[0].tolist()
    return counts


def _side(table: PageTable, device: torch.device) -> Side:
    regions = table.regions if table.tokens else None
    if regions is None or table.device_regions is None:
        return Side(torch.zeros(1, dtype=torch.int64, device=device), 0, True)
    raw = regions[..., KIND] == RAW
    steps = np.where(raw, regions[..., STRIDE], 0)
    bases = np.where(raw, 0, regions[..., BASE])
    aligned = not ((regions[..., LOW] | steps | bases) % _ALIGN_BYTES).any()
    return Side(table.device_regions, regions.shape[2], aligned)


def _is_aligned(tail: torch.Tensor) -> bool:
    """Whether every row of a tail starts at a multiple of 16 bytes."""
    places = (tail.data_ptr(), *(step * tail.element_size() for step in tail.stride()[:3]))
    return not any(place % _ALIGN_BYTES for place in places)


def _is_narrow(q: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether products are those of two numbers of the KV's dtype, for tensor cores.

    Triton's interpreter does not multiply bfloat16.
    """
    return q.dtype == dtype and (q.is_cuda or dtype == torch.float16)


def _split(sequences: int, tiles: int, multiprocessors: int) -> tuple[int, int]:
    """How many splits each of `sequences` (batch rows times KV heads) has, and tiles of a split."""
    wanted = math.ceil(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors / sequences)
    tiles_per_split = max(1, math.ceil(tiles / min(wanted, MAX_SPLITS)))
    return max(1, math.ceil(tiles / tiles_per_split)), tiles_per_split


def _warps(width: int) -> int:
    """As many as hold a tile in half the registers that a thread can have: 4, 8 or 16."""
    return max(4, triton.next_power_of_2(width) // 16)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
