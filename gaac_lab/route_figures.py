"""The figures of the three routes: what they hold, what they cost, and how they stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from gaac_lab.figure_style import BLUE, GIB, GREY, INK, MIB, ORANGE, PALE, new_figure, styled

KINDS = {  # marker and colour of a kind of route
    "none": ("s", INK),
    "lossless": ("o", BLUE),
    "precision": ("^", ORANGE),
    "tokens": ("D", GREY),
    "stacked": ("P", "#5b3f8c"),
}
NOISE = 2.0  # standard errors drawn on each side of a perplexity


@styled
def bills(stack: pd.DataFrame) -> Figure:
    """The stacked bill of each model, a bar a step. Columns: model, step, total_bytes."""
    figure, (axes,) = new_figure(width=8.4, height=0.42 * len(stack) + 1.3)
    place = np.arange(len(stack))
    size = stack["total_bytes"].to_numpy(float) / GIB
    models = list(dict.fromkeys(stack["model"]))
    styles = [(BLUE, ""), (ORANGE, "//"), (GREY, ".."), (PALE, "xx")]
    for index, model in enumerate(models):
        own = (stack["model"] == model).to_numpy()
        colour, hatch = styles[index % len(styles)]
        axes.barh(place[own], size[own], color=colour, hatch=hatch, label=model)
    for row, value in enumerate(size):
        axes.text(value, row, f" {value:.2f}", va="center")
    axes.set_yticks(place, list(stack["step"]))
    axes.set(xlabel="KV cache (GiB)", xlim=(0, 1.15 * size.max()), title="The stacked bill")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    return figure


@styled
def window_caps(caps: pd.DataFrame, window: int) -> Figure:
    """KV over length with every token and with a window. Columns: tokens, every_token_bytes,
    window_bytes."""
    figure, (axes,) = new_figure()
    for column, label, colour, marker, line in (
        ("every_token_bytes", "every token", BLUE, "o", "-"),
        ("window_bytes", f"window of {window:,} tokens", ORANGE, "s", "--"),
    ):
        size = caps[column] / GIB
        axes.plot(caps["tokens"], size, color=colour, marker=marker, linestyle=line, label=label)
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="KV cache (GiB)")
    axes.set_xticks(list(caps["tokens"]), [f"{tokens // 1024}K" for tokens in caps["tokens"]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("A window is a constant cap")
    axes.legend()
    return figure


@styled
def quality(measured: pd.DataFrame) -> Figure:
    """Bytes held against what they cost, in perplexity and in facts recalled. Columns: route, kind,
    share_of_raw, perplexity_ratio, nll_diff_se, recall_hits, recall_trials."""
    figure, (loss, recall) = new_figure(width=11, height=4.2, columns=2)
    share = 100 * measured["share_of_raw"].to_numpy(float)
    ratio = measured["perplexity_ratio"].to_numpy(float)
    factor = np.exp(NOISE * measured["nll_diff_se"].to_numpy(float))
    hits = 100 * measured["recall_hits"].to_numpy(float) / measured["recall_trials"].to_numpy(float)
    names = zip(measured["route"], measured["kind"], strict=True)
    for at, (route, kind) in enumerate(names):
        marker, colour = KINDS[kind]
        spread = [[ratio[at] - ratio[at] / factor[at]], [ratio[at] * factor[at] - ratio[at]]]
        label = f"{at + 1}  {route}"
        loss.errorbar(
            share[at], ratio[at], spread, fmt=marker, color=colour, capsize=3, label=label
        )
        recall.plot(share[at], hits[at], marker, color=colour)
    _number(loss, share, ratio, 0.05 * (ratio.max() - 1) + 0.01, ha="left", xytext=(6, -4))
    _number(recall, share, hits, 5, ha="center", xytext=(0, 7))
    loss.axhline(1.0, color=INK, linewidth=1)
    loss.set(ylabel="perplexity (× uncompressed)", title="Perplexity")
    loss.set_ylim(top=ratio.max() + 0.15 * (ratio.max() - 1) + 0.02)
    recall.set(ylabel="planted facts recalled exactly (%)", title="Recall", ylim=(-5, 109))
    for axes in (loss, recall):
        axes.set(xlabel="KV held (% of uncompressed)", xlim=(0, 108))
    figure.legend(*loss.get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return figure


def _number(axes: Axes, x: np.ndarray, y: np.ndarray, near_y: float, **place: Any) -> None:
    """Number the points from 1; those that lie within 5 in x and `near_y` in y share a label."""
    places: list[tuple[float, float, list[str]]] = []
    for number, at in enumerate(zip(x, y, strict=True), start=1):
        close = [p for p in places if abs(p[0] - at[0]) < 5 and abs(p[1] - at[1]) < near_y]
        if close:
            close[0][2].append(str(number))
        else:
            places.append((at[0], at[1], [str(number)]))
    for left, low, numbers in places:
        axes.annotate(", ".join(numbers), (left, low), textcoords="offset points", **place)


@styled
def recall_by_depth(by_depth: pd.DataFrame) -> Figure:
    """Facts recalled by each route at each depth. Columns: route, depth, hits, trials."""
    routes = list(dict.fromkeys(by_depth["route"]))
    depths = sorted(by_depth["depth"].unique())
    hits, trials = (
        by_depth.pivot(index="route", columns="depth", values=column).loc[routes, depths].to_numpy()
        for column in ("hits", "trials")
    )
    share = hits / trials
    figure, (axes,) = new_figure(width=7.6, height=0.34 * len(routes) + 1.5)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1.5, aspect="auto")
    axes.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_yticks(range(len(routes)), routes)
    axes.set_xlabel("depth of the fact (0% is the beginning of the context)")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for row in range(len(routes)):
        for column in range(len(depths)):
            text = f"{hits[row, column]:g} of {trials[row, column]:g}"
            axes.text(column, row, text, ha="center", va="center")
    axes.set_title("Exact recall by depth")
    return figure


@styled
def shared_prefix(shared: pd.DataFrame, times_smaller: float) -> Figure:
    """KV of many requests with one prefix: apart, shared, compressed. Columns: requests,
    apart_bytes, shared_bytes. `times_smaller` is the codec's ratio."""
    figure, (axes,) = new_figure(width=8.4)
    lines: Sequence[tuple[str, pd.Series, str, str, str]] = (
        ("each apart", shared["apart_bytes"], BLUE, "o", "-"),
        (f"each apart, {times_smaller:.2f}× smaller", shared["apart_bytes"] / times_smaller,
         BLUE, "v", "--"),
        ("prefix shared", shared["shared_bytes"], ORANGE, "s", "-"),
        (f"prefix shared, {times_smaller:.2f}× smaller", shared["shared_bytes"] / times_smaller,
         ORANGE, "P", "--"),
    )  # fmt: skip
    for label, size, colour, marker, line in lines:
        axes.plot(
            shared["requests"], size / GIB, color=colour, marker=marker, linestyle=line, label=label
        )
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="KV cache (GiB)")
    axes.set_xticks(list(shared["requests"]), [str(count) for count in shared["requests"]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("Reuse grows with the requests, compression does not")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@styled
def weights_and_kv(rows: pd.DataFrame) -> Figure:
    """Weights and KV, as they are and shrunk. Columns: weights, kv, weight_bytes, kv_bytes."""
    figure, (axes,) = new_figure(width=8.4, height=0.5 * len(rows) + 1.5)
    names = [f"weights {row.weights}, KV {row.kv}" for row in rows.itertuples(index=False)]
    weights, kv = rows["weight_bytes"].to_numpy() / MIB, rows["kv_bytes"].to_numpy() / MIB
    axes.barh(names, weights, color=PALE, label="weights")
    axes.barh(names, kv, left=weights, color=BLUE, hatch="//", label="KV cache")
    for row, (first, second) in enumerate(zip(weights, kv, strict=True)):
        axes.text(first + second, row, f" {first:.1f} + {second:.1f}", va="center")
    axes.set(xlabel="memory (MiB)", xlim=(0, 1.25 * (weights + kv).max()))
    axes.set_title("4-bit weights and lossless KV: what each takes off")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    return figure
