"""The published models side by side, and the mistakes beside the right numbers."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from gaac_lab import budget, model_table, wrong_numbers

GIB = 2**30
SOME = ["llama-3.1-8b", "mistral-7b-v0.1", "qwen3-next-80b-a3b-instruct"]


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Parameters of the models, in billions, that the test may change."""
    billions: dict[str, float | None] = {"llama-3.1-8b": 8.0, "mistral-7b-v0.1": 7.0}
    read = model_table.config

    def config(name: str) -> dict[str, Any]:
        fields = read(name)
        fields["_about"]["parameters_billion"] = billions.get(name)
        return fields

    monkeypatch.setattr(model_table, "config", config)
    return billions


def test_every_published_model_has_a_row() -> None:
    table = model_table.table(["all"], seq_len=32768, memory="80")
    assert list(table["model"]) == model_table.names()
    assert len(table) >= 31
    for row in table.itertuples():
        expected = model_table.config(str(row.model))["_about"]["expected"]
        assert row.total_bytes == expected["total_bytes_at_32768_tokens"]
        assert row.bytes_per_token == expected["bytes_per_token"]


def test_what_fits_is_the_real_function_inverted(weighed: dict[str, float | None]) -> None:
    table = model_table.table(["llama-3.1-8b"], seq_len=1024, batch=3, memory="80")
    (row,) = table.to_dict("records")
    assert row["weight_bytes"] == 16 * 10**9
    assert row["room_bytes"] == 80 * GIB - 16 * 10**9
    config = model_table.config("llama-3.1-8b")
    at, beyond = (
        budget.stored_bytes(config, seq_len=row["tokens_that_fit"] + more, batch=3)
        for more in (0, 1)
    )
    assert at <= row["room_bytes"] < beyond


def test_windows_that_fit_have_no_limit(weighed: dict[str, float | None]) -> None:
    table = model_table.table(["mistral-7b-v0.1"], seq_len=1024, memory="80")
    assert table["fits"][0] == model_table.NO_LIMIT
    assert table["tokens_that_fit"][0] is None


def test_weights_that_are_too_large_leave_no_token(weighed: dict[str, float | None]) -> None:
    weighed["llama-3.1-8b"] = 400.0
    table = model_table.table(["llama-3.1-8b"], seq_len=1024, memory="80")
    assert table["tokens_that_fit"][0] == 0
    assert "too large" in table["fits"][0]


def test_unknown_weights_stay_unknown(weighed: dict[str, float | None]) -> None:
    weighed["llama-3.1-8b"] = None
    table = model_table.table(["llama-3.1-8b"], seq_len=1024, memory="80")
    assert pd.isna(table["weight_bytes"][0])
    assert table["tokens_that_fit"][0] is None
    shown = model_table.readable(table).iloc[0]
    assert shown["weights (nominal)"] == "unknown"
    assert shown["tokens that fit"] == "weights not known"


def test_a_context_shorter_than_what_fits_is_named(weighed: dict[str, float | None]) -> None:
    table = model_table.table(["llama-3.1-8b"], seq_len=1024, memory="80")
    assert table["fits"][0].endswith("(context: 131,072)")


def test_readable_says_layers_windows_and_both_units() -> None:
    shown = model_table.readable(model_table.table(SOME, seq_len=65536, memory="80"))
    assert list(shown["layers with KV"]) == ["32 of 32", "32 of 32", "12 of 48"]
    assert shown["KV held"][0] == "8.00 GiB (8.59 GB)"
    assert shown["KV bytes a token"][1] == "0 (131,072 below the window)"
    assert shown["fixed state"][2] == "74.25 MiB (77.86 MB)"


def test_memory_is_a_device_or_a_number() -> None:
    assert model_table.memory_bytes("NVIDIA H200") == 141 * GIB
    assert model_table.memory_bytes("24") == 24 * GIB
    assert model_table.memory_bytes("0.5") == GIB // 2


@pytest.mark.parametrize("memory", ["", "0", "-1", "nan", "H1000", "24 GiB"])
def test_other_memories_are_refused(memory: str) -> None:
    with pytest.raises(ValueError, match="give a number of GiB, or one of"):
        model_table.memory_bytes(memory)


def test_names_are_checked() -> None:
    assert model_table.chosen(["all"]) == model_table.names()
    assert model_table.chosen(SOME) == SOME
    with pytest.raises(ValueError, match="no model 'llama'"):
        model_table.chosen(["llama"])


def test_growth_is_the_budget_with_its_state() -> None:
    rows = model_table.growth(["qwen3-next-80b-a3b-instruct"], [1024, 2048], batch=2)
    config = model_table.config("qwen3-next-80b-a3b-instruct")
    expected = [budget.stored_bytes(config, seq_len=n, batch=2) for n in (1024, 2048)]
    assert list(rows["kv_bytes"]) == expected


# ---- mistakes


@pytest.mark.parametrize(
    ("name", "mistake", "recorded"),
    [
        ("llama-2-70b-hf", "query heads counted", "used num_attention_heads"),
        ("qwen3-0.6b", "hidden size / heads taken for head_dim", "hidden/heads=64"),
        ("qwen3-32b", "hidden size / heads taken for head_dim", "hidden/heads=80"),
        ("falcon-h1-7b-instruct", "hidden size / heads taken for head_dim", "hidden/heads=256"),
        ("gemma-2-9b", "every layer counted in full", "all 42 layers full"),
        ("jamba-v0.1", "every layer counted in full", "all 32 layers"),
        ("qwen3-next-80b-a3b-instruct", "every layer counted in full", "all 48 layers"),
        ("nemotron-h-8b-base-8k", "every layer counted in full", "all 52 layers"),
    ],
)
def test_mistakes_give_the_wrong_numbers_on_record(name: str, mistake: str, recorded: str) -> None:
    """The files name wrong answers that were seen; the mistakes reproduce them."""
    config = model_table.config(name)
    wrong = config["_about"]["wrong_bytes_per_token"][recorded]
    assert wrong_numbers.mistakes(config)[mistake] == wrong


def test_only_what_is_wrong_is_in_the_table() -> None:
    table = wrong_numbers.table(["llama-2-7b-hf", "llama-2-70b-hf"])
    assert list(table["model"]) == ["llama-2-70b-hf"]
    assert list(table["times_off"]) == [8.0]
    assert (wrong_numbers.table(["all"])["wrong_bytes_per_token"] > 0).all()


def test_no_factor_where_the_right_growth_is_nothing() -> None:
    table = wrong_numbers.table(["mistral-7b-v0.1"])
    assert list(table["bytes_per_token"].unique()) == [0]
    assert table["times_off"].isna().all()


def test_a_config_with_names_of_its_own_is_left_out() -> None:
    assert wrong_numbers.mistakes(model_table.config("gpt2")) == {}
    assert wrong_numbers.table(["gpt2"]).empty
