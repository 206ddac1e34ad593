"""Models with a second cache over another sequence: encoder-decoders and cross-attention layers.

The decoder's own cache grows with its tokens. The cross cache holds K and V of the encoder's tokens
(or an image's), is written once, and is a line of its own in the budget.
"""

from __future__ import annotations

from dataclasses import replace

from gaac_lab.families.config_fields import ABSENT, Fields
from gaac_lab.families.geometry import Geometry, LayerKV
from gaac_lab.families.layer_rules import HEADS, LAYERS, WIDTH, common
from gaac_lab.families.plain_layers import Family, context, heads

DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
DECODER_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")


def t5(fields: Fields) -> Geometry:
    """T5: heads of d_kv each; as many decoder layers as num_decoder_layers, else num_layers."""
    name = "num_decoder_layers"
    own = fields.get(name)
    layers = fields.count(LAYERS) if own is ABSENT or own is None else fields.count(name)
    count, dim = fields.count(HEADS), fields.count(("d_kv", "head_dim"), 64)
    return _two_caches(fields, layers, LayerKV(count, dim, dim))


def bart(fields: Fields) -> Geometry:
    """BART and its like, Whisper: decoder layers and heads under names of their own."""
    layers, count = fields.count(DECODER_LAYERS), fields.count(DECODER_HEADS)
    width = fields.count(WIDTH)
    if width % count:
        raise fields.refuse(WIDTH[0], f"is {width}, and {count} heads do not divide it")
    return _two_caches(fields, layers, LayerKV(count, width // count, width // count))


def _two_caches(fields: Fields, layers: int, layer: LayerKV) -> Geometry:
    fields.read |= {"is_encoder_decoder", "add_cross_attention", "num_decoder_layers"}
    kept = (layer,) * layers
    limit = context(fields) or _number(fields.get("max_target_positions"))
    source = _number(fields.get("max_source_positions"))
    if source is not None:
        fields.notes.append(f"the encoder gives at most {source:,} tokens (max_source_positions)")
    return Geometry(
        model_type=fields.model_type,
        layers=layers,
        kv_layers=kept,
        max_context_tokens=limit,
        notes=(),
        cross=kept,
        held=kept,
    )


def with_cross_layers(fields: Fields) -> Geometry:
    """Mllama: the layers of cross_attention_layers cache the image, the others the text."""
    layers = fields.count(LAYERS)
    listed = fields.get("cross_attention_layers")
    if listed is ABSENT or listed is None:
        listed = [3, 8, 13, 18, 23, 28, 33, 38]
        fields.notes.append(f"cross_attention_layers is not in the config: by class {listed}")
    if not isinstance(listed, list | tuple) or not set(listed) <= set(range(layers)):
        raise fields.refuse("cross_attention_layers", f"is no list of layers up to {layers - 1}")
    found = heads(fields, common(8, null=False))
    layer = LayerKV(found.kv, found.dim, found.dim)
    kept = (layer,) * (layers - len(set(listed)))
    return Geometry(
        model_type=fields.model_type,
        layers=layers,
        kv_layers=kept,
        max_context_tokens=context(fields),
        notes=(),
        cross=(layer,) * len(set(listed)),
        held=kept,
    )


def with_cross_attention(family: Family) -> Family:
    """A decoder whose every layer also looks at an encoder if add_cross_attention says so."""

    def both(fields: Fields) -> Geometry:
        found = family(fields)
        if not fields.flag("add_cross_attention", False):
            return found
        return replace(found, cross=found.kv_layers)

    return both


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
