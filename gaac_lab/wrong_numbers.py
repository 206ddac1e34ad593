"""What KV calculators get wrong, computed beside what is right.

Three mistakes are common: counting query heads instead of KV heads, taking hidden size / heads for
head_dim where the config says otherwise, and counting every layer as if it kept every token, or K
and V of every head where the model keeps a latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from gaac_lab import budget, model_table
from gaac_lab.families.config_fields import text_part

VALUE_BYTES = 2  # bf16 or fp16


def mistakes(config: dict[str, Any]) -> dict[str, int]:
    """Bytes a token by each of the three mistakes that this config invites.

    The last of them is no mistake for a model whose layers all keep every token. Only configs with
    the usual names of fields (num_hidden_layers, num_attention_heads, num_key_value_heads,
    hidden_size) are read; another gives an empty dict.
    """
    fields = text_part(config)
    named = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    if not all(isinstance(fields.get(name), int) for name in named):
        return {}
    layers, heads, kv_heads, width = (fields[name] for name in named)
    divided = width // heads
    dim = fields.get("head_dim") or divided
    k_and_v = 2 * VALUE_BYTES
    found = {}
    if heads != kv_heads:
        found["query heads counted"] = layers * heads * dim * k_and_v
    if dim != divided:
        found["hidden size / heads taken for head_dim"] = layers * kv_heads * divided * k_and_v
    latent = fields.get("kv_lora_rank")
    last = "K and V counted, not the latent" if latent else "every layer counted in full"
    found[last] = layers * kv_heads * dim * k_and_v
    return found


def table(wanted: Sequence[str]) -> pd.DataFrame:
    """Each mistake that changes the answer, for the models wanted, beside the right bytes a token.

    Columns: model, mistake, wrong_bytes_per_token, bytes_per_token (right, at long context),
    times_off (None where the right growth is 0).
    """
    rows = []
    for name in model_table.chosen(wanted):
        config = model_table.config(name)
        right = budget.kv_budget(config, seq_len=1).bytes_per_token
        for mistake, wrong in mistakes(config).items():
            if wrong == right:
                continue
            rows.append(
                {
                    "model": name,
                    "mistake": mistake,
                    "wrong_bytes_per_token": wrong,
                    "bytes_per_token": right,
                    "times_off": wrong / right if right else None,
                }
            )
    columns = ["model", "mistake", "wrong_bytes_per_token", "bytes_per_token", "times_off"]
    return pd.DataFrame(rows, columns=columns)
