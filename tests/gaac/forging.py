"""Damaging blobs, with a checksum that is right all the same: where the fields lie, and how."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import xxhash

import gaac

READERS: list[Callable[[bytes], object]] = [gaac.decode, gaac.decompress, gaac.inspect]
TABLE = 64  # where the table of a tensor of four axes starts
VERSION_AT = 4  # the one byte whose damage reads as a later version
LEVEL_AT, DTYPE_AT, FLAGS_AT, NDIM_AT, ROWS_AT, STEPS_AT = 16, 17, 18, 19, 20, 22
ROPE_PAIRS_AT, WIDTH_AT, SHAPE_AT = 26, 28, 32


def reseal(blob: bytes | bytearray) -> bytes:
    """The blob with the right checksum, as a malicious writer would make it."""
    digest = xxhash.xxh3_64_intdigest(bytes(blob[16:]))
    return bytes(blob[:8]) + struct.pack("<Q", digest) + bytes(blob[16:])


def patched(blob: bytes, offset: int, fmt: str, *values: int) -> bytes:
    forged = bytearray(blob)
    struct.pack_into(fmt, forged, offset, *values)
    return reseal(forged)


def assert_corrupt(blob: bytes) -> None:
    for read in READERS:
        with pytest.raises(gaac.CorruptFrame):
            read(blob)
