"""Hybrids of attention with recurrent layers, and models of recurrent layers alone.

Each family says of what type its layers are, what its attention looks like and what a recurrent
layer keeps. "hybrid" layers have both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gaac_lab.families import states
from gaac_lab.families.config_fields import ABSENT, Fields
from gaac_lab.families.geometry import Geometry, State
from gaac_lab.families.latent import Latent, note_prediction
from gaac_lab.families.layer_patterns import CONV, FULL, HYBRID, LINEAR, SLIDING, Kinds
from gaac_lab.families.layer_rules import HEADS, LAYERS, WIDTH, KVHeads, common, widths
from gaac_lab.families.plain_layers import Family, Heads, context, heads, of_one_width

WITH_STATE = {LINEAR, CONV, HYBRID}
WITHOUT_CACHE = {"moe", "mlp"}

# What says in one family or another which layers are of what type; a list of layer types decides.
SAID_BY_LAYER_TYPES = {
    "attn_layer_indices",
    "attn_layer_period",
    "block_types",
    "full_attention_interval",
    "layers_block_type",
    "linear_attn_config",
}

StateOf = Callable[[Fields], State]


def hybrid(
    kinds: Kinds,
    state: StateOf,
    kv_heads: KVHeads | None = None,
    *,
    list_name: str = "layer_types",
    window: int | None = None,
    head_dim: int | None = None,
    counted: Callable[[State], State] | None = None,
) -> Family:
    """KV in the attention layers, a state in the others.

    `kinds` is the class rule where the config has no list of layer types under `list_name`.
    `counted` turns the state that transformers keeps into the one that is counted.
    """

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS)
        found = _attention(fields, kv_heads, head_dim)
        kind_of = fields.layer_types(layers, list_name) or kinds(fields, layers)
        return _of_kinds(fields, kind_of, found, state, window, counted)

    return family


def _attention(fields: Fields, kv_heads: KVHeads | None, head_dim: int | None) -> Heads:
    if head_dim is None:
        return heads(fields, kv_heads)
    return heads(fields, kv_heads, head_dim=head_dim)


def _of_kinds(
    fields: Fields,
    kinds: list[str],
    found: Heads,
    state: StateOf,
    window: int | None = None,
    counted: Callable[[State], State] | None = None,
) -> Geometry:
    with_state = _check_kinds(fields, kinds)
    slides = [kind == SLIDING for kind in kinds if kind in {FULL, SLIDING, HYBRID}]
    kept = widths(fields, slides, window)
    held = (state(fields),) * with_state
    return replace(
        of_one_width(fields, len(kept), found, kept, in_all=len(kinds)),
        states=tuple(counted(one) for one in held) if counted else held,
        held_states=held,
    )


def _check_kinds(fields: Fields, kinds: list[str]) -> int:
    """How many layers keep a state; refuses a type that is not understood."""
    fields.read |= SAID_BY_LAYER_TYPES
    other = sorted(set(kinds) - WITH_STATE - WITHOUT_CACHE - {FULL, SLIDING})
    if other:
        raise fields.refuse("layer_types", f"holds {', '.join(other)}, not understood here")
    return sum(kind in WITH_STATE for kind in kinds)


def recurrent_only(state: StateOf) -> Family:
    """No attention at all: a state per layer and no KV (Mamba)."""

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS)
        held = (state(fields),) * layers
        return Geometry(
            model_type=fields.model_type,
            layers=layers,
            kv_layers=(),
            max_context_tokens=context(fields),
            notes=(),
            states=held,
            held=(),
            held_states=held,
        )

    return family


def latent_hybrid(kinds: Kinds, state: StateOf) -> Family:
    """Latents in the attention layers, a state in the others (Kimi-Linear, Ling 2.5)."""

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS)
        kind_of = fields.layer_types(layers) or kinds(fields, layers)
        kept, spread = Latent().layers(fields)
        with_state = _check_kinds(fields, kind_of)
        full = kind_of.count(FULL)
        note_prediction(fields)
        held = (state(fields),) * with_state
        return Geometry(
            model_type=fields.model_type,
            layers=layers,
            kv_layers=(kept,) * full,
            max_context_tokens=context(fields),
            notes=(),
            states=held,
            expanded=(spread,) * full,
            held=(kept,) * full,
            held_states=held,
        )

    return family


# ---- the state that is counted, where the published sizes differ from transformers'


def one_column_less(state: State) -> State:
    """The newest column of a convolution comes with the step: kernel - 1 are kept."""
    return replace(state, conv_columns=state.conv_columns - 1)


def in_cache_type(state: State) -> State:
    """The recurrent state in the cache's type."""
    return replace(state, recurrent_bytes=None)


