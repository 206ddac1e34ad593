"""raw_bytes, stored_bytes and the table by layer, against sums done another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from gaac.hf import BlockCompressedCache, cache_argument

from .codecs import PaddedCodec, ZlibCodec
from .scenarios import SCENARIOS, assert_little_room, compressed, tokens

ModelOf = Callable[[str], PreTrainedModel]
OPTIONS = [
    {},
    {"level": 0},
    {"level": 3, "window": 5},
    {"scope": "k"},
    {"scope": "v", "window": 9},
    {"codec": ZlibCodec()},
    {"codec": PaddedCodec()},
]


@torch.no_grad()
def filled(model: PreTrainedModel, cache: Any, batch: int = 2, length: int = 45) -> Any:
    ids = tokens(batch, length)
    for chunk in (ids[:, :30], *ids[:, 30:].split(1, dim=1)):
        model(input_ids=chunk, **{cache_argument(model): cache})
    return cache


def storages(tensors: list[torch.Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_llama_by_hand(model_of: ModelOf, options: dict[str, Any]) -> None:
    cache = filled(model_of("llama"), compressed(model_of("llama"), **options))
    token_bytes = 2 * 16 * 2  # KV heads, head_dim, bytes of bf16: one row, one side
    raw = stored = 0
    for record, layer in zip(cache.layer_bytes(), cache.layers, strict=True):
        payload = raw_parts = 0
        for lane in layer.lanes:
            for row in lane.rows:
                for block in row:
                    assert block.payload.dtype == torch.uint8
                    assert block.payload.untyped_storage().nbytes() == len(block.payload)
                    payload += len(block.payload)
            assert_little_room(lane)
            raw_parts += lane.tail.untyped_storage().nbytes()
        packed = (45 - cache.window) // 8 * 8
        assert (record.packed_tokens, record.raw_tokens) == (packed, 45 - packed)
        assert record.raw_bytes == 2 * 45 * 2 * token_bytes
        assert record.stored_bytes == payload + raw_parts
        assert (record.kind, record.state_bytes) == ("blocks", 0)
        raw, stored = raw + record.raw_bytes, stored + record.stored_bytes
    assert (cache.raw_bytes, cache.stored_bytes) == (raw, stored)
    assert [record.index for record in cache.layer_bytes()] == [0, 1, 2]


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2", "lfm2", "qwen3_next", "gemma3n"])
def test_raw_bytes_are_what_the_dynamic_cache_holds(model_of: ModelOf, family: str) -> None:
    model = model_of(family)
    ours = filled(model, compressed(model))
    theirs = filled(model, DynamicCache(config=model.config))
    kv = [t for layer in theirs.layers for t in kv_of(layer)]
    assert ours.raw_bytes == sum(t.numel() * t.element_size() for t in kv)
    states = [t for layer in theirs.layers for t in states_of(layer)]
    assert ours.state_bytes == storages(states)
    assert (ours.state_bytes > 0) == (family in ("lfm2", "qwen3_next"))
    for record, mine, other in zip(ours.layer_bytes(), ours.layers, theirs.layers, strict=True):
        if record.kind != "blocks":
            assert record.stored_bytes == storages(kv_of(mine)) == storages(kv_of(other))


def kv_of(layer: Any) -> list[torch.Tensor]:
    both = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in both if tensor is not None]


def states_of(layer: Any) -> list[torch.Tensor]:
    found = []
    for name in ("conv_states", "recurrent_states"):
        found += [t for t in getattr(layer, name, {}).values() if t is not None]
    return found


def test_a_view_that_keeps_a_long_prefill_alive_is_counted(model_of: ModelOf) -> None:
    """The library's sliding layer holds 11 of 45 tokens as a view of all of them."""
    model = model_of("mistral")
    cache = compressed(model)
    with torch.no_grad():
        model(input_ids=tokens(1, 45), **{cache_argument(model): cache})
    record = cache.layer_bytes()[0]
    assert record.raw_tokens == 11
    assert record.stored_bytes == record.raw_bytes // 11 * 45


def test_real_looking_kv_shrinks_and_random_kv_does_not_grow_much() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=1)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 512, 64)
    smooth = torch.randn(shape, generator=generator).bfloat16()
    noise = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    for kv, low, high in ((smooth, 0.5, 0.8), (noise.view(torch.bfloat16), 1.0, 1.01)):
        for level in (1, 3):
            cache = BlockCompressedCache(config, level=level)
            cache.update(kv, kv, 0)
            assert low < cache.stored_bytes / cache.raw_bytes < high


def test_a_codec_that_expands_is_counted_honestly(model_of: ModelOf) -> None:
    model = model_of("llama")
    cache = filled(model, compressed(model, codec=PaddedCodec()))
    assert cache.stored_bytes > cache.raw_bytes + 3 * 2 * 2 * 5 * 1000


def test_no_tensor_has_more_than_a_little_room_after_any_use(model_of: ModelOf) -> None:
    model = model_of("llama")
    for scenario in SCENARIOS.values():
        cache = scenario(model, compressed(model, window=3, scope="k")).cache
        for layer in cache.layers:
            for lane in layer.lanes:
                assert_little_room(lane)


def test_an_empty_cache_holds_nothing(model_of: ModelOf) -> None:
    model = model_of("llama")
    cache = compressed(model)
    assert cache.raw_bytes == cache.stored_bytes == 0
    filled(model, cache)
    assert cache.stored_bytes > 0
    cache.reset()
    assert cache.raw_bytes == cache.stored_bytes == cache.get_seq_length() == 0
    filled(model, cache, batch=3)
    assert cache.get_seq_length() == 45
