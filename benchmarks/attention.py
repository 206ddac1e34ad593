"""One layer of a decode step in six forms, uncompressed and compressed: time, floor and error.

    python benchmarks/attention.py [--quick] [--tokens 1024 ... 32768] [--shape 9,3,64 ...]
                                   [--batch 1 4] [--threads 1 2] [--seconds 6] [--dtype bfloat16]
                                   [--plot attention.png] [--json] [--model NAME]

The forms: transformers' default (torch.cat, its SDPA function), its eager attention, the best that
torch allows uncompressed (buffers with room, grouped matmul), our kernel on raw pages, packed pages
unpacked at each step for SDPA, and our kernel on packed pages. A step appends the new token, then
attends. Pages hold 256 tokens; the last 128 tokens are raw, as many as a cache holds so on average.

Keys and values are a real model's, after a text; `attention_layers` says how other shapes are made
of them. A form has several layers, 64 MiB of KV uncompressed or 30 layers if that is less, and one
pass goes through all of them, as a decode step does; before a layer is read again, every other form
has had its pass. So nothing is found in a cache that a real model would not find there.

Times are of one layer: the median of the passes and, behind ±, half the distance of the quartiles;
forms alternate pass by pass, in an order that changes, and ratios say how many times faster, as
medians of the quotients of one round. "Read" counts the bytes of K and V that a form holds and must
read once; GB/s and the floor are of those: the floor is the time that the memory, by
`gaac_lab.bandwidth`, needs to give them. The error is the root mean square of the difference to
float64, over that of the result, in one batch row of the first layer. The last line is one JSON
document with the same numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import attention_report
import numpy as np
import torch
from attention_forms import DEFAULT, RAW_KERNEL, Form, forms
from attention_layers import Layer, Shape, Source
from kv_pieces import TEXTS
from rich.console import Console

from gaac.kernels import reference_attention
from gaac_lab import bandwidth, machine, models
from gaac_lab.measure import quiet_collector

SHAPES = [Shape(9, 3, 64), Shape(32, 8, 128), Shape(8, 1, 256)]
TOKENS = [1024, 4096, 8192, 16384, 32768]
QUICK = {"tokens": [1024, 8192], "batch": [1], "seconds": 2.0, "read": 1024}
FULL = {"tokens": TOKENS, "batch": [1, 4], "seconds": 6.0, "read": 4096}

PASS_BYTES = 64 * 2**20
MOST_LAYERS = 30
LEAST_ROUNDS, MOST_ROUNDS = 3, 25

Row = dict[str, Any]
Passes = dict[str, list[float]]  # by form, the seconds of each round


def layers_of(source: Source, shape: Shape, batch: int, tokens: int) -> list[Layer]:
    """As many layers as a pass goes through."""
    first = source.layer(shape, batch, tokens, 0)
    count = min(max(-(-PASS_BYTES // first.raw_bytes), 1), MOST_LAYERS)
    return [first, *(source.layer(shape, batch, tokens, number) for number in range(1, count))]


def measure(held: dict[str, list[Form]], threads: int, seconds: float) -> Passes:
    """Rounds of one pass a form until the time is up; the round before the first warms up."""
    torch.set_num_threads(threads)
    names = list(held)
    passes: Passes = {name: [] for name in names}
    deadline = None
    with quiet_collector():
        for number in range(MOST_ROUNDS + 1):
            turn = number % len(names)  # nobody comes always first, or after the same one
            for name in names[turn:] + names[:turn]:
                start = time.perf_counter()
                for form in held[name]:
                    form.step(threads)
                passes[name].append((time.perf_counter() - start) / len(held[name]))
            deadline = deadline or time.perf_counter() + seconds
            if number >= LEAST_ROUNDS and time.perf_counter() > deadline:
                break
    return {name: taken[1:] for name, taken in passes.items()}


def errors(layer: Layer, held: dict[str, list[Form]]) -> dict[str, float]:
    """Relative error of each form on its first layer, row 0."""
    q, keys, values = (t[:1].double().numpy() for t in (layer.q, layer.keys, layer.values))
    expected = reference_attention.attend(q, keys, values)
    size = np.sqrt(np.mean(np.square(expected)))
    found = {name: some[0].step(1)[:1].double().numpy() for name, some in held.items()}
    return {
        name: float(np.sqrt(np.mean(np.square(out - expected))) / size)
        for name, out in found.items()
    }


def rows_of(
    passes: Passes, held: dict[str, list[Form]], error: dict[str, float], gb_s: float
) -> list[Row]:
    """What each form did."""
    rows = []
    for name, taken in passes.items():
        read_bytes = sum(form.held_bytes for form in held[name]) / len(held[name])
        rows.append(
            {
                **compared(passes, name, "layer"),
                "read_bytes": round(read_bytes),
                "read_gb_s": round(read_bytes / statistics.median(taken) / 1e9, 3),
                "floor_ms": round(read_bytes / gb_s / 1e6, 5),
                "error": float(f"{error[name]:.4g}"),
            }
        )
    return rows


def compared(passes: Passes, name: str, what: str) -> Row:
    """Milliseconds of one form, and how many times faster it is than two others: all medians."""
    low, middle, high = statistics.quantiles(passes[name], n=4, method="inclusive")

    def speedup(other: str) -> float:
        pairs = zip(passes[other], passes[name], strict=True)
        return round(statistics.median(slow / fast for slow, fast in pairs), 4)

    return {
        "form": name,
        f"{what}_ms": round(middle * 1e3, 5),
        "spread_ms": round((high - low) / 2 * 1e3, 5),
        "n": len(passes[name]),
        "speedup": speedup(DEFAULT),
        "speedup_of_kernel": speedup(RAW_KERNEL),
    }


def one_layer(
    source: Source,
    shape: Shape,
    batch: int,
    tokens: int,
    seconds: float,
    gb_s: dict[int, float],
) -> list[Row]:
    """All forms and numbers of threads at one shape, batch and length."""
    layers = layers_of(source, shape, batch, tokens)
    held: dict[str, list[Form]] = {}
    for layer in layers:
        for name, form in forms(layer).items():
            held.setdefault(name, []).append(form)
    error = errors(layers[0], held)
    rows = []
    for threads, bandwidth_gb_s in gb_s.items():
        setting = {
            "shape": shape.label,
            "batch": batch,
            "tokens": tokens,
            "threads": threads,
            "layers": len(layers),
        }
        passes = measure(held, threads, seconds)
        rows += [setting | row for row in rows_of(passes, held, error, bandwidth_gb_s)]
    return rows


def memory_gb_s(threads: int) -> float:
    """Read bandwidth with this many threads, the median of a few repeats."""
    torch.set_num_threads(threads)
    return bandwidth.read_gb_s(torch.device("cpu")).median


def shape_of(text: str) -> Shape:
    """ "query_heads,kv_heads,head_dim" as argparse hands it over."""
    shape = Shape(*map(int, text.split(",")))
    if shape.query_heads % shape.kv_heads:
        raise ValueError("query heads are a multiple of the KV heads")
    return shape


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}: about two minutes")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"default: {TOKENS}")
    parser.add_argument("--shape", type=shape_of, nargs="+", default=SHAPES, help="q,kv,head_dim")
    parser.add_argument("--batch", type=int, nargs="+", help=f"default: {FULL['batch']}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, help="for the rounds of one setting")
    parser.add_argument("--read", type=int, help=f"tokens that the model reads, {FULL['read']}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--text", choices=list(TEXTS), default="documentation")
    parser.add_argument("--plot", type=Path, help="where to save the plot, a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--model", default=models.DEFAULT, help="a folder or hub id")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.tokens) < 256:
        parser.error("--tokens must be at least 256: one page and a raw tail")
    return options


def main() -> None:
    options = arguments()
    source = Source(options.model, options.text, options.read, getattr(torch, options.dtype))
    gc.collect()
    console = Console(quiet=options.json)
    console.width = max(console.width, attention_report.WIDTH)
    gb_s = {threads: memory_gb_s(threads) for threads in options.threads}
    rows: list[Row] = []
    with torch.inference_mode():
        for shape in options.shape:
            for batch in options.batch:
                found: list[Row] = []
                for tokens in options.tokens:
                    found += one_layer(source, shape, batch, tokens, options.seconds, gb_s)
                for table in attention_report.tables(found, gb_s):
                    console.print(table)
                rows += found
    if options.plot:
        attention_report.plot(rows, options.plot)
    facts = {
        "dtype": options.dtype,
        "text": options.text,
        "read_tokens": options.read,
        "memory_gb_s": {threads: round(value, 2) for threads, value in gb_s.items()},
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    print(json.dumps({**facts, "rows": rows}))


if __name__ == "__main__":
    main()
