"""How a model's keys were rotated, read from its config: a hint for gaac's level 5.

A hint that is wrong costs a few bytes a block and nothing else; what cannot be read from a config
is left out rather than guessed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gaac.rope import Rope

# Models that rotate neighbouring channels, (0, 1), (2, 3), ...; all others rotate halves.
INTERLEAVED = frozenset(
    {
        *("codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5", "ernie4_5_moe"),
        *("glm", "glm4", "glm4v_text", "glm_ocr_text", "gptj", "helium", "llama4_text"),
        *("moonshine", "moonshine_streaming"),
    }
)


def rope_of_layer(config: PreTrainedConfig, layer: int) -> Rope | None:
    """The rotation of a layer's keys; None if the config tells of none, or in a way not known here.

    config: the model's, or that of its text part. Scaling that follows the length of the prompt
    ("dynamic") is taken as it is for short ones.
    """
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    layer_type = None
    types = getattr(config, "layer_types", None)
    if types and layer < len(types) and isinstance(parameters.get(types[layer]), dict):
        layer_type = types[layer]
        parameters = parameters[layer_type]
    try:
        frequencies = _inverse_frequencies(config, parameters, layer_type)
        if frequencies is None:
            return None
        return Rope.of(frequencies, interleaved=config.model_type in INTERLEAVED)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return None  # a config of which the library itself could not make a model


def _inverse_frequencies(
    config: PreTrainedConfig, parameters: dict[str, Any], layer_type: str | None
) -> Any:
    """Radians per token for each pair of channels, as the library has them; None if unknown."""
    kind, theta = parameters.get("rope_type"), parameters.get("rope_theta")
    if theta is None:
        return None
    if kind == "default":
        return _default(config, float(theta), float(parameters.get("partial_rotary_factor", 1.0)))
    make = ROPE_INIT_FUNCTIONS.get(str(kind))
    if make is None:
        return None
    frequencies, _ = make(config, torch.device("cpu"), layer_type=layer_type)
    return frequencies.tolist()


def _default(config: PreTrainedConfig, theta: float, part: float) -> list[float] | None:
    """theta^(-2j / d) for the d channels that are rotated (Su et al. 2021, arXiv 2104.09864)."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        hidden, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
        if not hidden or not heads:
            return None
        head_dim = hidden // heads
    rotated = int(head_dim * part)
    return [theta ** (-2 * j / rotated) for j in range(rotated // 2)] or None
