"""The words of a budget: sizes, the formula with a model's numbers, notes."""

from __future__ import annotations

import re
from typing import Any

from gaac_lab.families.geometry import Geometry, values
from gaac_lab.families.layer_kinds import LayerKind

SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?((?P<letter>[kKMGT])(?P<binary>i)?B|B)?", re.ASCII)


def format_bytes(size_bytes: float | None) -> str:
    """The one way to show a size: "4.00 GiB (4.29 GB)", "512 B"; None is "unknown"."""
    if size_bytes is None:
        return "unknown"
    step = 0
    while abs(size_bytes) >= 1024 ** (step + 1) and step < 4:
        step += 1
    if step == 0:
        return f"{size_bytes:,.0f} B"
    binary, decimal = size_bytes / 1024**step, size_bytes / 1000**step
    letter = "KMGT"[step - 1]
    return f"{binary:,.2f} {letter}iB ({decimal:,.2f} {'k' if step == 1 else letter}B)"


def explain(
    shape: Geometry,
    kinds: tuple[LayerKind, ...],
    tokens: int,
    sequences: int,
    value_bytes: int,
    dtype: str,
) -> str:
    """One line: the formula with this model's numbers, down to the total."""
    total = format_bytes(values(shape.kv_layers, tokens) * sequences * value_bytes)
    if not kinds:
        return f"none of {number(shape.layers, 'layer')} holds KV = {total}"
    parts = []
    for kind in kinds:
        kept = tokens if kind.window_tokens is None else min(tokens, kind.window_tokens)
        capped = "" if kind.window_tokens is None else f" (window {kind.window_tokens:,})"
        parts.append(
            f"{number(kind.layers, 'layer')} × {widths(kind)} × {number(kept, 'token')}{capped}"
        )
    inner = parts[0] if len(parts) == 1 else "(" + " + ".join(parts) + ")"
    per_value = f"{number(value_bytes, 'byte')} ({dtype})"
    return f"{inner} × {number(sequences, 'sequence')} × {per_value} = {total}"


def widths(kind: LayerKind) -> str:
    """What one layer of a kind keeps of a token, in values."""
    if kind.latent_dim:
        kept = f"{kind.latent_dim} latent"
        return kept if not kind.index_dim else f"({kept} + {kind.index_dim} index key)"
    width = (
        f"2 (K, V) × {kind.k_head_dim}"
        if kind.k_head_dim == kind.v_head_dim
        else f"({kind.k_head_dim} K + {kind.v_head_dim} V)"
    )
    return f"{number(kind.kv_heads, 'KV head')} × {width} head_dim"


def number(count: int, noun: str) -> str:
    """A count with its noun: "1 layer", "2,048 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def notes(shape: Geometry, tokens: int, encoder_tokens: int | None) -> tuple[str, ...]:
    """The geometry's notes, and what a length brings up."""
    more = []
    if shape.cross and encoder_tokens is None:
        more.append(
            f"{number(len(shape.cross), 'layer')} cache another sequence too: give its length with "
            "encoder_tokens (--encoder-tokens)"
        )
    limit = shape.max_context_tokens
    if limit is not None and tokens > limit:
        more.append(f"{tokens:,} tokens are more than the model's context of {limit:,}")
    return (*shape.notes, *more)


def dtype_name(dtype: Any) -> str:
    """The plain name of a dtype that is given by name or as a torch dtype."""
    return str(dtype).removeprefix("torch.").lower()


def parse_bytes(text: str) -> int:
    """The bytes of a size such as "24GiB", "80 GB" or "512"; ValueError for anything else.

    KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB powers of 1000.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size: give one such as 24GiB (2**30) or 24GB (10**9).")
    letter = (found["letter"] or "").upper()
    base = 1024 if found["binary"] else 1000
    return int(float(found["number"]) * base ** (1 + "KMGT".index(letter) if letter else 0))
