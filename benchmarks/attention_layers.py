"""Layers to measure attention on: real keys and values, arranged to any shape and length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kv_pieces import TEXTS, Reader


@dataclass(frozen=True)
class Shape:
    """The heads of a layer; query head i reads KV head i // (query_heads // kv_heads)."""

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def label(self) -> str:
        return f"{self.query_heads}q/{self.kv_heads}kv/{self.head_dim}"


@dataclass(frozen=True)
class Layer:
    """q: [batch, query_heads, head_dim]; keys, values: [batch, kv_heads, tokens, head_dim]."""

    shape: Shape
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def raw_bytes(self) -> int:
        """K and V uncompressed."""
        return 2 * self.keys.numel() * self.keys.element_size()


class Source:
    """The KV of a model that has read a text, from which layers of any shape are put together.

    More rows and heads are those of other layers, a larger head_dim has the channels of several
    heads side by side, and beyond the tokens read come the same ones again. Blocks are coded one by
    one and channel by channel, so such layers compress as the model's own do, where random numbers
    would not compress at all. In the model's own shape, layer i is the model's layer i.
    """

    def __init__(self, model: str, text: str, tokens: int, dtype: torch.dtype) -> None:
        layers = Reader(model).read(TEXTS[text](), tokens)
        self._keys = torch.cat([layer.keys[0] for layer in layers]).to(dtype)
        self._values = torch.cat([layer.values[0] for layer in layers]).to(dtype)

    def layer(self, shape: Shape, batch: int, tokens: int, number: int) -> Layer:
        """Layer `number` of a model of this shape; its queries are normal."""
        width = self._keys.shape[2]
        if shape.head_dim % width:
            raise SystemExit(f"head_dim {shape.head_dim} is no multiple of the model's {width}.")
        generator = torch.Generator().manual_seed(number)
        q = torch.randn((batch, shape.query_heads, shape.head_dim), generator=generator)
        keys, values = (
            _arranged(heads, shape, batch, tokens, number) for heads in (self._keys, self._values)
        )
        return Layer(shape, q.to(keys.dtype), keys, values)


def _arranged(
    heads: torch.Tensor, shape: Shape, batch: int, tokens: int, number: int
) -> torch.Tensor:
    """[batch, kv_heads, tokens, head_dim] out of the model's [heads, tokens read, head_dim]."""
    count, read, width = heads.shape
    together = shape.head_dim // width
    needed = batch * shape.kv_heads * together
    chosen = (torch.arange(needed) + number * needed) % count
    picked = heads[chosen][:, torch.arange(tokens) % read]
    joined = picked.reshape(batch, shape.kv_heads, together, tokens, width).transpose(2, 3)
    return joined.reshape(batch, shape.kv_heads, tokens, shape.head_dim)
