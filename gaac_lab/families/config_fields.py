"""Read the fields of a model config strictly: absent, null and class default are three things."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# Fields that mean a cache which is not K and V per head and token in every layer. One of them that
# is there, neither null, false, 0 nor empty, and that the family did not look at, is refused.
OTHER_CACHES: Final[Mapping[str, str]] = {
    "kv_lora_rank": "multi-head latent attention keeps one latent a token, not K and V per head",
    "num_kv_shared_layers": "some layers share the KV of others",
    "use_cla": "some layers share the KV of others",
    "attention_chunk_size": "chunked attention bounds some layers",
    "num_global_key_value_heads": "full and sliding layers differ in KV heads",
    "global_head_dim": "full and sliding layers differ in head_dim",
    "swa_num_key_value_heads": "full and sliding layers differ in KV heads",
    "v_head_dim": "K and V differ in width",
    "per_layer_config": "layers differ from each other",
    "block_configs": "every block has a geometry of its own",
    "hybrid_override_pattern": "state-space layers take turns with attention",
    "hybrid_layer_pattern": "the layers' pattern is the family's own",
    "layers_block_type": "recurrent layers take turns with attention",
    "block_types": "recurrent layers take turns with attention",
    "attn_layer_period": "state-space layers take turns with attention",
    "attn_layer_indices": "state-space layers take turns with attention",
    "attn_type_list": "linear attention takes turns with full attention",
    "full_attention_interval": "linear attention takes turns with full attention",
    "linear_num_key_heads": "linear attention keeps a fixed state instead of KV",
    "linear_attn_config": "linear attention keeps a fixed state instead of KV",
    "mamba_d_state": "state-space layers keep a fixed state",
    "ssm_state_size": "state-space layers keep a fixed state",
    "state_size": "state-space layers keep a fixed state",
    "conv_L_cache": "convolution layers keep a fixed state",
    "index_head_dim": "an indexer keeps keys of its own",
    "is_encoder_decoder": "an encoder-decoder keeps two caches of different lengths",
    "num_decoder_layers": "an encoder-decoder keeps two caches of different lengths",
    "add_cross_attention": "cross-attention layers cache the encoder's tokens",
    "cross_attention_layers": "cross-attention layers cache the image, not the text",
    "attn_config": "the KV heads are nested in it under the family's own rules",
}

# In a family that is not known here, a field whose name touches the cache must be understood.
TOUCHES_CACHE = re.compile(
    r"attn|attention|window|head|kv|state|conv|mamba|ssm|linear|cache|chunk|block|shar|lora|rank"
    r"|latent|recur|memory|layer|multi_query|group|cycle|loop|compress|indexer"
)
HARMLESS = re.compile(
    r"attention_(bias|dropout|probs_dropout_prob|softmax_in_fp32|out_bias|multiplier)|attn_pdrop|.*dropout.*"
    r"|_?attn_implementation.*|use_cache|output_.*|return_.*|layer_?norm.*|.*layernorm.*|lm_head.*"
    r"|chunk_size_feed_forward|.*(moe|expert|mlp|router).*|first_k_dense_replace|cross_attention_hidden_size"
    r"|initializer.*|layerdrop|resid.*|embd.*|quantization_config|rope.*|auto_map"
)
# Where the language model stands in a config of several parts, tried in this order.
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
LAYER_TYPE_NAMES: Final[Mapping[str, str]] = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "recurrent": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}


class UnsupportedConfig(ValueError):
    """The config is not understood; the message names the field and how to go on by hand."""


class Absent:
    """The type of ABSENT: the field is not in the file (null is another thing)."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()


def read_config(source: Any) -> dict[str, Any]:
    """The config as a dict: from a dict, a transformers config, or the path of a folder or file.

    Raises UnsupportedConfig for a missing file, bad JSON, or anything that holds no fields.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    if not isinstance(source, str | Path):
        raise UnsupportedConfig(
            f"A config cannot be read from {type(source).__name__}: give a dict, a transformers "
            "config, or the path of a config.json or its folder."
        )
    path = Path(source).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedConfig(
            f"There is no config at {path} ({error.strerror}): give the path of a config.json or "
            "of its folder."
        ) from error
    except ValueError as error:
        raise UnsupportedConfig(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(loaded, dict):
        raise UnsupportedConfig(f"{path} holds no JSON object: a config.json is one.")
    return loaded


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's fields: those of the nested part where there is one.

    A part without a model_type keeps that of the whole, under "part_of".
    """
    for name in TEXT_PARTS:
        nested = config.get(name)
        if isinstance(nested, Mapping) and nested:
            return text_part({"part_of": config.get("model_type"), **nested})
    return dict(config)


