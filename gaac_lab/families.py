"""Which layers of a model hold KV, and how much: one small function per family, in one table.

A new family is a function from Fields to Geometry, and a line in FAMILIES; most are `standard` with
rules from layer_rules. Class defaults are those of transformers' config classes (5.24).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from gaac_lab.config_fields import ABSENT, Fields, text_part
from gaac_lab.layer_rules import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    WINDOW,
    KVHeads,
    Schedule,
    after_max_window_layers,
    all_full,
    bigcode_kv_heads,
    by_fields_kv_heads,
    chatglm_kv_heads,
    common,
    every_head,
    every_layer,
    falcon_kv_heads,
    last_of,
    stated,
    windows,
)

SCHEDULE = ("layer_types", "use_sliding_window")
UNDERSTOOD: Final = frozenset(
    chain(LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_DIM, CONTEXT, WINDOW, SCHEDULE)
)


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps: KV heads, the widths of K and V, and its window (None: every token)."""

    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window_tokens: int | None = None

    def values(self, tokens: int) -> int:
        """Values kept for one sequence of so many tokens, K and V together."""
        kept = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return self.kv_heads * (self.k_head_dim + self.v_head_dim) * kept


@dataclass(frozen=True)
class Geometry:
    """The layers of a model that hold KV, in order, out of `layers` in all."""

    model_type: str | None
    layers: int
    kv_layers: tuple[LayerKV, ...]
    max_context_tokens: int | None
    notes: tuple[str, ...]


Family = Callable[[Fields], Geometry]


def geometry(config: dict[str, Any]) -> Geometry:
    """The KV geometry behind a config's fields.

    A model_type that is not in FAMILIES is counted from its fields if every field that touches the
    cache is understood. Raises UnsupportedConfig, naming the field, for anything else.
    """
    fields = Fields(text_part(config))
    fields.refuse_other_caches()
    family = FAMILIES.get(str(fields.model_type))
    if family is None:
        fields.refuse_unknown(UNDERSTOOD)
        if fields.model_type is not None:
            fields.notes.append(
                f"model_type {fields.model_type!r} is not known here: counted from its fields alone"
            )
        family = BY_FIELDS
    return family(fields)


# ---- families


def standard(
    schedule: Schedule = all_full, kv_heads: KVHeads | None = None, **class_defaults: int
) -> Family:
    """Layers of one geometry: K and V of kv_heads x head_dim each, with or without windows.

    `class_defaults` (heads, head_dim, layers) stand in where the config does not name the field.
    """
    count_kv_heads = kv_heads or common()

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS, class_defaults.get("layers"))
        heads = fields.count(HEADS, class_defaults.get("heads"))
        found = count_kv_heads(fields, heads)
        if heads % found:
            name = fields.find(KV_HEADS)[0]
            raise fields.refuse(name, f"is {found}, which does not divide {heads} attention heads")
        dim = _head_dim(fields, heads, class_defaults.get("head_dim"))
        limit = _context(fields)
        kept = windows(fields, layers, schedule)
        if limit is not None and any(window is not None and window >= limit for window in kept):
            fields.notes.append(
                f"{WINDOW[0]} is no shorter than the context of {limit:,}: no bound"
            )
            kept = [None] * layers
        return Geometry(
            model_type=fields.model_type,
            layers=layers,
            kv_layers=tuple(LayerKV(found, dim, dim, window) for window in kept),
            max_context_tokens=limit,
            notes=tuple(fields.notes),
        )

    return family


def _head_dim(fields: Fields, heads: int, class_default: int | None) -> int:
    """The explicit head_dim, else the class default, else hidden size over attention heads."""
    name, value = fields.find(HEAD_DIM)
    width = fields.find(WIDTH)[1]
    divided = width // heads if isinstance(width, int) and width % heads == 0 else None
    if value is ABSENT and class_default is not None:
        return fields.count((name,), class_default)
    if value is ABSENT or (value is None and class_default is None):
        if divided is None:
            raise fields.refuse(
                name, f"is not in the config, and {WIDTH[0]} {width!r} / {heads} heads is no count"
            )
        return divided
    dim = fields.checked(name, value)
    if divided is not None and divided != dim:
        fields.notes.append(f"{name} {dim} counts, not hidden size / attention heads = {divided}")
    return dim


