"""Six ways to do one layer's part of a decode step: append the new token, then attend.

Each holds the same keys and values in its own memory, all tokens but the new one, and `step` leaves
it as it was, so that it can be measured again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Protocol

import torch
from attention_layers import Layer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

import gaac
from gaac.attention import Pages, decode_attention
from gaac_lab.grouped import grouped_attention

PAGE_TOKENS = 256
TAIL_TOKENS = PAGE_TOKENS // 2  # what a cache holds raw on average, the new token among it

DEFAULT, EAGER, GROUPED = (
    "default (torch.cat, SDPA)",
    "eager (torch.cat)",
    "grouped matmul in place",
)
RAW_KERNEL, MATERIALISE, FUSED = "raw pages, our kernel", "packed, materialised", "packed, fused"


class Form(Protocol):
    """One layer, held in one way. held_bytes: K and V as they lie in memory."""

    held_bytes: int

    def step(self, threads: int) -> torch.Tensor:
        """The layer's output, [batch, query_heads, head_dim]."""
        ...


class Concatenated:
    """K and V in a DynamicCache, which copies them at each step; then the library's attention."""

    def __init__(self, layer: Layer, *, eager: bool) -> None:
        self._old = [part[:, :, :-1].contiguous() for part in (layer.keys, layer.values)]
        self._new = [part[:, :, -1:].contiguous() for part in (layer.keys, layer.values)]
        self._q = layer.q[:, :, None]
        self._scaling = layer.shape.head_dim**-0.5
        group = layer.shape.query_heads // layer.shape.kv_heads
        self._module = SimpleNamespace(num_key_value_groups=group, is_causal=True, training=False)
        self._attention = eager_attention_forward if eager else sdpa_attention_forward
        self.held_bytes = layer.raw_bytes

    def step(self, threads: int) -> torch.Tensor:
        keys, values = (
            torch.cat([old, new], dim=-2) for old, new in zip(self._old, self._new, strict=True)
        )
        out, _ = self._attention(
            self._module, self._q, keys, values, None, dropout=0.0, scaling=self._scaling
        )
        return out[:, 0]


class Grouped:
    """K and V in buffers with room, appended in place; one matrix product for each KV head."""

    def __init__(self, layer: Layer) -> None:
        self._buffers = [with_room(part) for part in (layer.keys, layer.values)]
        self._new = [part[:, :, -1:].contiguous() for part in (layer.keys, layer.values)]
        self._q, self._tokens = layer.q[:, :, None], layer.keys.shape[2]
        self.held_bytes = layer.raw_bytes

    def step(self, threads: int) -> torch.Tensor:
        for buffer, new in zip(self._buffers, self._new, strict=True):
            buffer.narrow(2, self._tokens - 1, 1).copy_(new)
        keys, values = (buffer.narrow(2, 0, self._tokens) for buffer in self._buffers)
        return grouped_attention(self._q, keys, values)[:, :, 0]


class Paged:
    """K and V in pages and a raw tail with room, which the kernel reads where they lie."""

    def __init__(self, layer: Layer, level: int) -> None:
        self._q = layer.q
        parts = (layer.keys, layer.values)
        self._pages = [paged(part, level) for part in parts]
        self._new = [part[:, :, -1:].contiguous() for part in parts]
        payloads = [
            page.payload for pages in self._pages for row in pages.table.rows for page in row
        ]
        tails = [pages.tail for pages in self._pages]
        self.held_bytes = sum(tensor.nbytes for tensor in (*payloads, *tails))

    def step(self, threads: int) -> torch.Tensor:
        for pages, new in zip(self._pages, self._new, strict=True):
            pages.tail[:, :, -1:].copy_(new)
        # A step gives attention a tail that is longer, and pages as they were.
        keys, values = (Pages(pages.table, pages.tail) for pages in self._pages)
        return decode_attention(self._q, keys, values, threads=threads)


class Materialised(Paged):
    """Pages and a raw tail, unpacked into full K and V at each step for the library's attention."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer, level=1)
        group = layer.shape.query_heads // layer.shape.kv_heads
        self._module = SimpleNamespace(num_key_value_groups=group, is_causal=True)

    def step(self, threads: int) -> torch.Tensor:
        keys, values = (
            materialised(pages, new, threads)
            for pages, new in zip(self._pages, self._new, strict=True)
        )
        out, _ = sdpa_attention_forward(self._module, self._q[:, :, None], keys, values, None)
        return out[:, 0]


def forms(layer: Layer) -> dict[str, Form]:
    """All six, by name."""
    return {
        DEFAULT: Concatenated(layer, eager=False),
        EAGER: Concatenated(layer, eager=True),
        GROUPED: Grouped(layer),
        RAW_KERNEL: Paged(layer, level=0),
        MATERIALISE: Materialised(layer),
        FUSED: Paged(layer, level=1),
    }


def with_room(part: torch.Tensor) -> torch.Tensor:
    """A buffer that begins with the tokens of a tensor and could take more."""
    batch, kv_heads, tokens, head_dim = part.shape
    room = part.new_zeros(batch, kv_heads, tokens + PAGE_TOKENS, head_dim)
    room[:, :, :tokens] = part
    return room


def paged(part: torch.Tensor, level: int) -> Pages:
    """Pages of a layer's keys or values, and a tail in a buffer with room."""
    packed = part.shape[2] - TAIL_TOKENS
    rows = [
        [
            gaac.encode(row[None, :, start : min(start + PAGE_TOKENS, packed)], level=level)
            for start in range(0, packed, PAGE_TOKENS)
        ]
        for row in part
    ]
    return Pages.of(rows, with_room(part[:, :, packed:])[:, :, :TAIL_TOKENS])


def materialised(pages: Pages, new: torch.Tensor, threads: int) -> torch.Tensor:
    """All tokens as one new tensor, as the cache makes it."""
    full = pages.tail.new_empty(pages.shape)
    for index, row in enumerate(pages.table.rows):
        start = 0
        for page in row:
            target = full[index : index + 1, :, start : start + page.tokens]
            gaac.decode(page.payload, out=target, threads=threads)
            start += page.tokens
    packed = pages.table.tokens
    full[:, :, packed:-1] = pages.tail[:, :, :-1]
    full[:, :, -1:] = new
    return full
