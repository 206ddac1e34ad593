"""The ways in which a cache is used, each giving ids and logits that two caches can be compared by.

Every scenario checks that the cache it was given holds the tokens afterwards: a cache that the
model ignores would make any comparison equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from gaac.hf import BlockCompressedCache, cache_argument
from gaac.hf.lane import Lane

from .models import VOCAB

Cache = DynamicCache | EncoderDecoderCache


@dataclass(frozen=True)
class Outcome:
    """ids: token ids. logits: every logit that was computed, flat. cache: as it was left."""

    ids: torch.Tensor
    logits: torch.Tensor
    cache: Cache


Scenario = Callable[[PreTrainedModel, Cache], Outcome]


def greedy(model: PreTrainedModel, cache: Cache) -> Outcome:
    return _generate(model, cache, tokens(1, 21), max_new_tokens=24)


def sampling(model: PreTrainedModel, cache: Cache) -> Outcome:
    torch.manual_seed(5)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": 2}
    return _generate(model, cache, tokens(1, 13), max_new_tokens=20, **options)


def beams(model: PreTrainedModel, cache: Cache) -> Outcome:
    options = {"num_beams": 3, "num_return_sequences": 2}
    return _generate(model, cache, tokens(2, 19), max_new_tokens=20, **options)


def left_padded(model: PreTrainedModel, cache: Cache) -> Outcome:
    ids = tokens(3, 26)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 9, 20)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return _generate(model, cache, ids, max_new_tokens=16, attention_mask=mask)


def chunked_prefill(model: PreTrainedModel, cache: Cache) -> Outcome:
    ids = tokens(2, 39)
    return _forward(model, cache, ids.split([5, 1, 16, 3, 8, *[1] * 6], dim=1))


def multi_turn(model: PreTrainedModel, cache: Cache) -> Outcome:
    first = _generate(model, cache, tokens(1, 14), max_new_tokens=9)
    second_prompt = torch.cat([first.ids, tokens(1, 11, seed=8)], 1)
    second = _generate(model, cache, second_prompt, max_new_tokens=9)
    return Outcome(second.ids, torch.cat([first.logits, second.logits]), cache)


def forks(model: PreTrainedModel, cache: Cache) -> Outcome:
    """Three conversations go on from one prompt: a deep copy, a fork, and the original last."""
    prompt = _forward(model, cache, [tokens(2, 21)])
    branches = [copy.deepcopy(cache), fork(cache), cache]
    outcomes = [
        _forward(model, branch, tokens(2, 12, seed=seed).split([2, *[1] * 10], dim=1))
        for seed, branch in enumerate(branches)
    ]
    logits = torch.cat([prompt.logits, *(outcome.logits for outcome in outcomes)])
    return Outcome(torch.cat([outcome.ids for outcome in outcomes]), logits, cache)


def assisted(model: PreTrainedModel, cache: Cache) -> Outcome:
    """An assistant that is often, not always, right: some of its tokens are cropped again."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for parameter in assistant.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data += 0.02 * noise
    return _generate(model, cache, tokens(1, 21), max_new_tokens=24, assistant_model=assistant)


def prompt_lookup(model: PreTrainedModel, cache: Cache) -> Outcome:
    ids = tokens(1, 9).repeat(1, 3)
    return _generate(model, cache, ids, max_new_tokens=24, prompt_lookup_num_tokens=6)


SCENARIOS: dict[str, Scenario] = {
    "greedy": greedy,
    "sampling": sampling,
    "beams": beams,
    "left_padded": left_padded,
    "chunked_prefill": chunked_prefill,
    "multi_turn": multi_turn,
    "forks": forks,
    "assisted": assisted,
    "prompt_lookup": prompt_lookup,
}
CROPPING = ("assisted", "prompt_lookup")


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids [batch, length] without the special ones."""
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def fork(cache: Cache) -> Cache:
    """An independent copy by the cheapest way that the cache offers."""
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(
            fork(cache.self_attention_cache), fork(cache.cross_attention_cache)
        )
    return cache.fork() if isinstance(cache, BlockCompressedCache) else copy.deepcopy(cache)


def dynamic(model: PreTrainedModel) -> Cache:
    """The library's cache for this model: what ours is compared with."""
    return wrap(model, lambda: DynamicCache(config=model.config))


