"""Decode attention in torch, a page at a time: for any level, dtype, head_dim and device.

Slower than the compiled kernels by the cost of opening each page into memory, and right wherever
they do not reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gaac import codec
from gaac.pages import Page, Pages

TAIL_TOKENS = 256


def attend(
    q: torch.Tensor,
    keys: Pages,
    values: Pages,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See `gaac.attention.decode_attention`; bias: float32 [batch, tokens], added to the scores."""
    batch, query_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(batch, kv_heads, query_heads // kv_heads, head_dim).float()
    highest = grouped.new_full((*grouped.shape[:3], 1), -math.inf)
    total = torch.zeros_like(highest)
    if sinks is not None:  # a score without a value
        highest = sinks.reshape(1, *highest.shape[1:]).to(highest).expand_as(highest)
        total = torch.ones_like(highest)
    gathered = grouped.new_zeros((*grouped.shape[:3], values.shape[3]))
    start = 0
    for k, v in _pieces(keys, values):
        scores = grouped @ k.float().transpose(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[:, None, None, start : start + k.shape[2]]
        start += k.shape[2]
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shift = higher.masked_fill(higher == -math.inf, 0.0)  # all masked so far
        weights, kept = torch.exp(scores - shift), torch.exp(highest - shift)
        total = total * kept + weights.sum(-1, keepdim=True)
        gathered = gathered * kept + weights @ v.float()
        highest = higher
    out = gathered / total.masked_fill(total == 0, 1.0)
    return out.reshape(batch, query_heads, -1).to(q.dtype)


def _pieces(keys: Pages, values: Pages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of the same tokens, each [batch, kv_heads, tokens, head_dim], in order."""
    k_source, v_source = _tensors(keys), _tensors(values)
    k = v = None
    while True:
        k = next(k_source, None) if k is None or not k.shape[2] else k
        v = next(v_source, None) if v is None or not v.shape[2] else v
        if k is None or v is None:
            return
        tokens = min(k.shape[2], v.shape[2])
        yield k[:, :, :tokens], v[:, :, :tokens]
        k, v = k[:, :, tokens:], v[:, :, tokens:]


def _tensors(pages: Pages) -> Iterator[torch.Tensor]:
    """The tokens of pages and tail in order, opened a page at a time."""
    for column in zip(*pages.table.rows, strict=True):
        opened: dict[int, torch.Tensor] = {}
        for page in column:
            if id(page) not in opened:
                opened[id(page)] = _open(page, pages.device)
        yield torch.cat([opened[id(page)] for page in column])
    if pages.tail.shape[2]:
        yield from pages.tail.split(TAIL_TOKENS, dim=2)


def _open(page: Page, device: torch.device) -> torch.Tensor:
    return codec.decode(page.payload, device=device)
