"""The five public functions, and the registry of levels.

Data flows one way: tensor or bytes -> words (uint16, shape (matrices, tokens, width)) -> segments
-> streams -> frame; and back. Adding a level is one module in `gaac.levels` and one name in the
registry below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gaac.errors import CorruptFrame, GaacError, UnsupportedFrame, UnsupportedTensor
from gaac.frame import (
    DTYPE_CODES,
    FLAG_BYTES,
    FLAG_FLAT,
    FLAG_STORED,
    FrameInfo,
    Header,
    Piece,
    join_pieces,
    seal,
    split_pieces,
    unseal,
)
from gaac.inputs import as_bytes, as_words, check_out
from gaac.levels.base import FORMATS, Level
from gaac.levels.entropy import Entropy
from gaac.levels.packed import Packed
from gaac.levels.stored import Stored

if TYPE_CHECKING:
    import torch

_REGISTRY: dict[int, Level] = {level.number: level for level in (Stored(), Packed(), Entropy())}
LEVELS: dict[int, str] = {number: level.name for number, level in _REGISTRY.items()}

BLOCK_ROWS = 256
SEGMENT_VALUES = 65536  # with its temporaries, a segment stays in a core's second-level cache
FLAT_WIDTH = 64
MAX_WIDTH = 65536


def compress(data: Any, *, level: int = 3, dtype: str = "float16", row: int | None = None) -> bytes:
    """Compress the bytes of 16-bit floats; any length works, a last odd byte is kept as it is.

    data: any bytes-like object, only read; a memoryview with gaps is read in its logical order.
    dtype: "float16" or "bfloat16", little endian; it decides the ratio, never the result.
    row: values per row, the head_dim where known; None means 64.
    Raises TypeError if data is not bytes-like, UnsupportedTensor for another dtype, GaacError for
    an unknown level or a row outside 1 to 65536.
    """
    _check_level(level)
    if dtype not in DTYPE_CODES:
        raise UnsupportedTensor(f"dtype {dtype!r} is not supported: use 'float16' or 'bfloat16'.")
    width = FLAT_WIDTH if row is None else row
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        raise GaacError(f"row is {row!r}: give the values per row, 1 to {MAX_WIDTH}, or None.")
    raw = as_bytes(data, "data")
    header = _plan((len(raw),), dtype, level, FLAG_BYTES | FLAG_FLAT, width)
    body = 2 * header.tokens * width
    words = raw[:body].view("<u2").reshape(1, header.tokens, width)
    return _write(header, words, raw[body:], raw)


def decompress(blob: Any) -> bytes:
    """Give back the bytes that `compress` was given; for a blob of `encode`, the tensor's bytes.

    The bytes of a tensor are its values in C order, little endian.
    blob: bytes-like, a uint8 numpy array or a uint8 torch tensor.
    Raises CorruptFrame for a damaged blob, UnsupportedFrame for one of a newer format, TypeError
    for anything that is not bytes-like.
    """
    header, pieces, payload = _read(as_bytes(blob, "blob"))
    if header.flags & FLAG_STORED:
        return payload.tobytes()
    out = np.empty(header.raw_bytes, np.uint8)
    _decode_into(header, pieces, payload, out)
    return out.tobytes()


def encode(tensor: Any, *, level: int = 3, kind: str | None = None, rope: Any = None) -> bytes:
    """Compress a tensor of float16 or bfloat16, bit for bit.

    tensor: torch (any device and strides; detached, never written to) or numpy, one to eight axes;
    for KV [batch, kv_heads, tokens, head_dim]. Each index of the leading axes is coded apart, in
    blocks of 256 tokens, with one base per channel of the last axis and block. A tensor of one
    axis is cut into rows of 64.
    level: a key of `LEVELS`. kind: "k", "v" or None, and rope: hints for higher levels; levels 0
    to 3 do not use them.
    Raises UnsupportedTensor for another dtype or no axis, GaacError for an unknown level or kind.
    """
    _check_level(level)
    if kind not in (None, "k", "v"):
        raise GaacError(f"kind is {kind!r}: use 'k' for keys, 'v' for values, or None.")
    words, dtype = as_words(tensor)
    header = _plan_tensor(words.shape, dtype, level)
    if header.flags & FLAG_FLAT:
        flat = np.ascontiguousarray(words).reshape(-1)
        body = header.tokens * header.width
        rows = flat[:body].reshape(1, header.tokens, header.width)
        return _write(header, rows, flat[body:].view(np.uint8), words)
    stacked = words.reshape(header.matrices, header.tokens, header.width)
    return _write(header, stacked, np.zeros(0, np.uint8), words)


def decode(blob: Any, *, device: Any = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Give back the tensor that `encode` was given: same shape, dtype and bits.

    A blob of `compress` comes back as one axis of values, if its length is even.
    blob: bytes-like, a uint8 numpy array or a uint8 torch tensor.
    device: where the result goes; None means the CPU, or where `out` is.
    out: a tensor of the blob's shape and dtype to write into and return; it may be a strided view,
    such as a slice of tokens. If an error is raised, what it holds is undefined.
    Raises CorruptFrame for a damaged blob, UnsupportedFrame for one of a newer format or of an odd
    number of bytes, UnsupportedTensor if `out` does not fit, TypeError if blob is not bytes-like.
    """
    import torch

    header, pieces, payload = _read(as_bytes(blob, "blob"))
    shape = header.shape
    if header.flags & FLAG_BYTES:
        if header.raw_bytes % 2:
            raise UnsupportedFrame(
                "The blob holds an odd number of bytes, not 16-bit floats: use gaac.decompress."
            )
        shape = (header.raw_bytes // 2,)
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[header.dtype]
    if out is not None:
        check_out(out, shape, dtype, device)
        if out.device.type == "cpu":
            target = out.detach().view(torch.int16).numpy().view(np.uint16)
            _decode_into(header, pieces, payload, target)
            return out
    words = np.empty(shape, np.uint16)
    _decode_into(header, pieces, payload, words)
    tensor = torch.from_numpy(words.view(np.int16)).view(dtype)
    if out is not None:
        out.detach().copy_(tensor)
        return out
    return tensor if device is None else tensor.to(device)


def inspect(blob: Any) -> FrameInfo:
    """Read what a blob holds without decoding it; sizes in bytes.

    Raises CorruptFrame, UnsupportedFrame and TypeError as `decode` does.
    """
    data = as_bytes(blob, "blob")
    header, pieces, payload = _read(data)
    streams: dict[str, int] = {}
    for piece in pieces:
        for name, stream in zip(_REGISTRY[piece.level].streams, piece.streams, strict=True):
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
    if isinstance(level, bool) or not isinstance(level, int) or level not in _REGISTRY:
        known = ", ".join(f"{number} ({name})" for number, name in LEVELS.items())
        raise GaacError(f"level is {level!r}: choose one of {known}.")


def _plan(shape: tuple[int, ...], dtype: str, level: int, flags: int, width: int) -> Header:
    """Choose how the content is cut into segments."""
    trial = Header(level, dtype, flags, shape, width, BLOCK_ROWS, 1, 1)
    block_values = max(min(trial.tokens, BLOCK_ROWS) * width, 1)
    room = max(SEGMENT_VALUES // block_values, 1)
    matrices = max(min(trial.matrices, room), 1)
    blocks = max(min(room // matrices, trial.tokens // BLOCK_ROWS), 1)
    return Header(level, dtype, flags, shape, width, BLOCK_ROWS, blocks, matrices)


def _plan_tensor(shape: tuple[int, ...], dtype: str, level: int) -> Header:
    """Rows are the last axis where there is one worth the name, else 64 values each."""
    if len(shape) == 1 or math.prod(shape) == 0 or shape[-1] > MAX_WIDTH:
        return _plan(shape, dtype, level, FLAG_FLAT, FLAT_WIDTH)
    return _plan(shape, dtype, level, 0, shape[-1])


def _write(header: Header, words: np.ndarray, tail: np.ndarray, whole: np.ndarray) -> bytes:
    """Code the words, (matrices, tokens, width), or store the whole where that is not longer."""
    fmt, level = FORMATS[header.dtype], _REGISTRY[header.level]
    raw_bytes = header.raw_bytes
    if header.level and raw_bytes:
        pieces: list[tuple[int, Sequence[np.ndarray]]] = []
        for segment in header.segments():
            cut = words[
                segment.matrix_start : segment.matrix_stop, segment.token_start : segment.token_stop
            ]
            block = np.ascontiguousarray(cut).reshape(segment.blocks, segment.rows, segment.width)
            streams = level.encode(block, fmt)
            if sum(len(stream) for stream in streams) < 2 * segment.values:
                pieces.append((level.number, streams))
            else:
                pieces.append((0, _REGISTRY[0].encode(block, fmt)))
        parts = [*join_pieces(header, pieces), tail]
        if sum(len(part) for part in parts) < raw_bytes:
            return seal(header, parts)
    stored = replace(header, flags=header.flags | FLAG_STORED)
    return seal(stored, [np.ascontiguousarray(whole).reshape(-1).view(np.uint8)])


def _read(blob: np.ndarray) -> tuple[Header, list[Piece], np.ndarray]:
    """Check a blob; give its header, its segments, and the bytes that belong to no segment."""
    header = unseal(blob)
    if header.level not in _REGISTRY:
        raise UnsupportedFrame(
            f"The blob was written at level {header.level}, which this gaac lacks: update gaac."
        )
    if header.flags & FLAG_STORED:
        payload = blob[header.header_bytes :]
        if len(payload) != header.raw_bytes:
            raise CorruptFrame("The blob is longer or shorter than its shape says.")
        return header, [], payload
    pieces, tail = split_pieces(header, blob, _REGISTRY, FORMATS[header.dtype])
    return header, pieces, tail


def _decode_into(header: Header, pieces: list[Piece], payload: np.ndarray, out: np.ndarray) -> None:
    """Write the content into `out`: uint16 of the blob's shape, perhaps strided, or uint8, flat."""
    if header.flags & FLAG_STORED:
        out[...] = payload.view(out.dtype.newbyteorder("<")).reshape(out.shape)
        return
    if out.dtype == np.uint8 or header.flags & FLAG_FLAT:
        raw = np.empty(header.raw_bytes, np.uint8)
        if out.flags.c_contiguous:
            raw = out.reshape(-1).view(np.uint8)
        body = 2 * header.matrices * header.tokens * header.width
        raw[body:] = payload
        words = raw[:body].view(np.uint16)
        _decode_pieces(header, pieces, words)
        if not np.may_share_memory(raw, out):
            out[...] = raw.view(out.dtype).reshape(out.shape)
        return
    _decode_pieces(header, pieces, out)


def _decode_pieces(header: Header, pieces: list[Piece], out: np.ndarray) -> None:
    """Write all segments into `out`, uint16 with as many values as the rows of the frame."""
    fmt = FORMATS[header.dtype]
    words = out.reshape(header.matrices, header.tokens, header.width)
    for piece in pieces:
        segment, level = piece.segment, _REGISTRY[piece.level]
        cut = words[
            segment.matrix_start : segment.matrix_stop, segment.token_start : segment.token_stop
        ]
        shape = (segment.blocks, segment.rows, segment.width)
        block = cut.reshape(shape)
        level.decode(piece.streams, block, fmt)
        if not np.may_share_memory(block, cut):
            cut[...] = block.reshape(cut.shape)
    if not np.may_share_memory(words, out):
        out[...] = words.reshape(out.shape)
