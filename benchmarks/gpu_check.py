"""Level 1 and decode attention on a CUDA device: are they right there, and how fast are they?

    python benchmarks/gpu_check.py [--interpret] [--rounds 30]

Right: on values as a model's, random bits and special values, for several head_dims, the device's
kernels give the same streams as the CPU's level, byte for byte, and decode them bit for bit; and
damaged streams are refused. Fast: uncompressed bytes per second of encoding and of decoding on the
device, beside a copy of the same bytes on the device, taking turns; encoding includes its one wait
for the host. Median over the rounds, half the distance of the quartiles, and their number. No
transfer is counted.

Attention is right if on pages of several shapes it gives what torch gives in float32, within the
rounding of its dtype, and on raw pages the same bits as on packed ones. It is timed on both, beside
torch's flash attention on plain tensors (SDPA), as captured graphs: no launch by the host is in it.
Its GB/s count uncompressed bytes, too: "share" of those are the bytes that it has to read.

The last line is one JSON document. Exit status: 0 if all is right, 1 if something is wrong, 2 if
there is no CUDA device or no Triton. --interpret checks what is right, not how fast it is, on the
CPU under Triton's interpreter, with smaller tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import gaac
from gaac.attention import Page, Pages, PageTable
from gaac.kernels import attention_blocks
from gaac.kernels.device import packed_on_device
from gaac.levels.base import FORMATS, Hints, WordFormat
from gaac.levels.packed import Packed

LEVEL = Packed()
HEAD_DIMS = (64, 80, 128, 256, 576)
SPECIAL = (0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0x7C00, 0xFC00, 0x7E01, 0x7BFF, 0xFFFF)
BLOCK_ROWS = 256
SIZES = {"8 blocks": 8, "4096 blocks": 4096}  # of 256 rows of 128 values: 512 KiB and 256 MiB
WARM_UPS = 3

HEADS = {  # query heads, KV heads, head_dim
    "9q/3kv/64": (9, 3, 64),
    "4q/4kv/80": (4, 4, 80),
    "32q/8kv/128": (32, 8, 128),
    "8q/1kv/256": (8, 1, 256),
}
PAGE_TOKENS = 256
TIMED_HEADS = ("32q/8kv/128", "8q/1kv/256")
TIMED_TOKENS = (8192, 32768, 131072)
TIMED_BATCHES = (1, 4)


@dataclass(frozen=True)
class Case:
    """One segment: words, uint16 or uint8, shape (blocks, rows, width)."""

    name: str
    fmt: WordFormat
    words: np.ndarray


@dataclass(frozen=True)
class Figure:
    """What one operation reached on one size, over `rounds` rounds, in GB/s of raw bytes.

    raw_bytes: how many these are. share: how many attention reads for each of them.
    """

    operation: str
    size: str
    dtype: str
    median_gb_per_s: float
    half_quartile_distance_gb_per_s: float
    rounds: int
    raw_bytes: int
    share: float = 1.0


def main() -> int:
    """Run the checks; give the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="check on the CPU, without CUDA")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each timing")
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, below
    elif not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2
    try:
        from gaac.kernels import attention_triton, packed_triton
    except ImportError as error:
        print(f"gpu_check needs Triton, which cannot be imported: {error}", file=sys.stderr)
        return 2

    device = torch.device("cpu" if options.interpret else "cuda")
    chosen = list(cases(small=options.interpret))
    problems = [problem for case in chosen for problem in check(case, packed_triton, device)]
    problems += check_refusals(chosen[0], packed_triton, device)
    problems += check_public(device)
    problems += check_attention(attention_triton, device, small=options.interpret)
    figures: list[Figure] = []
    if not options.interpret:
        figures += measure(packed_triton, device, options.rounds)
        figures += measure_attention(attention_triton, device, options.rounds)
    for problem in problems:
        print(f"WRONG: {problem}")
    for figure in figures:
        print(
            f"{figure.dtype:>9} {figure.size:>24} {figure.operation:>7} "
            f"{figure.median_gb_per_s:8.1f} ± {figure.half_quartile_distance_gb_per_s:.1f} GB/s"
            f"{figure.raw_bytes / figure.median_gb_per_s / 1e3:10.1f} us"
        )
    print(json.dumps(report(device, len(chosen), problems, figures)))
    return 1 if problems else 0


