"""What the benchmark of codecs shows: tables, and one plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Row = dict[str, Any]

SETTING = ("granularity", "piece_bytes", "threads")
WIDTH = 110  # characters that a table needs


def tables(rows: Sequence[Row], floors: Sequence[Row], title: str) -> Iterator[Table]:
    """One table for each piece size and number of threads; speeds are of K and V together."""
    for setting in dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows):
        granularity, piece_bytes, threads = setting
        call = f"one {granularity} of {piece_bytes / 1e3:.0f} KB a call, threads: {threads}"
        table = Table(title=f"{title}; {call}", caption=_floor_line(floors))
        table.add_column("codec", no_wrap=True)
        for name in ("ratio K", "V", "K+V", "encode MB/s", "/ copy", "decode MB/s", "/ copy", "N"):
            table.add_column(name, justify="right", no_wrap=True)
        here = [row for row in rows if tuple(row[key] for key in SETTING) == setting]
        for codec in dict.fromkeys(row["codec"] for row in here):
            parts = {row["part"]: row for row in here if row["codec"] == codec}
            ratios = [f"{parts[part]['ratio']:.3f}" for part in ("k", "v", "kv")]
            table.add_row(codec, *ratios, *_speeds(parts["kv"]), str(parts["kv"]["n"]))
        yield table


def _speeds(row: Row) -> list[str]:
    cells = []
    for way in ("encode", "decode"):
        cells.append(f"{row[f'{way}_mb_s']:.0f} ± {row[f'{way}_spread_mb_s']:.0f}")
        cells.append(f"{row[f'{way}_of_memcpy']:.3f}")
    return cells


def _floor_line(floors: Sequence[Row]) -> str:
    """The floors of coders that see one value at a time."""
    pairs = [
        f"{row['part'].upper()} {row['order0_ratio']:.3f}, {row['per_channel_ratio']:.3f}"
        for row in floors
    ]
    return "Floors, order 0 and per (head, channel): " + "; ".join(pairs)


def plot(rows: Sequence[Row], floors: Sequence[Row], path: Path) -> None:
    """Ratio of K and V together against speed, decode beside encode, one thread."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["part"] == "kv" and row["threads"] == 1]
    shown = [row for row in shown if row["codec"] != "memcpy"]
    shown.sort(key=lambda row: -row["ratio"])
    names = dict.fromkeys(row["codec"] for row in shown)
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, way in zip(panels, ("decode", "encode"), strict=True):
        for row in shown:
            one_block = row["granularity"] == "block"
            axes.plot(
                row[f"{way}_mb_s"],
                row["ratio"],
                "o" if row["codec"].startswith("gaac") else "^",
                color=colors[row["codec"]],
                markerfacecolor=None if one_block else "none",
                markersize=9,
                linestyle="none",
                label=row["codec"] if one_block else None,
            )
        for floor in floors:
            if floor["part"] == "kv":
                axes.axhline(floor["order0_ratio"], color="0.5", linestyle=":", linewidth=1)
                axes.axhline(floor["per_channel_ratio"], color="0.5", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel(f"{way}, MB/s of uncompressed bytes")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("ratio, K and V together, headers counted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(
        f"{shown[0]['dtype']} KV after {shown[0]['text']}, one thread. Filled: one block a call, "
        "hollow: one layer.\nDotted: order-0 floor, dashed: floor per (head, channel).",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
