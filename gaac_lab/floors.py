"""The entropy floors of a model's own cache, for K and V, in both 16-bit formats."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from gaac_lab import entropy, kv


def table(cache: Any) -> pd.DataFrame:
    """Four rows: K and V, in bf16 and fp16, each the mean over all layers.

    `cache` holds float32, so that both formats are rounded once from the same values; a cache that
    was computed in one of them would flatter the other. Columns: name, dtype, part, and those of
    `entropy.EntropyFloor`. Raises ValueError for another dtype.
    """
    held = list(kv.layers(cache))
    dtypes = {tensor.dtype for layer in held for _, tensor in layer.parts()}
    if dtypes != {torch.float32}:
        raise ValueError(f"the cache holds {dtypes}: read the prompt in float32 for both floors")
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        for part in ("k", "v"):
            tensors = [dict(layer.parts())[part] for layer in held]
            floor = entropy.mean_floor([entropy.floors(tensor.to(dtype)) for tensor in tensors])
            name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
            rows.append({"name": f"{name} {part.upper()}", "part": part, **vars(floor)})
    return pd.DataFrame(rows)