def compressed(model: PreTrainedModel, **options: Any) -> Cache:
    """Our cache for this model, in blocks of 8 tokens unless told otherwise."""
    options = {"block_tokens": 8} | options
    return wrap(model, lambda: BlockCompressedCache(model.config, **options))


def wrap(model: PreTrainedModel, make: Callable[[], DynamicCache]) -> Cache:
    """One cache, or one for each kind of attention in an encoder-decoder model."""
    return EncoderDecoderCache(make(), make()) if model.config.is_encoder_decoder else make()


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Equal ids, and logits equal bit for bit (NaN and -0.0 count)."""
    assert torch.equal(ours.ids, theirs.ids)
    assert ours.logits.dtype == theirs.logits.dtype
    view = torch.int16 if ours.logits.element_size() == 2 else torch.int32
    assert torch.equal(ours.logits.view(view), theirs.logits.view(view))


def assert_packed(cache: Cache, cropped: bool = False) -> None:
    """Every compressed layer holds as many blocks as its length calls for.

    After a crop there may be one block fewer (the cut goes through it, and what is left of it waits
    for a full block again) or one more (the cut took tokens of the raw window alone).
    """
    if isinstance(cache, EncoderDecoderCache):
        assert_packed(cache.self_attention_cache, cropped)
        assert_packed(cache.cross_attention_cache)
        return
    assert isinstance(cache, BlockCompressedCache)
    for record in cache.layer_bytes():
        if record.kind != "blocks":
            continue
        length = record.packed_tokens + record.raw_tokens
        due = max(0, length - cache.window) // cache.block_tokens * cache.block_tokens
        assert due > 0
        if cropped:
            assert 0 < record.packed_tokens <= length
            assert record.raw_tokens < cache.block_tokens + cache.window
        else:
            assert record.packed_tokens == due


def assert_little_room(lane: Lane) -> None:
    """Blocks own exactly their storages; the raw tail's has room for a 16th more, or 16 tokens,
    and for no token that would be packed first.
    """
    for payload in (block.payload for row in lane.rows for block in row):
        assert payload.untyped_storage().nbytes() == payload.nbytes
    tokens, storage = lane.tail.shape[-2], lane.tail.untyped_storage().nbytes()
    most = tokens + max(16, tokens // 16)
    if lane.packer is not None:
        most = min(most, lane.packer.block_tokens + lane.packer.window)
    assert lane.tail.nbytes <= storage
    assert storage * tokens <= most * lane.tail.nbytes


@torch.no_grad()
def _generate(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, **options: Any) -> Outcome:
    options = {"do_sample": False} | options | {cache_argument(model): cache}
    result = model.generate(
        input_ids=ids, return_dict_in_generate=True, output_logits=True, **options
    )
    assert cache.get_seq_length() == result.sequences.shape[1] - 1
    if isinstance(cache, EncoderDecoderCache):
        assert cache.cross_attention_cache.get_seq_length() == ids.shape[1]
    return Outcome(result.sequences, torch.cat(result.logits).flatten(), cache)


@torch.no_grad()
def _forward(model: PreTrainedModel, cache: Cache, chunks: Any) -> Outcome:
    before, logits = cache.get_seq_length(), []
    name, options = "input_ids", {}
    if model.config.is_encoder_decoder:
        name = "decoder_input_ids"
        options["encoder_outputs"] = model.get_encoder()(tokens(chunks[0].shape[0], 17))
    for chunk in chunks:
        output = model(**{name: chunk, cache_argument(model): cache}, **options)
        logits.append(output.logits)
    ids = torch.cat(list(chunks), 1)
    assert cache.get_seq_length() == before + ids.shape[1]
    return Outcome(ids, torch.cat([part.flatten() for part in logits]), cache)
