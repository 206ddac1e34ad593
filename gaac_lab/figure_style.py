"""The one style of every figure: readable when printed in grey, no colour without a second cue."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GIB = 2**30
MIB = 2**20
INK, BLUE, ORANGE, GREY, PALE = "#1b1f24", "#2563a8", "#c8641b", "#8b949e", "#d5d9de"
STYLE: dict[str, Any] = {
    "figure.dpi": 110,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "legend.frameon": False,
}

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draws in this style, and leaves the reader's own settings alone."""

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


class ShownFigure(Figure):
    """A figure that notebooks show as a picture, whether or not pyplot's backend was ever asked."""

    def _repr_png_(self) -> bytes:
        """What IPython displays."""
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def new_figure(
    width: float = 7.2, height: float = 3.8, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure outside pyplot's registry, so that a notebook shows it once, where it is named."""
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])
