"""The meters against memory that the test itself takes."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch

from gaac_lab import memory, memory_probe
from gaac_lab.configuration import BASELINE, EAGER, GROUPED, Configuration
from gaac_lab.measure import Failure
from gaac_lab.memory_probe import MemoryJob

CPU = torch.device("cpu")
MIB = 2**20


def test_the_process_meter_sees_a_peak_that_is_gone_again() -> None:
    """In a process of its own with the probe's allocator settings, as the product runs it."""
    script = (
        "import torch\n"
        "from gaac_lab.memory import PeakMeter\n"
        "meter = PeakMeter(torch.device('cpu')); meter.start()\n"
        "x = torch.ones(64 * 2**20, dtype=torch.uint8); del x\n"
        "first = meter.read().peak_bytes; meter.start()\n"
        "y = torch.ones(16 * 2**20, dtype=torch.uint8)\n"
        "print(first, meter.read().peak_bytes)\n"
    )
    environment = {"PATH": "", **memory_probe._ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    first, second = map(int, done.stdout.split())
    assert 64 * MIB <= first < 72 * MIB
    assert 16 * MIB <= second < 24 * MIB


def test_what_cannot_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(MemoryError, match=r"the cache needs at least .* GiB and .* GiB are free"):
        memory.require(2**62, CPU, "the cache")
    memory.require(1, CPU, "the cache")


@pytest.mark.usefixtures("default_model_path")
def test_a_request_holds_its_kv_and_a_packed_one_holds_less(
    default_model: tuple[Any, Any],
) -> None:
    model, tokenizer = default_model
    packed = Configuration(level=1, block_tokens=64)
    jobs = [
        MemoryJob(configuration=one, prompt="long_document", tokens=512)
        for one in (BASELINE, packed, BASELINE)
    ]
    plain, small, again = memory_probe.measure(
        jobs, model=model, tokenizer=tokenizer, name="default"
    )
    assert not isinstance(plain, Failure)
    assert not isinstance(small, Failure)
    assert not isinstance(again, Failure)
    raw_bytes = 2 * 30 * 3 * 64 * 2 * (512 + 2)  # K and V, layers, KV heads, head_dim, bf16, tokens
    assert plain["kv_raw_bytes"] == small["kv_raw_bytes"] == raw_bytes
    assert small["kv_stored_bytes"] < 0.8 * raw_bytes
    assert plain["decode_peak_bytes"] >= raw_bytes
    assert small["decode_peak_bytes"] < plain["decode_peak_bytes"]
    # The order of the requests must not matter.
    assert abs(again["peak_bytes"] - plain["peak_bytes"]) < 4 * MIB


@pytest.mark.usefixtures("default_model_path")
def test_pages_read_in_place_peak_below_every_uncompressed_form(
    default_model: tuple[Any, Any],
) -> None:
    model, tokenizer = default_model
    fused = Configuration(level=1, block_tokens=64, integration="fused")
    forms = [BASELINE, EAGER, GROUPED, fused]
    jobs = [MemoryJob(configuration=one, prompt="long_document", tokens=512) for one in forms]
    results = memory_probe.measure(jobs, model=model, tokenizer=tokenizer, name="default")
    decode = []
    for result in results:
        assert not isinstance(result, Failure), result
        decode.append(result["decode_peak_bytes"])
    *others, in_place = decode
    assert in_place < 0.8 * min(others)


@pytest.mark.usefixtures("default_model_path")
def test_eager_attention_peaks_above_the_default(default_model: tuple[Any, Any]) -> None:
    """It repeats K and V, a layer at a time: far above the meter's 1 % at this length."""
    model, tokenizer = default_model
    jobs = [
        MemoryJob(configuration=one, prompt="long_document", tokens=2048)
        for one in (BASELINE, EAGER)
    ]
    default, eager = memory_probe.measure(jobs, model=model, tokenizer=tokenizer, name="default")
    assert not isinstance(default, Failure), default
    assert not isinstance(eager, Failure), eager
    assert eager["decode_peak_bytes"] > 1.03 * default["decode_peak_bytes"]


@pytest.mark.usefixtures("default_model_path")
def test_a_prompt_is_read_in_chunks_where_a_job_asks_for_it(
    default_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = default_model
    lengths = []
    forward = type(model).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    functools.update_wrapper(counting, forward)  # its signature tells how a cache is passed
    monkeypatch.setattr(type(model), "forward", counting)
    fused = Configuration(level=1, block_tokens=16, integration="fused")
    job = MemoryJob(
        configuration=fused, prompt="long_document", tokens=100, prefill_chunk=32, new_tokens=2
    )
    record = memory_probe._run(job, model, tokenizer)
    assert not isinstance(record, Failure)
    assert lengths[-6:] == [32, 32, 32, 4, 1, 1]
    assert record["kv_raw_bytes"] == 2 * 30 * 3 * 64 * 2 * 102


def test_a_worker_that_dies_becomes_a_reason_and_the_rest_go_on(
    default_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The first worker is really killed, as the kernel does when memory runs out."""
    model, tokenizer = default_model
    flag = tmp_path / "died"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal, sys\n"
        f"flag = pathlib.Path({str(flag)!r})\n"
        "if 'gaac_lab.memory_probe' in ' '.join(sys.orig_argv) and not flag.exists():\n"
        "    flag.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = [MemoryJob(configuration=BASELINE, prompt="long_document", tokens=64)] * 2
    first, second = memory_probe.measure(jobs, model=model, tokenizer=tokenizer, name="default")
    assert isinstance(first, Failure)
    assert first.kind == "killed"
    assert "signal 9" in first.reason
    assert not isinstance(second, Failure)
    assert second["kv_raw_bytes"] > 0
