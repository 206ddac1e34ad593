"""Level 2: the compiled kernels beside their numpy twin and the oracle, on words and streams."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaac.errors import CorruptFrame
from gaac.kernels import cpu, reference_tiered, tiered_decode, tiered_numpy
from gaac.kernels.cpu import PATHS
from gaac.levels.base import FORMATS, Hints
from gaac.levels.packed import ALIGN
from gaac.levels.tiered import Tiered, kernels_of
from tests.gaac.data import SPECIAL, bits, gaussian
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


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "some rows": lambda whole: whole[:, 10:50, :64],
    "every other row": lambda whole: whole[:, ::2, :128],
    "some channels": lambda whole: whole[:, :, 3:67],
    "an odd width": lambda whole: whole[:, :, 3:60],
    "every other channel": lambda whole: whole[:, :, ::2],
    "one row": lambda whole: whole[:, 5:6, 7:100],
    "one channel": lambda whole: whole[:, :, 7:8],
    "blocks and rows exchanged": lambda whole: whole.transpose(1, 0, 2)[:5],
    "backwards": lambda whole: whole[::-1, ::-1],
    "the last axis first": lambda whole: whole.transpose(0, 2, 1),
}


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


@settings(max_examples=300, deadline=None)
@given(
    segment=segments(),
    stream=st.integers(0, LOW),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    longer=st.sampled_from([-64, -32, -16, -2, 0, 2, 16, 32, 64]),
)
def test_hostile_streams(
    path: str,
    segment: tuple[np.ndarray, str],
    stream: int,
    edits: list[tuple[float, int]],
    longer: int,
) -> None:
    """Kernels and twin refuse the same streams, and make the same of the others."""
    words, dtype = segment
    streams = [part.copy() for part in encode("numpy", words, dtype)]
    if stream in (SECOND, THIRD, ESCAPES):
        size = max(len(streams[stream]) + longer, 0)
        streams[stream] = np.resize(np.append(streams[stream], np.uint8(0)), size)
        spare = -sum(lengths(streams[:PLANES])) % ALIGN
        streams[ESCAPES] = np.append(streams[ESCAPES], np.zeros(spare, np.uint8))
    for where, value in edits:
        if len(streams[stream]):
            streams[stream][int(where * len(streams[stream]))] = value
    if not LEVEL.lengths_fit(lengths(streams), words.shape, FORMATS[dtype]):
        return
    mine, twin = np.zeros_like(words), np.zeros_like(words)
    refused = fault(path, streams, mine, dtype)
    assert bool(refused) == bool(fault("numpy", streams, twin, dtype)), refused
    assert refused or np.array_equal(mine, twin)


def set_bit(place: int, number: int) -> Callable[[np.ndarray], None]:
    def change(stream: np.ndarray) -> None:
        stream[place] |= np.uint8(1 << number)

    return change


def set_byte(place: int, value: int) -> Callable[[np.ndarray], None]:
    def change(stream: np.ndarray) -> None:
        stream[place] = value

    return change


def add_to(place: int, value: int) -> Callable[[np.ndarray], None]:
    def change(stream: np.ndarray) -> None:
        stream[place] += np.uint8(value)

    return change


RANGE = "An exponent lies outside the range of its dtype."
SPARE = "The bit planes hold bits behind their last value."
SECOND_CODES = "The second codes are not as many as the codes ask for."
THIRD_CODES = "The third codes are not as many as the codes ask for."
OFFSET = "The offsets are not those of the codes."
ESCAPED = "The escapes are not as many as the codes ask for."
DAMAGES = {
    "base out of range": (BASE, set_byte(0, 32), RANGE),
    "rank out of range": (RANKS, set_byte(8, 32), RANGE),
    "escape out of range": (ESCAPES, set_byte(0, 32), RANGE),
    "spare bit of a code plane": (PLANES, set_bit(43, 7), SPARE),
    "spare bit of an extra plane": (PLANES, set_bit(-1, 7), SPARE),
    "spare bit of second, low": (SECOND, lambda s: set_bit(len(s) // 2 - 1, 7)(s), SECOND_CODES),
    "spare bit of second, high": (SECOND, set_bit(-1, 7), SECOND_CODES),
    "spare bit of third, low": (THIRD, lambda s: set_bit(len(s) // 2 - 1, 7)(s), THIRD_CODES),
    "spare bit of third, high": (THIRD, set_bit(-1, 7), THIRD_CODES),
    "first offset": (OFFSETS, add_to(0, 1), OFFSET),
    "offset into second": (OFFSETS, add_to(12, 1), OFFSET),
    "offset into third": (OFFSETS, add_to(16, 1), OFFSET),
    "offset into escapes": (OFFSETS, add_to(20, 1), OFFSET),
    "high byte of an offset": (OFFSETS, set_byte(-1, 1), OFFSET),
    "something behind the escapes": (ESCAPES, set_byte(-1, 1), ESCAPED),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_fault_is_named(path: str, name: str) -> None:
    stream, change, sentence = DAMAGES[name]
    words = np.random.default_rng(5).integers(0, 65536, (1, 69, 5), dtype=np.uint16)
    streams = [part.copy() for part in encode("numpy", words, "float16")]
    spare = [-int(count) % 8 for count in counts_of(streams, words)]
    assert all(spare), "The damages need spare bits."
    for decoding in (path, "numpy"):
        assert fault(decoding, streams, np.zeros_like(words), "float16") == ""
    change(streams[stream])
    for decoding in (path, "numpy"):
        assert fault(decoding, streams, np.zeros_like(words), "float16") == sentence


def counts_of(streams: Sequence[np.ndarray], words: np.ndarray) -> np.ndarray:
    """Values, and how many of them have a second and a third code."""
    exponent = (words >> 10 & 31).astype(np.uint8)
    distance = exponent - streams[BASE].reshape(len(words), 1, -1) & np.uint8(31)
    rank = (distance[..., None] == streams[RANKS]) @ np.arange(9)
    known = (distance[..., None] == streams[RANKS]).any(axis=-1)
    rank[~known] = 9
    return np.array([words.size, (rank >= 3).sum(), (rank >= 6).sum()])


@pytest.mark.parametrize("change", [-64, -2, 2, 64])
@pytest.mark.parametrize("stream", [SECOND, THIRD])
def test_too_few_or_many_codes(path: str, stream: int, change: int) -> None:
    expect_refusal(path, stream, change)


@pytest.mark.parametrize("change", [-64, 64])
def test_too_few_or_many_escapes(path: str, change: int) -> None:
    expect_refusal(path, ESCAPES, change)


def expect_refusal(path: str, stream: int, change: int) -> None:
    words = normal((1, 256, 64), "bfloat16")
    words[:, ::7] = 0
    streams = encode("numpy", words, "bfloat16")
    streams[stream] = np.resize(streams[stream], len(streams[stream]) + change)
    spare = -sum(lengths(streams[:PLANES])) % ALIGN
    streams[ESCAPES] = np.append(streams[ESCAPES], np.zeros(spare, np.uint8))
    for decoding in (path, "numpy"):
        assert fault(decoding, streams, np.zeros_like(words), "bfloat16")


@of_each_dtype
@pytest.mark.parametrize("stream", range(LOW + 1))
def test_kernels_check_lengths_themselves(path: str, dtype: str, stream: int) -> None:
    """Also those that the frame has checked before."""
    words = normal((2, 70, 5), dtype)
    fitting = encode("numpy", words, dtype)
    out = np.full_like(words, 7)
    for length in {0, len(fitting[stream]) - 1, len(fitting[stream]) + 2 * words.size + 64}:
        streams = list(fitting)
        streams[stream] = np.zeros(length, np.uint8)
        assert not LEVEL.lengths_fit(lengths(streams), words.shape, FORMATS[dtype])
        assert fault(path, streams, out, dtype) == tiered_decode.FAULTS[tiered_decode.LENGTHS]
    assert (out == 7).all()


def test_streams_with_gaps_are_refused(path: str) -> None:
    """The frame's streams have none; a kernel must not read past those of another caller."""
    words = normal((1, 64, 64), "bfloat16")
    streams = encode("numpy", words, "bfloat16")
    apart = np.zeros(2 * len(streams[LOW]), np.uint8)
    apart[::2] = streams[LOW]
    streams[LOW] = apart[::2]
    assert "lengths" in fault(path, streams, np.zeros_like(words), "bfloat16")


@pytest.mark.parametrize("shape", [(0, 64, 300), (2, 0, 300), (2, 64, 0)])
def test_nothing_to_decode_is_refused(path: str, shape: Shape) -> None:
    """The frame never asks for it: a segment has a value at least."""
    streams = [np.zeros(shape[0] * shape[2] if i == BASE else 0, np.uint8) for i in range(LOW + 1)]
    assert "lengths" in fault(path, streams, np.zeros(shape, np.uint16), "bfloat16")


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
