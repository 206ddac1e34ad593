"""Level 1 on a device, tested where there is none: interpreted, compiled, and chosen or not.

What the kernels compute is tested by `interpreted_triton.py`, in a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gaac.kernels import cpu, device
from gaac.levels.base import FORMATS, Hints, WordFormat
from gaac.levels.packed import Packed

pytest.importorskip("triton", reason="Triton is published for Linux alone")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gaac.kernels import packed_programs, packed_triton

ROOT = Path(__file__).resolve().parents[2]


def test_supports() -> None:
    fmt = FORMATS["bfloat16"]
    assert packed_triton.supports((1, 256, 128), fmt)
    assert packed_triton.supports((2**20, 256, 4), fmt)
    assert not packed_triton.supports((2**20, 256, 5), fmt), "more values than 32 bits count"
    assert not packed_triton.supports((1, 256, 65537), fmt)
    assert not packed_triton.supports((1, 0, 64), fmt)
    assert not packed_triton.supports((1, 1, 1), WordFormat("int8", 0, 0, low_bytes=0))


def test_streams_travel() -> None:
    streams = [np.arange(count, dtype=np.uint8) for count in (3, 0, 7, 1)]
    there = device.to_device(streams, "cpu")
    back = device.to_host(there)
    assert len(there) == len(back) == len(streams)
    assert all(map(np.array_equal, back, streams))


# Which kernels a device gets.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the kernels which codes on the CPU, whatever the device is called."""

    def encode(words: torch.Tensor, fmt: WordFormat) -> list[torch.Tensor]:
        bits = words.numpy().view(np.uint16 if fmt.word_bytes == 2 else np.uint8)
        streams = Packed().encode(bits, fmt, Hints())
        return [torch.from_numpy(stream.copy()) for stream in streams]

    def decode(streams: list[torch.Tensor], out: torch.Tensor, fmt: WordFormat) -> None:
        bits = out.numpy().view(np.uint16 if fmt.word_bytes == 2 else np.uint8)
        Packed().decode([stream.numpy() for stream in streams], bits, fmt, Hints())

    return SimpleNamespace(encode=encode, decode=decode)


def test_cpu_tensors_need_no_device_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.packed_on_device("cpu") is None
    assert device.packed_on_device(torch.device("meta")) is None
    monkeypatch.setattr(cpu, "path", lambda: "numpy")
    monkeypatch.setattr(device, "_tried", lambda _: pytest.fail("compiled code was forbidden"))
    assert device.packed_on_device("cuda") is None


def test_kernels_are_tried_before_they_are_used(kernels: Any) -> None:
    place = torch.device("cpu")
    assert device._agrees(kernels, place)
    right = kernels.encode
    kernels.encode = lambda words, fmt: [*right(words, fmt)[:4], right(words, fmt)[4] ^ 1]
    assert not device._agrees(kernels, place)
    kernels.encode = right
    kernels.decode = lambda streams, out, fmt: None
    assert not device._agrees(kernels, place)


def test_kernels_that_fail_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu, "path", lambda: "plain")
    monkeypatch.setattr(device, "_agrees", fail)
    device._tried.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gaac"):
        assert device.packed_on_device("cuda") is None
        assert device.packed_on_device("cuda") is None
    assert [record.args for record in caplog.records] == [
        (torch.device("cuda"), "RuntimeError: no compiler")
    ]
    device._tried.cache_clear()
    monkeypatch.setattr(device, "_agrees", lambda *_: False)
    assert device.packed_on_device("cuda") is None
    device._tried.cache_clear()
    monkeypatch.setattr(device, "_agrees", lambda *_: True)
    assert device.packed_on_device("cuda") is packed_triton
    device._tried.cache_clear()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_under_the_interpreter() -> None:
    tests = str(Path(__file__).with_name("interpreted_triton.py"))
    done = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        tests,
        TRITON_INTERPRET="1",
        GAAC_KERNELS="numpy",
    )
    assert done.returncode == 0, done.stdout + done.stderr


KERNELS: dict[str, dict[str, str]] = {
    "choose_bases": {"base": "*u8", "counts": "*i32", "width": "i32"},
    "write_streams": {"base": "*u8", "offsets": "*i32", "escapes": "*u8", "planes": "*u8"},
    "read_streams": {
        **dict.fromkeys(("base", "offsets", "escapes", "planes"), "*u8"),
        **{"fault": "*i32", "escape_bytes": "i32"},
    },
}


def compiled(kernel: str, fmt: WordFormat, width: int, capability: int) -> Any:
    """The kernel as it would be compiled on a device, for contiguous words."""
    function = getattr(packed_programs, kernel)
    constants = {
        **packed_triton._constants(fmt),
        **{"WIDTH": width, "BYTES": packed_triton._part_bytes(width), "CHANNELS": 32},
        "channel_stride": 1,
    }
    types = {
        **{"words": "*i16" if fmt.word_bytes == 2 else "*u8", "low": "*u8", "rows": "i32"},
        **{"block_stride": "i64", "row_stride": "i32"},
        **KERNELS[kernel],
    }
    names = function.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in used else types[name] for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=used)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=packed_triton._OPTIONS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_cuda(kernel: str, capability: int) -> None:
    for name, width in (("bfloat16", 128), ("float16", 9), ("float8_e4m3fn", 1)):
        assert compiled(kernel, FORMATS[name], width, capability).asm["cubin"]


def test_gpu_check_under_the_interpreter() -> None:
    done = run("benchmarks/gpu_check.py", "--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["interpreted"]
    assert report["cases"] > 10
    assert report["problems"] == report["figures"] == []


def test_gpu_check_without_a_device() -> None:
    done = run("benchmarks/gpu_check.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "CUDA" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_gpu_check_on_the_device() -> None:
    done = run("benchmarks/gpu_check.py")
    assert done.returncode == 0, done.stdout + done.stderr
