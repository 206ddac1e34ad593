"""Which layers of a hybrid are of what type, where its config has no list of layer types.

The rules are those of transformers' config classes (5.24), in the names of its layer types; a
"hybrid" layer has both attention and a state.
"""

from __future__ import annotations

from collections.abc import Callable

from gaac_lab.families.config_fields import ABSENT, Fields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CONV, HYBRID = "conv", "hybrid"

Kinds = Callable[[Fields, int], list[str]]


def every_nth_full(run: int, name: str = "full_attention_interval") -> Kinds:
    """The last of every `run` layers has full attention (Qwen3-Next, Ling 2.5)."""

    def kinds(fields: Fields, layers: int) -> list[str]:
        length = fields.count(name, run)
        return [LINEAR if (layer + 1) % length else FULL for layer in range(layers)]

    return kinds


def by_period(fields: Fields, layers: int) -> list[str]:
    """Jamba: attention where the layer's number leaves attn_layer_offset by attn_layer_period."""
    period, offset = fields.count("attn_layer_period", 8), fields.get("attn_layer_offset")
    offset = 4 if offset is ABSENT else offset
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
        raise fields.refuse("attn_layer_offset", f"is {offset!r} where 0 to {period - 1} are meant")
    return [FULL if layer % period == offset else LINEAR for layer in range(layers)]


def by_indices(name: str, *, absent: str, other: str = LINEAR) -> Kinds:
    """Attention in the layers that a field lists; without the list all layers are `absent`."""

    def kinds(fields: Fields, layers: int) -> list[str]:
        listed = fields.get(name)
        if listed is ABSENT or listed is None:
            return [absent] * layers
        if not isinstance(listed, list | tuple) or not set(listed) <= set(range(layers)):
            raise fields.refuse(name, f"is {listed!r}, no list of layers up to {layers - 1}")
        return [FULL if layer in listed else other for layer in range(layers)]

    return kinds


def all_of(kind: str) -> Kinds:
    """Every layer of one type."""
    return lambda fields, layers: [kind] * layers


def must_be_listed(fields: Fields, layers: int) -> list[str]:
    """The class has no rule: the list must be there (LFM 2 MoE)."""
    raise fields.refuse("layer_types", "is not in the config, and the class has no rule for it")


def zamba_kinds(fields: Fields, layers: int) -> list[str]:
    """Zamba: two without attention, one with, then by attn_layer_period and attn_layer_offset."""
    period, offset = fields.count("attn_layer_period", 6), fields.count("attn_layer_offset", 4)
    rest = [HYBRID if layer % period == offset else LINEAR for layer in range(layers - 3)]
    return [LINEAR, LINEAR, HYBRID, *rest]


def zamba2_kinds(fields: Fields, layers: int) -> list[str]:
    """Zamba 2: the class's own list, of 54 layers."""
    full = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    if layers != 54:
        raise fields.refuse(
            "layers_block_type", "is not in the config, and the class has 54 layers"
        )
    return [HYBRID if layer in full else LINEAR for layer in range(layers)]


def falcon_h1_kinds(fields: Fields, layers: int) -> list[str]:
    """Falcon-H1: attention runs beside the state-space part in every layer."""
    if fields.is_set("attn_layer_indices"):
        raise fields.refuse("attn_layer_indices", "is set, where every layer has attention")
    return [HYBRID] * layers


def lfm3_kinds(fields: Fields, layers: int) -> list[str]:
    """LFM 3: of every four, one full and one sliding, but for layer 0."""
    return [
        FULL if layer % 4 == 2 else SLIDING if layer % 4 == 0 and layer else CONV
        for layer in range(layers)
    ]


def olmo_hybrid_kinds(fields: Fields, layers: int) -> list[str]:
    """OLMo hybrid: every 4th layer is full, and at least the last."""
    found = [FULL if layer % 4 == 3 else LINEAR for layer in range(layers)]
    return found if FULL in found else [*found[:-1], FULL]


def lara_mini_kinds(fields: Fields, layers: int) -> list[str]:
    """Lara mini: a pattern of five."""
    pattern = [LINEAR, SLIDING, LINEAR, FULL, SLIDING]
    return [pattern[layer % 5] for layer in range(layers)]


def minimax_kinds(fields: Fields, layers: int) -> list[str]:
    """MiniMax in transformers: full and linear attention take turns."""
    return [FULL if layer % 2 == 0 else LINEAR for layer in range(layers)]


def minimax_text_kinds(fields: Fields, layers: int) -> list[str]:
    """MiniMax-Text-01 and M1: attn_type_list says 1 for full and 0 for lightning attention."""
    listed = fields.get("attn_type_list")
    if not isinstance(listed, list) or len(listed) != layers or not set(listed) <= {0, 1}:
        raise fields.refuse("attn_type_list", f"is {listed!r}, no list of 0 and 1 for every layer")
    return [FULL if kind == 1 else LINEAR for kind in listed]


def kimi_linear_kinds(fields: Fields, layers: int) -> list[str]:
    """Kimi-Linear: lists in linear_attn_config, counted from 1; else every 4th but the first."""
    nested = fields.part("linear_attn_config")
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is ABSENT or linear is ABSENT:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise fields.refuse("linear_attn_config", f"does not name each of {layers} layers once")
    return [FULL if layer in full else LINEAR for layer in range(1, layers + 1)]
