"""Models whose layers differ in geometry, share KV, or hold none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gaac_lab.families.config_fields import ABSENT, Fields
from gaac_lab.families.geometry import Geometry, LayerKV
from gaac_lab.families.layer_rules import (
    HEADS,
    LAYERS,
    common,
    last_of,
    last_of_and_the_last,
    rope_layers,
    windows,
)
from gaac_lab.families.plain_layers import Family, Heads, context, heads, of_one_width

FULL = "full_attention"


def chunked(fields: Fields) -> Geometry:
    """Llama 4: chunks of attention_chunk_size, but where a layer has no rotary positions."""
    layers = fields.count(LAYERS)
    found = heads(fields, common(8, null=False), head_dim=128)
    kinds = fields.layer_types(layers)
    if kinds is None:
        kinds = ["chunked_attention" if rope else FULL for rope in rope_layers(fields, layers)]
    other = sorted(set(kinds) - {FULL, "chunked_attention"})
    if other:
        raise fields.refuse("layer_types", f"holds {', '.join(other)}, not understood here")
    none = fields.get("attention_chunk_size") is None
    chunk = None if none else fields.count("attention_chunk_size", 8192)
    kept = [chunk if kind == "chunked_attention" else None for kind in kinds]
    return of_one_width(fields, layers, found, kept)


def last_layers_share(geometry: Geometry, shared: int) -> Geometry:
    """The last `shared` layers hold nothing and read the KV of the last layer of their own type."""
    if not shared:
        return geometry
    own = geometry.kv_layers[:-shared]
    rereads = []
    for layer in geometry.kv_layers[-shared:]:
        slides = layer.window_tokens is not None
        same = [kept for kept in own if (kept.window_tokens is not None) == slides]
        rereads.append(same[-1] if same else layer)
    held = None if geometry.held is None else geometry.held[:-shared]
    return replace(geometry, kv_layers=own, rereads=tuple(rereads), held=held)


def _shared_count(fields: Fields, layers: int, class_default: int) -> int:
    value = fields.get("num_kv_shared_layers")
    if value is ABSENT:
        if class_default:
            fields.notes.append(
                "num_kv_shared_layers is not in the config: the class default "
                f"{class_default} was used"
            )
        value = class_default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < layers:
        raise fields.refuse("num_kv_shared_layers", f"is {value!r} of {layers} layers")
    return value


def gemma3n(fields: Fields) -> Geometry:
    """Gemma 3n: every 5th layer is full; the last num_kv_shared_layers hold nothing."""
    layers = fields.count(LAYERS, 35)
    found = heads(fields, common(2, null=False), heads=8, head_dim=256)
    kept = windows(fields, layers, last_of(5), 512)
    shared = _shared_count(fields, layers, 15)
    return last_layers_share(of_one_width(fields, layers, found, kept), shared)


def gemma4(window: int) -> Family:
    """Gemma 4: full layers have a head_dim, and with attention_k_eq_v KV heads, of their own."""

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS)
        if fields.get("use_bidirectional_attention") == "all":
            raise fields.refuse("use_bidirectional_attention", "is 'all': no causal cache is kept")
        slides = [w is not None for w in windows(fields, layers, last_of_and_the_last(6), window)]
        slides[-1] = False  # by the class, whatever layer_types says
        local = heads(fields, common(4, null=False), heads=8, head_dim=256)
        wide = _gemma4_full(fields, local, slides)
        width = fields.count("sliding_window", window) if any(slides) else None
        full = LayerKV(wide.kv, wide.dim, wide.dim)
        kept = tuple(
            LayerKV(local.kv, local.dim, local.dim, width) if slide else full for slide in slides
        )
        geometry = Geometry(
            model_type=fields.model_type,
            layers=layers,
            kv_layers=kept,
            max_context_tokens=context(fields),
            notes=(),
            held=kept,
        )
        return last_layers_share(geometry, _shared_count(fields, layers, 0))

    return family


def _gemma4_full(fields: Fields, local: Heads, slides: list[bool]) -> Heads:
    """The full layers' attention: named fields, or in transformers' own files per_layer_config."""
    if fields.is_set("per_layer_config"):
        return _same_in_full_layers(fields, local, slides)
    dim = fields.count("global_head_dim", 512)
    own = fields.flag("attention_k_eq_v", False) and fields.is_set("num_global_key_value_heads")
    fields.get("num_global_key_value_heads")
    return Heads(local.query, fields.count("num_global_key_value_heads") if own else local.kv, dim)


def _same_in_full_layers(fields: Fields, local: Heads, slides: list[bool]) -> Heads:
    """per_layer_config: by layer number, what differs from the rest; here in the full layers."""
    name = "per_layer_config"
    listed = fields.get(name)
    if not isinstance(listed, Mapping):
        raise fields.refuse(name, f"is {listed!r} where an object was expected")
    entries = {int(number): entry for number, entry in listed.items()}
    full = [layer for layer, slide in enumerate(slides) if not slide]
    first = entries.get(full[0], {})
    if sorted(entries) != full or any(entry != first for entry in entries.values()):
        raise fields.refuse(name, "does not say the same of all full layers and of no other")
    unknown = sorted(set(first) - {"head_dim", "num_key_value_heads"})
    if unknown:
        raise fields.refuse(name, f"has {', '.join(unknown)}, not understood here")
    kv = fields.checked(name, first.get("num_key_value_heads", local.kv))
    return Heads(local.query, kv, fields.checked(name, first.get("head_dim", local.dim)))


def mimo_v2(fields: Fields) -> Geometry:
    """MiMo-V2: V is narrower than K, and sliding layers have KV heads of their own.

    transformers writes the window with one token more (129 where 128 are kept), and adds that one
    to sliding_window_size, not to sliding_window.
    """
    layers, query = fields.count(LAYERS), fields.count(HEADS)
    k_dim, v_dim = fields.count("head_dim", 192), fields.count("v_head_dim", 128)
    full = LayerKV(common(4, null=False)(fields, query), k_dim, v_dim)
    stated = fields.get("sliding_window_size")
    own = stated is not ABSENT and stated is not None
    width = fields.count("sliding_window_size") if own else fields.count("sliding_window", 129)
    local = LayerKV(
        _or("swa_num_key_value_heads", fields, 8),
        _or("swa_head_dim", fields, k_dim),
        _or("swa_v_head_dim", fields, v_dim),
        width,
    )
    slides = _mimo_slides(fields, layers)
    held = replace(local, window_tokens=width + 1) if own else local
    return Geometry(
        model_type=fields.model_type,
        layers=layers,
        kv_layers=tuple(local if slide else full for slide in slides),
        max_context_tokens=context(fields),
        notes=(),
        held=tuple(held if slide else full for slide in slides),
    )


def _or(name: str, fields: Fields, otherwise: int) -> int:
    value = fields.get(name)
    return otherwise if value is ABSENT or value is None else fields.checked(name, value)


def _mimo_slides(fields: Fields, layers: int) -> list[bool]:
    pattern = fields.get("hybrid_layer_pattern")
    if fields.is_set("hybrid_layer_pattern"):
        if not isinstance(pattern, list) or len(pattern) != layers or set(pattern) - {0, 1}:
            raise fields.refuse("hybrid_layer_pattern", f"is no 0 or 1 for each of {layers} layers")
        return [kind == 1 for kind in pattern]
    kinds = fields.layer_types(layers)
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    return [layer != 0 and (layer + 1) % 6 != 0 for layer in range(layers)]


def nemotron_nas(fields: Fields) -> Geometry:
    """Nemotron-NAS: each of block_configs says how many query heads share a KV head, or no_op."""
    layers, query = fields.count(LAYERS), fields.count(HEADS)
    blocks = fields.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise fields.refuse("block_configs", f"is no list of {layers} blocks")
    dim = heads(Fields({**fields.config, "num_key_value_heads": None}, fields.notes)).dim
    kept = []
    for number, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise fields.refuse("block_configs", f"has no attention in block {number}")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        if attention.get("window_length") or attention.get("num_sink_tokens"):
            raise fields.refuse("block_configs", f"has a window in block {number}")
        share = fields.checked("block_configs", attention.get("n_heads_in_group", ABSENT))
        if query % share:
            raise fields.refuse("block_configs", f"has {share} heads a KV head in block {number}")
        kept.append(LayerKV(query // share, dim, dim))
    return Geometry(
        model_type=fields.model_type,
        layers=layers,
        kv_layers=tuple(kept),
        max_context_tokens=context(fields),
        notes=(),
    )


def every_nth_holds(family: Family) -> Family:
    """Cross-layer attention (CLA): the first of every cla_share_factor layers holds the KV."""

    def shared(fields: Fields) -> Geometry:
        found = family(fields)
        if not fields.flag("use_cla", False):
            return found
        factor = fields.count("cla_share_factor")
        own = found.kv_layers[::factor]
        again = tuple(found.kv_layers[n - n % factor] for n in range(found.layers) if n % factor)
        return replace(found, kv_layers=own, rereads=again)

    return shared
