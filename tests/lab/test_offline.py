"""KV at rest: another process reads back every bit, and damage is not read back as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
)

from gaac_lab import kv, offline
from gaac_lab.request import Request

CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=32
)


@pytest.fixture
def cache() -> Any:
    held = DynamicCache(config=CONFIG)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        held.update(*torch.randn(2, 1, 2, 300, 16, generator=generator).to(torch.bfloat16), layer)
    return held


@pytest.mark.parametrize("level", [None, 0, 1, 2, 3, 5])
def test_another_process_reads_back_every_bit(cache: Any, tmp_path: Path, level: int) -> None:
    written = offline.save(cache, tmp_path / "a b", CONFIG, level=level)
    assert written["raw_bytes"] == 2 * 2 * 2 * 300 * 16 * 2
    on_disk = sum(path.stat().st_size for path in (tmp_path / "a b").iterdir())
    assert written["stored_bytes"] == on_disk
    read = offline.load_in_another_process(tmp_path / "a b", repeats=2)
    assert read["equal"]
    assert read["load_n"] == 2
    assert kv.same_cache(cache, offline.load(tmp_path / "a b", CONFIG))


def test_a_model_goes_on_from_a_loaded_cache_also_behind_a_window(tmp_path: Path) -> None:
    """A sliding layer holds its window alone, and must still know how much it has seen."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    model = MistralForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.arange(50).unsqueeze(0)
    read = Request(model, ids, DynamicCache(config=config))
    read.prefill()
    offline.save(read.cache, tmp_path, config, level=3)
    resumed = Request(model, ids, None)
    resumed.resume(read, offline.load(tmp_path, config))
    assert resumed.cache.get_seq_length() == 50
    for _ in range(5):
        read.step()
        resumed.step()
        assert read.logits is not None
        assert resumed.logits is not None
        assert kv.same_bits(read.logits, resumed.logits)


def test_states_that_are_no_kv_are_refused(tmp_path: Path) -> None:
    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    cache = DynamicCache(config=config)
    cache.update(*torch.zeros(2, 1, 1, 4, 16, dtype=torch.bfloat16), 1)
    with pytest.raises(offline.OfflineError, match="state instead of K and V"):
        offline.save(cache, tmp_path / "x", CONFIG, level=3)
    assert not (tmp_path / "x").exists()


def test_a_raw_file_with_a_wrong_bit_is_seen(cache: Any, tmp_path: Path) -> None:
    offline.save(cache, tmp_path, CONFIG, level=None)
    victim = tmp_path / "layer001.v"
    data = bytearray(victim.read_bytes())
    data[1000] ^= 1
    victim.write_bytes(data)
    assert not offline.load_in_another_process(tmp_path, repeats=1)["equal"]


def test_a_damaged_compressed_file_is_an_error(cache: Any, tmp_path: Path) -> None:
    offline.save(cache, tmp_path, CONFIG, level=3)
    victim = tmp_path / "layer000.k"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(offline.OfflineError, match="CorruptFrame"):
        offline.load_in_another_process(tmp_path, repeats=1)


def test_a_folder_without_an_index_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(offline.OfflineError, match="did not finish"):
        offline.load(tmp_path, CONFIG)


def test_the_index_is_written_last(cache: Any, tmp_path: Path) -> None:
    offline.save(cache, tmp_path, CONFIG, level=1)
    index = json.loads((tmp_path / "index.json").read_text())
    assert all((tmp_path / entry["file"]).exists() for entry in index["entries"])
