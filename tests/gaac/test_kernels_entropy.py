"""Level 3: the compiled kernels beside their numpy twin and the oracle, on words and streams."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from gaac.errors import CorruptFrame
from gaac.kernels import bit_strings, entropy_numpy, entropy_simd, reference
from gaac.kernels.entropy_numpy import DISTANCES, LEVELS, SAVINGS
from gaac.levels.base import FORMATS, Hints, WordFormat
from gaac.levels.entropy import Entropy
from tests.gaac.data import SPECIAL, VIEWS, bits, gaussian
from tests.gaac.paths import run_on, skip_unless_it_runs

LEVEL = Entropy()
COMPILED = ("bfloat16", "float16")
CODES = {"float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
BASE, SHAPES, SECOND, LEVEL_STRINGS, PATCHES, PLANES, LOW = range(len(LEVEL.streams))


@pytest.fixture(params=sorted(entropy_simd.CODERS), scope="module")
def coder(request: pytest.FixtureRequest) -> Any:
    skip_unless_it_runs(request.param)
    return entropy_simd.CODERS[request.param]


def normal(shape: tuple[int, int, int], dtype: str, seed: int = 0) -> np.ndarray:
    words: np.ndarray = bits(gaussian(shape, dtype, seed)).numpy().view(np.uint16)
    return words


@st.composite
def segments(draw: st.DrawFn) -> tuple[np.ndarray, str]:
    """Words, uint16 (blocks, rows, width), of few or many rows and any width, and their dtype."""
    width = draw(st.one_of(st.integers(1, 140), st.sampled_from([64, 80, 96, 128, 192, 256])))
    rows = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 256, 257, 300, 700])))
    blocks = draw(st.integers(1, 3))
    rows = max(min(rows, 40_000 // (blocks * width)), 1)
    dtype = draw(st.sampled_from(COMPILED))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (blocks, rows, width)
    kind = draw(st.sampled_from(["normal", "random", "special", "constant", "mixed"]))
    if kind == "random":
        return rng.integers(0, 65536, shape, dtype=np.uint16), dtype
    if kind == "special":
        return rng.choice(np.array(SPECIAL, np.uint16), shape), dtype
    if kind == "constant":
        return np.full(shape, draw(st.integers(0, 65535)), np.uint16), dtype
    words = normal(shape, dtype, int(rng.integers(1000)))
    if kind == "mixed":
        where = rng.random(shape) < 0.1
        words[where] = rng.choice(np.array(SPECIAL, np.uint16), int(where.sum()))
    return words, dtype


def oracle(streams: Sequence[np.ndarray], shape: tuple[int, int, int], dtype: str) -> np.ndarray:
    coded = [stream.tobytes() for stream in streams]
    kind = np.uint8 if FORMATS[dtype].low_bytes == 0 else np.uint16
    return np.array(list(reference._segment(3, CODES[dtype], coded, *shape)), kind).reshape(shape)


def lengths(streams: Sequence[np.ndarray]) -> list[int]:
    return [len(stream) for stream in streams]


@settings(max_examples=150, deadline=None)
@given(segment=segments())
def test_kernels_are_the_twin(coder: Any, segment: tuple[np.ndarray, str]) -> None:
    words, dtype = segment
    fmt = FORMATS[dtype]
    streams = entropy_numpy.encode(words, fmt)
    assert LEVEL.lengths_fit(lengths(streams), words.shape, fmt)
    for name, made, expected in zip(LEVEL.streams, coder.encode(words, fmt), streams, strict=True):
        assert made.dtype == np.uint8
        assert np.array_equal(made, expected), name
    for decode in (coder.decode, entropy_numpy.decode):
        out = np.full_like(words, 0xA5A5)
        decode(streams, out, fmt)
        assert np.array_equal(out, words)


@settings(max_examples=25, deadline=None)
@given(segment=segments())
def test_the_oracle_reads_it(segment: tuple[np.ndarray, str]) -> None:
    words, dtype = segment
    words = words[:, :9, :90]
    assert np.array_equal(
        oracle(entropy_numpy.encode(words, FORMATS[dtype]), words.shape, dtype), words
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(2, 16, 16), (1, 33, 7)])
def test_one_byte_dtypes(dtype: str, shape: tuple[int, int, int]) -> None:
    words = np.resize(np.arange(256, dtype=np.uint8), shape)
    fmt = FORMATS[dtype]
    streams = LEVEL.encode(words, fmt, Hints())
    assert LEVEL.lengths_fit(lengths(streams), shape, fmt)
    out = np.zeros_like(words)
    LEVEL.decode(streams, out, fmt, Hints())
    assert np.array_equal(out, words)
    assert np.array_equal(oracle(streams, shape, dtype), words)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", COMPILED)
def test_strides(coder: Any, name: str, dtype: str) -> None:
    """Reading and writing parts of a larger array, and nothing around them."""
    whole = normal((3, 100, 128), dtype)
    words, fmt = VIEWS[name](whole), FORMATS[dtype]
    streams = coder.encode(words, fmt)
    plain = entropy_numpy.encode(np.ascontiguousarray(words), fmt)
    assert all(np.array_equal(a, b) for a, b in zip(streams, plain, strict=True))
    target = np.full_like(whole, 7)
    coder.decode(streams, VIEWS[name](target), fmt)
    expected = np.full_like(whole, 7)
    VIEWS[name](expected)[...] = words
    assert np.array_equal(target, expected)


def test_input_is_not_written_to(coder: Any) -> None:
    words = normal((2, 64, 64), "bfloat16")
    kept = words.copy()
    words.setflags(write=False)
    streams = coder.encode(words, FORMATS["bfloat16"])
    assert np.array_equal(words, kept)
    for stream in streams:
        stream.setflags(write=False)
    out = np.zeros_like(words)
    coder.decode(streams, out, FORMATS["bfloat16"])
    assert np.array_equal(out, words)


# Streams that contradict each other, or that no encoder writes.


def outcome(
    decode: Callable[..., None], streams: Sequence[np.ndarray], shape: Any, fmt: WordFormat
) -> np.ndarray | None:
    """The words, or None if the streams are refused: then nothing was written."""
    out = np.full(shape, 0x1234, np.uint16)
    try:
        decode(streams, out, fmt)
    except CorruptFrame:
        assert (out == 0x1234).all()
        return None
    return out


@settings(max_examples=300, deadline=None)
@given(
    segment=segments(),
    stream=st.integers(0, LOW),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    longer=st.integers(-9, 9),
)
def test_hostile_streams(
    coder: Any,
    segment: tuple[np.ndarray, str],
    stream: int,
    edits: list[tuple[float, int]],
    longer: int,
) -> None:
    """Kernels and twin refuse the same streams, and make the same of the others."""
    words, dtype = segment
    fmt = FORMATS[dtype]
    streams = [part.copy() for part in entropy_numpy.encode(words, fmt)]
    if stream in (SECOND, LEVEL_STRINGS, PATCHES):
        streams[stream] = np.resize(
            np.append(streams[stream], np.uint8(0)), max(len(streams[stream]) + longer, 0)
        )
    for where, value in edits:
        if len(streams[stream]):
            streams[stream][int(where * len(streams[stream]))] = value
    if not LEVEL.lengths_fit(lengths(streams), words.shape, fmt):
        return
    mine = outcome(coder.decode, streams, words.shape, fmt)
    twin = outcome(entropy_numpy.decode, streams, words.shape, fmt)
    assert (mine is None) == (twin is None)
    assert mine is None or np.array_equal(mine, twin)


def damaged(dtype: str, stream: int, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    words = np.random.default_rng(1).integers(0, 65536, (2, 5, 5), dtype=np.uint16)
    streams = list(entropy_numpy.encode(words, FORMATS[dtype]))
    streams[stream] = change(streams[stream].copy())
    return streams, words.shape


def set_bit(place: int, bit: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(stream: np.ndarray) -> np.ndarray:
        stream[place] |= np.uint8(1 << bit)
        return stream

    return change


def set_byte(place: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(stream: np.ndarray) -> np.ndarray:
        stream[place] = value
        return stream

    return change


DAMAGES = {
    "base out of range": ("float16", BASE, set_byte(0, 32)),
    "patch out of range": ("float16", PATCHES, set_byte(0, 32)),
    "spare bit of shapes": ("bfloat16", SHAPES, set_bit(-1, 5)),
    "spare bit of shapes in between": ("bfloat16", SHAPES, set_bit(0, 5)),
    "spare bit of plane first": ("bfloat16", PLANES, set_bit(3, 1)),
    "spare bit of an extra plane": ("float16", PLANES, set_bit(-1, 7)),
    "second too long": ("bfloat16", SECOND, lambda stream: np.append(stream, np.uint8(0))),
    "second too short": ("bfloat16", SECOND, lambda stream: stream[:-1]),
    "spare bit of second": ("bfloat16", SECOND, set_bit(-1, 7)),
    "levels too long": ("bfloat16", LEVEL_STRINGS, lambda stream: np.append(stream, np.uint8(0))),
    "levels too short": ("bfloat16", LEVEL_STRINGS, lambda stream: stream[:-1]),
    "no levels": ("bfloat16", LEVEL_STRINGS, lambda stream: stream[:0]),
    "spare bit of a level": ("bfloat16", LEVEL_STRINGS, set_bit(-1, 7)),
    "patches too many": ("bfloat16", PATCHES, lambda stream: np.append(stream, np.uint8(0))),
    "patches too few": ("bfloat16", PATCHES, lambda stream: stream[:-1]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_strictness(coder: Any, name: str) -> None:
    dtype, stream, change = DAMAGES[name]
    assert (
        outcome(coder.decode, *damaged(dtype, stream, lambda kept: kept), FORMATS[dtype])
        is not None
    )
    streams, shape = damaged(dtype, stream, change)
    for decode in (coder.decode, entropy_numpy.decode):
        assert outcome(decode, streams, shape, FORMATS[dtype]) is None


@pytest.mark.parametrize("stream", range(LOW + 1))
def test_kernels_check_lengths_themselves(coder: Any, stream: int) -> None:
    """Also those that the frame has checked before."""
    words = normal((2, 5, 5), "float16")
    for change in (lambda kept: kept[:-1], lambda kept: np.append(kept, np.uint8(0))):
        streams = list(entropy_numpy.encode(words, FORMATS["float16"]))
        if len(streams[stream]) == 0:
            continue
        streams[stream] = change(streams[stream])
        assert outcome(coder.decode, streams, words.shape, FORMATS["float16"]) is None


@pytest.mark.parametrize("path", sorted(entropy_simd.CODERS))
def test_nothing_outside_the_arrays_is_touched(path: str) -> None:
    """All arrays, also those that kernels work in, lie between pages that no one may touch."""
    skip_unless_it_runs(path)
    done = run_on(path, "-m", "tests.gaac.guarded_kernels", "3", path)
    assert done.stdout == "done\n", f"exit {done.returncode}\n{done.stderr}"


# How well it compresses, and the choices behind that.


def bits_of(exponent: np.ndarray, base: int, shape: int) -> int:
    """What one channel takes, counted value by value."""
    code = {base + int(d): i for i, d in reversed(list(enumerate(DISTANCES[shape])))}
    saved = [int(SAVINGS[shape, code[e]]) for e in exponent.tolist() if e in code]
    return entropy_numpy.PATCH_LENGTH * len(exponent) - sum(saved)


def test_no_other_base_or_shape_is_shorter() -> None:
    generator = np.random.default_rng(2)
    mean = np.array([0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0])
    values = generator.normal(size=(200, 8)) + mean
    exponent = (values.astype(np.float32).view(np.uint32) >> 23 & 255).astype(np.uint8)
    bases, shapes = (part[0] for part in entropy_numpy.choose(exponent[None], 255))
    assert len(set(shapes.tolist())) > 2
    for channel in range(8):
        column = exponent[:, channel]
        taken = bits_of(column, int(bases[channel]), int(shapes[channel]))
        middle = int(np.median(column))
        assert taken == min(
            bits_of(column, base, shape)
            for base in range(middle - 2, middle + 4)
            for shape in range(len(DISTANCES))
        )


def test_streams_are_as_long_as_the_choice_says() -> None:
    """The costs by which shapes are chosen are those of the streams."""
    words = normal((1, 256, 64), "bfloat16")
    base, shapes, second, levels, patches, planes, _ = entropy_numpy.encode(
        words, FORMATS["bfloat16"]
    )
    shape = entropy_numpy.unpack_shapes(shapes.reshape(1, 2, 8), 64)[0]
    exponent = (words[0] >> 7 & 255).astype(np.uint8)
    total = sum(bits_of(exponent[:, c], int(base[c]), int(shape[c])) for c in range(64))
    written = 8 * (len(second) + len(levels) + len(patches) + len(planes))
    assert total <= written < total + 8 * (1 + LEVELS)


@pytest.mark.parametrize(
    ("dtype", "mean", "least"),
    [("bfloat16", 0, 1.5), ("bfloat16", 3, 1.64), ("float16", 0, 1.17), ("float16", 3, 1.25)],
)
def test_ratio(dtype: str, mean: int, least: float) -> None:
    """Not far from the entropy of each channel's exponents: 1.523, 1.716, 1.185 and 1.298."""
    tensor = gaussian((1, 4, 256, 64), dtype) + mean
    blob = gaac.encode(tensor, level=3)
    assert tensor.numel() * 2 / len(blob) > least


def test_byte_tables() -> None:
    for mask, value in np.random.default_rng(0).integers(0, 256, (500, 2)):
        places = [bit for bit in range(8) if mask >> bit & 1]
        deposited = sum((int(value) >> i & 1) << place for i, place in enumerate(places))
        extracted = sum((int(value) >> place & 1) << i for i, place in enumerate(places))
        assert bit_strings._DEPOSIT[mask, value] == deposited
        assert bit_strings._EXTRACT[mask, value] == extracted


def test_a_blob_of_level_3_at_most_takes_its_header_more() -> None:
    noise = np.random.default_rng(0).integers(0, 65536, 4096, dtype=np.uint16)
    blob = gaac.compress(struct.pack("<4096H", *noise.tolist()), level=3)
    assert len(blob) == 8192 + 40
