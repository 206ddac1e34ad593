"""The KV budget, against published models, a second formula, and transformers' own caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from gaac_lab import budget
from gaac_lab.budget import UnsupportedConfig, format_bytes, kv_budget, kv_gib, tokens_that_fit
from gaac_lab.families import FAMILIES
from gaac_lab.paths import data_dir

CONFIGS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((data_dir() / "model_configs").glob("*.json"))
}
# These are not counted yet; each must be refused by the name of the field that says why.
REFUSED = {
    "deepseek-v2-lite": "kv_lora_rank",
    "deepseek-v3": "kv_lora_rank",
    "falcon-h1-7b-instruct": "mamba_d_state",
    "gemma-3n-e2b-it": "num_kv_shared_layers",
    "gemma-4-31b-it": "num_global_key_value_heads",
    "jamba-v0.1": "attn_layer_period",
    "llama-3-3-nemotron-super-49b-v1": "block_configs",
    "llama-4-scout-17b-16e-instruct": "attention_chunk_size",
    "mimo-v2-flash": "swa_num_key_value_heads",
    "nemotron-h-8b-base-8k": "hybrid_override_pattern",
    "qwen3-next-80b-a3b-instruct": "full_attention_interval",
    "t5-small": "num_decoder_layers",
}
COUNTED = sorted(set(CONFIGS) - set(REFUSED))
LLAMA = CONFIGS["llama-3.1-8b"]
MISTRAL = CONFIGS["mistral-7b-v0.1"]
GEMMA = CONFIGS["gemma-3-27b-it"]


def test_nothing_is_left_out() -> None:
    assert set(REFUSED) <= set(CONFIGS)
    assert len(COUNTED) >= 19


# ---- kv_gib


def test_the_formula() -> None:
    assert kv_gib(32, 8, 128, 32768) == 4.0
    assert kv_gib(32, 8, 128, 32768, batch=4) == 16.0
    assert kv_gib(32, 8, 128, 32768, dtype_bytes=1) == 2.0
    assert kv_gib(32, 8, 128, 32768, dtype_bytes=0.5) == 1.0
    assert kv_gib(32, 8, 128, 0) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0: give a whole number of at least 1"),
        ({"kv_heads": -8}, "kv_heads=-8"),
        ({"head_dim": 128.0}, "head_dim=128.0"),
        ({"seq_len": -1}, "seq_len=-1: give a whole number of at least 0"),
        ({"batch": True}, "batch=True"),
        ({"seq_len": "32768"}, "seq_len='32768'"),
        ({"dtype_bytes": 0}, "dtype_bytes=0"),
        ({"dtype_bytes": float("nan")}, "dtype_bytes=nan"),
    ],
)
def test_kv_gib_refuses_what_is_no_count(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_gib(**{"layers": 32, "kv_heads": 8, "head_dim": 128, "seq_len": 32768, **change})


# ---- published models


@pytest.mark.parametrize("stem", COUNTED)
def test_a_published_model_is_matched_to_the_byte(stem: str) -> None:
    config = CONFIGS[stem]
    expected = config["_about"]["expected"]
    found = kv_budget(data_dir() / "model_configs" / f"{stem}.json", seq_len=32768)
    assert found.bytes_per_token == expected["bytes_per_token"]
    assert found.bytes_per_token_below_window == expected["bytes_per_token_below_window"]
    assert found.total_bytes == expected["total_bytes_at_32768_tokens"]
    assert found.total_bytes == by_hand(config, 32768)
    assert format_bytes(found.total_bytes) in found.explanation


@pytest.mark.parametrize("stem", sorted(REFUSED))
def test_a_model_that_is_not_counted_is_refused_by_its_field(stem: str) -> None:
    with pytest.raises(UnsupportedConfig, match=rf"\b{REFUSED[stem]}\b.*kv_gib\(layers"):
        kv_budget(CONFIGS[stem], seq_len=32768)


def by_hand(config: dict[str, Any], tokens: int) -> int:
    """A second formula for the published configs that are counted, one layer at a time."""
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers")
    heads = text.get("num_attention_heads") or text.get("n_head")
    width = text.get("hidden_size") or text.get("n_embd") or 0
    dim = text.get("head_dim") or text.get("kv_channels") or width // heads
    kv_heads = text.get("num_key_value_heads") or text.get("multi_query_group_num")
    kv_heads = kv_heads or text.get("n_head_kv") or (1 if text.get("multi_query") else heads)
    full_every = {"mistral": 10**9, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
    every = full_every.get(text["model_type"], 1)
    total = 0
    for layer in range(1, layers + 1):
        slides = layer % every != 0
        total += kv_heads * dim * 4 * (min(tokens, text["sliding_window"]) if slides else tokens)
    return total


# ---- what transformers builds


def held_by_transformers(config: Any, tokens: int) -> int:
    """Bytes by transformers' own config classes and the layers of its DynamicCache."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if text.model_type in MULTI_QUERY:
        kv_heads = 1 if text.multi_query else heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=text).layers]
    return sum(kv_heads * dim * 4 * min(tokens, window or tokens) for window in windows)


