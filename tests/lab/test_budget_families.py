"""Families with rules of their own: latents, shared and uneven layers, states, two lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gaac_lab.budget import UnsupportedConfig, kv_budget, tokens_that_fit
from tests.lab.published import CONFIGS

BARE = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


def changed(stem: str, **change: Any) -> dict[str, Any]:
    """A published config with some fields of its language model replaced."""
    config = copy.deepcopy(CONFIGS[stem])
    config.get("text_config", config).update(change)
    return config


# ---- latent attention


def test_latents_and_what_they_stand_for() -> None:
    """DeepSeek-V3: 576 values a token and layer, or 128 heads x (192 K + 128 V)."""
    found = kv_budget(CONFIGS["deepseek-v3"], seq_len=1000)
    assert found.bytes_per_token == 61 * 576 * 2 == 70_272
    assert found.expanded_bytes_per_token == 61 * 128 * (192 + 128) * 2 == 4_997_120
    assert found.expanded_total_bytes == 1000 * 4_997_120
    assert found.total_bytes_transformers == found.total_bytes
    assert any("multi-token prediction" in note for note in found.notes)
    lite = kv_budget(CONFIGS["deepseek-v2-lite"], seq_len=1)
    assert lite.expanded_bytes_per_token == 276_480  # measured before transformers kept latents
    assert kv_budget(CONFIGS["llama-3.1-8b"], seq_len=1).expanded_total_bytes is None


def test_an_indexer_keeps_keys_of_its_own() -> None:
    """DeepSeek V3.2 in every layer; a step reads all of them, and 2,048 latents."""
    fields = {k: v for k, v in CONFIGS["deepseek-v3"].items() if k != "_about"}
    config = {**fields, "model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}
    found = kv_budget(config, seq_len=100_000)
    assert found.bytes_per_token == 61 * (576 + 128) * 2
    assert found.read_bytes_per_step == 61 * 2 * (128 * 100_000 + 576 * 2048)
    with pytest.raises(UnsupportedConfig, match="deepseek_v3: index_head_dim is set"):
        kv_budget({**config, "model_type": "deepseek_v3"}, seq_len=1)


def test_shared_indexers_keep_none() -> None:
    config = {**BARE, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"] * 2}
    assert kv_budget(config, seq_len=1).bytes_per_token == (4 * 576 + 2 * 128) * 2
    by_frequency = {**BARE, "model_type": "glm_moe_dsa", "index_topk_freq": 2}
    assert kv_budget(by_frequency, seq_len=1).bytes_per_token == (4 * 576 + 3 * 128) * 2


# ---- uneven layers


def test_two_geometries() -> None:
    """Gemma 4: full layers with 4 KV heads of 512, sliding ones with 16 of 256."""
    full, sliding = kv_budget(CONFIGS["gemma-4-31b-it"], seq_len=1).kinds
    assert (full.layers, full.kv_heads, full.k_head_dim) == (10, 4, 512)
    assert (sliding.layers, sliding.kv_heads, sliding.k_head_dim) == (50, 16, 256)
    own = changed("gemma-4-31b-it", attention_k_eq_v=False)
    assert kv_budget(own, seq_len=1).kinds[0].kv_heads == 16  # KV heads of their own only with it


def test_shared_layers_absent_null_and_given() -> None:
    def layers(**change: Any) -> tuple[int, int]:
        found = kv_budget(changed("gemma-3n-e2b-it", **change), seq_len=1)
        return found.layers_with_kv, found.layers_that_share

    assert layers(num_kv_shared_layers=0) == (30, 0)
    assert layers(num_kv_shared_layers=10) == (20, 10)
    config = changed("gemma-3n-e2b-it")
    del config["text_config"]["num_kv_shared_layers"]
    found = kv_budget(config, seq_len=1)
    assert (found.layers_with_kv, found.layers_that_share) == (15, 15)
    assert any("the class default 15 was used" in note for note in found.notes)
    for wrong in (None, 30, -1, True):
        with pytest.raises(UnsupportedConfig, match="num_kv_shared_layers is"):
            layers(num_kv_shared_layers=wrong)


def test_cross_layer_attention_keeps_every_second_layer() -> None:
    config = {**BARE, "model_type": "hunyuan", "num_key_value_heads": 2, "use_cla": True}
    found = kv_budget({**config, "cla_share_factor": 2}, seq_len=100)
    assert (found.layers_with_kv, found.layers_that_share) == (2, 2)
    assert found.read_bytes_per_step == 2 * found.total_bytes
    with pytest.raises(UnsupportedConfig, match="cla_share_factor is not in the config"):
        kv_budget(config, seq_len=1)
    with pytest.raises(UnsupportedConfig, match="llama: use_cla is set"):
        kv_budget({**config, "model_type": "llama"}, seq_len=1)


def test_mimos_window_in_files_and_in_transformers() -> None:
    """sliding_window as it stands; sliding_window_size is one less than transformers' window."""
    step = 39 * 8 * (192 + 128) * 2
    plain = kv_budget(CONFIGS["mimo-v2-flash"], seq_len=1000)
    assert plain.total_bytes_transformers == plain.total_bytes - step
    sized = kv_budget(changed("mimo-v2-flash", sliding_window_size=128), seq_len=1000)
    assert sized.total_bytes_transformers == sized.total_bytes == plain.total_bytes


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"attention": {"n_heads_in_group": 7}}, "block_configs has 7 heads a KV head in block 0"),
        ({"attention": {}}, "block_configs is not in the config"),
        ({"ffn": {}}, "block_configs has no attention in block 0"),
        (
            {"attention": {"n_heads_in_group": 8, "window_length": 9}},
            "block_configs has a window in block 0",
        ),
    ],
)
def test_a_block_that_is_not_understood(block: dict[str, Any], message: str) -> None:
    stem = "llama-3-3-nemotron-super-49b-v1"
    blocks = [block, *CONFIGS[stem]["block_configs"][1:]]
    with pytest.raises(UnsupportedConfig, match=message):
        kv_budget(changed(stem, block_configs=blocks), seq_len=1)


