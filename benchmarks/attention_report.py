"""What the benchmarks of attention show: tables, and the growth with length as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Row = dict[str, Any]

SETTING = ("shape", "batch", "threads")
COLUMNS = ("ms a layer", "N", "× default", "× raw kernel", "read MB", "GB/s", "floor ms", "error")
STEP_COLUMNS = (
    *("ms a step", "N", "× default", "× raw kernel", "KV MB", "of raw", "floor ms"),
    "equal ids",
)
WIDTH = 125  # characters that a table needs


def tables(rows: Sequence[Row], memory_gb_s: Mapping[int, float]) -> Iterator[Table]:
    """One table for each shape, batch and number of threads; a section for each length."""
    for setting in dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows):
        shape, batch, threads = setting
        here = [row for row in rows if tuple(row[key] for key in SETTING) == setting]
        table = Table(
            title=f"{shape}, batch {batch}, threads: {threads}",
            caption=f"memory: {memory_gb_s[threads]:.1f} GB/s",
        )
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("form", no_wrap=True)
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for tokens in dict.fromkeys(row["tokens"] for row in here):
            for index, row in enumerate(row for row in here if row["tokens"] == tokens):
                table.add_row(f"{tokens:,}" if not index else "", row["form"], *_cells(row))
            table.add_section()
        yield table


def _cells(row: Row) -> Iterator[str]:
    yield f"{row['layer_ms']:.3f} ± {row['spread_ms']:.3f}"
    yield str(row["n"])
    yield f"{row['speedup']:.2f}"
    yield f"{row['speedup_of_kernel']:.2f}"
    yield f"{row['read_bytes'] / 1e6:.2f}"
    yield f"{row['read_gb_s']:.1f}"
    yield f"{row['floor_ms']:.3f}"
    yield f"{row['error']:.1e}"


def step_tables(rows: Sequence[Row], memory_gb_s: Mapping[int, float]) -> Iterator[Table]:
    """Whole decode steps: one table for each length and number of threads."""
    for setting in dict.fromkeys((row["tokens"], row["threads"]) for row in rows):
        tokens, threads = setting
        table = Table(
            title=f"decode step after {tokens:,} tokens, threads: {threads}",
            caption=f"memory: {memory_gb_s[threads]:.1f} GB/s",
        )
        table.add_column("form", no_wrap=True)
        for name in STEP_COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            if (row["tokens"], row["threads"]) == setting:
                table.add_row(row["form"], *_step_cells(row))
        yield table


def _step_cells(row: Row) -> Iterator[str]:
    yield f"{row['step_ms']:.1f} ± {row['spread_ms']:.1f}"
    yield str(row["n"])
    yield f"{row['speedup']:.2f}"
    yield f"{row['speedup_of_kernel']:.2f}"
    yield f"{row['kv_stored_bytes'] / 1e6:.1f}"
    yield f"{row['kv_stored_bytes'] / row['kv_raw_bytes']:.3f}"
    yield f"{row['floor_ms']:.1f}"
    yield str(row["equal_ids"])


def memory_table(rows: Sequence[Row]) -> Table:
    """Peaks above the loaded model."""
    table = Table(
        title=f"peak memory at {rows[0]['tokens']:,} tokens, above the loaded model (N = 1)"
    )
    table.add_column("form", no_wrap=True)
    for name in ("reading, MB", "decoding, MB", "KV held, MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "failure" in row:
            table.add_row(row["form"], row["failure"])
            continue
        sizes = (row["prefill_peak_bytes"], row["decode_peak_bytes"], row["kv_stored_bytes"])
        cells = ["not measured" if size is None else f"{size / 1e6:.1f}" for size in sizes]
        table.add_row(row["form"], *cells)
    return table


def plot(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds of a layer against tokens: a column for each shape, a row for threads."""
    from matplotlib.figure import Figure

    batch = rows[0]["batch"]
    shown = [row for row in rows if row["batch"] == batch]
    shapes = list(dict.fromkeys(row["shape"] for row in shown))
    threads = list(dict.fromkeys(row["threads"] for row in shown))
    names = list(dict.fromkeys(row["form"] for row in shown))
    figure = Figure(figsize=(4.6 * len(shapes), 3.6 * len(threads) + 0.6), layout="constrained")
    panels = figure.subplots(len(threads), len(shapes), squeeze=False, sharex=True)
    for line, count in zip(panels, threads, strict=True):
        for axes, shape in zip(line, shapes, strict=True):
            here = [row for row in shown if (row["shape"], row["threads"]) == (shape, count)]
            _draw(axes, here, names)
            axes.set_title(f"{shape}, threads: {count}")
    for axes in panels[-1]:
        axes.set_xlabel("tokens held")
    for axes in panels[:, 0]:
        axes.set_ylabel("ms a layer and step")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * min(len(shapes), 2))
    figure.savefig(path, dpi=150)


def _draw(axes: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        own = [row for row in rows if row["form"] == name]
        tokens = [row["tokens"] for row in own]
        axes.plot(tokens, [row["layer_ms"] for row in own], "o-", color=f"C{index}", label=name)
    own = [row for row in rows if row["form"] == names[-1]]
    axes.plot(
        [row["tokens"] for row in own],
        [row["floor_ms"] for row in own],
        ":",
        color="0.4",
        label=f"floor of {names[-1]}",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
    axes.grid(alpha=0.3, which="both")
