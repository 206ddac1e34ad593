"""The bytes of 4-bit weights and of lossless KV, apart and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gaac_lab import prompts, weights_and_kv
from tests.lab import tiny_models


def test_the_table_adds_up() -> None:
    table = weights_and_kv.table(
        weight_bytes=1000, four_bit=(300, "GGUF file"), kv_raw_bytes=200, kv_lossless_bytes=140
    )
    assert table["total_bytes"].tolist() == [1200, 1140, 500, 440]
    assert table["share"].tolist() == [1.0, 0.95, 500 / 1200, 440 / 1200]
    assert table["saved_by_weights_bytes"].tolist() == [0, 0, 700, 700]
    assert table["saved_by_kv_bytes"].tolist() == [0, 60, 0, 60]


def test_the_format_is_counted_as_gguf_counts_it(tmp_path: Path) -> None:
    """Against the tensors of a real Q4_1 file of the same shapes."""
    path = tmp_path / "tiny.gguf"
    tiny_models.write_gguf(path)
    stored = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    config = LlamaConfig(
        hidden_size=tiny_models.HIDDEN,
        intermediate_size=tiny_models.MLP,
        num_hidden_layers=tiny_models.LAYERS,
        num_attention_heads=tiny_models.HEADS,
        num_key_value_heads=tiny_models.KV_HEADS,
        vocab_size=len(tiny_models.SPECIAL) + len(tiny_models.LETTERS),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    assert weights_and_kv.four_bit_bytes(model, "nowhere") == (stored, "Q4_1 format")


def test_a_recorded_file_size_wins(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1))
    record: dict[str, Any] = {
        "gguf_bytes": 12345,
        "wheel": {"sha256": "0"},
        "files": {"model.safetensors": {"sha256": "0", "size_bytes": 1}},
    }
    (tmp_path / "source.json").write_text(json.dumps(record))
    assert weights_and_kv.four_bit_bytes(model, str(tmp_path)) == (12345, "GGUF file")
    del record["gguf_bytes"]
    (tmp_path / "source.json").write_text(json.dumps(record))
    assert weights_and_kv.four_bit_bytes(model, str(tmp_path))[1] == "Q4_1 format"


def test_on_the_default_model(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    ids = prompts.build("long_document", 256, tokenizer).input_ids
    table = weights_and_kv.weights_and_kv(model, ids, name="default", block_tokens=128)
    first, last = table.iloc[0], table.iloc[3]
    assert first["kv_bytes"] == 30 * 2 * 3 * 256 * 64 * 2
    assert first["weight_bytes"] == sum(p.numel() for p in model.parameters()) * 2
    assert 1.3 < first["kv_bytes"] / last["kv_bytes"] < 1.6
    assert 2.5 < first["weight_bytes"] / last["weight_bytes"] < 3.3
    saved = last["saved_by_weights_bytes"] + last["saved_by_kv_bytes"]
    assert first["total_bytes"] - saved == last["total_bytes"]
    assert torch.isfinite(torch.tensor(table["share"].tolist())).all()
