"""The KV cache counted a second time, one layer after another, to hold the budget against.

This file shares nothing with the budget: it imports none of it and is written the other way round.
The budget reads what a config says and asks which rules it follows; here every family has its own
few lines that say what one layer keeps, and the layers are added up. It knows the families of the
configs in data/model_configs and no others, reads fields by their exact names, and knows no class
default that is not written out below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class UnknownModel(LookupError):
    """The oracle has no rule for this model, or misses a field; the message names it."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps for one sequence; counts of values, not bytes.

    token_values: kept for every token (keys and values together, or one latent); 0 if none.
    window: the most tokens that are kept, None for all of them.
    state_values: of the fixed state, in the cache's dtype; wide_state_values: in float32.
    """

    token_values: int = 0
    window: int | None = None
    state_values: int = 0
    wide_state_values: int = 0


@dataclass(frozen=True)
class Count:
    """The layers of one model, and their sums in bytes for values of `value_bytes` bytes."""

    layers: tuple[Layer, ...]
    value_bytes: int

    @property
    def layers_with_kv(self) -> int:
        return sum(layer.token_values > 0 for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """What one more token of one sequence adds when every window is full."""
        return sum(layer.token_values for layer in self.layers if layer.window is None) * (
            self.value_bytes
        )

    @property
    def bytes_per_token_below_window(self) -> int:
        """What one more token of one sequence adds before any window is full."""
        return sum(layer.token_values for layer in self.layers) * self.value_bytes

    @property
    def fixed_state_bytes(self) -> int:
        """The state of one sequence, which does not grow."""
        return sum(
            layer.state_values * self.value_bytes + layer.wide_state_values * 4
            for layer in self.layers
        )

    def total_bytes(self, seq_len: int, batch: int = 1) -> int:
        """Bytes of `batch` sequences of `seq_len` tokens, without the fixed state."""
        total = 0
        for layer in self.layers:
            kept = seq_len if layer.window is None else min(seq_len, layer.window)
            total += layer.token_values * kept
        return total * batch * self.value_bytes


class Fields(dict[str, Any]):
    """The fields of one config; asking for one that is not there is refused by its name."""

    def __missing__(self, name: str) -> Any:
        model = self.get("model_type")
        raise UnknownModel(
            f"{model}: {name} is not in the config, and the oracle knows no default."
        )


def count(config: Mapping[str, Any], *, value_bytes: int = 2) -> Count:
    """Walk the layers of a model, from the raw fields of its config.json.

    `value_bytes`: bytes of one value of the cache (2 for bfloat16). Raises UnknownModel.
    """
    fields = Fields(config)
    family = fields["model_type"]
    if "text_config" in fields:
        fields = Fields(fields["text_config"])
        family = fields.setdefault("model_type", family)
    if family not in FAMILIES:
        raise UnknownModel(f"The oracle has no rule for the model type {family!r}.")
    try:
        return Count(tuple(FAMILIES[family](fields)), value_bytes)
    except KeyError as error:
        raise UnknownModel(f"{family}: the oracle has no rule for {error} layers.") from error


# ---- every layer alike


def plain(c: Fields) -> list[Layer]:
    """Keys and values of every KV head, for all tokens, in every layer."""
    if c.get("use_sliding_window") or c.get("layer_types"):
        raise UnknownModel(f"{c['model_type']}: the oracle's rule is for layers without a window.")
    return [Layer(keys_and_values(c))] * c["num_hidden_layers"]


def mistral(c: Fields) -> list[Layer]:
    """Every layer slides, if there is a window."""
    return [Layer(keys_and_values(c), window(c))] * c["num_hidden_layers"]


def gpt2(c: Fields) -> list[Layer]:
    """Every attention head has keys and values, so they are as wide as the model."""
    return [Layer(2 * c["n_embd"])] * c["n_layer"]


def gpt_bigcode(c: Fields) -> list[Layer]:
    kv_heads = 1 if c["multi_query"] else c["n_head"]
    return [Layer(2 * kv_heads * (c["n_embd"] // c["n_head"]))] * c["n_layer"]


def falcon(c: Fields) -> list[Layer]:
    """One KV head, but the new architecture says how many, and without multi_query each its own."""
    if c.get("new_decoder_architecture"):
        kv_heads = c["num_kv_heads"]
    else:
        kv_heads = 1 if c["multi_query"] else c["n_head"]
    return [Layer(2 * kv_heads * (c["hidden_size"] // c["n_head"]))] * c["n_layer"]


def chatglm(c: Fields) -> list[Layer]:
    kv_heads = (
        c["multi_query_group_num"] if c["multi_query_attention"] else c["num_attention_heads"]
    )
    return [Layer(2 * kv_heads * c["kv_channels"])] * c["num_layers"]


def t5(c: Fields) -> list[Layer]:
    """The decoder's own attention; what it keeps of the encoder does not grow with its tokens."""
    return [Layer(2 * c["num_heads"] * c["d_kv"])] * c["num_decoder_layers"]


