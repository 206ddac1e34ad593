"""The codec beside its peers, on the KV of a real model, one thread.

    python benchmarks/codec.py [--model FOLDER] [--dtype bfloat16] [--tokens 1536] [--repeats 9]

K and V of every third layer, in pieces as the cache hands them over (one layer, --block tokens).
Each codec that is installed codes all pieces, then the next codec does, and so on round after
round, so that a slow moment of the machine falls on all of them. MB/s counts uncompressed bytes:
median over the rounds and, behind ±, half the distance of the quartiles. Every round trip is
compared bit for bit. zipnn overwrites what it compresses, so it gets a fresh copy each time, made
outside the clock. The last line is one JSON document with the same numbers.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import gaac


@dataclass(frozen=True)
class Codec:
    """Something that codes one piece; `prepare` makes its input, outside the clock."""

    name: str
    prepare: Callable[[torch.Tensor], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def raw(piece: torch.Tensor) -> bytes:
    return piece.contiguous().view(torch.int16).numpy().tobytes()


def words(piece: torch.Tensor) -> np.ndarray:
    return np.frombuffer(raw(piece), np.uint16)


def ours(level: int) -> Codec:
    encode = partial(gaac.encode, level=level)
    return Codec(f"gaac {level} {gaac.LEVELS[level]}", lambda piece: piece, encode, gaac.decode)


def zipnn(dtype: str) -> Codec:
    made = import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    return Codec("zipnn", lambda piece: bytearray(raw(piece)), made.compress, made.decompress)


def pcodec(dtype: str) -> Codec:
    module = import_module("pcodec")
    config, alone = module.ChunkConfig(), module.standalone
    encode = partial(alone.simple_compress, config=config)
    return Codec("pcodec, as u16", words, encode, alone.simple_decompress)


def blosc2(dtype: str) -> Codec:
    module = import_module("blosc2")
    module.set_nthreads(1)
    encode = partial(module.compress, typesize=2, clevel=1, codec=module.Codec.ZSTD)
    return Codec("blosc2 zstd-1 shuffle", raw, encode, module.decompress)


def zstd(dtype: str) -> Codec:
    module = import_module("zstandard")
    encode, decode = module.ZstdCompressor(level=1).compress, module.ZstdDecompressor().decompress
    return Codec("zstd-1", raw, encode, decode)


def lz4(dtype: str) -> Codec:
    module = import_module("lz4.frame")
    return Codec("lz4 frame", raw, module.compress, module.decompress)


def memcpy(dtype: str) -> Codec:
    return Codec("memcpy", words, np.copy, np.copy)


def codecs(dtype: str) -> list[Codec]:
    found = [ours(level) for level in gaac.LEVELS]
    for make in (zipnn, pcodec, blosc2, zstd, lz4, memcpy):
        try:
            found.append(make(dtype))
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def kv(model_path: Path, dtype: str, tokens: int) -> list[torch.Tensor]:
    """K and V of every third layer after `tokens` tokens of Python's documentation."""
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    # float16 is slow on CPUs: the model runs in float32, its KV is rounded.
    run_in = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=run_in).eval()
    text = "\n".join(topics[key] for key in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    cache = DynamicCache(config=model.config)
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    with torch.inference_mode():
        model(ids, **{name: cache}, logits_to_keep=1)
    layers = cache.layers[::3]
    return [
        half.to(getattr(torch, dtype)) for layer in layers for half in (layer.keys, layer.values)
    ]


def clocked(call: Callable[[Any], Any], inputs: list[Any]) -> tuple[float, list[Any]]:
    start = time.perf_counter()
    results = [call(item) for item in inputs]
    return time.perf_counter() - start, results


def same(result: Any, piece: torch.Tensor) -> bool:
    if isinstance(result, torch.Tensor):
        return torch.equal(result.view(torch.int16), piece.contiguous().view(torch.int16))
    return bytes(result) == raw(piece)


def measure(chosen: list[Codec], pieces: list[torch.Tensor], repeats: int) -> list[dict[str, Any]]:
    total = sum(2 * piece.numel() for piece in pieces)
    speeds: dict[str, dict[str, list[float]]] = {c.name: {"enc": [], "dec": []} for c in chosen}
    stored = {}
    for repeat in range(repeats + 1):  # the first round warms up
        for codec in chosen:
            inputs = [codec.prepare(piece) for piece in pieces]
            encode_s, blobs = clocked(codec.encode, inputs)
            stored[codec.name] = sum(memoryview(blob).nbytes for blob in blobs)
            decode_s, results = clocked(codec.decode, blobs)
            if not all(map(same, results, pieces)):
                raise SystemExit(f"{codec.name} did not give back what it was given.")
            if repeat:
                speeds[codec.name]["enc"].append(total / encode_s / 1e6)
                speeds[codec.name]["dec"].append(total / decode_s / 1e6)
    return [row(c.name, total / stored[c.name], speeds[c.name], repeats) for c in chosen]


def row(name: str, ratio: float, speeds: dict[str, list[float]], repeats: int) -> dict[str, Any]:
    result: dict[str, Any] = {"codec": name, "ratio": round(ratio, 4), "n": repeats}
    for key, label in (("enc", "encode"), ("dec", "decode")):
        low, middle, high = statistics.quantiles(speeds[key], n=4)
        result[f"{label}_mb_s"] = round(middle, 1)
        result[f"{label}_spread_mb_s"] = round((high - low) / 2, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder; default: the project's own")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--block", type=int, default=256, help="tokens a piece; 0: whole layers")
    parser.add_argument("--repeats", type=int, default=9, help="rounds measured, at least 2")
    options = parser.parse_args()
    if options.model is None:
        from gaac_lab import models

        options.model = models.default_path()
    layers = kv(options.model, options.dtype, options.tokens)
    torch.set_num_threads(1)
    pieces = [
        part.contiguous() for layer in layers for part in layer.split(options.block or 10**9, dim=2)
    ]
    results = measure(codecs(options.dtype), pieces, options.repeats)
    piece_bytes = 2 * pieces[0].numel()
    title = f"{options.dtype} KV, {len(pieces)} pieces of {piece_bytes / 1e3:.0f} KB, one thread"
    table = Table("codec", "ratio", "encode MB/s", "decode MB/s", "N", title=title)
    for item in results:
        encode, decode = (
            f"{item[f'{key}_mb_s']:.0f} ± {item[f'{key}_spread_mb_s']:.0f}"
            for key in ("encode", "decode")
        )
        table.add_row(item["codec"], f"{item['ratio']:.3f}", encode, decode, str(item["n"]))
    Console().print(table)
    facts = {"dtype": options.dtype, "tokens": options.tokens, "piece_bytes": piece_bytes}
    print(json.dumps({**facts, "pieces": len(pieces), "rows": results}))


if __name__ == "__main__":
    main()
