"""The best uncompressed torch form: right, whatever the shape, and a cache like DynamicCache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from gaac_lab import grouped, kv
from gaac_lab.attention import switched
from gaac_lab.configuration import BASELINE, EAGER, GROUPED
from gaac_lab.grouped import GroupedCache, grouped_attention
from gaac_lab.request import Request

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def tensors(shape: tuple[int, int, int, int, int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v in float64 for (batch, query_heads, kv_heads, tokens, head_dim)."""
    batch, query_heads, kv_heads, tokens, head_dim = shape
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, query_heads, 1, head_dim, generator=made, dtype=torch.float64)
    k, v = (
        torch.randn(batch, kv_heads, tokens, head_dim, generator=made, dtype=torch.float64)
        for _ in range(2)
    )
    return q, k, v


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query head by query head, in float64; bias: [batch, tokens]."""
    shared = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = k[row, head // shared] @ q[row, head, 0] * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            scores = scores if bias is None else scores + bias[row]
            top = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head])
            weights = torch.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else torch.exp(sinks[head] - top))
            out[row, head, 0] = (weights / total) @ v[row, head // shared]
    return out


@pytest.mark.parametrize("many", [0, 2**62], ids=["a product a head", "batched"])
@pytest.mark.parametrize("shape", [(1, 9, 3, 50, 64), (3, 4, 4, 17, 80), (2, 5, 1, 1, 16)], ids=str)
def test_it_is_attention(
    shape: tuple[int, int, int, int, int], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "_MANY_VALUES", many)
    q, k, v = tensors(shape)
    out = grouped_attention(q, k, v[..., :12])
    expected = by_hand(q, k, v[..., :12], scaling=shape[-1] ** -0.5)
    assert out.shape == expected.shape
    assert (out - expected).abs().max() < 1e-6  # the softmax is in float32


@pytest.mark.parametrize("many", [0, 2**62], ids=["a product a head", "batched"])
def test_masks_softcap_and_sinks(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_MANY_VALUES", many)
    q, k, v = tensors((2, 6, 2, 40, 32), seed=1)
    sinks = torch.linspace(-2, 8, 6, dtype=torch.float64)
    keep = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    keep[1, ..., :33] = False
    bias = torch.zeros(2, 40, dtype=torch.float64).masked_fill_(~keep[:, 0, 0], -torch.inf)
    expected = by_hand(q, k, v, 0.3, bias, softcap=2.0, sinks=sinks)
    for mask in (keep, bias[:, None, None].float()):
        out = grouped_attention(q, k, v, mask, 0.3, softcap=2.0, sinks=sinks)
        assert (out - expected).abs().max() < 1e-6
    without = grouped_attention(q, k, v, None, 0.3, softcap=2.0, sinks=sinks)
    assert (without - expected).abs().max() > 0.1


def test_bf16_errs_little_more_than_torch_s_own() -> None:
    q, k, v = (one.bfloat16() for one in tensors((1, 9, 3, 3000, 64), seed=2))
    exact = by_hand(q.double(), k.double(), v.double(), 0.125)
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    error = (grouped_attention(q, k, v).double() - exact).abs().max()
    assert error < 4 * (own.double() - exact).abs().max()


def tiny(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


MODELS = {
    "llama": lambda: tiny(LlamaForCausalLM, LlamaConfig(**SIZES)),
    "sliding": lambda: tiny(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=16)),
    "softcap": lambda: tiny(
        Gemma2ForCausalLM,
        Gemma2Config(**SIZES, sliding_window=16, attn_logit_softcapping=2.0),
    ),
    "sinks": lambda: tiny(
        GptOssForCausalLM,
        GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=16),
    ),
}


@pytest.mark.parametrize("family", list(MODELS))
def test_a_model_gives_the_same_under_each_uncompressed_form(family: str) -> None:
    """In float32, left padding included; the model keeps its own attention between the steps."""
    model = MODELS[family]()
    before = model.config._attn_implementation
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    own, eager, group = (Request.of(model, ids, one, mask) for one in (BASELINE, EAGER, GROUPED))
    for request in (own, eager, group):
        request.prefill()
    for _ in range(6):
        for request in (own, eager, group):
            request.step()
        assert model.config._attn_implementation == before
        for other in (eager, group):
            assert (own.logits - other.logits).abs().max() < 1e-4
    assert torch.equal(own.new_tokens, group.new_tokens)


def test_the_grouped_form_decodes_and_the_others_do_not_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls = MODELS["llama"](), []
    plain = grouped.grouped_attention
    monkeypatch.setattr(
        grouped, "grouped_attention", lambda *args: (calls.append(1), plain(*args))[1]
    )
    ids = torch.arange(20)[None]
    for configuration in (BASELINE, EAGER, GROUPED):
        request = Request.of(model, ids, configuration)
        request.prefill()
        request.step()
        assert len(calls) == (2 if configuration == GROUPED else 0)  # one a layer


def test_a_class_that_takes_no_attention_by_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODELS["llama"]()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with (
        pytest.raises(ValueError, match="does not take its attention by name"),
        switched(model, "grouped"),
    ):
        pass


def test_parts_with_attentions_of_their_own_are_left_as_they_were() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 1, "image_size": 8, "patch_size": 4}  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config={"model_type": "llama", **SIZES}, vision_config=vision)
    )
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    with switched(model, "grouped"):
        assert model.config.text_config._attn_implementation == grouped.NAME
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


def states(batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, 2, tokens, 8, generator=made) for _ in range(2))
    return k, v


def test_the_cache_does_what_a_dynamic_cache_does() -> None:
    config = LlamaConfig(**SIZES)
    ours, theirs = GroupedCache(config), DynamicCache(config=config)

    def both(work: Any) -> None:
        for cache in (ours, theirs):
            work(cache)
        assert kv.same_cache(ours, theirs)
        assert ours.get_seq_length() == theirs.get_seq_length()

    for number, tokens in enumerate([300, 1, 1, 7]):
        both(lambda cache: [cache.update(*states(2, tokens, number + l), l) for l in (0, 1)])  # noqa: B023, E741
    both(lambda cache: cache.crop(-5))
    twin = copy.deepcopy(ours)
    both(lambda cache: [cache.update(*states(2, 1, 50 + l), l) for l in (0, 1)])  # noqa: E741
    assert twin.get_seq_length() == ours.get_seq_length() - 1
    both(lambda cache: cache.reorder_cache(torch.tensor([1, 0])))
    both(lambda cache: [cache.update(*states(2, 1, 55 + l), l) for l in (0, 1)])  # noqa: E741
    both(lambda cache: cache.batch_repeat_interleave(2))
    both(lambda cache: [cache.update(*states(4, 1, 60 + l), l) for l in (0, 1)])  # noqa: E741
    both(lambda cache: cache.batch_select_indices(torch.tensor([2])))
    both(lambda cache: [cache.update(*states(1, 1, 70 + l), l) for l in (0, 1)])  # noqa: E741
    ours.reset()
    assert ours.get_seq_length() == 0


def test_a_step_appends_in_place_and_the_room_shows() -> None:
    cache = GroupedCache(LlamaConfig(**SIZES))
    cache.update(*states(1, 10, 0), 0)
    first = cache.layers[0].keys.data_ptr()
    for step in range(grouped.ROOM_TOKENS - 10):
        keys, _ = cache.update(*states(1, 1, step), 0)
        assert keys.data_ptr() == first
    assert cache.update(*states(1, 1, 0), 0)[0].data_ptr() != first
    assert kv.stored_bytes(cache) == 2 * 2 * 8 * 4 * 2 * grouped.ROOM_TOKENS
    assert kv.raw_bytes(cache) == 2 * 2 * 8 * 4 * (grouped.ROOM_TOKENS + 1)


def test_a_copy_has_buffers_of_its_own() -> None:
    cache = GroupedCache(LlamaConfig(**SIZES))
    cache.update(*states(1, 10, 0), 0)
    twin = copy.deepcopy(cache)
    cache.update(*states(1, 1, 1), 0)
    twin.update(*states(1, 1, 2), 0)
    assert not torch.equal(cache.layers[0].keys, twin.layers[0].keys)
    assert torch.equal(cache.layers[0].keys[:, :, :10], twin.layers[0].keys[:, :, :10])
