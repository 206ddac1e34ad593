"""A whole decode step of the default model with six ways to keep and read its cache.

    python benchmarks/attention_step.py [--quick] [--tokens 4096 7936] [--threads 1 2] [--steps 24]
                                        [--dtype bfloat16] [--no-memory] [--json] [--model NAME]

The ways are the forms of `benchmarks/attention.py`, here as `gaac_lab` runs them. The prompt, a
long document, is read once; every cache is given the keys and values of that one reading, and all
go on from the same token. They decode in turn, one step each, in an order that changes; what packs
in the background is waited for before the next has its turn, outside the clock.

Times are of one step: the median and, behind ±, half the distance of the quartiles; ratios say how
many times faster, as medians of the quotients of one turn. The floor is the time that the memory
needs to give weights and KV once. Peaks come from processes of their own (`gaac_lab.memory_probe`),
at the longest prompt: what a request takes above the loaded model, while it reads the prompt and
while it decodes. The last line is one JSON document with the same numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import attention_report
import torch
from attention import Passes, Row, compared, memory_gb_s
from attention_forms import DEFAULT, EAGER, FUSED, GROUPED, MATERIALISE, RAW_KERNEL
from rich.console import Console
from transformers.cache_utils import DynamicLayer

from gaac_lab import configuration, kv, machine, memory_probe, models
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.measure import Failure, quiet_collector
from gaac_lab.memory_probe import MemoryJob
from gaac_lab.request import Request, prompt_batch, warm_up

PROMPT = "long_document"
WAYS = {
    DEFAULT: BASELINE,
    EAGER: configuration.EAGER,
    GROUPED: configuration.GROUPED,
    RAW_KERNEL: Configuration(level=0, integration="fused"),
    MATERIALISE: Configuration(integration="materialise"),
    FUSED: Configuration(integration="fused"),
}
QUICK = {"tokens": [1024], "steps": 8}
FULL = {"tokens": [4096, 7936], "steps": 24}


def read_prompt(model: Any, ids: torch.Tensor) -> Request:
    """A request that has read the prompt into an uncompressed cache."""
    request = Request.of(model, ids, BASELINE)
    request.prefill()
    return request


def continued(model: Any, ids: torch.Tensor, way: Configuration, read: Request) -> Request:
    """A request that goes on from what `read` has read, its KV kept in another way."""
    request = Request.of(model, ids, way)
    with torch.inference_mode():
        for index, layer in enumerate(read.cache.layers):
            if type(layer) is DynamicLayer:
                request.cache.update(layer.keys.clone(), layer.values.clone(), index)
            else:  # one that slides stays the library's in every way
                request.cache.layers[index] = copy.deepcopy(layer)
    request.resume(read, request.cache)
    request.settle()
    return request


def take_turns(requests: dict[str, Request], steps: int) -> Passes:
    """Seconds of each step; the first turn warms up."""
    names = list(requests)
    taken: Passes = {name: [] for name in names}
    with quiet_collector():
        for number in range(steps + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                seconds = requests[name].step()
                requests[name].settle()
                if number:
                    taken[name].append(seconds)
    return taken


def rows_of(
    requests: dict[str, Request], taken: Passes, weight_bytes: int, gb_s: float
) -> list[Row]:
    """What each way did."""
    rows = []
    expected = requests[DEFAULT].new_tokens
    for name, request in requests.items():
        raw_bytes, stored_bytes = kv.raw_bytes(request.cache), kv.stored_bytes(request.cache)
        read_bytes = weight_bytes + min(raw_bytes, stored_bytes)  # room is held, but not read
        rows.append(
            {
                **compared(taken, name, "step"),
                "kv_raw_bytes": raw_bytes,
                "kv_stored_bytes": stored_bytes,
                "floor_ms": round(read_bytes / gb_s / 1e6, 3),
                "equal_ids": equal_ids(expected, request.new_tokens),
            }
        )
    return rows


def equal_ids(expected: torch.Tensor, found: torch.Tensor) -> int:
    """New tokens, the first from the prompt itself, until one differs."""
    same = (expected == found).all(0).int()
    return int(same.cumprod(0).sum())


def one_length(
    model: Any, tokenizer: Any, tokens: int, steps: int, gb_s: dict[int, float]
) -> list[Row]:
    """All ways and numbers of threads after a prompt of so many tokens."""
    ids, _ = prompt_batch(tokenizer, tokens=tokens, first=PROMPT)
    torch.set_num_threads(machine.cores())
    read = read_prompt(model, ids)
    weight_bytes = models.describe(model).weight_bytes
    rows = []
    for threads, bandwidth_gb_s in gb_s.items():
        torch.set_num_threads(threads)
        requests = {name: continued(model, ids, way, read) for name, way in WAYS.items()}
        taken = take_turns(requests, steps)
        found = rows_of(requests, taken, weight_bytes, bandwidth_gb_s)
        rows += [{"tokens": tokens, "threads": threads, **row} for row in found]
    return rows


def peaks(model: Any, tokenizer: Any, name: str, tokens: int) -> list[Row]:
    """Peak bytes of each way above the loaded model; N = 1."""
    jobs = [MemoryJob(configuration=way, prompt=PROMPT, tokens=tokens) for way in WAYS.values()]
    torch.set_num_threads(machine.cores())
    found = memory_probe.measure(jobs, model=model, tokenizer=tokenizer, name=name)
    rows: list[Row] = []
    for form, record in zip(WAYS, found, strict=True):
        if isinstance(record, Failure):
            rows.append({"form": form, "tokens": tokens, "failure": record.reason})
        else:
            kept = ("prefill_peak_bytes", "decode_peak_bytes", "kv_stored_bytes", "memory_method")
            rows.append({"form": form, "tokens": tokens, **{key: record[key] for key in kept}})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}, without memory")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"default: {FULL['tokens']}")
    parser.add_argument("--steps", type=int, help=f"default: {FULL['steps']}, at least 2")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks out")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--model", default=models.DEFAULT, help="a folder or hub id")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.steps < 2:
        parser.error("--steps must be at least 2: a spread needs two")
    return options


def main() -> None:
    options = arguments()
    model, tokenizer = models.load(options.model, dtype=options.dtype, device="cpu")
    console = Console(quiet=options.json)
    console.width = max(console.width, attention_report.WIDTH)
    for way in WAYS.values():
        warm_up(model, way)
    gb_s = {threads: memory_gb_s(threads) for threads in options.threads}
    rows: list[Row] = []
    for tokens in options.tokens:
        found = one_length(model, tokenizer, tokens, options.steps, gb_s)
        for table in attention_report.step_tables(found, gb_s):
            console.print(table)
        rows += found
    memory: list[Row] = []
    if not (options.quick or options.no_memory):
        memory = peaks(model, tokenizer, options.model, max(options.tokens))
        console.print(attention_report.memory_table(memory))
    facts = {
        "dtype": options.dtype,
        "prompt": PROMPT,
        "memory_gb_s": {threads: round(value, 2) for threads, value in gb_s.items()},
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    print(json.dumps({**facts, "rows": rows, "peaks": memory}))


if __name__ == "__main__":
    main()
