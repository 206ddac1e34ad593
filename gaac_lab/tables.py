"""Records as tables that people read: formatted text, a dash where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from gaac_lab.decision import Row

DASH = "–"


def mib(value: Any) -> str:
    return DASH if _unknown(value) else f"{value / 2**20:,.1f}"


def number(value: Any, digits: int = 2) -> str:
    return DASH if _unknown(value) else f"{value:,.{digits}f}"


def yes_no(value: Any) -> str:
    return DASH if _unknown(value) else "yes" if value else "NO"


def difference(value: Any) -> str:
    return DASH if _unknown(value) else "0" if value == 0 else f"{value:.2g}"


def logit_difference(row: Row) -> str:
    """The difference, and where another attention kernel runs, what eager attention makes of it."""
    shown = difference(row.logit_max_abs_diff)
    if row.eager_logit_max_abs_diff is None:
        return shown
    return f"{shown} (eager: {difference(row.eager_logit_max_abs_diff)})"


def ratio(row: Row) -> str:
    if row.ratio_to_baseline is None or row.ratio_low is None or row.ratio_high is None:
        return DASH
    return f"{row.ratio_to_baseline:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"


def saved(row: Row) -> str:
    if row.saved_bytes is None or not row.kv_raw_bytes:
        return DASH
    return f"{row.saved_bytes / row.kv_raw_bytes:.1%}"


def decision_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line a row: memory, bandwidth, throughput, consistency of the output, judgement."""
    return pd.DataFrame(
        [
            {
                "configuration": row.label,
                "tokens": f"{row.batch} × {row.tokens:,}" if row.batch > 1 else f"{row.tokens:,}",
                "KV held (MiB)": mib(row.kv_stored_bytes),
                "KV saved": saved(row),
                "peak (MiB)": mib(row.peak_bytes),
                "decode peak (MiB)": mib(row.decode_peak_bytes),
                "TTFT (s)": number(row.ttft_s),
                "decode (tok/s)": number(row.decode_tok_s, 1),
                "× uncompressed": ratio(row),
                "N (rounds)": _count(row),
                "KV per step (GB/s)": number(row.read_gb_s, 1),
                "bits equal": yes_no(row.tensor_equal),
                "max |Δlogit|": logit_difference(row),
                "ids equal": yes_no(row.tokens_equal),
                "judgement": _judgement(row),
            }
            for row in rows
        ]
    )


def _count(row: Row) -> str:
    return DASH if row.ratio_n is None else f"{row.ratio_n} ({row.ratio_rounds})"


def _judgement(row: Row) -> str:
    if row.is_baseline:
        return "baseline (noise)" if row.ratio_low is not None else "baseline"
    if row.reason:
        return f"{row.judgement}: {row.reason}"
    return row.judgement or DASH


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)
