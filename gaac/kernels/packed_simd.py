"""Level 1, compiled: the kernels of each path and dtype, as `gaac.levels.packed` calls them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaac.errors import CorruptFrame
from gaac.kernels import packed_decode, packed_encode, packed_numpy
from gaac.kernels.cpu import Kernel
from gaac.kernels.packed_decode import FAULTS
from gaac.kernels.packed_encode import MAX_ROWS
from gaac.kernels.packed_parts import STEP, STRIDED, table_shape
from gaac.levels.base import WordFormat, plane_bytes
from gaac.levels.packed import ALIGN, BASE_CANDIDATES, CODE_BITS, TILE_ROWS


class Plan(NamedTuple):
    """Sizes for segments of one shape, in bytes but for lanes and repeats.

    In what `encode` makes, base starts at 0, and behind `escapes` there is room for as many as
    there are values.
    """

    lanes: int
    repeats: int
    offsets: int
    planes: int
    low: int
    escapes: int
    made: int
    encode_scratch: int
    decode_scratch: int  # without the escapes


@functools.lru_cache(maxsize=256)
def plan(shape: tuple[int, int, int], extra_bits: int) -> Plan:
    """The sizes for words of a shape (blocks, rows, width)."""
    blocks, rows, width = shape
    values = rows * width
    lanes, repeats = table_shape(rows, width)
    offsets = blocks * width
    planes = offsets + 4 * blocks * -(-rows // TILE_ROWS)
    low = planes + blocks * (CODE_BITS + extra_bits) * plane_bytes(values)
    escapes = low + blocks * values
    table = lanes + STEP
    return Plan(
        lanes,
        repeats,
        offsets,
        planes,
        low,
        escapes,
        made=escapes + blocks * values + STEP,
        encode_scratch=values + (1 + BASE_CANDIDATES) * table + 2 * STEP,
        decode_scratch=table + 4 * STEP,
    )


@dataclass(frozen=True)
class Packer:
    """Both directions of one path for one dtype; the interface is `gaac.levels.base.Kernels`."""

    encode_kernel: Kernel
    decode_kernel: Kernel

    def encode(self, words: np.ndarray, fmt: WordFormat) -> Sequence[np.ndarray]:
        if not words.size or words.shape[1] > MAX_ROWS:
            return packed_numpy.encode(words, fmt)
        lanes, repeats, offsets, planes, low, escapes, made_bytes, scratch_bytes, _ = plan(
            words.shape, fmt.extra_bits
        )
        # Room for escapes that do not occur costs nothing: its pages are never touched.
        made = np.empty(made_bytes, np.uint8)
        scratch = np.empty(scratch_bytes, np.uint8)
        count = self.encode_kernel(words, made, scratch, lanes, repeats)
        if count == STRIDED:
            words = np.ascontiguousarray(words)
            count = self.encode_kernel(words, made, scratch, lanes, repeats)
        count += -(planes + count) % ALIGN
        return (
            made[:offsets],
            made[offsets:planes],
            made[escapes : escapes + count],
            made[planes:low],
            made[low:escapes],
        )

    def decode(self, streams: Sequence[np.ndarray], out: np.ndarray, fmt: WordFormat) -> None:
        sizes = plan(out.shape, fmt.extra_bits)
        scratch = np.empty(sizes.decode_scratch + streams[2].size, np.uint8)
        whole, streams = out, tuple(streams)
        status = self.decode_kernel(streams, out, scratch, sizes.lanes, sizes.repeats)
        if status == STRIDED:
            whole = np.empty(out.shape, out.dtype)
            status = self.decode_kernel(streams, whole, scratch, sizes.lanes, sizes.repeats)
        if status:
            raise CorruptFrame(FAULTS[status])
        if whole is not out:
            out[...] = whole


KERNELS = {
    ("vbmi2", "bfloat16"): Packer(
        packed_encode.encode_bfloat16_vbmi2, packed_decode.decode_bfloat16_vbmi2
    ),
    ("plain", "bfloat16"): Packer(
        packed_encode.encode_bfloat16_plain, packed_decode.decode_bfloat16_plain
    ),
    ("vbmi2", "float16"): Packer(
        packed_encode.encode_float16_vbmi2, packed_decode.decode_float16_vbmi2
    ),
    ("plain", "float16"): Packer(
        packed_encode.encode_float16_plain, packed_decode.decode_float16_plain
    ),
}
