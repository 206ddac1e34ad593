"""How fast a codec packs and unpacks real KV blocks, and at which link speed that pays."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaac.hf import rope_of_layer
from gaac_lab import kv
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.measure import Failure, attempt, quiet_collector, timed
from gaac_lab.request import Request

Record = dict[str, Any]


COLUMNS = (
    "encode_gb_s",
    "decode_gb_s",
    "encode_block_p50_s",
    "encode_block_p95_s",
    "decode_block_p50_s",
    "decode_block_p95_s",
    "block_n",
    "codec_ratio",
    "pack_s_per_token",
)


@dataclass(frozen=True)
class _Block:
    """One block of K or V, and the hints that the cache would pack it with."""

    tensor: torch.Tensor
    kind: str
    rope: Any


@dataclass
class _Clock:
    """Times and bytes of one configuration's blocks."""

    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    raw_bytes: int = 0
    stored_bytes: int = 0


def measure(
    model: Any,
    input_ids: torch.Tensor,
    configurations: Sequence[Configuration],
    *,
    sample_layers: int = 6,
    repeats: int = 3,
) -> list[Record]:
    """A record for each configuration: block latencies and throughput on the prompt's own KV.

    Full blocks of some of the layers that the cache packs, K and V as the scope says. In each
    repeat the codecs take turns; each packs all its blocks before it unpacks any, so that none is
    found in a cache. Keys (`COLUMNS`): GB/s are uncompressed bytes over the median;
    pack_s_per_token is what packing adds to a step on average, over all layers. All null without a
    codec, where no layer packs, where the prompt is shorter than a block, and where memory ran out.
    """
    sample = attempt(lambda: _sample(model, input_ids, sample_layers))
    if isinstance(sample, Failure):
        return [dict.fromkeys(COLUMNS) for _ in configurations]
    held, layers = sample
    blocks = [_blocks(configuration, held, model.config) for configuration in configurations]
    clocks = [_Clock() for _ in configurations]
    for _ in range(repeats):
        for configuration, own, clock in zip(configurations, blocks, clocks, strict=True):
            if own:
                _time(configuration.make_codec(), own, clock)
    return [
        _record(configuration, clock, layers)
        for configuration, clock in zip(configurations, clocks, strict=True)
    ]


def _sample(model: Any, input_ids: torch.Tensor, count: int) -> tuple[list[kv.LayerKV], int]:
    """KV of about `count` layers among those that grow, and how many of those there are."""
    reader = Request.of(model, input_ids, BASELINE)
    reader.prefill()
    growing = list(kv.growing_layers(reader.cache))
    return growing[:: max(1, len(growing) // count)], len(growing)


def _blocks(configuration: Configuration, held: list[kv.LayerKV], config: Any) -> list[_Block]:
    if not configuration.is_compressed:
        return []
    size = configuration.block_tokens
    return [
        _Block(tensor[:, :, start : start + size].contiguous(), part, rope if part == "k" else None)
        for layer in held
        for rope in (rope_of_layer(config, layer.layer),)
        for part, tensor in layer.parts()
        if part in configuration.scope
        for start in range(0, tensor.shape[2] - size + 1, size)
    ]


def _time(codec: Any, blocks: list[_Block], clock: _Clock) -> None:
    device = blocks[0].tensor.device

    def encode(block: _Block) -> bytes:
        blob: bytes = codec.encode(block.tensor, kind=block.kind, rope=block.rope)
        return blob

    codec.decode(encode(blocks[0]))
    with quiet_collector():
        blobs = []
        for block in blocks:
            blob, seconds = timed(device, functools.partial(encode, block))
            clock.encode_s.append(seconds)
            blobs.append(blob)
        for blob in blobs:
            clock.decode_s.append(timed(device, functools.partial(codec.decode, blob))[1])
    clock.raw_bytes += sum(block.tensor.numel() * block.tensor.element_size() for block in blocks)
    clock.stored_bytes += sum(map(len, blobs))


def _record(configuration: Configuration, clock: _Clock, layers: int) -> Record:
    if not clock.encode_s:
        return dict.fromkeys(COLUMNS)
    block_bytes = clock.raw_bytes / len(clock.encode_s)
    encode_s, decode_s = statistics.median(clock.encode_s), statistics.median(clock.decode_s)
    blocks_at_once = layers * len(configuration.scope)  # "kv": a block of K and one of V
    return {
        "encode_gb_s": block_bytes / encode_s / 1e9,
        "decode_gb_s": block_bytes / decode_s / 1e9,
        "encode_block_p50_s": encode_s,
        "encode_block_p95_s": _p95(clock.encode_s),
        "decode_block_p50_s": decode_s,
        "decode_block_p95_s": _p95(clock.decode_s),
        "block_n": len(clock.encode_s),
        "codec_ratio": clock.raw_bytes / clock.stored_bytes,
        "pack_s_per_token": encode_s * blocks_at_once / configuration.block_tokens,
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


def break_even_column(records: Sequence[Record]) -> list[float | None]:
    """`break_even_link_gb_s` of each record, null where its codec was not timed."""
    return [
        break_even_link_gb_s(r["codec_ratio"], r["encode_gb_s"], r["decode_gb_s"])
        if r.get("encode_gb_s") is not None
        else None
        for r in records
    ]


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.95 * (len(values) - 1)))]