def deepseek(c: Fields) -> list[Layer]:
    """One latent a token and layer, and one rotated key that all heads share."""
    return [Layer(c["kv_lora_rank"] + c["qk_rope_head_dim"])] * c["num_hidden_layers"]


# ---- layers that take turns


def gemma2(c: Fields) -> list[Layer]:
    """Counted from 0, even layers slide and odd layers keep everything."""
    pair = [Layer(keys_and_values(c), window(c)), Layer(keys_and_values(c))]
    return [pair[i % 2] for i in range(c["num_hidden_layers"])]


def gemma3(c: Fields) -> list[Layer]:
    """Counted from 1, every sixth layer keeps everything and the others slide."""
    every = c["sliding_window_pattern"]
    return [
        Layer(keys_and_values(c), None if i % every == 0 else window(c))
        for i in range(1, c["num_hidden_layers"] + 1)
    ]


def listed(c: Fields) -> list[Layer]:
    """The config names the kind of each layer."""
    return [
        Layer(keys_and_values(c), window(c) if slides else None) for slides in sliding_layers(c)
    ]


def gemma3n(c: Fields) -> list[Layer]:
    """As listed, but the last layers look into the caches of earlier ones and keep none."""
    own = c["num_hidden_layers"] - c["num_kv_shared_layers"]
    return [layer if i < own else Layer() for i, layer in enumerate(listed(c))]


def gemma4(c: Fields) -> list[Layer]:
    """Full layers have fewer and wider KV heads. K equal to V saves weights, not cache."""
    if c["num_kv_shared_layers"] or not c["attention_k_eq_v"]:
        raise UnknownModel(
            "gemma4: the oracle's rule is for attention_k_eq_v and no shared layers."
        )
    full = Layer(2 * c["num_global_key_value_heads"] * c["global_head_dim"])
    sliding = Layer(2 * c["num_key_value_heads"] * c["head_dim"], window(c))
    return [sliding if slides else full for slides in sliding_layers(c)]


def llama4(c: Fields) -> list[Layer]:
    """Counted from 1, every fourth layer keeps everything, the others one chunk at most."""
    for name in ("layer_types", "no_rope_layers", "no_rope_layer_interval"):
        if name in c:
            raise UnknownModel(f"llama4: {name} is given, and the oracle knows the default only.")
    return [
        Layer(keys_and_values(c), None if i % 4 == 0 else c["attention_chunk_size"])
        for i in range(1, c["num_hidden_layers"] + 1)
    ]


def mimo(c: Fields) -> list[Layer]:
    """Keys are wider than values; sliding layers, 1 in the pattern, have KV heads of their own."""
    full = Layer(c["num_key_value_heads"] * (c["head_dim"] + c["v_head_dim"]))
    heads, width = c["swa_num_key_value_heads"], c["swa_head_dim"] + c["swa_v_head_dim"]
    sliding = Layer(heads * width, c["sliding_window"])
    return [sliding if slides else full for slides in c["hybrid_layer_pattern"]]


