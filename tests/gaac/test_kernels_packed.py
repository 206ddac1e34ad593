"""Level 1's compiled kernels give what its numpy twin gives, and touch no memory but their own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaac.errors import CorruptFrame
from gaac.kernels import cpu, packed_numpy, packed_simd
from gaac.levels.base import FORMATS, Hints
from gaac.levels.packed import ESCAPE, Packed, kernels_of
from tests.gaac.data import SPECIAL

PATHS = [path for path in cpu.able_paths() if path != "numpy"]
DTYPES = ("bfloat16", "float16")
ROOT = Path(__file__).parents[2]

on_each_path = pytest.mark.parametrize("path", PATHS)
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Words of normal values with a scale for each channel: few escapes, as in KV."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.exp2(rng.integers(-3, 4, shape[-1]))
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@st.composite
def segments(draw: st.DrawFn, dtype: str) -> np.ndarray:
    """Words of any shape and pattern; "few" makes ties and full counters between the bases."""
    width = draw(st.one_of(st.integers(1, 200), st.sampled_from([64, 80, 96, 128, 192, 256, 511])))
    most_rows = max(min(256, 20_000 // width), 1)
    rows = draw(st.one_of(st.integers(1, most_rows), st.just(most_rows)))
    blocks = draw(st.integers(1, 3))
    shape = (blocks, rows, width)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pattern = draw(st.sampled_from(["normal", "random", "special", "few", "holes"]))
    if pattern == "random":
        return rng.integers(0, 65536, shape, dtype=np.uint16)
    if pattern == "special":
        return rng.choice(np.array(SPECIAL, np.uint16), shape)
    if pattern == "few":
        highest = draw(st.integers(0, FORMATS[dtype].exponent_max))
        below = np.array(draw(st.lists(st.integers(0, 12), min_size=1, max_size=4)))
        exponents = np.maximum(highest - rng.choice(below, shape), 0)
        return (exponents << FORMATS[dtype].exponent_shift).astype(np.uint16)
    words = normal(shape, dtype, draw(st.integers(0, 2**32 - 1)))
    if pattern == "holes":
        words[rng.random(shape) < draw(st.floats(0, 1))] = 0
    return words


def encode_with(path: str, words: np.ndarray, dtype: str) -> list[bytes]:
    streams = kernels_of(path, dtype).encode(words, FORMATS[dtype])
    return [np.asarray(stream).tobytes() for stream in streams]


def decode_with(
    path: str, streams: Sequence[np.ndarray], shape: tuple[int, ...], dtype: str
) -> bytes | str:
    """The words, or the sentence of the error."""
    out = np.zeros(shape, np.uint16)
    try:
        kernels_of(path, dtype).decode(streams, out, FORMATS[dtype])
    except CorruptFrame as error:
        return str(error)
    return out.tobytes()


def arrays(streams: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(stream, np.uint8) for stream in streams]


@on_each_path
@of_each_dtype
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equal_to_numpy(path: str, dtype: str, data: st.DataObject) -> None:
    words = data.draw(segments(dtype))
    streams = encode_with("numpy", words, dtype)
    assert encode_with(path, words, dtype) == streams
    assert decode_with(path, arrays(streams), words.shape, dtype) == words.tobytes()
    assert decode_with("numpy", arrays(streams), words.shape, dtype) == words.tobytes()


@on_each_path
@of_each_dtype
@pytest.mark.parametrize("width", [1, 8, 63, 64, 65, 80, 96, 128, 192, 256])
def test_full_blocks_of_any_width(path: str, dtype: str, width: int) -> None:
    words = normal((2, 256, width), dtype)
    streams = encode_with("numpy", words, dtype)
    assert encode_with(path, words, dtype) == streams
    assert decode_with(path, arrays(streams), words.shape, dtype) == words.tobytes()


@on_each_path
@pytest.mark.parametrize("gap", [1, 6, 7, 8, 9, 10])
def test_counts_at_their_limit(path: str, gap: int) -> None:
    """Channel c has c values below the rest of its 256: escapes under one base or another."""
    words = np.full((1, 256, 257), 100 << 7, np.uint16)
    words[0][np.arange(256)[:, None] < np.arange(257)] = (100 - gap) << 7
    assert encode_with(path, words, "bfloat16") == encode_with("numpy", words, "bfloat16")
    columns = [np.repeat(words[:, :, channel, None], 64, axis=2) for channel in range(0, 257, 5)]
    for column in columns:
        assert encode_with(path, column, "bfloat16") == encode_with("numpy", column, "bfloat16")


def test_more_rows_than_counters_hold() -> None:
    """Counts of numpy are exact for any number of rows, and blocks of more go by numpy."""
    words = np.full((1, 16384, 1), 100 << 7, np.uint16)
    words[0, : 2 * 8192 : 2] = 93 << 7  # 8,192 values escape unless the base is lower by one
    words[0, -1] = 100 << 7
    assert packed_numpy.best_base((words >> 7).astype(np.uint8)).tolist() == [[94]]
    words[0, 1 : 2 * 4096 : 2] = 93 << 7
    assert packed_numpy.best_base((words >> 7).astype(np.uint8)).tolist() == [[93]]
    for path in PATHS:
        assert encode_with(path, words, "bfloat16") == encode_with("numpy", words, "bfloat16")


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tokens of a longer tensor": lambda big: big[:, 5:69],
    "rows apart": lambda big: big[:, ::2],
    "heads behind tokens": lambda big: big.transpose(1, 0, 2),
    "rows backwards": lambda big: big[:, ::-1],
    "blocks backwards": lambda big: big[::-1],
    "part of the channels": lambda big: big[:, :, : big.shape[2] // 2],
    "every other channel": lambda big: big[:, :, ::2],
    "channels backwards": lambda big: big[:, :, ::-1],
    "turned": lambda big: big.transpose(0, 2, 1),
    "one row": lambda big: big[:, 3:4],
    "one channel": lambda big: big[:, :, 3:4],
}


@on_each_path
@of_each_dtype
@pytest.mark.parametrize("width", [64, 128, 80, 24])
@pytest.mark.parametrize("view", VIEWS)
def test_strides(path: str, dtype: str, width: int, view: str) -> None:
    big = normal((3, 130, width), dtype)
    words = VIEWS[view](big)
    streams = encode_with("numpy", words.copy(), dtype)
    assert encode_with(path, words, dtype) == streams
    target = np.zeros_like(big)
    expected = target.copy()
    VIEWS[view](expected)[...] = words
    kernels_of(path, dtype).decode(arrays(streams), VIEWS[view](target), FORMATS[dtype])
    assert np.array_equal(target, expected)


@on_each_path
def test_streams_with_gaps_are_refused(path: str) -> None:
    """The frame's streams have none; a kernel must not read past those of another caller."""
    streams = arrays(encode_with("numpy", normal((1, 64, 64), "bfloat16"), "bfloat16"))
    spread = np.zeros(2 * streams[4].size, np.uint8)
    spread[::2] = streams[4]
    out = np.zeros((1, 64, 64), np.uint16)
    with pytest.raises(CorruptFrame, match="lengths"):
        kernels_of(path, "bfloat16").decode([*streams[:4], spread[::2]], out, FORMATS["bfloat16"])


