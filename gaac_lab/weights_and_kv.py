"""4-bit weights and lossless KV together: what each takes off the memory of one request.

The two do not touch each other: one shrinks what is read once per step whatever the context, the
other what grows with it. Here the weights are counted, not run: this process computes with them
expanded to 16 bits, so only their bytes are those of the 4-bit file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch

from gaac.hf import BlockCompressedCache
from gaac_lab import kv, models, verify
from gaac_lab.default_model import default_path, read_source

BLOCK_VALUES = 32
BLOCK_BYTES = 20  # Q4_1: 32 codes of 4 bits, a scale and a minimum in fp16
UNPACKED_BYTES = 4  # GGUF keeps vectors, such as the norms, in float32

NOTE = (
    "Weights in 4 bits are counted as stored (a GGUF file may keep some wider: the default model's "
    "has its embedding in 8 bits); this process runs them expanded to 16 bits. KV is what this "
    "run's prompt takes."
)


def weights_and_kv(
    model: Any, input_ids: torch.Tensor, *, name: str, level: int = 1, block_tokens: int = 256
) -> pd.DataFrame:
    """Four rows, weights in 16 or 4 bits by KV raw or lossless, for [batch, tokens] ids.

    name: what the model was loaded from. Columns: weights, kv, weight_bytes, weights_from
    ("measured", "GGUF file" or "Q4_1 format"), kv_bytes (measured), total_bytes, share (of the
    first row), saved_by_weights_bytes and saved_by_kv_bytes (against the first row).
    """
    cache = verify.read(model, input_ids)
    packed = BlockCompressedCache(model.config, level=level, block_tokens=block_tokens)
    for layer in kv.growing_layers(cache):
        packed.layers[layer.layer].update(layer.keys, layer.values)
    kept = kv.raw_bytes(cache) - sum(
        part.numel() * part.element_size()
        for layer in kv.growing_layers(cache)
        for _, part in layer.parts()
    )
    return table(
        weight_bytes=models.describe(model).weight_bytes,
        four_bit=four_bit_bytes(model, name),
        kv_raw_bytes=kv.raw_bytes(cache),
        kv_lossless_bytes=kv.stored_bytes(packed) + kept,
    )


def table(
    *, weight_bytes: int, four_bit: tuple[int, str], kv_raw_bytes: int, kv_lossless_bytes: int
) -> pd.DataFrame:
    """The four combinations, from their bytes; see `weights_and_kv`."""
    first = weight_bytes + kv_raw_bytes
    rows = []
    for weights, size, source in (("16 bits", weight_bytes, "measured"), ("4 bits", *four_bit)):
        for held, kv_bytes in (("raw", kv_raw_bytes), ("lossless", kv_lossless_bytes)):
            rows.append(
                {
                    "weights": weights,
                    "kv": held,
                    "weight_bytes": size,
                    "weights_from": source,
                    "kv_bytes": kv_bytes,
                    "total_bytes": size + kv_bytes,
                    "share": (size + kv_bytes) / first,
                    "saved_by_weights_bytes": weight_bytes - size,
                    "saved_by_kv_bytes": kv_raw_bytes - kv_bytes,
                }
            )
    return pd.DataFrame(rows)


def four_bit_bytes(model: Any, name: str) -> tuple[int, str]:
    """(bytes of the weights in 4 bits, where the number is from).

    The size of the GGUF file that the weights came from, where it was recorded; else what the
    format Q4_1 takes, with matrices whose rows are whole blocks packed and all else in float32.
    """
    folder = default_path() if name == models.DEFAULT else Path(name)
    recorded = (read_source(folder) or {}).get("gguf_bytes")
    if recorded is not None:
        return int(recorded), "GGUF file"
    return sum(map(_q4_1_bytes, model.parameters())), "Q4_1 format"


def _q4_1_bytes(weight: torch.Tensor) -> int:
    if weight.ndim == 2 and weight.shape[1] % BLOCK_VALUES == 0:
        return weight.numel() // BLOCK_VALUES * BLOCK_BYTES
    return weight.numel() * UNPACKED_BYTES
