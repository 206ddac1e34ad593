"""Models whose layers hold K and V of one geometry, with or without windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gaac_lab.families.config_fields import ABSENT, Fields
from gaac_lab.families.geometry import Geometry, LayerKV
from gaac_lab.families.layer_rules import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    WINDOW,
    KVHeads,
    Schedule,
    all_full,
    common,
    every_layer,
    falcon_kv_heads,
    windows,
)

Family = Callable[[Fields], Geometry]


@dataclass(frozen=True)
class Heads:
    """A model's attention: query heads, KV heads, and the width of K and V of one head."""

    query: int
    kv: int
    dim: int


def standard(
    schedule: Schedule = all_full,
    kv_heads: KVHeads | None = None,
    *,
    window: int | None = None,
    **class_defaults: int,
) -> Family:
    """Layers of one geometry: K and V of kv_heads x head_dim each, with or without windows.

    `window` and `class_defaults` (heads, head_dim, layers) stand in where the config does not name
    the field.
    """

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS, class_defaults.get("layers"))
        found = heads(fields, kv_heads, **class_defaults)
        kept = windows(fields, layers, schedule, window)
        return of_one_width(fields, layers, found, kept)

    return family


def of_one_width(
    fields: Fields, layers: int, found: Heads, kept: list[int | None], in_all: int | None = None
) -> Geometry:
    """The geometry of KV layers with these windows, out of `layers` (or `in_all`) layers.

    A window that is no shorter than the model's context bounds nothing.
    """
    limit = context(fields)
    held = tuple(LayerKV(found.kv, found.dim, found.dim, width) for width in kept)
    if limit is not None and any(width is not None and width >= limit for width in kept):
        fields.notes.append(f"{WINDOW[0]} is no shorter than the context of {limit:,}: no bound")
        kept = [None if width is not None and width >= limit else width for width in kept]
    return Geometry(
        model_type=fields.model_type,
        layers=layers if in_all is None else in_all,
        kv_layers=tuple(LayerKV(found.kv, found.dim, found.dim, width) for width in kept),
        max_context_tokens=limit,
        notes=(),
        held=held,
    )


def heads(fields: Fields, kv_heads: KVHeads | None = None, **class_defaults: int) -> Heads:
    """Query heads, KV heads and head_dim; `class_defaults` are of heads and head_dim."""
    query = fields.count(HEADS, class_defaults.get("heads"))
    kv = (kv_heads or common())(fields, query)
    if query % kv:
        name = fields.find(KV_HEADS)[0]
        raise fields.refuse(name, f"is {kv}, which does not divide {query} attention heads")
    return Heads(query, kv, head_dim(fields, query, class_defaults.get("head_dim")))


def head_dim(fields: Fields, query_heads: int, class_default: int | None) -> int:
    """The explicit head_dim, else the class default, else hidden size over attention heads."""
    name, value = fields.find(HEAD_DIM)
    width = fields.find(WIDTH)[1]
    whole = isinstance(width, int) and width % query_heads == 0
    divided = width // query_heads if whole else None
    if value is ABSENT and class_default is not None:
        return fields.count((name,), class_default)
    if value is ABSENT or (value is None and class_default is None):
        if divided is None:
            why = f"{WIDTH[0]} {width!r} / {query_heads} heads is no count"
            raise fields.refuse(name, f"is not in the config, and {why}")
        return int(divided)
    dim = fields.checked(name, value)
    if divided is not None and divided != dim:
        fields.notes.append(f"{name} {dim} counts, not hidden size / attention heads = {divided}")
    return dim


def context(fields: Fields) -> int | None:
    """The longest length that the model was made for, in tokens, where the config says so."""
    lengths = [fields.config.get(name) for name in CONTEXT]
    return next((int(n) for n in lengths if isinstance(n, int) and n > 0), None)


def remote(family: Family) -> Family:
    """A family of which transformers has no class: what is stored is up to the model's own code."""

    def without_class(fields: Fields) -> Geometry:
        fields.notes.append(
            "transformers has no class of its own for this model: what it stores is up to the "
            "model's own code"
        )
        return replace(family(fields), held=None, held_states=None)

    return without_class


def decoder(family: Family) -> Family:
    """A family that can be an encoder too, which keeps nothing (BERT, RoBERTa)."""

    def only_as_decoder(fields: Fields) -> Geometry:
        if not fields.flag("is_decoder", False):
            raise fields.refuse("is_decoder", "is not true, and an encoder keeps no KV cache")
        return family(fields)

    return only_as_decoder


def falcon(multi_query_default: bool) -> Family:
    """Falcon: transformers repeats the KV heads of the new architecture before it caches them."""
    plain = standard(kv_heads=falcon_kv_heads(multi_query_default))

    def family(fields: Fields) -> Geometry:
        found = plain(fields)
        query, kv = fields.count(HEADS), found.kv_layers[0].kv_heads
        if not fields.flag("new_decoder_architecture", False) or query == kv:
            return found
        fields.notes.append(
            f"transformers repeats the {kv} KV heads to {query} before caching, and stores "
            f"{query // kv} times as much"
        )
        return replace(found, held=tuple(replace(kept, kv_heads=query) for kept in found.kv_layers))

    return family


def full_by_list(family: Family) -> Family:
    """MiniMax M2: its files still carry attn_type_list, with 1 (full) for every layer."""

    def checked(fields: Fields) -> Geometry:
        if fields.is_set("attn_type_list") and set(fields.get("attn_type_list")) != {1}:
            raise fields.refuse("attn_type_list", "has layers that are not full attention (1)")
        return family(fields)

    return checked


def mpt(kv_heads: KVHeads) -> Family:
    """MPT: transformers' own class has multi-head attention only."""
    plain = standard(kv_heads=kv_heads)

    def family(fields: Fields) -> Geometry:
        found = plain(fields)
        if found.kv_layers[0].kv_heads == fields.count(HEADS):
            return found
        fields.notes.append("transformers' own class has multi-head attention only")
        return replace(found, held=None)

    return family


def local_by_types(fields: Fields) -> Geometry:
    """GPT-Neo: local layers look back window_size tokens, and every token is kept all the same."""
    fields.notes.append(
        "local layers look back window_size tokens only; transformers keeps every token for them"
    )
    fields.get("attention_types")
    return standard(kv_heads=_multi_head)(fields)


def _multi_head(fields: Fields, query_heads: int) -> int:
    return query_heads


def half_local(fields: Fields) -> Geometry:
    """ModernBERT as decoder: a window of local_attention / 2, all layers but every 3rd from 0."""
    layers = fields.count(LAYERS)
    found = heads(fields, _multi_head)
    run = fields.count("global_attn_every_n_layers", 3)
    half = fields.count("local_attention", 128) // 2
    kinds = fields.layer_types(layers)
    if kinds is None:
        kinds = [
            "sliding_attention" if layer % run else "full_attention" for layer in range(layers)
        ]
    kept = [half if kind == "sliding_attention" else None for kind in kinds]
    return of_one_width(fields, layers, found, kept)


def moe_heads(fields: Fields) -> Geometry:
    """JetMoE: the KV heads are stated; query heads are as many times num_experts_per_tok."""
    layers, kv = fields.count(LAYERS), fields.count(KV_HEADS, 16)
    found = Heads(kv, kv, fields.count("kv_channels", 128))
    return of_one_width(fields, layers, found, windows(fields, layers, every_layer))
