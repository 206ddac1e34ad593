"""How fast a codec packs and unpacks real KV blocks, and at which link speed that pays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from gaac_lab import kv
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.measure import quiet_collector, timed
from gaac_lab.request import Request

Record = dict[str, Any]


def measure(
    model: Any,
    input_ids: torch.Tensor,
    configurations: Sequence[Configuration],
    *,
    sample_layers: int = 6,
    repeats: int = 3,
) -> list[Record]:
    """A record for each configuration: block latencies and throughput on the prompt's own KV.

    Full blocks of some layers, K and V as the scope says, packed and unpacked by one thread of
    control; the codecs take turns. Keys: encode_gb_s, decode_gb_s (uncompressed bytes over the
    medians), encode_block_p50_s, _p95_s, decode_block_p50_s, _p95_s, block_n, codec_ratio. All null
    for the baseline, and where the prompt is shorter than a block.
    """
    reader = Request(model, input_ids, BASELINE.make_cache(model.config))
    reader.prefill()
    held = list(kv.layers(reader.cache))
    step = max(1, len(held) // sample_layers)
    return [_measure_one(configuration, held[::step], repeats) for configuration in configurations]


def _measure_one(configuration: Configuration, held: list[kv.LayerKV], repeats: int) -> Record:
    empty = dict.fromkeys(
        [
            "encode_gb_s",
            "decode_gb_s",
            "encode_block_p50_s",
            "encode_block_p95_s",
            "decode_block_p50_s",
            "decode_block_p95_s",
            "block_n",
            "codec_ratio",
        ]
    )
    if configuration.is_baseline:
        return empty
    size = configuration.block_tokens
    blocks = [
        tensor[:, :, start : start + size].contiguous()
        for layer in held
        for part, tensor in layer.parts()
        if part in configuration.scope
        for start in range(0, tensor.shape[2] - size + 1, size)
    ]
    if not blocks:
        return empty
    codec = configuration.make_codec()
    device = blocks[0].device
    codec.decode(codec.encode(blocks[0]))
    encode_s, decode_s, stored_bytes = [], [], 0
    with quiet_collector():
        for index in range(repeats * len(blocks)):
            block = blocks[index % len(blocks)]
            blob, seconds = timed(device, lambda: codec.encode(block))  # noqa: B023
            encode_s.append(seconds)
            decode_s.append(timed(device, lambda: codec.decode(blob))[1])  # noqa: B023
            stored_bytes += len(blob)
    block_bytes = blocks[0].numel() * blocks[0].element_size()
    return {
        "encode_gb_s": block_bytes / statistics.median(encode_s) / 1e9,
        "decode_gb_s": block_bytes / statistics.median(decode_s) / 1e9,
        "encode_block_p50_s": statistics.median(encode_s),
        "encode_block_p95_s": _p95(encode_s),
        "decode_block_p50_s": statistics.median(decode_s),
        "decode_block_p95_s": _p95(decode_s),
        "block_n": len(encode_s),
        "codec_ratio": block_bytes * len(encode_s) / stored_bytes,
    }


def break_even_link_gb_s(ratio: float, encode_gb_s: float, decode_gb_s: float) -> float | None:
    """The link speed below which sending compressed blocks is faster than sending them raw.

    Uncompressed bytes per second throughout: sending raw takes 1/L a byte, compressed 1/E + 1/(r*L)
    + 1/D when nothing overlaps; they are equal at L = (1 - 1/r) / (1/E + 1/D). None when the data
    does not shrink, so that no link is slow enough.
    """
    if ratio <= 1:
        return None
    return (1 - 1 / ratio) / (1 / encode_gb_s + 1 / decode_gb_s)


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.95 * (len(values) - 1)))]
