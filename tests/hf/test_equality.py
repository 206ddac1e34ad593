"""Every use of a cache gives the same ids and the same bits of logits as DynamicCache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from .codecs import FlippingCodec, PaddedCodec, ScramblingCodec, ZlibCodec
from .scenarios import (
    CROPPING,
    SCENARIOS,
    Outcome,
    assert_packed,
    assert_same,
    compressed,
)

ModelOf = Callable[[str], PreTrainedModel]
Expected = Callable[[str, str], Outcome]

# A family, and what transformers itself cannot do with its DynamicCache: an encoder-decoder model
# starts its decoder anew at every call.
FAMILIES = {
    "llama": (),
    "mistral": (),
    "gemma2": (),
    "gemma3": (),
    "gpt_oss": (),
    "qwen3": (),
    "gpt2": (),
    "lfm2": (),
    "qwen3_next": CROPPING,  # a recurrent state cannot be rolled back
    "deepseek_v3": (),
    "gemma3n": (),
    "bart": ("multi_turn",),
    "t5": ("multi_turn",),
}
KINDS = {
    "llama": ["blocks"] * 3,
    "mistral": ["sliding"] * 2,
    "gemma3": ["sliding", "blocks", "sliding"],
    "lfm2": ["linear", "blocks", "linear"],
    "qwen3_next": ["linear", "blocks"],
    "deepseek_v3": ["blocks"] * 2,
    "gemma3n": ["sliding", "blocks"],
}
PAIRS = [
    (family, scenario)
    for family, unsupported in FAMILIES.items()
    for scenario in SCENARIOS
    if scenario not in unsupported
]
SETTINGS = [
    {"level": 0},
    {"level": 1},
    {"level": 3},
    {"scope": "k"},
    {"scope": "v", "level": 3},
    {"window": 5},
    {"window": 8, "scope": "k"},
    {"window": 16, "level": 3},
    {"block_tokens": 1},
    {"block_tokens": 5, "window": 3, "scope": "v"},
    {"codec": ZlibCodec()},
    {"codec": ZlibCodec(), "window": 7, "scope": "k"},
    {"codec": ScramblingCodec()},
    {"codec": PaddedCodec(), "block_tokens": 3},
]


@pytest.mark.parametrize(("family", "scenario"), PAIRS)
def test_families(model_of: ModelOf, expected: Expected, family: str, scenario: str) -> None:
    model = model_of(family)
    ours = SCENARIOS[scenario](model, compressed(model))
    assert_same(ours, expected(family, scenario))
    assert_packed(ours.cache, cropped=scenario in CROPPING)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings(
    model_of: ModelOf, expected: Expected, options: dict[str, object], scenario: str
) -> None:
    model = model_of("llama")
    ours = SCENARIOS[scenario](model, compressed(model, **options))
    assert_same(ours, expected("llama", scenario))
    assert_packed(ours.cache, cropped=scenario in CROPPING)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_wrong_bit_is_seen(model_of: ModelOf, expected: Expected, scenario: str) -> None:
    model = model_of("llama")
    ours = SCENARIOS[scenario](model, compressed(model, codec=FlippingCodec(), block_tokens=2))
    with pytest.raises(AssertionError):
        assert_same(ours, expected("llama", scenario))


@pytest.mark.parametrize("family", KINDS)
def test_only_plain_layers_are_replaced(model_of: ModelOf, family: str) -> None:
    cache = compressed(model_of(family))
    kinds = [record.kind for record in cache.layer_bytes()]
    # layers that borrow their KV are absent from the cache in older versions of transformers
    assert [kind for kind in kinds if kind != "dummy"] == KINDS[family]


def test_the_assistant_is_sometimes_right_and_sometimes_wrong(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the assisted scenarios would crop everything, or nothing."""
    model, removed = model_of("llama"), []
    cache = compressed(model)
    crop = cache.crop
    monkeypatch.setattr(cache, "crop", lambda count: (removed.append(-count), crop(count)))
    SCENARIOS["assisted"](model, cache)
    assert 0 in removed
    assert max(removed) > 0
