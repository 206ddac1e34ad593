"""The figures of the measurements: plain functions from records to a matplotlib Figure.

Axes are labelled, with units. The figures of the budget and of the routes are in budget_figures and
route_figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gaac_lab.decision import Row
from gaac_lab.figure_style import BLUE, GREY, INK, MIB, ORANGE, PALE, new_figure, styled


@styled
def entropy_floor(floors: pd.DataFrame) -> Figure:
    """Bits per value by field, beside the 16 bits that a value takes raw. Columns: name, sign_bits,
    exponent_bits, mantissa_bits, ratio."""
    figure, (axes,) = new_figure(height=0.6 * len(floors) + 1.6)
    left = np.zeros(len(floors))
    parts = [("sign", GREY, ""), ("exponent", BLUE, "//"), ("mantissa", ORANGE, "")]
    for part, colour, hatch in parts:
        bits = floors[f"{part}_bits"].to_numpy()
        axes.barh(floors["name"], bits, left=left, color=colour, hatch=hatch, label=part)
        left += bits
    for row, (total, ratio) in enumerate(zip(left, floors["ratio"], strict=True)):
        label = f"{total:.2f} bits, {ratio:.2f}×"
        axes.text(total - 0.15, row, label, va="center", ha="right", color="white", weight="bold")
    axes.axvline(16, color=INK, linewidth=1)
    axes.set(xlim=(0, 16.5), xlabel="entropy (bits per value; raw takes 16)")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.22))
    return figure


@styled
def baseline(records: pd.DataFrame) -> Figure:
    """TTFT, decode speed and memory against prompt length; only lengths that were measured."""
    done = records[records["status"] == "measured"]
    figure, (ttft, speed, memory) = new_figure(width=10, height=3.3, columns=3)
    _with_spread(ttft, done, "ttft_s", BLUE)
    ttft.set(title="Time to first token", xlabel="prompt (tokens)", ylabel="TTFT (s)")
    _with_spread(speed, done, "decode_tok_s", BLUE)
    speed.set(title="Decode speed", xlabel="prompt (tokens)", ylabel="decode (tokens/s)")
    memory.plot(done["tokens"], done["kv_raw_bytes"] / MIB, color=BLUE, marker="o", label="KV")
    if done.get("peak_bytes") is not None and done["peak_bytes"].notna().any():
        peak = done["peak_bytes"].astype(float) / MIB
        memory.plot(done["tokens"], peak, color=ORANGE, marker="s", ls="--", label="peak over idle")
    memory.set(title="Memory", xlabel="prompt (tokens)", ylabel="memory (MiB)")
    memory.legend()
    for axes in (ttft, speed, memory):
        axes.set_ylim(bottom=0)
    return figure


def _with_spread(axes: Axes, frame: pd.DataFrame, column: str, colour: str) -> None:
    middle = frame[column].astype(float)
    errors = [middle - frame[f"{column}_low"], frame[f"{column}_high"] - middle]
    axes.errorbar(frame["tokens"], middle, yerr=errors, color=colour, marker="o", capsize=3)


@styled
def layer_bytes(records: pd.DataFrame) -> Figure:
    """Raw and held bytes of each layer. Columns: layer, raw_bytes, stored_bytes."""
    figure, (axes,) = new_figure()
    axes.bar(records["layer"], records["raw_bytes"] / MIB, color=PALE, label="raw")
    held = records["stored_bytes"] / MIB
    axes.bar(records["layer"], held, color=BLUE, width=0.5, label="held")
    axes.set(xlabel="layer", ylabel="K and V (MiB)", title="Bytes before and after, layer by layer")
    axes.legend(ncols=2, loc="upper right", bbox_to_anchor=(1, 1.14))
    return figure


@styled
def layer_ratios(records: pd.DataFrame) -> Figure:
    """Ratio of K and of V in each layer beside its entropy floor. Columns: layer, part, ratio,
    floor_ratio."""
    figure, (axes,) = new_figure(width=8.4)
    for part, colour, marker in (("k", BLUE, "o"), ("v", ORANGE, "s")):
        rows, name = records[records["part"] == part], part.upper()
        axes.plot(rows["layer"], rows["ratio"], color=colour, marker=marker, label=name)
        floor = rows["floor_ratio"]
        axes.plot(rows["layer"], floor, color=colour, linestyle=":", label=f"{name}, entropy")
    axes.set(xlabel="layer", ylabel="raw bytes / stored bytes", title="Ratio by layer")
    axes.set_ylim(bottom=1)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@styled
def offline(records: pd.DataFrame, prefill_s: float) -> Figure:
    """Loading a document's KV against computing it. Columns: name, load_s, stored_bytes."""
    figure, (time_axes, size_axes) = new_figure(width=8.6, height=2.8, columns=2)
    names = ["prefill again", *(f"load {name}" for name in records["name"])]
    seconds = [prefill_s, *records["load_s"]]
    time_axes.barh(names, seconds, color=[GREY] + [BLUE] * len(records))
    for row, value in enumerate(seconds):
        time_axes.text(value, row, f" {value:.3g} s", va="center")
    time_axes.set(xlabel="seconds", xlim=(0, max(seconds) * 1.25), title="Time to have the KV")
    sizes = records["stored_bytes"] / MIB
    size_axes.barh(records["name"], sizes, color=BLUE)
    for row, value in enumerate(sizes):
        size_axes.text(value, row, f" {value:.1f}", va="center")
    size_axes.set(xlabel="MiB on disk", xlim=(0, max(sizes) * 1.2), title="Size on disk")
    for axes in (time_axes, size_axes):
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    return figure


