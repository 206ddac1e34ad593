"""Bytes held by a cache, layer by layer: what KV would take raw, and what it takes now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from gaac.hf.layer import BlockCompressedLayer
from gaac.hf.versions import dummy_layers


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer of a cache holds.

    kind: "blocks" (packed here), or the library's own: "full", "sliding", "linear" (recurrent or
    convolution state, no KV), "hybrid" (state and KV), "dummy" (nothing: KV of another layer).
    raw_bytes: the K and V held, uncompressed. stored_bytes: the memory they take now.
    packed_tokens: tokens whose K or V (as scope says) lie in blocks; raw_tokens: the others held.
    state_bytes: recurrent and convolution states, which are not KV.
    """

    index: int
    kind: str
    raw_bytes: int
    stored_bytes: int
    packed_tokens: int
    raw_tokens: int
    state_bytes: int = 0


def count_layer(index: int, layer: Any) -> LayerBytes:
    """The record of one layer of a cache, ours or the library's."""
    if isinstance(layer, BlockCompressedLayer):
        return _count_blocks(index, layer)
    names = ("keys", "values", "indexer_keys")
    held = [tensor for name in names if (tensor := getattr(layer, name, None)) is not None]
    states = [tensor for tensor in _state_tensors(layer) if tensor is not None]
    keys = getattr(layer, "keys", None)
    return LayerBytes(
        index=index,
        kind=_kind(layer),
        raw_bytes=sum(tensor.numel() * tensor.element_size() for tensor in held),
        stored_bytes=storage_bytes(held),
        packed_tokens=0,
        raw_tokens=keys.shape[-2] if keys is not None and keys.ndim > 1 else 0,
        state_bytes=storage_bytes(states),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _count_blocks(index: int, layer: BlockCompressedLayer) -> LayerBytes:
    packed = max((lane.packed_tokens for lane in layer.lanes), default=0)
    return LayerBytes(
        index=index,
        kind="blocks",
        raw_bytes=sum(lane.raw_bytes for lane in layer.lanes),
        stored_bytes=storage_bytes(tensor for lane in layer.lanes for tensor in lane.tensors()),
        packed_tokens=packed,
        raw_tokens=layer.get_seq_length() - packed,
    )


def _state_tensors(layer: Any) -> list[Any]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    return [*_as_list(layer.conv_states), *_as_list(layer.recurrent_states)]


def _as_list(states: Any) -> list[Any]:
    # A dict by state index since several states a layer are possible, one tensor before.
    return list(states.values()) if isinstance(states, dict) else [states]


def _kind(layer: Any) -> str:
    if isinstance(layer, dummy_layers()):
        return "dummy"
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "hybrid" if isinstance(layer, CacheLayerMixin) else "linear"
    return "sliding" if getattr(layer, "is_sliding", False) else "full"
