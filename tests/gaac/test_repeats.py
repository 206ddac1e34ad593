"""Tokens that repeat are coded once, exactly, and what a blob says of them is checked."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from gaac import repeats
from gaac.frame import Coded, pack
from gaac.header import SEGMENT_VALUES, Header
from gaac.kernels import reference, repeats_numpy, repeats_scan
from gaac.levels.base import FORMATS, Hints
from gaac.levels.packed import Packed
from tests.gaac.data import DTYPES, LEVELS, bits, gaussian, repeating, same, tensor
from tests.gaac.forging import TABLE, assert_corrupt, patched, reseal

CODED = [level for level in LEVELS if level]
SEGMENT = 128  # where the first segment of a tensor of four axes starts: its table is short


@st.composite
def tokens_that_repeat(draw: st.DrawFn) -> np.ndarray:
    """uint16 (batch, heads, tokens, width) with some tokens that are, or nearly are, copies."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tokens = draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 520])))
    width = draw(st.sampled_from([1, 3, 4, 5, 8, 12, 33, 64]))
    seed = draw(st.integers(0, 2**32 - 1))
    different = draw(st.integers(1, tokens))
    words = bits(gaussian((batch, heads, different, width), "bfloat16", seed % 1000)).numpy()
    rng = np.random.default_rng(seed)
    made = words.view(np.uint16)[:, :, rng.integers(0, different, tokens)]
    for _ in range(draw(st.integers(0, 3))):  # one bit of one row, anywhere
        at = tuple(int(rng.integers(0, size)) for size in made.shape)
        made[at] ^= np.uint16(1 << int(rng.integers(0, 16)))
    return made


@settings(max_examples=300, deadline=None)
@given(
    words=tokens_that_repeat(),
    level=st.sampled_from(LEVELS),
    dtype=st.sampled_from(sorted(DTYPES)),
    threads=st.sampled_from([1, 3]),
)
def test_round_trip(words: np.ndarray, level: int, dtype: str, threads: int) -> None:
    value = tensor(words, dtype)
    blob = gaac.encode(value, level=level)
    assert same(gaac.decode(blob, threads=threads), value)
    assert gaac.decompress(blob) == words.tobytes()
    assert reference.decode(blob) == words.tobytes()


