"""Level 5: its fixed tables, and the compiled kernels beside their twin and the oracle."""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from gaac.kernels import context_numpy, context_simd, context_tables, reference_context
from gaac.kernels.context_model import fit, model, quantise, rotation
from gaac.levels import context
from gaac.levels.base import FORMATS, Hints
from gaac.levels.context import STILL, Context
from gaac.rope import Rope
from tests.gaac.data import DTYPES, SPECIAL, bits, gaussian, tensor

LEVEL = Context()
CODES = {"float16": 1, "bfloat16": 2}
CODERS = (context_numpy, context_simd)
FREQUENCIES = 10000.0 ** (-np.arange(16) / 16)
WIDTH = 32


@pytest.fixture(params=CODERS, ids=["numpy", "compiled"])
def coder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make level 5 code by one of its two modules."""
    monkeypatch.setattr(context, "_coder", lambda: request.param)
    chosen: ModuleType = request.param
    return chosen


def keys(tokens: int = 256, heads: int = 2, *, interleaved: bool = False) -> np.ndarray:
    """float32 (heads, tokens, 32): noise about a mean that turns with the position."""
    rng = np.random.default_rng(5)
    mean = rng.normal(size=(heads, 1, WIDTH)) * 4
    angle = (np.arange(tokens)[:, None] + 777) * FREQUENCIES
    a, b = (mean[..., ::2], mean[..., 1::2]) if interleaved else np.split(mean, 2, axis=2)
    turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
    order = np.stack(turned, axis=3) if interleaved else np.concatenate(turned, axis=2)
    noise = rng.normal(size=(heads, tokens, WIDTH)) * np.exp2(rng.normal(size=WIDTH))
    return (order.reshape(heads, tokens, WIDTH) + noise).astype(np.float32)


def words_of(values: np.ndarray, dtype: str) -> np.ndarray:
    import torch

    return bits(torch.from_numpy(values).to(DTYPES[dtype])).numpy().view(np.uint16)


def test_every_context_has_every_symbol() -> None:
    table = context_tables.cumulative().astype(np.int64)
    frequency = np.diff(table, axis=1).reshape(-1, 2, 16, 8)
    assert (table[:, -1] == 65536).all()
    assert (frequency[:, :, 1:] > 0).all()
    assert (frequency[:, 0, 0, 0] == context_tables.ESCAPE_FREQUENCY).all()
    assert frequency[:, :, 0].sum() == context_tables.ESCAPE_FREQUENCY * len(table)


def test_the_distribution_is_students_t() -> None:
    """Against the density, (1 + t^2 / 8)^(-9/2) up to a factor, summed by Simpson's rule."""
    step = 1 / 64
    scale = math.sqrt(4 / 3)

    def density(x: float) -> float:
        return scale * (1 + (x * scale) ** 2 / 8) ** -4.5 * 35 / (32 * math.sqrt(8))

    below, worst = 0.5, 0.0
    for k in range(512):
        x = k * step
        above, under = (context_tables.distribution_q30(int(y * 65536)) for y in (x, -x))
        worst = max(worst, abs(above / 2**30 - below), abs(under / 2**30 - (1 - below)))
        below += step / 6 * (density(x) + 4 * density(x + step / 2) + density(x + step))
    assert worst < 1e-5


def test_no_rounding_is_close() -> None:
    """What the specification calls the nearest integer is so in any sound arithmetic."""
    exact = [16384 * math.sin(math.tau * k / 4096) for k in range(4096)]
    exact += [65536 * 2 ** ((2 * f + 1) / 16) for f in range(8)]
    exact += [65536 * 2 ** ((2 * z - 15) / 4) for z in range(1, 20)]
    assert min(abs(value % 1 - 0.5) for value in exact) > 1e-6


