"""Every causal language model of the installed transformers: our count against its own cache.

The class's defaults with few layers are built, run and counted by the probe. What the budget says
about the same fields must be equal, or be refused by a field's name; it may never differ.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gaac_lab.budget import UnsupportedConfig, kv_budget
from gaac_lab.cache_probe import CannotProbe, Probed, probe

SIX = {"num_hidden_layers": 6}
TWO_STACKS = {"decoder_layers": 3, "encoder_layers": 1}
SIX_KINDS = ["linear_attention", "linear_attention", "full_attention"] * 2
# Classes whose defaults do not make a model, or do not make one of six layers.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {**SIX, "attn_layer_indices": [2, 5]},
    "dots1": {**SIX, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n": {},
    "gemma3n_text": {},
    "gpt_neo": {"num_layers": 6, "attention_types": [[["global", "local"], 3]]},
    "granitemoehybrid": {**SIX, "layer_types": SIX_KINDS, "num_key_value_heads": 8},
    "lfm2_moe": {**SIX, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "nemotron": {**SIX, "num_key_value_heads": 8},
    "prophetnet": {"num_decoder_layers": 3, "num_encoder_layers": 3},
    "zamba": {"num_hidden_layers": 18},
    "zamba2": {},
    "dbrx": {
        "n_layers": 6,
        "d_model": 256,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
    },
    "longcat_flash": {"num_layers": 3},
    "mllama": {**SIX, "cross_attention_layers": [3]},
    "nemotron_h": {"layers_block_type": [*SIX_KINDS, "moe", "mlp"]},
    "hunyuan_v1_dense": {**SIX, "head_dim": 128},
    "hunyuan_v1_moe": {**SIX, "head_dim": 128},
    "ministral": {**SIX, "head_dim": 128},
    "xlm": {"emb_dim": 256, "n_layers": 6},
    "xmod": {**SIX, "default_language": "en_XX"},
}
NOT_A_CACHE = r"its past is in a \w+, not in a Cache of layers"
NO_DEFAULTS = "'NoneType' and 'NoneType'|has no attribute 'dropout'|KeyError: 'full_attention'"
CANNOT_BUILD: dict[str, str] = {
    "blt": "Tensor.item\\(\\) cannot be called on meta tensors",  # patches of bytes, by value
    "cohere_compass_text": NO_DEFAULTS,
    "cpmant": "broadcast a dimension",  # puts prompt tokens of its own before ours
    "deepseek_v4": "does not grow by the same bytes with every token",
    "dory": "size of tensor a",
    "gemma4_assistant": "refuses these fields",  # drafts for another model, from its cache
    "gemma4_unified_assistant": "get_seq_length",
    "musicgen": NO_DEFAULTS,
    "musicgen_melody": NO_DEFAULTS,
    "openai-gpt": NOT_A_CACHE,
    "qwen4_exp": NO_DEFAULTS,
    "qwen4_exp_text": NO_DEFAULTS,
    "recurrent_gemma": NOT_A_CACHE,
    "reformer": "mixed dtype",
    "rwkv": NOT_A_CACHE,
    "xlm": NOT_A_CACHE,
    "xlnet": "scalar type",
    "xlstm": NOT_A_CACHE,
}
# What is published of their states is another engine's: see test_budget_three_ways.
STATES_OF_OTHERS = ("falcon_h1", "jamba", "nemotron_h")
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOKENS, SEQUENCES, ENCODER_TOKENS = (9, 20_000), 2, 100


def short_fields(model_type: str) -> dict[str, Any]:
    """A short config.json of this type: how deep and wide it is, and what `FIELDS` adds."""
    cls = CONFIG_MAPPING[model_type]
    given = FIELDS.get(model_type, TWO_STACKS if hasattr(cls, "decoder_layers") else SIX)
    if "text_config" in cls.sub_configs and model_type not in CANNOT_BUILD:
        text = type(cls().text_config)(**given)
        return {"model_type": model_type, "text_config": {**_shape(text), **given}}
    try:
        config = cls(**given)
    except Exception:  # the class has no defaults of its own
        return {"model_type": model_type, **given}
    # Old encoders keep a cache only when they are told to be decoders.
    decoder = {"is_decoder": True} if getattr(config, "is_decoder", None) is False else {}
    return {"model_type": model_type, **_shape(config), **given, **decoder}


def _shape(config: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    own = [config.attribute_map.get(name, name) for name in names]
    own += ["decoder_layers", "decoder_attention_heads"]
    fields = config.to_dict()
    return {name: fields[name] for name in own if name in fields}


def differences(source: Any, probed: Probed) -> list[str]:
    """What the budget says that the cache does not. Raises UnsupportedConfig."""
    found = []
    for tokens in TOKENS:
        ours = kv_budget(source, seq_len=tokens, batch=SEQUENCES, encoder_tokens=ENCODER_TOKENS)
        pairs: dict[str, tuple[Any, Any]] = {
            f"total_bytes_transformers at {tokens}": (
                ours.total_bytes_transformers,
                probed.total_bytes(tokens, SEQUENCES),
            ),
            "fixed_state_bytes_transformers": (
                ours.fixed_state_bytes_transformers,
                probed.fixed_state_bytes_per_sequence * SEQUENCES,
            ),
            "layers_with_kv": (ours.layers_with_kv, probed.layers_with_kv),
            "bytes_per_token": (ours.bytes_per_token, probed.bytes_per_token),
            "bytes_per_token_below_window": (
                ours.bytes_per_token_below_window,
                probed.bytes_per_token_below_window,
            ),
        }
        if ours.model_type not in STATES_OF_OTHERS:
            state = probed.fixed_state_bytes_per_sequence * SEQUENCES
            pairs["fixed_state_bytes"] = (ours.fixed_state_bytes, state)
        if probed.cross_bytes_per_encoder_token is not None:
            pairs["cross_attention_bytes"] = (
                ours.cross_attention_bytes,
                probed.cross_bytes_per_encoder_token * ENCODER_TOKENS * SEQUENCES,
            )
        found += [f"{name}: {us}, really {it}" for name, (us, it) in pairs.items() if us != it]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in CANNOT_BUILD])
def test_the_budget_says_what_the_cache_holds_or_refuses(model_type: str) -> None:
    raw = short_fields(model_type)
    probed = probe(raw)
    config, refused = CONFIG_MAPPING[model_type].from_dict(raw), []
    for name, source in {"raw": raw, "saved": config.to_diff_dict(), "object": config}.items():
        try:
            assert differences(source, probed) == [], name
        except UnsupportedConfig as error:
            refused.append(str(error))
    assert all(re.search(r"overrides=\{'\w+': value\}", text) for text in refused), refused


@pytest.mark.parametrize("model_type", sorted(CANNOT_BUILD))
def test_what_cannot_be_built_still_cannot(model_type: str) -> None:
    with pytest.raises(CannotProbe, match=CANNOT_BUILD[model_type]):
        probe(short_fields(model_type))


def test_most_types_are_counted_and_not_refused() -> None:
    """So that a refusal of everything cannot pass."""
    counted = set()
    for model_type in TYPES:
        try:
            kv_budget(short_fields(model_type), seq_len=100)
            counted.add(model_type)
        except UnsupportedConfig:
            pass
    assert len(counted) >= 165
    assert {"llama", "qwen3", "mistral", "gemma3_text", "deepseek_v3", "qwen3_next"} <= counted
