"""The packer, which makes and opens the packed blocks of a cache: each one a `gaac.pages.Page`.

A block holds one batch row's keys or values over a fixed number of tokens. Nothing ever writes into
it, so beams, forks and copies of a cache share blocks by reference and nothing is packed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

import gaac
from gaac.hf.background import foreign_codec
from gaac.pages import Page
from gaac.rope import Rope

GAAC_DTYPES = (torch.float16, torch.bfloat16)


class Codec(Protocol):
    """Anything that turns a tensor into bytes and back, bit for bit.

    Both are called from several threads, but never from two at once.
    """

    def encode(self, tensor: torch.Tensor, /) -> Any:
        """Bytes-like for a [1, kv_heads, tokens, head_dim] tensor."""

    def decode(self, blob: bytes, /) -> torch.Tensor:
        """The tensor that `encode` was given: same shape, same dtype."""


@dataclass(frozen=True, slots=True)
class Packer:
    """When a block is due, how it is packed, and how it is opened again.

    block_tokens: tokens in a block. window: tokens at the end that always stay raw.
    codec: None for gaac at `level`, else anything with encode and decode.
    kind, rope: hints for gaac, see gaac.encode.
    """

    level: int
    block_tokens: int
    window: int
    codec: Codec | None = None
    kind: str | None = None
    rope: Rope | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Packer:
        return self  # codecs often hold handles that cannot be copied

    def blocks_due(self, raw_tokens: int) -> int:
        """How many blocks a raw tail of this many tokens gives up."""
        return max(0, raw_tokens - self.window) // self.block_tokens

    def check_dtype(self, dtype: torch.dtype, name: str) -> None:
        """Raise gaac.UnsupportedTensor where gaac itself has no codec for this dtype."""
        if self.codec is None and dtype not in GAAC_DTYPES:
            raise gaac.UnsupportedTensor(
                f"{name} is {str(dtype).removeprefix('torch.')}; "
                "load the model in bfloat16 or float16, or pass codec=."
            )

    def pack(self, tensor: torch.Tensor) -> Page:
        """A block of a [1, kv_heads, tokens, head_dim] tensor, which is not written to."""
        if self.codec is None:
            blob = gaac.encode(tensor, level=self.level, kind=self.kind, rope=self._hint(tensor))
        else:
            # A private copy: some codecs scramble their input while they work.
            private = tensor.clone(memory_format=torch.contiguous_format)
            with foreign_codec():
                blob = self.codec.encode(private)
        return Page(_payload(blob, tensor.device), tuple(tensor.shape), tensor.dtype)

    def _hint(self, tensor: torch.Tensor) -> Rope | None:
        """The rope, where it fits: a config may tell of other heads than the cache is given."""
        fits = self.rope is not None and 2 * self.rope.turns.size <= tensor.shape[-1]
        return self.rope if fits else None

    def unpack(self, block: Page, out: torch.Tensor) -> None:
        """Write a block's tensor into `out`, a view of the block's shape and dtype.

        Raises gaac.CorruptFrame for a damaged gaac payload, ValueError where a foreign codec gives
        back another shape or dtype than it was given.
        """
        if self.codec is None:
            gaac.decode(block.payload, out=out)
            return
        blob = block.payload.cpu().numpy().tobytes()
        with foreign_codec():
            tensor = self.codec.decode(blob)
        if tuple(tensor.shape) != block.shape or tensor.dtype != block.dtype:
            raise ValueError(
                f"the codec gave back {tuple(tensor.shape)} {tensor.dtype} for a block of "
                f"{block.shape} {block.dtype}: decode(encode(tensor)) must restore both."
            )
        out.copy_(tensor)


def _payload(blob: Any, device: torch.device) -> torch.Tensor:
    """A codec's blob, copied into a uint8 tensor of exactly its size on `device`."""
    if isinstance(blob, torch.Tensor):
        if blob.dtype != torch.uint8:
            raise TypeError(f"the codec's encode gave a {blob.dtype} tensor: bytes are needed.")
        data = blob.detach().cpu().numpy().reshape(-1)
    else:
        data = np.frombuffer(memoryview(blob).cast("B"), np.uint8)
    payload = torch.empty(data.size, dtype=torch.uint8)
    payload.numpy()[:] = data
    return payload.to(device)
