"""Decode attention on packed pages: one new query a row, keys and values read where they lie.

Neither K nor V is ever materialised. For queries q of one query head, scores s and values v:

    out = sum(exp(s - max) * v) / sum(exp(s - max)),   s = scaling * (q . k)

is gathered tile by tile with a running maximum (online softmax: Milakov and Gimelshein 2018, arXiv
1805.02867; Dao et al. 2022, arXiv 2205.14135), in fp32.
"""

from __future__ import annotations

import math

import torch

from gaac.errors import GaacError, UnsupportedTensor
from gaac.kernels import attention_blocks
from gaac.kernels.cpu import path
from gaac.pages import Page, Pages, PageTable
from gaac.pool import thread_count

__all__ = ["Page", "PageTable", "Pages", "decode_attention"]


def decode_attention(
    q: torch.Tensor,
    keys: Pages,
    values: Pages,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    threads: int | None = 1,
) -> torch.Tensor:
    """Attention of one new token per batch row over packed pages and raw tails.

    q: [batch, query_heads, head_dim], bfloat16, float16 or float32; query_heads is a multiple of
    the KV heads (MHA, GQA, MQA), and query head i reads KV head i // (query_heads // kv_heads).
    keys, values: of one layer, as many tokens in each; the new token's own among them.
    scaling: of the scores; None means head_dim ** -0.5. softcap: s becomes softcap *
    tanh(s / softcap), after scaling. sinks: [query_heads], one more score per query head that takes
    its share of the sum and has no value. mask: [batch, tokens], bool (True is attended to) or
    float (added to the scores); a row that attends to nothing gives zeros.
    threads: how many to use on a CPU, None for all cores; the result does not depend on it.
    Returns [batch, query_heads, head_dim of the values] in q's dtype.
    Raises UnsupportedTensor if the arguments do not fit together, CorruptFrame for a damaged page,
    GaacError for threads below 1.
    """
    _check(q, keys, values, sinks, mask)
    workers = thread_count(threads)
    if scaling is None:
        scaling = 1.0 / math.sqrt(q.shape[-1])
    if softcap is not None and not softcap > 0:
        raise GaacError(f"softcap is {softcap!r}: give a number above 0, or None.")
    bias = _as_bias(mask)
    out = None
    if keys.device.type == "cuda":
        from gaac.kernels import attention_triton

        out = attention_triton.attend(q, keys, values, scaling, softcap, sinks, bias)
    elif keys.device.type == "cpu" and path() != "numpy":
        from gaac.kernels import attention_cpu

        out = attention_cpu.attend(q, keys, values, scaling, softcap, sinks, bias, workers)
    if out is None:
        out = attention_blocks.attend(q, keys, values, scaling, softcap, sinks, bias)
    return out


def _check(
    q: torch.Tensor,
    keys: Pages,
    values: Pages,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    batch, kv_heads, tokens, head_dim = keys.shape
    if q.ndim != 3 or q.shape[0] != batch or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise UnsupportedTensor(
            f"q is {tuple(q.shape)} and the keys are {keys.shape}: q is [batch, query_heads, "
            "head_dim], its heads a multiple of the KV heads."
        )
    if values.shape[:3] != (batch, kv_heads, tokens):
        raise UnsupportedTensor(
            f"The keys are {keys.shape} and the values {values.shape}: they need the same batch, "
            "KV heads and tokens."
        )
    if sinks is not None and sinks.numel() != q.shape[1]:
        raise UnsupportedTensor(f"sinks has {sinks.numel()} values, not one per query head.")
    if mask is not None and tuple(mask.shape) != (batch, tokens):
        raise UnsupportedTensor(f"mask is {tuple(mask.shape)}, not [batch, tokens].")


def _as_bias(mask: torch.Tensor | None) -> torch.Tensor | None:
    """What is added to the scores, float32 [batch, tokens]."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return bias.masked_fill_(~mask, -math.inf)
    return mask.to(torch.float32)
