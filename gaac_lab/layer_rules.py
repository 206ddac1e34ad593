"""The rules that families are put together from: which layers slide, and how many KV heads.

Where a rule is a class rule and not a field, it is the one of transformers' config classes (5.24).
"""

from __future__ import annotations

from collections.abc import Callable

from gaac_lab.config_fields import ABSENT, Fields

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model")
HEAD_DIM = ("head_dim", "kv_channels")
CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "n_ctx")
WINDOW = ("sliding_window",)
PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")

Schedule = Callable[[Fields, int], list[int | None]]
KVHeads = Callable[[Fields, int], int]


# ---- schedules: the window of each layer, None where a layer keeps every token


def all_full(fields: Fields, layers: int) -> list[int | None]:
    """Every layer keeps every token; a window field would say otherwise."""
    name, value = fields.find(WINDOW)
    if value not in (ABSENT, None) and fields.flag("use_sliding_window", True):
        raise fields.refuse(name, f"is {value!r}, and which layers it bounds is not known")
    return [None] * layers


def every_layer(class_default: int | None = None) -> Schedule:
    """Every layer slides if there is a window (Mistral, Mixtral, Phi-3, StarCoder2)."""

    def schedule(fields: Fields, layers: int) -> list[int | None]:
        name, value = fields.find(WINDOW)
        if value is None or (value is ABSENT and class_default is None):
            return [None] * layers
        return [fields.count((name,), class_default)] * layers

    return schedule


def after_max_window_layers(fields: Fields, layers: int) -> list[int | None]:
    """Qwen2, Qwen3: none slides unless use_sliding_window; then those from max_window_layers on."""
    if not fields.flag("use_sliding_window", False):
        return [None] * layers
    window, first = fields.count(WINDOW), fields.config.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.refuse("max_window_layers", f"is {first!r}, and use_sliding_window needs it")
    return [None if layer < first else window for layer in range(layers)]


def last_of(pattern_default: int, window_default: int, *, fixed: bool = False) -> Schedule:
    """In every run of `pattern` layers the last is full, the others slide (Gemma 3, Cohere 2)."""

    def schedule(fields: Fields, layers: int) -> list[int | None]:
        window = fields.count(WINDOW, window_default)
        pattern = pattern_default
        if not fixed and fields.find(PATTERN)[1] is not ABSENT:
            pattern = fields.count(PATTERN)
        return [None if (layer + 1) % pattern == 0 else window for layer in range(layers)]

    return schedule


def windows(fields: Fields, layers: int, by_class: Schedule) -> list[int | None]:
    """The window of each layer: from layer_types where they are given, else by the class rule."""
    kinds = fields.config.get("layer_types")
    if not kinds:
        return by_class(fields, layers)
    if len(kinds) != layers:
        raise fields.refuse("layer_types", f"names {len(kinds)} layers where {layers} are counted")
    if "sliding_attention" not in kinds:
        return [None] * layers
    window = fields.count(WINDOW)
    return [window if kind == "sliding_attention" else None for kind in kinds]


# ---- KV heads


def common(class_default: int | None = None, *, null: bool = True) -> KVHeads:
    """KV heads by the usual names.

    `class_default` counts where the field is absent (None: one per attention head). A null means
    one per attention head, except in classes that refuse it (`null=False`).
    """

    def kv_heads(fields: Fields, heads: int) -> int:
        name, value = fields.find(KV_HEADS)
        if (value is None and null) or (value is ABSENT and class_default is None):
            return heads
        return fields.count((name,), class_default)

    return kv_heads


def stated(fields: Fields, heads: int) -> int:
    """The class has no number of its own and no rule: the field must be there (Nemotron)."""
    return fields.count(KV_HEADS)


def every_head(fields: Fields, heads: int) -> int:
    """Multi-head attention by its class, which has no field for KV heads."""
    value = fields.find(KV_HEADS)[1]
    if value not in (ABSENT, None, heads):
        raise fields.refuse(
            fields.find(KV_HEADS)[0], f"is {value!r}, which the family does not have"
        )
    return heads


def by_fields_kv_heads(fields: Fields, heads: int) -> int:
    """No class to ask: an absent field is noted, a null says nothing."""
    name, value = fields.find(KV_HEADS)
    if value is ABSENT:
        fields.notes.append(f"{name} is not in the config: one KV head per attention head")
        return heads
    return fields.checked(name, value)


def falcon_kv_heads(multi_query_default: bool) -> KVHeads:
    """multi_query means one KV head whatever num_kv_heads says; not so in the new architecture."""

    def kv_heads(fields: Fields, heads: int) -> int:
        new = fields.flag("new_decoder_architecture", False)
        if fields.flag("multi_query", multi_query_default) and not new:
            return 1
        found = common()(fields, heads)
        if new and found != heads:
            fields.notes.append(
                f"transformers repeats the {found} KV heads to {heads} before caching, and stores "
                f"{heads // found} times as much"
            )
        return found

    return kv_heads


def bigcode_kv_heads(fields: Fields, heads: int) -> int:
    """GPT-BigCode: multi_query (true by class) means one KV head."""
    return 1 if fields.flag("multi_query", True) else heads


def chatglm_kv_heads(fields: Fields, heads: int) -> int:
    """ChatGLM: multi_query_attention means as many KV heads as multi_query_group_num says."""
    if not fields.flag("multi_query_attention", False):
        return heads
    return fields.count(("multi_query_group_num",))
