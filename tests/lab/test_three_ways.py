"""The table of the three ways, and what it says when they part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from gaac_lab import budget, budget_oracle, model_table, three_ways


def table(name: str) -> pd.DataFrame:
    return three_ways.table(model_table.config(name), seq_len=65536)


def test_three_ways_give_one_answer() -> None:
    rows = table("llama-3.1-8b")
    assert list(rows["way"]) == ["formula", "oracle", "transformers"]
    assert rows[three_ways.COUNTED].nunique().eq(1).all()
    assert (
        three_ways.verdict(rows) == "The formula and oracle and transformers give the same bytes."
    )


def test_a_window_is_held_against_what_transformers_keeps() -> None:
    rows = table("mistral-7b-v0.1").set_index("way")
    held = rows.loc[three_ways.HELD, "total_bytes"]
    assert held == rows.loc["transformers", "total_bytes"] < rows.loc["formula", "total_bytes"]
    assert three_ways.differences(rows.reset_index()) == []


def test_a_way_that_does_not_know_the_model_says_why() -> None:
    rows = table("chatglm2-6b").set_index("way")
    assert rows.loc["transformers", three_ways.COUNTED].isna().all()
    assert "chatglm" in rows.loc["transformers", "note"]
    assert three_ways.verdict(rows.reset_index()) == "The formula and oracle give the same bytes."


def test_a_difference_is_shouted(monkeypatch: pytest.MonkeyPatch) -> None:
    count = budget_oracle.count

    def wrong(config: Any, **options: Any) -> budget_oracle.Count:
        found = count(config, **options)
        return replace(found, layers=found.layers[:-1])

    monkeypatch.setattr(budget_oracle, "count", wrong)
    rows = table("llama-3.1-8b")
    assert "oracle: layers_with_kv" in three_ways.differences(rows)
    assert three_ways.verdict(rows).startswith("THEY DIFFER (oracle: bytes_per_token")


def test_nothing_confirms_a_model_that_only_the_formula_knows() -> None:
    fields = {
        "model_type": "unheard_of", "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16,
    }  # fmt: skip
    rows = three_ways.table(fields, seq_len=10)
    assert rows["total_bytes"][0] == budget.kv_budget(fields, seq_len=10).total_bytes
    assert three_ways.verdict(rows).startswith("Only the formula")
