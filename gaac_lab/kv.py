"""What a cache holds: full K and V of each layer and their bytes, for any transformers cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer, each [batch, kv_heads, tokens, head_dim]."""

    layer: int
    keys: torch.Tensor
    values: torch.Tensor

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "k", self.keys
        yield "v", self.values


def layers(cache: Any) -> Iterator[LayerKV]:
    """Every layer that holds KV, one at a time, so that a compressed cache is never open as a
    whole.

    Layers that recur, or share another layer's KV, hold none and are left out.
    """
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            yield LayerKV(index, keys, values)


def growing_layers(cache: Any) -> Iterator[LayerKV]:
    """The layers of a DynamicCache that keep every token: those that a compressed cache packs."""
    from transformers.cache_utils import DynamicLayer

    for held in layers(cache):
        if type(cache.layers[held.layer]) is DynamicLayer:
            yield held


def raw_bytes(cache: Any) -> int:
    """Bytes of K and V as they would lie uncompressed."""
    if hasattr(cache, "raw_bytes"):
        return int(cache.raw_bytes)
    return sum(t.numel() * t.element_size() for kv in layers(cache) for _, t in kv.parts())


def stored_bytes(cache: Any) -> int:
    """Bytes that the cache really holds: whole storages, since a view keeps all of its storage."""
    if hasattr(cache, "stored_bytes"):
        return int(cache.stored_bytes)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for kv in layers(cache)
        for _, t in kv.parts()
    }
    return sum(storages.values())


def bytes_together(caches: Iterable[Any]) -> int:
    """Bytes that several caches hold together; what they share counts once."""
    from gaac.hf.accounting import storage_bytes

    return storage_bytes(
        tensor for cache in caches for layer in cache.layers for tensor in _tensors(layer)
    )


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    """Every tensor of KV that a layer keeps alive, packed or raw."""
    from gaac.hf.layer import BlockCompressedLayer

    if isinstance(layer, BlockCompressedLayer):
        for lane in layer.lanes:
            yield from lane.tensors()
        return
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            yield tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bits, not of values: NaN payloads and the sign of zero count."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def same_cache(a: Any, b: Any) -> bool:
    """Whether two caches hold the same bits in every layer."""
    count = 0
    for left, right in zip(layers(a), layers(b), strict=True):
        if not (same_bits(left.keys, right.keys) and same_bits(left.values, right.values)):
            return False
        count += 1
    return count > 0
