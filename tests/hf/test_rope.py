"""The rotation read from a config is the one that the library's own model applies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

import gaac
from gaac.hf import BlockCompressedCache, cache_argument, rope_of_layer
from gaac.hf.rope import INTERLEAVED
from gaac.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("config", "embedding", "interleaved"),
    [
        (LlamaConfig(), LlamaRotaryEmbedding, False),
        (LlamaConfig(head_dim=80, rope_theta=123456.0), LlamaRotaryEmbedding, False),
        (LlamaConfig(rope_parameters=LLAMA3), LlamaRotaryEmbedding, False),
        (GPTNeoXConfig(), GPTNeoXRotaryEmbedding, False),
        (GptOssConfig(), GptOssRotaryEmbedding, False),
        (Phi3Config(partial_rotary_factor=0.5), Phi3RotaryEmbedding, False),
        (CohereConfig(), CohereRotaryEmbedding, True),
    ],
)
def test_frequencies_are_the_models_own(config: Any, embedding: Any, interleaved: bool) -> None:
    rope = rope_of_layer(config, 0)
    assert rope is not None
    expected = Rope.of(embedding(config).inv_freq.numpy())
    np.testing.assert_array_equal(rope.turns, expected.turns)
    assert rope.interleaved == interleaved


def test_layers_may_differ() -> None:
    config = Gemma3TextConfig(num_hidden_layers=6)
    sliding, full = (rope_of_layer(config, layer) for layer in (0, 5))
    assert sliding is not None
    assert full is not None
    assert (sliding.turns[1:10] > full.turns[1:10]).all()


def test_no_rotation() -> None:
    assert rope_of_layer(GPT2Config(), 0) is None


@pytest.mark.parametrize(
    "parameters",
    [
        *(None, {}, {"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_type": "no such"}),
        *({"rope_type": "default", "rope_theta": theta} for theta in ("x", 0, -1.5, [1], None)),
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": None},
        {"rope_type": "yarn", "rope_theta": 1e4},
    ],
)
def test_what_cannot_be_read_is_left_out(parameters: Any) -> None:
    config = LlamaConfig()
    config.rope_parameters = parameters
    assert rope_of_layer(config, 0) is None
    BlockCompressedCache(config, level=5)


@pytest.mark.parametrize("family", ["cohere", "cohere2", "glm", "glm4", "helium", "llama", "qwen3"])
def test_pairs_are_those_that_the_model_rotates(family: str) -> None:
    """Its own helper turns the second channel of a pair into minus the first."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    halves = module.rotate_half(torch.arange(1.0, 9.0)).tolist()
    neighbours = halves == [-2.0, 1.0, -4.0, 3.0, -6.0, 5.0, -8.0, 7.0]
    assert neighbours or halves == [-5.0, -6.0, -7.0, -8.0, 1.0, 2.0, 3.0, 4.0]
    assert (family in INTERLEAVED) == neighbours


def test_a_hint_for_wider_heads_than_the_cache_is_given_is_left_out() -> None:
    config = LlamaConfig(num_hidden_layers=1, head_dim=64)
    cache = BlockCompressedCache(config, level=5, block_tokens=8)
    keys = torch.randn(1, 2, 8, 32).to(torch.bfloat16)
    cache.update(keys, keys, 0)
    assert torch.equal(cache.layers[0].keys, keys)


def test_the_cache_gives_level_5_the_hint(default_model: tuple[Any, Any]) -> None:
    """The real model's keys are stored in fewer bytes than without it, and come back the same."""
    model, tokenizer = default_model
    ids = tokenizer("The quick brown fox jumps over the lazy dog. " * 30, return_tensors="pt")
    plain = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids.input_ids, **{cache_argument(model): plain}, logits_to_keep=1)
    cache = BlockCompressedCache(model.config, level=5, block_tokens=256)
    for index, layer in enumerate(plain.layers):
        cache.update(layer.keys, layer.values, index)
    keys = plain.layers[11].keys
    held = cache.layers[11].lanes[0].rows[0][0].payload
    assert held.numel() < 0.97 * len(gaac.encode(keys[:, :, :256], level=5, kind="k"))
    assert torch.equal(cache.layers[11].keys.view(torch.int16), keys.view(torch.int16))


def test_other_families_take_it_too() -> None:
    assert rope_of_layer(Qwen2Config(), 3) is not None
