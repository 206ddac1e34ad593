"""Level 1 on a CUDA device: is it right there, and how fast is it?

    python benchmarks/gpu_check.py [--interpret] [--rounds 30]

Right: on values as a model's, random bits and special values, for several head_dims, the device's
kernels give the same streams as the CPU's level, byte for byte, and decode them bit for bit; and
damaged streams are refused. Fast: uncompressed bytes per second of encoding and of decoding on the
device, beside a copy of the same bytes on the device, taking turns; encoding includes its one wait
for the host. Median over the rounds, half the distance of the quartiles, and their number. No
transfer is counted.

The last line is one JSON document. Exit status: 0 if all is right, 1 if something is wrong, 2 if
there is no CUDA device or no Triton. --interpret checks what is right, not how fast it is, on the
CPU under Triton's interpreter, with smaller tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np
import torch

import gaac
from gaac.kernels.device import packed_on_device
from gaac.levels.base import FORMATS, Hints, WordFormat
from gaac.levels.packed import Packed

LEVEL = Packed()
HEAD_DIMS = (64, 80, 128, 256, 576)
SPECIAL = (0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0x7C00, 0xFC00, 0x7E01, 0x7BFF, 0xFFFF)
BLOCK_ROWS = 256
SIZES = {"8 blocks": 8, "4096 blocks": 4096}  # of 256 rows of 128 values: 512 KiB and 256 MiB
WARM_UPS = 3


@dataclass(frozen=True)
class Case:
    """One segment: words, uint16 or uint8, shape (blocks, rows, width)."""

    name: str
    fmt: WordFormat
    words: np.ndarray


@dataclass(frozen=True)
class Figure:
    """What one operation reached on one size, over `rounds` rounds, in GB/s of raw bytes."""

    operation: str
    size: str
    dtype: str
    median_gb_per_s: float
    half_quartile_distance_gb_per_s: float
    rounds: int


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
        from gaac.kernels import packed_triton
    except ImportError as error:
        print(f"gpu_check needs Triton, which cannot be imported: {error}", file=sys.stderr)
        return 2

    device = torch.device("cpu" if options.interpret else "cuda")
    chosen = list(cases(small=options.interpret))
    problems = [problem for case in chosen for problem in check(case, packed_triton, device)]
    problems += check_refusals(chosen[0], packed_triton, device)
    problems += check_public(device)
    figures = [] if options.interpret else list(measure(packed_triton, device, options.rounds))
    for problem in problems:
        print(f"WRONG: {problem}")
    for figure in figures:
        print(
            f"{figure.dtype:>9} {figure.size:>12} {figure.operation:>7} "
            f"{figure.median_gb_per_s:8.1f} ± {figure.half_quartile_distance_gb_per_s:.1f} GB/s"
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
    operations: Mapping[str, Callable[[], Any]], raw_bytes: int, rounds: int, size: str, dtype: str
) -> Iterator[Figure]:
    """The figures of operations that take turns, the first to go changing from round to round."""
    speeds: dict[str, list[float]] = {name: [] for name in operations}
    names = list(operations)
    for number in range(WARM_UPS + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time_s = elapsed_s(operations[name])
            if number >= WARM_UPS:
                speeds[name].append(raw_bytes / time_s / 1e9)
    for name, reached in speeds.items():
        low, median, high = statistics.quantiles(reached, n=4)
        yield Figure(name, size, dtype, round(median, 2), round((high - low) / 2, 2), rounds)


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
        "check": "gaac level 1 on a device",
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
