"""Three ways, one answer: the formula, the oracle and transformers' own caches, model by model.

The truth is what data/model_configs says under `_about.expected`. Where transformers really holds
something else, the difference is written out here and must be exactly that.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from gaac_lab import budget_oracle
from gaac_lab.budget import kv_budget
from gaac_lab.budget_oracle import UnknownModel
from gaac_lab.cache_probe import CannotProbe, probe
from gaac_lab.paths import data_dir

CONFIGS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((data_dir() / "model_configs").glob("*.json"))
}
TOKENS = 32_768
# transformers has no class of its own for these: their authors' code decides.
NOT_IN_TRANSFORMERS = {
    "chatglm2-6b": "no class for model_type 'chatglm'",
    "llama-3-3-nemotron-super-49b-v1": "no class for model_type 'nemotron-nas'",
}
# FalconAttention repeats the KV heads for every attention head before it caches them: 8 to 128.
TIMES_AS_MUCH = {"falcon-40b-instruct": 16}
# The published states are another engine's. transformers keeps the recurrent state in float32, and
# as many columns of the convolution as its kernel is wide.
STATE_BYTES = {
    "falcon-h1-7b-instruct": 44 * (3072 * 256 * 4 + (3072 + 2 * 256) * 4 * 2),
    "jamba-v0.1": 28 * (8192 * 16 * 4 + 8192 * 4 * 2),
    "nemotron-h-8b-base-8k": 24 * (8192 * 128 * 4 + (8192 + 2 * 8 * 128) * 4 * 2),
}


def expected(stem: str) -> tuple[int, int, int, int]:
    found = CONFIGS[stem]["_about"]["expected"]
    return (
        found["bytes_per_token"],
        found["bytes_per_token_below_window"],
        found["total_bytes_at_32768_tokens"],
        found["fixed_state_bytes"] or 0,
    )


def for_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The two Falcon files are older than the class in transformers, and speak of it so."""
    if config["model_type"] not in ("RefinedWeb", "RefinedWebModel"):
        return config
    depth, heads = config["n_layer"], config["n_head"]
    return {
        **config,
        "model_type": "falcon",
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
    }


def test_all_models_are_here() -> None:
    assert len(CONFIGS) == 31
    assert {*NOT_IN_TRANSFORMERS, *TIMES_AS_MUCH, *STATE_BYTES} <= set(CONFIGS)


@pytest.mark.parametrize("stem", CONFIGS)
def test_formula_and_oracle_give_the_truth(stem: str) -> None:
    ours = kv_budget(CONFIGS[stem], seq_len=TOKENS)
    other = budget_oracle.count(CONFIGS[stem])
    assert expected(stem) == (
        ours.bytes_per_token,
        ours.bytes_per_token_below_window,
        ours.total_bytes,
        ours.fixed_state_bytes,
    )
    assert expected(stem) == (
        other.bytes_per_token,
        other.bytes_per_token_below_window,
        other.total_bytes(TOKENS),
        other.fixed_state_bytes,
    )
    assert ours.layers_with_kv == other.layers_with_kv
    assert ours.layers == len(other.layers)


@pytest.mark.parametrize("stem", CONFIGS)
@pytest.mark.parametrize(("tokens", "batch", "dtype"), [(1, 1, "fp32"), (3000, 5, "int8")])
def test_formula_and_oracle_agree_elsewhere(stem: str, tokens: int, batch: int, dtype: str) -> None:
    ours = kv_budget(CONFIGS[stem], seq_len=tokens, batch=batch, dtype=dtype)
    other = budget_oracle.count(CONFIGS[stem], value_bytes={"fp32": 4, "int8": 1}[dtype])
    assert ours.total_bytes == other.total_bytes(tokens, batch)


@pytest.mark.parametrize("stem", [stem for stem in CONFIGS if stem not in NOT_IN_TRANSFORMERS])
def test_transformers_holds_what_the_formula_says(stem: str) -> None:
    config = for_transformers(CONFIGS[stem])
    probed = probe(config)
    ours = kv_budget(CONFIGS[stem], seq_len=TOKENS, batch=3)
    grows, grows_below, total, state = expected(stem)
    times = TIMES_AS_MUCH.get(stem, 1)
    assert probed.bytes_per_token == times * grows
    assert probed.bytes_per_token_below_window == times * grows_below
    # A window of W keeps W - 1 tokens between steps: one token less in every layer that is full.
    full = [layer for layer in probed.layers if (layer.kept_tokens or TOKENS) < TOKENS]
    missing = sum(layer.bytes_per_token for layer in full)
    assert probed.total_bytes(TOKENS) == times * total - missing
    assert probed.total_bytes(TOKENS, batch=3) == ours.total_bytes_transformers
    assert probed.fixed_state_bytes_per_sequence == STATE_BYTES.get(stem, state)
    assert 3 * probed.fixed_state_bytes_per_sequence == ours.fixed_state_bytes_transformers
    assert probed.layers_with_kv == ours.layers_with_kv


@pytest.mark.parametrize("stem", STATE_BYTES)
def test_the_states_named_here_do_differ(stem: str) -> None:
    assert STATE_BYTES[stem] != expected(stem)[3]


@pytest.mark.parametrize("stem", NOT_IN_TRANSFORMERS)
def test_what_transformers_does_not_know_is_refused(stem: str) -> None:
    with pytest.raises(CannotProbe, match=NOT_IN_TRANSFORMERS[stem]):
        probe(CONFIGS[stem])
    assert kv_budget(CONFIGS[stem], seq_len=TOKENS).total_bytes_transformers is None


# ---- the oracle by itself


def test_the_oracle_shares_no_code() -> None:
    tree = ast.parse(Path(budget_oracle.__file__).read_text(encoding="utf-8"))
    imported = {
        module
        for node in ast.walk(tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"__future__", "collections.abc", "dataclasses", "typing"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "brand_new"}, "no rule for the model type 'brand_new'"),
        ({"model_type": None}, "no rule for the model type None"),
        ({"num_hidden_layers": ...}, "llama: num_hidden_layers is not in the config"),
        ({"layer_types": ["full_attention"] * 32}, "for layers without a window"),
    ],
)
def test_the_oracle_refuses_what_it_does_not_know(change: dict[str, Any], message: str) -> None:
    config = {**CONFIGS["llama-3.1-8b"], **change}
    config = {name: value for name, value in config.items() if value is not ...}
    with pytest.raises(UnknownModel, match=message):
        budget_oracle.count(config)


def test_the_oracle_refuses_unknown_layers() -> None:
    config = {**CONFIGS["nemotron-h-8b-base-8k"], "hybrid_override_pattern": "M*E-"}
    with pytest.raises(UnknownModel, match="nemotron_h: the oracle has no rule for 'E' layers"):
        budget_oracle.count(config)
