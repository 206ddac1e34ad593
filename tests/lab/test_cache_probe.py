"""The probe: what it counts, what it refuses, and that a model shrunk too far is not believed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from gaac_lab import cache_probe, shrink
from gaac_lab.cache_probe import CannotProbe, Probed, probe

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}
GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}


def test_keys_and_values_are_counted() -> None:
    found = probe(LLAMA)
    assert found.bytes_per_token == found.bytes_per_token_below_window == 3 * 2 * 2 * 48 * 2
    assert found.total_bytes(1000, batch=3) == 3000 * found.bytes_per_token
    assert (found.layers_with_kv, found.fixed_state_bytes_per_sequence) == (3, 0)
    assert (found.window_kept_tokens, found.device, found.dtype) == (None, "cpu", "bfloat16")


def test_a_real_cache_of_the_full_model_holds_as_much() -> None:
    import torch

    config = LlamaConfig(**{name: LLAMA[name] for name in LLAMA if name != "model_type"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model(torch.ones(2, 9, dtype=torch.int64), use_cache=True)["past_key_values"]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert isinstance(cache, DynamicCache)
    assert probe(config).total_bytes(9, batch=2) == held


def test_float32_is_twice_as_wide() -> None:
    assert probe(LLAMA, dtype="float32").bytes_per_token == 2 * probe(LLAMA).bytes_per_token


def test_a_window_keeps_one_token_less() -> None:
    found = probe(GEMMA)
    each = 2 * 256 * 2
    assert found.bytes_per_token == each
    assert found.bytes_per_token_below_window == 6 * each
    assert found.window_kept_tokens == 511
    assert found.total_bytes(300) == 300 * 6 * each
    assert found.total_bytes(10_000) == (10_000 + 5 * 511) * each


def test_a_window_longer_than_the_context_is_no_cap() -> None:
    config = {**GEMMA, "max_position_embeddings": 400}
    assert probe(config).bytes_per_token == probe(config).bytes_per_token_below_window
    assert probe(GEMMA).bytes_per_token < probe(config).bytes_per_token


def test_shared_layers_hold_nothing() -> None:
    config = {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "intermediate_size": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    }
    found = probe(config)
    assert found.layers_with_kv == 6
    assert [layer.bytes_per_token for layer in found.layers[6:10]] == [0] * 4


def test_states_are_apart_from_keys_and_values() -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    found = probe(config)
    recurrent, columns = 4 * 128 * 128 * 4, (2 * 2 * 128 + 4 * 128) * 4 * 2
    assert found.fixed_state_bytes_per_sequence == 3 * (recurrent + columns)
    assert found.layers_with_kv == 1


def test_an_encoder_decoder_has_two_caches() -> None:
    found = probe({"model_type": "t5", "num_layers": 1, "num_decoder_layers": 2})
    assert found.bytes_per_token == 2 * 2 * 8 * 64 * 2
    assert found.cross_bytes_per_encoder_token == found.bytes_per_token
    assert probe(LLAMA).cross_bytes_per_encoder_token is None


# ---- a small model must prove itself


def test_what_the_cache_sees_is_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a size that the cache depends on were on the list, the full-size shapes must answer."""
    true = probe(LLAMA)
    monkeypatch.setattr(shrink, "SIZES", {**shrink.SIZES, "num_key_value_heads": 1})
    found = probe(LLAMA)
    assert found.device == "meta"
    assert found.layers == true.layers


def test_real_tensors_and_shapes_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = {name: probe(config) for name, config in (("llama", LLAMA), ("gemma", GEMMA))}
    monkeypatch.setattr(cache_probe, "MOST_PARAMETERS", 0)
    shapes = {"llama": probe(LLAMA), "gemma": probe(GEMMA)}
    assert {found.device for found in shapes.values()} == {"meta"}
    assert {name: found.layers for name, found in real.items()} == {
        name: found.layers for name, found in shapes.items()
    }


def test_keys_as_wide_as_the_model_stay_so() -> None:
    found = probe(GPT2)
    assert found.bytes_per_token == 2 * 2 * 64 * 2
    assert found.device == "cpu"


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"model_type": "brand_new"}, {}, "no class for model_type 'brand_new'"),
        ({}, {}, "no class for model_type None"),
        ({"model_type": "clip"}, {}, "no language model for 'clip'"),
        ({**LLAMA, "num_hidden_layers": "three"}, {}, "llama: its class refuses these fields"),
        ({**LLAMA, "num_key_value_heads": 3}, {}, "llama cannot be counted: "),
        ({"model_type": "rwkv", "num_hidden_layers": 1}, {}, "not in a Cache of layers"),
        (LLAMA, {"dtype": "int8"}, "dtype='int8': a model runs in one of float32, bfloat16"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CannotProbe, match=message):
        probe(config, **options)


def test_a_window_of_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "WINDOWS", ())
    with pytest.raises(CannotProbe, match="has a window that could not be shortened"):
        probe(GEMMA)


def test_probing_leaves_threads_and_config_alone() -> None:
    import torch

    before, config = torch.get_num_threads(), LlamaConfig(num_hidden_layers=1)
    saved = config.to_dict()
    assert isinstance(probe(config), Probed)
    assert torch.get_num_threads() == before
    assert config.to_dict() == saved
