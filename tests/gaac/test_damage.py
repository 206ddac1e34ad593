"""A blob that is not intact is refused, always with the same error, and at no cost in memory."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from gaac.frame import Coded, pack, read_segments, unseal
from gaac.header import SEGMENT_VALUES, Header
from gaac.levels.base import FORMATS, Hints
from gaac.levels.registry import REGISTRY
from gaac.rope import Rope
from tests.gaac.data import bits, gaussian, random_words, repeating, tensor
from tests.gaac.forging import (
    DTYPE_AT,
    FLAGS_AT,
    LEVEL_AT,
    NDIM_AT,
    READERS,
    ROPE_PAIRS_AT,
    ROWS_AT,
    SHAPE_AT,
    STEPS_AT,
    TABLE,
    VERSION_AT,
    WIDTH_AT,
    assert_corrupt,
    patched,
    reseal,
)

CODED = [level for level in gaac.LEVELS if level]


@cache
def blobs() -> dict[str, bytes]:
    small = gaussian((1, 2, 64, 16), "bfloat16")
    half = gaussian((1, 2, 70, 9), "float16")
    data = bits(gaussian((4100,), "bfloat16")).numpy().tobytes()[:-1]
    made = {
        "stored": gaac.encode(small, level=0),
        "random": gaac.encode(tensor(random_words((1, 1, 8, 8)), "float16"), level=3),
        "empty": gaac.compress(b""),
    }
    for level in CODED:
        made[f"bfloat16-{level}"] = gaac.encode(small, level=level)
        made[f"float16-{level}"] = gaac.encode(half, level=level)
        made[f"bytes-{level}"] = gaac.compress(data, level=level, dtype="bfloat16")
        made[f"repeats-{level}"] = gaac.encode(repeating((1, 2, 100, 16), "bfloat16"), level=level)
    made["rope-5"] = gaac.encode(small, level=5, kind="k", rope=Rope.of([1.0, 0.5, 0.25, 0.1]))
    return made


KINDS = ("bfloat16", "float16", "bytes", "repeats")
NAMES = ["stored", "random", "empty", "rope-5", *(f"{kind}-{n}" for kind in KINDS for n in CODED)]


def test_names() -> None:
    assert sorted(NAMES) == sorted(blobs())
    assert struct.unpack_from("<H", blobs()["rope-5"], ROPE_PAIRS_AT) == (4,)


def assert_refused(damaged: bytes, where: int) -> None:
    """Corrupt; or of another version, where only the byte that says so is damaged."""
    if where != VERSION_AT:
        assert_corrupt(damaged)
        return
    for read in READERS:
        with pytest.raises(gaac.UnsupportedFrame, match="format version"):
            read(damaged)


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_the_header(name: str) -> None:
    blob = blobs()[name]
    for bit in range(8 * min(len(blob), 128)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        assert_refused(bytes(damaged), bit // 8)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_bit(name: str, where: float, bit: int) -> None:
    damaged = bytearray(blobs()[name])
    at = int(where * len(damaged))
    damaged[at] ^= 1 << bit
    assert_refused(bytes(damaged), at)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation(name: str) -> None:
    blob = blobs()[name]
    for length in range(0, len(blob), 1 if len(blob) < 1500 else 7):
        assert_corrupt(blob[:length])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [b"\0", b"junk", bytes(16), bytes(64)])
def test_extension(name: str, extra: bytes) -> None:
    assert_corrupt(blobs()[name] + extra)
    assert_corrupt(reseal(blobs()[name] + extra))


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1),
    header=st.booleans(),
)
def test_hostile_edits_with_a_right_checksum(
    name: str, edits: list[tuple[float, int]], header: bool
) -> None:
    """Nothing but the two errors comes out, or content of the size that the header declares."""
    forged = bytearray(blobs()[name])
    reach = min(len(forged), 128) if header else len(forged)
    for where, value in edits:
        forged[int(where * reach)] = value
    blob = reseal(forged)
    try:
        content = gaac.decompress(blob)
    except (gaac.CorruptFrame, gaac.UnsupportedFrame):
        return
    assert len(content) == gaac.inspect(blob).raw_bytes


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_noise(noise: bytes) -> None:
    assert_corrupt(noise)
    assert_corrupt(b"GAAC" + noise)
    try:
        gaac.decompress(reseal(b"GAAC\x01" + bytes(11) + noise + bytes(32)))
    except (gaac.CorruptFrame, gaac.UnsupportedFrame):
        return


HUGE = [
    (2**40, 2**10, 256, 64),
    (1, 1, 2**50, 64),
    (2**60, 2**60, 2**60, 64),
    (1, 2**45, 1, 64),
    (2**63 - 1, 0, 2**63 - 1, 64),
    (0, 1, 2**55, 16),
    (1, 2, 65, 16),
    (1, 3, 64, 16),
    (1, 2, 200, 16),
]


@pytest.mark.parametrize("shape", HUGE)
@pytest.mark.parametrize(
    "name",
    [
        *("stored", "random", "rope-5", "repeats-1", "repeats-3"),
        *(f"bfloat16-{level}" for level in CODED),
    ],
)
@pytest.mark.parametrize("segment", [(1, 1), (65535, 65535)])
def test_hostile_shapes_take_no_memory(
    name: str, shape: tuple[int, ...], segment: tuple[int, int]
) -> None:
    blob = patched(blobs()[name], SHAPE_AT, "<4Q", *shape)
    blob = patched(blob, STEPS_AT, "<HH", *segment)
    blob = patched(blob, WIDTH_AT, "<I", shape[-1])
    tracemalloc.start()
    try:
        assert_corrupt(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("name", ["bfloat16-1", "bfloat16-3", "repeats-1", "repeats-3"])
@pytest.mark.parametrize("entry", range(1, 6))
@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32 - 1])
def test_hostile_stream_lengths(name: str, entry: int, length: int) -> None:
    if struct.unpack_from("<I", blobs()[name], TABLE + 4 * entry)[0] != length:
        assert_corrupt(patched(blobs()[name], TABLE + 4 * entry, "<I", length))


@pytest.mark.parametrize("level", [4, 6, 7, 9, 255])
def test_unknown_level(level: int) -> None:
    for name in ("stored", "bfloat16-1"):
        with pytest.raises(gaac.UnsupportedFrame, match="update gaac"):
            gaac.decode(patched(blobs()[name], LEVEL_AT, "<B", level))


@pytest.mark.parametrize("level", [2, 3, 4, 9, 255, 256, 65535])
def test_level_of_a_segment(level: int) -> None:
    """Known, and not above the frame's."""
    assert_corrupt(patched(blobs()["bfloat16-1"], TABLE, "<H", level))


