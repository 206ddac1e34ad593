"""The five public functions.

Data flows one way: tensor or bytes -> words (uint16 or uint8, shape (matrices, tokens, width)) ->
segments -> streams -> frame; and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gaac import repeats
from gaac.errors import CorruptFrame, GaacError, UnsupportedFrame
from gaac.frame import Coded, FrameInfo, pack, read_segments, store, unseal
from gaac.header import (
    BLOCK_ROWS,
    FLAG_BYTES,
    FLAG_FLAT,
    FLAG_STORED,
    FLAT_WIDTH,
    MAX_WIDTH,
    ROPE_LEVEL,
    Header,
    Segment,
    is_coded,
    plan,
)
from gaac.inputs import as_bytes, as_words, check_dtype, check_out, is_on_device
from gaac.levels.base import Hints
from gaac.levels.registry import REGISTRY
from gaac.pool import thread_count
from gaac.rope import as_rope
from gaac.segments import decode_segments, encode_segments

if TYPE_CHECKING:
    import torch

LEVELS: dict[int, str] = {number: level.name for number, level in sorted(REGISTRY.items())}

DEVICE_LEVEL = 1  # the level that has kernels for a CUDA device

_NO_HINTS = Hints()
_NO_TAIL = np.zeros(0, np.uint8)
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}

# A frame as it was read: its header, its segments, and the bytes that belong to no segment.
_Frame = tuple[Header, Sequence[tuple[Segment, Coded]], np.ndarray]


def compress(
    data: Any,
    *,
    level: int = 3,
    dtype: str = "float16",
    row: int | None = None,
    threads: int | None = 1,
) -> bytes:
    """Compress the bytes of numbers; any length works, a last odd byte is kept as it is.

    data: any bytes-like object, only read; a memoryview with gaps is read in its logical order.
    dtype: "float16", "bfloat16" (both little endian), "float8_e4m3fn", "float8_e5m2" or "int8"; it
    decides the ratio, never the result.
    row: values per row, the head_dim where known; None means 64.
    threads: how many to use, None for all cores; the blob does not depend on it.
    Raises TypeError if data is not bytes-like, UnsupportedTensor for another dtype, GaacError for
    an unknown level, a row outside 1 to 65536, or threads below 1.
    """
    _check_level(level)
    check_dtype(dtype)
    width = FLAT_WIDTH if row is None else row
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        raise GaacError(f"row is {row!r}: give the values per row, 1 to {MAX_WIDTH}, or None.")
    workers = thread_count(threads)
    raw = as_bytes(data, "data")
    return _write_flat(plan((len(raw),), dtype, level, row=width), raw, workers)


def decompress(blob: Any, *, threads: int | None = 1) -> bytes:
    """Give back the bytes that `compress` was given; for a blob of `encode`, the tensor's bytes.

    The bytes of a tensor are its values in C order, little endian.
    blob: bytes-like, a uint8 numpy array or a uint8 torch tensor. threads: as in `compress`.
    Raises CorruptFrame for a damaged blob, UnsupportedFrame for one of a newer format, TypeError
    for anything that is not bytes-like.
    """
    workers = thread_count(threads)
    frame = read(as_bytes(blob, "blob"))
    header, _, payload = frame
    if header.flags & FLAG_STORED:
        return payload.tobytes()
    raw = np.empty(header.raw_bytes, np.uint8)
    _decode_bytes(frame, raw, workers)
    return raw.tobytes()


def encode(
    tensor: Any,
    *,
    level: int = 3,
    kind: str | None = None,
    rope: Any = None,
    threads: int | None = 1,
) -> bytes:
    """Compress a tensor of 16-bit or 8-bit numbers, bit for bit.

    tensor: torch (any device and strides; detached, never written to) or numpy, of float16,
    bfloat16, float8_e4m3fn, float8_e5m2 or int8 (which is stored as it is), one to eight axes; for
    KV [batch, kv_heads, tokens, head_dim]. Each index of the leading axes is coded apart, in
    blocks of 256 tokens, with one base per channel of the last axis and block. A tensor of one
    axis is cut into rows of 64.
    level: a key of `LEVELS`.
    kind: "k", "v" or None, and rope: None, a `gaac.Rope` or the inverse frequencies in radians
    per token with which keys were rotated. Hints for level 5; other levels do not look at them, and
    for values there is no rope to look at.
    threads: how many to use, None for all cores; the blob does not depend on it.
    Raises UnsupportedTensor for another dtype or no axis, GaacError for an unknown level or kind,
    threads below 1, or, at level 5, a rope that does not fit into a row.
    """
    _check_level(level)
    if kind not in (None, "k", "v"):
        raise GaacError(f"kind is {kind!r}: use 'k' for keys, 'v' for values, or None.")
    workers = thread_count(threads)
    if level == DEVICE_LEVEL and is_on_device(tensor):
        from gaac import on_device

        blob = on_device.encode(tensor)
        if blob is not None:
            return blob
    words, dtype = as_words(tensor)
    header = plan(words.shape, dtype, level)
    if header.flags & FLAG_FLAT:
        flat = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
        return _write_flat(header, flat, workers)
    hints = _NO_HINTS
    if level == ROPE_LEVEL:
        hints = Hints(None if kind == "v" else as_rope(rope, header.width))
    if not is_coded(header):
        return store(header, words)
    if words.strides[-1] != words.itemsize:
        words = np.ascontiguousarray(words)
    stacked = words.reshape(header.rows_shape)
    seek_repeats = repeats.likely(stacked, BLOCK_ROWS)
    if seek_repeats:
        header = plan(words.shape, dtype, level, one_block=True)
    pieces = encode_segments(header, stacked, hints, seek_repeats=seek_repeats, threads=workers)
    if hints.rope is not None and any(piece.level == ROPE_LEVEL for piece in pieces):
        header = replace(header, rope=hints.rope)
    return pack(header, pieces, _NO_TAIL) or store(header, words)


def decode(
    blob: Any, *, device: Any = None, out: torch.Tensor | None = None, threads: int | None = 1
) -> torch.Tensor:
    """Give back the tensor that `encode` was given: same shape, dtype and bits.

    A blob of `compress` comes back as one axis of values, if its length is a whole number of them.
    blob: bytes-like, a uint8 numpy array or a uint8 torch tensor.
    device: where the result goes; None means the CPU, or where `out` is.
    out: a tensor of the blob's shape and dtype to write into and return; it may be a strided view,
    such as a slice of tokens, but no two of its values may share memory. If an error is raised,
    what it holds is undefined.
    threads: how many to use, None for all cores.
    Raises CorruptFrame for a damaged blob, UnsupportedFrame for one of a newer format or of an odd
    number of bytes, UnsupportedTensor if `out` does not fit, TypeError if blob is not bytes-like,
    GaacError for threads below 1.
    """
    import torch

    workers = thread_count(threads)
    frame = read(as_bytes(blob, "blob"))
    header = frame[0]
    shape, dtype = _shape_of_tensor(header), getattr(torch, header.dtype)
    if out is not None:
        check_out(out, shape, dtype, device)
        if out.device.type == "cpu":
            bits = out.detach().view(torch.uint16 if header.value_bytes == 2 else torch.uint8)
            _decode_words(frame, bits.numpy(), workers)
            return out
    place = device if out is None else out.device
    if place is not None and torch.device(place).type == "cuda" and header.level == DEVICE_LEVEL:
        from gaac import on_device

        made = torch.empty(shape, dtype=dtype, device=place) if out is None else out
        if on_device.decode(header, frame[1], made):
            return made
    words = np.empty(shape, _WORDS[header.value_bytes])
    _decode_words(frame, words, workers)
    tensor = torch.from_numpy(words).view(dtype)
    if out is not None:
        out.detach().copy_(tensor)
        return out
    return tensor if device is None else tensor.to(device)


def inspect(blob: Any) -> FrameInfo:
    """Read what a blob holds without decoding it; sizes in bytes.

    Raises CorruptFrame, UnsupportedFrame and TypeError as `decode` does.
    """
    data = as_bytes(blob, "blob")
    header, pieces, payload = read(data)
    streams: dict[str, int] = {}
    for _, coded in pieces:
        names = REGISTRY[coded.level].streams
        if coded.unique_rows:
            names = ("repeats", *names)
        for name, stream in zip(names, coded.streams, strict=True):
            streams[name] = streams.get(name, 0) + len(stream)
    if len(payload):
        streams["words" if header.flags & FLAG_STORED else "tail"] = len(payload)
    return FrameInfo(
        level=header.level,
        dtype=header.dtype,
        shape=header.shape,
        raw_bytes=header.raw_bytes,
        stored_bytes=len(data),
        streams=streams,
    )


def _check_level(level: int) -> None:
    if isinstance(level, bool) or not isinstance(level, int) or level not in REGISTRY:
        known = ", ".join(f"{number} ({name})" for number, name in LEVELS.items())
        raise GaacError(f"level is {level!r}: choose one of {known}.")


def _shape_of_tensor(header: Header) -> tuple[int, ...]:
    """The shape that `decode` gives; UnsupportedFrame for bytes that are no whole values."""
    if not header.flags & FLAG_BYTES:
        return header.shape
    if header.raw_bytes % header.value_bytes:
        raise UnsupportedFrame(
            "The blob holds an odd number of bytes, not 16-bit floats: use gaac.decompress."
        )
    return (header.raw_bytes // header.value_bytes,)


def _write_flat(header: Header, raw: np.ndarray, threads: int) -> bytes:
    """The blob of bytes, uint8, cut into rows without regard to any shape."""
    if not is_coded(header):
        return store(header, raw)
    body = header.raw_bytes - header.tail_bytes
    words = raw[:body].view(_WORDS[header.value_bytes]).reshape(header.rows_shape)
    pieces = encode_segments(header, words, _NO_HINTS, seek_repeats=False, threads=threads)
    return pack(header, pieces, raw[body:]) or store(header, raw)


def read(blob: np.ndarray) -> _Frame:
    """Check a blob, uint8, and find its parts: header, segments, bytes of no segment.

    Raises CorruptFrame or UnsupportedFrame as `decode` does.
    """
    header = unseal(blob)
    if header.level not in REGISTRY:
        raise UnsupportedFrame(
            f"The blob was written at level {header.level}, which this gaac lacks: update gaac."
        )
    if header.flags & FLAG_STORED:
        payload = blob[header.size :]
        if len(payload) != header.raw_bytes:
            raise CorruptFrame("The blob is longer or shorter than its shape says.")
        return header, (), payload
    pieces, tail = read_segments(header, blob, REGISTRY)
    return header, pieces, tail


def _decode_words(frame: _Frame, out: np.ndarray, threads: int) -> None:
    """Write the content into `out`, uint16 or uint8 of the tensor's shape, perhaps strided."""
    header, pieces, payload = frame
    if header.flags & FLAG_STORED:
        out[...] = payload.view(out.dtype).reshape(out.shape)
    elif not header.flags & FLAG_FLAT:
        words = out.reshape(header.rows_shape)
        decode_segments(header, pieces, words, threads=threads)
        if not (out.flags.c_contiguous or np.may_share_memory(words, out)):
            out[...] = words.reshape(out.shape)
    elif out.flags.c_contiguous:
        _decode_bytes(frame, out.reshape(-1).view(np.uint8), threads)
    else:
        raw = np.empty(header.raw_bytes, np.uint8)
        _decode_bytes(frame, raw, threads)
        out[...] = raw.view(out.dtype).reshape(out.shape)


def _decode_bytes(frame: _Frame, out: np.ndarray, threads: int) -> None:
    """Write the content into `out`, uint8 in one axis, as long as the content."""
    header, pieces, payload = frame
    if header.flags & FLAG_STORED:
        out[:] = payload
        return
    body = header.raw_bytes - header.tail_bytes
    words = out[:body].view(_WORDS[header.value_bytes]).reshape(header.rows_shape)
    decode_segments(header, pieces, words, threads=threads)
    out[body:] = payload
