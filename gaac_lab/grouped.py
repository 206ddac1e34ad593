"""The best uncompressed attention that torch offers for decoding: the opponent to be fair to.

Keys and values lie in buffers with room at the end, so a step appends in place where DynamicCache
copies everything; and query heads that share a KV head go through one matrix product, where
repeating K and V would read them once for each query head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Must not hold the name of a library attention: those are special-cased.
NAME = "gaac_lab_grouped"
ROOM_TOKENS = 256  # buffers grow by this many tokens at once

# On a CPU torch's batched product falls behind one product a KV head where a thread's share of K
# has more values than this, 8 MiB of them.
_MANY_VALUES = 2**22


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per row, without repeating K and V.

    query: [batch, query_heads, 1, head_dim]; query head i reads KV head
    i // (query_heads // kv_heads). key, value: [batch, kv_heads, tokens, head_dim], with any
    strides. mask: broadcastable to [batch, 1, 1, tokens], bool (True is attended to) or added to
    the scores. scaling: None means head_dim ** -0.5. softcap: s becomes softcap *
    tanh(s / softcap). sinks: [query_heads], one more score per query head, without a value.
    Products are in the tensors' dtype, the softmax in float32. Returns
    [batch, query_heads, 1, head_dim of the values]; a row that attends to nothing gives NaN.

    Measured on a CPU with torch 2.13, bf16, 1K to 8K tokens, head_dim 64 to 256, batch 1 and 4, one
    and two threads: q @ k.T as a batched product takes 2 to 4 times as long as k @ q.T, which wins
    until K is large, and one product a KV head beyond. Keys kept as [head_dim, tokens] come out
    even; products in float32, and torch's own attention on grouped queries, behind.
    """
    batch, query_heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, query_heads // kv_heads, head_dim)
    scores = _scores(grouped, key).float()
    scores *= head_dim**-0.5 if scaling is None else scaling
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    if mask is not None:
        scores = (
            scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        column = sinks.float().reshape(1, kv_heads, -1, 1).expand(batch, -1, -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return _weighted(weights.to(value.dtype), value).reshape(batch, query_heads, 1, -1)


class GroupedCache(DynamicCache):
    """A DynamicCache whose full-attention layers append in place, into buffers with room."""

    layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [
            PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in self.layers
        ]


class PreallocatedLayer(DynamicLayer):
    """Keys and values as views of buffers that grow by `ROOM_TOKENS` tokens at once.

    Whoever assigns other tensors to `keys` and `values`, as the library does to reorder or select
    rows, finds them copied into new buffers at the next update.
    """

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self._rooms: dict[str, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [batch, kv_heads, new tokens, head_dim]; all keys and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._appended("keys", self.keys, key_states)
        self.values = self._appended("values", self.values, value_states)
        return self.keys, self.values

    def _appended(self, name: str, held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        tokens = held.shape[-2] if held.ndim == states.ndim else 0
        total = tokens + states.shape[-2]
        room = self._rooms.get(name)
        if room is None or not _lies_in(held, room) or total > room.shape[-2]:
            size = (total // ROOM_TOKENS + 1) * ROOM_TOKENS
            room = states.new_empty((*states.shape[:-2], size, states.shape[-1]))
            if tokens:
                room.narrow(-2, 0, tokens).copy_(held)
            self._rooms[name] = room
        room.narrow(-2, tokens, states.shape[-2]).copy_(states)
        return room.narrow(-2, 0, total)

    def reset(self) -> None:
        """Drop everything; the next update starts anew."""
        self._rooms = {}
        super().reset()


def register() -> str:
    """Make the attention known to transformers; the name to give to set_attn_implementation.

    The prompt goes through the library's sdpa, as does every call of several new tokens.
    """
    AttentionInterface.register(NAME, _attention)
    # Without a mask function of its own name, transformers would give padded batches no mask.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [batch, heads, tokens, head_dim] in, heads third out."""
    if query.shape[2] == 1 and not dropout and kwargs.get("position_bias") is None:
        mask = attention_mask
        if mask is not None and mask.shape[1] > 1:
            raise ValueError("grouped attention takes one mask for all heads, not one for each.")
        out = grouped_attention(query, key, value, mask, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "the library's sdpa, which reads prompts here, knows neither softcap nor sinks: "
            "this model cannot be measured with grouped attention."
        )
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _scores(grouped: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, query heads per KV head, tokens]."""
    if not _is_large(key):
        return torch.matmul(key, grouped.transpose(-1, -2)).transpose(-1, -2)
    rows = zip(grouped.unbind(), key.unbind(), strict=True)
    return torch.stack(
        [torch.stack([q @ k.t() for q, k in zip(*row, strict=True)]) for row in rows]
    )


def _weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, query heads per KV head, head_dim]."""
    if not _is_large(value):
        return torch.matmul(weights, value)
    rows = zip(weights.unbind(), value.unbind(), strict=True)
    return torch.stack([torch.stack([w @ v for w, v in zip(*row, strict=True)]) for row in rows])


def _is_large(tensor: torch.Tensor) -> bool:
    many = tensor.numel() >= _MANY_VALUES * torch.get_num_threads()
    return many and tensor.device.type == "cpu"


def _lies_in(held: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether `held` is the beginning of `room`, every row and head of it."""
    return (
        held.ndim == room.ndim
        and held.shape[:-2] == room.shape[:-2]
        and held.data_ptr() == room.data_ptr()
    )
