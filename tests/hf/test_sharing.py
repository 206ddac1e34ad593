"""Blocks are shared, never packed twice, and memory grows by what is new alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from gaac.hf import BlockCompressedCache, cache_argument, use_fused_attention

from .codecs import CountingCodec
from .scenarios import SCENARIOS, compressed, tokens

ModelOf = Callable[[str], PreTrainedModel]


def payloads(cache: BlockCompressedCache) -> list[list[int]]:
    """Addresses of all payloads: one list per layer, side and batch row."""
    return [
        [block.payload.data_ptr() for block in row]
        for layer in cache.layers
        for lane in layer.lanes
        for row in lane.rows
    ]


def memory(*caches: BlockCompressedCache) -> int:
    """Bytes of every storage that these caches keep alive, each counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for cache in caches
        for layer in cache.layers
        for lane in layer.lanes
        for tensor in lane.tensors()
    }
    return sum(storages.values())


@pytest.fixture
def filled(model_of: ModelOf) -> BlockCompressedCache:
    """Two rows of 37 tokens in blocks of 8: 4 blocks and 5 raw tokens each."""
    return fill(model_of("llama"))


def fill(model: PreTrainedModel, **options: Any) -> BlockCompressedCache:
    cache = compressed(model, **options)
    advance(model, cache, tokens(2, 37))
    return cache


@torch.no_grad()
def advance(model: PreTrainedModel, cache: BlockCompressedCache, ids: torch.Tensor) -> None:
    model(input_ids=ids, **{cache_argument(model): cache})


def test_reorder_shares_blocks(filled: BlockCompressedCache) -> None:
    before = payloads(filled)
    filled.reorder_cache(torch.tensor([1, 1]))
    after = payloads(filled)
    assert after[0] == after[1] == before[1]
    assert len(before[0]) == 4


def test_repeat_and_select_share_blocks(filled: BlockCompressedCache) -> None:
    before, small = payloads(filled), memory(filled)
    filled.batch_repeat_interleave(3)
    assert payloads(filled)[:6] == [before[0]] * 3 + [before[1]] * 3
    tails = sum(lane.tail.nbytes for layer in filled.layers for lane in layer.lanes)
    assert memory(filled) == small + tails * 2 // 3
    filled.batch_select_indices(torch.tensor([0, 5]))
    assert payloads(filled) == before
    assert memory(filled) == small


@pytest.mark.parametrize("twin_of", [copy.deepcopy, BlockCompressedCache.fork])
def test_copies_share_blocks_and_grow_by_tails(
    model_of: ModelOf, twin_of: Callable[[BlockCompressedCache], BlockCompressedCache]
) -> None:
    model = model_of("llama")
    cache = fill(model)
    alone, before = memory(cache), payloads(cache)
    tails = sum(lane.tail.nbytes for layer in cache.layers for lane in layer.lanes)
    twin = twin_of(cache)
    assert payloads(twin) == before
    assert memory(cache, twin) <= alone + tails
    advance(model, twin, tokens(2, 2))
    assert memory(cache, twin) <= alone + 2 * tails
    assert payloads(twin) == payloads(cache) == before
    assert (cache.get_seq_length(), twin.get_seq_length()) == (37, 39)


def test_a_fork_allocates_nothing(filled: BlockCompressedCache) -> None:
    assert memory(filled, filled.fork()) == memory(filled)


@pytest.mark.parametrize("fused", [False, True])
def test_continuations_grow_by_their_tails_alone(model_of: ModelOf, fused: bool) -> None:
    """Four texts go on from one prefix, a token at a time: 6 raw tokens each, and no block more."""
    model = model_of("llama64")
    cache = fill(model)
    before, alone = payloads(cache), memory(cache)
    forks = [cache.fork() for _ in range(4)]
    with use_fused_attention(model) if fused else nullcontext():
        for seed, twin in enumerate(forks):
            advance(model, twin, tokens(2, 1, seed=seed))
    token_bytes = 2 * 2 * 64 * 2  # rows, KV heads, head_dim, bytes of bf16
    tail_bytes = 8 * token_bytes  # room for a block's tokens, in each layer and on each side
    lanes = 2 * len(cache.layers)
    assert all(payloads(twin) == before for twin in forks)
    assert memory(cache, *forks) == alone + 4 * lanes * tail_bytes
    assert memory(cache) == alone