def nemotron_nas(c: Fields) -> list[Layer]:
    """Each block says how many attention heads share one KV head, or has no attention at all."""
    layers, head_dim = [], c["hidden_size"] // c["num_attention_heads"]
    for block in c["block_configs"]:
        attention = block["attention"]
        if attention["no_op"]:
            layers.append(Layer())
        else:
            kv_heads = c["num_attention_heads"] // attention["n_heads_in_group"]
            layers.append(Layer(2 * kv_heads * head_dim))
    return layers


# ---- layers with a state


def jamba(c: Fields) -> list[Layer]:
    """One layer of every eight has attention, the others a mamba state."""
    inner = c["mamba_expand"] * c["hidden_size"]
    attention = Layer(keys_and_values(c))
    mamba = Layer(
        state_values=inner * (c["mamba_d_conv"] - 1), wide_state_values=inner * c["mamba_d_state"]
    )
    return [
        attention if i % c["attn_layer_period"] == c["attn_layer_offset"] else mamba
        for i in range(c["num_hidden_layers"])
    ]


def qwen3_next(c: Fields) -> list[Layer]:
    """Counted from 1, every fourth layer has attention, the others one matrix a value head."""
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    linear = Layer(
        state_values=(2 * keys + values) * c["linear_conv_kernel_dim"],
        wide_state_values=values * c["linear_key_head_dim"],
    )
    return [
        Layer(keys_and_values(c)) if i % c["full_attention_interval"] == 0 else linear
        for i in range(1, c["num_hidden_layers"] + 1)
    ]


def falcon_h1(c: Fields) -> list[Layer]:
    """Every layer has both: attention, and a state-space part beside it."""
    inner = c["mamba_n_heads"] * c["mamba_d_head"]
    mixed = inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    state = inner * c["mamba_d_state"] + mixed * c["mamba_d_conv"]
    return [Layer(keys_and_values(c), state_values=state)] * c["num_hidden_layers"]


def nemotron_h(c: Fields) -> list[Layer]:
    """One letter a layer: * is attention, M a state-space layer, - only an MLP."""
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    mixed = inner + 2 * c["n_groups"] * c["ssm_state_size"]
    state = inner * c["ssm_state_size"] + mixed * (c["conv_kernel"] - 1)
    letters = {"*": Layer(keys_and_values(c)), "M": Layer(state_values=state), "-": Layer()}
    return [letters[letter] for letter in c["hybrid_override_pattern"]]


# ---- words that several rules use


def keys_and_values(c: Fields) -> int:
    """Values that one token adds to one layer: a key and a value of head_dim for each KV head."""
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", heads)
    head_dim = c["head_dim"] if "head_dim" in c else c["hidden_size"] // heads
    return 2 * int(kv_heads) * int(head_dim)


def window(c: Fields) -> int | None:
    """The sliding window; null means none, and one that the model's context cannot fill is none."""
    size = c["sliding_window"]
    return None if size is None or size >= c.get("max_position_embeddings", size + 1) else int(size)


def sliding_layers(c: Fields) -> list[bool]:
    """For each layer that layer_types names: does it slide?"""
    kinds = {"sliding_attention": True, "full_attention": False}
    return [kinds[kind] for kind in c["layer_types"]]


FAMILIES: Mapping[str, Callable[[Fields], list[Layer]]] = {
    "llama": plain,
    "qwen3": plain,
    "mixtral": plain,
    "gpt_neox": plain,
    "mistral": mistral,
    "phi3": mistral,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "falcon": falcon,
    "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
    "chatglm": chatglm,
    "t5": t5,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4": gemma4,
    "gpt_oss": listed,
    "llama4_text": llama4,
    "mimo_v2_flash": mimo,
    "nemotron-nas": nemotron_nas,
    "jamba": jamba,
    "qwen3_next": qwen3_next,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
}
