"""What level 1's device kernels compute, on the CPU under Triton's interpreter.

Triton decides when it is imported whether it interprets. So these tests need TRITON_INTERPRET=1 and
a process of their own; `test_triton.py` starts one with this file, which pytest does not collect by
its name.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from benchmarks import gpu_check
from gaac.kernels import device, packed_triton
from gaac.levels.base import FORMATS, Hints, WordFormat
from gaac.levels.packed import Packed
from tests.gaac import guarded
from tests.gaac.data import SPECIAL

assert os.environ.get("TRITON_INTERPRET") == "1", "set it: no device is meant to be used here"

LEVEL = Packed()
MAP_NORESERVE = 0x4000  # in Python's mmap from 3.13 on
DAMAGED = ("base", "offsets", "escapes", "planes")
SHAPES = [
    *((1, 1, 1), (2, 3, 5), (1, 63, 9), (2, 64, 8), (1, 65, 3), (3, 129, 1), (2, 70, 20)),
    *((1, 256, 64), (2, 130, 40), (1, 17, 128), (1, 5, 511)),
]


def words_of(shape: tuple[int, ...], fmt: WordFormat, pattern: str, seed: int = 0) -> np.ndarray:
    """Words, uint16 or uint8: "random" bits, "constant", "normal", or "mixed" with special."""
    rng = np.random.default_rng(seed)
    dtype = np.uint16 if fmt.word_bytes == 2 else np.uint8
    if pattern == "constant":
        return np.full(shape, rng.integers(0, 65536)).astype(dtype)
    if pattern == "random":
        return rng.integers(0, 65536, shape).astype(dtype)
    values = rng.normal(size=shape) * np.exp2(rng.integers(-3, 4, shape[-1]))
    tensor = torch.from_numpy(values).to(getattr(torch, fmt.name))
    words = tensor.view(torch.int16 if fmt.word_bytes == 2 else torch.uint8).numpy().view(dtype)
    if pattern == "mixed":
        where = rng.random(shape) < 0.2
        words[where] = rng.choice(np.array(SPECIAL), int(where.sum())).astype(dtype)
    return words


def signed(words: np.ndarray) -> torch.Tensor:
    """Words as a tensor that shares their memory: int16 or uint8."""
    return torch.from_numpy(words.view(np.int16 if words.itemsize == 2 else np.uint8))


def on_cpu(words: np.ndarray, fmt: WordFormat) -> list[np.ndarray]:
    """The streams that the CPU's level gives."""
    return list(LEVEL.encode(np.ascontiguousarray(words), fmt, Hints()))


def decoded(streams: Sequence[np.ndarray], shape: tuple[int, ...], fmt: WordFormat) -> np.ndarray:
    out = np.zeros(shape, np.uint16 if fmt.word_bytes == 2 else np.uint8)
    packed_triton.decode([torch.from_numpy(stream) for stream in streams], signed(out), fmt)
    return out


def assert_equal_to_cpu(words: np.ndarray, fmt: WordFormat) -> None:
    expected = on_cpu(words, fmt)
    given_streams = packed_triton.encode(signed(words), fmt)
    for name, stream, right in zip(LEVEL.streams, given_streams, expected, strict=True):
        np.testing.assert_array_equal(stream.numpy(), right, err_msg=name)
    np.testing.assert_array_equal(decoded(expected, words.shape, fmt), words)