def cases(*, small: bool) -> Iterator[Case]:
    """Segments of every format that level 1 codes; `small` for the interpreter."""
    rng = np.random.default_rng(0)
    for fmt in FORMATS.values():
        dtype = np.uint16 if fmt.word_bytes == 2 else np.uint8
        for width in HEAD_DIMS[:2] if small else HEAD_DIMS:
            shape = (1, 70, width) if small else (24, BLOCK_ROWS, width)
            scale = np.exp2(rng.integers(-4, 5, width))
            values = torch.from_numpy(rng.normal(size=shape) * scale).to(getattr(torch, fmt.name))
            bits = values.view(torch.int16 if fmt.word_bytes == 2 else torch.uint8)
            yield Case(f"{fmt.name} normal {shape}", fmt, bits.numpy().view(dtype))
        for shape in ((2, 65, 9), (1, 1, 1)) if small else ((3, 200, 65), (1, 1, 1), (2, 5, 3000)):
            random = rng.integers(0, 65536, shape).astype(dtype)
            yield Case(f"{fmt.name} random {shape}", fmt, random)
            special = rng.choice(np.array(SPECIAL), shape).astype(dtype)
            yield Case(f"{fmt.name} special {shape}", fmt, special)


def check(case: Case, kernels: ModuleType, device: torch.device) -> Iterator[str]:
    """What is wrong with the kernels on one case."""
    expected = LEVEL.encode(case.words, case.fmt, Hints())
    source = torch.from_numpy(case.words.view(np.int16 if case.words.itemsize == 2 else np.uint8))
    streams = kernels.encode(source.to(device), case.fmt)
    for name, stream, right in zip(LEVEL.streams, streams, expected, strict=True):
        if not np.array_equal(stream.cpu().numpy(), right):
            yield f"{case.name}: stream {name} differs from the CPU's"
    out = torch.zeros_like(source, device=device)
    try:
        kernels.decode([torch.from_numpy(right).to(device) for right in expected], out, case.fmt)
    except gaac.CorruptFrame as error:
        yield f"{case.name}: intact streams were refused: {error}"
    if not torch.equal(out.cpu(), source):
        yield f"{case.name}: decoded values differ"


def check_refusals(case: Case, kernels: ModuleType, device: torch.device) -> Iterator[str]:
    """Which damaged streams are not refused."""
    expected = LEVEL.encode(case.words, case.fmt, Hints())
    out = torch.empty(case.words.shape, dtype=torch.int16, device=device)
    damages = {"base": 255, "offsets": 255, "escapes": 255, "planes": 255}
    for name, value in damages.items():
        streams = [torch.from_numpy(stream.copy()).to(device) for stream in expected]
        streams[LEVEL.streams.index(name)].fill_(value)
        try:
            kernels.decode(streams, out, case.fmt)
        except gaac.CorruptFrame:
            continue
        yield f"a damaged stream {name} was decoded"


