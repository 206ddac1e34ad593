"""The oracle for decode attention: one query head at a time, in float64, straight from the formula.

Scaled dot-product attention of one query over all keys and values (Vaswani et al. 2017, arXiv
1706.03762), with what models add to it. Slow and obvious on purpose: it shares no code with the
kernels, it checks nothing, and every faster way must give what it gives, within rounding.
"""

from __future__ import annotations

import math

import numpy as np


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of one new token per batch row, float64 [batch, query_heads, head_dim of V].

    q: [batch, query_heads, head_dim]. keys, values: [batch, kv_heads, tokens, head_dim], where K
    and V may differ in head_dim; query head i reads KV head i // (query_heads // kv_heads).
    scaling: of the scores; None means head_dim ** -0.5. softcap: scores s become softcap *
    tanh(s / softcap), after scaling (Gemma 2, arXiv 2408.00118). bias: [batch, tokens], added
    after that; -inf masks a token. sinks: [query_heads], a score per query head that takes its
    share of the sum and has no value (gpt-oss; Xiao et al. 2023, arXiv 2309.17453).

    A token of weight zero adds nothing, whatever its value; a row without a token of positive
    weight gives zeros.
    """
    batch, query_heads, head_dim = q.shape
    group = query_heads // keys.shape[1]
    out = np.zeros((batch, query_heads, values.shape[3]))
    for row in range(batch):
        for head in range(query_heads):
            scores = scores_of(
                q[row, head],
                keys[row, head // group],
                head_dim**-0.5 if scaling is None else scaling,
                softcap,
                None if bias is None else bias[row],
            )
            sink = -math.inf if sinks is None else float(sinks[head])
            weights = weights_of(scores, sink)
            counted = weights > 0
            out[row, head] = weights[counted] @ values[row, head // group][counted].astype(
                np.float64
            )
    return out


def scores_of(
    query: np.ndarray,
    keys: np.ndarray,
    scaling: float,
    softcap: float | None,
    bias: np.ndarray | None,
) -> np.ndarray:
    """The score of each token, float64 [tokens], for a query [head_dim] and keys [tokens, ...]."""
    scores = scaling * (keys.astype(np.float64) @ query.astype(np.float64))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    return scores if bias is None else scores + bias.astype(np.float64)


def weights_of(scores: np.ndarray, sink: float) -> np.ndarray:
    """The softmax over scores [tokens] and one sink; all zero if every one of them is -inf."""
    highest = max(scores.max(initial=-math.inf), sink)
    if highest == -math.inf:
        return np.zeros_like(scores)
    weights = np.exp(scores - highest)
    return weights / (weights.sum() + math.exp(sink - highest))