@styled
def pareto(rows: Sequence[Row], *, min_throughput: float) -> Figure:
    """KV memory saved against decode throughput; up and to the right is better."""
    figure, (axes,) = new_figure(width=8.4, height=4.6)
    shown = [row for row in rows if row.ratio_to_baseline is not None and row.kv_raw_bytes]
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.axvline(min_throughput, color=ORANGE, linestyle="--", linewidth=1)
    axes.annotate(
        f"{min_throughput:g} asked for",
        (min_throughput, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=ORANGE,
    )
    for number, row in enumerate(shown, start=1):
        x, saved = row.ratio_to_baseline or 0.0, _saved_percent(row)
        colour = INK if row.is_baseline else BLUE if row.codec == "gaac" else GREY
        marker = "s" if row.is_baseline else "o" if row.codec == "gaac" else "^"
        spread = [[x - (row.ratio_low or x)], [(row.ratio_high or x) - x]]
        label = f"{number}  {row.label}"
        axes.errorbar(x, saved, xerr=spread, fmt=marker, color=colour, capsize=2, label=label)
        axes.annotate(str(number), (x, saved), xytext=(4, 5), textcoords="offset points")
    axes.set(
        xlabel="decode throughput (multiple of the uncompressed cache's)",
        ylabel="KV memory saved (%)",
        title="Memory saved against throughput",
    )
    axes.set_xlim(left=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return figure


@styled
def heatmap(rows: Sequence[Row]) -> Figure:
    """Every point of the sweep by three numbers, each column shaded by its own range."""
    shown = [row for row in rows if row.ratio_to_baseline is not None and row.kv_raw_bytes]
    columns = ["KV saved (%)", "throughput (×)", "TTFT (s)"]
    table = np.array(
        [
            [
                _saved_percent(row),
                row.ratio_to_baseline or 0.0,
                row.ttft_s or 0.0,
            ]
            for row in shown
        ]
    )
    low, high = table.min(axis=0), table.max(axis=0)
    shade = (table - low) / np.where(high > low, high - low, 1)
    shade[:, 2] = 1 - shade[:, 2]  # a short TTFT is good
    figure, (axes,) = new_figure(width=7.2, height=0.32 * len(shown) + 1.2)
    axes.imshow(shade, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    axes.set_xticks(range(3), columns)
    axes.set_yticks(range(len(shown)), [row.label for row in shown])
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    for row in range(len(shown)):
        for column, form in enumerate(("{:.1f}", "{:.2f}", "{:.2f}")):
            axes.text(column, row, form.format(table[row, column]), ha="center", va="center")
    return figure


def _saved_percent(row: Row) -> float:
    return 100 * (row.saved_bytes or 0) / (row.kv_raw_bytes or 1)


@styled
def time_split(records: pd.DataFrame) -> Figure:
    """Stacked parts of a decode step, a bar for each way of keeping the cache."""
    figure, (axes,) = new_figure(height=0.7 * len(records) + 1.7)
    left = np.zeros(len(records))
    parts = [
        ("rest_s", "weights and the rest", PALE, ""),
        ("attention_s", "attention", BLUE, ""),
        ("cache_s", "joining the cache", GREY, "xx"),
        ("unpack_s", "unpacking blocks", ORANGE, "//"),
    ]
    for column, label, colour, hatch in parts:
        value = 1000 * records[column].to_numpy()
        axes.barh(records["label"], value, left=left, color=colour, hatch=hatch, label=label)
        left += value
    axes.set(xlabel="decode step (ms, with timers inside)", title="Where a step's time goes")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.25))
    return figure


@styled
def batches(records: pd.DataFrame) -> Figure:
    """Throughput ratio against batch, with its interval; 1 is break-even."""
    figure, (axes,) = new_figure()
    for label, rows in records.groupby("label", sort=False):
        middle = rows["ratio_to_baseline"]
        errors = [middle - rows["ratio_low"], rows["ratio_high"] - middle]
        plain = label == "uncompressed"
        axes.errorbar(
            rows["batch"],
            middle,
            yerr=errors,
            color=GREY if plain else BLUE,
            marker="s" if plain else "o",
            linestyle="--" if plain else "-",
            capsize=3,
            label=f"{label} (against itself: the noise)" if plain else label,
        )
    axes.axhline(1.0, color=INK, linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted(records["batch"].unique())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(
        xlabel="batch (rows)",
        ylabel="decode throughput (× uncompressed)",
        title="Does it begin to pay as the batch grows?",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


@styled
def step_floors(records: pd.DataFrame) -> Figure:
    """Measured step beside the least that memory allows. Columns: label, floor_ms, step_ms."""
    figure, (axes,) = new_figure(height=0.6 * len(records) + 1.6)
    axes.barh(records["label"], records["step_ms"], color=PALE, label="measured")
    axes.barh(
        records["label"], records["floor_ms"], color=BLUE, height=0.4, label="floor (bandwidth)"
    )
    for row, (step, floor) in enumerate(zip(records["step_ms"], records["floor_ms"], strict=True)):
        axes.text(step, row, f" {step:.1f} ms, floor {floor:.1f}", va="center")
    axes.set(xlabel="time (ms)", xlim=(0, 1.35 * records["step_ms"].max()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.25))
    return figure
