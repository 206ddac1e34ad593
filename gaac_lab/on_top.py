"""Lossless on top of lossy: what a lossless coder can still save on what a lossy route stores.

For codes of a quantiser the answer is a bound, their order-0 entropy against their width, and what
a real coder makes of them. For a window the tokens are bf16 as before, and gaac's ratio with them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from gaac_lab import kv
from gaac_lab.codec import KVCodec
from gaac_lab.entropy import RAW_BITS, entropy_bits, floors, mean_floor
from gaac_lab.lossy_layer import LossyCache
from gaac_lab.prefilled import Prefilled
from gaac_lab.quantised import BITS, Packed, QuantisedLayer, codes_of
from gaac_lab.token_policies import WindowLayer


def on_top(
    config: Any,
    prefilled: Prefilled,
    *,
    window: int,
    bits: Sequence[int] = BITS,
    level: int = 3,
    block_tokens: int = 128,
) -> pd.DataFrame:
    """One row a route and part (K or V), means over layers weighted by values.

    Columns: route, part, width_bits (of a stored value, scales apart), entropy_bits (one table a
    layer), channel_entropy_bits (one table a channel and KV head, which no coder gets for free),
    bound (width_bits over the lower of the two: no coder of single codes can save more; NaN where
    nothing is left to store), achieved (a real coder, headers included: zlib's Huffman over the
    stored bytes, or gaac for 16 bits).
    For bf16 and fp16 the entropies are those of sign, exponent and mantissa (gaac_lab.entropy).
    With few tokens a channel's table is thin, and its entropy no more than a hint.
    """
    rows = []
    for width in bits:
        cache = prefilled.fill(LossyCache(config, lambda: QuantisedLayer(width)))  # noqa: B023
        for part, packed in _packed_sides(cache).items():
            rows.append({"route": f"{width} bit", "part": part, **_codes_row(width, packed)})
    rows += _bf16_rows("uncompressed", prefilled.cache, level, block_tokens)
    kept = prefilled.fill(LossyCache(config, lambda: WindowLayer(window)))
    rows += _bf16_rows(f"window of {window}", kept, level, block_tokens)
    return pd.DataFrame(rows)


def _packed_sides(cache: LossyCache) -> dict[str, list[Packed]]:
    """The quantised blocks of K and of V of all layers. ValueError if there are none."""
    layers = [layer for layer in cache.layers if isinstance(layer, QuantisedLayer)]
    sides = {
        part: [layer.packed[index] for layer in layers if layer.packed[index] is not None]
        for index, part in enumerate("kv")
    }
    if not all(sides.values()):
        raise ValueError("No block is full, so there are no codes to count: read more tokens.")
    return sides  # type: ignore[return-value]


def _codes_row(width: int, layers: Sequence[Packed]) -> dict[str, Any]:
    codes = [codes_of(packed) for packed in layers]
    values = sum(tensor.numel() for tensor in codes)

    def mean(bits: Iterator[float]) -> float:
        pairs = zip(bits, codes, strict=True)
        return sum(one * tensor.numel() for one, tensor in pairs) / values

    whole = mean(entropy_bits(_counts(tensor, 2**width)) for tensor in codes)
    channel = mean(_channel_entropy_bits(tensor, width) for tensor in codes)
    coded = sum(_huffman_bytes(packed.codes) for packed in layers)
    lowest = min(whole, channel)
    return {
        "width_bits": float(width),
        "entropy_bits": whole,
        "channel_entropy_bits": channel,
        "bound": width / lowest if lowest > 0 else None,
        "achieved": values * width / 8 / coded,
    }


def _channel_entropy_bits(codes: torch.Tensor, width: int) -> float:
    """The mean over KV heads and channels of [batch, kv_heads, blocks, tokens, head_dim] codes."""
    by_channel = codes.permute(1, 4, 0, 2, 3).flatten(2).flatten(0, 1)
    return sum(entropy_bits(_counts(row, 2**width)) for row in by_channel) / len(by_channel)


def _counts(codes: torch.Tensor, symbols: int) -> torch.Tensor:
    return torch.bincount(codes.flatten().int(), minlength=symbols).cpu()


def _huffman_bytes(stored: torch.Tensor) -> int:
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return len(coder.compress(stored.cpu().numpy().tobytes()) + coder.flush())


def _bf16_rows(route: str, cache: Any, level: int, block_tokens: int) -> list[dict[str, Any]]:
    codec = KVCodec(level=level, block_tokens=block_tokens)
    rows = []
    for part in "kv":
        tensors = [dict(layer.parts())[part].contiguous() for layer in kv.layers(cache)]
        floor = mean_floor([floors(tensor) for tensor in tensors])
        raw = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        rows.append(
            {
                "route": route,
                "part": part,
                "width_bits": float(RAW_BITS),
                "entropy_bits": floor.total_bits,
                "channel_entropy_bits": floor.channel_total_bits,
                "bound": max(floor.ratio, floor.channel_ratio),
                "achieved": raw / sum(len(codec.encode(tensor)) for tensor in tensors),
            }
        )
    return rows
