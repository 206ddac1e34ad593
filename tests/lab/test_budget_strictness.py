"""What is not understood is refused by name; absent, null and class default are three things."""

from __future__ import annotations

from typing import Any

import pytest

from gaac_lab.budget import UnsupportedConfig, kv_budget
from gaac_lab.families.config_fields import OTHER_CACHES
from gaac_lab.families.family_names import NOT_COUNTED, TEXT_TYPES
from tests.lab.published import CONFIGS

BARE = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


def test_fields_alone_are_enough() -> None:
    found = kv_budget({**BARE, "num_key_value_heads": 2}, seq_len=10)
    assert found.total_bytes == 2 * 4 * 2 * 8 * 10 * 2
    assert found.total_bytes_transformers is None
    unknown = kv_budget({**BARE, "model_type": "brand_new", "num_key_value_heads": 2}, seq_len=10)
    assert unknown.total_bytes == found.total_bytes
    assert any("'brand_new' is not known here" in note for note in unknown.notes)


def test_class_defaults_are_used_and_said() -> None:
    """Published Gemma 3 files leave out what equals the class default."""
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
              "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}}  # fmt: skip
    found = kv_budget(config, seq_len=10)
    assert {(kind.kv_heads, kind.k_head_dim) for kind in found.kinds} == {(4, 256)}
    assert [kind.layers for kind in found.kinds] == [5, 29]
    assert any("num_attention_heads is not in the config" in note for note in found.notes)