def test_falcon_heads() -> None:
    def heads(**fields: Any) -> int:
        config = {"model_type": "falcon", **BARE, **fields}
        return kv_budget(config, seq_len=1).kinds[0].kv_heads

    assert heads() == 1  # multi_query is the class default
    assert heads(multi_query=True, num_kv_heads=8) == 1  # what AutoConfig fills in says nothing
    assert heads(multi_query=False) == 8
    assert heads(new_decoder_architecture=True, num_kv_heads=2) == 2
    assert heads(new_decoder_architecture=True, n_head_kv=4) == 4


def test_what_transformers_stores_of_falcon_40b() -> None:
    found = kv_budget(CONFIGS["falcon-40b-instruct"], seq_len=1)
    assert found.total_bytes_transformers == 16 * found.total_bytes == 1_966_080


def test_nested_kv_heads() -> None:
    shape = {"n_layers": 4, "n_heads": 8, "d_model": 64}

    def heads(model_type: str, **attention: Any) -> int:
        config = {"model_type": model_type, **shape, "attn_config": attention}
        return kv_budget(config, seq_len=1).kinds[0].kv_heads

    assert heads("mpt") == 8
    assert heads("mpt", attn_type="multiquery_attention") == 1
    assert heads("mpt", attn_type="grouped_query_attention", kv_n_heads=2) == 2
    assert heads("dbrx", kv_n_heads=4) == 4
    with pytest.raises(UnsupportedConfig, match="attn_config has the attn_type 'odd'"):
        heads("mpt", attn_type="odd")
    with pytest.raises(UnsupportedConfig, match="kv_n_heads is not in the config"):
        heads("mpt", attn_type="grouped_query_attention")


