"""Dtypes of one byte: float8, whose exponents are coded, and int8, which is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from gaac.kernels import reference
from tests.gaac.data import BYTE_DTYPES, LEVELS, bits, repeating, same, tensor
from tests.gaac.forging import DTYPE_AT, FLAGS_AT, assert_corrupt, patched

FLOATS = [name for name in BYTE_DTYPES if name != "int8"]


def gaussian8(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    return (value * 20).to(torch.int8) if dtype == "int8" else value.to(BYTE_DTYPES[dtype])


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=2).map(lambda last: [1, 2, *last][-4:]),
    level=st.sampled_from(LEVELS),
    dtype=st.sampled_from(sorted(BYTE_DTYPES)),
    seed=st.integers(0, 1000),
    random=st.booleans(),
)
def test_any_tensor(shape: list[int], level: int, dtype: str, seed: int, random: bool) -> None:
    value = gaussian8(tuple(shape), dtype, seed)
    if random:
        words = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        value = tensor(words, dtype)
    blob = gaac.encode(value, level=level)
    assert same(gaac.decode(blob), value)
    content = bits(value).numpy().tobytes()
    assert gaac.decompress(blob) == content
    assert reference.decode(blob) == content
    packed = gaac.compress(content, level=level, dtype=dtype)
    assert gaac.decompress(packed) == content
    assert reference.decode(packed) == content
    assert same(gaac.decode(packed), value.reshape(-1))
    assert len(blob) <= len(content) + 32 + 8 * len(shape)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", sorted(BYTE_DTYPES))
def test_every_byte(dtype: str, level: int) -> None:
    """All 256 bit patterns, NaNs and -0.0 among them, and realistic values around them."""
    words = bits(gaussian8((1, 2, 512, 64), dtype)).numpy().view(np.uint8).copy()
    words[0, 1, :4] = np.arange(256, dtype=np.uint8).reshape(4, 64)
    value = tensor(words, dtype)
    blob = gaac.encode(value, level=level)
    coded = level and dtype != "int8"
    assert ("words" in gaac.inspect(blob).streams) == (not coded)
    assert same(gaac.decode(blob), value)
    out = torch.zeros(1, 2, 1024, 64, dtype=torch.uint8).view(BYTE_DTYPES[dtype])
    gaac.decode(blob, out=out[:, :, 256:768])
    assert same(out[:, :, 256:768], value)
    assert gaac.inspect(blob).raw_bytes == value.numel()


@pytest.mark.parametrize(
    ("dtype", "level", "least"),
    [
        *(("float8_e4m3fn", 1, 1.1), ("float8_e4m3fn", 3, 1.15)),
        *(("float8_e5m2", 1, 1.25), ("float8_e5m2", 3, 1.35)),
    ],
)
def test_ratio_on_normal_values(dtype: str, level: int, least: float) -> None:
    value = gaussian8((1, 8, 256, 64), dtype)
    assert value.numel() / len(gaac.encode(value, level=level)) > least


@pytest.mark.parametrize("dtype", FLOATS)
def test_level_5_leaves_them_to_level_3(dtype: str) -> None:
    value = gaussian8((1, 8, 256, 64), dtype)
    blob = gaac.encode(value, level=5, kind="k", rope=[1.0, 0.5])
    assert gaac.inspect(blob).level == 5
    assert gaac.inspect(blob).streams == gaac.inspect(gaac.encode(value, level=3)).streams
    assert len(blob) == len(gaac.encode(value, level=3))
    assert same(gaac.decode(blob), value)


@pytest.mark.parametrize("level", LEVELS)
def test_int8_is_stored(level: int) -> None:
    value = torch.zeros(1, 2, 256, 64, dtype=torch.int8)
    blob = gaac.encode(value, level=level)
    assert len(blob) == value.numel() + 64
    assert same(gaac.decode(blob), value)
    assert gaac.encode(value.numpy(), level=level) == blob
    if level:
        assert_corrupt(patched(blob, FLAGS_AT, "<B", 0))


@pytest.mark.parametrize("level", [level for level in LEVELS if level])
@pytest.mark.parametrize("dtype", FLOATS)
def test_repeats(dtype: str, level: int) -> None:
    value = repeating((1, 3, 600, 64), "bfloat16").to(BYTE_DTYPES[dtype])
    blob = gaac.encode(value, level=level)
    assert gaac.inspect(blob).streams["repeats"] == 600
    assert same(gaac.decode(blob), value)
    assert reference.decode(blob) == bits(value).numpy().tobytes()


@pytest.mark.parametrize("level", [level for level in LEVELS if level])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *FLOATS])
def test_without_repeats_a_blob_bounds_its_content(dtype: str, level: int) -> None:
    """Even where every value is the same."""
    blob = gaac.compress(bytes(1_000_000), level=level, dtype=dtype)
    assert 4 * len(blob) >= 1_000_000


@pytest.mark.parametrize("dtype", FLOATS)
def test_low_must_be_empty(dtype: str) -> None:
    blob = gaac.encode(gaussian8((1, 1, 64, 64), dtype), level=1)
    assert_corrupt(patched(blob, 64 + 20, "<I", 1))
    assert_corrupt(patched(blob + b"\0", 64 + 20, "<I", 1))


def test_a_float8_blob_is_not_another_dtypes() -> None:
    blob = gaac.encode(gaussian8((1, 1, 64, 64), "float8_e4m3fn"), level=1)
    for code in (1, 2, 5):
        assert_corrupt(patched(blob, DTYPE_AT, "<B", code))