LAYER_TYPES = ["sliding_attention"] * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers is not in the config"),
        ({**BARE, "num_hidden_layers": None}, "num_hidden_layers is None"),
        ({**BARE, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**BARE, "num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({**BARE, "num_key_value_heads": None}, "num_key_value_heads is None"),
        ({**BARE, "num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 8"),
        ({**BARE, "num_key_value_heads": [2, 2, 4, 4]}, r"num_key_value_heads is \[2, 2, 4, 4\]"),
        ({**BARE, "hidden_size": 63}, "head_dim is not in the config, and hidden_size 63 / 8"),
        ({**BARE, "n_layer": 5}, "n_layer is 5 where num_hidden_layers is 4"),
        ({**BARE, "sliding_window": 16}, "sliding_window is 16, and which layers"),
        ({**BARE, "model_type": "llama", "sliding_window": 16}, "llama: sliding_window is 16"),
        ({**BARE, "layer_types": LAYER_TYPES}, "sliding_window is not in the config"),
        ({**BARE, "layer_types": LAYER_TYPES[1:]}, "layer_types names 3 layers where 4"),
        ({**BARE, "layer_types": "full"}, "layer_types is 'full' where a list"),
        ({**BARE, "layer_types": ["mamba"] * 4}, "layer_types holds linear_attention"),
        ({**BARE, "cache_every_other_layer": True}, "cache_every_other_layer is not understood"),
        ({**BARE, "model_type": "new", "kv_ring_size": 9}, "new: kv_ring_size is not understood"),
        ({**BARE, "model_type": "new", "H_cycles": 2}, "new: H_cycles is not understood"),
        ({**BARE, "model_type": "falcon", "multi_query": "yes"}, "multi_query is 'yes'"),
        ({**BARE, "model_type": "bert"}, "is_decoder is not true, and an encoder keeps no KV"),
        ({**BARE, "model_type": "jamba", "attn_layer_offset": 9}, "attn_layer_offset is 9"),
        ({**BARE, "model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1]},
         "hybrid_layer_pattern is no 0 or 1 for each of 4 layers"),
        ({**BARE, "model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
         "hybrid_override_pattern is 'MX'"),
        ({**BARE, "model_type": "nemotron_h", "hybrid_override_pattern": "M*"},
         "num_hidden_layers is 4, and the pattern names 2 layers"),
        ({**BARE, "model_type": "falcon_h1", "attn_layer_indices": [1]}, "attn_layer_indices is"),
        ({"model_type": "odd_vl", "text_config": BARE}, "model_type is not in the language model"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    """In one sentence that says how to go on."""
    with pytest.raises(UnsupportedConfig, match=message) as caught:
        kv_budget(config, seq_len=10)
    assert str(caught.value).count(". ") == 0
    assert "overrides={" in str(caught.value)
    assert "kv_gib(layers, kv_heads, head_dim, seq_len)" in str(caught.value)


@pytest.mark.parametrize("name", sorted(OTHER_CACHES))
@pytest.mark.parametrize("model_type", [None, "llama", "brand_new"])
def test_a_field_of_another_kind_of_cache_is_refused(name: str, model_type: str | None) -> None:
    """Where the family does not look at it; null and false say nothing."""
    config = {**BARE, "num_key_value_heads": 2, "model_type": model_type}
    with pytest.raises(UnsupportedConfig, match=rf"\b{name}\b"):
        kv_budget({**config, name: 7}, seq_len=10)
    for nothing in (None, False):
        assert kv_budget({**config, name: nothing}, seq_len=10).layers == 4


@pytest.mark.parametrize("name", sorted(NOT_COUNTED))
def test_a_type_that_would_be_counted_wrongly_is_refused(name: str) -> None:
    config = {**BARE, "model_type": name, "num_key_value_heads": 2}
    with pytest.raises(UnsupportedConfig, match=r"model_type .* is not counted: "):
        kv_budget(config, seq_len=10)
    nested = {"model_type": name, "text_config": {**BARE, "model_type": "llama"}}
    with pytest.raises(UnsupportedConfig, match=r"model_type .* is not counted: "):
        kv_budget(nested, seq_len=10)
    assert kv_budget(config, seq_len=10, overrides={"model_type": None}).layers == 4


def test_fields_that_say_nothing_are_let_through() -> None:
    harmless = {"attention_dropout": 0.1, "layer_norm_eps": 1e-5, "moe_layer_freq": 2,
                "kv_lora_rank": None, "is_encoder_decoder": False, "layer_types": None}  # fmt: skip
    assert kv_budget({**BARE, "model_type": "brand_new", **harmless}, seq_len=1).layers == 4


# ---- overrides


def test_an_override_answers_a_refusal() -> None:
    config = {**BARE, "model_type": "new", "num_key_value_heads": 2, "kv_ring_size": 9}
    found = kv_budget(config, seq_len=10, overrides={"kv_ring_size": None})
    assert found.total_bytes == 2 * 4 * 2 * 8 * 10 * 2
    assert any("kv_ring_size was given by hand: None" in note for note in found.notes)


def test_an_override_replaces_a_field_of_the_language_model() -> None:
    config = CONFIGS["gemma-3-27b-it"]
    found = kv_budget(config, seq_len=10, overrides={"sliding_window": 7})
    assert {kind.window_tokens for kind in found.kinds} == {None, 7}
    wrong = {"num_key_value_heads": 3}
    with pytest.raises(UnsupportedConfig, match="num_key_value_heads is 3, which does not divide"):
        kv_budget(config, seq_len=10, overrides=wrong)


def test_an_override_with_null_means_the_field_is_absent() -> None:
    """Mistral: a null window means none, an absent one the class default."""
    config = {**BARE, "model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2}
    assert kv_budget(config, seq_len=1).kinds[0].window_tokens is None
    found = kv_budget(config, seq_len=1, overrides={"sliding_window": None})
    assert found.kinds[0].window_tokens == 4096


# ---- nested parts


@pytest.mark.parametrize("whole", sorted(TEXT_TYPES))
def test_a_part_without_a_type_has_that_of_the_whole(whole: str) -> None:
    part = {**BARE, "num_hidden_layers": 40, "num_key_value_heads": 8}
    found = kv_budget({"model_type": whole, "text_config": part}, seq_len=1)
    assert found.model_type == TEXT_TYPES[whole]


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_language_models_part_is_found(name: str) -> None:
    part = {**BARE, "model_type": "qwen2", "num_key_value_heads": 2}
    found = kv_budget({"model_type": "some_vl", "hidden_size": 9999, name: part}, seq_len=1)
    assert (found.model_type, found.bytes_per_token) == ("qwen2", 4 * 2 * 2 * 8 * 2)


def test_a_part_of_a_part_is_found() -> None:
    thinker = {"text_config": {**BARE, "model_type": "qwen3", "num_key_value_heads": 2}}
    found = kv_budget({"model_type": "some_omni", "thinker_config": thinker}, seq_len=1)
    assert found.model_type == "qwen3"
