"""Decode attention on packed pages as Triton programs; `attention_triton` starts them.

The tokens are cut into tiles of at most 64, none of which crosses the end of a page's block, of
keys or of values. A program takes all query heads of one KV head over some neighbouring tiles, and
reads or decodes K and V of a tile into registers (`attention_rows`); a second program merges what
these left, always in the same order.

Constants of a program: HEADS, the query heads of a KV head; K_WIDTH and V_WIDTH, the head_dims, in
multiples of 16; K_ALIGNED and V_ALIGNED, see `attention_rows`; NARROW, whether q has the dtype of
the tails and products are those of two numbers of it, for tensor cores, or else of float32; BIASED,
CAPPED and SUNK, whether there are bias, softcap and sinks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gaac import pages
from gaac.kernels.attention_rows import rows_of
from gaac.levels.packed import TILE_ROWS

# Numbers as a program sees them: it reads globals only if they are constexpr.
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_FIELDS = tl.constexpr(len(pages.FIELDS))

# What a scheduled tile is told by: first token and their number; region and first row of its keys
# and of its values, the region being -1 where the row is one of the tail.
TILE_FIELDS = ("token", "count", "k_region", "k_row", "v_region", "v_row")
_TILE_FIELDS = tl.constexpr(len(TILE_FIELDS))
MERGED_AT_A_TIME = 16
_MERGED_AT_A_TIME = tl.constexpr(MERGED_AT_A_TIME)
LEAST_ROWS = 16  # that tl.dot asks for

# Sizes that change while tokens are added; a program must not be compiled anew for each kind.
_CHANGING = ("tokens", "paged", "k_paged", "v_paged", "scheduled", "tiles", "tiles_per_split")


@triton.jit(do_not_specialize=_CHANGING)
def attend_tiles(
    q: tl.tensor,  # (batch, query heads, K_WIDTH)
    k_regions: tl.tensor,  # int64 (batch, KV heads, k_region_count, fields), see gaac.pages
    v_regions: tl.tensor,
    schedule: tl.tensor,  # int32 (scheduled, tile fields)
    k_tail: tl.tensor,  # float16 or bfloat16 (batch, KV heads, tokens, K_WIDTH)
    v_tail: tl.tensor,
    bias: tl.tensor,  # float32 (batch, tokens) where BIASED
    highest_out: tl.tensor,  # float32 (batch, KV heads, HEADS, splits), written
    total_out: tl.tensor,  # as highest_out
    gathered_out: tl.tensor,  # float32 (batch, KV heads, HEADS, splits, V_WIDTH), written
    scaling: tl.tensor,
    softcap: tl.tensor,
    kv_heads: tl.tensor,
    k_region_count: tl.tensor,
    v_region_count: tl.tensor,
    k_batch_stride: tl.tensor,  # of the tails, in values
    k_head_stride: tl.tensor,
    k_row_stride: tl.tensor,
    v_batch_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_row_stride: tl.tensor,
    tokens: tl.tensor,
    paged: tl.tensor,  # the token from which on both keys and values lie in tails
    k_paged: tl.tensor,  # tokens in pages
    v_paged: tl.tensor,
    scheduled: tl.tensor,
    tiles: tl.tensor,
    tiles_per_split: tl.tensor,
    HEADS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_ALIGNED: tl.constexpr,
    V_ALIGNED: tl.constexpr,
    NARROW: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """Attention over the tiles of one split, left unmerged. Grid (batch * KV heads, splits)."""
    place, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row_of_batch, kv_head = place // kv_heads, place % kv_heads
    k_regions += place * k_region_count * _FIELDS
    v_regions += place * v_region_count * _FIELDS
    k_tail += row_of_batch * k_batch_stride + kv_head * k_head_stride
    v_tail += row_of_batch * v_batch_stride + kv_head * v_head_stride
    PADDED: tl.constexpr = _padded_heads(HEADS)
    K_BYTES: tl.constexpr = triton.next_power_of_2(K_WIDTH // 8)
    V_BYTES: tl.constexpr = triton.next_power_of_2(V_WIDTH // 8)

    HALF: tl.constexpr = PADDED // 2
    query_row, lane = tl.arange(0, PADDED), tl.arange(0, _TILE_ROWS)
    head, part = query_row % HALF, query_row // HALF
    k_channel, v_channel = tl.arange(0, 8 * K_BYTES), tl.arange(0, 8 * V_BYTES)
    q_place = q + (place * HEADS + head)[:, None] * K_WIDTH + k_channel[None, :]
    q_inside = (head < HEADS)[:, None] & (k_channel < K_WIDTH)[None, :]
    query = tl.load(q_place, mask=q_inside, other=0)
    if not NARROW:
        query = query.to(tl.float32)

    highest = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    gathered = tl.zeros((PADDED, 8 * V_BYTES), tl.float32)
    for tile in range(split * tiles_per_split, tl.minimum((split + 1) * tiles_per_split, tiles)):
        if tile < scheduled:
            entry = schedule + tile * _TILE_FIELDS
            token, count = tl.load(entry), tl.load(entry + 1)
            k_region, k_row = tl.load(entry + 2), tl.load(entry + 3)
            v_region, v_row = tl.load(entry + 4), tl.load(entry + 5)
        else:
            token = paged + (tile - scheduled) * _TILE_ROWS
            count = tl.minimum(tokens - token, _TILE_ROWS)
            k_region, k_row = -1, token - k_paged
            v_region, v_row = -1, token - v_paged
        attended = lane < count
        if BIASED:
            added = tl.load(
                bias + row_of_batch * tokens + token + lane, mask=attended, other=float("-inf")
            )
            attended = added > float("-inf")

        k = rows_of(k_regions, k_region, k_tail, k_row_stride, k_row, count, K_WIDTH, K_ALIGNED)
        if not NARROW:
            k = k.to(tl.float32)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:
            score = softcap * _tanh(score / softcap)
        if BIASED:
            score += added[None, :]
        score = tl.where(attended[None, :], score, float("-inf"))

        higher = tl.maximum(highest, tl.max(score, axis=1))
        shift = _finite(higher)
        weight = tl.exp(score - shift[:, None])
        kept = tl.exp(highest - shift)
        total = total * kept + tl.sum(weight, axis=1)
        v = rows_of(v_regions, v_region, v_tail, v_row_stride, v_row, count, V_WIDTH, V_ALIGNED)
        if BIASED:  # what is masked adds nothing, be it infinite
            v = tl.where(attended[:, None], v, 0)
        gathered = gathered * kept[:, None] + _weighted(weight, part, v, NARROW)
        highest = higher

    left = (place * HEADS + head) * splits + split
    tl.store(highest_out + left, highest, mask=query_row < HEADS)
    tl.store(total_out + left, total, mask=query_row < HEADS)
    gathered = tl.sum(tl.reshape(gathered, (2, HALF, 8 * V_BYTES)), axis=0)
    head = tl.arange(0, HALF)
    left = (place * HEADS + head) * splits + split
    inside = (head < HEADS)[:, None] & (v_channel < V_WIDTH)[None, :]
    tl.store(gathered_out + left[:, None] * V_WIDTH + v_channel[None, :], gathered, mask=inside)


@triton.jit(do_not_specialize=("splits",))
def merge_splits(
    highest_in: tl.tensor,  # float32 (batch, query heads, splits), from `attend_tiles`
    total_in: tl.tensor,
    gathered_in: tl.tensor,  # float32 (batch, query heads, splits, V_WIDTH)
    sinks: tl.tensor,  # (query heads,) where SUNK
    out: tl.tensor,  # (batch, query heads, V_WIDTH), written
    query_heads: tl.tensor,
    splits: tl.tensor,
    V_WIDTH: tl.constexpr,
    SUNK: tl.constexpr,
) -> None:
    """Merge the splits of one query head. Grid (batch * query heads,)."""
    place = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(V_WIDTH))
    if SUNK:  # a score without a value
        highest = tl.load(sinks + place % query_heads).to(tl.float32)
        total = highest * 0 + 1.0
    else:
        highest = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
    gathered = tl.zeros((triton.next_power_of_2(V_WIDTH),), tl.float32)
    for first in range(0, splits, _MERGED_AT_A_TIME):
        split = first + tl.arange(0, _MERGED_AT_A_TIME)
        left, present = place * splits + split, split < splits
        highest_of = tl.load(highest_in + left, mask=present, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(highest_of, axis=0))
        shift = _finite(higher)
        weight, kept = tl.exp(highest_of - shift), tl.exp(highest - shift)
        total_of = tl.load(total_in + left, mask=present, other=0)
        total = total * kept + tl.sum(weight * total_of, axis=0)
        inside = present[:, None] & (channel < V_WIDTH)[None, :]
        gathered_of = tl.load(
            gathered_in + left[:, None] * V_WIDTH + channel[None, :], mask=inside, other=0
        )
        gathered = gathered * kept + tl.sum(weight[:, None] * gathered_of, axis=0)
        highest = higher
    result = gathered / tl.where(total == 0, 1.0, total)
    tl.store(out + place * V_WIDTH + channel, result.to(out.dtype.element_ty), channel < V_WIDTH)


@triton.constexpr_function
def _padded_heads(heads: int) -> int:
    """Rows of a program's matrices: each query head twice, see `_weighted`, and perhaps zeros."""
    return max(LEAST_ROWS, 2 * triton.next_power_of_2(heads))


@triton.jit
def _weighted(
    weight: tl.tensor, part: tl.tensor, value: tl.tensor, NARROW: tl.constexpr
) -> tl.tensor:
    """weight, float32 (rows, 64), times value (64, channels), float32, in two parts to be added.

    NARROW: a weight becomes the sum of two numbers of the values' dtype, which keep 16 bits of it.
    Its row is there twice, and the second one, part 1, takes what the first one leaves.
    """
    if NARROW:
        rest = weight - weight.to(value.dtype).to(tl.float32)
        weight = tl.where(part[:, None] == 0, weight, rest).to(value.dtype)
    else:
        weight, value = tl.where(part[:, None] == 0, weight, 0), value.to(tl.float32)
    return tl.dot(weight, value, input_precision="ieee")


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent by the exponential of something that is never above 0."""
    small = tl.exp(-2 * tl.abs(x))
    size = (1 - small) / (1 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _finite(highest: tl.tensor) -> tl.tensor:
    """The highest score, or 0 where all were masked, so that exp(score - highest) is a number."""
    return tl.where(highest == float("-inf"), 0.0, highest)
