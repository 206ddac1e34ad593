"""Make a transformers config small without touching what the cache of its model holds.

The sizes below should be no part of any cache. Nothing here is trusted: the probe compares what a
small model holds with a witness, and takes it only if they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ANSWERING: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
# Sizes for a scale of 1, by the field's name.
SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(
        ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "d_ff", "d_inner", "n_inner",
         "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
         "moe_ffn_hidden_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
         "shared_intermediate_size", "moe_shared_expert_intermediate_size",
         "hidden_size_per_layer_input", "q_lora_rank"),
        32,
    ),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
}  # fmt: skip
# The same at every scale, so that experts and ids still are among the few that are left.
FIXED: Final[Mapping[str, int]] = {
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
}
# What bounds a layer's tokens. Each gets a size of its own, so that a full layer tells which.
WINDOWS: Final = ("sliding_window", "attention_chunk_size")
SHORTEST_WINDOW: Final = 16


@dataclass(frozen=True)
class Shrunk:
    """A small config, and (true window, shrunken window) in tokens for each field that has one."""

    config: Any
    windows: Mapping[str, tuple[int, int]]


def shrink(config: Any, *, scale: int | None, narrow: bool = True) -> Shrunk:
    """A copy of a transformers config with short windows and, at a `scale`, small sizes.

    With `scale=None` only the windows shrink, without `narrow` not the hidden size. Two experts
    answer, also where the class has no default for it. Raises what the config's class raises if it
    cannot be so small.
    """
    fields = config.to_dict()
    windows = _shrink_windows(fields, config)
    if any(_is_size(fields.get(name)) for name in EXPERTS):
        for name in ANSWERING:
            if name in fields:
                fields[name] = min(fields[name] or 2, 2)
    if scale is not None:
        _shrink_sizes(fields, scale)
        if narrow:
            _shrink_width(fields, config, scale)
    return Shrunk(type(config).from_dict(fields), windows)


def has_head_dim(config: Any) -> bool:
    """Whether the config says head_dim itself, so that a narrow model need not be told."""
    return config.to_dict().get(_own_names(config, "head_dim")[0]) is not None


def _shrink_windows(fields: dict[str, Any], config: Any) -> dict[str, tuple[int, int]]:
    windows = {}
    for step, name in enumerate(_own_names(config, *WINDOWS)):
        size = fields.get(name)
        if _is_size(size):
            fields[name] = min(size, SHORTEST_WINDOW + 4 * step)
            windows[name] = (size, fields[name])
    return windows


def _shrink_sizes(fields: dict[str, Any], scale: int) -> None:
    for name, size in SIZES.items():
        given = fields.get(name)
        if isinstance(given, list):  # one for each layer
            fields[name] = [size * scale] * len(given)
        elif _is_size(given):
            fields[name] = size * scale
    for name, size in FIXED.items():
        if fields.get(name) is not None:
            fields[name] = size


def _shrink_width(fields: dict[str, Any], config: Any, scale: int) -> None:
    """A narrow hidden size, with the head_dim that the full one stands for written out."""
    width, heads, head_dim = _own_names(config, "hidden_size", "num_attention_heads", "head_dim")
    if fields.get(head_dim) is None and _is_size(fields.get(heads)):
        fields[head_dim] = fields[width] // fields[heads]
    per_head = fields[heads] if _is_size(fields.get(heads)) else 1
    fields[width] = scale * per_head * math.ceil(16 / per_head)


def _own_names(config: Any, *names: str) -> list[str]:
    """What the config's class calls these fields."""
    return [getattr(config, "attribute_map", {}).get(name, name) for name in names]


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
