"""The three routes counted: heads, bits, tokens, and the bill of them stacked."""

from __future__ import annotations

import pytest

from gaac_lab import budget, model_table, routes

GIB = 2**30
BIG = model_table.config("llama-2-70b-hf")  # 8 KV heads
SMALL = model_table.config("llama-2-7b-hf")  # 32 KV heads
GEMMA = model_table.config("gemma-3-27b-it")  # five of six layers have a window of 1,024
LONG = 131072


def test_the_stacked_bill_of_two_models() -> None:
    stack = routes.stacked({"70B": BIG, "7B": SMALL}, seq_len=LONG, bits=8, window=8192)
    sizes = {name: list(rows["total_bytes"] / GIB) for name, rows in stack.groupby("model")}
    assert sizes == {"70B": [40.0, 20.0, 1.25], "7B": [64.0, 32.0, 2.0]}
    assert list(stack["times_smaller"]) == [1, 2, 32] * 2
    assert list(stack["share"]) == [1, 1 / 2, 1 / 32] * 2


def test_what_heads_still_do_is_told_from_the_numbers() -> None:
    stack = routes.stacked({"70B": BIG, "7B": SMALL}, seq_len=LONG, bits=8, window=8192)
    said = routes.what_heads_still_do(stack)
    assert said.startswith("7B holds 1.60 times the KV of 70B at first, 24.00 GiB")
    assert "still 1.60 times, but only 768.00 MiB" in said
    turned = routes.stacked({"7B": SMALL, "70B": BIG}, seq_len=LONG, bits=8, window=8192)
    assert routes.what_heads_still_do(turned) == said


def test_a_window_of_ones_own_changes_the_ratio() -> None:
    stack = routes.stacked({"gemma": GEMMA, "7B": SMALL}, seq_len=LONG, window=8192)
    assert routes.what_heads_still_do(stack).endswith("windows of their own.")


def test_scales_are_counted_when_asked() -> None:
    """A scale and a zero of 16 bits each for 64 values make half a bit a value."""
    promised = routes.bill(BIG, seq_len=LONG, bits=4)["total_bytes"]
    stored = routes.bill(BIG, seq_len=LONG, bits=4, group_values=64)["total_bytes"]
    assert stored[0] == promised[0] == 40 * GIB
    assert promised[1] == 10 * GIB
    assert stored[1] == 40 * GIB * 4.5 / 16


@pytest.mark.parametrize(
    ("bits", "group", "stored"), [(16, 64, 16), (8, None, 8), (8, 64, 8.5), (2, 32, 3.0)]
)
def test_stored_bits(bits: int, group: int | None, stored: float) -> None:
    assert routes.stored_bits(bits, group) == stored


@pytest.mark.parametrize(("bits", "group"), [(3, None), (0, 64), (8, 0)])
def test_bits_and_groups_that_cannot_be_are_refused(bits: int, group: int | None) -> None:
    with pytest.raises(ValueError, match=r"(bits|group_values)=\d"):
        routes.stored_bits(bits, group)


def test_steps_that_are_not_taken_have_no_row() -> None:
    assert len(routes.bill(BIG, seq_len=LONG)) == 1
    assert len(routes.bill(BIG, seq_len=LONG, window=8192)) == 2


def test_a_window_of_a_layer_that_is_shorter_stays() -> None:
    """Gemma's sliding layers keep 1,024 whatever window is put over the full ones."""
    found = routes.kv_bytes(GEMMA, seq_len=LONG, window=4096)
    assert found == budget.kv_budget(GEMMA, seq_len=4096).total_bytes
    assert found < budget.kv_budget(GEMMA, seq_len=4096).bytes_per_token_below_window * 4096
    assert routes.kv_bytes(GEMMA, seq_len=1000, window=4096) == routes.kv_bytes(GEMMA, seq_len=1000)


def test_64_heads_to_8_is_an_eighth_and_to_one_a_64th() -> None:
    table = routes.kv_heads(BIG, [64, 8, 1], seq_len=LONG)
    assert list(table["share"]) == [1, 1 / 8, 1 / 64]
    assert list(table["name"]) == ["MHA", "GQA", "MQA"]
    assert list(table["total_bytes"] / GIB) == [320, 40, 5]
    assert table["bytes_per_token"][1] == budget.kv_budget(BIG, seq_len=1).bytes_per_token


@pytest.mark.parametrize("count", [0, 3, 65])
def test_kv_heads_must_divide_the_attention_heads(count: int) -> None:
    with pytest.raises(ValueError, match="do not divide 64"):
        routes.kv_heads(BIG, [count], seq_len=1)


def test_kv_heads_of_a_config_without_the_field_are_refused() -> None:
    with pytest.raises(ValueError, match="does not name"):
        routes.kv_heads(model_table.config("gpt2"), [1], seq_len=1)


def test_precisions_beside_their_promises() -> None:
    table = routes.precisions(BIG, seq_len=LONG, group_values=64)
    assert list(table["promised_share"]) == [1, 1 / 2, 1 / 4, 1 / 8]
    assert list(table["stored_share"] * 16) == [16, 8.5, 4.5, 2.5]
    assert list(table["total_bytes"] / GIB) == [40, 21.25, 11.25, 6.25]


def test_a_window_is_a_constant_cap() -> None:
    table = routes.window_caps(BIG, [4096, 8192, 65536, LONG], window=8192)
    assert list(table["window_bytes"] / GIB) == [1.25, 2.5, 2.5, 2.5]
    assert list(table["times_smaller"]) == [1, 1, 8, 16]


def test_a_model_without_kv_has_no_bill() -> None:
    with pytest.raises(ValueError, match="keeps no KV"):
        routes.bill(BIG, seq_len=0)
