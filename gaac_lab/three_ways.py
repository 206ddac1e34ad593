"""Three ways, one answer: the formula, a second count that shares no code with it, transformers.

The formula is `budget`, the second count `budget_oracle`, and `cache_probe` runs a small model of
the same family and counts what its cache holds.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from gaac_lab import budget, budget_oracle, cache_probe
from gaac_lab.families.config_fields import read_config

HELD = "formula, as transformers"
COUNTED = ["bytes_per_token", "bytes_per_token_below_window", "total_bytes", "layers_with_kv"]


def table(config: Any, *, seq_len: int, batch: int = 1, dtype: str = "bfloat16") -> pd.DataFrame:
    """A row a way: way, bytes_per_token, bytes_per_token_below_window, total_bytes, layers_with_kv,
    note.

    A way that does not know the model has no numbers, and the note says why. Where the formula
    expects transformers to hold something else than the model needs (a window of W keeps W - 1
    tokens between steps, latents may be stored expanded), a fourth row says so, and the probe is to
    be held against that.
    """
    found = budget.kv_budget(config, seq_len=seq_len, batch=batch, dtype=dtype)
    rows = [{"way": "formula", **{name: getattr(found, name) for name in COUNTED}, "note": ""}]
    expected = found.total_bytes_transformers
    if expected is not None and expected != found.total_bytes:
        note = "what the formula expects transformers to hold"
        rows.append({"way": HELD, "total_bytes": expected, "note": note})
    rows.append(_oracle(config, seq_len, batch, dtype))
    rows.append(_probe(config, seq_len, batch, dtype))
    shown = pd.DataFrame(rows, columns=["way", *COUNTED, "note"])
    return shown.astype(dict.fromkeys(COUNTED, "Int64"))


def differences(rows: pd.DataFrame) -> list[str]:
    """Where another way gives other bytes than the formula: "oracle: total_bytes" and the like."""
    ways = rows.set_index("way")
    found = []
    for name in _answered(ways):
        expected = ways.loc["formula"].to_dict()
        if name == "transformers" and HELD in ways.index:
            expected["total_bytes"] = ways.loc[HELD, "total_bytes"]
        found += [f"{name}: {part}" for part in COUNTED if ways.loc[name, part] != expected[part]]
    return found


def verdict(rows: pd.DataFrame) -> str:
    """What `table` shows, in a sentence."""
    others = _answered(rows.set_index("way"))
    if differ := differences(rows):
        return f"THEY DIFFER ({', '.join(differ)}): do not trust the formula for this model."
    if not others:
        return "Only the formula knows this model: nothing here confirms it."
    return f"The formula and {' and '.join(others)} give the same bytes."


def _answered(ways: pd.DataFrame) -> list[str]:
    return [name for name in ("oracle", "transformers") if ways[COUNTED].loc[name].notna().all()]


def _oracle(config: Any, seq_len: int, batch: int, dtype: str) -> dict[str, Any]:
    row: dict[str, Any] = {"way": "oracle", "note": "another program, layer by layer"}
    try:
        count = budget_oracle.count(read_config(config), value_bytes=budget.dtype_bytes(dtype))
    except budget_oracle.UnknownModel as error:
        return {**row, "note": str(error.args[0])}
    return {
        **row,
        "bytes_per_token": count.bytes_per_token,
        "bytes_per_token_below_window": count.bytes_per_token_below_window,
        "total_bytes": count.total_bytes(seq_len, batch),
        "layers_with_kv": count.layers_with_kv,
    }


def _probe(config: Any, seq_len: int, batch: int, dtype: str) -> dict[str, Any]:
    row: dict[str, Any] = {"way": "transformers"}
    try:
        probed = cache_probe.probe(config, dtype=dtype)
    except cache_probe.CannotProbe as error:
        return {**row, "note": str(error)}
    return {
        **row,
        "bytes_per_token": probed.bytes_per_token,
        "bytes_per_token_below_window": probed.bytes_per_token_below_window,
        "total_bytes": probed.total_bytes(seq_len, batch),
        "layers_with_kv": probed.layers_with_kv,
        "note": f"a small model of the family, run in transformers {probed.transformers_version}",
    }