# ---- fixed states


@pytest.mark.parametrize(
    ("stem", "with_kv", "with_state"),
    [
        ("jamba-v0.1", 4, 28),
        ("qwen3-next-80b-a3b-instruct", 12, 36),
        ("falcon-h1-7b-instruct", 44, 44),
        ("nemotron-h-8b-base-8k", 4, 24),
        ("llama-3.1-8b", 32, 0),
    ],
)
def test_how_many_layers_keep_what(stem: str, with_kv: int, with_state: int) -> None:
    found = kv_budget(CONFIGS[stem], seq_len=100, batch=3)
    assert (found.layers_with_kv, found.layers_with_state) == (with_kv, with_state)
    assert found.stored_bytes == found.total_bytes + found.fixed_state_bytes
    assert found.fixed_state_bytes == 3 * kv_budget(CONFIGS[stem], seq_len=0).fixed_state_bytes
    assert (found.fixed_state_bytes > 0) == (with_state > 0)


def test_recurrent_states_are_float32_whatever_the_cache_is() -> None:
    """Qwen3-Next: a matrix of 32 heads x 128 x 128 in float32, 4 columns of 8,192 in the type."""
    config = CONFIGS["qwen3-next-80b-a3b-instruct"]
    matrix, columns = 32 * 128 * 128, 4 * 8192
    for dtype, size in (("bfloat16", 2), ("float32", 4), ("int8", 2)):
        found = kv_budget(config, seq_len=0, dtype=dtype)
        assert found.fixed_state_bytes == 36 * (4 * matrix + size * columns)


def test_the_type_of_nemotrons_state_can_be_given() -> None:
    stem = "nemotron-h-8b-base-8k"
    matrix, columns = 128 * 64 * 128, 3 * (8192 + 2 * 8 * 128)
    for named, size in (("float32", 4), ("bfloat16", 2), ("auto", 2)):
        found = kv_budget(changed(stem, mamba_ssm_cache_dtype=named), seq_len=0)
        assert found.fixed_state_bytes == 24 * (size * matrix + 2 * columns)
    with pytest.raises(UnsupportedConfig, match="mamba_ssm_cache_dtype is 'int4'"):
        kv_budget(changed(stem, mamba_ssm_cache_dtype="int4"), seq_len=0)


def test_no_attention_means_no_kv() -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 24, "hidden_size": 768,
              "state_size": 16, "conv_kernel": 4, "expand": 2}  # fmt: skip
    found = kv_budget(config, seq_len=10**6)
    assert (found.bytes_per_token, found.total_bytes, found.layers_with_kv) == (0, 0, 0)
    assert found.fixed_state_bytes == 24 * 1536 * (4 * 2 + 16 * 4)
    assert "none of 24 layers holds KV" in found.explanation
    assert tokens_that_fit(config, found.fixed_state_bytes) is None
    assert tokens_that_fit(config, found.fixed_state_bytes - 1) == 0


def test_layer_lists_decide_over_intervals() -> None:
    """Published Qwen3-Next files carry both."""
    kinds = ["linear_attention"] * 24 + ["full_attention"] * 24
    both = changed("qwen3-next-80b-a3b-instruct", layer_types=kinds)
    assert kv_budget(both, seq_len=1).layers_with_kv == 24
    every_6th = changed("qwen3-next-80b-a3b-instruct", full_attention_interval=6)
    assert kv_budget(every_6th, seq_len=1).layers_with_kv == 8


def test_kimi_lists_layers_from_1() -> None:
    nested = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 16, "num_heads": 2,
              "short_conv_kernel_size": 4}  # fmt: skip
    config = {**BARE, "model_type": "kimi_linear", "linear_attn_config": nested}
    found = kv_budget(config, seq_len=1)
    assert (found.layers_with_kv, found.layers_with_state) == (1, 3)
    assert found.bytes_per_token == 576 * 2
    assert found.fixed_state_bytes == 3 * (3 * 32 * 4 * 2 + 2 * 16 * 16 * 4)
    with pytest.raises(UnsupportedConfig, match="does not name each of 4 layers once"):
        kv_budget({**config, "linear_attn_config": {**nested, "kda_layers": [1, 2]}}, seq_len=1)


