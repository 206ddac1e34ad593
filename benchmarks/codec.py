"""gaac beside its peers, on the KV of a real model: ratio, and speed with its spread.

    python benchmarks/codec.py [--quick] [--dtype bfloat16] [--tokens 1536] [--repeats 9]
                               [--text code] [--plot codec.png] [--json] [--model NAME]

K and V of every layer, after two texts, in pieces as a cache hands them over: one block of 256
tokens a call, and one whole layer a call. Each codec codes all pieces, then the next codec does,
and so on round after round, with a copy of the same bytes (memcpy) in every round, so that a slow
moment of the machine falls on all of them. MB/s counts uncompressed bytes: the median of the rounds
and, behind ±, half the distance of the quartiles; "/ copy" is the median of the quotients of one
round. The copy is into memory that is already there, by one thread. Ratios count every byte of
every blob. Every round trip is compared bit for bit, outside the clock.

"K+V" is K and V of all layers taken together, in bytes and in seconds. The floors are those of
`gaac_lab.entropy`. The last line is one JSON document with the same numbers, for K, V and both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import codec_report
import numpy as np
import torch
from contenders import Contender, contenders
from kv_pieces import TEXTS, LayerKV, Piece, Reader, cut
from rich.console import Console

from gaac_lab import entropy, machine, models

BLOCK_TOKENS = 256
GRANULARITIES = {"block": BLOCK_TOKENS, "layer": None}
PARTS = {"k": ("k",), "v": ("v",), "kv": ("k", "v")}
QUICK = {"tokens": 512, "repeats": 3}
FULL = {"tokens": 1536, "repeats": 9}

Row = dict[str, Any]


@dataclass
class Seconds:
    """Seconds of each round, by (codec, part): encode, decode, and the copy of that round."""

    encode: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    decode: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    memcpy: dict[str, list[float]] = field(default_factory=dict)


def same(result: Any, piece: Piece) -> bool:
    if isinstance(result, torch.Tensor):
        return torch.equal(result.view(torch.int16), piece.tensor.view(torch.int16))
    return bytes(result) == piece.to_bytes()


class Copies:
    """The same pieces copied by numpy, into memory that is already there."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.sources = [piece.tensor.view(torch.int16).numpy() for piece in pieces]
        self.targets = [np.empty_like(source) for source in self.sources]

    def clocked(self) -> float:
        start = time.perf_counter()
        for target, source in zip(self.targets, self.sources, strict=True):
            np.copyto(target, source)
        return time.perf_counter() - start


def one_round(
    contender: Contender, pieces: Sequence[Piece], blobs: list[Any]
) -> tuple[float, float]:
    """Seconds to encode and to decode all pieces; exits if a bit differs.

    blobs: those of the round before, which the new ones replace one by one. So neither they nor
    what is decoded takes memory that the process has not got yet, which would cost more than the
    work that is to be measured.
    """
    encode_s = decode_s = 0.0
    inputs = [contender.prepare(piece) for piece in pieces]
    for index, given in enumerate(inputs):
        start = time.perf_counter()
        blob = contender.encode(given)
        encode_s += time.perf_counter() - start
        blobs[index] = blob
    for blob, piece in zip(blobs, pieces, strict=True):
        start = time.perf_counter()
        result = contender.decode(blob)
        decode_s += time.perf_counter() - start
        if not same(result, piece):
            raise SystemExit(f"{contender.name} did not give back what it was given.")
    return encode_s, decode_s


def measure(chosen: list[Contender], pieces: Sequence[Piece], repeats: int) -> list[Row]:
    """Rows of all codecs for K, V and both; the round before the first warms up."""
    by_part = {part: [piece for piece in pieces if piece.part == part] for part in PARTS["kv"]}
    copies = {part: Copies(held) for part, held in by_part.items()}
    blobs = {
        (one.name, part): [b""] * len(held) for one in chosen for part, held in by_part.items()
    }
    seconds = Seconds()
    for repeat in range(repeats + 1):
        turn = repeat % len(chosen)  # nobody comes always first, or after the same one
        for part, held in by_part.items():
            copy_s = copies[part].clocked()
            if repeat:
                seconds.memcpy.setdefault(part, []).append(copy_s)
            for contender in chosen[turn:] + chosen[:turn]:
                key = contender.name, part
                encode_s, decode_s = one_round(contender, held, blobs[key])
                if repeat:
                    seconds.encode.setdefault(key, []).append(encode_s)
                    seconds.decode.setdefault(key, []).append(decode_s)
    stored = {key: sum(memoryview(blob).nbytes for blob in held) for key, held in blobs.items()}
    sizes = {part: sum(piece.raw_bytes for piece in held) for part, held in by_part.items()}
    rows = [
        row(contender.name, part, seconds, sizes, stored) for contender in chosen for part in PARTS
    ]
    return rows + [memcpy_row(part, seconds, sizes) for part in PARTS]


