"""The KV budget: published models, the formula, lengths and batches, and its inverse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from gaac_lab import budget
from gaac_lab.budget import (
    UnsupportedConfig,
    format_bytes,
    kv_budget,
    kv_gib,
    read_bytes_per_step,
    stored_bytes,
    tokens_that_fit,
)
from gaac_lab.budget_text import parse_bytes
from tests.lab.published import CONFIGS, path_of

LLAMA = CONFIGS["llama-3.1-8b"]
MISTRAL = CONFIGS["mistral-7b-v0.1"]
GEMMA = CONFIGS["gemma-3-27b-it"]


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


def test_there_are_all_of_them() -> None:
    assert len(CONFIGS) == 31


@pytest.mark.parametrize("stem", sorted(CONFIGS))
def test_a_published_model_is_matched_to_the_byte(stem: str) -> None:
    expected = CONFIGS[stem]["_about"]["expected"]
    found = kv_budget(path_of(stem), seq_len=32768)
    assert found.bytes_per_token == expected["bytes_per_token"]
    assert found.bytes_per_token_below_window == expected["bytes_per_token_below_window"]
    assert found.total_bytes == expected["total_bytes_at_32768_tokens"]
    assert found.fixed_state_bytes == (expected["fixed_state_bytes"] or 0)
    assert format_bytes(found.total_bytes) in found.explanation
    assert found.stored_bytes >= found.total_bytes + found.fixed_state_bytes
    for mistake, wrong in CONFIGS[stem]["_about"]["wrong_bytes_per_token"].items():
        assert found.bytes_per_token != wrong, mistake


@pytest.mark.parametrize("stem", sorted(CONFIGS))
@pytest.mark.parametrize("tokens", [1, 100, 5000, 200_000])
def test_the_total_is_what_the_rates_and_the_cap_say(stem: str, tokens: int) -> None:
    """Below every window by one rate, beyond them by the other, on top of what the windows hold."""
    found = kv_budget(CONFIGS[stem], seq_len=tokens, batch=3)
    bounds = [kind.window_tokens for kind in found.kinds if kind.window_tokens is not None]
    if tokens <= min(bounds, default=tokens):
        assert found.total_bytes == 3 * tokens * found.bytes_per_token_below_window
    if tokens >= max(bounds, default=0):
        cap = found.window_cap_bytes or 0
        assert found.total_bytes == 3 * tokens * found.bytes_per_token + cap
    assert (found.window_cap_bytes is None) == (not bounds)


def test_llama_2_70b_at_128k_takes_40_gib() -> None:
    """The same with one KV head per attention head would be 8 times as much."""
    found = kv_budget(CONFIGS["llama-2-70b-hf"], seq_len=131_072)
    assert found.total_gib == 40.0
    every_head = kv_budget(
        CONFIGS["llama-2-70b-hf"], seq_len=131_072, overrides={"num_key_value_heads": 64}
    )
    assert every_head.total_gib == 320.0
    assert any("num_key_value_heads was given by hand: 64" in note for note in every_head.notes)


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
        ({"seq_len": 8, "encoder_tokens": -1}, "encoder_tokens=-1"),
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
    assert found.window_cap_bytes == 436_207_616


def test_k_and_v_are_counted_apart() -> None:
    mimo = kv_budget(CONFIGS["mimo-v2-flash"], seq_len=4096)
    assert mimo.k_bytes is not None
    assert mimo.v_bytes is not None
    assert mimo.k_bytes + mimo.v_bytes == mimo.total_bytes
    assert mimo.k_bytes * 128 == mimo.v_bytes * 192
    latents = kv_budget(CONFIGS["deepseek-v3"], seq_len=4096)
    assert (latents.k_bytes, latents.v_bytes) == (None, None)


def test_notes_say_what_surprises() -> None:
    notes = kv_budget(CONFIGS["qwen3-0.6b"], seq_len=100_000).notes
    assert any("head_dim 128 counts" in note and "= 64" in note for note in notes)
    assert any("more than the model's context of 40,960" in note for note in notes)
    assert not kv_budget(LLAMA, seq_len=1000).notes
    falcon = kv_budget(CONFIGS["falcon-40b-instruct"], seq_len=10).notes
    assert any("16 times as much" in note for note in falcon)


# ---- what is read


def test_what_one_step_reads() -> None:
    """Without windows, sharing or states: what is stored."""
    for stem in ("llama-3.1-8b", "gemma-2-9b", "deepseek-v3", "jamba-v0.1"):
        found = kv_budget(CONFIGS[stem], seq_len=9000, batch=2)
        assert found.read_bytes_per_step == found.stored_bytes
        assert read_bytes_per_step(CONFIGS[stem], seq_len=9000, batch=2) == found.stored_bytes
        assert stored_bytes(CONFIGS[stem], seq_len=9000, batch=2) == found.stored_bytes


def test_a_shared_layer_reads_anothers_kv_again() -> None:
    """Gemma 3n: 10 layers hold nothing; 2 of them are full, 8 slide."""
    found = kv_budget(CONFIGS["gemma-3n-e2b-it"], seq_len=10_000)
    assert (found.layers, found.layers_with_kv, found.layers_that_share) == (30, 20, 10)
    again = 2 * 2 * 256 * 2 * (2 * 10_000 + 8 * 512)
    assert found.read_bytes_per_step == found.total_bytes + again


# ---- the inverse


@pytest.mark.parametrize(
    "stem", ["llama-3.1-8b", "gemma-2-9b", "gemma-3-1b-it", "gpt-oss-20b", "gemma-3n-e2b-it"]
)
@pytest.mark.parametrize("memory_bytes", [0, 1, 10**6, 2**30, 10**10 + 7])
def test_the_tokens_that_fit_are_the_most_that_do(stem: str, memory_bytes: int) -> None:
    config = CONFIGS[stem]
    found = tokens_that_fit(config, memory_bytes, batch=2)
    assert found is not None
    assert kv_budget(config, seq_len=found, batch=2).total_bytes <= memory_bytes
    assert kv_budget(config, seq_len=found + 1, batch=2).total_bytes > memory_bytes


def test_the_fixed_state_takes_its_room() -> None:
    config = CONFIGS["qwen3-next-80b-a3b-instruct"]
    state = kv_budget(config, seq_len=0, batch=4).fixed_state_bytes
    assert state == 4 * 77_856_768
    assert tokens_that_fit(config, state - 1, batch=4) == 0
    assert tokens_that_fit(config, state + 4 * 24_576 * 1000, batch=4) == 1000
    assert tokens_that_fit(config, state + 4 * 24_576 * 1000 - 1, batch=4) == 999


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
    for config in (GEMMA, CONFIGS["gemma-3n-e2b-it"]):
        before = json.dumps(config)
        kv_budget(config, seq_len=8, overrides={"num_hidden_layers": None, "n_layer": 30})
        assert json.dumps(config) == before


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


# ---- sizes as text


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


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("1.5MiB", 3 * 2**19), ("512", 512), ("7B", 7)],
)
def test_parse_bytes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24 gigs", "24G", "1e9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: give one such as 24GiB"):
        parse_bytes(text)


def test_dtype_bytes() -> None:
    assert budget.dtype_bytes("BF16") == 2
    assert budget.dtype_bytes(torch.float32) == 4