MULTI_QUERY = {"falcon", "gpt_bigcode"}  # whose attention looks at multi_query and nothing else
OURS_ALONE = {"chatglm", "RefinedWeb", "RefinedWebModel"}  # not among transformers' own classes
SHAPE = {"num_hidden_layers": 12, "num_attention_heads": 64, "hidden_size": 64 * 48}
SHORT = {"n_layer": 12, "n_head": 64, "n_embd": 64 * 48}
NAMES = {
    "bloom": {"n_layer": 12, "n_head": 64, "hidden_size": 64 * 48},
    "codegen": SHORT,
    "gpt2": SHORT,
    "gpt_bigcode": SHORT,
    "gptj": SHORT,
}
KV_FIELD: dict[str, dict[str, Any]] = {
    "absent": {},
    "given": {"num_key_value_heads": 16},
    "null": {"num_key_value_heads": None},
}


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - OURS_ALONE))
@pytest.mark.parametrize("kv", ["absent", "given", "null"])
def test_every_family_agrees_with_its_class(model_type: str, kv: str) -> None:
    """The raw fields and the config object give what the class gives, or are refused.

    Absent and null are not the same: the first means the class default, the second may mean one KV
    head per attention head, or nothing that the class or its model can use.
    """
    fields = {**NAMES.get(model_type, SHAPE), **KV_FIELD[kv]}
    raw = {"model_type": model_type, **fields}
    refusal = _why_the_class_cannot(model_type, fields)
    if refusal:
        with pytest.raises(UnsupportedConfig, match=rf"num_key_value_heads {refusal}"):
            kv_budget(raw, seq_len=10)
        return
    config = CONFIG_MAPPING[model_type](**fields)
    for tokens in (1, 100, 2000):
        expected = held_by_transformers(config, tokens)
        assert kv_budget(raw, seq_len=tokens).total_bytes == expected
        assert kv_budget(config, seq_len=tokens).total_bytes == expected


def _why_the_class_cannot(model_type: str, fields: dict[str, Any]) -> str | None:
    """The words of our refusal where transformers has no answer either, else None."""
    if model_type in MULTI_QUERY:
        return None
    if not hasattr(CONFIG_MAPPING[model_type](), "num_key_value_heads"):
        return "is 16" if fields.get("num_key_value_heads") else None
    try:
        kv_heads = CONFIG_MAPPING[model_type](**fields).num_key_value_heads
    except Exception:  # a class that wants a number
        return "is None"
    if kv_heads is None:  # accepted by the class, divided by in the model
        return "is None" if "num_key_value_heads" in fields else "is not in the config"
    return f"is {kv_heads}, which does not divide" if 64 % kv_heads else None


