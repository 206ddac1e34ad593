"""Switching fused attention on and off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

from gaac.hf import use_fused_attention
from gaac.hf.attention import FUSED, FUSED_EAGER

from .fused import counted
from .scenarios import assert_same, compressed, dynamic, greedy

ModelOf = Callable[[str], PreTrainedModel]


def test_it_stops(model_of: ModelOf) -> None:
    model = model_of("llama")
    fused = use_fused_attention(model)
    assert model.config._attn_implementation == FUSED
    fused.stop()
    assert model.config._attn_implementation == "sdpa"
    with counted() as counts:
        ours = greedy(model, compressed(model))
    assert counts.steps == 0
    assert_same(ours, greedy(model, dynamic(model)))


def test_it_stops_after_an_error(model_of: ModelOf) -> None:
    model = model_of("gpt_oss")
    fused = use_fused_attention(model)
    assert model.config._attn_implementation == FUSED_EAGER
    with pytest.raises(ValueError, match="input_ids"), fused:
        model(input_ids=None)
    assert model.config._attn_implementation == "eager"


def test_on_twice_is_on_until_the_outer_one_stops(model_of: ModelOf) -> None:
    model = model_of("llama")
    with use_fused_attention(model):
        with use_fused_attention(model):
            pass
        assert model.config._attn_implementation == FUSED
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_its_own_attention_is_refused() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model = BloomForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="BloomForCausalLM does its own attention") as caught:
        use_fused_attention(model)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before


def test_a_cache_follows_its_model(model_of: ModelOf) -> None:
    """Made before or after the switch, and the switch may come in the middle of a text."""
    model = model_of("llama")
    cache = compressed(model)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode(), counted() as counts:
        model(input_ids=ids, cache=cache)
        for _ in range(2):
            with use_fused_attention(model):
                model(input_ids=ids[:, :1], cache=cache)
            model(input_ids=ids[:, :1], cache=cache)
    assert counts.steps == 2 * 3
    assert cache.get_seq_length() == 21


def test_the_models_inside_a_model() -> None:
    """Text and vision each get their own former attention back."""
    text = {
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64},
    }
    vision = {
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    configs = (config, config.text_config, config.vision_config)
    before = [part._attn_implementation for part in configs]
    assert before[2] != before[1]
    with use_fused_attention(model):
        assert [part._attn_implementation for part in configs] == [FUSED] * 3
    assert [part._attn_implementation for part in configs] == before
