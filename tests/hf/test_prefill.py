"""A prompt read in chunks: the same cache, less memory on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from gaac.hf import cache_argument, prefill, use_fused_attention

from .fused import rounding
from .scenarios import _generate, assert_packed, assert_same, compressed, dynamic, tokens

ModelOf = Callable[[str], PreTrainedModel]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 40, 100])
@pytest.mark.parametrize("fused", [False, True])
def test_chunks_are_read_as_by_the_librarys_cache(
    model_of: ModelOf, chunk_tokens: int, fused: bool
) -> None:
    """Bit for bit where the attention is the library's; a chunk of one token may stream."""
    model = model_of("llama")
    ids = tokens(2, 40)
    theirs, ours = dynamic(model), compressed(model)
    with torch.inference_mode():
        for chunk in ids.split(chunk_tokens, dim=1):
            output = model(input_ids=chunk, **{cache_argument(model): theirs})
    if not fused:
        result = prefill(model, ids, ours, chunk_tokens=chunk_tokens)
        assert torch.equal(result.logits, output.logits)
    else:
        with use_fused_attention(model):
            result = prefill(model, ids, ours, chunk_tokens=chunk_tokens)
        exact = chunk_tokens > 1
        torch.testing.assert_close(
            result.logits, output.logits, atol=0 if exact else 0.1, rtol=0 if exact else 0.1
        )
    assert_packed(ours)
    assert ours.get_seq_length() == 40


def test_every_chunk_is_compressed_before_the_next_is_read(model_of: ModelOf) -> None:
    model, cache, seen = model_of("llama"), compressed(model_of("llama"), window=3), []

    def look(*_: Any) -> None:
        assert_packed(cache)
        seen.append(cache.layer_bytes()[0].packed_tokens)

    hook = model.register_forward_hook(look)
    prefill(model, tokens(1, 60), cache, chunk_tokens=20)
    hook.remove()
    assert seen == [16, 32, 56]


def test_padding_has_no_positions(model_of: ModelOf) -> None:
    """As if each row had been read alone and without padding."""
    model = copy.deepcopy(model_of("llama")).float()
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    output = prefill(model, ids, rounding(model, 1), chunk_tokens=10, attention_mask=mask)
    for row, start in ((0, 9), (1, 0)):
        alone = prefill(model, ids[row : row + 1, start:], rounding(model, None), chunk_tokens=99)
        torch.testing.assert_close(
            output.logits[row, -1], alone.logits[0, -1], atol=2e-3, rtol=2e-3
        )


def test_a_second_prompt_and_its_mask(model_of: ModelOf) -> None:
    """Read after the first one as if both were one prompt."""
    model, ids = copy.deepcopy(model_of("llama")).float(), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = rounding(model, 1)
    prefill(model, ids[:, :17], cache, chunk_tokens=6, attention_mask=mask[:, :17])
    ours = prefill(model, ids[:, 17:], cache, chunk_tokens=5, attention_mask=mask)
    whole = prefill(model, ids, rounding(model, None), chunk_tokens=30, attention_mask=mask)
    assert ours.logits.shape[1] == 3  # the last chunk's
    torch.testing.assert_close(ours.logits, whole.logits[:, -3:], atol=2e-3, rtol=2e-3)


def test_what_is_passed_on(model_of: ModelOf) -> None:
    model, ids = model_of("llama"), tokens(1, 20)
    positions = torch.arange(20)[None] + 3
    output = prefill(
        *(model, ids, compressed(model)),
        chunk_tokens=8,
        position_ids=positions,
        logits_to_keep=2,
        output_hidden_states=True,
    )
    assert output.logits.shape[1] == 2
    assert output.hidden_states[0].shape[1] == 4
    theirs = dynamic(model)
    with torch.no_grad():
        for start in (0, 8, 16):
            part = slice(start, start + 8)
            expected = model(
                input_ids=ids[:, part],
                position_ids=positions[:, part],
                **{cache_argument(model): theirs},
            )
    assert torch.equal(output.logits, expected.logits[:, -2:])


@pytest.mark.parametrize("fused", [False, True])
def test_the_librarys_own_chunks(model_of: ModelOf, fused: bool) -> None:
    model = model_of("llama64")
    options: dict[str, Any] = {"max_new_tokens": 12, "prefill_chunk_size": 9}
    ids = tokens(1, 40)
    if not fused:
        ours, theirs = (
            _generate(model, c, ids, **options) for c in (compressed(model), dynamic(model))
        )
    else:
        with use_fused_attention(model):
            ours, theirs = (
                _generate(model, compressed(model, level=level), ids, **options) for level in (1, 0)
            )
    assert_same(ours, theirs)
    assert_packed(ours.cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0: a chunk holds at least one"),
        ({"chunk_tokens": 2.0}, "chunk_tokens=2.0"),
        (
            {"attention_mask": torch.ones(2, 7)},
            r"\(2, 7\): with 0 tokens in the cache it is \(2, 9",
        ),
        ({"input_ids": tokens(2, 9)[0]}, r"input_ids is \(9,\)"),
        ({"input_ids": tokens(2, 9)[:, :0]}, r"input_ids is \(2, 0\)"),
    ],
    ids=str,
)
def test_bad_arguments(model_of: ModelOf, change: dict[str, Any], message: str) -> None:
    model = model_of("llama")
    options = {"input_ids": tokens(2, 9), "chunk_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        prefill(model, cache=compressed(model), **options)


def test_an_encoder_reads_in_one_go(model_of: ModelOf) -> None:
    model = model_of("bart")
    with pytest.raises(ValueError, match="has an encoder"):
        prefill(model, tokens(1, 9), compressed(model), chunk_tokens=4)