def row(
    name: str,
    part: str,
    seconds: Seconds,
    sizes: dict[str, int],
    stored: dict[tuple[str, str], int],
) -> Row:
    """What one codec did on K, on V, or on both."""
    raw_bytes = sum(sizes[one] for one in PARTS[part])
    ratio = raw_bytes / sum(stored[name, one] for one in PARTS[part])
    result: Row = {"codec": name, "part": part, "ratio": round(ratio, 4)}
    copied = _together([seconds.memcpy[one] for one in PARTS[part]])
    for way, taken in (("encode", seconds.encode), ("decode", seconds.decode)):
        rounds = _together([taken[name, one] for one in PARTS[part]])
        shares = [copy_s / own_s for copy_s, own_s in zip(copied, rounds, strict=True)]
        result |= speed(way, raw_bytes, rounds)
        result[f"{way}_of_memcpy"] = round(statistics.median(shares), 4)
    return result | {"n": len(copied)}


def memcpy_row(part: str, seconds: Seconds, sizes: dict[str, int]) -> Row:
    raw_bytes = sum(sizes[one] for one in PARTS[part])
    rounds = _together([seconds.memcpy[one] for one in PARTS[part]])
    result: Row = {"codec": "memcpy", "part": part, "ratio": 1.0}
    for way in ("encode", "decode"):
        result |= speed(way, raw_bytes, rounds) | {f"{way}_of_memcpy": 1.0}
    return result | {"n": len(rounds)}


def speed(way: str, raw_bytes: int, rounds: Sequence[float]) -> Row:
    """Median and half the interquartile distance of MB/s."""
    rates = [raw_bytes / s / 1e6 for s in rounds]
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    return {
        f"{way}_mb_s": round(middle, 1),
        f"{way}_spread_mb_s": round((high - low) / 2, 1),
    }


def _together(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Sums, round by round."""
    return [sum(parts) for parts in zip(*rounds, strict=True)]


def floors(pieces: Sequence[Piece]) -> list[Row]:
    """The floors for K, V and both, over whole layers."""
    rows = []
    for part, kinds in PARTS.items():
        held = [entropy.floors(piece.tensor) for piece in pieces if piece.part in kinds]
        mean = entropy.mean_floor(held)
        ratios = {"order0_ratio": mean.ratio, "per_channel_ratio": mean.channel_ratio}
        rows.append({"part": part, **{name: round(value, 4) for name, value in ratios.items()}})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}: under two minutes")
    parser.add_argument("--tokens", type=int, help=f"tokens read, default {FULL['tokens']}")
    parser.add_argument("--repeats", type=int, help=f"rounds, default {FULL['repeats']}, least 2")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="default: both")
    parser.add_argument("--text", choices=list(TEXTS), help="default: each")
    parser.add_argument("--plot", type=Path, help="where to save the plot, a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--model", default=models.DEFAULT, help="a folder or hub id")
    options = parser.parse_args()
    preset = QUICK if options.quick else FULL
    options.tokens = options.tokens or preset["tokens"]
    options.repeats = options.repeats or preset["repeats"]
    if options.repeats < 2:
        parser.error("--repeats must be at least 2: a spread needs two rounds")
    return options


def main() -> None:
    options = arguments()
    reader = Reader(options.model)
    layers = {
        name: reader.read(TEXTS[name](), options.tokens)
        for name in ([options.text] if options.text else TEXTS)
    }
    torch.set_num_threads(1)
    console = Console(quiet=options.json)
    console.width = max(console.width, codec_report.WIDTH)
    results: dict[str, list[Row]] = {"rows": [], "floors": []}
    for dtype in [options.dtype] if options.dtype else ["bfloat16", "float16"]:
        for text, held in layers.items():
            facts = {"dtype": dtype, "text": text}
            found, bounds = compare(held, dtype, options.repeats)
            title = f"{dtype} KV of {options.tokens} tokens of {text}"
            for table in codec_report.tables(found, bounds, title):
                console.print(table)
            results["rows"] += [facts | item for item in found]
            results["floors"] += [facts | item for item in bounds]
    if options.plot:
        first = {key: results["rows"][0][key] for key in ("dtype", "text")}
        chosen = {
            name: [item for item in held if first.items() <= item.items()]
            for name, held in results.items()
        }
        codec_report.plot(chosen["rows"], chosen["floors"], options.plot)
    facts = {"tokens": options.tokens, "machine": machine.describe(), "versions": versions()}
    print(json.dumps({**facts, **results}))


def compare(layers: Sequence[LayerKV], dtype: str, repeats: int) -> tuple[list[Row], list[Row]]:
    """Rows for every granularity and number of threads, and the floors."""
    rows = []
    for granularity, block_tokens in GRANULARITIES.items():
        pieces = cut(layers, getattr(torch, dtype), block_tokens)
        for threads in sorted({1, machine.cores()}):
            setting = {
                "granularity": granularity,
                "piece_bytes": pieces[0].raw_bytes,
                "pieces": len(pieces),
                "threads": threads,
            }
            measured = measure(contenders(dtype, threads), pieces, repeats)
            rows += [setting | item for item in measured]
    whole = cut(layers, getattr(torch, dtype), None)
    return rows, floors(whole)


def versions() -> dict[str, str | None]:
    names = ("numba", "zipnn", "pcodec", "blosc2", "zstandard", "lz4")
    return machine.versions() | {name: machine.installed_version(name) for name in names}


if __name__ == "__main__":
    main()
