"""One interface over gaac and the lossless codecs one can install: encode a KV tensor, decode it.

Adding a peer is one function in `gaac_lab/peers.py`; docs/adding-a-codec.md walks through it.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from gaac_lab.peers import PEERS, words_of

if TYPE_CHECKING:
    import torch

_MAGIC = b"KVC1"
_DTYPES = ("float16", "bfloat16")


class CodecError(ValueError):
    """A codec was asked for something that it cannot do."""


class KVCodec:
    """Losslessly encodes KV tensors in blocks of `block_tokens` along the token axis.

    backend: "gaac" (at `level`) or a name in `gaac_lab.peers.PEERS`, each of which runs at the
    setting that did best on real KV; `level` is gaac's own and means nothing to them.

    The blob is self-describing for every backend: a header with dtype, shape and block sizes, then
    the blocks. All of it counts as stored bytes.
    """

    def __init__(self, level: int = 3, block_tokens: int = 256, backend: str = "gaac") -> None:
        if block_tokens < 1:
            raise CodecError(f"block_tokens={block_tokens}: a block holds at least one token")
        if backend == "gaac":
            import gaac

            if level not in gaac.LEVELS:
                raise CodecError(f"level={level}: gaac has the levels {sorted(gaac.LEVELS)}")
        elif backend not in PEERS:
            raise CodecError(f"backend={backend!r}: choose gaac or one of {', '.join(PEERS)}")
        else:
            missing = PEERS[backend].missing()
            if missing:
                raise CodecError(f"backend={backend!r} needs {missing}: pip install {missing}")
        self.level, self.block_tokens, self.backend = level, block_tokens, backend

    def __repr__(self) -> str:
        return (
            f"KVCodec(level={self.level}, block_tokens={self.block_tokens}, "
            f"backend={self.backend!r})"
        )

    def encode(self, tensor: torch.Tensor, *, kind: str | None = None, rope: Any = None) -> bytes:
        """The blob of a [..., tokens, head_dim] fp16 or bf16 tensor, on any device.

        kind, rope: hints, see gaac.encode; peers know none. Raises CodecError for another dtype or
        fewer than two axes.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise CodecError(f"dtype {dtype}: KV must be {' or '.join(_DTYPES)}; convert it first")
        if tensor.ndim < 2:
            raise CodecError(f"shape {tuple(tensor.shape)}: [..., tokens, head_dim] is needed")
        tokens = tensor.shape[-2]
        blocks = [
            self._encode_block(tensor[..., start : start + self.block_tokens, :], dtype, kind, rope)
            for start in range(0, tokens, self.block_tokens)
        ]
        head = struct.pack(
            f"<4sBBII{tensor.ndim}I{len(blocks)}I",
            _MAGIC,
            _DTYPES.index(dtype),
            tensor.ndim,
            self.block_tokens,
            len(blocks),
            *tensor.shape,
            *map(len, blocks),
        )
        return b"".join([head, *blocks])

    def decode(
        self,
        blob: Any,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The tensor of a blob (bytes-like, or a uint8 tensor), on the CPU.

        `shape` and `dtype` are in the blob; if given they are checked against it. Raises CodecError
        when they differ or when the blob is not a whole one.
        """
        import torch

        plain: Any = blob.cpu().numpy() if isinstance(blob, torch.Tensor) else blob
        data = memoryview(plain).cast("B")
        stored_dtype, stored_shape, sizes, offset, block_tokens = _read_header(data)
        kind = getattr(torch, stored_dtype)
        if shape is not None and tuple(shape) != stored_shape:
            raise CodecError(f"the blob holds shape {stored_shape}, not {tuple(shape)}")
        if dtype is not None and dtype != kind:
            raise CodecError(f"the blob holds {stored_dtype}, not {dtype}")
        parts = []
        for index, size in enumerate(sizes):
            tokens = min(block_tokens, stored_shape[-2] - index * block_tokens)
            block_shape = (*stored_shape[:-2], tokens, stored_shape[-1])
            block = data[offset : offset + size]
            parts.append(self._decode_block(block, block_shape, stored_dtype))
            offset += size
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, -2) if parts else torch.empty(stored_shape, dtype=kind)

    def _encode_block(self, block: torch.Tensor, dtype: str, kind: str | None, rope: Any) -> bytes:
        if self.backend == "gaac":
            import gaac

            return gaac.encode(block, level=self.level, kind=kind, rope=rope)
        return PEERS[self.backend].compress(words_of(block), dtype)

    def _decode_block(self, data: memoryview, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        import torch

        if self.backend == "gaac":
            import gaac

            return gaac.decode(data)
        words = PEERS[self.backend].decompress(data, dtype, math.prod(shape))
        if words.size != math.prod(shape):
            raise CodecError(f"{self.backend} gave {words.size} values, not {math.prod(shape)}")
        return torch.from_numpy(words.view(np.int16)).view(getattr(torch, dtype)).view(shape)


def _read_header(data: memoryview) -> tuple[str, tuple[int, ...], tuple[int, ...], int, int]:
    """(dtype, shape, block sizes, offset of the first block, block_tokens) of a blob."""
    try:
        magic, dtype, ndim, block_tokens, count = struct.unpack_from("<4sBBII", data)
        if magic != _MAGIC or not 2 <= ndim <= 8 or block_tokens < 1:
            raise CodecError("not a blob of KVCodec")
        offset = struct.calcsize("<4sBBII")
        shape = struct.unpack_from(f"<{ndim}I", data, offset)
        offset += 4 * ndim
        if count != -(-shape[-2] // block_tokens) or dtype >= len(_DTYPES):
            raise CodecError("the blob's header contradicts itself")
        sizes = struct.unpack_from(f"<{count}I", data, offset)
    except struct.error as error:
        raise CodecError("the blob ends inside its header") from error
    offset += 4 * count
    if offset + sum(sizes) != len(data):
        raise CodecError(f"the blob has {len(data)} bytes; its header says {offset + sum(sizes)}")
    return _DTYPES[dtype], shape, sizes, offset, block_tokens
