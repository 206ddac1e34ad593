"""What routes cost: nothing where they are lossless, and the fact where they dropped it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import DynamicCache

from gaac_lab import kv, lossy, planted, quality
from gaac_lab.lossy import Route, default_routes
from gaac_lab.lossy_layer import LossyCache
from gaac_lab.prefilled import BEST_CASE, Prefilled, read
from gaac_lab.token_policies import WindowLayer

CONTEXT, EVAL, BUDGET = 256, 24, 64
DEPTHS = (0.1, 0.95)


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    return default_routes(budget_tokens=BUDGET, block_tokens=64)


@pytest.fixture(scope="module")
def ids(default_model: tuple[Any, Any]) -> list[torch.Tensor]:
    return quality.texts(
        default_model[1],
        ["long_document", "meeting_minutes"],
        context_tokens=CONTEXT,
        eval_tokens=EVAL,
    )


@pytest.fixture(scope="module")
def prefilled(default_model: tuple[Any, Any], ids: list[torch.Tensor]) -> Prefilled:
    return read(default_model[0], ids[0][:, :CONTEXT])


@pytest.fixture(scope="module")
def table(
    default_model: tuple[Any, Any], routes: list[Route], ids: list[torch.Tensor]
) -> pd.DataFrame:
    table = quality.perplexity(default_model[0], routes, ids, context_tokens=CONTEXT)
    return table.set_index("route")


@pytest.fixture(scope="module")
def recalled(default_model: tuple[Any, Any], routes: list[Route]) -> pd.DataFrame:
    return quality.recall(
        *default_model, routes, context_tokens=384, depths=DEPTHS, facts_per_depth=2
    )


def test_every_route_is_there_once(routes: list[Route], table: pd.DataFrame) -> None:
    assert list(table.index) == [route.name for route in routes]
    assert table.index.is_unique
    assert set(table["kind"]) == {"none", "lossless", "precision", "tokens", "stacked"}


def test_lossless_routes_equal_the_uncompressed_one_to_the_bit(table: pd.DataFrame) -> None:
    for name in ("uncompressed", "gaac L1", "gaac L3"):
        row = table.loc[name]
        assert row["perplexity_ratio"] == 1.0
        assert row["nll_diff"] == row["nll_diff_se"] == 0.0
        assert row["exact"]
        assert BEST_CASE not in row["note"]
    assert table.loc["gaac L1", "kv_stored_bytes"] < table.loc["gaac L1", "kv_raw_bytes"]


def test_lossy_routes_are_not_exact_and_say_so(table: pd.DataFrame) -> None:
    lossy_rows = table[~table["kind"].isin(["none", "lossless"])]
    assert not lossy_rows["exact"].any()
    assert (lossy_rows["nll_diff_se"] > 0).all()
    assert lossy_rows["note"].str.contains(BEST_CASE).all()


def test_a_cache_that_lost_a_token_is_not_exact_however_well_it_did(
    default_model: tuple[Any, Any], ids: list[torch.Tensor]
) -> None:
    """This window drops its first token in the last update, after everything has been said."""
    make = partial(LossyCache, make_layer=partial(WindowLayer, CONTEXT + EVAL - 1))
    late = Route("late", "tokens", "", "", make)
    table = quality.perplexity(
        default_model[0], [lossy.uncompressed(), late], ids[:1], context_tokens=CONTEXT
    )
    assert table["nll_diff"].tolist() == [0.0, 0.0]
    assert table["exact"].tolist() == [True, False]


def test_bytes_are_what_each_route_says(table: pd.DataFrame) -> None:
    share = table["share_of_raw"]
    assert (table["kv_raw_bytes"] == 30 * 2 * 3 * CONTEXT * 64 * 2).all()
    assert (table["eval_tokens"] == 2 * EVAL).all()
    assert share["uncompressed"] == 1.0
    for bits in (8, 4, 2):
        assert share[f"{bits} bit"] == pytest.approx((bits + 0.5) / 16)
    assert share["window"] == share["sinks + window"] == BUDGET / CONTEXT
    # A score of 4 bytes for the 256 bytes of a token's K and V in one KV head.
    assert share["heavy hitters"] == pytest.approx(BUDGET / CONTEXT * (1 + 4 / 256))
    assert share["8 bit + window"] == pytest.approx(BUDGET / CONTEXT * 8.5 / 16)
    assert share["gaac L1 + window"] < share["window"]


def test_packing_a_window_changes_no_bit(table: pd.DataFrame) -> None:
    window, packed = table.loc["window"], table.loc["gaac L1 + window"]
    assert window["nll_diff"] == packed["nll_diff"] != 0
    assert window["nll_diff_se"] == packed["nll_diff_se"]


def test_perplexity_is_that_of_the_model_itself(
    default_model: tuple[Any, Any], table: pd.DataFrame, ids: list[torch.Tensor]
) -> None:
    """Against the model's own loss over the whole text, without a cache and in another kernel."""
    model, _ = default_model
    losses = []
    for text in ids:
        with torch.no_grad():
            logits = model(input_ids=text).logits[0, CONTEXT:-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, text[0, CONTEXT + 1 :]))
    expected = math.exp(torch.stack(losses).mean())
    assert table.loc["uncompressed", "perplexity"] == pytest.approx(expected, rel=0.05)


