"""What the tests of fused attention share: rounding caches, and a count of what streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import gaac.hf.attention
from gaac.hf import BlockCompressedCache
from gaac.hf.blocks import Packer
from gaac.hf.lazy import LazyStates

from .codecs import ZlibCodec
from .scenarios import Cache


class _Rounding:
    """Stores keys and values in bf16, and gives a float32 model what it stored as float32."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (keys.bfloat16(), values.bfloat16())
        held = super().update(*rounded, *args, **kwargs)  # type: ignore[misc]
        return tuple(states if type(states) is LazyStates else states.float() for states in held)


class RoundingDynamicCache(_Rounding, DynamicCache):
    pass


class RoundingCompressedCache(_Rounding, BlockCompressedCache):
    pass


def rounding(model: PreTrainedModel, level: int | None) -> Cache:
    """A cache that rounds to bf16, in blocks of 8 tokens; None is the library's own.

    What an encoder-decoder model keeps of its encoder is not rounded, for it reads that from the
    layers; a codec that knows float32 compresses it.
    """
    cache: DynamicCache
    cross: DynamicCache = DynamicCache(config=model.config)
    if level is None:
        cache = RoundingDynamicCache(config=model.config)
    else:
        cache = RoundingCompressedCache(model.config, level=level, block_tokens=8)
        cross = BlockCompressedCache(model.config, codec=ZlibCodec(), block_tokens=8)
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, cross)
    return cache


class Counts:
    """steps: calls of decode_attention. unpacked: blocks opened into dense tensors."""

    def __init__(self) -> None:
        self.steps = self.unpacked = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what streams and what is unpacked."""
    counts, plain, unpack = Counts(), gaac.hf.attention.decode_attention, Packer.unpack

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        counts.steps += 1
        return plain(*args, **kwargs)

    def opening(*args: Any) -> None:
        counts.unpacked += 1
        unpack(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaac.hf.attention, "decode_attention", attention)
        patch.setattr(Packer, "unpack", opening)
        yield counts