def test_minimax_text_01_lists_its_kinds() -> None:
    config = {**BARE, "model_type": "minimax_text_01", "num_key_value_heads": 2}
    found = kv_budget({**config, "attn_type_list": [0, 0, 0, 1]}, seq_len=1)
    assert (found.layers_with_kv, found.layers_with_state) == (1, 3)
    assert found.total_bytes_transformers is None
    with pytest.raises(UnsupportedConfig, match="attn_type_list is ABSENT"):
        kv_budget(config, seq_len=1)


def test_minimax_m2_has_the_list_and_only_full_layers() -> None:
    config = {**BARE, "model_type": "minimax_m2", "num_key_value_heads": 2}
    assert kv_budget({**config, "attn_type_list": [1] * 4}, seq_len=1).layers_with_kv == 4
    with pytest.raises(UnsupportedConfig, match="attn_type_list has layers that are not full"):
        kv_budget({**config, "attn_type_list": [1, 1, 0, 1]}, seq_len=1)


# ---- two lengths


def test_the_cross_cache_is_a_line_of_its_own() -> None:
    unknown = kv_budget(CONFIGS["t5-small"], seq_len=100)
    assert unknown.cross_attention_bytes is None
    assert unknown.stored_bytes == unknown.total_bytes
    assert any("give its length with encoder_tokens" in note for note in unknown.notes)
    found = kv_budget(CONFIGS["t5-small"], seq_len=100, batch=2, encoder_tokens=40)
    assert found.cross_attention_bytes == 2 * 40 * 12_288
    assert found.stored_bytes == found.total_bytes + found.cross_attention_bytes
    room = found.stored_bytes
    assert tokens_that_fit(CONFIGS["t5-small"], room, batch=2, encoder_tokens=40) == 100
    assert kv_budget(CONFIGS["llama-3.1-8b"], seq_len=1).cross_attention_bytes == 0


def test_the_images_layers_do_not_grow_with_the_text() -> None:
    nested = {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
              "hidden_size": 4096, "cross_attention_layers": [3, 8]}  # fmt: skip
    config = {"model_type": "mllama", "text_config": nested}
    found = kv_budget(config, seq_len=1, encoder_tokens=1601)
    assert found.layers_with_kv == 38
    assert found.bytes_per_token == 38 * 8 * 2 * 128 * 2
    assert found.cross_attention_bytes == 2 * 8 * 2 * 128 * 2 * 1601


def test_a_decoder_with_its_own_layers_and_heads() -> None:
    """Whisper: the encoder's layers and heads say nothing."""
    config = {"model_type": "whisper", "d_model": 64, "encoder_layers": 9, "decoder_layers": 2,
              "encoder_attention_heads": 16, "decoder_attention_heads": 4,
              "is_encoder_decoder": True, "max_source_positions": 1500}  # fmt: skip
    found = kv_budget(config, seq_len=1)
    assert found.bytes_per_token == 2 * 64 * 2 * 2
    assert any("at most 1,500 tokens" in note for note in found.notes)


def test_gpt2_looks_at_an_encoder_if_told() -> None:
    plain = kv_budget(CONFIGS["gpt2"], seq_len=1)
    both = kv_budget(changed("gpt2", add_cross_attention=True), seq_len=1, encoder_tokens=10)
    assert both.total_bytes == plain.total_bytes
    assert both.cross_attention_bytes == 10 * plain.bytes_per_token
    with pytest.raises(UnsupportedConfig, match="llama: add_cross_attention is set"):
        kv_budget(changed("llama-3.1-8b", add_cross_attention=True), seq_len=1)
