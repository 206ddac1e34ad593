"""Multi-head latent attention (MLA): one latent a token and layer, in place of K and V per head.

The latent and the one rotated key that all heads share are kept (kv_lora_rank + qk_rope_head_dim);
K and V of each head are computed from them. Implementations that keep those instead take several
times as much: that is `Geometry.expanded`. With sparse attention (DSA) an indexer's keys come on
top, one of index_head_dim a token and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gaac_lab.families.config_fields import ABSENT, Fields
from gaac_lab.families.geometry import Geometry, LayerKV
from gaac_lab.families.layer_rules import HEADS, KV_HEADS, LAYERS, WIDTH
from gaac_lab.families.plain_layers import Family, context


@dataclass(frozen=True)
class Latent:
    """The class defaults of one family: widths in values, None where the field must be there."""

    rank: int | None = 512
    rope: int | None = 64
    nope: int | None = 128
    v: int | None = 128

    def layers(self, fields: Fields) -> tuple[LayerKV, LayerKV]:
        """(what a layer keeps, the same with K and V spread out per head)."""
        query = fields.count(HEADS)
        fields.find(KV_HEADS)  # says nothing here: the heads share the latent
        rank = fields.count("kv_lora_rank", self.rank)
        rope = fields.count("qk_rope_head_dim", self.rope)
        nope = fields.count("qk_nope_head_dim", self.nope)
        kept = LayerKV(1, 0, 0, latent_dim=rank + rope)
        return kept, LayerKV(query, nope + rope, self._v_head_dim(fields, query))

    def _v_head_dim(self, fields: Fields, query: int) -> int:
        value = fields.get("v_head_dim")
        if self.v is None and (value is ABSENT or value is None):  # MiniCPM 3
            return fields.count(WIDTH) // query
        return fields.count("v_head_dim", self.v)


def latent(defaults: Latent, *, layers: tuple[str, ...] = LAYERS, per_layer: int = 1) -> Family:
    """Latents in every layer; `per_layer` attentions in each (LongCat has two)."""

    def family(fields: Fields) -> Geometry:
        count = fields.count(layers) * per_layer
        kept, spread = defaults.layers(fields)
        _only(fields, count, "full_attention")
        note_prediction(fields)
        return _geometry(fields, (kept,) * count, (spread,) * count)

    return family


def indexed(defaults: Latent, *, top: int = 2048, all_layers: bool = True) -> Family:
    """Latents and an indexer's keys in every layer (DeepSeek V3.2), or in those that indexer_types
    or the index_topk_* fields name (GLM 5)."""

    def family(fields: Fields) -> Geometry:
        count = fields.count(LAYERS)
        kept, spread = defaults.layers(fields)
        _only(fields, count, "indexed_attention")
        dim, tokens = fields.count("index_head_dim", 128), fields.count("index_topk", top)
        own = [True] * count if all_layers else _own_indexer(fields, count)
        note_prediction(fields)
        return _geometry(
            fields,
            tuple(_with_index(kept, dim if has else 0, tokens) for has in own),
            tuple(_with_index(spread, dim if has else 0, tokens) for has in own),
        )

    return family


def _with_index(layer: LayerKV, dim: int, tokens: int) -> LayerKV:
    return LayerKV(
        layer.kv_heads,
        layer.k_head_dim,
        layer.v_head_dim,
        latent_dim=layer.latent_dim,
        index_dim=dim,
        index_top_tokens=tokens,
    )


def _geometry(fields: Fields, kept: tuple[LayerKV, ...], spread: tuple[LayerKV, ...]) -> Geometry:
    return Geometry(
        model_type=fields.model_type,
        layers=len(kept),
        kv_layers=kept,
        max_context_tokens=context(fields),
        notes=(),
        expanded=spread,
        held=kept,
    )


def _only(fields: Fields, count: int, kind: str) -> None:
    """Refuse layer types that the family is not counted with."""
    other = sorted(set(fields.layer_types(count) or []) - {kind})
    if other:
        raise fields.refuse("layer_types", f"holds {', '.join(other)}, not understood here")


def _own_indexer(fields: Fields, count: int) -> list[bool]:
    """GLM 5, HY 4: layers marked shared reuse the choice of the last one that has an indexer."""
    kinds = fields.get("indexer_types")
    if fields.is_set("indexer_types"):
        if len(kinds) != count or set(kinds) - {"full", "shared"}:
            raise fields.refuse(
                "indexer_types", f"is no list of full and shared for {count} layers"
            )
        return [kind == "full" for kind in kinds]
    if fields.model_type == "hy_v4":
        return [layer == 0 or (layer - 1) % 4 == 0 for layer in range(count)]
    if fields.is_set("index_topk_pattern"):
        pattern = str(fields.get("index_topk_pattern"))
        if len(pattern) != count or set(pattern) - {"F", "S"}:
            raise fields.refuse("index_topk_pattern", f"is no F or S for {count} layers")
        return [letter == "F" for letter in pattern]
    every = _number(fields, "index_topk_freq", 1)
    offset = _number(fields, "index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % max(every, 1) == 0 for layer in range(count)]


def _number(fields: Fields, name: str, default: int) -> int:
    """A whole number, 0 allowed; these fields are rarely written, so their default is no news."""
    value = fields.get(name)
    if value is ABSENT:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise fields.refuse(name, f"is {value!r}, which is no count")
    return value


def note_prediction(fields: Fields) -> None:
    """Say that the layers of multi-token prediction are not counted, if there are any."""
    if fields.is_set("num_nextn_predict_layers"):
        more = fields.get("num_nextn_predict_layers")
        fields.notes.append(
            f"multi-token prediction (num_nextn_predict_layers {more}) keeps KV too, not counted"
        )
