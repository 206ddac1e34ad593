"""Frames coded where a tensor lies: the same blobs and tensors as on the CPU.

There need be no device: a stand-in for the kernels codes on the CPU, and once Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gaac
from gaac import codec, on_device
from gaac.frame import read_segments, unseal
from gaac.header import plan
from gaac.levels.base import Hints, WordFormat
from gaac.levels.packed import Packed
from gaac.levels.registry import REGISTRY
from tests.gaac.data import gaussian, random_words, repeating, same, tensor
from tests.gaac.forging import reseal

ROOT = Path(__file__).parents[2]


def unsigned(words: torch.Tensor) -> np.ndarray:
    return words.numpy().view(np.uint8 if words.element_size() == 1 else np.uint16)


def encode(words: torch.Tensor, fmt: WordFormat) -> list[torch.Tensor]:
    streams = Packed().encode(unsigned(words), fmt, Hints())
    return [torch.from_numpy(stream.copy()) for stream in streams]


def queue_decode(
    streams: Sequence[torch.Tensor], out: torch.Tensor, fmt: WordFormat, fault: torch.Tensor
) -> None:
    try:
        Packed().decode([stream.numpy() for stream in streams], unsigned(out), fmt, Hints())
    except gaac.CorruptFrame:
        fault += 1


def raise_fault(fault: torch.Tensor) -> None:
    if fault:
        raise gaac.CorruptFrame("noted on the way")


KERNELS: Any = SimpleNamespace(
    encode=encode,
    queue_decode=queue_decode,
    no_fault=lambda device: torch.zeros(1, dtype=torch.int32),
    raise_fault=raise_fault,
    supports=lambda shape, fmt: shape[2] < 1000,
)


def decode_into(blob: bytes, out: torch.Tensor) -> bool:
    array = np.frombuffer(blob, np.uint8)
    header = unseal(array)
    pieces, _ = read_segments(header, array, REGISTRY)
    return on_device.decode_with(KERNELS, header, pieces, out)


VALUES = {
    "one block": gaussian((1, 3, 256, 64), "bfloat16"),
    "several segments": gaussian((1, 2, 4500, 64), "float16"),
    "batch": gaussian((3, 2, 300, 20), "bfloat16"),
    "float8": gaussian((1, 3, 300, 64), "bfloat16").to(torch.float8_e5m2),
    "narrow": gaussian((5, 700, 3), "bfloat16"),
    "random": tensor(random_words((1, 2, 256, 64)), "float16"),
}
SOME_RANDOM = gaussian((1, 3, 4096, 64), "bfloat16")
SOME_RANDOM[:, 1] = tensor(random_words((1, 4096, 64)), "bfloat16")
VALUES["a random segment"] = SOME_RANDOM


@pytest.mark.parametrize("name", VALUES)
def test_the_cpus_blob(name: str) -> None:
    value = VALUES[name]
    dtype = str(value.dtype).removeprefix("torch.")
    blob = gaac.encode(value, level=1)
    assert on_device.encode_with(KERNELS, value, plan(tuple(value.shape), dtype, 1)) == blob
    turned = value.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert on_device.encode_with(KERNELS, turned, plan(tuple(value.shape), dtype, 1)) == blob


@pytest.mark.parametrize("name", [name for name in VALUES if name != "random"])
def test_the_cpus_tensor(name: str) -> None:
    value = VALUES[name]
    blob = gaac.encode(value, level=1)
    out = torch.zeros_like(value)
    assert decode_into(blob, out)
    assert same(out, value)
    turned = torch.zeros_like(value.transpose(0, 1).contiguous()).transpose(0, 1)
    assert decode_into(blob, turned)
    assert same(turned, value)


def test_repeats_are_written_by_the_cpu_and_read_on_the_device() -> None:
    value = repeating((1, 3, 600, 64), "bfloat16")
    assert on_device.encode_with(KERNELS, value, plan((1, 3, 600, 64), "bfloat16", 1)) is None
    blob = gaac.encode(value, level=1)
    assert "repeats" in gaac.inspect(blob).streams
    out = torch.zeros_like(value)
    assert decode_into(blob, out)
    assert same(out, value)


def test_faults_are_raised() -> None:
    blob = bytearray(gaac.encode(gaussian((1, 3, 256, 64), "float16"), level=1))
    blob[128] = 200  # the first base
    with pytest.raises(gaac.CorruptFrame, match="on the way"):
        decode_into(reseal(blob), torch.zeros(1, 3, 256, 64, dtype=torch.float16))


def test_what_is_left_to_the_cpu() -> None:
    flat = gaussian((5000,), "bfloat16")
    assert on_device.encode_with(KERNELS, flat, plan((5000,), "bfloat16", 1)) is None
    assert not decode_into(gaac.encode(flat, level=1), torch.zeros_like(flat))
    wide = gaussian((1, 40, 1000), "bfloat16")
    assert on_device.encode_with(KERNELS, wide, plan((1, 40, 1000), "bfloat16", 1)) is None
    assert not decode_into(gaac.encode(wide, level=1), torch.zeros_like(wide))
    assert on_device.encode(VALUES["one block"]) is None  # it lies on the CPU


def test_the_codec_asks_for_tensors_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And checks the arguments as it does for the CPU."""
    value = VALUES["one block"]
    monkeypatch.setattr(codec, "is_on_device", lambda _: True)
    monkeypatch.setattr(on_device, "packed_on_device", lambda _: KERNELS)
    asked = []
    monkeypatch.setattr(
        on_device, "encode_with", lambda kernels, tensor, header: asked.append(header) or b"blob"
    )
    assert gaac.encode(value, level=1) == b"blob"
    assert asked == [plan((1, 3, 256, 64), "bfloat16", 1)]
    assert gaac.encode(value, level=3) != b"blob"
    with pytest.raises(gaac.UnsupportedTensor):
        gaac.encode(value.float(), level=1)


def test_with_the_device_kernels_interpreted() -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    code = """
import torch, gaac
from gaac.kernels import packed_triton
from tests.gaac import test_on_device as test
test.KERNELS = packed_triton
for name in ("batch", "narrow"):
    test.test_the_cpus_blob(name)
for name in ("batch", "narrow"):
    test.test_the_cpus_tensor(name)
test.test_repeats_are_written_by_the_cpu_and_read_on_the_device()
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0
