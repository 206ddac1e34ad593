"""What a KV cache costs: bytes a token, bytes in all, and the tokens that fit into a memory.

bytes = layers × KV heads × (K width + V width) × tokens × sequences × bytes a value, summed over
the layers that hold KV, where a layer with a window keeps at most that many tokens. Latents
(MLA) and fixed states are lines of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gaac_lab.budget_text import dtype_name, explain, format_bytes, notes
from gaac_lab.families.config_fields import UnsupportedConfig, read_config
from gaac_lab.families.geometry import Geometry, LayerKV, state_bytes, values, values_between_steps
from gaac_lab.families.layer_kinds import LayerKind, kinds_of
from gaac_lab.families.table import geometry

__all__ = [
    "KVBudget",
    "LayerKind",
    "UnsupportedConfig",
    "dtype_bytes",
    "format_bytes",
    "kv_budget",
    "kv_gib",
    "read_bytes_per_step",
    "stored_bytes",
    "tokens_that_fit",
]

DTYPE_BYTES = {
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float8", "fp8", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 1),
}


@dataclass(frozen=True)
class KVBudget:
    """The KV cache of one model at one length; bytes of all sequences, but for the rates.

    `bytes_per_token` is what one more token of one sequence adds when every window is full, and
    `bytes_per_token_below_window` what it adds before; `window_cap_bytes` is where the layers with
    a window stop (None: there are none). `total_bytes` counts min(length, W) tokens in a window of
    W, and neither `fixed_state_bytes` nor `cross_attention_bytes`, which `stored_bytes` adds.
    `k_bytes` and `v_bytes` are the parts of the total that are K and V; None where one latent
    stands for both.

    What ends in `_transformers` is what the installed transformers keeps between steps (a token
    less in a window); None where it has no class of its own. What starts with `expanded_` is latent
    attention kept as K and V per head; None in other models. `cross_attention_bytes` is None where
    the encoder's tokens are not known.
    """

    model_type: str | None
    dtype: str
    bytes_per_value: int
    seq_len_tokens: int
    batch_sequences: int
    layers: int
    layers_with_kv: int
    layers_with_window: int
    layers_with_state: int
    layers_that_share: int
    kinds: tuple[LayerKind, ...]
    bytes_per_token: int
    bytes_per_token_below_window: int
    window_cap_bytes: int | None
    total_bytes: int
    k_bytes: int | None
    v_bytes: int | None
    fixed_state_bytes: int
    encoder_tokens: int | None
    cross_attention_bytes: int | None
    stored_bytes: int
    read_bytes_per_step: int
    expanded_bytes_per_token: int | None
    expanded_total_bytes: int | None
    total_bytes_transformers: int | None
    fixed_state_bytes_transformers: int | None
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
    product = 2
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        product *= _count(name, value)
    product *= _count("seq_len", seq_len, least=0) * _count("batch", batch)
    return product * dtype_bytes / 2**30


def kv_budget(
    config: Any,
    *,
    seq_len: int,
    batch: int = 1,
    dtype: Any = "bfloat16",
    overrides: Mapping[str, Any] | None = None,
    encoder_tokens: int | None = None,
) -> KVBudget:
    """The KV budget of a model at `seq_len` tokens and `batch` sequences.

    `config` is a dict, a transformers config, or the path of a config.json or of its folder;
    `dtype` is the cache's, not the weights'; `overrides` replace fields of the language model
    (None: as if the field were not there); `encoder_tokens` is the length of the other sequence of
    a model with cross-attention. Raises UnsupportedConfig, naming the field, for a model whose
    cache is not understood, and ValueError for a bad length, batch or dtype.
    """
    tokens, sequences = _count("seq_len", seq_len, least=0), _count("batch", batch)
    others = None if encoder_tokens is None else _count("encoder_tokens", encoder_tokens, least=0)
    value_bytes, type_name = dtype_bytes(dtype), dtype_name(dtype)
    shape = geometry(read_config(config), overrides)
    unit = sequences * value_bytes
    kinds = kinds_of(shape.kv_layers, value_bytes)
    total_bytes = values(shape.kv_layers, tokens) * unit
    cross_bytes = _cross_bytes(shape, others, unit)
    fixed_bytes = state_bytes(shape.states, value_bytes) * sequences
    k_bytes, v_bytes = _k_and_v(shape.kv_layers, tokens, unit)
    held = None if shape.held is None else values_between_steps(shape.held, tokens) * unit
    held_states = shape.held_states if shape.held_states is not None else shape.states
    spread = shape.expanded
    return KVBudget(
        model_type=shape.model_type,
        dtype=type_name,
        bytes_per_value=value_bytes,
        seq_len_tokens=tokens,
        batch_sequences=sequences,
        layers=shape.layers,
        layers_with_kv=len(shape.kv_layers),
        layers_with_window=sum(layer.window_tokens is not None for layer in shape.kv_layers),
        layers_with_state=len(shape.states),
        layers_that_share=len(shape.rereads),
        kinds=kinds,
        bytes_per_token=_rate(shape.kv_layers, value_bytes, full_only=True),
        bytes_per_token_below_window=_rate(shape.kv_layers, value_bytes, full_only=False),
        window_cap_bytes=_cap_bytes(shape.kv_layers, unit),
        total_bytes=total_bytes,
        k_bytes=k_bytes,
        v_bytes=v_bytes,
        fixed_state_bytes=fixed_bytes,
        encoder_tokens=others,
        cross_attention_bytes=cross_bytes,
        stored_bytes=total_bytes + fixed_bytes + (cross_bytes or 0),
        read_bytes_per_step=_read_bytes(shape, tokens, unit) + fixed_bytes + (cross_bytes or 0),
        expanded_bytes_per_token=_rate(spread, value_bytes, full_only=True) if spread else None,
        expanded_total_bytes=values(spread, tokens) * unit if spread else None,
        total_bytes_transformers=held,
        fixed_state_bytes_transformers=(
            None if held is None else state_bytes(held_states, value_bytes) * sequences
        ),
        max_context_tokens=shape.max_context_tokens,
        explanation=explain(shape, kinds, tokens, sequences, value_bytes, type_name),
        notes=notes(shape, tokens, others),
    )


def stored_bytes(config: Any, *, seq_len: int, **options: Any) -> int:
    """Bytes to store: KV, fixed states, and the cross cache where the encoder's tokens are given.

    For all sequences, with the options and the errors of `kv_budget`. This is what has to fit.
    """
    return kv_budget(config, seq_len=seq_len, **options).stored_bytes


def read_bytes_per_step(config: Any, *, seq_len: int, **options: Any) -> int:
    """Bytes that one decode step reads from a cache of `seq_len` tokens, for all sequences.

    Every layer that holds KV reads what it keeps once, a layer that shares another's KV reads that
    again, latents and states are read once, an indexer's keys in full and then as many latents as
    it picks. The cross cache counts where the encoder's tokens are given. What a kernel reads twice
    (one pass per query head, K and V spread out from latents) comes on top, and so do the weights.
    Options and errors are those of `kv_budget`.
    """
    return kv_budget(config, seq_len=seq_len, **options).read_bytes_per_step


def tokens_that_fit(
    config: Any,
    memory_bytes: int,
    *,
    batch: int = 1,
    dtype: Any = "bfloat16",
    overrides: Mapping[str, Any] | None = None,
    encoder_tokens: int | None = None,
) -> int | None:
    """The longest length whose cache fits into `memory_bytes`, each of `batch` sequences that long.

    Found by inverting what `stored_bytes` counts, so windows and fixed states count; 0 also where
    the states alone do not fit. None means no limit: nothing grows any more and all of it fits.
    Lengths beyond the model's own context are not cut off.
    """
    room, sequences = _count("memory_bytes", memory_bytes, least=0), _count("batch", batch)
    others = None if encoder_tokens is None else _count("encoder_tokens", encoder_tokens, least=0)
    shape, value_bytes = geometry(read_config(config), overrides), dtype_bytes(dtype)
    unit = sequences * value_bytes
    fixed_bytes = state_bytes(shape.states, value_bytes) * sequences
    fixed_bytes += _cross_bytes(shape, others, unit) or 0

    def fits(tokens: int) -> bool:
        return values(shape.kv_layers, tokens) * unit + fixed_bytes <= room

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
    name = dtype_name(dtype)
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype!r} is not known: give one of {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[name]


def _rate(layers: tuple[LayerKV, ...], value_bytes: int, *, full_only: bool) -> int:
    """Bytes that one more token of one sequence adds, in the layers that keep it."""
    kept = [layer for layer in layers if not full_only or layer.window_tokens is None]
    return sum(layer.values_per_token() for layer in kept) * value_bytes


def _cap_bytes(layers: tuple[LayerKV, ...], unit: int) -> int | None:
    bounded = [layer for layer in layers if layer.window_tokens is not None]
    if not bounded:
        return None
    return sum(layer.values(layer.window_tokens or 0) for layer in bounded) * unit


def _k_and_v(layers: tuple[LayerKV, ...], tokens: int, unit: int) -> tuple[int | None, int | None]:
    """Bytes of K and of V, or None of both where a latent stands for them."""
    if any(layer.latent_dim or layer.index_dim for layer in layers):
        return None, None
    k_values = sum(layer.kv_heads * layer.k_head_dim * layer.kept(tokens) for layer in layers)
    v_values = sum(layer.kv_heads * layer.v_head_dim * layer.kept(tokens) for layer in layers)
    return k_values * unit, v_values * unit


def _cross_bytes(shape: Geometry, encoder_tokens: int | None, unit: int) -> int | None:
    if not shape.cross:
        return 0
    return None if encoder_tokens is None else values(shape.cross, encoder_tokens) * unit


def _read_bytes(shape: Geometry, tokens: int, unit: int) -> int:
    return sum(layer.values_read(tokens) for layer in shape.kv_layers + shape.rereads) * unit


def _count(name: str, value: Any, least: int = 1) -> int:
    """The value as an int, if it is a whole number of at least `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    return count
