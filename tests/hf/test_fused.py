"""Fused attention gives what the same kernel gives on raw pages, and what SDPA gives in float32.

Bits are claimed against raw pages alone: two attention kernels round differently. In float32, with
keys and values rounded to bf16 in both caches, the rounding of the kernels is all that differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gaac.hf import use_fused_attention
from gaac.hf.attention import FUSED

from .codecs import ZlibCodec
from .fused import counted, rounding
from .scenarios import (
    CROPPING,
    SCENARIOS,
    Outcome,
    assert_packed,
    assert_same,
    compressed,
    dynamic,
    greedy,
    left_padded,
)

ModelOf = Callable[[str], PreTrainedModel]
Expected = Callable[[str, str], Outcome]

# A family, the layers of which one token at a time streams, and what its cache cannot do.
FAMILIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "llama": (3, ()),
    "llama64": (2, ()),
    "mistral": (0, ()),  # all of it slides
    "gemma2": (1, ()),
    "gemma3": (1, ()),
    "gpt_oss": (1, ()),
    "qwen3": (2, ()),
    "gpt2": (2, ()),
    "lfm2": (1, ()),
    "qwen3_next": (1, CROPPING),
    "deepseek_v3": (0, ()),  # caches what it makes keys and values of
    "gemma3n": (2, ()),  # one of the two attends to the other's keys and values
    "bart": (2, ("multi_turn",)),
    "t5": (0, ("multi_turn",)),  # adds a bias to each head's scores
}
PAIRS = [
    (family, scenario)
    for family, (_, unsupported) in FAMILIES.items()
    for scenario in SCENARIOS
    if scenario not in unsupported
]
STREAMING = [pair for pair in PAIRS if FAMILIES[pair[0]][0]]
OTHERS = [pair for pair in PAIRS if not FAMILIES[pair[0]][0]]
SETTINGS: list[dict[str, Any]] = [
    {"level": 1},
    {"level": 3},
    {"scope": "k"},
    {"scope": "v", "window": 5},
    {"window": 16, "level": 3},
    {"block_tokens": 5, "window": 3},
]
# Of logits around 1 to 10, after all layers. The last bits of float32 alone make some 1e-6; where
# they change which bf16 a later key or value is rounded to, some 1e-4.
ERROR = 2e-3


@pytest.fixture(scope="module")
def float_model_of(model_of: ModelOf) -> ModelOf:
    models: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in models:
            models[name] = copy.deepcopy(model_of(name)).float()
        return models[name]

    return get


def assert_near(ours: Outcome, theirs: Outcome) -> None:
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=ERROR, rtol=0)


@pytest.mark.parametrize(("family", "scenario"), STREAMING)
def test_families_that_stream(float_model_of: ModelOf, family: str, scenario: str) -> None:
    model, run = float_model_of(family), SCENARIOS[scenario]
    theirs = run(model, rounding(model, None))
    with use_fused_attention(model), counted() as counts:
        ours = run(model, rounding(model, 1))
        steps = counts.steps
        raw = run(model, rounding(model, 0))
    assert steps > 0 or scenario in CROPPING  # which may check several tokens at every step
    assert_same(ours, raw)
    assert_near(ours, theirs)
    assert_packed(ours.cache, cropped=scenario in CROPPING)


@pytest.mark.parametrize(("family", "scenario"), OTHERS)
def test_families_that_do_not_stream(
    model_of: ModelOf, expected: Expected, family: str, scenario: str
) -> None:
    model = model_of(family)
    with use_fused_attention(model), counted() as counts:
        ours = SCENARIOS[scenario](model, compressed(model))
    assert counts.steps == 0
    assert_same(ours, expected(family, scenario))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings(model_of: ModelOf, options: dict[str, Any], scenario: str) -> None:
    """Also in bf16, bits are those of raw pages."""
    model, run = model_of("llama64"), SCENARIOS[scenario]
    with use_fused_attention(model), counted() as counts:
        ours = run(model, compressed(model, **options))
        assert counts.steps > 0
        raw = run(model, compressed(model, **(options | {"level": 0})))
    assert_same(ours, raw)
    assert_packed(ours.cache, cropped=scenario in CROPPING)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_foreign_codecs_are_unpacked(model_of: ModelOf, expected: Expected, scenario: str) -> None:
    model = model_of("llama")
    with use_fused_attention(model), counted() as counts:
        ours = SCENARIOS[scenario](model, compressed(model, codec=ZlibCodec()))
    assert counts.steps == 0
    assert_same(ours, expected("llama", scenario))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bart"])
@pytest.mark.parametrize("scenario", ["left_padded", "chunked_prefill", "beams"])
def test_other_caches_work_as_before(
    model_of: ModelOf, expected: Expected, family: str, scenario: str
) -> None:
    """Bit for bit, through SDPA or, for softcap and sinks, the eager attention of the model."""
    model = model_of(family)
    with use_fused_attention(model):
        ours = SCENARIOS[scenario](model, dynamic(model))
    assert_same(ours, expected(family, scenario))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_streams_and_unpacks_nothing(model_of: ModelOf, family: str) -> None:
    model, layers = model_of(family), FAMILIES[family][0]
    with use_fused_attention(model), counted() as counts:
        greedy(model, compressed(model))
    steps = 24 if model.config.is_encoder_decoder else 23  # the prompt gives the first token
    assert counts.steps == steps * layers
    unpacks = family in ("deepseek_v3", "t5", "bart")  # which reads what its encoder left
    assert (counts.unpacked > 0) == unpacks


def test_without_a_mask_padding_would_be_attended_to(
    float_model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = float_model_of("llama")
    theirs = left_padded(model, rounding(model, None))
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, FUSED, lambda **options: None)
    with use_fused_attention(model):
        ours = left_padded(model, rounding(model, 1))
    with pytest.raises(AssertionError):
        assert_near(ours, theirs)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_matter(float_model_of: ModelOf, family: str) -> None:
    """Else the comparisons above would not see them missing."""
    model = float_model_of(family)
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        if family == "gemma2":
            layer.self_attn.attn_logit_softcapping = None
        else:
            layer.self_attn.sinks.data.fill_(-1e9)
    ours, theirs = (greedy(m, rounding(m, None)) for m in (model, changed))
    assert (ours.logits - theirs.logits).abs().max() > 10 * ERROR