# What the kernels compute.


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_with_tails(shape: tuple[int, ...], name: str) -> None:
    assert_equal_to_cpu(words_of(shape, FORMATS[name], "mixed"), FORMATS[name])


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 140), st.integers(1, 24)),
    fmt=st.sampled_from(sorted(FORMATS)),
    pattern=st.sampled_from(["normal", "random", "mixed", "constant"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_words(shape: tuple[int, int, int], fmt: str, pattern: str, seed: int) -> None:
    assert_equal_to_cpu(words_of(shape, FORMATS[fmt], pattern, seed), FORMATS[fmt])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_word(fmt: WordFormat) -> None:
    """All 65,536 words, or all 256, in an order in which exponents mix."""
    count = 256**fmt.word_bytes
    words = (np.arange(count) * 40503 % count).reshape(1, -1, 32)
    assert_equal_to_cpu(words.astype(np.uint16 if fmt.word_bytes == 2 else np.uint8), fmt)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a slice of tokens": lambda whole: whole[:, 3:73, :20],
    "channels first": lambda whole: whole.transpose(1, 2)[:, :20, 3:73],
    "every other row": lambda whole: whole[:, ::2, :7],
    "blocks last": lambda whole: whole.permute(1, 2, 0)[:2, :40, :],
    "one row for all": lambda whole: whole[:, :1, :9].expand(-1, 66, -1),
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str) -> None:
    fmt = FORMATS["bfloat16"]
    whole = signed(words_of((3, 80, 80), fmt, "normal"))
    view = STRIDED[name](whole)
    words = view.contiguous().numpy().view(np.uint16)
    streams = packed_triton.encode(view, fmt)
    for stream, right in zip(streams, on_cpu(words, fmt), strict=True):
        np.testing.assert_array_equal(stream.numpy(), right)
    if 0 in view.stride():
        return
    target = torch.zeros_like(whole)
    packed_triton.decode(streams, STRIDED[name](target), fmt)
    assert torch.equal(STRIDED[name](target), view)
    STRIDED[name](target).zero_()
    assert not target.any(), "decoding wrote beside its target"


def test_rows_far_apart() -> None:
    """The last row lies 2^31 words behind the first, in memory that is only touched at the rows."""
    fmt, rows, stride = FORMATS["bfloat16"], 65, 2**25
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    space = mmap.mmap(-1, 2 * ((rows - 1) * stride + 8), flags=flags)
    far = torch.frombuffer(space, dtype=torch.int16).as_strided((1, rows, 8), (0, stride, 1))
    words = words_of((1, rows, 8), fmt, "normal")
    streams = [torch.from_numpy(stream) for stream in on_cpu(words, fmt)]
    packed_triton.decode(streams, far, fmt)
    assert torch.equal(far, signed(words))
    assert all(map(torch.equal, packed_triton.encode(far, fmt), streams))


# What decoding refuses.


def flip(streams: list[np.ndarray], stream: int, place: float, value: int) -> list[np.ndarray]:
    """The streams with one byte changed, unless that stream is empty."""
    changed = [part.copy() for part in streams]
    if changed[stream].size:
        changed[stream][int(place * changed[stream].size)] ^= value
    return changed


def verdict(decode: Callable[[], np.ndarray]) -> bytes | None:
    """The words, or None if the streams are refused."""
    try:
        return decode().tobytes()
    except gaac.CorruptFrame:
        return None


@settings(max_examples=50, deadline=None)
@given(
    shape=st.sampled_from([(1, 5, 3), (2, 65, 5), (1, 130, 8), (2, 3, 9)]),
    fmt=st.sampled_from(sorted(FORMATS)),
    pattern=st.sampled_from(["normal", "random", "constant"]),
    stream=st.integers(0, 4),
    place=st.floats(0, 1, exclude_max=True),
    value=st.integers(1, 255),
)
def test_refuses_what_the_cpu_refuses(
    shape: tuple[int, int, int], fmt: str, pattern: str, stream: int, place: float, value: int
) -> None:
    form = FORMATS[fmt]
    words = words_of(shape, form, pattern)
    damaged = flip(on_cpu(words, form), stream, place, value)

    def by_cpu() -> np.ndarray:
        out = np.zeros_like(words)
        LEVEL.decode(damaged, out, form, Hints())
        return out

    assert verdict(lambda: decoded(damaged, shape, form)) == verdict(by_cpu)


def u32(stream: np.ndarray) -> np.ndarray:
    return stream.view("<u4")


def _set(stream: int, values: Any) -> Callable[[list[np.ndarray]], None]:
    def change(streams: list[np.ndarray]) -> None:
        streams[stream][...] = values

    return change


def _offsets(index: int, value: int) -> Callable[[list[np.ndarray]], None]:
    def change(streams: list[np.ndarray]) -> None:
        u32(streams[1])[index] = value

    return change


def _longer(count: int) -> Callable[[list[np.ndarray]], None]:
    def change(streams: list[np.ndarray]) -> None:
        streams[2] = np.concatenate([streams[2], np.zeros(count, np.uint8)])

    return change


HOSTILE: dict[str, tuple[str, Callable[[list[np.ndarray]], None]]] = {
    "offsets far outside": ("as many", _set(1, 255)),
    "the first offset not 0": ("as many", _offsets(0, 1)),
    "an offset of another tile": ("as many", _offsets(2, 0)),
    "the last offset at 2^31": ("as many", _offsets(-1, 2**31)),
    "all codes escape": ("as many", _set(3, 255)),
    "padding not zero": ("as many", lambda streams: streams[2].__setitem__(-1, 1)),
    "a whole line of padding": ("as many", _longer(64)),
    "64 escapes missing": ("as many", lambda streams: streams.__setitem__(2, streams[2][:-64])),
    "escapes cut": ("lengths", lambda streams: streams.__setitem__(2, streams[2][:-1])),
    "no escapes": ("lengths", lambda streams: streams.__setitem__(2, streams[2][:0])),
    "low cut": ("lengths", lambda streams: streams.__setitem__(4, streams[4][:-1])),
    "spare bits": ("behind their last", lambda streams: streams[3].__setitem__(-1, 255)),
    "base too high": ("range", _set(0, 26)),
    "escapes too high": ("range", lambda streams: streams[2].__setitem__(0, 32)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams(name: str) -> None:
    fmt, shape = FORMATS["float16"], (2, 70, 9)
    streams = [stream.copy() for stream in on_cpu(words_of(shape, fmt, "random"), fmt)]
    assert streams[2][-1] == 0, "there is padding to damage"
    message, change = HOSTILE[name]
    change(streams)
    with pytest.raises(gaac.CorruptFrame, match=message):
        decoded(streams, shape, fmt)


def test_one_fault_among_many_segments() -> None:
    fmt, shape = FORMATS["bfloat16"], (1, 5, 8)
    good = [torch.from_numpy(part) for part in on_cpu(words_of(shape, fmt, "normal"), fmt)]
    out = torch.zeros(shape, dtype=torch.bfloat16)
    fault = packed_triton.no_fault(out.device)
    packed_triton.queue_decode(good, out, fmt, fault)
    packed_triton.raise_fault(fault)
    bad = [good[0], good[1] + 1, *good[2:]]
    packed_triton.queue_decode(bad, out, fmt, fault)
    packed_triton.queue_decode(good, out, fmt, fault)
    with pytest.raises(gaac.CorruptFrame):
        packed_triton.raise_fault(fault)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 70, 9), (1, 64, 64), (2, 3, 5)], ids=str)
