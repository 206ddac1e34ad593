"""Damage blobs and decode them: `python -m tests.gaac.fuzz --help`; test_fuzz.py runs this.

One process, on the kernel path that GAAC_KERNELS names. A case is a seed and a number: it chooses
a blob, a mutation, and whether the checksum is made right again. Afterwards each case must have

- raised CorruptFrame or UnsupportedFrame, if the checksum was left wrong; else
- raised one of them, or given content of the size that `inspect` tells,

and must not have taken more memory than twice the size that the blob declares, and 2 MB. What came
out of each case is written to --outcomes, a line a case, so that kernel paths can be compared; the
case that is being tried is in --progress, so that a crash can be traced to it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import gaac
from tests.gaac import make_golden, mutations
from tests.gaac.mutations import MUTATIONS, Sample

REFUSALS = (gaac.CorruptFrame, gaac.UnsupportedFrame)
SPARE_BYTES = 2_000_000
ADDRESS_SPACE_BYTES = 2**30  # beyond what the process has mapped when it begins


@dataclass(frozen=True)
class Case:
    """A damaged blob, and how it came about."""

    label: str
    blob: bytes
    sealed: bool


def make_case(seed: int, number: int, samples: Sequence[Sample]) -> Case:
    """Case `number` of a seed. Mutations that change nothing are tried again."""
    rng = np.random.default_rng([seed, number])
    intact = {chosen.blob for chosen in samples}
    while True:
        chosen = samples[int(rng.integers(len(samples)))]
        mutation = MUTATIONS[number % len(MUTATIONS)]
        sealed = number // len(MUTATIONS) % 2 == 1
        blob = mutation(rng, chosen, samples)
        blob = mutations.reseal(blob) if sealed else blob
        if blob not in intact:
            kind = "right" if sealed else "wrong"
            return Case(f"{mutation.__name__} of {chosen.name}, checksum {kind}", blob, sealed)


def measured(call: Callable[[], Any], limit_bytes: int) -> Any:
    """What a call gives, or the class of the refusal that it raises; its memory is bounded."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        result = call()
    except REFUSALS as error:
        result = type(error)
    taken = tracemalloc.get_traced_memory()[1] - before
    assert taken <= limit_bytes, f"{taken} bytes were taken, {limit_bytes} are allowed"
    return result


def check(case: Case) -> str:
    """Decode a case in every way and give its outcome as a word; AssertionError if it is wrong."""
    blob = case.blob
    info = measured(lambda: gaac.inspect(blob), SPARE_BYTES)
    intact = not isinstance(info, type)
    limit_bytes = SPARE_BYTES + (2 * info.raw_bytes if intact else 0)
    content = measured(lambda: gaac.decompress(blob), limit_bytes)
    tensor = measured(lambda: gaac.decode(blob, threads=2), limit_bytes)
    if isinstance(content, type):
        assert isinstance(tensor, type), "decode took what decompress refused"
        return content.__name__
    assert case.sealed, "a damaged blob was taken"
    assert intact, "decompress took what inspect refused"
    assert len(content) == info.raw_bytes, "the content is not as long as inspect says"
    if isinstance(tensor, type):
        assert info.raw_bytes % 2, "decode refused what decompress took"
    else:
        octets = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert octets == content, "decode and decompress differ"
    return f"{len(content)}-{xxhash.xxh3_64_hexdigest(content)}"


def limit_address_space() -> None:
    """A backstop for what tracemalloc does not see: beyond it, memory cannot be had."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(seed: int, first: int, count: int, outcomes: Path, progress: Path) -> None:
    """Try cases first to first + count - 1; raises AssertionError that names the case."""
    samples = [mutations.sample(case.name, case.encode()) for case in make_golden.cases()]
    for chosen in samples:  # compiles the kernels, before memory is limited and counted
        gaac.decompress(chosen.blob)
        gaac.decompress(chosen.blob, threads=2)
    limit_address_space()
    tracemalloc.start()
    with outcomes.open("w") as lines, progress.open("w") as place:
        for number in range(first, first + count):
            case = make_case(seed, number, samples)
            name = f"seed {seed}, case {number}: {case.label}"
            os.pwrite(place.fileno(), name.ljust(200).encode(), 0)
            try:
                lines.write(check(case) + "\n")
            except BaseException as error:
                raise AssertionError(f"{name}: {error!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--outcomes", type=Path, default=Path(os.devnull))
    parser.add_argument("--progress", type=Path, default=Path(os.devnull))
    options = parser.parse_args()
    faulthandler.enable()
    run(options.seed, options.first, options.count, options.outcomes, options.progress)


if __name__ == "__main__":
    main()