def test_a_segment_of_a_higher_level() -> None:
    for level in CODED[1:]:
        assert_corrupt(patched(blobs()[f"bfloat16-{level}"], LEVEL_AT, "<B", 1))


def resealed(blob: bytes, **changes: Any) -> bytes:
    """The blob with other fields in its header, and all else where it then belongs."""
    array = np.frombuffer(blob, np.uint8)
    header = unseal(array)
    pieces, tail = read_segments(header, array, REGISTRY)
    made = pack(replace(header, **changes), [coded for _, coded in pieces], tail)
    assert made is not None
    return made


def test_where_a_rope_hint_may_stand() -> None:
    blob = gaac.encode(gaussian((1, 2, 64, 64), "bfloat16"), level=5, rope=np.ones(32))
    assert resealed(blob) == blob
    turns = np.zeros(33, np.uint16)
    assert_corrupt(resealed(blob, rope=Rope(turns)))
    lower = gaac.encode(gaussian((1, 2, 64, 64), "bfloat16"), level=3)
    assert_corrupt(resealed(lower, rope=Rope(turns[:32])))
    flat = gaac.encode(gaussian((5000,), "bfloat16"), level=5)
    assert_corrupt(resealed(flat, rope=Rope(turns[:32])))


def test_a_frame_of_level_0_is_stored() -> None:
    header = Header(1, "float8_e5m2", 0, (2, 64, 64), 64, 256, 1, 1)
    words = np.zeros((1, 64, 64), np.uint8)
    streams = REGISTRY[1].encode(words, FORMATS["float8_e5m2"], Hints())
    assert streams is not None
    pieces = [Coded(1, 0, streams), Coded(0, 0, [words.reshape(-1)])]
    blob = pack(header, pieces, words[0, 0, :0])
    assert blob is not None
    assert not gaac.decompress(blob).strip(b"\0")
    alone = Header(0, "float8_e5m2", 0, (2, 64, 64), 64, 256, 1, 1)
    forged = bytearray(blob[: alone.size + 16] + bytes(48) + bytes(2 * 64 * 64))
    struct.pack_into("<HHIHHI", forged, alone.size, 0, 0, 64 * 64, 0, 0, 64 * 64)
    start = alone.size + 16 + -(alone.size + 16) % 64
    forged[LEVEL_AT] = 0
    assert_corrupt(reseal(forged[:start] + bytes(2 * 64 * 64)))
    forged[LEVEL_AT] = 1
    assert not gaac.decompress(reseal(forged[:start] + bytes(2 * 64 * 64))).strip(b"\0")


