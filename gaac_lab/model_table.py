"""The published models of data/model_configs side by side: their KV, their weights, what fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from gaac_lab import accelerators, budget
from gaac_lab.paths import data_dir

ALL = "all"
GIB = 2**30
WEIGHT_BITS = 16
NO_LIMIT = "no limit"


def names() -> list[str]:
    """The models of data/model_configs, by the names of their files."""
    return sorted(path.stem for path in (data_dir() / "model_configs").glob("*.json"))


def config(name: str) -> dict[str, Any]:
    """The fields of one model's config.json about its cache, and `_about`: where they are from.

    Raises ValueError for a name that is not there.
    """
    if name not in names():
        raise ValueError(f"There is no model {name!r}: choose from {', '.join(names())}.")
    path = data_dir() / "model_configs" / f"{name}.json"
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields


def chosen(wanted: Sequence[str]) -> list[str]:
    """The names that are wanted, in that order; ["all"] is every one. ValueError if unknown."""
    if list(wanted) == [ALL]:
        return names()
    for name in wanted:
        config(name)
    return list(wanted)


def weight_bytes(fields: dict[str, Any], bits: float = WEIGHT_BITS) -> int | None:
    """Bytes of the weights by the model's nominal number of parameters; None if that is unknown."""
    billion = fields.get("_about", {}).get("parameters_billion")
    return None if billion is None else round(billion * 1e9 * bits / 8)


def memory_bytes(memory: str) -> int:
    """Bytes of a device's memory, by its name in accelerators.csv or as a number of GiB.

    Raises ValueError for anything else.
    """
    device = accelerators.find(memory)
    if device is not None:
        return round(device.memory_gib * GIB)
    try:
        size_gib = float(memory)
    except ValueError:
        size_gib = 0.0
    if not 0 < size_gib < 1e6:
        known = ", ".join(entry.device for entry in accelerators.accelerators())
        raise ValueError(f"memory={memory!r}: give a number of GiB, or one of {known}.")
    return round(size_gib * GIB)


def table(
    wanted: Sequence[str], *, seq_len: int, batch: int = 1, dtype: Any = "bfloat16", memory: str
) -> pd.DataFrame:
    """One row a model: KV at `seq_len` tokens and `batch` sequences, and the tokens that fit.

    Columns: model, attention, layers_with_kv, layers, bytes_per_token,
    bytes_per_token_below_window, total_bytes, fixed_state_bytes, read_bytes_per_step, weight_bytes
    (16 bits, nominal), room_bytes (of the memory, beside the weights), tokens_that_fit (in each
    sequence; None where nothing limits them or the weights are not known), fits (in words).
    """
    room = memory_bytes(memory)
    rows = [_row(name, seq_len, batch, dtype, room) for name in chosen(wanted)]
    return pd.DataFrame(rows).astype({"weight_bytes": "Int64", "room_bytes": "Int64"})


def _row(name: str, seq_len: int, batch: int, dtype: Any, memory: int) -> dict[str, Any]:
    fields = config(name)
    found = budget.kv_budget(fields, seq_len=seq_len, batch=batch, dtype=dtype)
    weights = weight_bytes(fields)
    room = None if weights is None else memory - weights
    tokens, fits = _capacity(fields, room, batch, dtype)
    return {
        "model": name,
        "attention": fields["_about"]["kind"],
        "layers_with_kv": found.layers_with_kv,
        "layers": found.layers,
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_token_below_window": found.bytes_per_token_below_window,
        "total_bytes": found.total_bytes,
        "fixed_state_bytes": found.fixed_state_bytes,
        "read_bytes_per_step": budget.read_bytes_per_step(
            fields, seq_len=seq_len, batch=batch, dtype=dtype
        ),
        "weight_bytes": weights,
        "room_bytes": room,
        "tokens_that_fit": tokens,
        "fits": fits,
    }


def _capacity(
    fields: dict[str, Any], room: int | None, batch: int, dtype: Any
) -> tuple[int | None, str]:
    """The tokens of each sequence that fit into `room` bytes, as a number and in words."""
    if room is None:
        return None, "weights not known"
    if room <= 0:
        return 0, "the weights alone are too large"
    tokens = budget.tokens_that_fit(fields, room, batch=batch, dtype=dtype)
    limit = fields["_about"]["max_context_tokens"]
    if tokens is None:
        return None, NO_LIMIT
    beyond = limit is not None and tokens > limit
    return tokens, f"{tokens:,}" + (f" (context: {limit:,})" if beyond else "")


def readable(rows: pd.DataFrame) -> pd.DataFrame:
    """`table` as people read it: sizes in GiB and GB, bytes with separators."""
    shown = {
        "model": rows["model"],
        "attention": rows["attention"],
        "layers with KV": [
            f"{row.layers_with_kv} of {row.layers}" for row in rows.itertuples(index=False)
        ],
        "KV bytes a token": [
            _rates(int(full), int(below))
            for full, below in zip(
                rows["bytes_per_token"], rows["bytes_per_token_below_window"], strict=True
            )
        ],
        "KV held": [budget.format_bytes(size) for size in rows["total_bytes"]],
        "fixed state": [_size(size) for size in rows["fixed_state_bytes"]],
        "read a step": [_size(size) for size in rows["read_bytes_per_step"]],
        "weights (nominal)": [_size(size) for size in rows["weight_bytes"]],
        "tokens that fit": rows["fits"],
    }
    return pd.DataFrame(shown)


def growth(
    wanted: Sequence[str], lengths: Sequence[int], *, batch: int = 1, dtype: Any = "bfloat16"
) -> pd.DataFrame:
    """KV over length for the models. Columns: model, tokens, kv_bytes (the fixed state included),
    weight_bytes (None where unknown)."""
    rows = []
    for name in chosen(wanted):
        fields = config(name)
        weights = weight_bytes(fields)
        for length in lengths:
            found = budget.kv_budget(fields, seq_len=length, batch=batch, dtype=dtype)
            held = found.total_bytes + (found.fixed_state_bytes or 0)
            rows.append(
                {"model": name, "tokens": length, "kv_bytes": held, "weight_bytes": weights}
            )
    return pd.DataFrame(rows).astype({"weight_bytes": "Int64"})


def _rates(full: int, below: int) -> str:
    return f"{full:,}" if full == below else f"{full:,} ({below:,} below the window)"


def _size(size_bytes: Any) -> str:
    return budget.format_bytes(None if pd.isna(size_bytes) else int(size_bytes))
