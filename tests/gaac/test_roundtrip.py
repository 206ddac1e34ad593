"""What goes in comes out, bit for bit, whatever the shape, the strides and the bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from gaac.kernels import reference
from tests.gaac.data import (
    DTYPES,
    LEVELS,
    SPECIAL,
    bits,
    gaussian,
    random_words,
    same,
    tensor,
    word_arrays,
)

levels = st.sampled_from(LEVELS)
dtypes = st.sampled_from(sorted(DTYPES))


@settings(max_examples=400, deadline=None)
@given(words=word_arrays(), level=levels, dtype=dtypes)
def test_any_tensor(words: np.ndarray, level: int, dtype: str) -> None:
    value = tensor(words, dtype)
    before = bits(value).clone()
    blob = gaac.encode(value, level=level)
    assert same(gaac.decode(blob), value)
    assert torch.equal(bits(value), before)
    assert gaac.decompress(blob) == words.tobytes()
    assert reference.decode(blob) == words.tobytes()
    assert len(blob) <= words.nbytes + 32 + 8 * max(words.ndim, 1)


@settings(max_examples=300, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=600), word_arrays(3000).map(lambda words: words.tobytes())),
    odd=st.binary(max_size=1),
    level=levels,
    dtype=dtypes,
    row=st.sampled_from([None, 1, 7, 64, 128, 1000]),
)
def test_any_bytes(data: bytes, odd: bytes, level: int, dtype: str, row: int | None) -> None:
    data += odd
    blob = gaac.compress(data, level=level, dtype=dtype, row=row)
    assert gaac.decompress(blob) == data
    assert reference.decode(blob) == data
    assert len(blob) <= len(data) + 40
    info = gaac.inspect(blob)
    assert (info.level, info.dtype, info.shape) == (level, dtype, (len(data),))
    assert (info.raw_bytes, info.stored_bytes) == (len(data), len(blob))


@settings(max_examples=250, deadline=None)
@given(
    words=word_arrays(4000),
    level=levels,
    dtype=dtypes,
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
)
def test_any_strides(words: np.ndarray, level: int, dtype: str, order: object, step: int) -> None:
    axes = list(range(words.ndim))
    order.shuffle(axes)  # type: ignore[attr-defined]
    view = tensor(words, dtype).permute(axes)[..., ::step]
    blob = gaac.encode(view, level=level)
    assert same(gaac.decode(blob), view)
    assert blob == gaac.encode(view.contiguous(), level=level)
    out = torch.full_like(tensor(words, dtype), 1.0).permute(axes)[..., ::step]
    assert gaac.decode(blob, out=out) is out
    assert same(out, view)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 256, 64),
        (1, 8, 256, 128),
        (2, 3, 1100, 64),
        (1, 2, 1100, 64),
        (1, 1, 5000, 8),
        (3, 2, 257, 1),
        (1, 2, 70, 33),
        (2, 1, 300, 512),
        (70, 9, 40, 16),
        (1, 3, 0, 64),
        (0, 3, 8, 64),
        (1, 3, 8, 0),
        (1, 1, 1, 1),
        (1,),
        (4099,),
        (1, 1, 1, 1, 1, 1, 300, 64),
    ],
)
def test_shapes(shape: tuple[int, ...], dtype: str, level: int) -> None:
    value = gaussian(shape, dtype)
    blob = gaac.encode(value, level=level)
    assert same(gaac.decode(blob), value)
    info = gaac.inspect(blob)
    assert (info.shape, info.raw_bytes) == (shape, 2 * value.numel())
    if value.numel() < 40_000:
        assert reference.decode(blob) == bits(value).numpy().tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_word(dtype: str, level: int) -> None:
    """All 65,536 bit patterns, among realistic values so that they take the coded path."""
    everything = bits(gaussian((1, 1, 65536, 64), dtype)).numpy().view(np.uint16).copy()
    everything[0, 0, ::64] = np.arange(65536, dtype=np.uint16).reshape(1024, 64)
    value = tensor(everything, dtype)
    blob = gaac.encode(value, level=level)
    assert level == 0 or "low" in gaac.inspect(blob).streams
    assert same(gaac.decode(blob), value)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("word", SPECIAL)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_constant_tensors(word: int, dtype: str, level: int) -> None:
    value = tensor(np.full((1, 2, 256, 64), word, np.uint16), dtype)
    blob = gaac.encode(value, level=level)
    assert same(gaac.decode(blob), value)
    if level:
        assert len(blob) < 0.9 * 2 * value.numel()


@pytest.mark.parametrize("level", LEVELS)
def test_a_slice_of_tokens_is_written_in_place(level: int) -> None:
    whole = torch.zeros(2, 3, 1024, 64, dtype=torch.bfloat16)
    value = gaussian((2, 3, 300, 64), "bfloat16")
    gaac.decode(gaac.encode(value, level=level), out=whole[:, :, 500:800])
    assert same(whole[:, :, 500:800], value)
    assert not whole[:, :, :500].any()
    assert not whole[:, :, 800:].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_out_may_have_its_axes_in_any_order(axes: tuple[int, ...], level: int) -> None:
    value = gaussian((2, 3, 600, 64), "float16")
    whole = torch.zeros([value.shape[axis] for axis in axes], dtype=value.dtype)
    out = whole.permute([axes.index(axis) for axis in range(4)])
    blob = gaac.encode(value, level=level)
    assert gaac.decode(blob, out=out) is out
    assert same(whole, value.permute(axes))
    assert gaac.encode(out, level=level) == blob


@pytest.mark.parametrize("level", LEVELS)
def test_out_may_be_every_other_value_of_one_axis(level: int) -> None:
    value = gaussian((5001,), "bfloat16")
    whole = torch.zeros(10002, dtype=torch.bfloat16)
    gaac.decode(gaac.encode(value, level=level), out=whole[::2])
    assert same(whole[::2], value)
    assert not whole[1::2].any()


@pytest.mark.parametrize("level", LEVELS)
def test_numpy_and_torch_give_the_same_blob(level: int) -> None:
    value = gaussian((1, 2, 256, 32), "float16")
    array = value.numpy()
    blob = gaac.encode(value, level=level)
    assert gaac.encode(array, level=level) == blob
    assert gaac.encode(array.astype(">f2"), level=level) == blob
    read_only = array.copy()
    read_only.flags.writeable = False
    assert gaac.encode(read_only, level=level) == blob


@pytest.mark.parametrize("level", LEVELS)
def test_grad_and_inference_tensors(level: int) -> None:
    value = gaussian((1, 2, 64, 64), "bfloat16")
    blob = gaac.encode(value, level=level)
    with torch.inference_mode():
        assert gaac.encode(value.clone(), level=level) == blob
    assert gaac.encode(value.clone().requires_grad_(), level=level) == blob
    assert not gaac.decode(blob).requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_blobs_do_not_depend_on_the_run(level: int) -> None:
    value = gaussian((1, 3, 700, 64), "bfloat16")
    assert gaac.encode(value, level=level) == gaac.encode(value.clone(), level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_random_data_costs_a_header(level: int) -> None:
    words = random_words((1, 4, 1024, 64))
    blob = gaac.encode(tensor(words, "bfloat16"), level=level)
    assert len(blob) == words.nbytes + 64
    assert len(gaac.compress(words.tobytes(), level=level)) == words.nbytes + 40


@pytest.mark.parametrize("level", [level for level in LEVELS if level])
def test_only_the_segment_that_does_not_shrink_is_stored(level: int) -> None:
    words = bits(gaussian((1, 4, 4096, 64), "bfloat16")).numpy().view(np.uint16).copy()
    words[:, 2] = random_words((1, 4096, 64))
    blob = gaac.encode(tensor(words, "bfloat16"), level=level)
    streams = gaac.inspect(blob).streams
    assert streams["words"] == words.nbytes // 4
    assert len(blob) < words.nbytes * (0.25 + 0.75 * 0.75)
    assert same(gaac.decode(blob), tensor(words, "bfloat16"))


@pytest.mark.parametrize(
    ("dtype", "level", "least"),
    [("bfloat16", 1, 1.40), ("bfloat16", 3, 1.49), ("float16", 1, 1.11), ("float16", 3, 1.165)],
)
def test_ratio_on_normal_values(dtype: str, level: int, least: float) -> None:
    value = gaussian((1, 8, 256, 64), dtype)
    assert 2 * value.numel() / len(gaac.encode(value, level=level)) > least


def test_each_head_has_its_own_base() -> None:
    """Heads whose scales differ by 2^20 compress as well as heads of one scale."""
    value = gaussian((1, 2, 256, 64), "bfloat16")
    one = len(gaac.encode(value, level=1))
    value[:, 1] *= 2.0**20
    assert len(gaac.encode(value, level=1)) == one


def test_base_follows_the_tokens() -> None:
    """So do blocks of 256 tokens whose scales differ."""
    value = gaussian((1, 2, 1024, 64), "bfloat16")
    one = len(gaac.encode(value, level=1))
    for block in range(4):
        value[:, :, 256 * block : 256 * (block + 1)] *= 2.0 ** (10 * block)
    assert len(gaac.encode(value, level=1)) == one