TINY = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
TINY_GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 64}
REAL = {
    "llama": {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    "mistral": {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16},
    "gemma3_text": {**TINY, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
                    "sliding_window": 16},
    "gpt_oss": {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "falcon": {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
               "vocab_size": 64, "multi_query": True},
    "gpt2": TINY_GPT2,
    "gpt_bigcode": {**TINY_GPT2, "multi_query": True},
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(REAL))
def test_a_real_cache_holds_as_many_bytes(model_type: str) -> None:
    """Tiny random models; between steps transformers keeps one token less in each window."""
    config = CONFIG_MAPPING[model_type](**REAL[model_type], pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = 40
    with torch.inference_mode():
        cache = model(torch.ones(2, tokens, dtype=torch.int64), use_cache=True)["past_key_values"]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    found = kv_budget(config, seq_len=tokens, batch=2)
    missing = sum(
        kind.layers * kind.bytes_per_token for kind in found.kinds if kind.window_tokens is not None
    )
    assert held == found.total_bytes - 2 * missing


# ---- lengths, batches, dtypes


def test_batch_and_dtype_multiply() -> None:
    one = kv_budget(GEMMA, seq_len=5000)
    assert kv_budget(GEMMA, seq_len=5000, batch=3).total_bytes == 3 * one.total_bytes
    for name, factor in (("float32", 2), ("fp16", 1), ("float8", 0.5), ("int8", 0.5)):
        assert kv_budget(GEMMA, seq_len=5000, dtype=name).total_bytes == factor * one.total_bytes
    assert kv_budget(GEMMA, seq_len=5000, dtype=torch.float16).bytes_per_value == 2
    assert kv_budget(GEMMA, seq_len=5000, dtype=torch.float8_e4m3fn).bytes_per_value == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": -1}, "seq_len=-1"),
        ({"seq_len": 1.5}, "seq_len=1.5"),
        ({"seq_len": 8, "batch": 0}, "batch=0"),
        ({"seq_len": 8, "dtype": "int3"}, "dtype='int3' is not known: give one of"),
    ],
)
def test_bad_lengths_batches_and_dtypes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_budget(LLAMA, **options)


def test_windows_are_told_apart_from_full_layers() -> None:
    found = kv_budget(GEMMA, seq_len=32768)
    assert (found.layers, found.layers_with_kv, found.layers_with_window) == (62, 62, 52)
    full, sliding = found.kinds
    assert (full.layers, full.window_tokens, full.kv_heads, full.k_head_dim) == (10, None, 16, 128)
    assert (sliding.layers, sliding.window_tokens) == (52, 1024)
    assert "10 layers × 16 KV heads × 2 (K, V) × 128 head_dim × 32,768 tokens" in found.explanation
    assert "(window 1,024)" in found.explanation
    assert found.total_gib == found.total_bytes / 2**30


def test_notes_say_what_surprises() -> None:
    notes = kv_budget(CONFIGS["qwen3-0.6b"], seq_len=100_000).notes
    assert any("head_dim 128 counts" in note and "= 64" in note for note in notes)
    assert any("more than the model's context of 40,960" in note for note in notes)
    assert not kv_budget(LLAMA, seq_len=1000).notes
    falcon = kv_budget(CONFIGS["falcon-40b-instruct"], seq_len=10).notes
    assert any("16 times as much" in note for note in falcon)


# ---- the inverse


@pytest.mark.parametrize("stem", ["llama-3.1-8b", "gemma-2-9b", "gemma-3-1b-it", "gpt-oss-20b"])
@pytest.mark.parametrize("memory_bytes", [0, 1, 10**6, 2**30, 10**10 + 7])
def test_the_tokens_that_fit_are_the_most_that_do(stem: str, memory_bytes: int) -> None:
    config = CONFIGS[stem]
    found = tokens_that_fit(config, memory_bytes, batch=2)
    assert found is not None
    assert kv_budget(config, seq_len=found, batch=2).total_bytes <= memory_bytes
    assert kv_budget(config, seq_len=found + 1, batch=2).total_bytes > memory_bytes


def test_where_every_layer_slides_nothing_grows_for_ever() -> None:
    cap = kv_budget(MISTRAL, seq_len=10**6).total_bytes
    assert cap == 512 * 2**20
    assert tokens_that_fit(MISTRAL, cap) is None
    assert tokens_that_fit(MISTRAL, cap - 1) == 4095


# ---- where a config comes from


def test_dict_file_folder_and_object_agree(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    config = CONFIG_MAPPING["llama"](
        **{k: v for k, v in LLAMA.items() if k not in ("model_type", "_about")}
    )
    found = [kv_budget(source, seq_len=99) for source in (LLAMA, path, str(tmp_path), config)]
    assert len({entry.total_bytes for entry in found}) == 1


def test_reading_leaves_the_config_alone() -> None:
    before = json.dumps(GEMMA)
    kv_budget(GEMMA, seq_len=8)
    assert json.dumps(GEMMA) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "There is no config at"),
        ("<<<<<<< HEAD\n{}", "is not valid JSON"),
        ("[1, 2]", "holds no JSON object"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnsupportedConfig, match=message):
        kv_budget(path, seq_len=8)


def test_something_else_is_refused() -> None:
    with pytest.raises(UnsupportedConfig, match="cannot be read from int"):
        kv_budget(7, seq_len=8)


# ---- strictness: absent, null and class default are three things

BARE = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


def test_fields_alone_are_enough() -> None:
    found = kv_budget({**BARE, "num_key_value_heads": 2}, seq_len=10)
    assert found.total_bytes == 2 * 4 * 2 * 8 * 10 * 2
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


@pytest.mark.parametrize(
    ("model_type", "change", "expected"),
    [
        ("mistral", {}, 4096),  # absent: the class default
        ("mistral", {"sliding_window": None}, None),  # null: no window
        ("mistral", {"sliding_window": 77}, 77),
        ("mixtral", {}, None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 77}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 77, "max_window_layers": 0}, 77),
    ],
)
def test_windows_absent_null_and_given(
    model_type: str, change: dict[str, Any], expected: int | None
) -> None:
    config = {**BARE, "model_type": model_type, "num_key_value_heads": 2, **change}
    (kind,) = kv_budget(config, seq_len=10).kinds
    assert kind.window_tokens == expected


