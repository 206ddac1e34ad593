"""What a lossless coder can save on lossy codes: bounds that hold, and known answers."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from gaac_lab import prompts
from gaac_lab.on_top import on_top
from gaac_lab.prefilled import Prefilled, read

CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=128, head_dim=64
)


def prefilled_with(keys: torch.Tensor, values: torch.Tensor) -> Prefilled:
    cache = DynamicCache(config=CONFIG)
    for layer in range(2):
        cache.update(keys, values, layer)
    return Prefilled(cache, {}, torch.zeros(1, 1), keys.shape[2])


def side(table: pd.DataFrame, route: str, part: str) -> pd.Series:
    return table.set_index(["route", "part"]).loc[(route, part)]


def test_known_entropies() -> None:
    """Two equally common values are one bit; uniform ones leave nothing to save."""
    made = torch.Generator().manual_seed(0)
    coin = torch.randint(0, 2, (1, 2, 2048, 64), generator=made).to(torch.bfloat16)
    uniform = (torch.rand(1, 2, 2048, 64, generator=made) * 4).to(torch.bfloat16)
    table = on_top(CONFIG, prefilled_with(coin, uniform), window=64, bits=(8, 2))
    row = side(table, "8 bit", "k")
    assert row["entropy_bits"] == pytest.approx(1, abs=0.01)
    assert row["channel_entropy_bits"] == pytest.approx(1, abs=0.01)
    assert row["bound"] == pytest.approx(8, rel=0.01)
    # zlib's table holds an end mark too: of three symbols Huffman gives one 1 bit and two 2.
    assert row["achieved"] == pytest.approx(8 / 1.5, rel=0.02)
    row = side(table, "2 bit", "v")
    assert row["entropy_bits"] == pytest.approx(2, abs=0.1)
    assert row["achieved"] <= row["bound"]


def test_a_channel_that_decides_its_codes_shows_in_its_own_table() -> None:
    """Channels of one value each: nothing is left given the channel, log2(4) bits without it."""
    levels = torch.arange(64).remainder(4).expand(1, 2, 256, 64).clone().to(torch.bfloat16)
    table = on_top(CONFIG, prefilled_with(levels, levels), window=64, bits=(2,))
    row = side(table, "2 bit", "v")  # a scale a token keeps the levels of the channels apart
    assert row["entropy_bits"] == pytest.approx(2, abs=0.01)
    assert row["channel_entropy_bits"] == pytest.approx(0, abs=0.01)
    assert pd.isna(row["bound"])


def test_the_default_models_codes(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    ids = prompts.build("long_document", 512, tokenizer).input_ids
    table = on_top(model.config, read(model, ids), window=128, level=3)
    assert set(table["part"]) == {"k", "v"}
    codes = table[table["width_bits"] < 16]
    assert (codes["bound"] >= 1).all()
    assert (codes["achieved"] <= codes["bound"] + 0.01).all()
    kept = table[table["width_bits"] == 16]
    # What a window keeps is bf16 as before: there the same coder saves as much as ever.
    assert (kept["achieved"] > 1.3).all()
    assert kept["achieved"].min() > codes.loc[codes["width_bits"] == 8, "achieved"].max()


def test_no_codes_no_bound() -> None:
    short = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="No block is full"):
        on_top(CONFIG, prefilled_with(short, short), window=16)
