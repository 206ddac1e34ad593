"""Level 2: the compiled kernels beside their numpy twin and the oracle, on words and streams."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaac.errors import CorruptFrame
from gaac.kernels import cpu, reference_tiered, tiered_numpy
from gaac.kernels.cpu import PATHS
from gaac.levels.base import FORMATS, Hints
from gaac.levels.packed import ALIGN
from gaac.levels.tiered import Tiered, kernels_of
from tests.gaac.data import SPECIAL, VIEWS, bits, gaussian
from tests.gaac.paths import run_on, skip_unless_it_runs

LEVEL = Tiered()
COMPILED = ("bfloat16", "float16")
CODES = {"float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
BASE, RANKS, OFFSETS, SECOND, THIRD, ESCAPES, PLANES, LOW = range(len(LEVEL.streams))
Shape = tuple[int, int, int]

of_each_dtype = pytest.mark.parametrize("dtype", COMPILED)


@pytest.fixture(params=[path for path in PATHS if path != "numpy"], scope="module")
def path(request: pytest.FixtureRequest) -> str:
    skip_unless_it_runs(request.param)
    return str(request.param)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    words: np.ndarray = bits(gaussian(shape, dtype, seed)).numpy().view(np.uint16)
    return words


def spread(shape: Shape, dtype: str, distances: Sequence[int], seed: int = 0) -> np.ndarray:
    """Words whose exponents lie at any of these distances from one for each channel."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[dtype]
    exponent = rng.integers(0, 256, (1, 1, shape[2])) + rng.choice(distances, shape)
    others = rng.integers(0, 65536, shape) & ~(fmt.exponent_max << fmt.exponent_shift)
    return ((exponent & fmt.exponent_max) << fmt.exponent_shift | others).astype(np.uint16)