def test_falcon_heads() -> None:
    def heads(**fields: Any) -> int:
        config = {"model_type": "falcon", **BARE, **fields}
        return kv_budget(config, seq_len=1).kinds[0].kv_heads

    assert heads() == 1  # multi_query is the class default
    assert heads(multi_query=True, num_kv_heads=8) == 1  # what AutoConfig fills in says nothing
    assert heads(multi_query=False) == 8
    assert heads(new_decoder_architecture=True, num_kv_heads=2) == 2
    assert heads(new_decoder_architecture=True, n_head_kv=4) == 4


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
        ({**BARE, "layer_types": ["mamba"] * 4}, "layer_types holds mamba"),
        ({**BARE, "cache_every_other_layer": True}, "cache_every_other_layer is not understood"),
        ({**BARE, "model_type": "new", "kv_ring_size": 9}, "new: kv_ring_size is not understood"),
        ({**BARE, "is_encoder_decoder": True}, "is_encoder_decoder is set"),
        ({**BARE, "model_type": "falcon", "multi_query": "yes"}, "multi_query is 'yes'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=message) as caught:
        kv_budget(config, seq_len=10)
    assert str(caught.value).count(". ") == 0  # one sentence


def test_fields_that_say_nothing_are_let_through() -> None:
    harmless = {"attention_dropout": 0.1, "layer_norm_eps": 1e-5, "moe_layer_freq": 2,
                "kv_lora_rank": None, "is_encoder_decoder": False, "layer_types": None}  # fmt: skip
    assert kv_budget({**BARE, "model_type": "brand_new", **harmless}, seq_len=1).layers == 4


# ---- the formatter


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (4 * 2**30, "4.00 GiB (4.29 GB)"),
        (512, "512 B"),
        (0, "0 B"),
        (1536, "1.50 KiB (1.54 kB)"),
        (536_870_912, "512.00 MiB (536.87 MB)"),
        (3 * 2**40, "3.00 TiB (3.30 TB)"),
        (-(2**30), "-1.00 GiB (-1.07 GB)"),
        (None, "unknown"),
    ],
)
def test_format_bytes(size_bytes: int | None, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_dtype_bytes() -> None:
    assert budget.dtype_bytes("BF16") == 2
    assert budget.dtype_bytes(torch.float32) == 4