def test_a_fork_copies_the_layers_of_the_library(model_of: ModelOf) -> None:
    model = model_of("qwen3_next")
    cache = fill(model)
    twin = cache.fork()
    state = cache.layers[0].recurrent_states[0].clone()
    advance(model, twin, tokens(2, 1))
    assert torch.equal(cache.layers[0].recurrent_states[0], state)
    assert not torch.equal(twin.layers[0].recurrent_states[0], state)


@pytest.mark.parametrize("scope", ["kv", "k", "v"])
@pytest.mark.parametrize("scenario", ["greedy", "beams", "forks", "multi_turn", "left_padded"])
def test_nothing_is_packed_twice(model_of: ModelOf, scenario: str, scope: str) -> None:
    """As many calls of encode as there are blocks; in `forks`, of all three caches together."""
    model, codec = model_of("llama"), CountingCodec()
    outcome = SCENARIOS[scenario](model, compressed(model, codec=codec, scope=scope))
    sides, layers = len(scope), len(model_of("llama").model.layers)
    blocks = outcome.cache.get_seq_length() // 8
    rows = {"greedy": 1, "beams": 6, "forks": 2, "multi_turn": 1, "left_padded": 3}[scenario]
    per_row = blocks if scenario != "forks" else 2 + 3 * (blocks - 2)
    assert codec.encoded == sides * layers * rows * per_row


def test_rows_that_share_a_block_decode_it_once(model_of: ModelOf) -> None:
    model, codec = model_of("llama"), CountingCodec()
    cache = fill(model, codec=codec)
    cache.reorder_cache(torch.tensor([0, 0]))
    before = codec.decoded
    keys = cache.layers[0].keys
    assert codec.decoded - before == 4
    assert torch.equal(keys[0].view(torch.int16), keys[1].view(torch.int16))


def test_a_crop_opens_one_block_a_row_and_no_more(model_of: ModelOf) -> None:
    model, codec = model_of("llama"), CountingCodec()
    cache = fill(model, codec=codec)  # 4 blocks, 5 raw
    kept, (encoded, decoded) = payloads(cache), (codec.encoded, codec.decoded)
    cache.crop(-4)
    assert (codec.encoded, codec.decoded) == (encoded, decoded)
    cache.crop(-10)  # 23 tokens are left, 7 of them from the third block
    assert payloads(cache) == [row[:2] for row in kept]
    assert codec.decoded - decoded == 3 * 2 * 2  # layers, sides, rows
    cache.crop(-7)  # at a block's edge: nothing to open
    assert codec.decoded - decoded == 3 * 2 * 2
    assert codec.encoded == encoded


def test_a_window_as_long_as_the_crop_saves_packing_again(model_of: ModelOf) -> None:
    model = model_of("llama")
    counts = {}
    for window in (0, 20):
        codec = CountingCodec()
        outcome = SCENARIOS["assisted"](model, compressed(model, codec=codec, window=window))
        record = outcome.cache.layer_bytes()[0]
        counts[window] = codec.encoded - record.packed_tokens // 8 * 3 * 2
    assert counts[0] > 0
    assert counts[20] == 0


def test_one_raw_side_is_held_as_one_tensor(model_of: ModelOf) -> None:
    cache = fill(model_of("llama"), scope="k")
    keys, values = cache.layers[0].lanes
    assert (keys.packed_tokens, values.packed_tokens) == (32, 0)
    assert cache.layers[0].values is values.tail
    assert values.tail.untyped_storage().nbytes() == values.tail.nbytes
