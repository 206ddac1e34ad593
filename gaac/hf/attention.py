"""Attention for transformers that reads the pages of a compressed cache where they lie.

One new token at a time streams over the pages. Everything else - prefill, several new tokens at
once, gradients - is computed on dense keys and values by what the library itself would use.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import gaac
from gaac.attention import decode_attention
from gaac.hf.dense import Output, dense_attention
from gaac.hf.lazy import LazyStates

# The library treats names in a special way that contain flash, sdpa, flex_attention, paged| or /.
FUSED, FUSED_EAGER = "gaac_fused", "gaac_fused_eager"

# Keywords without a say in the result where one token attends to all that its mask lets through;
# the library's SDPA takes no notice of them either. Any other keeps a step from streaming.
_IDLE = frozenset(
    {
        *("cache_position", "position_ids", "sliding_window", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal"),
        *("num_items_in_batch", "token_type_ids", "mm_token_type_ids", "deterministic"),
    }
)
# Tokens that the model has chosen: to an attention that it does not know it leaves the masking.
_CHOICES = ("indices", "block_indices")


class FusedAttention:
    """A model's fused attention, until it is stopped; usable in a `with` statement."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._former = [(part, part.config._attn_implementation) for part in _parts(model)]

    def stop(self) -> None:
        """Give the model, and every model inside it, the attention that it had before."""
        for part, name in self._former:
            part.set_attn_implementation(name)

    def __enter__(self) -> FusedAttention:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def use_fused_attention(model: PreTrainedModel) -> FusedAttention:
    """Let `model` read a BlockCompressedCache where its pages lie, one new token at a time.

    Such a step gives what `gaac.attention.decode_attention` gives: not the bits of another
    attention, but as close to exact arithmetic. Prefill, and whatever else does not stream, stays
    what the library computes, and other caches work as before.
    On until `stop()` of what is returned, or within `with use_fused_attention(model):`.
    Raises ValueError for a model that does its own attention, as BLOOM and Falcon do.
    """
    fused = FusedAttention(model)
    for part in _parts(model):
        name = FUSED if part._supports_sdpa else FUSED_EAGER
        part.set_attn_implementation(name)  # which only warns where it cannot
    if not is_fused(model.config.get_text_config(decoder=True)):
        fused.stop()
        raise ValueError(
            f"{type(model).__name__} does its own attention and takes no other: use the cache "
            "without use_fused_attention."
        )
    return fused


def is_fused(config: PreTrainedConfig | None) -> bool:
    """Whether the model with this config uses fused attention."""
    return config is not None and config._attn_implementation in (FUSED, FUSED_EAGER)


def fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    eager: bool,
    **options: Any,
) -> Output:
    """Attention as the library calls it; gives [batch, new tokens, query_heads, head_dim].

    query, key, value: [batch, heads, tokens, head_dim]. eager: see `dense_attention`.
    Raises gaac.GaacError for a model that attends to tokens of its own choice.
    """
    if any(options.get(name) is not None for name in _CHOICES):
        raise gaac.GaacError(
            f"{type(module).__name__} attends to tokens of its own choice, which fused attention "
            "does not know how to do: stop it."
        )
    if type(key) is LazyStates and type(value) is LazyStates:
        out = _streamed(module, query, key, value, attention_mask, **options)
        if out is not None:
            return out, None
    key, value = (x.opened() if isinstance(x, LazyStates) else x for x in (key, value))
    return dense_attention(module, query, key, value, attention_mask, eager=eager, **options)


def _streamed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyStates,
    value: LazyStates,
    mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """[batch, 1, query_heads, head_dim]; None where only dense attention is right."""
    keys, values = key.pages, value.pages
    if keys is None or values is None or query.shape[2] != 1 or module.training or dropout:
        return None
    if torch.is_grad_enabled() and _needs_grad(query, mask, s_aux):
        return None
    if not all(name in _IDLE or option is None for name, option in options.items()):
        return None
    if mask is not None:
        if mask.ndim != 4 or mask.shape[1:] != (1, 1, keys.tokens):
            return None
        mask = mask[:, 0, 0].expand(query.shape[0], -1)
    out = decode_attention(
        query[:, :, 0],
        keys,
        values,
        scaling=scaling,
        softcap=softcap,
        sinks=s_aux,
        mask=mask,
        threads=torch.get_num_threads(),
    )
    return out.unsqueeze(1)


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside it, outermost first, one for each config."""
    parts: dict[int, PreTrainedModel] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            parts.setdefault(id(module.config), module)
    return list(parts.values())


for _name, _eager in ((FUSED, False), (FUSED_EAGER, True)):
    AttentionInterface.register(_name, partial(fused_attention, eager=_eager))
    # A name without a mask function would mean no mask: padded batches would go wrong in silence.
    AttentionMaskInterface.register(_name, sdpa_mask)