@st.composite
def segments(draw: st.DrawFn) -> tuple[np.ndarray, Rope | None]:
    """Words (blocks, rows, width) of all kinds, and a hint, which need not fit them."""
    blocks, rows = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    width = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 80])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (blocks, rows, width)
    kind = draw(st.sampled_from(["normal", "large", "random", "special", "mixed", "constant"]))
    scale = np.exp2(rng.integers(-20, 20, width)) * (2.0**100 if kind == "large" else 1)
    normal = (rng.normal(size=shape) + rng.normal(size=width) * 3) * scale
    words = (normal.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind == "random":
        words = rng.integers(0, 65536, shape, dtype=np.uint16)
    elif kind == "special":
        words = rng.choice(np.array(SPECIAL, np.uint16), shape)
    elif kind == "mixed":
        words[rng.random(shape) < 0.1] = rng.choice(SPECIAL)
    elif kind == "constant":
        words[:] = rng.integers(0, 65536)
    pairs = draw(st.integers(0, width // 2))
    if not pairs:
        return words, None
    return words, Rope(rng.integers(0, 65536, pairs, dtype=np.uint16), draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(segment=segments(), dtype=st.sampled_from(sorted(DTYPES)))
def test_kernels_twin_and_oracle_agree(segment: tuple[np.ndarray, Rope | None], dtype: str) -> None:
    words, rope = segment
    fmt = FORMATS[dtype]
    turn = rotation(*words.shape[1:], rope)
    sums = [coder.sums(words, fmt, turn) for coder in CODERS]
    assert sums[0].tobytes() == sums[1].tobytes()
    tops, codes, means = quantise(fit(sums[0], words.shape[1], turn, fmt), turn, fmt)
    known = model(tops, codes, means, turn.partner)
    slow, fast = (coder.encode(words, fmt, known, turn) for coder in CODERS)
    for a, b in zip(slow, fast, strict=True):
        np.testing.assert_array_equal(a, b)
    low_mask = (1 << context.low_bits(fmt)) - 1
    for coder in CODERS:
        out = np.zeros_like(words)
        coder.decode(fast, out, fmt, known, turn)
        escaped = out & low_mask != 0
        np.testing.assert_array_equal(out[escaped], words[escaped])
        np.testing.assert_array_equal(out | low_mask, words | low_mask)
    streams = [part.tobytes() for part in (*fast, tops, codes, means)]
    streams.append(context.pack_low(words, fmt, context_numpy).tobytes())
    turns = () if rope is None else tuple(rope.turns.tolist())
    interleaved = rope is not None and rope.interleaved
    read = reference_context.decode(streams, CODES[dtype], words.shape, turns, interleaved)
    assert list(read) == words.reshape(-1).tolist()


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_low_bits(count: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 65536, count, dtype=np.uint16)
    packed = [coder.pack_low(words) for coder in CODERS]
    np.testing.assert_array_equal(*packed)
    for coder in CODERS:
        out = (words & 0xFFF0) | 9
        coder.add_low(packed[0], out)
        np.testing.assert_array_equal(out, words)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_rope_hint_pays_for_keys_that_turn(
    dtype: str, interleaved: bool, coder: ModuleType
) -> None:
    value = tensor(words_of(keys(interleaved=interleaved), dtype), dtype)
    right, wrong = (
        Rope.of(FREQUENCIES, interleaved=flag) for flag in (interleaved, not interleaved)
    )
    sizes = {}
    for name, rope in (("right", right), ("wrong", wrong), ("none", None)):
        blob = gaac.encode(value, level=5, kind="k", rope=rope)
        assert (bits(gaac.decode(blob)) == bits(value)).all()
        sizes[name] = len(blob)
    assert sizes["right"] < 0.97 * sizes["none"]
    # A hint that does not fit costs its own bytes and no more.
    assert sizes["none"] <= sizes["wrong"] <= sizes["none"] + 2 * len(FREQUENCIES) + 64


def test_the_hint_is_not_used_for_values() -> None:
    value = gaussian((1, 2, 256, 32), "bfloat16")
    rope = Rope.of(FREQUENCIES)
    assert gaac.encode(value, level=5, kind="v", rope=rope) == gaac.encode(value, level=5, kind="v")


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1.51), ("float16", 1.175)])
def test_ratio_on_normal_values(dtype: str, least: float) -> None:
    value = gaussian((1, 8, 256, 64), dtype)
    assert 2 * value.numel() / len(gaac.encode(value, level=5)) > least


@pytest.mark.parametrize("word", [0, 0x8000, 0x7FC0, 0x3F80])
def test_what_no_scale_describes_is_left_to_level_3(word: int) -> None:
    """Rows that differ in one channel alone, so that they do not count as repeats."""
    words = np.full((1, 256, 64), word, np.uint16)
    words[0, :, 7] = np.arange(256)
    value = tensor(words, "bfloat16")
    assert len(gaac.encode(value, level=5)) <= 1.05 * len(gaac.encode(value, level=3))


def coded(dtype: str = "bfloat16") -> tuple[list[np.ndarray], np.ndarray]:
    """The streams of a segment with escapes, each in an array of its own, and its words."""
    words = words_of(keys(64), dtype)
    words[0, 5, :3] = SPECIAL[:3]
    streams = LEVEL.encode(words, FORMATS[dtype], Hints(Rope.of(FREQUENCIES)))
    assert streams is not None
    return [stream.copy() for stream in streams], words


def decoded(
    streams: list[np.ndarray], shape: tuple[int, ...], dtype: str = "bfloat16"
) -> np.ndarray:
    out = np.zeros(shape, np.uint16)
    LEVEL.decode(streams, out, FORMATS[dtype], Hints(Rope.of(FREQUENCIES)))
    return out


def test_an_escape_has_no_bits_of_another_stream(coder: ModuleType) -> None:
    streams, words = coded()
    index = LEVEL.streams.index("escapes")
    assert len(streams[index])
    streams[index][0] |= 1
    with pytest.raises(gaac.CorruptFrame, match="escape"):
        decoded(streams, words.shape)


def test_a_rope_must_be_what_a_frame_can_hold() -> None:
    for turns in (np.zeros(0, np.uint16), np.zeros((2, 2), np.uint16), np.zeros(3), [1, 2]):
        with pytest.raises(gaac.GaacError, match="uint16"):
            Rope(turns)  # type: ignore[arg-type]
    for bad in ("x", [math.nan], [[1.0]], []):
        with pytest.raises(gaac.GaacError, match="inverse frequencies"):
            Rope.of(bad)
    value = gaussian((1, 2, 64, 32), "bfloat16")
    with pytest.raises(gaac.GaacError, match="too many"):
        gaac.encode(value, level=5, rope=[1.0] * 17)
    turns = np.arange(4, dtype=np.uint16)
    rope = Rope(turns)
    turns[:] = 9
    assert rope.turns.tolist() == [0, 1, 2, 3]


def cut(stream: np.ndarray, item_bytes: int) -> np.ndarray:
    return stream[:-item_bytes]


def extended(stream: np.ndarray, item_bytes: int) -> np.ndarray:
    return np.append(stream, np.zeros(item_bytes, np.uint8))


@pytest.mark.parametrize("change", [cut, extended])
@pytest.mark.parametrize("name", ["codes", "escapes"])
def test_streams_of_another_length(name: str, change: object, coder: ModuleType) -> None:
    streams, words = coded()
    index = LEVEL.streams.index(name)
    assert callable(change)
    streams[index] = change(streams[index], 4 if name == "codes" else 2)
    with pytest.raises(gaac.CorruptFrame):
        decoded(streams, words.shape)
    streams[index] = streams[index][:0]
    with pytest.raises(gaac.CorruptFrame):
        decoded(streams, words.shape)


def test_a_state_that_differs(coder: ModuleType) -> None:
    for byte in (0, 9, 63):
        streams, words = coded()
        streams[0][byte] ^= 64
        with pytest.raises(gaac.CorruptFrame):
            decoded(streams, words.shape)


def test_scales_out_of_range(coder: ModuleType) -> None:
    scales, tops = LEVEL.streams.index("scales"), LEVEL.streams.index("tops")
    for dtype, limit in (("bfloat16", 2047), ("float16", 255)):
        streams, words = coded(dtype)
        for top in (0, limit + 1, STILL, 65535):
            forged = list(streams)
            forged[tops] = np.full(len(words), top, "<u2").view(np.uint8)
            forged[scales] = np.full_like(streams[scales], 1)
            with pytest.raises(gaac.CorruptFrame):
                decoded(forged, words.shape, dtype)
        # One block that turns beside one that does not.
        forged = list(streams)
        forged[tops] = streams[tops].copy()
        forged[tops][1] |= 0x80
        with pytest.raises(gaac.CorruptFrame):
            decoded(forged, words.shape, dtype)


def test_an_exponent_out_of_range(coder: ModuleType) -> None:
    """Small scales put the lowest symbols below exponent 0; the streams are a real encoder's."""
    words = words_of(keys(32), "float16") & 0x03FF
    words[:, ::2] |= 0x0400
    fmt = FORMATS["float16"]
    turn = rotation(32, WIDTH, None)
    tops = np.full(len(words), 60, "<u2")
    codes, means = np.zeros((2, WIDTH), np.uint8), np.zeros((2, WIDTH), np.int8)
    lower = np.full(len(words), 20, "<u2")
    parts = coder.encode(words, fmt, model(tops, codes, means, turn.partner), turn)
    out = np.zeros_like(words)
    with pytest.raises(gaac.CorruptFrame):
        coder.decode(parts, out, fmt, model(lower, codes, means, turn.partner), turn)


def test_half_a_byte_behind_the_last_value() -> None:
    words = words_of(keys(65, heads=1), "bfloat16")[:, :, :31]
    streams = LEVEL.encode(words, FORMATS["bfloat16"], Hints())
    assert streams is not None
    forged = [stream.copy() for stream in streams]
    forged[-1][-1] |= 0x80
    out = np.zeros(words.shape, np.uint16)
    with pytest.raises(gaac.CorruptFrame, match="behind their last value"):
        LEVEL.decode(forged, out, FORMATS["bfloat16"], Hints())


GUARDED = """
import numpy as np
from gaac import CorruptFrame
from tests.gaac import guarded
from tests.gaac.test_kernels_context import coded, decoded

def placed(streams, at_end):
    return [guarded.copies(stream)[not at_end] for stream in streams]

for dtype in ("bfloat16", "float16"):
    streams, words = coded(dtype)
    rng = np.random.default_rng(0)
    for at_end in (True, False):
        assert (decoded(placed(streams, at_end), words.shape, dtype) == words).all()
        for trial in range(60):
            forged = [stream.copy() for stream in streams]
            for _ in range(3):
                stream = forged[rng.integers(len(forged))]
                if stream.size:
                    stream[rng.integers(stream.size)] ^= 1 << rng.integers(8)
            if trial % 3 == 0:
                forged[1] = forged[1][: 4 * rng.integers(forged[1].size // 4)]
                forged[2] = forged[2][: 2 * rng.integers(forged[2].size // 2)]
            try:
                decoded(placed(forged, at_end), words.shape, dtype)
            except CorruptFrame:
                pass
print("done")
"""


def test_nothing_is_read_outside_a_stream() -> None:
    """Each stream begins or ends at a page that no one may read."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
