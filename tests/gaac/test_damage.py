"""A blob that is not intact is refused, always with the same error, and at no cost in memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import gaac
from tests.gaac.data import bits, gaussian, random_words, tensor

READERS: list[Callable[[bytes], object]] = [gaac.decode, gaac.decompress, gaac.inspect]
TABLE = 64  # where the table of a tensor of four axes starts


def reseal(blob: bytes | bytearray) -> bytes:
    """The blob with the right checksum, as a malicious writer would make it."""
    digest = xxhash.xxh64(bytes(blob[:24]))
    digest.update(bytes(blob[32:]))
    return bytes(blob[:24]) + struct.pack("<Q", digest.intdigest()) + bytes(blob[32:])


def blobs() -> dict[str, bytes]:
    small = gaussian((1, 2, 64, 16), "bfloat16")
    half = gaussian((1, 2, 70, 9), "float16")
    data = bits(gaussian((4100,), "bfloat16")).numpy().tobytes()[:-1]
    made = {"stored": gaac.encode(small, level=0)}
    for level in (1, 3):
        made[f"bfloat16-{level}"] = gaac.encode(small, level=level)
        made[f"float16-{level}"] = gaac.encode(half, level=level)
        made[f"bytes-{level}"] = gaac.compress(data, level=level, dtype="bfloat16")
    made["random"] = gaac.encode(tensor(random_words((1, 1, 8, 8)), "float16"), level=3)
    made["empty"] = gaac.compress(b"")
    return made


BLOBS = blobs()


def assert_corrupt(blob: bytes) -> None:
    for read in READERS:
        with pytest.raises(gaac.CorruptFrame):
            read(blob)


@pytest.mark.parametrize("name", BLOBS)
def test_every_bit_of_the_header(name: str) -> None:
    blob = BLOBS[name]
    for bit in range(8 * min(len(blob), 128)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        assert_corrupt(bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(BLOBS)),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_bit(name: str, where: float, bit: int) -> None:
    damaged = bytearray(BLOBS[name])
    damaged[int(where * len(damaged))] ^= 1 << bit
    assert_corrupt(bytes(damaged))


@pytest.mark.parametrize("name", BLOBS)
def test_every_truncation(name: str) -> None:
    blob = BLOBS[name]
    for length in range(0, len(blob), 1 if len(blob) < 1500 else 7):
        assert_corrupt(blob[:length])


@pytest.mark.parametrize("name", BLOBS)
@pytest.mark.parametrize("extra", [b"\0", b"junk", bytes(16), bytes(64)])
def test_extension(name: str, extra: bytes) -> None:
    assert_corrupt(BLOBS[name] + extra)
    assert_corrupt(reseal(BLOBS[name] + extra))


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(BLOBS)),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1),
    header=st.booleans(),
)
def test_hostile_edits_with_a_right_checksum(
    name: str, edits: list[tuple[float, int]], header: bool
) -> None:
    """Nothing but the two errors comes out, or content of the size that the header declares."""
    forged = bytearray(BLOBS[name])
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
        gaac.decompress(reseal(b"GAAC\x01" + noise + bytes(32)))
    except (gaac.CorruptFrame, gaac.UnsupportedFrame):
        return


def patched(blob: bytes, offset: int, fmt: str, *values: int) -> bytes:
    forged = bytearray(blob)
    struct.pack_into(fmt, forged, offset, *values)
    return reseal(forged)


HUGE = [
    (2**40, 2**10, 256, 64),
    (1, 1, 2**50, 64),
    (2**60, 2**60, 2**60, 64),
    (1, 2**45, 1, 64),
    (2**63 - 1, 0, 2**63 - 1, 64),
    (0, 1, 2**55, 16),
    (1, 2, 65, 16),
    (1, 3, 64, 16),
]


@pytest.mark.parametrize("shape", HUGE)
@pytest.mark.parametrize("name", ["stored", "bfloat16-1", "bfloat16-3", "random"])
@pytest.mark.parametrize("segment", [(1, 1), (2**32 - 1, 2**32 - 1)])
def test_hostile_shapes_take_no_memory(
    name: str, shape: tuple[int, ...], segment: tuple[int, int]
) -> None:
    blob = patched(BLOBS[name], 32, "<4Q", *shape)
    blob = patched(blob, 12, "<3I", shape[-1], *segment)
    tracemalloc.start()
    try:
        assert_corrupt(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("name", ["bfloat16-1", "bfloat16-3"])
@pytest.mark.parametrize("entry", range(1, 6))
@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32 - 1])
def test_hostile_stream_lengths(name: str, entry: int, length: int) -> None:
    if struct.unpack_from("<I", BLOBS[name], TABLE + 4 * entry)[0] != length:
        assert_corrupt(patched(BLOBS[name], TABLE + 4 * entry, "<I", length))


@pytest.mark.parametrize("level", [2, 4, 5, 9, 255])
def test_unknown_level(level: int) -> None:
    for name in ("stored", "bfloat16-1"):
        with pytest.raises(gaac.UnsupportedFrame, match="update gaac"):
            gaac.decode(patched(BLOBS[name], 5, "<B", level))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_version(version: int) -> None:
    for read in READERS:
        with pytest.raises(gaac.UnsupportedFrame, match="update gaac"):
            read(patched(BLOBS["bfloat16-1"], 4, "<B", version))


def test_unknown_flag_and_dtype() -> None:
    for offset, value in ((6, 0), (6, 3), (7, 8), (7, 0x80)):
        with pytest.raises(gaac.UnsupportedFrame):
            gaac.decode(patched(BLOBS["bfloat16-1"], offset, "<B", value))


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        *((8, "<B", 0), (8, "<B", 9), (9, "<B", 1), (10, "<H", 0), (12, "<I", 0), (12, "<I", 32)),
        *((16, "<I", 0), (20, "<I", 0), (7, "<B", 1), (7, "<B", 4), (7, "<B", 7)),
    ],
)
def test_contradictory_header(offset: int, fmt: str, value: int) -> None:
    assert_corrupt(patched(BLOBS["bfloat16-1"], offset, fmt, value))


def coded(level: int) -> tuple[bytes, dict[str, int]]:
    """A blob of one segment, and where each of its streams starts."""
    value = gaussian((1, 1, 256, 64), "float16")
    value[0, 0, 5] *= 2.0**-10
    blob = gaac.encode(value, level=level)
    position, places = 128, {}
    for name, length in gaac.inspect(blob).streams.items():
        places[name] = position
        position += length
    assert position == len(blob)
    return blob, places


@pytest.mark.parametrize(
    ("level", "stream", "offset", "byte"),
    [
        (1, "base", 0, 26),
        (1, "offsets", 4, 0xFF),
        (1, "escapes", 0, 32),
        (1, "escapes", -1, 1),
        (1, "planes", 0, 0xFF),
        (3, "levels", 0, 0xFF),
        (3, "patches", 0, 32),
        (3, "ranks", 0, 200),
        (3, "planes", 0, 0xFF),
    ],
)
def test_streams_that_contradict_each_other(
    level: int, stream: str, offset: int, byte: int
) -> None:
    blob, places = coded(level)
    where = places[stream] + offset
    if offset < 0:
        where += gaac.inspect(blob).streams[stream]
    forged = bytearray(blob)
    # One byte of bits may well leave the counts as they were: change many.
    count = {"planes": 2048, "levels": 256}.get(stream, 1)
    forged[where : where + count] = bytes([byte]) * count
    assert bytes(forged) != blob
    with pytest.raises(gaac.CorruptFrame):
        gaac.decode(reseal(forged))


def grown(blob: bytes, places: dict[str, int], stream: str) -> bytes:
    """The blob with one zero byte more at the end of a stream, table and checksum made to fit."""
    names = list(places)
    entry = TABLE + 4 * (1 + names.index(stream))
    (length,) = struct.unpack_from("<I", blob, entry)
    end = places[stream] + length
    return patched(blob[:end] + b"\0" + blob[end:], entry, "<I", length + 1)


@pytest.mark.parametrize(
    ("level", "stream"), [(1, "escapes"), (1, "low"), (3, "levels"), (3, "patches"), (3, "base")]
)
def test_streams_that_are_too_long(level: int, stream: str) -> None:
    blob, places = coded(level)
    with pytest.raises(gaac.CorruptFrame):
        gaac.decode(grown(blob, places, stream))


def test_spare_level_bits_must_be_zero() -> None:
    blob, places = coded(3)
    last = places["patches"] - 1
    tops = {bit: patched(blob, last, "<B", blob[last] | bit) for bit in (0x80, 0x40)}
    for forged in tops.values():
        with pytest.raises(gaac.CorruptFrame):
            gaac.decode(forged)


@pytest.mark.parametrize("shape", [(2**62, 0, 2**62, 64), (2**64 - 1, 1, 0, 64), (2**61, 2, 0, 1)])
def test_hostile_empty_shapes(shape: tuple[int, ...]) -> None:
    blob = gaac.encode(gaussian((1, 3, 0, 64), "bfloat16"))
    assert_corrupt(patched(blob, 32, "<4Q", *shape))


def test_padding_must_be_zero() -> None:
    blob, _ = coded(1)
    assert_corrupt(patched(blob, 127, "<B", 1))


def test_spare_plane_bits_must_be_zero() -> None:
    value = gaussian((1, 1, 255, 9), "bfloat16")
    for level in (1, 3):
        blob = gaac.encode(value, level=level)
        last = len(blob) - gaac.inspect(blob).streams["low"] - 1
        with pytest.raises(gaac.CorruptFrame):
            gaac.decode(patched(blob, last, "<B", blob[last] | 0x80))


def test_memory_of_an_honest_decode_is_bounded() -> None:
    value = gaussian((1, 8, 4096, 64), "bfloat16")
    for level in (1, 3):
        blob = gaac.encode(value, level=level)
        tracemalloc.start()
        try:
            gaac.decode(blob)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * value.numel() + 2_000_000


def test_a_checksum_covers_every_byte() -> None:
    blob = BLOBS["bfloat16-3"]
    array = np.frombuffer(blob, np.uint8)
    for index in [*range(24), *range(32, len(blob))]:
        damaged = array.copy()
        damaged[index] ^= 0x10
        with pytest.raises(gaac.CorruptFrame):
            gaac.inspect(damaged)
