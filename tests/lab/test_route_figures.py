"""The figures of the budget and of the routes: each can be drawn, and shows what it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from gaac_lab import budget_figures, model_table, reuse, route_figures, routes, wrong_numbers

GIB = 2**30
BIG = model_table.config("llama-2-70b-hf")
SOME = ["llama-3.1-8b", "mistral-7b-v0.1"]


def measured() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "route": ["plain", "gaac", "8 bit", "window", "both"],
            "kind": list(route_figures.KINDS),
            "share_of_raw": [1.0, 0.7, 0.53, 0.25, 0.24],
            "perplexity_ratio": [1.0, 1.0, 1.01, 2.5, 2.5],
            "nll_diff_se": [0.0, 0.0, 0.01, 0.1, 0.1],
            "recall_hits": [4, 4, 3, 1, 1],
            "recall_trials": [4] * 5,
        }
    )


def by_depth() -> pd.DataFrame:
    rows = [("plain", 0.1, 2), ("plain", 0.9, 2), ("window", 0.1, 0), ("window", 0.9, 2)]
    return pd.DataFrame(rows, columns=["route", "depth", "hits"]).assign(trials=2)


FIGURES: dict[str, Callable[[], Figure]] = {
    "kv_growth": lambda: budget_figures.kv_growth([1024, 2048], [10, 20], 15, title="t"),
    "side_by_side": lambda: budget_figures.side_by_side(
        model_table.table(SOME, seq_len=1024, memory="80"), 80 * GIB, title="t"
    ),
    "memory_over_length": lambda: budget_figures.memory_over_length(
        model_table.growth(SOME, [1024, 4096]), 80 * GIB, title="t"
    ),
    "wrong_numbers": lambda: budget_figures.wrong_numbers(wrong_numbers.table(["all"])),
    "bills": lambda: route_figures.bills(
        routes.stacked({"a": BIG, "b": BIG}, seq_len=4096, bits=8, window=1024)
    ),
    "window_caps": lambda: route_figures.window_caps(
        routes.window_caps(BIG, [1024, 4096], window=2048), 2048
    ),
    "quality": lambda: route_figures.quality(measured()),
    "recall_by_depth": lambda: route_figures.recall_by_depth(by_depth()),
    "shared_prefix": lambda: route_figures.shared_prefix(
        reuse.table(BIG, [1, 2, 4], prefix_tokens=1000, own_tokens=100), 1.43
    ),
    "weights_and_kv": lambda: route_figures.weights_and_kv(
        pd.DataFrame(
            {
                "weights": ["16 bits", "4 bits"],
                "kv": ["raw", "raw"],
                "weight_bytes": [100, 30],
                "kv_bytes": [10, 10],
            }
        )
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_labelled_axes_and_can_be_drawn(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    figure.savefig(tmp_path / "figure.png")
    for axes in figure.axes:
        assert axes.get_xlabel()


def test_every_figure_function_is_tried() -> None:
    public = {
        name
        for module in (budget_figures, route_figures)
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and value.__module__ == module.__name__
    }
    assert public == set(FIGURES)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_every_kind_of_route_has_a_mark_of_its_own() -> None:
    marks: list[Any] = list(route_figures.KINDS.values())
    assert len({marker for marker, _ in marks}) == len(marks)


def test_points_that_lie_together_share_a_label() -> None:
    shown = texts(FIGURES["quality"]())
    assert shown.count("4, 5") == 2
    assert "1" in shown


def test_the_heat_map_shows_hits_of_trials() -> None:
    assert texts(FIGURES["recall_by_depth"]()) == ["2 of 2", "2 of 2", "0 of 2", "2 of 2"]


def test_the_bill_is_written_beside_its_bars() -> None:
    assert [t.strip() for t in texts(FIGURES["bills"]())] == ["1.25", "0.62", "0.16"] * 2


def test_a_model_of_unknown_weights_is_drawn_without_them() -> None:
    rows = model_table.growth(["llama-3.1-8b"], [1024, 4096]).assign(
        weight_bytes=pd.array([None, None], dtype="Int64")
    )
    figure = budget_figures.memory_over_length(rows, GIB, title="t")
    assert "llama-3.1-8b (KV alone)" in [
        text.get_text() for text in figure.axes[0].get_legend().get_texts()
    ]
