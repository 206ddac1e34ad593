"""Level 2: streams that contradict each other are refused, with what is wrong, on every path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaac.kernels import tiered_decode
from gaac.kernels.cpu import PATHS
from gaac.levels.base import FORMATS
from gaac.levels.packed import ALIGN
from tests.gaac.paths import skip_unless_it_runs
from tests.gaac.test_kernels_tiered import (
    BASE,
    ESCAPES,
    LEVEL,
    LOW,
    OFFSETS,
    PLANES,
    RANKS,
    SECOND,
    THIRD,
    Shape,
    encode,
    fault,
    lengths,
    normal,
    of_each_dtype,
    segments,
)


@pytest.fixture(params=[path for path in PATHS if path != "numpy"], scope="module")
def path(request: pytest.FixtureRequest) -> str:
    skip_unless_it_runs(request.param)
    return str(request.param)


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
