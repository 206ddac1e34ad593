"""One reading of a prompt, from which the cache of every route is made.

All routes begin from the same K and V, computed with nothing missing, and compress afterwards. It
is the best case for the lossy ones: in a server that drops or rounds while it still reads, the K
and V of later tokens would already have been computed from what was left.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from gaac.hf import prefill
from gaac_lab.attention_weights import received, watched

BEST_CASE = "compressed after the prefill, which saw everything: a best case for lossy routes"

AnyCache = TypeVar("AnyCache", bound=DynamicCache)


@dataclass(frozen=True, eq=False)
class Prefilled:
    """What was read: nobody may change it.

    cache: uncompressed. attention: by layer that keeps every token, what each token got from all
    queries, [batch, kv_heads, tokens] in float32. logits: the last position's, [batch, vocabulary].
    """

    cache: DynamicCache
    attention: dict[int, torch.Tensor]
    logits: torch.Tensor
    tokens: int

    def fill(self, cache: AnyCache) -> AnyCache:
        """`cache`, which must be empty and of the same model, with what was read in it."""
        for index, held in enumerate(self.cache.layers):
            if type(held) is not DynamicLayer:  # slides, shares or recurs: as the library made it
                cache.layers[index] = copy.deepcopy(held)
                continue
            layer: Any = cache.layers[index]
            layer.update(held.keys, held.values)
            if hasattr(layer, "observe"):
                layer.observe(self.attention[index])
        return cache


@torch.no_grad()
def read(model: Any, input_ids: torch.Tensor, *, chunk_tokens: int = 256) -> Prefilled:
    """Read [batch, tokens] ids with eager attention, `chunk_tokens` queries at a time.

    The attention weights of one layer and chunk are held at a time, query_heads * chunk_tokens *
    tokens of them. Prompts must be without padding.
    """
    cache = DynamicCache(config=model.config)
    attention: dict[int, torch.Tensor] = {}

    def see(index: int, weights: torch.Tensor) -> None:
        layer = cache.layers[index]
        if type(layer) is not DynamicLayer:
            return
        total = received(weights, layer.keys.shape[1])
        if index in attention:
            total[..., : attention[index].shape[-1]] += attention[index]
        attention[index] = total

    names = inspect.signature(model.forward).parameters
    last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    with watched(model, see):
        output = prefill(
            model, input_ids.to(model.device), cache, chunk_tokens=chunk_tokens, **last_only
        )
    return Prefilled(cache, attention, output.logits[:, -1].clone(), int(input_ids.shape[1]))