def test_nothing_outside_is_touched(
    shape: tuple[int, int, int], fmt: WordFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(_: torch.Tensor, count: int) -> torch.Tensor:
        return torch.from_numpy(guarded.empty(count, np.uint8))

    monkeypatch.setattr(packed_triton, "_bytes", empty)
    words = guarded.copies(words_of(shape, fmt, "mixed"))[0]
    streams = packed_triton.encode(signed(words), fmt)
    out = guarded.copies(np.zeros_like(words))[0]
    packed_triton.decode(streams, signed(out), fmt)
    np.testing.assert_array_equal(out, words)
    hostile = [guarded.copies(stream.numpy())[0] for stream in streams]
    for value in (1, 64, 255):
        hostile[1][...] = value
        with pytest.raises(gaac.CorruptFrame):
            packed_triton.decode([torch.from_numpy(part) for part in hostile], signed(out), fmt)


def test_the_trial_before_use() -> None:
    assert device._agrees(packed_triton, torch.device("cpu"))


def test_refuses_other_words() -> None:
    fmt = FORMATS["bfloat16"]
    words = torch.zeros((1, 4, 8), dtype=torch.int16)
    for wrong in (words[0], words.to(torch.int32), words[:, :0]):
        with pytest.raises(gaac.GaacError):
            packed_triton.encode(wrong, fmt)


def test_gpu_check_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timing part of the benchmark, with another clock: a device's there is none of."""
    monkeypatch.setattr(gpu_check, "SIZES", {"1 block": 1})
    monkeypatch.setattr(gpu_check, "BLOCK_ROWS", 3)
    monkeypatch.setattr(gpu_check, "elapsed_s", lambda operation: (operation(), 1e-6)[1])
    figures = list(gpu_check.measure(packed_triton, torch.device("cpu"), 2))
    assert [figure.operation for figure in figures] == ["copy", "encode", "decode"] * 2
    assert {figure.median_gb_per_s for figure in figures} == {round(2 * 3 * 128 / 1e3, 2)}
    assert {figure.rounds for figure in figures} == {2}


@pytest.mark.parametrize("broken", ["encode", "decode"])
def test_gpu_check_finds_a_wrong_kernel(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = packed_triton.encode

    def lose_a_bit(words: torch.Tensor, fmt: WordFormat) -> list[torch.Tensor]:
        *others, planes, low = right(words, fmt)
        return [*others, planes ^ 1, low]

    monkeypatch.setattr(packed_triton, broken, lose_a_bit if broken == "encode" else print)
    monkeypatch.setattr(gpu_check, "HEAD_DIMS", (8,))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--interpret"])
    assert gpu_check.main() == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not report["ok"]
    expected = {
        "encode": ["stream planes differs"],
        "decode": ["decoded values differ", *[f"a damaged stream {name}" for name in DAMAGED]],
    }
    for text in expected[broken]:
        assert any(text in problem for problem in report["problems"])
