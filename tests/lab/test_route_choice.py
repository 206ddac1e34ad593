"""The routes side by side: the first knob to turn, and the three answers."""

from __future__ import annotations

import pandas as pd
import pytest

from gaac_lab import budget, model_table, route_choice

BIG = model_table.config("llama-2-70b-hf")
GEMMA = model_table.config("gemma-3-27b-it")


def measured(**changed: dict[str, object]) -> pd.DataFrame:
    """Rows as `quality` makes them; `changed` replaces fields of a route."""
    rows = [
        ("plain", "none", 1.0, 0.0, 0.0, 8, True),
        ("gaac", "lossless", 0.7, 0.0, 0.0, 8, True),
        ("eight", "precision", 0.53, 0.001, 0.002, 8, False),
        ("two", "precision", 0.16, 0.4, 0.05, 3, False),
        ("window", "tokens", 0.25, 0.9, 0.1, 2, False),
    ]
    names = ["route", "kind", "share_of_raw", "nll_diff", "nll_diff_se", "recall_hits", "exact"]
    frame = pd.DataFrame(rows, columns=names).assign(
        recall_trials=8, step_ratio=0.9, eval_tokens=200
    )
    frame["perplexity_ratio"] = [2.718281828**diff for diff in frame["nll_diff"]]
    for route, fields in changed.items():
        for name, value in fields.items():
            frame.loc[frame["route"] == route, name] = value
    return frame


def test_the_knobs_multiply_to_the_budget() -> None:
    table = route_choice.knobs(BIG, seq_len=131072, batch=2)
    found = budget.kv_budget(BIG, seq_len=131072, batch=2).total_bytes
    assert table["value"].prod() == found
    assert [w[:7] for w in table["turned_by"] if "ROUTE" in w] == ["ROUTE 1", "ROUTE 3", "ROUTE 2"]


def test_a_model_of_unlike_layers_has_no_single_product() -> None:
    with pytest.raises(ValueError, match="is a sum"):
        route_choice.knobs(GEMMA, seq_len=131072)


def test_the_first_knob_holds_least_of_those_without_a_loss() -> None:
    knob = route_choice.first_knob(measured())
    assert knob is not None
    assert knob.route == "eight"


@pytest.mark.parametrize(
    "changed",
    [
        {"nll_diff": 0.01},  # five standard errors
        {"recall_hits": 7},
        {"recall_hits": None},
        {"nll_diff_se": None},
    ],
)
def test_a_loss_or_an_unknown_is_not_free(changed: dict[str, object]) -> None:
    assert route_choice.first_knob(measured(eight=changed)) is None


def test_one_fact_of_many_is_noise_where_the_plain_cache_misses_some_itself() -> None:
    """Of 8, 6 recalled have a standard error of 1.2: one lost is noise, two are not."""
    plain = {"recall_hits": 6}
    assert route_choice.first_knob(measured(plain=plain, eight={"recall_hits": 5})) is not None
    assert route_choice.first_knob(measured(plain=plain, eight={"recall_hits": 4})) is None


def test_a_smaller_route_without_a_loss_wins() -> None:
    knob = route_choice.first_knob(
        measured(two={"nll_diff": 0.01, "nll_diff_se": 0.01, "recall_hits": 8})
    )
    assert knob is not None
    assert knob.route == "two"


def test_three_questions_are_answered_from_the_rows() -> None:
    limited = {**BIG, "max_position_embeddings": 4096}
    answers = route_choice.answers(limited, measured(), weight_bytes=140 * 10**9)
    questions, texts = zip(*answers, strict=True)
    assert questions == (
        "How many bytes does my model need at 65,536 tokens?",
        "Which knob would I turn first?",
        "What would it cost me?",
    )
    need, first, price = texts
    assert "20.00 GiB (21.47 GB)" in need
    assert "327,680 bytes" in need
    assert "more than the model's context of 4,096" in need
    assert "70% (gaac)" in first
    assert "eight, which holds 53%" in first
    assert "eight: perplexity × 1.001" in price
    assert "two holds 16%: perplexity × 1.492" in price
    assert "Uncompressed: 8 of 8 facts recalled." in price
    assert "200 tokens" in price


def test_answers_without_a_free_route_say_so() -> None:
    answers = route_choice.answers(BIG, measured(eight={"nll_diff": 0.01}))
    assert "lost something" in answers[1][1]
    assert "the mildest was eight, which holds 53%" in answers[1][1]
    assert "eight holds 53%" in answers[2][1]


def test_recall_that_fails_without_compression_is_called_weak() -> None:
    weak = measured(plain={"recall_hits": 4})
    assert "say little" in route_choice.answers(BIG, weak)[2][1]
    assert "say little" not in route_choice.answers(BIG, measured())[2][1]


def test_the_comparison_says_what_each_does_to_the_answer() -> None:
    table = route_choice.comparison(BIG, measured())
    assert table.columns[0] == "what it does to the answer"
    assert list(table.iloc[:, 0]) == [
        "changes the model",
        "approximate",
        "approximate",
        "bit-exact",
    ]
    heads, bits, tokens, lossless = table.to_dict("records")
    assert heads["gain"] == "64 → 8 heads: 1/8; to 1: 1/64"
    assert "eight: 53% held; two: 16% held" in bits["gain"]
    assert "2 of 8" in tokens["cost in quality"]
    assert lossless["cost in quality"] == "gaac: none, equal bits"
    assert lossless["reversible"].startswith("yes")


def test_a_lossless_route_that_is_not_exact_is_not_called_so() -> None:
    table = route_choice.comparison(BIG, measured(gaac={"exact": False}))
    assert "equal bits" not in table["cost in quality"].iloc[3]


def test_the_headline_names_the_mildest_of_each_kind() -> None:
    line = route_choice.headline(measured())
    assert "gaac holds 70% of the KV, every bit equal" in line
    assert "eight holds 53%" in line
    assert "window holds 25%" in line
    assert "measurable loss is eight, 53%" in line
    assert "no lossy route" in route_choice.headline(measured(eight={"recall_hits": 0}))