def _context(fields: Fields) -> int | None:
    lengths = [fields.config.get(name) for name in CONTEXT]
    return next((int(n) for n in lengths if isinstance(n, int) and n > 0), None)


BY_FIELDS: Final = standard(kv_heads=by_fields_kv_heads)

# Families of transformers whose layers are all alike, every one full.
_PLAIN = standard()
_NO_KV_FIELD = standard(kv_heads=every_head)
_SLIDES_IF_TOLD = standard(every_layer())
_QWEN = standard(after_max_window_layers, common(32))

FAMILIES: Final[Mapping[str, Family]] = {
    **dict.fromkeys(("apertus", "arcee", "cohere", "granite", "granitemoe", "llama"), _PLAIN),
    **dict.fromkeys(("olmo", "olmo2", "olmoe", "phi"), _PLAIN),
    **dict.fromkeys(("bloom", "codegen", "gpt2", "gpt_neox", "gptj", "opt"), _NO_KV_FIELD),
    "nemotron": standard(kv_heads=stated),
    "persimmon": _NO_KV_FIELD,
    "bitnet": standard(kv_heads=common(5)),
    "ernie4_5": standard(kv_heads=common(2), head_dim=128),
    "gemma": standard(kv_heads=common(16, null=False), head_dim=256),
    "glm": standard(kv_heads=common(2, null=False), head_dim=128),
    "glm4": standard(kv_heads=common(2, null=False), head_dim=128),
    "glm4_moe": standard(kv_heads=common(8, null=False)),
    "helium": standard(kv_heads=common(20, null=False), head_dim=128),
    "minimax_m2": standard(kv_heads=common(8, null=False), head_dim=128),
    "ministral3": standard(every_layer(), common(8, null=False), head_dim=128),
    "mistral": standard(every_layer(4096), common(8, null=False)),
    "mixtral": standard(every_layer(), common(8, null=False)),
    "phi3": _SLIDES_IF_TOLD,
    "phimoe": standard(every_layer(), common(8, null=False)),
    "qwen2": _QWEN,
    "qwen2_moe": standard(after_max_window_layers, common(16, null=False)),
    "qwen2_vl_text": standard(after_max_window_layers, common(8)),
    "qwen2_5_vl_text": standard(after_max_window_layers, common(8)),
    "qwen3": standard(after_max_window_layers, common(32), head_dim=128),
    "qwen3_moe": standard(kv_heads=common(4, null=False)),
    "qwen3_vl_text": standard(kv_heads=common(32), head_dim=128),
    "seed_oss": standard(kv_heads=common(8), head_dim=128),
    "smollm3": standard(kv_heads=common(4)),
    "stablelm": standard(kv_heads=common(32, null=False)),
    "starcoder2": standard(every_layer(), common(2, null=False)),
    # sliding layers take turns with full ones
    "cohere2": standard(last_of(4, 4096)),
    "gemma2": standard(last_of(2, 4096, fixed=True), common(4, null=False), head_dim=256),
    "gemma3_text": standard(
        last_of(6, 4096), common(4, null=False), layers=26, heads=8, head_dim=256
    ),
    "gpt_oss": standard(last_of(2, 128, fixed=True), common(8, null=False), head_dim=64),
    "olmo3": standard(last_of(4, 4096, fixed=True)),
    # one KV head, or a few, under names of their own
    "chatglm": standard(kv_heads=chatglm_kv_heads),
    "falcon": standard(kv_heads=falcon_kv_heads(multi_query_default=True)),
    "gpt_bigcode": standard(kv_heads=bigcode_kv_heads),
    "RefinedWeb": standard(kv_heads=falcon_kv_heads(multi_query_default=False)),
    "RefinedWebModel": standard(kv_heads=falcon_kv_heads(multi_query_default=False)),
}
