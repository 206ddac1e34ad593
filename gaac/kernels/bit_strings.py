"""Strings of bits in memory, for kernels: read, write, and the moves between a string and a mask.

A string has its first bit in the least significant place of its first byte. *Depositing* puts the
first bits of a string at the places of a mask's bits, *extracting* undoes that. x86 has both as
instructions (`vector.pdep`, `vector.pext`); here they are for any CPU, by tables of bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gaac.kernels import vector
from gaac.kernels.cpu import inlined


def _byte_tables() -> tuple[np.ndarray, np.ndarray]:
    """Deposit and extract for bytes: uint8, both [mask, value]."""
    bits = np.arange(8)
    mask = (np.arange(256)[:, None] >> bits) & 1
    place = np.cumsum(mask, axis=1) - mask  # how many bits of the mask lie below each
    value = np.arange(256)[None, :, None]
    deposit = (((value >> place[:, None]) & mask[:, None]) << bits).sum(axis=2)
    extract = (((value >> bits) & mask[:, None]) << place[:, None]).sum(axis=2)
    return deposit.astype(np.uint8), extract.astype(np.uint8)


_DEPOSIT, _EXTRACT = _byte_tables()


@inlined
def deposit_portable(value: Any, where: Any) -> Any:
    """As vector.pdep."""
    result = vector.bits(0)
    if where == vector.bits(0):
        return result
    for shift in range(0, 64, 8):
        part = (where >> shift) & vector.bits(255)
        result |= vector.bits(_DEPOSIT[part, value & vector.bits(255)]) << shift
        value >>= vector.popcount(part)
    return result


@inlined
def extract_portable(value: Any, where: Any) -> Any:
    """As vector.pext."""
    result = vector.bits(0)
    if where == vector.bits(0):
        return result
    position = 0
    for shift in range(0, 64, 8):
        part = (where >> shift) & vector.bits(255)
        byte = (value >> shift) & vector.bits(255)
        result |= vector.bits(_EXTRACT[part, byte]) << position
        # 64 only behind the last byte.
        position += vector.popcount(part)
    return result


@inlined
def peek(start: Any, position: Any, count: Any) -> Any:
    """At least `count` bits, 0 to 64, from bit `position` of the string at `start` on.

    What the mask has above them is any bits. Reads nine bytes from the bit's own on.
    """
    place = start + (position >> 3)
    shift = position & 7
    bits = vector.load_u64(place) >> shift
    if count > 57:
        bits |= (vector.bits(vector.load_u8(place + 8)) << 1) << (63 - shift)
    return bits


@inlined
def start(at: Any) -> Any:
    """An empty string that begins at an address.

    A string being written is (at, fill, kept): where its next eight bytes go, how many bits, less
    than 64, wait for that, and those bits.
    """
    return at, 0, vector.bits(0)


@inlined
def push(string: Any, bits: Any, count: Any) -> Any:
    """The string with `count` bits more, 0 to 64; those above must be zero.

    Eight bytes are written where the string ends, whatever the count.
    """
    at, fill, kept = string
    word = kept | (bits << fill)
    vector.store_u64(at, word)
    total = fill + count
    rest = (bits >> 1) >> (63 - fill)
    return at + ((total >> 6) << 3), total & 63, rest if total > 63 else word


@inlined
def finish(string: Any) -> Any:
    """Write the bits that wait, zeros behind them; returns the address behind the last byte."""
    at, fill, kept = string
    vector.store_u64(at, kept)
    return at + ((fill + 7) >> 3)


@inlined
def tail_clean(start: Any, count: Any) -> Any:
    """Whether the bits of the last byte behind a string of `count` are zero."""
    spare = count & 7
    return spare == 0 or (vector.load_u8(start + (count >> 3)) >> spare) == 0
