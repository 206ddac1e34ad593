"""Which route to take: the factors of the formula, the routes side by side, and three answers.

The tables join what `routes` counts with what `quality` measured; every number in them is one of
this run or of a config, and what was not measured is a dash.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from gaac_lab import budget, routes, tables
from gaac_lab.families.config_fields import read_config

LOSSY = ("precision", "tokens")
NOISE = 2.0  # standard errors within which a difference of the mean loss is no difference


def knobs(config: Any, *, seq_len: int, batch: int = 1) -> pd.DataFrame:
    """The factors of the formula for a model of equal layers, and which route turns each.

    Columns: factor, value, turned_by, when. Their product is the KV in bytes. Raises ValueError for
    a model whose layers differ: its formula is a sum.
    """
    found = budget.kv_budget(config, seq_len=seq_len, batch=batch)
    if len(found.kinds) != 1 or found.k_bytes is None or found.k_bytes != found.v_bytes:
        raise ValueError("The layers of this model differ, so its formula is a sum: see 01_budget.")
    (kind,) = found.kinds
    kept = seq_len if kind.window_tokens is None else min(seq_len, kind.window_tokens)
    at_training, by_request = "at training", "at each request"
    rows = [
        ("K and V", 2, "sharing K and V, or one latent for both (MLA)", at_training),
        ("layers with KV", kind.layers, "layers that share KV, hybrids", at_training),
        ("KV heads", kind.kv_heads, "ROUTE 1: GQA, MQA", at_training),
        ("head_dim", kind.k_head_dim, "latents (MLA)", at_training),
        ("tokens", kept, "ROUTE 3: window, sinks, heavy hitters", by_request),
        ("sequences", batch, "serving fewer at once", by_request),
        ("bytes a value", found.bytes_per_value, "ROUTE 2: 8, 4, 2 bits", by_request),
    ]
    return pd.DataFrame(rows, columns=["factor", "value", "turned_by", "when"])


def comparison(config: Any, measured: pd.DataFrame, *, kv_heads: int = 1) -> pd.DataFrame:
    """The three routes beside lossless, a row each; `measured` are the rows of `quality`.

    `config` is the example for the first route: what its KV heads save already, and what `kv_heads`
    in their place would.
    """
    fields = read_config(config)
    heads = fields[routes.ATTENTION_HEADS]
    now = fields[routes.KV_HEADS]
    shares = routes.kv_heads(fields, [now, kv_heads], seq_len=1)["share"]
    fewer_heads = f"{heads} → {now} heads: 1/{1 / shares[0]:g}; to {kv_heads}: 1/{1 / shares[1]:g}"
    rows = [
        {
            "what it does to the answer": "changes the model",
            "route": "fewer KV heads (GQA, MQA)",
            "factor": "KV heads",
            "gain": fewer_heads,
            "cost in quality": "of the trained model: little for GQA, more for MQA; not measured "
            "here, since a finished model has the heads that it has",
            "when": "at training, or by uptraining (5% of the compute: Ainslie 2023)",
            "reversible": "no",
        },
        {
            "what it does to the answer": "approximate",
            "route": "fewer bits a value",
            "factor": "bytes a value",
            "gain": _gains(measured, "precision"),
            "cost in quality": _costs(measured, "precision"),
            "when": "at any time, on a finished model",
            "reversible": "no: what is rounded away is gone",
        },
        {
            "what it does to the answer": "approximate",
            "route": "fewer tokens",
            "factor": "tokens",
            "gain": _gains(measured, "tokens"),
            "cost in quality": _costs(measured, "tokens"),
            "when": "at any time, on a finished model",
            "reversible": "no: what is dropped is gone",
        },
        {
            "what it does to the answer": "bit-exact",
            "route": "lossless",
            "factor": "none: bits that say nothing new",
            "gain": _gains(measured, "lossless"),
            "cost in quality": _costs(measured, "lossless"),
            "when": "at any time, on a finished model, and on top of the others",
            "reversible": "yes, bit for bit",
        },
    ]
    return pd.DataFrame(rows)


def first_knob(measured: pd.DataFrame) -> pd.Series | None:
    """The lossy route that holds least and lost nothing that this run could measure, or None."""
    lossy = measured[measured["kind"].isin(LOSSY)]
    free = lossy[[_is_free(row, measured) for _, row in lossy.iterrows()]]
    return None if free.empty else _least(free, "share_of_raw")


def headline(measured: pd.DataFrame) -> str:
    """One sentence for the report: of each kind of route the mildest, and what it costs."""
    parts = []
    for kind, name in (
        ("lossless", "lossless"),
        ("precision", "fewer bits"),
        ("tokens", "fewer tokens"),
    ):
        rows = _rows(measured, kind)
        if rows.empty:
            continue
        best = _least(rows, "nll_diff")
        share = f"{best.route} holds {best.share_of_raw:.0%} of the KV"
        price = "every bit equal" if kind == "lossless" and best.exact else cost(best)
        parts.append(f"{name}: {share}, {price}")
    knob = first_knob(measured)
    free = (
        "no lossy route was free of measurable loss"
        if knob is None
        else (
            f"the smallest lossy one without a measurable loss is {knob.route}, "
            f"{knob.share_of_raw:.0%}"
        )
    )
    return f"{'; '.join(parts)}; {free}."


def answers(
    config: Any, measured: pd.DataFrame, *, seq_len: int = 65536, weight_bytes: int | None = None
) -> list[tuple[str, str]]:
    """The three questions of a reader, answered from this run: (question, answer)."""
    found = budget.kv_budget(config, seq_len=seq_len)
    return [
        (f"How many bytes does my model need at {seq_len:,} tokens?", _need(found, weight_bytes)),
        ("Which knob would I turn first?", _first(measured)),
        ("What would it cost me?", _price(measured)),
    ]


def _need(found: budget.KVBudget, weight_bytes: int | None) -> str:
    text = (
        f"{budget.format_bytes(found.total_bytes)} for each sequence in {found.dtype}: "
        f"{found.bytes_per_token:,} bytes for each further token, "
        f"{found.layers_with_kv} of {found.layers} layers holding KV"
    )
    if found.bytes_per_token != found.bytes_per_token_below_window:
        text += (
            f" ({found.bytes_per_token_below_window:,} bytes a token until the windows are full)"
        )
    if found.fixed_state_bytes:
        text += f", and a fixed state of {budget.format_bytes(found.fixed_state_bytes)}"
    if weight_bytes:
        text += f"; the weights take {budget.format_bytes(weight_bytes)}"
    beyond = [note for note in found.notes if "context" in note]
    return f"{text}. {' '.join(f'Note: {note}.' for note in beyond)}".strip()


def _first(measured: pd.DataFrame) -> str:
    lossless = _rows(measured, "lossless")
    kept = " or ".join(f"{row.share_of_raw:.0%} ({row.route})" for row in lossless.itertuples())
    text = f"Lossless, which costs no quality: of the bytes {kept} stay. " if kept else ""
    knob = first_knob(measured)
    if knob is None:
        mildest = _least(measured[measured["kind"].isin(LOSSY)], "nll_diff")
        return (
            f"{text}Every lossy route lost something that this run could measure; the mildest was "
            f"{mildest.route}, which holds {mildest.share_of_raw:.0%}."
        )
    return (
        f"{text}If that is not enough: {knob.route}, which holds {knob.share_of_raw:.0%}; its loss "
        "was within the noise of this run. KV heads come before both, but only while you choose "
        "the model."
    )


def _price(measured: pd.DataFrame) -> str:
    base = _rows(measured, "none").iloc[0]
    knob = first_knob(measured)
    lossy = measured[measured["kind"].isin(LOSSY)]
    dear = lossy[[not _is_free(row, measured) for _, row in lossy.iterrows()]]
    text = [
        f"{row.route}: equal bits, decode speed × {tables.number(row.step_ratio)} when unpacked at "
        "every step (04_sweep has it read in place)."
        for _, row in _rows(measured, "lossless").head(1).iterrows()
        if row.exact
    ]
    if knob is not None:
        text.append(f"{knob.route}: {cost(knob)}.")
    if not dear.empty:
        least = _least(dear, "share_of_raw")
        mildest = _least(dear, "nll_diff")
        for row in [mildest] if mildest.route == least.route else [mildest, least]:
            text.append(f"{row.route} holds {row.share_of_raw:.0%}: {cost(row)}.")
    text.append(f"Uncompressed: {_recall(base)}.")
    if not base.recall_hits > base.recall_trials / 2:
        text.append("That few say little about the routes: try a shorter context.")
    text.append(f"Measured on {int(base.eval_tokens):,} tokens; other texts and models differ.")
    return " ".join(text)


def cost(row: pd.Series) -> str:
    """What one measured route costs: perplexity, recall, and the time of a step."""
    step = tables.number(row.step_ratio)
    return f"perplexity × {_loss(row)}, {_recall(row)}, decode speed × {step}"


def _loss(row: pd.Series) -> str:
    """The ratio of perplexities and, where it is not exact, its interval of two standard errors."""
    if pd.isna(row.perplexity_ratio) or pd.isna(row.nll_diff_se):
        return tables.DASH
    if row.nll_diff_se == 0:
        return f"{row.perplexity_ratio:.3f}"
    low, high = (math.exp(row.nll_diff + sign * NOISE * row.nll_diff_se) for sign in (-1, 1))
    return f"{row.perplexity_ratio:.3f} [{low:.3f}, {high:.3f}]"


def _recall(row: pd.Series) -> str:
    if pd.isna(row.recall_trials):
        return "recall not measured"
    return f"{int(row.recall_hits)} of {int(row.recall_trials)} facts recalled"


def _is_free(row: pd.Series, measured: pd.DataFrame) -> bool:
    """True if perplexity is within its noise, and recall within one standard error of the count
    that the uncompressed cache reaches: one fact of 20 where that is 18, none where it is all."""
    base = _rows(measured, "none").iloc[0]
    share = base.recall_hits / base.recall_trials
    recall_noise = math.sqrt(base.recall_trials * share * (1 - share))
    within = row.nll_diff <= NOISE * row.nll_diff_se  # False where one of them is not known (NaN)
    return bool(within and row.recall_hits >= base.recall_hits - recall_noise)


def _rows(measured: pd.DataFrame, kind: str) -> pd.DataFrame:
    return measured[measured["kind"] == kind]


def _least(rows: pd.DataFrame, column: str) -> pd.Series:
    """The row with the lowest value; what is not known comes last."""
    return rows.sort_values(column, kind="stable").iloc[0]


def _gains(measured: pd.DataFrame, kind: str) -> str:
    rows = _rows(measured, kind).itertuples()
    return "; ".join(f"{row.route}: {row.share_of_raw:.0%} held" for row in rows) or tables.DASH


def _costs(measured: pd.DataFrame, kind: str) -> str:
    lines = []
    for _, row in _rows(measured, kind).iterrows():
        if row.exact is True or row.exact == 1:
            lines.append(f"{row.route}: none, equal bits")
        else:
            lines.append(f"{row.route}: perplexity × {_loss(row)}, {_recall(row)}")
    return "; ".join(lines) or tables.DASH
