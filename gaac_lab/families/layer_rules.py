"""The rules that families are put together from: which layers slide, and how many KV heads.

Where a rule is a class rule and not a field, it is the one of transformers' config classes (5.24).
"""

from __future__ import annotations

from collections.abc import Callable

from gaac_lab.families.config_fields import ABSENT, Fields

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "dim_head")
CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "n_ctx",
           "max_seq_len", "model_max_length")  # fmt: skip
WINDOW = ("sliding_window",)

# Whether each layer slides, by the class: from the fields, the layers, the window's class default.
Schedule = Callable[[Fields, int, int | None], list[bool]]
KVHeads = Callable[[Fields, int], int]


# ---- schedules


def all_full(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """Every layer keeps every token; a window field would say otherwise."""
    name, value = fields.find(WINDOW)
    if value not in (ABSENT, None) and fields.flag("use_sliding_window", True):
        raise fields.refuse(name, f"is {value!r}, and which layers it bounds is not known")
    return [False] * layers


def as_listed(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """No layer slides but those that layer_types names; a window alone says nothing."""
    return [False] * layers


def every_layer(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """Every layer slides if there is a window (Mistral, Mixtral, Phi-3, StarCoder2)."""
    value = fields.find(WINDOW)[1]
    none = value is None or (value is ABSENT and window is None)
    return [not none] * layers


def every_layer_if_used(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """Every layer slides if use_sliding_window says so (Qwen3 MoE)."""
    if not fields.flag("use_sliding_window", False):
        return [False] * layers
    return every_layer(fields, layers, window)


def after_max_window_layers(class_default: int, *, switch: bool = True) -> Schedule:
    """The layers from max_window_layers on slide: in Qwen only with use_sliding_window."""

    def schedule(fields: Fields, layers: int, window: int | None) -> list[bool]:
        if switch and not fields.flag("use_sliding_window", False):
            return [False] * layers
        if fields.find(WINDOW)[1] is None:
            return [False] * layers
        first = fields.get("max_window_layers")
        if first is ABSENT:
            first = class_default
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.refuse("max_window_layers", f"is {first!r}, which is no count")
        return [layer >= first for layer in range(layers)]

    return schedule


def qwen2_moe_slides(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """Qwen2 MoE: every other layer before max_window_layers, if use_sliding_window says so."""
    late = after_max_window_layers(28)(fields, layers, window)
    on = fields.flag("use_sliding_window", False) and fields.find(WINDOW)[1] is not None
    return [on and layer % 2 == 0 and not late[layer] for layer in range(layers)]


def last_of(run: int, *names: str) -> Schedule:
    """In every run of layers the last is full, the others slide (Gemma 3, Cohere 2).

    The run's length is a field of one of the names, if there are any.
    """

    def schedule(fields: Fields, layers: int, window: int | None) -> list[bool]:
        length = run
        if names and fields.find(names)[1] is not ABSENT:
            length = fields.count(names)
        return [(layer + 1) % length != 0 for layer in range(layers)]

    return schedule


def last_of_if_window(run: int) -> Schedule:
    """As last_of; but a null window means that no layer slides (EXAONE 4)."""

    def schedule(fields: Fields, layers: int, window: int | None) -> list[bool]:
        if fields.find(WINDOW)[1] is None:
            return [False] * layers
        return last_of(run, "sliding_window_pattern")(fields, layers, window)

    return schedule


def first_of(run: int, *names: str) -> Schedule:
    """In every run of layers the first is full, the others slide (CWM, Granite SWA)."""

    def schedule(fields: Fields, layers: int, window: int | None) -> list[bool]:
        length = run
        if names and fields.find(names)[1] is not ABSENT:
            length = fields.count(names)
        return [layer % length != 0 for layer in range(layers)]

    return schedule


def last_of_and_the_last(run: int) -> Schedule:
    """As last_of, and the model's last layer is full whatever its place (BEAM, Gemma 4)."""

    def schedule(fields: Fields, layers: int, window: int | None) -> list[bool]:
        return [(layer + 1) % run != 0 and layer + 1 < layers for layer in range(layers)]

    return schedule


def flint_slides(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """Flint: the first two, the last, and of every four the second are full."""
    full = {0, 1, layers - 1}
    return [layer not in full and layer % 4 != 1 for layer in range(layers)]


def without_rope_slides(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """SmolLM3: the layers without RoPE slide, if use_sliding_window says so."""
    if not fields.flag("use_sliding_window", False):
        return [False] * layers
    none = not any(every_layer(fields, layers, window))
    return [not none and not rope for rope in rope_layers(fields, layers)]


def cohere2_moe_slides(fields: Fields, layers: int, window: int | None) -> list[bool]:
    """Cohere 2 MoE: one run for the dense layers at the start, another for the rest."""
    dense = fields.get("first_k_dense_replace")
    dense = dense if isinstance(dense, int) else 0
    start = fields.count("prefix_dense_sliding_window_pattern", 1)
    rest = fields.count("sliding_window_pattern", 4)
    return [(layer + 1) % start != 0 for layer in range(dense)] + [
        (layer + 1) % rest != 0 for layer in range(layers - dense)
    ]


def rope_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have rotary positions: no_rope_layers (1: they do), else all but every 4th."""
    listed = fields.get("no_rope_layers")
    if fields.is_set("no_rope_layers"):
        if not isinstance(listed, list | tuple) or len(listed) != layers:
            raise fields.refuse("no_rope_layers", f"is no list of {layers} layers")
        return [bool(rope) for rope in listed]
    interval = fields.count("no_rope_layer_interval", 4)
    return [(layer + 1) % interval != 0 for layer in range(layers)]


# ---- the window of each layer


def windows(
    fields: Fields, layers: int, by_class: Schedule, window: int | None = None
) -> list[int | None]:
    """The window of each layer, None where it keeps every token.

    Which layers slide is in layer_types where they are given, else in the class rule; `window` is
    the class default of its width.
    """
    kinds = fields.layer_types(layers)
    if kinds is None:
        slides = by_class(fields, layers, window)
    else:
        other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if other:
            raise fields.refuse("layer_types", f"holds {', '.join(other)}, not understood here")
        slides = [kind == "sliding_attention" for kind in kinds]
    return widths(fields, slides, window)


def widths(fields: Fields, slides: list[bool], window: int | None = None) -> list[int | None]:
    """The window of the layers that slide; an absent field takes the class default."""
    if not any(slides):
        return [None] * len(slides)
    width = fields.count(WINDOW, window)
    return [width if sliding else None for sliding in slides]


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
    name, value = fields.find(KV_HEADS)
    if value not in (ABSENT, None, heads):
        raise fields.refuse(name, f"is {value!r}, which the family does not have")
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
        return common()(fields, heads)

    return kv_heads


def bigcode_kv_heads(fields: Fields, heads: int) -> int:
    """GPT-BigCode: multi_query (true by class) means one KV head."""
    return 1 if fields.flag("multi_query", True) else heads


def chatglm_kv_heads(fields: Fields, heads: int) -> int:
    """ChatGLM: multi_query_attention means as many KV heads as multi_query_group_num says."""
    if not fields.flag("multi_query_attention", False):
        return heads
    return fields.count("multi_query_group_num")


def dbrx_kv_heads(fields: Fields, heads: int) -> int:
    """DBRX: in attn_config, one by class."""
    return fields.part("attn_config").count("kv_n_heads", 1)


def mpt_kv_heads(fields: Fields, heads: int) -> int:
    """MPT: attn_config says of which kind the attention is; multi-head by class."""
    nested = fields.part("attn_config")
    kind = nested.get("attn_type")
    if kind in (ABSENT, None, "multihead_attention"):
        return heads
    if kind == "multiquery_attention":
        return 1
    if kind == "grouped_query_attention":
        return nested.count("kv_n_heads")
    raise fields.refuse("attn_config", f"has the attn_type {kind!r}, which is not understood")
