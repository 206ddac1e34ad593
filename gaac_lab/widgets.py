"""Controls for the notebooks on budgets and routes. They compute, they never run a model.

Each result also stands as plain text beneath, so nothing is lost without a front end that shows
widgets; what a report needs is drawn by the cells that follow, from the notebook's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from gaac_lab import accelerators, budget, model_table, routes

LENGTHS = {f"{2**k}K": 1024 * 2**k for k in range(11)}  # 1K to 1M tokens
WINDOWS = {"none": None, **{f"{2**k}K": 1024 * 2**k for k in range(7)}}
HINT = "Move a control to recompute. No controls above? Run this cell in JupyterLab."


@dataclass(frozen=True)
class Panel:
    """Controls with their result beneath. `text` is the result as it stands now."""

    box: widgets.Widget
    text: Callable[[], str]

    def show(self) -> None:
        """Display the controls, and their result as text for where no front end shows them."""
        display(self.box)
        print(self.text())
        print(HINT)


def kv_calculator() -> Panel:
    """Sliders for the KV formula with its result beneath."""
    fields = {
        "layers": widgets.IntSlider(value=32, min=1, max=128, description="layers"),
        "kv_heads": widgets.IntSlider(value=8, min=1, max=128, description="KV heads"),
        "head_dim": widgets.Dropdown(
            value=128, options=[32, 64, 80, 96, 128, 192, 256], description="head_dim"
        ),
        "seq_len": widgets.IntSlider(
            value=32768, min=1024, max=131072, step=1024, description="tokens"
        ),
        "batch": widgets.IntSlider(value=1, min=1, max=64, description="batch"),
    }

    def compute(**values: Any) -> str:
        return f"{budget.kv_gib(**values):.2f} GiB of keys and values in 16 bits"

    return panel(fields, compute)


def budget_panel(model: str, *, seq_len: int, batch: int, dtype: str, memory: str) -> Panel:
    """A published model, its length, sequences, dtype and device: KV, weights, tokens that fit."""
    fields = {
        "model": widgets.Dropdown(value=model, options=model_table.names(), description="model"),
        "seq_len": _tokens("tokens", seq_len),
        "batch": widgets.BoundedIntText(value=batch, min=1, max=4096, description="sequences"),
        "dtype": widgets.Dropdown(
            value=dtype, options=["bfloat16", "float16", "float8", "float32"], description="dtype"
        ),
        "memory": widgets.Combobox(
            value=memory,
            options=[entry.device for entry in accelerators.accelerators()],
            description="device or GiB",
            ensure_option=False,
        ),
    }
    return panel(fields, budget_text)


def budget_text(model: str, *, seq_len: int, batch: int, dtype: str, memory: str) -> str:
    """What the budget panel says, a fact a line."""
    rows = model_table.table([model], seq_len=seq_len, batch=batch, dtype=dtype, memory=memory)
    shown = model_table.readable(rows).iloc[0]
    found = budget.kv_budget(model_table.config(model), seq_len=seq_len, batch=batch, dtype=dtype)
    lines = [
        f"{shown['KV held']} of KV in {shown['layers with KV']} layers, "
        f"{shown['KV bytes a token']} bytes a token",
        found.explanation,
        f"fixed state: {shown['fixed state']}; read in one decode step: {shown['read a step']}",
        f"weights (nominal): {shown['weights (nominal)']}",
        f"tokens that fit into {budget.format_bytes(model_table.memory_bytes(memory))} beside the "
        f"weights, for each of {batch}: {shown['tokens that fit']}",
        *(f"note: {note}" for note in found.notes),
    ]
    return "\n".join(lines)


def bill_panel(
    model: str, *, seq_len: int, bits: int, window: int | None, group_values: int | None
) -> Panel:
    """A published model, its length, bits a value and window: the stacked bill."""
    groups = {"not counted": None, "one each 32": 32, "one each 64": 64, "one each 128": 128}
    fields = {
        "model": widgets.Dropdown(value=model, options=model_table.names(), description="model"),
        "seq_len": _tokens("tokens", seq_len),
        "bits": widgets.Dropdown(value=bits, options=[16, 8, 4, 2], description="bits a value"),
        "window": _choice("window", WINDOWS, window),
        "group_values": _choice("scales", groups, group_values),
    }
    return panel(fields, bill_text)


def bill_text(
    model: str, *, seq_len: int, bits: int, window: int | None, group_values: int | None
) -> str:
    """What the bill panel says, a step a line."""
    rows = routes.bill(
        model_table.config(model),
        seq_len=seq_len,
        bits=bits,
        window=window,
        group_values=group_values,
    )
    sizes = zip(rows["step"], rows["total_bytes"], rows["times_smaller"], strict=True)
    lines = [f"{step}: {budget.format_bytes(size)}, 1/{times:.4g}" for step, size, times in sizes]
    return "\n".join([lines[-1], *lines])


def panel(fields: Mapping[str, Any], compute: Callable[..., str]) -> Panel:
    """The fields in a column and, beneath, the text that `compute` makes of their values.

    Computed once at creation, then whenever a field has been changed and let go. A ValueError of
    `compute` is shown as the text.
    """
    result = widgets.HTML()

    def text() -> str:
        try:
            return compute(**{name: field.value for name, field in fields.items()})
        except ValueError as error:
            return str(error)

    def show(_: object = None) -> None:
        result.value = _html(text())

    for field in fields.values():
        if hasattr(field, "continuous_update"):
            field.continuous_update = False
        field.style.description_width = "7em"
        field.observe(show, names="value")
    show()
    return Panel(widgets.VBox([*fields.values(), result]), text)


def _html(text: str) -> str:
    first, *rest = (
        line.replace("&", "&amp;").replace("<", "&lt;") for line in text.splitlines() or [""]
    )
    return "<br>".join([f"<b>{first}</b>", *rest])


def _tokens(description: str, value: int) -> widgets.Widget:
    return _choice(description, LENGTHS, value)


def _choice(description: str, options: Mapping[str, Any], value: Any) -> widgets.Widget:
    """A dropdown of named values; a value that is not among them is added under its own number."""
    named = dict(options)
    if value not in named.values():
        named[f"{value:,}"] = value
    return widgets.Dropdown(value=value, options=list(named.items()), description=description)
