"""The figures of the budget: KV, weights and memory, for one model and for many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from gaac_lab.figure_style import BLUE, GIB, GREY, INK, ORANGE, PALE, new_figure, styled

LINES = [  # colour, marker, line: eight models that can be told apart in grey as well
    (BLUE, "o", "-"), (ORANGE, "s", "-"), (INK, "^", "-"), (GREY, "D", "-"),
    (BLUE, "v", "--"), (ORANGE, "P", "--"), (INK, "X", "--"), (GREY, "*", "--"),
]  # fmt: skip
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # 0.1, not 10 to the power of -1


@styled
def kv_growth(
    lengths: Sequence[int], kv_bytes: Sequence[int], weights: int, *, title: str
) -> Figure:
    """KV bytes against the weights as the context grows."""
    figure, (axes,) = new_figure()
    axes.plot(lengths, np.asarray(kv_bytes) / GIB, color=BLUE, marker="o", label="KV cache")
    axes.axhline(weights / GIB, color=ORANGE, linestyle="--", label="weights")
    axes.set(yscale="log", ylabel="memory (GiB)", title=title)
    axes.yaxis.set_major_formatter(PLAIN)
    _log_tokens(axes, lengths)
    axes.legend()
    return figure


@styled
def side_by_side(rows: pd.DataFrame, memory: int, *, title: str) -> Figure:
    """KV and weights of each model as two dots on one line, and the memory of a device.

    Columns: model, total_bytes, weight_bytes. `memory` in bytes.
    """
    figure, (axes,) = new_figure(width=8.4, height=0.3 * len(rows) + 1.9)
    place = np.arange(len(rows))
    kv = rows["total_bytes"].to_numpy(float) / GIB
    weights = rows["weight_bytes"].astype("Float64").to_numpy(float, na_value=np.nan) / GIB
    axes.hlines(place, np.fmin(kv, weights), np.fmax(kv, weights), color=PALE, linewidth=3)
    axes.plot(weights, place, "s", color=ORANGE, label="weights, 16 bits")
    axes.plot(kv, place, "o", color=BLUE, label="KV cache")
    axes.axvline(memory / GIB, color=INK, linestyle="--", linewidth=1, label="memory of the device")
    axes.set_yticks(place, list(rows["model"]))
    axes.set(xscale="log", xlabel="GiB", title=title)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.6 / (0.3 * len(rows) + 0.9)))
    return figure


@styled
def memory_over_length(growth: pd.DataFrame, memory: int, *, title: str) -> Figure:
    """Weights and KV together over the context, a line a model, and the memory of a device.

    Columns: model, tokens, kv_bytes, weight_bytes. Eight models at most are drawn, the first ones;
    a model whose weights are not known is drawn without them, and its label says so.
    """
    figure, (axes,) = new_figure(width=9.2, height=4.4)
    models = list(growth.groupby("model", sort=False))[: len(LINES)]
    for (name, rows), (colour, marker, line) in zip(models, LINES, strict=False):
        known = rows["weight_bytes"].notna().all()
        weights = rows["weight_bytes"].astype(float).to_numpy() if known else 0.0
        total = (rows["kv_bytes"].to_numpy(float) + weights) / GIB
        label = name if known else f"{name} (KV alone)"
        axes.plot(rows["tokens"], total, color=colour, marker=marker, linestyle=line, label=label)
    axes.axhline(memory / GIB, color=INK, linestyle=":", label="memory of the device")
    axes.set(yscale="log", ylabel="weights and KV (GiB)", title=title)
    axes.yaxis.set_major_formatter(PLAIN)
    _log_tokens(axes, sorted(growth["tokens"].unique()))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@styled
def wrong_numbers(rows: pd.DataFrame) -> Figure:
    """How far off each mistake is; 1 is right. Columns: model, mistake, times_off."""
    shown = rows[rows["times_off"].notna()]
    figure, (axes,) = new_figure(width=8.4, height=0.3 * len(shown) + 1.5)
    place = np.arange(len(shown))
    off = shown["times_off"].to_numpy(float)
    axes.hlines(place, np.ones(len(shown)), off, color=PALE, linewidth=3)
    axes.plot(off, place, "o", color=ORANGE)
    for at, value in enumerate(off):
        side = "left" if value >= 1 else "right"
        pad = "  " if value >= 1 else ""
        axes.text(value, at, f"{pad}{value:.2g}×{'' if pad else '  '}", va="center", ha=side)
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.set_yticks(place, [f"{row.model}: {row.mistake}" for row in shown.itertuples(index=False)])
    axes.set(xscale="log", xlabel="wrong bytes a token / right ones", title="Off by how much?")
    axes.set_xlim(min(0.2, off.min() / 2), max(10, off.max() * 2))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(shown) - 0.4, -0.6)
    return figure


def _log_tokens(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set(xscale="log", xlabel="context (tokens)")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
