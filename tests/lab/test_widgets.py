"""The controls: computed once at creation, on every change, and as plain text."""

from __future__ import annotations

import pytest

from gaac_lab import budget, model_table, routes, widgets

BILL = {"seq_len": 131072, "bits": 8, "window": 8192, "group_values": None}


def control(panel: widgets.Panel, description: str) -> object:
    return next(c for c in panel.box.children if getattr(c, "description", "") == description)


def result(panel: widgets.Panel) -> str:
    return str(panel.box.children[-1].value)


def budget_panel() -> widgets.Panel:
    return widgets.budget_panel(
        "llama-3.1-8b", seq_len=65536, batch=1, dtype="bfloat16", memory="24"
    )


@pytest.mark.parametrize(
    "panel",
    [widgets.kv_calculator, budget_panel, lambda: widgets.bill_panel("llama-2-70b-hf", **BILL)],
)
def test_the_result_is_there_at_once_and_no_slider_chases_the_mouse(panel: object) -> None:
    made = panel()  # type: ignore[operator]
    assert "GiB" in result(made)
    for child in made.box.children[:-1]:
        assert not getattr(child, "continuous_update", False)


def test_the_calculator_answers_a_change() -> None:
    panel = widgets.kv_calculator()
    assert result(panel).startswith("<b>4.00 GiB")
    control(panel, "batch").value = 4  # type: ignore[attr-defined]
    assert result(panel).startswith("<b>16.00 GiB")
    assert panel.text().startswith("16.00 GiB")


def test_the_budget_panel_answers_model_length_and_memory() -> None:
    panel = budget_panel()
    assert "8.00 GiB (8.59 GB) of KV in 32 of 32 layers" in panel.text()
    control(panel, "model").value = "gemma-3-27b-it"  # type: ignore[attr-defined]
    expected = budget.kv_budget(model_table.config("gemma-3-27b-it"), seq_len=65536)
    assert budget.format_bytes(expected.total_bytes) in result(panel)
    control(panel, "device or GiB").value = "NVIDIA H200"  # type: ignore[attr-defined]
    assert "141.00 GiB" in result(panel)


def test_a_value_that_is_not_allowed_is_answered_in_words() -> None:
    panel = budget_panel()
    control(panel, "device or GiB").value = "a lot"  # type: ignore[attr-defined]
    assert "give a number of GiB, or one of" in result(panel)


def test_the_bill_panel_answers_bits_and_window() -> None:
    panel = widgets.bill_panel("llama-2-70b-hf", **BILL)  # type: ignore[arg-type]
    assert panel.text().splitlines()[0] == "window of 8,192 tokens: 1.25 GiB (1.34 GB), 1/32"
    control(panel, "window").value = None  # type: ignore[attr-defined]
    control(panel, "bits a value").value = 4  # type: ignore[attr-defined]
    assert panel.text().splitlines()[0] == "4 bits: 10.00 GiB (10.74 GB), 1/4"
    control(panel, "scales").value = 64  # type: ignore[attr-defined]
    last = routes.bill(
        model_table.config("llama-2-70b-hf"), seq_len=131072, bits=4, group_values=64
    )
    assert budget.format_bytes(last["total_bytes"].iloc[-1]) in result(panel)


def test_a_length_of_ones_own_is_among_the_choices() -> None:
    panel = widgets.bill_panel("llama-2-70b-hf", **{**BILL, "seq_len": 5000})  # type: ignore[arg-type]
    assert control(panel, "tokens").value == 5000  # type: ignore[attr-defined]


def test_what_is_shown_stands_as_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    widgets.kv_calculator().show()
    printed = capsys.readouterr().out
    assert "4.00 GiB" in printed
    assert widgets.HINT in printed
