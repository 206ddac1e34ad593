"""Streams that contradict each other, in a blob whose checksum is right, are refused."""

from __future__ import annotations

import struct

import pytest

import gaac
from tests.gaac.data import gaussian
from tests.gaac.forging import TABLE, assert_corrupt, patched, reseal


def coded(level: int) -> tuple[bytes, dict[str, int]]:
    """A blob of one segment, and where each of its streams starts."""
    value = gaussian((1, 1, 256, 64), "float16")
    value[0, 0, 5] *= 2.0**-10
    blob = gaac.encode(value, level=level)
    table = 4 + 4 * len(gaac.inspect(blob).streams)
    position, places = TABLE + table + -(TABLE + table) % 64, {}
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
        (2, "base", 0, 32),
        (2, "ranks", 0, 32),
        (2, "offsets", 13, 0xFF),
        (2, "second", 0, 0xFF),
        (2, "third", 0, 0xFF),
        (2, "escapes", 0, 32),
        (2, "escapes", -1, 1),
        (2, "planes", 0, 0xFF),
        (3, "second", 0, 0xFF),
        (3, "levels", 0, 0xFF),
        (3, "patches", 0, 32),
        (3, "planes", 0, 0xFF),
        (5, "tops", 0, 0xFF),
        (5, "states", 0, 0xFF),
        (5, "codes", 0, 0xFF),
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
    count = {
        "planes": 2048,
        "levels": 256,
        "second": 256,
        "third": 64,
        "tops": 2,
        "codes": 256,
    }.get(stream, 1)
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
    ("level", "stream"),
    [
        *((1, "escapes"), (1, "low"), (2, "second"), (2, "ranks"), (2, "low")),
        *((3, "levels"), (3, "patches"), (3, "base"), (5, "codes"), (5, "escapes")),
    ],
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


def test_padding_must_be_zero() -> None:
    blob, _ = coded(1)
    assert_corrupt(patched(blob, 127, "<B", 1))


def test_spare_plane_bits_must_be_zero() -> None:
    value = gaussian((1, 1, 255, 9), "bfloat16")
    for level in (1, 2, 3):
        blob = gaac.encode(value, level=level)
        last = len(blob) - gaac.inspect(blob).streams["low"] - 1
        with pytest.raises(gaac.CorruptFrame):
            gaac.decode(patched(blob, last, "<B", blob[last] | 0x80))
