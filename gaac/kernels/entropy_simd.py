"""Level 3, compiled, for bfloat16 and float16, on the paths vbmi2 and plain.

The kernels check every length themselves, and read and write nothing outside the arrays they are
given, whatever those hold. Blobs and results are those of `entropy_numpy`, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import bit_strings, vector
from gaac.kernels.cpu import Kernel, inlined, kernel
from gaac.kernels.entropy_decode import FAULTS, MASKS, STRIDED, decode_segment
from gaac.kernels.entropy_encode import encode_segment
from gaac.kernels.entropy_numpy import COUNTS
from gaac.kernels.entropy_parts import STEP, TABLE_ROWS
from gaac.levels.base import WordFormat, plane_bytes
from gaac.levels.entropy import LEVELS, SHAPE_BITS

BYTES = "Array(uint8, 1, 'A', readonly=True)"
INTO_BYTES = "Array(uint8, 1, 'C')"
ENCODE = (
    f"UniTuple(int64, 7)(Array(uint16, 3, 'A', readonly=True), {INTO_BYTES}, {INTO_BYTES}, int64)"
)
DECODE = f"int64({', '.join([BYTES] * 7)}, Array(uint16, 3, 'A'), {INTO_BYTES}, int64)"


@dataclass(frozen=True)
class Coder:
    """Both directions of one path."""

    encode_kernel: Kernel
    decode_kernel: Kernel

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        """As entropy_numpy.encode, for uint16."""
        made_bytes, scratch_bytes, _ = room(*words.shape, fmt.extra_bits)
        made, scratch = np.empty(made_bytes, np.uint8), np.empty(scratch_bytes, np.uint8)
        ends = self.encode_kernel(words, made, scratch, fmt.extra_bits)
        if ends[0] == STRIDED:
            ends = self.encode_kernel(np.ascontiguousarray(words), made, scratch, fmt.extra_bits)
        shapes, planes, low, second, levels, patches, end = ends
        return (
            made[:shapes],
            made[shapes:planes],
            made[second:levels],
            made[levels:patches],
            made[patches:end],
            made[planes:low],
            made[low:second],
        )

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        """As entropy_numpy.decode, for uint16; each stream must be contiguous."""
        scratch = np.empty(room(*out.shape, fmt.extra_bits)[2], np.uint8)
        fault = self.decode_kernel(*streams, out, scratch, fmt.extra_bits)
        if fault == STRIDED:
            whole = np.empty(out.shape, out.dtype)
            fault = self.decode_kernel(*streams, whole, scratch, fmt.extra_bits)
            if not fault:
                out[...] = whole
        if fault:
            raise CorruptFrame(FAULTS[fault])


@functools.lru_cache(maxsize=64)
def room(blocks: int, rows: int, width: int, extra_bits: int) -> tuple[int, int, int]:
    """Bytes that a segment may take: coded, and as scratch for encoding and for decoding.

    The longest code has a bit in plane `first`, in `second` and in each level, and a patch. What is
    never written to costs no memory.
    """
    values = rows * width
    steps = -(-values // STEP)
    strings = (1 + LEVELS) * blocks * plane_bytes(values)
    fixed = blocks * (width + SHAPE_BITS * plane_bytes(width) + values)
    fixed += blocks * (1 + extra_bits) * plane_bytes(values)
    made = fixed + strings + blocks * values + 2 * STEP
    # Room to align, and, behind what is there, to read and write vectors.
    tables = blocks * TABLE_ROWS * -(-(width + 2 * STEP) // STEP) * STEP + 2 * STEP
    encoding = COUNTS * 2 * STEP + tables + blocks * steps * (8 + STEP)
    decoding = tables + MASKS * 8 * blocks * steps + LEVELS * blocks * plane_bytes(values)
    return made, encoding, decoding


# What differs between the paths: moving bits, and moving bytes.


@inlined
def _gather_vbmi2(at: Any, values: Any, lanes: Any) -> Any:
    """Write the lanes of a mask one behind the other; returns the address behind the last."""
    vector.store(at, vector.compress(values, lanes))
    return at + vector.popcount(lanes)


@inlined
def _gather_plain(at: Any, values: Any, lanes: Any) -> Any:
    """The same, one by one."""
    while lanes != vector.bits(0):
        vector.store_u8(at, vector.lane(values, vector.trailing_zeros(lanes)))
        lanes &= lanes - vector.bits(1)
        at += 1
    return at


@inlined
def _scatter_vbmi2(at: Any, values: Any, lanes: Any) -> Any:
    """The values, but in the lanes of a mask the bytes at an address, in order."""
    return vector.expand(vector.load_u8x64(at), lanes, values)


@inlined
def _scatter_plain(at: Any, values: Any, lanes: Any) -> Any:
    """The same, one by one."""
    while lanes != vector.bits(0):
        values = vector.with_lane(values, vector.trailing_zeros(lanes), vector.load_u8(at))
        lanes &= lanes - vector.bits(1)
        at += 1
    return values


@kernel(ENCODE)
def encode_vbmi2(words: Any, made: Any, scratch: Any, extra_bits: Any) -> Any:
    """See entropy_encode.encode_segment."""
    return encode_segment(words, made, scratch, extra_bits, vector.pext, _gather_vbmi2)


@kernel(ENCODE)
def encode_plain(words: Any, made: Any, scratch: Any, extra_bits: Any) -> Any:
    """See entropy_encode.encode_segment."""
    return encode_segment(
        words, made, scratch, extra_bits, bit_strings.extract_portable, _gather_plain
    )


@kernel(DECODE)
def decode_vbmi2(
    base: Any,
    shapes: Any,
    second: Any,
    levels: Any,
    patches: Any,
    planes: Any,
    low: Any,
    out: Any,
    scratch: Any,
    extra_bits: Any,
) -> Any:
    """See entropy_decode.decode_segment."""
    return decode_segment(
        base,
        shapes,
        second,
        levels,
        patches,
        planes,
        low,
        out,
        scratch,
        extra_bits,
        vector.pdep,
        _scatter_vbmi2,
    )


@kernel(DECODE)
def decode_plain(
    base: Any,
    shapes: Any,
    second: Any,
    levels: Any,
    patches: Any,
    planes: Any,
    low: Any,
    out: Any,
    scratch: Any,
    extra_bits: Any,
) -> Any:
    """See entropy_decode.decode_segment."""
    return decode_segment(
        base,
        shapes,
        second,
        levels,
        patches,
        planes,
        low,
        out,
        scratch,
        extra_bits,
        bit_strings.deposit_portable,
        _scatter_plain,
    )


CODERS = {
    "vbmi2": Coder(encode_vbmi2, decode_vbmi2),
    "plain": Coder(encode_plain, decode_plain),
}