@settings(max_examples=300, deadline=None)
@given(words=tokens_that_repeat())
def test_compiled_and_plain_search_agree(words: np.ndarray) -> None:
    if words.shape[3] < 4:
        words = np.repeat(words, 4, axis=3)
    stacked = words.reshape(-1, *words.shape[2:])
    counts = [k.count_samples(stacked, 256, 8) for k in (repeats_scan, repeats_numpy)]
    assert counts[0] == counts[1]
    block = stacked[:, :256]
    scanned, plain = repeats_scan.index_rows(block), repeats_numpy.index_rows(block)
    for one, other in zip(scanned, plain, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    index, first_rows = plain
    assert np.array_equal(block[:, first_rows[index]], block)
    assert counts[0] >= 0
    if stacked.shape[1] <= 256:
        assert counts[0] >= block.shape[1] - len(first_rows)  # `likely` is never wrongly False


@pytest.mark.parametrize("level", CODED)
@pytest.mark.parametrize("shape", [(1, 3, 256, 64), (1, 3, 1100, 64), (2, 9, 300, 32)])
def test_the_first_layers_values_shrink(shape: tuple[int, ...], level: int) -> None:
    value = repeating(shape, "bfloat16")
    blob = gaac.encode(value, level=level)
    assert same(gaac.decode(blob), value)
    plain = gaac.encode(gaussian(shape, "bfloat16"), level=level)
    assert len(blob) < 0.8 * len(plain)
    assert gaac.inspect(blob).streams["repeats"] >= shape[-2]


def test_only_blocks_with_repeats_have_a_stream_of_them() -> None:
    value = gaussian((1, 2, 768, 64), "bfloat16")
    value[:, :, 256:512] = repeating((1, 2, 256, 64), "bfloat16")
    streams = gaac.inspect(gaac.encode(value, level=1)).streams
    assert streams["repeats"] == 256


@pytest.mark.parametrize("level", CODED)
def test_a_token_repeats_only_if_it_does_in_every_matrix(level: int) -> None:
    value = gaussian((1, 3, 256, 64), "bfloat16")
    value[:, (0, 2), 100:200] = value[:, (0, 2), :100]
    blob = gaac.encode(value, level=level)
    assert "repeats" not in gaac.inspect(blob).streams
    assert same(gaac.decode(blob), value)


@pytest.mark.parametrize("level", CODED)
def test_tokens_that_differ_only_where_no_sample_is_taken(level: int) -> None:
    value = gaussian((1, 2, 256, 64), "bfloat16")
    value[..., :8] = 0
    value[..., -8:] = 0
    blob = gaac.encode(value, level=level)
    assert "repeats" not in gaac.inspect(blob).streams
    assert same(gaac.decode(blob), value)


def test_few_repeats_are_left_alone() -> None:
    value = gaussian((1, 3, 256, 64), "bfloat16")
    value[:, :, 250:] = value[:, :, :6]
    assert "repeats" not in gaac.inspect(gaac.encode(value)).streams
    assert repeats.find(bits(value).numpy().view(np.uint16)[0]) is None


def test_bytes_are_not_searched() -> None:
    data = bits(repeating((1, 1, 256, 64), "float16")).numpy().tobytes()
    assert "repeats" not in gaac.inspect(gaac.compress(data)).streams


@pytest.mark.parametrize("level", CODED)
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_strides(axes: tuple[int, ...], level: int) -> None:
    value = repeating((2, 3, 300, 64), "bfloat16")
    blob = gaac.encode(value, level=level)
    back = [axes.index(axis) for axis in range(4)]
    turned = value.permute(axes).contiguous().permute(back)
    assert gaac.encode(turned, level=level) == blob
    out = torch.zeros_like(value.permute(axes).contiguous()).permute(back)
    assert same(gaac.decode(blob, out=out), value)
    whole = torch.zeros(2, 3, 700, 64, dtype=value.dtype)
    gaac.decode(blob, out=whole[:, :, 100:400])
    assert same(whole[:, :, 100:400], value)
    assert not whole[:, :, :100].any()
    assert not whole[:, :, 400:].any()


@pytest.mark.parametrize("level", CODED)
def test_every_path_writes_the_same(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [repeating((1, 3, 600, 64), "float16"), gaussian((1, 3, 600, 64), "float16")]
    blobs = []
    for kernels in (repeats_numpy, repeats_scan):
        monkeypatch.setattr(repeats, "_kernels", lambda kernels=kernels: kernels)
        blobs.append([gaac.encode(value, level=level) for value in values])
    assert blobs[0] == blobs[1]


def test_one_row_for_all() -> None:
    value = gaussian((1, 2, 1, 64), "bfloat16").expand(1, 2, 256, 64)
    blob = gaac.encode(value, level=1)
    assert len(blob) < 1000
    assert same(gaac.decode(blob), value)


# What a hostile writer may claim. The blob has 60 tokens, of which 20 are different.


def blob_with_repeats(level: int = 1) -> bytes:
    ids = np.concatenate([np.arange(20), np.arange(20), np.arange(20)])
    return gaac.encode(gaussian((1, 2, 20, 64), "bfloat16")[:, :, ids], level=level)


@pytest.mark.parametrize("level", CODED)
@pytest.mark.parametrize("unique_rows", [0, 1, 19, 21, 59, 60, 61, 255, 256, 65535])
def test_hostile_unique_rows(level: int, unique_rows: int) -> None:
    blob = blob_with_repeats(level)
    assert struct.unpack_from("<HH", blob, TABLE) == (level, 20)
    assert_corrupt(patched(blob, TABLE + 2, "<H", unique_rows))


@pytest.mark.parametrize("unique_rows", [1, 20, 64, 65535])
def test_repeats_where_there_are_none(unique_rows: int) -> None:
    for level in CODED:
        blob = gaac.encode(gaussian((1, 2, 64, 64), "bfloat16"), level=level)
        assert_corrupt(patched(blob, TABLE + 2, "<H", unique_rows))


HOSTILE = {
    "starts late": [1, *range(1, 20), *range(20), *range(20)],
    "skips one": [0, 2, 1, *range(3, 20), *range(20), *range(20)],
    "names one too many": [*range(21), *range(19), *range(20)],
    "names one too few": [*range(19), 0, *range(19), 0, *range(19), 0],
    "far outside": [*range(20), *range(20), *range(19), 255],
    "all zero": [0] * 60,
    "backwards": [*range(19, -1, -1)] * 3,
}


@pytest.mark.parametrize("level", CODED)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_index(name: str, level: int) -> None:
    blob = bytearray(blob_with_repeats(level))
    assert blob[SEGMENT : SEGMENT + 60] == bytes([*range(20)] * 3)
    blob[SEGMENT : SEGMENT + 60] = bytes(HOSTILE[name])
    with pytest.raises(gaac.CorruptFrame, match="repeats"):
        gaac.decode(reseal(blob))
    with pytest.raises(gaac.CorruptFrame, match="repeats"):
        gaac.decompress(reseal(blob))


def test_another_order_of_the_same_rows_is_fine() -> None:
    blob = bytearray(blob_with_repeats())
    blob[SEGMENT : SEGMENT + 60] = bytes([*range(20), *range(19, -1, -1), *[3] * 20])
    decoded = gaac.decode(reseal(blob))
    assert torch.equal(decoded[:, :, 20:40], decoded[:, :, :20].flip(2))
    assert torch.equal(decoded[:, :, 40:], decoded[:, :, 3:4].expand(1, 2, 20, 64))


@pytest.mark.parametrize("length", [0, 1, 59, 61, 120, 2**32 - 1])
def test_hostile_length_of_the_index(length: int) -> None:
    assert_corrupt(patched(blob_with_repeats(), TABLE + 4, "<I", length))


def sealed(tokens: int, block_rows: int, unique_rows: int, index: list[int]) -> bytes:
    """A blob of one segment, whose coded rows lie in it as they are; all as if by the writer."""
    header = Header(1, "bfloat16", 0, (1, 1, tokens, 64), 64, block_rows, 2, 1)
    coded = np.zeros(tokens // block_rows * unique_rows * 128, np.uint8)
    streams = [np.array(index, np.uint8), coded]
    blob = pack(header, [Coded(0, unique_rows, streams)], np.zeros(0, np.uint8))
    assert blob is not None
    return blob


def test_what_is_sealed_here_is_fine_in_itself() -> None:
    blob = sealed(200, 200, 2, [0, 1] * 100)
    assert not gaac.decode(blob).any()
    blob = sealed(256, 256, 200, [*range(200), *range(56)])
    assert not gaac.decode(blob).any()


@pytest.mark.parametrize(
    ("tokens", "block_rows", "unique_rows", "index"),
    [
        (512, 256, 100, [*range(100), *[0] * 156]),  # two blocks in a segment
        (400, 400, 100, [*range(100), *[0] * 300]),  # more rows than a byte counts
        (200, 200, 2, [0, 1] * 99),  # too few entries
        (200, 200, 2, [0, 1] * 101),  # too many
        (200, 200, 2, []),
    ],
)
def test_hostile_segments(tokens: int, block_rows: int, unique_rows: int, index: list[int]) -> None:
    assert_corrupt(sealed(tokens, block_rows, unique_rows, index))


@pytest.mark.parametrize("unique_rows", [64, 65])
def test_all_rows_unique(unique_rows: int) -> None:
    """Then there are no repeats, and the frame may not say so."""
    header = Header(1, "bfloat16", 0, (2, 64, 64), 64, 256, 1, 1)
    plain = Coded(0, 0, [np.zeros(64 * 128, np.uint8)])
    streams = [np.arange(64, dtype=np.uint8), np.zeros(unique_rows * 128, np.uint8)]
    blob = pack(header, [packed_streams(), Coded(0, unique_rows, streams)], np.zeros(0, np.uint8))
    assert blob is not None
    assert_corrupt(blob)
    good = pack(header, [packed_streams(), plain], np.zeros(0, np.uint8))
    assert good is not None
    assert not gaac.decode(good).any()


def packed_streams() -> Coded:
    """A segment of one matrix of 64 zero rows, coded: it makes room for one that is not."""
    words = np.zeros((1, 64, 64), np.uint16)
    return Coded(1, 0, Packed().encode(words, FORMATS["bfloat16"], Hints()))


def test_rows_with_the_same_hash() -> None:
    """Made to collide: the hash of a row, eight bytes at a time, is undone by its last word."""
    mask, golden = 2**64 - 1, int(repeats_scan.GOLDEN)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**64, (1, 100, 2), dtype=np.uint64)

    def before_last(first: int) -> int:
        total = (16 ^ first) * golden & mask
        return total ^ total >> 32

    for row in range(0, 100, 2):
        one, other = int(words[0, row, 0]), int(words[0, row + 1, 0])
        last = before_last(one) ^ int(words[0, row, 1]) ^ before_last(other)
        words[0, row + 1, 1] = last
    block = words.view(np.uint16)
    for kernels in (repeats_scan, repeats_numpy):
        index, first_rows = kernels.index_rows(block)
        assert np.array_equal(index, np.arange(100))
        assert np.array_equal(first_rows, np.arange(100))


def test_memory_of_a_decode_is_bounded_by_the_content() -> None:
    value = repeating((1, 8, 4096, 128), "bfloat16")
    blob = gaac.encode(value, level=1)
    tracemalloc.start()
    try:
        gaac.decode(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * value.numel() + 24 * SEGMENT_VALUES
