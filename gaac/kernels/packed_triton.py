"""Level 1 on a CUDA device: Triton kernels that give and take the streams of docs/format.md.

The streams equal, byte for byte, those of `gaac.levels.packed`. Level 1 is the one level with
kernels for a device; blobs of other levels are decoded on the CPU and copied. (At levels 3 and 5
there is no other way: where a value's bits lie follows from the values before it.)

Encoding takes two passes over the words (see `packed_programs`). Where the escapes of a tile of 64
rows start depends on all tiles before it, so a prefix sum lies between the two. Decoding takes one.

The kernels run on the CPU, slowly, if TRITON_INTERPRET=1 is set before Triton is first imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from gaac.errors import CorruptFrame, GaacError
from gaac.kernels.packed_programs import FAULTS, choose_bases, read_streams, write_streams
from gaac.levels.base import FORMATS, WordFormat
from gaac.levels.packed import ALIGN, CODE_BITS, TILE_ROWS, Packed

MAX_WIDTH = 65536
MAX_VALUES = 2**30  # of a segment: kernels count its values in 32 bits, signed, and past the end
PART_BYTES = 128  # bytes of a plane that a program works on at a time: a byte for each thread
PART_CHANNELS = 32

# There is no floating point here, but Triton 3.9 warns where this is left open.
_OPTIONS = {"enable_fp_fusion": False}

Streams = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def supports(shape: tuple[int, int, int], fmt: WordFormat) -> bool:
    """Whether these kernels code words of this format and shape (blocks, rows, width)."""
    blocks, rows, width = shape
    return fmt.name in FORMATS and width <= MAX_WIDTH and 0 < blocks * rows * width <= MAX_VALUES


def encode(words: torch.Tensor, fmt: WordFormat) -> Streams:
    """Code words into base, offsets, escapes, planes and low: uint8, one axis, on the same device.

    words: any dtype of the format's size, shape (blocks, rows, width), any strides; only read.
    Waits for the device once, since the number of escapes decides how long their stream is.
    Raises GaacError for what `supports` does not.
    """
    blocks, rows, width = _checked_shape(words, fmt)
    words = _as_integers(words)
    tiles, channel_parts = triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, PART_CHANNELS)
    with torch.cuda.device_of(words):
        base = _bytes(words, blocks * width)
        counts = words.new_empty((blocks * tiles, channel_parts), dtype=torch.int32)
        choose_bases[(blocks, channel_parts)](
            words, base, counts, *words.stride(), rows, width, CHANNELS=PART_CHANNELS,
            SHIFT=fmt.exponent_shift, MAX=fmt.exponent_max, **_OPTIONS,
        )  # fmt: skip
        in_tile = counts.sum(dim=1)
        ends = in_tile.cumsum(dim=0)
        offsets = (ends - in_tile).to(torch.int32)
        escape_count = int(ends[-1])
        spare = -(base.numel() + 4 * offsets.numel() + escape_count) % ALIGN
        escapes = _bytes(words, escape_count + spare)
        escapes[escape_count:] = 0
        plane_count = blocks * (CODE_BITS + fmt.extra_bits)
        planes = _bytes(words, plane_count * triton.cdiv(rows * width, 8))
        low = _bytes(words, blocks * rows * width * fmt.low_bytes)
        write_streams[(blocks, tiles)](
            words, base, offsets, escapes, planes, low, *words.stride(), rows, WIDTH=width,
            BYTES=_part_bytes(width), **_constants(fmt), **_OPTIONS,
        )  # fmt: skip
    return base, offsets.view(torch.uint8), escapes, planes, low


def decode(streams: Sequence[torch.Tensor], out: torch.Tensor, fmt: WordFormat) -> None:
    """Write the words of one segment into `out` and wait until they are known to be right.

    streams: base, offsets, escapes, planes, low as from `encode`. out: any dtype of the
    format's size, shape (blocks, rows, width), any strides, on the same device.
    Raises CorruptFrame if the streams contradict each other, and then `out` is undefined;
    GaacError for what `supports` does not.
    """
    fault = no_fault(out.device)
    queue_decode(streams, out, fmt, fault)
    raise_fault(fault)


def no_fault(device: torch.device) -> torch.Tensor:
    """Where decoding notes what it finds wrong: one int32 on the device, 0 while all is well."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def queue_decode(
    streams: Sequence[torch.Tensor], out: torch.Tensor, fmt: WordFormat, fault: torch.Tensor
) -> None:
    """As `decode`, but without waiting: for many segments, then one `raise_fault` for all of them.

    Nothing of `out` may be used before `raise_fault`. fault: from `no_fault`.
    """
    blocks, rows, width = shape = _checked_shape(out, fmt)
    lengths = [stream.numel() for stream in streams]
    if not Packed().lengths_fit(lengths, shape, fmt):
        raise CorruptFrame("The streams of a segment do not have the lengths it demands.")
    words = _as_integers(out)
    base, offsets, escapes, planes, low = (stream.contiguous() for stream in streams)
    with torch.cuda.device_of(words):
        read_streams[(blocks, triton.cdiv(rows, TILE_ROWS))](
            base, offsets, escapes, planes, low, words, fault, *words.stride(), rows,
            escapes.numel(), WIDTH=width, BYTES=_part_bytes(width), **_constants(fmt), **_OPTIONS,
        )  # fmt: skip


def raise_fault(fault: torch.Tensor) -> None:
    """Wait for the device, and raise CorruptFrame if any decoding noted a fault."""
    found = int(fault[0])
    if found:
        raise CorruptFrame(FAULTS[found])


def _checked_shape(words: torch.Tensor, fmt: WordFormat) -> tuple[int, int, int]:
    if words.ndim != 3 or words.element_size() != fmt.word_bytes:
        raise GaacError(f"Give words of {fmt.name} with the axes (blocks, rows, width).")
    blocks, rows, width = words.shape
    if not supports((blocks, rows, width), fmt):
        raise GaacError(f"No device kernel codes {fmt.name} of shape {tuple(words.shape)}.")
    return blocks, rows, width


def _as_integers(words: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor whose values are 2 bytes or 1 byte, as int16 or uint8."""
    return words.detach().view(torch.int16 if words.element_size() == 2 else torch.uint8)


def _constants(fmt: WordFormat) -> dict[str, int]:
    """A format as the kernels know it, when they are compiled."""
    return {
        "PLANES": CODE_BITS + fmt.extra_bits,
        "SHIFT": fmt.exponent_shift,
        "MAX": fmt.exponent_max,
        "EXTRA": sum(1 << position for position in fmt.extra),
        "LOW_BYTES": fmt.low_bytes,
        "ROTATED": int(fmt.name == "bfloat16"),
    }


def _bytes(like: torch.Tensor, count: int) -> torch.Tensor:
    return like.new_empty(count, dtype=torch.uint8)


def _part_bytes(width: int) -> int:
    """Bytes of a plane a program works on at a time: no more than a tile has, a power of two."""
    return min(PART_BYTES, triton.next_power_of_2(TILE_ROWS // 8 * width))
