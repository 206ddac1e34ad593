"""The first line of every notebook: check its parameters, open the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gaac_lab import baseline, models, parameters
from gaac_lab.runs import Run


def start(notebook: str, namespace: Mapping[str, Any]) -> Run:
    """The run that `notebook` writes to; call it right after the parameters cell with `globals()`.

    Every name in `namespace` that is a workbook parameter is checked, so that a slip in an
    interactive session fails as clearly as one on the command line, and kept with the results.
    Raises ParameterError or RunError.
    """
    given = {name: namespace[name] for name in parameters.names() if name in namespace}
    checked = parameters.check(given)
    run = Run.open(checked.get("out_dir", ""), notebook=notebook, parameters=checked)
    print(f"results go to {run.dir}")
    return run


def keep_model(run: Run, model: Any, name: str) -> None:
    """Note in the run which model was measured, in a line for the report."""
    info = models.describe(model, name)
    shown = "SmolLM2-135M-Instruct, the default" if info.name == models.DEFAULT else info.name
    size = f"{info.parameters / 1e6:,.0f} million parameters, {info.layers} layers"
    how = f"{info.dtype} on {info.device}, attention {info.attn_implementation}"
    run.note("model", f"{shown} ({info.model_type}, {size}) in {how}")


def require_context(model: Any, tokens: int) -> None:
    """Raise ValueError when `tokens` (prompt and new ones) are beyond the model's context."""
    reason = baseline.beyond_context(model, tokens)
    if reason is not None:
        raise ValueError(f"{reason}: set prompt_tokens (or entropy_tokens) lower")


def say(line: str) -> None:
    """Progress of a long cell, a line at a time."""
    print(line, flush=True)
