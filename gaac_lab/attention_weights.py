"""Who looks at what: the attention weights of a model while it runs, layer by layer.

transformers' eager attention gives its weights away; every other kernel keeps them to itself. All
lossy routes are therefore run under eager attention, so that nothing but the cache differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gaac_lab.attention import switched

See = Callable[[int, torch.Tensor], None]


@contextmanager
def attending(model: Any, cache: Any) -> Iterator[None]:
    """Eager attention, with its weights handed to the layers of `cache` that have `observe`."""
    asking = {index: layer for index, layer in enumerate(cache.layers) if hasattr(layer, "observe")}

    def see(index: int, weights: torch.Tensor) -> None:
        if index in asking:
            layer = asking[index]
            layer.observe(received(weights, layer.keys.shape[1]))

    with watched(model, see) if asking else switched(model, "eager"):
        yield


@contextmanager
def watched(model: Any, see: See) -> Iterator[None]:
    """Eager attention; `see(layer, weights)` gets [batch, query_heads, queries, tokens] each time.

    Raises ValueError where the model has no attention modules that can be watched.
    """
    modules = {
        module.layer_idx: module
        for module in model.modules()
        if type(module).__name__.endswith("Attention")
        and getattr(module, "layer_idx", None) is not None
    }
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no attention modules with a layer_idx, so nobody can "
            "watch its attention: choose another model."
        )
    with switched(model, "eager"):
        hooks = [
            module.register_forward_hook(partial(_hand_over, see, index))
            for index, module in modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def received(weights: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The attention each token got, [batch, kv_heads, tokens] in float32.

    weights: [batch, query_heads, queries, tokens]; summed over the queries and over the query heads
    that share a KV head.
    """
    return weights.sum(2, dtype=torch.float32).unflatten(1, (kv_heads, -1)).sum(2)


def _hand_over(see: See, index: int, module: Any, inputs: Any, output: Any) -> None:
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if weights is None:
        raise ValueError(
            f"{type(module).__name__} does not give its attention weights away: choose another "
            "model."
        )
    see(index, weights)