def test_the_error_of_the_mean_is_paired(table: pd.DataFrame) -> None:
    """Texts differ by far more than routes do, which must not blur the difference."""
    row = table.loc["8 bit"]
    assert row["nll_diff_se"] < 0.1
    assert row["perplexity_ratio"] == pytest.approx(math.exp(row["nll_diff"]))
    ratio = row["perplexity"] / table.loc["uncompressed", "perplexity"]
    assert ratio == pytest.approx(row["perplexity_ratio"])


def test_the_chunks_of_the_steps_hardly_matter(
    default_model: tuple[Any, Any], prefilled: Prefilled, ids: list[torch.Tensor]
) -> None:
    model, _ = default_model
    by_chunk = [
        quality.forced(
            model,
            prefilled.fill(DynamicCache(config=model.config)),
            ids[0][:, CONTEXT:],
            chunk_tokens=chunk,
        ).nll
        for chunk in (1, 8, 64)
    ]
    assert all(nll.shape == (EVAL,) for nll in by_chunk)
    assert torch.allclose(by_chunk[0], by_chunk[1], atol=0.15)
    assert torch.allclose(by_chunk[0], by_chunk[2], atol=0.15)


def test_making_a_cache_leaves_the_reading_as_it_was(
    default_model: tuple[Any, Any], prefilled: Prefilled, routes: list[Route]
) -> None:
    model, _ = default_model
    before = prefilled.fill(DynamicCache(config=model.config))
    for route in routes:
        cache = route.make(model.config, prefilled)
        quality.forced(model, cache, torch.arange(10).unsqueeze(0))
        assert cache.get_seq_length() == CONTEXT + 9
    assert kv.same_cache(before, prefilled.cache)


def test_recall_finds_what_is_kept(recalled: pd.DataFrame) -> None:
    by = recalled.set_index(["route", "depth"])["hits"]
    assert (recalled["trials"] == 2).all()
    assert by["uncompressed"].tolist() == [2, 2]  # the default model can do the task
    for name in ("gaac L1", "gaac L3"):
        assert by[name].tolist() == by["uncompressed"].tolist()
    assert by["8 bit"].sum() >= 3


def test_recall_fails_where_the_window_dropped_the_fact(recalled: pd.DataFrame) -> None:
    by = recalled.set_index(["route", "depth"])["hits"]
    for name in ("window", "sinks + window", "8 bit + window", "gaac L1 + window"):
        assert by[name, DEPTHS[0]] == 0, name
    # The last 64 of 384 tokens hold the deep facts; what a window broken off at its first tokens
    # makes of them is another matter, so only the one with sinks is asked for one.
    assert by["sinks + window", DEPTHS[1]] >= 1


def test_a_wrong_number_is_no_hit(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    hay = planted.haystack(tokenizer, tokens=256, depth=0.5, seed=3)
    filled = read(model, hay.input_ids)
    last = str((int(hay.fact.code[-1]) + 1) % 10)
    wrong = planted.Fact(hay.fact.subject, hay.fact.code[:-1] + last)
    for fact, known in ((hay.fact, True), (wrong, False)):
        cache = filled.fill(DynamicCache(config=model.config))
        assert quality._knows(model, tokenizer, cache, fact, 8) is known


def test_recall_joins_the_table(table: pd.DataFrame, recalled: pd.DataFrame) -> None:
    joined = quality.with_recall(table.reset_index(), recalled)
    assert len(joined) == len(table)
    assert (joined["recall_trials"] == 4).all()
    row = joined.set_index("route").loc["window"]
    assert row["recall_hits"] == recalled[recalled["route"] == "window"]["hits"].sum()


def test_steps_are_timed_beside_the_uncompressed_cache(
    default_model: tuple[Any, Any], prefilled: Prefilled
) -> None:
    model, _ = default_model

    class SlowWindow(WindowLayer):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            torch.randn(300, 300) @ torch.randn(300, 300)
            return super().update(*args, **kwargs)

    def route(name: str, layer: Any) -> Route:
        make = partial(LossyCache, make_layer=partial(layer, 4096))
        return Route(name, "tokens", "", "", make)

    chosen = [lossy.uncompressed(), route("as it is", WindowLayer), route("slow", SlowWindow)]
    times = quality.step_ratios(model, chosen, prefilled, steps=3, rounds=2).set_index("route")
    assert (times["step_s"] > 0).all()
    assert (times["step_ratio_low"] <= times["step_ratio"]).all()
    assert (times["step_ratio"] <= times["step_ratio_high"]).all()
    assert times.loc["slow", "step_ratio"] < times.loc["as it is", "step_ratio"]
    assert times.loc["slow", "step_s"] > times.loc["as it is", "step_s"]


def test_the_uncompressed_route_comes_first(
    default_model: tuple[Any, Any], routes: list[Route], prefilled: Prefilled
) -> None:
    with pytest.raises(ValueError, match="first route"):
        quality.perplexity(default_model[0], routes[1:], [], context_tokens=CONTEXT)
    with pytest.raises(ValueError, match="one name"):
        quality.step_ratios(default_model[0], [routes[0]] * 2, prefilled, steps=1, rounds=1)


@pytest.mark.parametrize("budget", [0, 32, 100])
def test_a_budget_that_routes_cannot_share_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget_tokens={budget}"):
        default_routes(budget_tokens=budget)