@on_each_path
@of_each_dtype
@pytest.mark.parametrize("stream", range(5))
def test_wrong_lengths_are_refused(path: str, dtype: str, stream: int) -> None:
    words = normal((1, 70, 9), dtype)
    streams = arrays(encode_with("numpy", words, dtype))
    for length in (0, streams[stream].size - 1, streams[stream].size + 64 * 70 * 9):
        wrong = list(streams)
        wrong[stream] = np.zeros(length, np.uint8)
        out = np.zeros(words.shape, np.uint16)
        with pytest.raises(CorruptFrame):
            kernels_of(path, dtype).decode(wrong, out, FORMATS[dtype])
        assert not out.any() or stream == 2


@on_each_path
@of_each_dtype
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_streams_fare_as_with_numpy(path: str, dtype: str, data: st.DataObject) -> None:
    words = data.draw(segments(dtype))
    streams = [stream.copy() for stream in arrays(encode_with("numpy", words, dtype))]
    for _ in range(data.draw(st.integers(1, 3))):
        stream = streams[data.draw(st.sampled_from([0, 1, 2, 3, 3, 4]))]
        if stream.size:
            stream[data.draw(st.integers(0, stream.size - 1))] ^= data.draw(st.integers(1, 255))
    change = data.draw(st.sampled_from([-64, 0, 0, 64]))
    if change > 0:
        streams[2] = np.concatenate([streams[2], np.zeros(change, np.uint8)])
    elif change < 0:
        streams[2] = streams[2][: max(streams[2].size + change, 0)]
    lengths = [stream.size for stream in streams]
    if not Packed().lengths_fit(lengths, words.shape, FORMATS[dtype]):
        return
    shape = words.shape
    expected = decode_with("numpy", streams, shape, dtype)
    assert decode_with(path, streams, shape, dtype) == expected


