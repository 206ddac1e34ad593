"""The entropy floors of a model's own cache, for K and V, in both 16-bit formats."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from gaac_lab import entropy, kv, memory, models, verify

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def of_model(model: Any, input_ids: torch.Tensor) -> pd.DataFrame:
    """`table` of the cache after reading [batch, tokens] ids, in float32 where memory allows.

    Only from float32 can both formats be rounded; where the weights do not fit twice more, the
    floor of the model's own format stands alone. The model is left in the format it had.
    """
    dtype = model.dtype
    try:
        memory.require(2 * models.describe(model).weight_bytes, model.device, "float32")
    except MemoryError:
        return table(verify.read(model, input_ids))
    try:
        return table(verify.read(model.to(torch.float32), input_ids))
    finally:
        model.to(dtype)  # exact: 16 bits to 32 and back


def table(cache: Any) -> pd.DataFrame:
    """Rows for K and V, each the mean over all layers: in bf16 and fp16 for a float32 cache.

    A 16-bit cache gives its own format alone, since rounding it again to the other would flatter.
    Columns: name, dtype, part, saves (the share that coding each value on its own, sign and
    exponent given the channel, could save at best), and those of `entropy.EntropyFloor`.
    """
    held = list(kv.layers(cache))
    dtype = held[0].keys.dtype
    rows = []
    for target in [dtype] if dtype in FORMATS else list(FORMATS):
        for part in ("k", "v"):
            tensors = [dict(layer.parts())[part].to(target) for layer in held]
            floor = entropy.mean_floor([entropy.floors(tensor) for tensor in tensors])
            name = f"{FORMATS[target]} {part.upper()}"
            saves = 1 - floor.channel_total_bits / entropy.RAW_BITS
            rows.append({"name": name, "part": part, "saves": saves, **vars(floor)})
    return pd.DataFrame(rows)
