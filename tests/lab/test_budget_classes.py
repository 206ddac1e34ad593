"""Every family against transformers' config class: raw fields, and what the class makes of them.

The class fills in what is absent. That the filled-in config is counted as the real cache holds it,
test_budget_sweep shows; here the raw fields must give the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from gaac_lab.budget import KVBudget, UnsupportedConfig, kv_budget
from gaac_lab.families.table import FAMILIES, geometry

# Families of remote code only, or of names that transformers does not have.
WITHOUT_CLASS = {
    "RefinedWeb", "RefinedWebModel", "baichuan", "chatglm", "hunyuan", "internlm", "internlm2",
    "kimi_k2", "minimax_m1", "minimax_text_01", "nemotron-nas",
}  # fmt: skip
SHAPE = {"num_hidden_layers": 12, "num_attention_heads": 64, "hidden_size": 64 * 48,
         "max_position_embeddings": 65536}  # fmt: skip
TAKING_TURNS = ["linear_attention", "full_attention"] * 6
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3, 9]},
    "gemma3n_text": {"num_hidden_layers": 35},
    "gpt_neo": {"attention_types": [[["global", "local"], 6]]},
    "granitemoehybrid": {"layer_types": TAKING_TURNS},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 6},
    "mamba2": {"num_heads": 96},
    "mllama_text_model": {"num_hidden_layers": 40},
    # without it we count the published size, which is not the class default
    "nemotron_h": {"hybrid_override_pattern": "M-M*" * 3, "mamba_ssm_cache_dtype": "float32"},
    "zamba2": {"num_hidden_layers": 54},
}
KV_FIELD: dict[str, dict[str, Any]] = {
    "absent": {},
    "given": {"num_key_value_heads": 16},
    "null": {"num_key_value_heads": None},
}


def raw_fields(model_type: str, kv: str) -> dict[str, Any]:
    """A short config.json of the family, under the names of its class."""
    shape = {**SHAPE, **MORE.get(model_type, {})}
    if model_type == "longcat_flash":
        shape["num_layers"] = shape.pop("num_hidden_layers") // 2
    if model_type == "prophetnet":
        del shape["num_hidden_layers"]
        shape |= {"num_decoder_layers": 12, "num_decoder_attention_heads": 64}
    names = getattr(CONFIG_MAPPING[model_type], "attribute_map", {})
    fields = {names.get(name, name): value for name, value in shape.items()}
    if "encoder_layers" in fields:
        fields |= {"decoder_layers": 12, "decoder_attention_heads": 64}
    if hasattr(CONFIG_MAPPING[model_type](), "is_decoder"):
        fields["is_decoder"] = True
    return {"model_type": model_type, **fields, **KV_FIELD[kv]}


def sizes(found: KVBudget) -> tuple[Any, ...]:
    return (
        found.layers_with_kv,
        found.bytes_per_token,
        found.bytes_per_token_below_window,
        found.stored_bytes,
        found.read_bytes_per_step,
        found.total_bytes_transformers,
        found.fixed_state_bytes,
    )


def test_no_family_is_left_out() -> None:
    assert {name for name in FAMILIES if name not in CONFIG_MAPPING} == WITHOUT_CLASS
    assert len(FAMILIES) > 150


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - WITHOUT_CLASS))
@pytest.mark.parametrize("kv", sorted(KV_FIELD))
def test_raw_fields_and_the_class_agree(model_type: str, kv: str) -> None:
    """Absent, given and null KV heads: the same bytes by both, or a refusal by name.

    Absent and null are not the same: the first means the class default, the second may mean one KV
    head per attention head, or nothing that the class can use.
    """
    raw = raw_fields(model_type, kv)
    config = _by_class(raw)
    by_class = None if config is None else _budgets(config)
    if config is None and hasattr(CONFIG_MAPPING[model_type](), "kv_lora_rank"):
        return  # the class wants a number, and latents have no KV heads
    if by_class is None:
        with pytest.raises(UnsupportedConfig, match="num_key_value_heads"):
            kv_budget(raw, seq_len=10)
        return
    assert _budgets(raw) == by_class


def _by_class(raw: dict[str, Any]) -> Any:
    """The class's config; None where it refuses a null."""
    try:
        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    except Exception:
        if raw.get("num_key_value_heads", 0) is not None:
            raise
        return None


def _budgets(config: Any) -> list[tuple[Any, ...]] | None:
    """The sizes at a short and a long length; None where the KV heads are refused."""
    try:
        return [sizes(kv_budget(config, seq_len=tokens)) for tokens in (9, 20_000)]
    except UnsupportedConfig as error:
        if "num_key_value_heads" in str(error):
            return None
        raise


WINDOWED = [
    ("mistral", {}, 4096),  # absent: the class default
    ("mistral", {"sliding_window": None}, None),  # null: no window
    ("mistral", {"sliding_window": 77}, 77),
    ("mixtral", {}, None),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 77}, None),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 77, "max_window_layers": 0}, 77),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 77}, 77),
    ("qwen3_moe", {"sliding_window": 77}, None),
    ("phi3", {"sliding_window": 77}, 77),
    ("phi3", {"sliding_window": 262_144, "max_position_embeddings": 131_072}, None),
    ("exaone4", {"sliding_window": None}, None),
]
BARE = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64,
        "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize(("model_type", "change", "expected"), WINDOWED)
def test_windows_absent_null_and_given(
    model_type: str, change: dict[str, Any], expected: int | None
) -> None:
    (kind,) = kv_budget({**BARE, "model_type": model_type, **change}, seq_len=10).kinds
    assert kind.window_tokens == expected


@pytest.mark.parametrize(
    ("model_type", "change", "full"),
    [
        ("gemma2", {}, [1, 3, 5, 7, 9, 11]),
        ("gemma3_text", {}, [5, 11]),
        ("gemma3_text", {"sliding_window_pattern": 4}, [3, 7, 11]),
        ("cohere2", {}, [3, 7, 11]),
        ("cwm", {}, [0, 4, 8]),
        ("llama4_text", {}, [3, 7, 11]),
        ("llama4_text", {"no_rope_layers": [1] * 11 + [0]}, [11]),
        ("llama4_text", {"attention_chunk_size": None}, list(range(12))),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 9}, list(range(9))),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}, [1, 3, *range(4, 12)]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9},
         [n for n in range(12) if n % 4 != 3]),
        ("gemma2", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"] * 7},
         [0, 1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_which_layers_are_full(model_type: str, change: dict[str, Any], full: list[int]) -> None:
    """By the layers that transformers builds, and by ours."""
    from transformers import DynamicCache

    raw = {**raw_fields(model_type, "absent"), **change}
    layers = DynamicCache(config=CONFIG_MAPPING[model_type].from_dict(raw)).layers
    built = [n for n, layer in enumerate(layers) if getattr(layer, "sliding_window", None) is None]
    assert built == full
    ours = geometry(raw).kv_layers
    assert [n for n, layer in enumerate(ours) if layer.window_tokens is None] == full