def overridden(config: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config with some fields replaced; None takes a field away, as if it were not there."""
    replaced = {**config, **(overrides or {})}
    for name, value in (overrides or {}).items():
        if value is None:
            del replaced[name]
    if "model_type" in (overrides or {}):
        replaced.pop("part_of", None)
    return replaced


class Fields:
    """One config's fields, found under any of their names, and the notes that reading them left.

    Every name that was asked for is remembered in `read`, so that a field which means another kind
    of cache and which nobody asked for can be refused at the end.
    """

    def __init__(self, config: Mapping[str, Any], notes: list[str] | None = None) -> None:
        self.config = config
        self.notes: list[str] = [] if notes is None else notes
        self.read: set[str] = set()
        self.model_type: str | None = config.get("model_type")

    def get(self, name: str) -> Any:
        """The value as it stands in the file, ABSENT if it is not there."""
        self.read.add(name)
        return self.config.get(name, ABSENT)

    def is_set(self, name: str) -> bool:
        """Whether the field is there and neither null, false, 0 nor empty."""
        value = self.get(name)
        return not (value is ABSENT or value is None or value in (False, 0, [], {}, ""))

    def find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """(name, value) under the first of the names that is there, or (first name, ABSENT).

        Raises UnsupportedConfig if two of the names are there with different values.
        """
        self.read.update(names)
        there = [(name, self.config[name]) for name in names if name in self.config]
        told = [(name, value) for name, value in there if value is not None]
        for name, value in told[1:]:
            if value != told[0][1]:
                raise self.refuse(name, f"is {value!r} where {told[0][0]} is {told[0][1]!r}")
        return (told or there or [(names[0], ABSENT)])[0]

    def count(self, names: tuple[str, ...] | str, default: int | None = None) -> int:
        """A whole number of at least 1; an absent field takes the class default, if any."""
        name, value = self.find((names,) if isinstance(names, str) else names)
        if isinstance(value, Absent) and default is not None:
            self.notes.append(f"{name} is not in the config: the class default {default} was used")
            return default
        return self.checked(name, value)

    def checked(self, name: str, value: Any) -> int:
        """The value, if it is a whole number of at least 1."""
        if isinstance(value, Absent):
            raise self.refuse(name, "is not in the config")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, f"is {value!r}, which is no count")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false; an absent or null field takes the class default."""
        value = self.get(name)
        if value is ABSENT or value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"is {value!r} where true or false was expected")
        return value

    def layer_types(self, layers: int, name: str = "layer_types") -> list[str] | None:
        """The type of each layer under its name of today, or None where the file has no list."""
        if not self.is_set(name):
            return None
        kinds = self.get(name)
        if not isinstance(kinds, list | tuple):
            raise self.refuse(name, f"is {kinds!r} where a list of layer types was expected")
        if len(kinds) != layers:
            raise self.refuse(name, f"names {len(kinds)} layers where {layers} are counted")
        return [LAYER_TYPE_NAMES.get(str(kind), str(kind)) for kind in kinds]

    def part(self, name: str) -> Fields:
        """The fields nested under a name; no fields where it is absent or null."""
        value = self.get(name)
        if value is ABSENT or value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"is {value!r} where an object was expected")
        return Fields({**value, "model_type": self.model_type}, self.notes)

    def refuse(self, name: str, why: str) -> UnsupportedConfig:
        """The error for one field: what is the matter, and how to go on."""
        kind = f"{self.model_type}: " if self.model_type else ""
        return UnsupportedConfig(
            f"{kind}{name} {why}; say what holds with overrides={{{name!r}: value}} or --field "
            f"{name}=VALUE (null: as if it were not there), or count by hand with kv_gib(layers, "
            "kv_heads, head_dim, seq_len), where layers are those that hold KV."
        )

    def refuse_other_caches(self) -> None:
        """Raise UnsupportedConfig for a field of another kind of cache that nobody asked for."""
        for name in [name for name in OTHER_CACHES if name not in self.read]:
            if self.is_set(name):
                raise self.refuse(name, f"is set: {OTHER_CACHES[name]}")

    def refuse_unknown(self, understood: frozenset[str]) -> None:
        """Raise UnsupportedConfig for a field that touches the cache and is not understood."""
        for name, value in self.config.items():
            if value is None or value is False or name in understood or HARMLESS.fullmatch(name):
                continue
            if TOUCHES_CACHE.search(name):
                raise self.refuse(name, "is not understood, and this model_type is not known here")