def test_many_small_segments_take_no_memory() -> None:
    """A table of 131,072 segments of one value, for which the blob then has no room."""
    header = Header(1, "bfloat16", 0, (1, 1, 131072, 1), 1, 1, 1, 1)
    table = struct.pack("<HHI", 0, 0, 2) * 131072
    blob = reseal(b"GAAC\x01" + bytes(11) + header.packed + table)
    tracemalloc.start()
    try:
        assert_corrupt(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(blob)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_version(version: int) -> None:
    for read in READERS:
        with pytest.raises(gaac.UnsupportedFrame, match="update gaac"):
            read(patched(blobs()["bfloat16-1"], VERSION_AT, "<B", version))
    damaged = bytearray(patched(blobs()["bfloat16-1"], VERSION_AT, "<B", version))
    damaged[100] ^= 1
    assert_corrupt(bytes(damaged))


def test_unknown_flag_and_dtype() -> None:
    for offset, value in ((DTYPE_AT, 0), (DTYPE_AT, 6), (FLAGS_AT, 16), (FLAGS_AT, 0x80)):
        with pytest.raises(gaac.UnsupportedFrame):
            gaac.decode(patched(blobs()["bfloat16-1"], offset, "<B", value))


@pytest.mark.parametrize("offset", [5, 6, 7])
def test_reserved_bytes(offset: int) -> None:
    assert_corrupt(patched(blobs()["bfloat16-1"], offset, "<B", 1))


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        *((NDIM_AT, "<B", 0), (NDIM_AT, "<B", 9), (NDIM_AT, "<B", 255), (ROWS_AT, "<H", 0)),
        *((STEPS_AT, "<H", 0), (STEPS_AT + 2, "<H", 0), (WIDTH_AT, "<I", 0), (WIDTH_AT, "<I", 32)),
        *((FLAGS_AT, "<B", 1), (FLAGS_AT, "<B", 4), (FLAGS_AT, "<B", 7), (FLAGS_AT, "<B", 8)),
        *((LEVEL_AT, "<B", 0), (DTYPE_AT, "<B", 5), (ROPE_PAIRS_AT, "<H", 1)),
        (ROPE_PAIRS_AT, "<H", 65535),
    ],
)
def test_contradictory_header(offset: int, fmt: str, value: int) -> None:
    assert_corrupt(patched(blobs()["bfloat16-1"], offset, fmt, value))


@pytest.mark.parametrize("shape", [(2**62, 0, 2**62, 64), (2**64 - 1, 1, 0, 64), (2**61, 2, 0, 1)])
def test_hostile_empty_shapes(shape: tuple[int, ...]) -> None:
    blob = gaac.encode(gaussian((1, 3, 0, 64), "bfloat16"))
    assert_corrupt(patched(blob, SHAPE_AT, "<4Q", *shape))


def test_memory_of_an_honest_decode_is_bounded() -> None:
    """By the content, and by what numpy needs for one segment at a time."""
    value = gaussian((1, 16, 4096, 64), "bfloat16")
    for level in (1, 2, 3, 5):
        blob = gaac.encode(value, level=level)
        tracemalloc.start()
        try:
            gaac.decode(blob)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * value.numel() + 24 * SEGMENT_VALUES


def test_a_checksum_covers_every_byte() -> None:
    blob = blobs()["bfloat16-3"]
    array = np.frombuffer(blob, np.uint8)
    for index in range(len(blob)):
        damaged = array.copy()
        damaged[index] ^= 0x10
        error = gaac.UnsupportedFrame if index == VERSION_AT else gaac.CorruptFrame
        with pytest.raises(error):
            gaac.inspect(damaged)
