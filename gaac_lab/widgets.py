"""Controls for the budget notebook. Each result also stands as plain text, so nothing is lost
without a front end that shows widgets."""

from __future__ import annotations

import ipywidgets as widgets
from IPython.display import display

from gaac_lab import budget


def kv_calculator() -> widgets.Widget:
    """Sliders for the KV formula with its result beneath; it computes, it never runs a model."""
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
    for field in fields.values():
        field.continuous_update = False
    result = widgets.HTML()

    def show(_: object = None) -> None:
        values = {name: field.value for name, field in fields.items()}
        size_gib = budget.kv_gib(**values)
        result.value = f"<b>{size_gib:.2f} GiB</b> of keys and values in 16 bits"

    for field in fields.values():
        field.observe(show, names="value")
    show()
    return widgets.VBox([*fields.values(), result])


def show_kv_calculator() -> None:
    """The controls, and a sentence for where no front end shows them."""
    display(kv_calculator())
    print("Move a control to recompute. No controls above? Run this cell in JupyterLab.")