@on_each_path
def test_each_fault_is_named(path: str) -> None:
    words = normal((1, 64, 7), "float16")
    streams = encode_with("numpy", words, "float16")

    def message(stream: int, at: int, byte: int) -> bytes | str:
        damaged = [bytearray(part) for part in streams]
        damaged[stream][at] = byte
        return decode_with(path, arrays([bytes(part) for part in damaged]), words.shape, "float16")

    assert message(0, 3, 31 - ESCAPE + 2) == "An exponent lies outside the range of its dtype."
    assert message(1, 3, 1) == "The escapes are not as many as the codes ask for."
    assert message(2, -1, 1) == "The escapes are not as many as the codes ask for."
    odd = normal((1, 1, 7), "float16")
    streams, words = encode_with("numpy", odd, "float16"), odd
    assert message(3, 5, 0x80) == "The bit planes hold bits behind their last value."


@on_each_path
def test_an_escape_out_of_range(path: str) -> None:
    words = np.full((1, 64, 64), 20 << 10, np.uint16)
    words[0, 5, 7] = 0
    streams = arrays(encode_with("numpy", words, "float16"))
    damaged = streams[2].copy()
    for byte in (31, 32, 255):
        damaged[0] = byte
        result = decode_with(path, [*streams[:2], damaged, *streams[3:]], words.shape, "float16")
        assert isinstance(result, str) == (byte > 31)


@on_each_path
@of_each_dtype
@pytest.mark.parametrize("shape", [(0, 64, 300), (2, 0, 300), (2, 64, 0)])
def test_nothing_to_decode_is_refused(path: str, dtype: str, shape: tuple[int, int, int]) -> None:
    """The frame never asks for it: a segment has a value at least."""
    streams = [np.zeros(shape[0] * shape[2] if i == 0 else 0, np.uint8) for i in range(5)]
    with pytest.raises(CorruptFrame, match="lengths"):
        kernels_of(path, dtype).decode(streams, np.zeros(shape, np.uint16), FORMATS[dtype])


@on_each_path
def test_other_threads_run_meanwhile(path: str) -> None:
    """With no other release of the GIL in sight, a second thread runs while a kernel does."""
    words = normal((8, 256, 512), "bfloat16")
    packer, fmt = packed_simd.KERNELS[path, "bfloat16"], FORMATS["bfloat16"]
    packer.encode(words[:1], fmt)
    done, ticks = threading.Event(), [0]

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        ticker.start()
        for _ in range(1000):
            before = ticks[0]
            packer.encode(words, fmt)
            if ticks[0] > before:
                return
    finally:
        done.set()
        sys.setswitchinterval(interval)
        ticker.join()
    pytest.fail("No other thread ran while a kernel did.")


def test_the_level_takes_the_path_of_the_cpu() -> None:
    words, hints = normal((1, 64, 64), "bfloat16"), Hints()
    fmt = FORMATS["bfloat16"]
    assert kernels_of(cpu.path(), "bfloat16") is not packed_numpy or cpu.path() == "numpy"
    streams = [bytes(stream) for stream in Packed().encode(words, fmt, hints)]
    assert streams == encode_with("numpy", words, "bfloat16")
    assert kernels_of(cpu.path(), "float8_e5m2") is packed_numpy


@on_each_path
def test_memory_outside_the_arrays_is_not_touched(path: str) -> None:
    """In a process of its own: a touch of a guard page ends it."""
    command = [sys.executable, "-m", "tests.gaac.guarded_kernels", "1", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "done"
