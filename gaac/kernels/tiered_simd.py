"""Level 2, compiled: the kernels of each path and dtype, as `gaac.levels.tiered` calls them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import tiered_decode, tiered_encode
from gaac.kernels.cpu import Kernel
from gaac.kernels.entropy_parts import STEP
from gaac.kernels.packed_parts import STRIDED
from gaac.kernels.tiered_decode import FAULTS
from gaac.kernels.tiered_encode import CANDIDATES_BYTES, COUNTS_BYTES, TOTALS_BYTES
from gaac.levels.base import WordFormat, plane_bytes
from gaac.levels.packed import ALIGN, TILE_ROWS
from gaac.levels.tiered import CODE_BITS, OFFSET_BYTES, OFFSETS, RANKS, tiles_of

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Coder:
    """Both directions of one path for one dtype; the interface is `gaac.levels.base.Kernels`."""

    encode_kernel: Kernel
    decode_kernel: Kernel

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        starts, made_bytes, scratch_bytes = room(words.shape, fmt.extra_bits)
        # Room for what does not occur costs nothing: its pages are never touched.
        made, scratch = np.empty(made_bytes, np.uint8), np.empty(scratch_bytes, np.uint8)
        lengths = self.encode_kernel(words, made, scratch, starts)
        if lengths[0] == STRIDED:
            lengths = self.encode_kernel(np.ascontiguousarray(words), made, scratch, starts)
        base, ranks, offsets, second, third, escapes, planes, low = starts
        second_bytes, third_bytes, escaped = lengths
        # Base, ranks and offsets lie one behind the other.
        escaped += -(second + second_bytes + third_bytes + escaped) % ALIGN
        return (
            made[base:ranks],
            made[ranks:offsets],
            made[offsets:second],
            made[second : second + second_bytes],
            made[third : third + third_bytes],
            made[escapes : escapes + escaped],
            made[planes:low],
            made[low : low + words.size],
        )

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        whole, streams = out, tuple(streams)
        coded_bytes = streams[3].size + streams[4].size + streams[5].size
        scratch = np.empty(scratch_bytes(out.shape) + coded_bytes, np.uint8)
        status = self.decode_kernel(streams, out, scratch)
        if status == STRIDED:
            whole = np.empty(out.shape, out.dtype)
            status = self.decode_kernel(streams, whole, scratch)
        if status:
            raise CorruptFrame(FAULTS[status])
        if whole is not out:
            out[...] = whole


@functools.lru_cache(maxsize=256)
def room(shape: Shape, extra_bits: int) -> tuple[tuple[int, ...], int, int]:
    """For encoding a segment: where each stream starts in what is made, its bytes, scratch bytes.

    Kernels write eight bytes behind a string, and 64 behind the escapes.
    """
    blocks, rows, width = shape
    values = rows * width
    strings = CODE_BITS * plane_bytes(blocks * values) + 8
    most = (
        blocks * width,
        RANKS,
        OFFSET_BYTES * OFFSETS * blocks * tiles_of(rows),
        strings,
        strings,
        blocks * values + STEP,
        blocks * (CODE_BITS + extra_bits) * plane_bytes(values),
        blocks * values,
    )
    *starts, made = itertools.accumulate(most, initial=0)
    choice = COUNTS_BYTES + CANDIDATES_BYTES + TOTALS_BYTES
    exponents = (blocks * -(-values // STEP) + 1) * STEP
    high_strings = 2 * (plane_bytes(blocks * values) + 8)
    scratch = STEP + choice + table_bytes(width) + exponents + high_strings
    return tuple(starts), made, scratch


@functools.lru_cache(maxsize=256)
def scratch_bytes(shape: Shape) -> int:
    """Scratch for decoding a segment, without its second and third codes and its escapes.

    Behind those, a tile may read on: at most a byte for each value, and a vector.
    """
    _, rows, width = shape
    tile_values = min(TILE_ROWS, rows) * width
    return STEP + table_bytes(width) + 2 * STEP + tile_values + STEP


def table_bytes(width: int) -> int:
    """A table of bases: two steps behind the width, in whole steps (`pitch` in the kernels)."""
    return -(-(width + 2 * STEP) // STEP) * STEP


CODERS = {
    ("vbmi2", "bfloat16"): Coder(
        tiered_encode.encode_bfloat16_vbmi2, tiered_decode.decode_bfloat16_vbmi2
    ),
    ("plain", "bfloat16"): Coder(
        tiered_encode.encode_bfloat16_plain, tiered_decode.decode_bfloat16_plain
    ),
    ("vbmi2", "float16"): Coder(
        tiered_encode.encode_float16_vbmi2, tiered_decode.decode_float16_vbmi2
    ),
    ("plain", "float16"): Coder(
        tiered_encode.encode_float16_plain, tiered_decode.decode_float16_plain
    ),
}