@st.composite
def segments(draw: st.DrawFn) -> tuple[np.ndarray, str]:
    """Words, uint16 (blocks, rows, width), of few or many rows and any width, and their dtype."""
    width = draw(st.one_of(st.integers(1, 140), st.sampled_from([64, 80, 96, 128, 192, 256])))
    rows = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 128, 255, 256, 257, 700])))
    blocks = draw(st.integers(1, 3))
    rows = max(min(rows, 40_000 // (blocks * width)), 1)
    dtype = draw(st.sampled_from(COMPILED))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shape = (blocks, rows, width)
    kind = draw(st.sampled_from(["normal", "random", "special", "constant", "spread", "holes"]))
    if kind == "random":
        return rng.integers(0, 65536, shape, dtype=np.uint16), dtype
    if kind == "special":
        return rng.choice(np.array(SPECIAL, np.uint16), shape), dtype
    if kind == "constant":
        return np.full(shape, draw(st.integers(0, 65535)), np.uint16), dtype
    if kind == "spread":
        distances = draw(st.lists(st.integers(-12, 5), min_size=1, max_size=12))
        return spread(shape, dtype, distances, seed), dtype
    words = normal(shape, dtype, seed % 1000)
    if kind == "holes":
        words[rng.random(shape) < draw(st.floats(0, 1))] = 0
    return words, dtype


def encode(path: str, words: np.ndarray, dtype: str) -> list[np.ndarray]:
    return list(kernels_of(path, dtype).encode(words, FORMATS[dtype]))


def fault(path: str, streams: Sequence[np.ndarray], out: np.ndarray, dtype: str) -> str:
    """Decode into `out`; the sentence of the error, empty if there is none."""
    try:
        kernels_of(path, dtype).decode(streams, out, FORMATS[dtype])
    except CorruptFrame as error:
        return str(error)
    return ""


def oracle(streams: Sequence[np.ndarray], shape: Shape, dtype: str) -> np.ndarray:
    coded = [stream.tobytes() for stream in streams]
    words = list(reference_tiered.decode(coded, CODES[dtype], shape))
    kind = np.uint8 if FORMATS[dtype].low_bytes == 0 else np.uint16
    return np.array(words, kind).reshape(shape)


def lengths(streams: Sequence[np.ndarray]) -> list[int]:
    return [len(stream) for stream in streams]


@settings(max_examples=150, deadline=None)
@given(segment=segments())
def test_kernels_are_the_twin(path: str, segment: tuple[np.ndarray, str]) -> None:
    words, dtype = segment
    streams = encode("numpy", words, dtype)
    assert LEVEL.lengths_fit(lengths(streams), words.shape, FORMATS[dtype])
    assert sum(lengths(streams[:PLANES])) % ALIGN == 0
    for name, made, expected in zip(
        LEVEL.streams, encode(path, words, dtype), streams, strict=True
    ):
        assert made.dtype == np.uint8
        assert np.array_equal(made, expected), name
    for decoding in (path, "numpy"):
        out = np.full_like(words, 0xA5A5)
        assert fault(decoding, streams, out, dtype) == ""
        assert np.array_equal(out, words)


@settings(max_examples=25, deadline=None)
@given(segment=segments())
def test_the_oracle_reads_it(segment: tuple[np.ndarray, str]) -> None:
    words, dtype = segment
    words = words[:, :150, : max(3000 // min(words.shape[1], 150), 1)]
    assert np.array_equal(oracle(encode("numpy", words, dtype), words.shape, dtype), words)


@of_each_dtype
@pytest.mark.parametrize("width", [1, 8, 63, 64, 65, 80, 96, 127, 128, 192, 200, 256])
def test_full_blocks_of_any_width(path: str, dtype: str, width: int) -> None:
    words = normal((2, 256, width), dtype)
    streams, twin = encode(path, words, dtype), encode("numpy", words, dtype)
    assert all(np.array_equal(a, b) for a, b in zip(streams, twin, strict=True))
    out = np.zeros_like(words)
    assert fault(path, streams, out, dtype) == ""
    assert np.array_equal(out, words)


@of_each_dtype
@pytest.mark.parametrize("distances", [range(-5, -1), range(-8, -4), range(-14, -8)])
def test_all_of_a_step_goes_on(path: str, dtype: str, distances: range) -> None:
    """64 bits at once, at any place in a byte: the first rows say what the base is."""
    words = spread((1, 256, 64), dtype, distances)
    fmt = FORMATS[dtype]
    middles = words[:, ::16]  # those rows of which the base is the median, or near it
    middles[...] = normal(middles.shape, dtype) & 0x807F | 16 << fmt.exponent_shift
    words[0, 3, :5] = 16 << fmt.exponent_shift
    streams = encode(path, words, dtype)
    assert all(
        np.array_equal(a, b) for a, b in zip(streams, encode("numpy", words, dtype), strict=True)
    )
    out = np.zeros_like(words)
    assert fault(path, streams, out, dtype) == ""
    assert np.array_equal(out, words)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(2, 16, 16), (1, 33, 7), (1, 70, 5)])
def test_one_byte_dtypes(dtype: str, shape: Shape) -> None:
    words = np.resize(np.arange(256, dtype=np.uint8), shape)
    fmt = FORMATS[dtype]
    streams = LEVEL.encode(words, fmt, Hints())
    assert LEVEL.lengths_fit(lengths(streams), shape, fmt)
    out = np.zeros_like(words)
    LEVEL.decode(streams, out, fmt, Hints())
    assert np.array_equal(out, words)
    assert np.array_equal(oracle(streams, shape, dtype), words)


@pytest.mark.parametrize("view", VIEWS)
@of_each_dtype
def test_strides(path: str, view: str, dtype: str) -> None:
    """Reading and writing parts of a larger array, and nothing around them."""
    whole = normal((3, 100, 128), dtype)
    words = VIEWS[view](whole)
    words.setflags(write=False)
    streams = encode(path, words, dtype)
    twin = encode("numpy", np.ascontiguousarray(words), dtype)
    assert all(np.array_equal(a, b) for a, b in zip(streams, twin, strict=True))
    target = np.full_like(whole, 7)
    for stream in streams:
        stream.setflags(write=False)
    assert fault(path, streams, VIEWS[view](target), dtype) == ""
    expected = np.full_like(whole, 7)
    VIEWS[view](expected)[...] = words
    assert np.array_equal(target, expected)


# One tile alone.


def bit(stream: bytes, index: int) -> int:
    return stream[index // 8] >> index % 8 & 1


def read_tile(streams: Sequence[np.ndarray], shape: Shape, block: int, tile: int) -> list[int]:
    """The bfloat16 words of one tile, by its offsets, with no look at any other."""
    _, rows, width = shape
    base, ranks, offsets, second, third, escapes, planes, low = (s.tobytes() for s in streams)
    at = list(struct.unpack_from("<3I", offsets, 12 * (block * -(-rows // 64) + tile)))
    plane = 8 * -(-rows * width // 8)
    words = []
    for value in range(tile * 64 * width, min((tile + 1) * 64, rows) * width):
        place = 2 * block * plane + value
        rank = bit(planes, place) + 2 * bit(planes, place + plane)
        for tier, codes in enumerate((second, third)):
            if rank == 3 * (tier + 1):
                rank += bit(codes, at[tier]) + 2 * bit(codes, 4 * len(codes) + at[tier])
                at[tier] += 1
        exponent = (
            escapes[at[2]] if rank == 9 else base[block * width + value % width] + ranks[rank]
        )
        at[2] += rank == 9
        byte = low[block * rows * width + value]
        words.append((exponent & 255) << 7 | byte >> 1 | (byte & 1) << 15)
    return words


@pytest.mark.parametrize("shape", [(2, 256, 64), (2, 150, 9)])
@pytest.mark.parametrize("tile", [0, 1, 2])
def test_a_tile_is_read_without_those_before_it(shape: Shape, tile: int) -> None:
    words = normal(shape, "bfloat16")
    words[np.random.default_rng(0).random(shape) < 0.02] = 0
    streams = LEVEL.encode(words, FORMATS["bfloat16"], Hints())
    rows = words[1, 64 * tile : 64 * (tile + 1)]
    assert read_tile(streams, shape, 1, tile) == rows.reshape(-1).tolist()


# Streams that contradict each other, or that no encoder writes.


@pytest.mark.parametrize("name", [path for path in PATHS if path != "numpy"])
def test_nothing_outside_the_arrays_is_touched(name: str) -> None:
    """All arrays, also those that kernels work in, lie between pages that no one may touch."""
    skip_unless_it_runs(name)
    done = run_on(name, "-m", "tests.gaac.guarded_kernels", "2", name)
    assert done.stdout == "done\n", f"exit {done.returncode}\n{done.stderr}"


def test_the_level_takes_the_path_of_the_cpu() -> None:
    assert (kernels_of(cpu.path(), "bfloat16") is tiered_numpy) == (cpu.path() == "numpy")
    assert kernels_of(cpu.path(), "float8_e5m2") is tiered_numpy


# How well it compresses, and the choices behind that.


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0, 2.0, 8.0])
def test_no_other_base_is_shorter(mean: float) -> None:
    """By the ranks that are expected, counted value by value."""
    values = np.random.default_rng(2).normal(size=(200, 8)) + mean
    exponent = (values.astype(np.float32).view(np.uint32) >> 23 & 255).astype(np.uint8)
    bases, _ = tiered_numpy.choose(exponent[None], 255)
    saving = dict(zip(tiered_numpy.EXPECTED, tiered_numpy.SAVINGS, strict=True))

    def saved(column: np.ndarray, base: int) -> int:
        numbers = [int(e) - base + tiered_numpy.REACH_DOWN for e in column]
        return sum(saving.get(number, 0) for number in numbers)

    for channel in range(8):
        column = exponent[:, channel]
        middle = int(np.median(column))
        most = max(saved(column, base) for base in range(middle - 2, middle + 3))
        assert saved(column, int(bases[0, channel])) == most


def test_ranks_go_by_how_often_distances_occur() -> None:
    words = normal((2, 256, 64), "bfloat16")
    streams = encode("numpy", words, "bfloat16")
    exponent = (words >> 7).astype(np.uint8)
    distance = exponent - streams[BASE].reshape(2, 1, 64)
    often = [int((distance == rank).sum()) for rank in streams[RANKS]]
    assert often == sorted(often, reverse=True)
    others = set(range(256)) - set(streams[RANKS].tolist())
    assert max(int((distance == other).sum()) for other in others) <= often[-1]


@pytest.mark.parametrize(
    ("dtype", "mean", "least"),
    [("bfloat16", 0, 1.485), ("bfloat16", 3, 1.56), ("float16", 0, 1.16), ("float16", 3, 1.2)],
)
def test_ratio(dtype: str, mean: int, least: float) -> None:
    """Not far from the entropy of each channel's exponents, and from level 3."""
    words = bits(gaussian((4, 256, 64), dtype) + mean).numpy().view(np.uint16)
    coded = LEVEL.encode(words, FORMATS[dtype], Hints())
    assert words.nbytes / sum(lengths(coded)) > least