# ---- families that need more than their types


def minimax(kinds: Kinds, list_name: str = "layer_types") -> Family:
    """MiniMax: the linear layers have the attention's own heads."""

    def family(fields: Fields) -> Geometry:
        layers = fields.count(LAYERS)
        found = heads(fields, common(8, null=False))
        kind_of = fields.layer_types(layers, list_name) or kinds(fields, layers)
        one = states.lightning(found.dim, found.query)
        return _of_kinds(fields, kind_of, found, lambda _: one)

    return family


def zamba(kinds: Kinds, state: StateOf, kv_heads: KVHeads) -> Family:
    """Zamba, Zamba 2: the attention is twice as wide as the model."""

    def family(fields: Fields) -> Geometry:
        layers, query = fields.count(LAYERS), fields.count(HEADS)
        given = fields.get("attention_head_dim")
        dim = 2 * fields.count(WIDTH) // query if given in (ABSENT, None) else given
        found = Heads(query, kv_heads(fields, query), fields.checked("attention_head_dim", dim))
        kind_of = fields.layer_types(layers, "layers_block_type") or kinds(fields, layers)
        return _of_kinds(fields, kind_of, found, state)

    return family


def nemotron_h(fields: Fields) -> Geometry:
    """Nemotron-H: M a state, * attention, - and E neither; or a list of the layers' types."""
    pattern = fields.get("hybrid_override_pattern")
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    if fields.is_set("hybrid_override_pattern"):
        if not isinstance(pattern, str) or set(pattern) - set(letters):
            raise fields.refuse(
                "hybrid_override_pattern", f"is {pattern!r}: M, *, - and E are meant"
            )
        kinds = [letters[letter] for letter in pattern]
    else:
        name = "layers_block_type" if fields.is_set("layers_block_type") else "layer_types"
        listed = fields.get(name)
        kinds = fields.layer_types(len(listed) if isinstance(listed, list) else 0, name) or []
    if not kinds:
        raise fields.refuse("hybrid_override_pattern", "is not in the config")
    told = fields.find(LAYERS)[1]
    if told is not ABSENT and told != len(kinds):
        raise fields.refuse(LAYERS[0], f"is {told}, and the pattern names {len(kinds)} layers")
    found = heads(fields, common(8, null=False), head_dim=128)
    return _of_kinds(fields, kinds, found, states.nemotron_h, counted=_nemotron_h_state(fields))


def _nemotron_h_state(fields: Fields) -> Callable[[State], State]:
    """mamba_ssm_cache_dtype says the type of the recurrent state; absent, it is the cache's."""
    named = fields.get("mamba_ssm_cache_dtype")
    if named in (ABSENT, None, "auto"):
        return lambda state: in_cache_type(one_column_less(state))
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    if named not in sizes:
        raise fields.refuse("mamba_ssm_cache_dtype", f"is {named!r}: give {', '.join(sizes)}")
    return lambda state: replace(one_column_less(state), recurrent_bytes=sizes[named])


def recurrent_gemma(fields: Fields) -> Geometry:
    """RecurrentGemma: block_types repeat over the layers; its attention has a window."""
    layers = fields.count(LAYERS)
    kinds = fields.get("block_types")
    kinds = ["recurrent", "recurrent", "attention"] if kinds is ABSENT else kinds
    if not isinstance(kinds, list | tuple) or set(kinds) - {"recurrent", "attention"} or not kinds:
        raise fields.refuse("block_types", f"is {kinds!r}: recurrent and attention are meant")
    query = fields.count(HEADS)
    found = Heads(query, common()(fields, query), fields.count(WIDTH) // query)
    window = fields.count("attention_window_size", 2048)
    attention = [kinds[layer % len(kinds)] == "attention" for layer in range(layers)]
    kept: list[int | None] = [window] * sum(attention)
    held = (states.rg_lru(fields),) * (layers - len(kept))
    fields.notes.append("transformers keeps the recurrent states in the model, not in its cache")
    return replace(
        of_one_width(fields, len(kept), found, kept, in_all=layers), states=held, held_states=held
    )
