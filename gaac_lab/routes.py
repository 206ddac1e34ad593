"""The three routes that turn a factor of the KV formula, counted: fewer KV heads, fewer bits a
value, fewer tokens; and how they stack.

Nothing is measured here, and no size is typed in: each is `kv_budget` of a config, times the bits
of a value. What a route costs in quality is measured in `quality`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from gaac_lab import budget
from gaac_lab.families.config_fields import read_config

RAW_BITS = 16
SCALE_BITS = 32  # a scale and a zero point of 16 bits each, once for a group of values
KV_HEADS = "num_key_value_heads"
ATTENTION_HEADS = "num_attention_heads"


def stored_bits(bits: int, group_values: int | None = None) -> float:
    """Bits that a value takes as stored: its code, and its share of its group's scale and zero.

    `group_values` values have one scale and one zero point in 16 bits each; None counts the codes
    alone, as they are often promised. 16 bits are the value itself and need no scale.
    Raises ValueError for bits or a group that cannot be.
    """
    if bits not in (16, 8, 4, 2):
        raise ValueError(f"bits={bits!r}: give 16, 8, 4 or 2.")
    if group_values is not None and group_values < 1:
        raise ValueError(f"group_values={group_values!r}: give at least 1, or None.")
    scales = 0.0 if group_values is None or bits == RAW_BITS else SCALE_BITS / group_values
    return bits + scales


def kv_bytes(
    config: Any,
    *,
    seq_len: int,
    batch: int = 1,
    bits: int = RAW_BITS,
    window: int | None = None,
    group_values: int | None = None,
) -> int:
    """KV bytes of a model with `bits` a value and at most `window` tokens kept in any layer.

    A layer with a shorter window of its own keeps that. A fixed recurrent state is no KV and not
    counted. Raises UnsupportedConfig and ValueError as `kv_budget` does.
    """
    kept = seq_len if window is None else min(seq_len, window)
    raw = budget.kv_budget(config, seq_len=kept, batch=batch).total_bytes
    return math.ceil(raw * stored_bits(bits, group_values) / RAW_BITS)


def bill(
    config: Any,
    *,
    seq_len: int,
    batch: int = 1,
    bits: int = RAW_BITS,
    window: int | None = None,
    group_values: int | None = None,
) -> pd.DataFrame:
    """The routes stacked on one finished model, a row a step: first as it is, then fewer bits, then
    fewer tokens. A step that is not taken (16 bits, no window) has no row.

    Columns: step, total_bytes, share (of the first row), times_smaller.
    """
    size = {"seq_len": seq_len, "batch": batch}
    steps = [(f"{RAW_BITS} bits, every token", kv_bytes(config, **size))]
    if bits != RAW_BITS:
        counted = "" if group_values is None else f" and scales for each {group_values}"
        fewer_bits = kv_bytes(config, bits=bits, group_values=group_values, **size)
        steps.append((f"{bits} bits{counted}", fewer_bits))
    if window is not None:
        both = kv_bytes(config, bits=bits, group_values=group_values, window=window, **size)
        steps.append((f"window of {window:,} tokens", both))
    first = steps[0][1]
    if not first:
        raise ValueError("This model keeps no KV at that length: there is nothing to shrink.")
    return pd.DataFrame(
        [
            {
                "step": step,
                "total_bytes": total,
                "share": total / first,
                "times_smaller": first / total,
            }
            for step, total in steps
        ]
    )


def stacked(configs: Mapping[str, Any], *, seq_len: int, **route: Any) -> pd.DataFrame:
    """`bill` of several models, one under another, with a first column `model`."""
    bills = [bill(config, seq_len=seq_len, **route) for config in configs.values()]
    return (
        pd.concat(bills, keys=list(configs), names=["model"])
        .reset_index(level="model")
        .reset_index(drop=True)
    )


def what_heads_still_do(stack: pd.DataFrame) -> str:
    """A sentence on two models of a `stacked` table: how far apart they are, first and last."""
    ends = {
        str(model): (int(rows["total_bytes"].iloc[0]), int(rows["total_bytes"].iloc[-1]))
        for model, rows in stack.groupby("model", sort=False)
    }
    few, many = sorted(ends, key=lambda model: ends[model])
    first, last = zip(ends[many], ends[few], strict=True)
    ratios = [large / small for large, small in (first, last)]
    more = [budget.format_bytes(large - small) for large, small in (first, last)]
    told = (
        f"{many} holds {ratios[0]:.2f} times the KV of {few} at first, {more[0]} more; after the "
    )
    if not math.isclose(*ratios, rel_tol=1e-6):
        return f"{told}last step {ratios[1]:.2f} times: their layers keep windows of their own."
    return (
        f"{told}last step still {ratios[1]:.2f} times, but only {more[1]} more. Every step "
        "multiplies both alike, so the ratio stays; what shrinks is the difference in bytes, until "
        "it matters little beside the weights."
    )


def kv_heads(config: Any, choices: Sequence[int], *, seq_len: int, batch: int = 1) -> pd.DataFrame:
    """What the model would hold with other numbers of KV heads; accounting only, since a finished
    model cannot change them.

    Columns: kv_heads, name (MHA, GQA, MQA), bytes_per_token, total_bytes, share (of one KV head per
    attention head). Raises ValueError for a config that does not name both kinds of heads, and for
    a number that does not divide the attention heads.
    """
    fields = read_config(config)
    heads = fields.get(ATTENTION_HEADS)
    if not isinstance(heads, int) or not isinstance(fields.get(KV_HEADS), int):
        raise ValueError(f"This config does not name {ATTENTION_HEADS} and {KV_HEADS}.")
    full = budget.kv_budget({**fields, KV_HEADS: heads}, seq_len=seq_len, batch=batch)
    rows = []
    for count in choices:
        if count < 1 or heads % count:
            raise ValueError(f"{count} KV heads do not divide {heads} attention heads.")
        found = budget.kv_budget({**fields, KV_HEADS: count}, seq_len=seq_len, batch=batch)
        rows.append(
            {
                "kv_heads": count,
                "name": attention_name(heads, count),
                "bytes_per_token": found.bytes_per_token,
                "total_bytes": found.total_bytes,
                "share": found.total_bytes / full.total_bytes,
            }
        )
    return pd.DataFrame(rows)


def attention_name(heads: int, kv_heads: int) -> str:
    """MHA, GQA or MQA."""
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


def precisions(
    config: Any,
    *,
    seq_len: int,
    batch: int = 1,
    widths: Sequence[int] = (16, 8, 4, 2),
    group_values: int = 64,
) -> pd.DataFrame:
    """Fewer bits a value, as promised and with scales counted.

    Columns: bits, promised_share, stored_bits, stored_share, total_bytes (as stored).
    """
    size = {"seq_len": seq_len, "batch": batch}
    return pd.DataFrame(
        [
            {
                "bits": bits,
                "promised_share": stored_bits(bits) / RAW_BITS,
                "stored_bits": stored_bits(bits, group_values),
                "stored_share": stored_bits(bits, group_values) / RAW_BITS,
                "total_bytes": kv_bytes(config, bits=bits, group_values=group_values, **size),
            }
            for bits in widths
        ]
    )


def window_caps(
    config: Any, lengths: Sequence[int], *, window: int, batch: int = 1
) -> pd.DataFrame:
    """What a window of `window` tokens keeps at each length: from there on, always the same.

    Columns: tokens, every_token_bytes, window_bytes, times_smaller.
    """
    rows = []
    for length in lengths:
        every = kv_bytes(config, seq_len=length, batch=batch)
        kept = kv_bytes(config, seq_len=length, batch=batch, window=window)
        rows.append(
            {
                "tokens": length,
                "every_token_bytes": every,
                "window_bytes": kept,
                "times_smaller": every / kept,
            }
        )
    return pd.DataFrame(rows)
