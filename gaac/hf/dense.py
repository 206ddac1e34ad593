"""Attention on dense keys and values: what transformers itself would compute for a model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import gaac

Output = tuple[torch.Tensor, torch.Tensor | None]


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    eager: bool,
    **options: Any,
) -> Output:
    """The library's SDPA, or the eager attention of the model's own file.

    All [batch, heads, tokens, head_dim]. mask: as the library makes it for SDPA. eager: whether the
    model cannot do with SDPA; softcap and sinks (s_aux), which SDPA does not know, ask for it too.
    """
    if not eager and options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    mask = _additive(mask, module, query, key, options.get("is_causal"))
    return _own_eager(module)(module, query, key, value, mask, **options)


def _own_eager(module: torch.nn.Module) -> Any:
    """The function that the library would call for "eager" has no name in its tables."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise gaac.GaacError(
        f"{type(module).__name__} has no eager attention to fall back on: stop fused attention."
    )


def _additive(
    mask: torch.Tensor | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool | None,
) -> torch.Tensor | None:
    """A mask for SDPA as eager attention takes it: added to the scores, and never left out.

    None stands for "causal" where several tokens are new, as it does in the library's SDPA.
    """
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if query.shape[2] == 1 or not causal:
            return None
        shape = (1, 1, query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask.dtype != torch.bool:
        return mask
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return bias.masked_fill_(~mask, torch.finfo(query.dtype).min)
