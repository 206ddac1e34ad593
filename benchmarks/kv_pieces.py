"""Real KV to measure codecs on: what a model's cache holds after reading a text, cut in pieces."""

from __future__ import annotations

import argparse as _argparse
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gaac.hf.rope import rope_of_layer
from gaac.rope import Rope
from gaac_lab import kv, models


@dataclass(frozen=True)
class Piece:
    """What is coded in one call: a contiguous tensor [1, kv_heads, tokens, head_dim].

    part: "k" or "v". rope: the rotation that keys carry, None for values.
    """

    tensor: torch.Tensor
    part: str
    rope: Rope | None

    @property
    def raw_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def to_bytes(self) -> bytes:
        return self.tensor.view(torch.int16).numpy().tobytes()


def documentation() -> str:
    """Python's language reference, as pydoc keeps it: English prose with examples."""
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def source_code() -> str:
    """Two modules of the standard library. No constant of a level was chosen by looking at it."""
    return "\n".join(inspect.getsource(module) for module in (typing, _argparse))


TEXTS: dict[str, Callable[[], str]] = {"documentation": documentation, "code": source_code}


class LayerKV(NamedTuple):
    """K and V of one layer, float32 [1, kv_heads, tokens, head_dim], and how K was rotated."""

    keys: torch.Tensor
    values: torch.Tensor
    rope: Rope | None


class Reader:
    """A model that reads texts; in float32, because KV is rounded to either format from there."""

    def __init__(self, name: str) -> None:
        self.model, self.tokenizer = models.load(name, dtype="float32", device="cpu")

    def read(self, text: str, tokens: int) -> list[LayerKV]:
        """Every layer's K and V after the first `tokens` tokens; exits if there are not so many."""
        from transformers import DynamicCache

        given = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
        ids = given.input_ids
        if ids.shape[1] < tokens:
            raise SystemExit(f"The text has {ids.shape[1]} tokens: ask for no more with --tokens.")
        config = self.model.config
        cache = DynamicCache(config=config)
        parameters = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        with torch.inference_mode():
            self.model(ids, **{name: cache}, logits_to_keep=1)
        return [
            LayerKV(held.keys, held.values, rope_of_layer(config, held.layer))
            for held in kv.layers(cache)
        ]


def cut(layers: Sequence[LayerKV], dtype: torch.dtype, block_tokens: int | None) -> list[Piece]:
    """Pieces of block_tokens tokens of one layer's K or V each, or of whole layers for None."""
    pieces = []
    for keys, values, rope in layers:
        for part, tensor, hint in (("k", keys, rope), ("v", values, None)):
            rounded = tensor.to(dtype)
            for one in rounded.split(block_tokens or rounded.shape[2], dim=2):
                pieces.append(Piece(one.clone(memory_format=torch.contiguous_format), part, hint))
    return pieces
