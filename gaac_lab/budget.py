"""What a KV cache costs: bytes a token, bytes in all, and the tokens that fit into a memory.

bytes = layers × KV heads × (K width + V width) × tokens × sequences × bytes a value, summed over
the layers that hold KV, where a layer with a window keeps at most that many tokens.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gaac_lab.config_fields import UnsupportedConfig, read_config
from gaac_lab.families import Geometry, LayerKV, geometry

__all__ = [
    "KVBudget",
    "LayerKind",
    "UnsupportedConfig",
    "dtype_bytes",
    "format_bytes",
    "kv_budget",
    "kv_gib",
    "tokens_that_fit",
]

DTYPE_BYTES = {
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float8", "fp8", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 1),
}


@dataclass(frozen=True)
class LayerKind:
    """The layers of one geometry: how many there are, and what each keeps per token."""

    layers: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window_tokens: int | None
    bytes_per_token: int


@dataclass(frozen=True)
class KVBudget:
    """The KV cache of one model at one length; every number of bytes counts K and V.

    `bytes_per_token` is what one more token of one sequence adds when every window is full, and
    `bytes_per_token_below_window` what it adds before. `total_bytes` is for all sequences at
    `seq_len_tokens`; a layer with a window of W counts min(length, W) tokens (transformers holds
    W - 1 between steps).
    """

    model_type: str | None
    dtype: str
    bytes_per_value: int
    seq_len_tokens: int
    batch_sequences: int
    layers: int
    layers_with_kv: int
    layers_with_window: int
    kinds: tuple[LayerKind, ...]
    bytes_per_token: int
    bytes_per_token_below_window: int
    total_bytes: int
    max_context_tokens: int | None
    explanation: str
    notes: tuple[str, ...]

    @property
    def total_gib(self) -> float:
        """`total_bytes` in GiB (2**30 bytes)."""
        return self.total_bytes / 2**30


def kv_gib(
    layers: int,
    kv_heads: int,
    head_dim: int,
    seq_len: int,
    batch: int = 1,
    dtype_bytes: float = 2,
) -> float:
    """GiB of KV for layers that are all alike and keep every token: 2 x all the factors / 2**30.

    `seq_len` in tokens, `batch` in sequences, `dtype_bytes` in bytes a value (0.5 for 4 bits).
    Raises ValueError for anything that is no count.
    """
    if isinstance(dtype_bytes, bool) or not 0 < dtype_bytes < float("inf"):
        raise ValueError(f"dtype_bytes={dtype_bytes!r}: give the bytes of one value, such as 2.")
    values = 2
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        values *= _count(name, value)
    values *= _count("seq_len", seq_len, least=0) * _count("batch", batch)
    return values * dtype_bytes / 2**30


def kv_budget(config: Any, *, seq_len: int, batch: int = 1, dtype: Any = "bfloat16") -> KVBudget:
    """The KV budget of a model at `seq_len` tokens and `batch` sequences.

    `config` is a dict, a transformers config, or the path of a config.json or of its folder;
    `dtype` is the cache's, not the weights'. Raises UnsupportedConfig, naming the field, for a
    model whose cache is not understood, and ValueError for a bad length, batch or dtype.
    """
    tokens, sequences = _count("seq_len", seq_len, least=0), _count("batch", batch)
    value_bytes = dtype_bytes(dtype)
    shape = geometry(read_config(config))
    kinds = _kinds(shape, value_bytes)
    full = [kind for kind in kinds if kind.window_tokens is None]
    return KVBudget(
        model_type=shape.model_type,
        dtype=_dtype_name(dtype),
        bytes_per_value=value_bytes,
        seq_len_tokens=tokens,
        batch_sequences=sequences,
        layers=shape.layers,
        layers_with_kv=len(shape.kv_layers),
        layers_with_window=sum(layer.window_tokens is not None for layer in shape.kv_layers),
        kinds=kinds,
        bytes_per_token=sum(kind.layers * kind.bytes_per_token for kind in full),
        bytes_per_token_below_window=sum(kind.layers * kind.bytes_per_token for kind in kinds),
        total_bytes=_total_bytes(shape, tokens, sequences, value_bytes),
        max_context_tokens=shape.max_context_tokens,
        explanation=_explain(shape, kinds, tokens, sequences, value_bytes, _dtype_name(dtype)),
        notes=_notes(shape, tokens),
    )


def tokens_that_fit(
    config: Any, memory_bytes: int, *, batch: int = 1, dtype: Any = "bfloat16"
) -> int | None:
    """The longest length whose KV fits into `memory_bytes`, each of `batch` sequences that long.

    Found by inverting `kv_budget`, so windows count. None means no limit: every layer has a window
    and all of them fit. Lengths beyond the model's own context are not cut off.
    """
    room, sequences = _count("memory_bytes", memory_bytes, least=0), _count("batch", batch)
    shape, value_bytes = geometry(read_config(config)), dtype_bytes(dtype)

    def fits(tokens: int) -> bool:
        return _total_bytes(shape, tokens, sequences, value_bytes) <= room

    bounds = [layer.window_tokens for layer in shape.kv_layers]
    windows = [window for window in bounds if window is not None]
    if len(windows) == len(bounds) and fits(max(windows, default=0)):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def dtype_bytes(dtype: Any) -> int:
    """Bytes of one value of a dtype, given by name or as a torch dtype; ValueError if unknown."""
    name = _dtype_name(dtype)
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype!r} is not known: give one of {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[name]


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


def _total_bytes(shape: Geometry, tokens: int, sequences: int, value_bytes: int) -> int:
    return sum(layer.values(tokens) for layer in shape.kv_layers) * sequences * value_bytes


def _kinds(shape: Geometry, value_bytes: int) -> tuple[LayerKind, ...]:
    """Equal layers together, the full ones first."""

    def order(layer: LayerKV) -> tuple[bool, int, int, int, int]:
        window = layer.window_tokens
        widths = (layer.kv_heads, layer.k_head_dim, layer.v_head_dim)
        return (window is not None, window or 0, *widths)

    grouped = [list(group) for _, group in groupby(sorted(shape.kv_layers, key=order), key=order)]
    return tuple(
        LayerKind(
            layers=len(group),
            kv_heads=group[0].kv_heads,
            k_head_dim=group[0].k_head_dim,
            v_head_dim=group[0].v_head_dim,
            window_tokens=group[0].window_tokens,
            bytes_per_token=group[0].values(1) * value_bytes,
        )
        for group in grouped
    )


def _explain(
    shape: Geometry,
    kinds: tuple[LayerKind, ...],
    tokens: int,
    sequences: int,
    value_bytes: int,
    dtype: str,
) -> str:
    """One line: the formula with this model's numbers."""
    parts = []
    for kind in kinds:
        width = (
            f"2 (K, V) × {kind.k_head_dim}"
            if kind.k_head_dim == kind.v_head_dim
            else f"({kind.k_head_dim} K + {kind.v_head_dim} V)"
        )
        kept = tokens if kind.window_tokens is None else min(tokens, kind.window_tokens)
        capped = "" if kind.window_tokens is None else f" (window {kind.window_tokens:,})"
        parts.append(
            f"{_number(kind.layers, 'layer')} × {_number(kind.kv_heads, 'KV head')} × {width} "
            f"head_dim × {_number(kept, 'token')}{capped}"
        )
    total = format_bytes(_total_bytes(shape, tokens, sequences, value_bytes))
    inner = parts[0] if len(parts) == 1 else "(" + " + ".join(parts) + ")"
    per_value = f"{_number(value_bytes, 'byte')} ({dtype})"
    return f"{inner} × {_number(sequences, 'sequence')} × {per_value} = {total}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _notes(shape: Geometry, tokens: int) -> tuple[str, ...]:
    limit = shape.max_context_tokens
    if limit is None or tokens <= limit:
        return shape.notes
    return (*shape.notes, f"{tokens:,} tokens are more than the model's context of {limit:,}")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").lower()


def _count(name: str, value: Any, least: int = 1) -> int:
    """The value as an int, if it is a whole number of at least `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    return count
