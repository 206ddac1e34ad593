"""Peak memory of requests, each measured above the same idle state.

On a CPU the requests run in a process of their own: the environment that makes the kernel's
high-water mark agree with what was really asked for (freed blocks go back at once) slows a process
down, so memory and speed are measured apart. A process that the kernel kills for want of memory
becomes a row with that reason, and the rest go on. On CUDA torch's own statistics need no such
care, and the requests run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from gaac_lab.configuration import Configuration
from gaac_lab.measure import Failure, attempt
from gaac_lab.memory import PeakMeter

# Every block of 64 KiB or more gets pages of its own and gives them back when freed.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


class MemoryJob(BaseModel):
    """One request whose memory is wanted; `tokens` and `new_tokens` per row of the batch.

    prefill_chunk: the prompt is read in chunks of so many tokens; None reads it at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    configuration: Configuration
    prompt: str
    tokens: int = Field(ge=1)
    new_tokens: int = Field(default=2, ge=1)
    batch: int = Field(default=1, ge=1)
    prefill_chunk: int | None = Field(default=None, ge=1)


def measure(
    jobs: Sequence[MemoryJob],
    *,
    model: Any,
    tokenizer: Any,
    name: str,
) -> list[dict[str, Any] | Failure]:
    """A record or a `Failure` for each job, in order.

    `model` and `tokenizer` are the loaded ones; `name` is what they were loaded from. Records hold
    peak_bytes (of the whole request), prefill_peak_bytes, decode_peak_bytes, allocated_bytes,
    reserved_bytes, process_bytes (peaks above idle, None where there is no such meter),
    kv_raw_bytes, kv_stored_bytes and the method.
    """
    if model.device.type != "cpu":
        return [_run(job, model, tokenizer) for job in jobs]
    results: list[dict[str, Any] | Failure] = []
    spec = {"name": name, "dtype": str(model.dtype).removeprefix("torch.")}
    while len(results) < len(jobs):
        done, failure = _run_worker(spec, jobs[len(results) :])
        results += done
        if failure is not None and len(results) < len(jobs):
            results.append(failure)
    return results


def _run_worker(
    spec: dict[str, Any], jobs: Sequence[MemoryJob]
) -> tuple[list[dict[str, Any] | Failure], Failure | None]:
    """What a worker process finished, and why it stopped early if it did."""
    request = json.dumps({**spec, "jobs": [job.model_dump() for job in jobs]})
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.run(
            [sys.executable, "-m", "gaac_lab.memory_probe"],
            input=request,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **_ALLOCATOR, "OMP_NUM_THREADS": str(torch.get_num_threads())},
            check=False,
        )
        log.seek(0)
        tail = log.read().strip().splitlines()[-1:]
    done: list[dict[str, Any] | Failure] = []
    for line in worker.stdout.splitlines():
        record = json.loads(line)
        done.append(Failure(**record["failure"]) if "failure" in record else record)
    if worker.returncode == 0:
        return done, None
    if worker.returncode < 0:
        reason = (
            f"the memory run was killed by signal {-worker.returncode}, most likely for want of "
            "memory; try fewer tokens or a smaller batch"
        )
        return done, Failure("killed", reason)
    return done, Failure("error", f"the memory run failed: {''.join(tail) or 'no message'}")


def _run(job: MemoryJob, model: Any, tokenizer: Any) -> dict[str, Any] | Failure:
    return attempt(lambda: _peaks(job, model, tokenizer))


def _peaks(job: MemoryJob, model: Any, tokenizer: Any) -> dict[str, Any]:
    from gaac_lab.kv import raw_bytes, stored_bytes
    from gaac_lab.request import Request, prompt_batch, warm_up

    ids, _ = prompt_batch(tokenizer, tokens=job.tokens, batch=job.batch, first=job.prompt)
    warm_up(model, job.configuration)
    meter = PeakMeter(model.device)
    meter.start()
    request = Request.of(model, ids, job.configuration)
    request.prefill(chunk_tokens=job.prefill_chunk)
    prefill = meter.read()
    meter.start()
    for _ in range(job.new_tokens):
        request.step()
    decode = meter.read()
    request.settle()
    return {
        "peak_bytes": _larger(prefill.peak_bytes, decode.peak_bytes),
        "prefill_peak_bytes": prefill.peak_bytes,
        "decode_peak_bytes": decode.peak_bytes,
        "allocated_bytes": _larger(prefill.allocated_bytes, decode.allocated_bytes),
        "reserved_bytes": _larger(prefill.reserved_bytes, decode.reserved_bytes),
        "process_bytes": _larger(prefill.process_bytes, decode.process_bytes),
        "kv_raw_bytes": raw_bytes(request.cache),
        "kv_stored_bytes": stored_bytes(request.cache),
        "memory_method": decode.method,
    }


def _larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def _worker() -> None:
    """Read a spec on stdin, print one JSON line a job as soon as it is known."""
    from gaac_lab.models import load

    spec = json.load(sys.stdin)
    model, tokenizer = load(spec["name"], dtype=spec["dtype"], device="cpu")
    for entry in spec["jobs"]:
        result = _run(MemoryJob(**entry), model, tokenizer)
        if isinstance(result, Failure):
            result = {"failure": {"kind": result.kind, "reason": result.reason}}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    _worker()
