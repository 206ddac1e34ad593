"""Reading a prompt a chunk at a time, so that it is compressed as it comes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from gaac.hf.versions import cache_argument


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    *,
    chunk_tokens: int,
    attention_mask: torch.Tensor | None = None,
    **forward_kwargs: Any,
) -> Any:
    """Let `model` read a prompt into `cache` in chunks; the output of the last chunk's forward.

    Beside the weights and the compressed cache, memory then peaks near one layer's dense keys and
    values and what one chunk's forward takes, however long the prompt. Chunks change what is
    computed by rounding alone, with any cache.
    input_ids: [batch, tokens], all of them new to the cache. attention_mask: [batch, tokens the
    cache holds + tokens], 0 for padding, which then has no positions either, as in `generate`.
    forward_kwargs: passed to every forward; one of [batch, tokens] or [3, batch, tokens] called
    position_ids is cut as input_ids are. Chunks before the last compute one token's logits only.
    Raises ValueError for a chunk_tokens below 1, no tokens, a mask of another shape, or an
    encoder-decoder model.
    """
    past = cache.get_seq_length()
    _check(model, input_ids, attention_mask, chunk_tokens, past)
    names = inspect.signature(model.forward).parameters
    positions = forward_kwargs.pop("position_ids", None)
    if positions is None and attention_mask is not None and "position_ids" in names:
        positions = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)[:, past:]
    short = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    output = None
    for start in range(0, input_ids.shape[1], chunk_tokens):
        stop = min(start + chunk_tokens, input_ids.shape[1])
        options = dict(forward_kwargs)
        if stop < input_ids.shape[1]:
            options |= short
        if attention_mask is not None:
            options["attention_mask"] = attention_mask[:, : past + stop]
        if positions is not None:
            options["position_ids"] = positions[..., start:stop]
        output = None  # its memory is free for the next chunk
        output = model(
            input_ids=input_ids[:, start:stop], **{cache_argument(model): cache}, **options
        )
    return output


def _check(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    chunk_tokens: int,
    past: int,
) -> None:
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens!r}: a chunk holds at least one token.")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder, which reads the prompt in one go: call it."
        )
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids is {tuple(input_ids.shape)}: give [batch, tokens], not empty.")
    expected = (input_ids.shape[0], past + input_ids.shape[1])
    if attention_mask is not None and tuple(attention_mask.shape) != expected:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}: with {past} tokens in the cache it "
            f"is {expected}."
        )