def check_public(device: torch.device) -> Iterator[str]:
    """What is wrong with gaac.encode and gaac.decode on the device."""
    if device.type == "cuda" and packed_on_device(device) is None:
        yield "gaac does not use its kernels on this device (see the warning)"
    for dtype in (torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        tensor = torch.randn((1, 2, 300, 64), generator=generator).to(dtype)
        on_device = tensor.to(device)
        for name, view in {"": slice(None), "a slice of ": slice(3, 290)}.items():
            blob = gaac.encode(tensor[:, :, view], level=1)
            if gaac.encode(on_device[:, :, view], level=1) != blob:
                yield f"gaac.encode of {name}a {dtype} tensor: not the blob that the CPU gives"
            out = torch.zeros_like(on_device)[:, :, view]
            gaac.decode(blob, out=out)
            back = gaac.decode(blob, device=device)
            for given in (out, back):
                bits = given.cpu().contiguous().view(torch.int16)
                if not torch.equal(bits, tensor[:, :, view].contiguous().view(torch.int16)):
                    yield f"gaac.decode to {name}a {dtype} tensor: values differ"


def check_attention(kernels: ModuleType, device: torch.device, *, small: bool) -> Iterator[str]:
    """What is wrong with attention, with and without what changes its scores."""
    tokens = 300 if small else 5000
    for name in list(HEADS)[: 1 if small else None]:
        query_heads, kv_heads, head_dim = HEADS[name]
        bias = torch.zeros((2, tokens), device=device)
        bias[1, : tokens // 2] = -math.inf
        sinks = torch.linspace(-1, 1, query_heads, device=device)
        for dtype in (torch.bfloat16, torch.float16):
            q = torch.randn((2, query_heads, head_dim), device=device).to(dtype)
            k, v = (kv((2, kv_heads, tokens, head_dim), dtype, device) for _ in range(2))
            for page_tokens, options in (
                (PAGE_TOKENS, (head_dim**-0.5, None, None, None)),
                (100, (0.1, 5.0, sinks, bias)),
            ):
                if found := problem_of_attention(kernels, q, k, v, page_tokens, options):
                    yield f"attention {name} {dtype}, pages of {page_tokens} tokens: {found}"


def problem_of_attention(
    kernels: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_tokens: int,
    options: tuple[Any, ...],
) -> str | None:
    """What is wrong on pages of these keys and values, if anything is."""
    raw, packed = (
        kernels.attend(q, *(pages(part, page_tokens, level) for part in (k, v)), *options)
        for level in (0, 1)
    )
    if raw is None or packed is None:
        return "the kernel does not read them"
    if not torch.equal(raw, packed):
        return "raw and packed pages give different bits"
    # Rounding takes its share of the result; what is lost before, one of the mean of |v|.
    keys, values, sizes = (Pages(PageTable(()), part) for part in (k, v, v.abs()))
    right = attention_blocks.attend(q.float(), keys, values, *options)
    size = attention_blocks.attend(q.float(), keys, sizes, *options)
    error = (packed - right).abs()
    if not bool((error <= torch.finfo(q.dtype).eps * right.abs() + 2**-13 * size).all()):
        return f"an error of {float(error.max()):.3g}"
    return None


def kv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values with a scale for each channel, as keys and values have them."""
    scale = torch.exp2(torch.randn(shape[-1], device=device))
    return torch.randn(shape, device=device, dtype=dtype).mul_(scale)


def pages(value: torch.Tensor, page_tokens: int, level: int) -> Pages:
    """Pages of [batch, kv_heads, tokens, head_dim], and what does not fill one as the tail."""
    full = value.shape[2] // page_tokens * page_tokens
    rows = []
    for row in value:
        parts = row[None, :, :full].split(page_tokens, dim=2)
        blobs = (gaac.encode(part, level=level) for part in parts)
        rows.append(tuple(Page.of(blob).to(value.device) for blob in blobs))
    return Pages(PageTable(tuple(rows)), value[:, :, full:])


def measure_attention(kernels: ModuleType, device: torch.device, rounds: int) -> Iterator[Figure]:
    """Time attention on packed pages, on raw ones and on plain tensors, in turns."""
    for name in TIMED_HEADS:
        query_heads, kv_heads, head_dim = HEADS[name]
        options = (head_dim**-0.5, None, None, None)
        shape = (max(TIMED_BATCHES), kv_heads, max(TIMED_TOKENS), head_dim)
        k, v = (kv(shape, torch.bfloat16, device) for _ in range(2))
        paged = {
            form: [pages(part, PAGE_TOKENS, level) for part in (k, v)]
            for form, level in (("packed", 1), ("raw", 0))
        }
        for tokens, batch in product(TIMED_TOKENS, TIMED_BATCHES):
            q = torch.randn((batch, query_heads, head_dim), device=device).to(k.dtype)
            plain = [part[:batch, :, :tokens].contiguous() for part in (k, v)]
            raw_bytes = sum(part.nbytes for part in plain)
            operations, shares = {"SDPA": graphed(partial(flash, q, *plain))}, {}
            for form, both in paged.items():
                chosen = [first(one, batch, tokens) for one in both]
                payloads = [p.payload for one in chosen for row in one.table.rows for p in row]
                shares[form] = round(sum(map(torch.numel, payloads)) / raw_bytes, 4)
                operations[form] = graphed(partial(kernels.attend, q, *chosen, *options))
            size = f"{name} {batch}x{tokens}"
            yield from alternate(operations, raw_bytes, rounds, size, "bfloat16", shares)


def first(whole: Pages, batch: int, tokens: int) -> Pages:
    """The first tokens, in whole pages, of the first batch rows."""
    rows = tuple(row[: tokens // PAGE_TOKENS] for row in whole.table.rows[:batch])
    return Pages(PageTable(rows), whole.tail[:batch, :, :0])


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's flash attention of one new token."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)


def graphed(operation: Callable[[], Any]) -> Callable[[], Any]:
    """The operation's work on the device alone, without the host's part in it."""
    operation()  # compiles what has to be
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()

    def replay(_kept: Callable[[], Any] = operation) -> None:  # its tensors are those of the graph
        graph.replay()

    return replay


def measure(kernels: ModuleType, device: torch.device, rounds: int) -> Iterator[Figure]:
    """Time encoding, decoding and a copy of the same bytes, one after the other in each round."""
    for size, blocks in SIZES.items():
        for dtype in (torch.bfloat16, torch.float16):
            fmt = FORMATS[str(dtype).removeprefix("torch.")]
            scale = torch.exp2(torch.randn(128, device=device))
            shape = (blocks, BLOCK_ROWS, 128)
            words = (torch.randn(shape, device=device, dtype=dtype) * scale).to(dtype)
            streams = kernels.encode(words, fmt)
            out = torch.empty_like(words)
            fault = kernels.no_fault(device)
            operations = {
                "copy": partial(out.copy_, words),
                "encode": partial(kernels.encode, words, fmt),
                "decode": partial(kernels.queue_decode, streams, out, fmt, fault),
            }
            yield from alternate(operations, 2 * words.numel(), rounds, size, fmt.name)
            kernels.raise_fault(fault)


def alternate(
    operations: Mapping[str, Callable[[], Any]],
    raw_bytes: int,
    rounds: int,
    size: str,
    dtype: str,
    shares: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Figure]:
    """The figures of operations that take turns, the first to go changing from round to round."""
    speeds: dict[str, list[float]] = {name: [] for name in operations}
    names = list(operations)
    for number in range(WARM_UPS + rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            time_s = elapsed_s(operations[name])
            if number >= WARM_UPS:
                speeds[name].append(raw_bytes / time_s / 1e9)
    for name, reached in speeds.items():
        low, median, high = (round(part, 2) for part in statistics.quantiles(reached, n=4))
        spread = round((high - low) / 2, 2)
        yield Figure(name, size, dtype, median, spread, rounds, raw_bytes, shares.get(name, 1.0))


def elapsed_s(operation: Callable[[], Any]) -> float:
    """Seconds of one operation by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    operation()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def report(
    device: torch.device, case_count: int, problems: list[str], figures: list[Figure]
) -> dict[str, Any]:
    """All of it, for the JSON line."""
    interpreted = device.type == "cpu"
    return {
        "check": "gaac level 1 and decode attention on a device",
        "ok": not problems,
        "device": platform.machine() if interpreted else torch.cuda.get_device_name(device),
        "interpreted": interpreted,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": version("triton"),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cases": case_count,
        "problems": problems,
        "figures": [asdict(figure) for figure in figures],
    }


if __name__ == "__main__":
    sys.exit(main())
