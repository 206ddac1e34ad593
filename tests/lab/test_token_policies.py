"""Token policies hold exactly what they say, free the rest, and otherwise change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig, LlamaForCausalLM

from gaac_lab import kv, prompts
from gaac_lab.attention_weights import attending, received, watched
from gaac_lab.codec import KVCodec
from gaac_lab.lossy_layer import LossyCache, LossyLayer
from gaac_lab.prefilled import Prefilled, read
from gaac_lab.quality import forced
from gaac_lab.quantised import QuantisedLayer
from gaac_lab.token_policies import HeavyHitterLayer, PackedWindowLayer, WindowLayer

TOKENS, BUDGET = 192, 64
HEADS, HEAD_DIM = 3, 64

Make = Callable[[], LossyLayer]


def numbered(start: int, stop: int) -> torch.Tensor:
    """States [1, 3, n, 64] in which every value of a token is the token's number."""
    numbers = torch.arange(start, stop, dtype=torch.bfloat16)  # exact up to 256
    return numbers.reshape(1, 1, -1, 1).expand(1, HEADS, -1, HEAD_DIM).contiguous()


def held(layer: LossyLayer) -> list[list[int]]:
    """The numbers of the tokens held, one list a KV head."""
    assert kv.same_bits(layer.keys, layer.values)
    return layer.keys[0, :, :, 0].int().tolist()


def feed(layer: LossyLayer, sizes: list[int]) -> None:
    """Numbered tokens in chunks of these sizes; each gives its attention to all alike."""
    for size in sizes:
        start = layer.get_seq_length()
        states = numbered(start, start + size)
        keys, _ = layer.update(states, states)
        if isinstance(layer, HeavyHitterLayer):
            layer.observe(torch.ones(keys.shape[:3]))


PACKED_WINDOW = partial(PackedWindowLayer, 20, codec=KVCodec(level=1, block_tokens=16))
WINDOWS: list[tuple[Make, list[int]]] = [
    (partial(WindowLayer, 20), list(range(80, 100))),
    (partial(WindowLayer, 16, 4), [*range(4), *range(84, 100)]),
    (PACKED_WINDOW, list(range(80, 100))),
]


@pytest.mark.parametrize("sizes", [[100], [1] * 100, [37, 8, 8, 1, 46]], ids=str)
@pytest.mark.parametrize(("make", "expected"), WINDOWS, ids=["window", "sinks", "packed"])
def test_windows_hold_exactly_their_tokens(
    make: Make, expected: list[int], sizes: list[int]
) -> None:
    layer = make()
    feed(layer, sizes)
    assert held(layer) == [expected] * HEADS
    assert layer.get_seq_length() == 100
    assert layer.get_mask_sizes(7) == (20 + 7, 80)


@pytest.mark.parametrize("make", [partial(WindowLayer, 20), partial(HeavyHitterLayer, 10, 10)])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_what_is_dropped_is_freed(make: Make, kv_heads: int) -> None:
    layer = make()
    states = numbered(0, 200)[:, :kv_heads].contiguous()
    layer.update(states, states)
    if isinstance(layer, HeavyHitterLayer):
        layer.observe(torch.rand(1, kv_heads, 200))
    for tensor in layer.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.shape[2] == 20


def test_heavy_hitters_keep_what_each_kv_head_looked_at() -> None:
    layer = HeavyHitterLayer(heavy=2, recent=3)
    states = numbered(0, 20)
    layer.update(states, states)
    attention = torch.zeros(1, HEADS, 20)
    for head, (first, second) in enumerate([(4, 9), (0, 16), (7, 8)]):
        attention[0, head, [first, second]] = torch.tensor([1.0, 2.0])
    layer.observe(attention)
    assert held(layer) == [[4, 9, 17, 18, 19], [0, 16, 17, 18, 19], [7, 8, 17, 18, 19]]
    # 17 leaves the recent ones: in the first head it has got more than 4 by then.
    states = numbered(20, 21)
    layer.update(states, states)
    attention = torch.zeros(1, HEADS, 6)
    attention[0, 0, 2] = 1.5
    layer.observe(attention)
    assert held(layer) == [[9, 17, 18, 19, 20], [0, 16, 18, 19, 20], [7, 8, 18, 19, 20]]


def test_attention_is_added_up_over_steps() -> None:
    layer = HeavyHitterLayer(heavy=1, recent=1)
    feed(layer, [2])  # 1 each
    for step in ([0.4, 0.3, 0.1], [0.1, 0.6, 0.1]):  # in the last one, the newer token gets more
        start = layer.get_seq_length()
        layer.update(numbered(start, start + 1), numbered(start, start + 1))
        layer.observe(torch.tensor(step).expand(1, HEADS, 3))
    assert held(layer) == [[0, 3]] * HEADS


def test_heavy_hitters_refuse_to_run_blind() -> None:
    layer = HeavyHitterLayer(heavy=2, recent=2)
    layer.update(numbered(0, 3), numbered(0, 3))
    with pytest.raises(RuntimeError, match="attending"):
        layer.update(numbered(3, 4), numbered(3, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowLayer(0), "window=0"),
        (lambda: WindowLayer(4, -1), "sinks=-1"),
        (lambda: HeavyHitterLayer(0, 4), "heavy=0"),
        (lambda: LossyCache(sliding_only(), lambda: WindowLayer(4)), "full attention"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def sliding_only() -> Gemma2Config:
    return Gemma2Config(num_hidden_layers=2, layer_types=["sliding_attention"] * 2)


def test_there_is_no_way_back() -> None:
    layer = WindowLayer(4)
    feed(layer, [6])
    with pytest.raises(RuntimeError, match="go back"):
        layer.crop(-1)
    layer.reset()
    feed(layer, [3])
    assert held(layer) == [[0, 1, 2]] * HEADS


def test_received_attention_is_summed_over_the_query_heads_that_share_a_kv_head() -> None:
    weights = torch.rand(2, 6, 5, 7)
    expected = torch.stack([weights[:, :3].sum((1, 2)), weights[:, 3:].sum((1, 2))], dim=1)
    assert torch.allclose(received(weights, kv_heads=2), expected)


# On the default model


@pytest.fixture(scope="module")
def text(default_model: tuple[Any, Any]) -> torch.Tensor:
    _, tokenizer = default_model
    return prompts.build("long_document", TOKENS + 41, tokenizer).input_ids


@pytest.fixture(scope="module")
def prefilled(default_model: tuple[Any, Any], text: torch.Tensor) -> Prefilled:
    return read(default_model[0], text[:, :TOKENS], chunk_tokens=80)


AMPLE: list[Make] = [
    partial(WindowLayer, 512),
    partial(WindowLayer, 500, 4),
    partial(HeavyHitterLayer, 256, 256),
    partial(PackedWindowLayer, 512, codec=KVCodec(level=1, block_tokens=64)),
]


@pytest.mark.parametrize("make", AMPLE, ids=["window", "sinks", "heavy hitters", "packed window"])
def test_with_room_for_all_nothing_changes(
    make: Make, default_model: tuple[Any, Any], prefilled: Prefilled, text: torch.Tensor
) -> None:
    model, _ = default_model
    plain = prefilled.fill(DynamicCache(config=model.config))
    cache = prefilled.fill(LossyCache(model.config, make))
    rest = text[:, TOKENS:]
    expected, got = forced(model, plain, rest), forced(model, cache, rest)
    assert kv.same_bits(expected.nll, got.nll)
    assert kv.same_cache(plain, cache)


SMALL: list[Make] = [
    partial(WindowLayer, BUDGET),
    partial(WindowLayer, BUDGET - 4, 4),
    partial(HeavyHitterLayer, BUDGET // 2, BUDGET // 2),
    partial(QuantisedLayer, 8, window=BUDGET),
]


@pytest.mark.parametrize("make", SMALL, ids=["window", "sinks", "heavy hitters", "8 bit + window"])
def test_a_chunk_is_causal_and_sees_all_that_is_kept(
    make: Make, default_model: tuple[Any, Any], prefilled: Prefilled, text: torch.Tensor
) -> None:
    """Each token of a chunk must come out as if the chunk had ended with it."""
    model, _ = default_model
    rest = text[:, TOKENS : TOKENS + 10]
    first = prefilled.fill(LossyCache(model.config, make))
    whole = forced(model, copy.deepcopy(first), rest, chunk_tokens=9).nll
    for length in (1, 4, 8):
        part = forced(model, copy.deepcopy(first), rest[:, : length + 1], chunk_tokens=9).nll
        assert torch.allclose(whole[:length], part, atol=0.1)
    # Kept tokens are seen: without them the same chunk is another one.
    blind = forced(model, DynamicCache(config=model.config), rest, chunk_tokens=9).nll
    assert not torch.allclose(whole, blind, atol=0.1)


def test_a_window_is_what_a_mask_makes_of_the_full_cache(
    default_model: tuple[Any, Any], prefilled: Prefilled, text: torch.Tensor
) -> None:
    """One step after dropping is one step of the full cache with the same tokens masked."""
    model, _ = default_model
    token = text[:, TOKENS : TOKENS + 1]
    for make, visible in (
        (partial(WindowLayer, BUDGET), range(TOKENS - BUDGET, TOKENS)),
        (partial(WindowLayer, BUDGET - 4, 4), [*range(4), *range(TOKENS - BUDGET + 4, TOKENS)]),
    ):
        mask = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
        mask[0, [*visible, TOKENS]] = 1
        plain = prefilled.fill(DynamicCache(config=model.config))
        cache = prefilled.fill(LossyCache(model.config, make))
        position = torch.tensor([[TOKENS]])
        with torch.no_grad(), attending(model, plain):
            expected = model(
                input_ids=token, cache=plain, attention_mask=mask, position_ids=position
            ).logits
        with torch.no_grad(), attending(model, cache):
            got = model(input_ids=token, cache=cache).logits
            full = prefilled.fill(DynamicCache(config=model.config))
            unmasked = model(input_ids=token, cache=full).logits
        error, effect = (got - expected).abs().max(), (unmasked - expected).abs().max()
        assert error < 0.2 * effect


def test_the_prefill_measures_attention_whole(
    default_model: tuple[Any, Any], prefilled: Prefilled, text: torch.Tensor
) -> None:
    """Each query gives a weight of 1 a query head, whatever the chunks of the prefill."""
    model, _ = default_model
    weights = {}
    with torch.no_grad(), watched(model, lambda layer, seen: weights.update({layer: seen})):
        output = model(input_ids=text[:, :TOKENS], cache=DynamicCache(config=model.config))
    assert len(prefilled.attention) == len(weights) == model.config.num_hidden_layers
    for layer, attention in prefilled.attention.items():
        assert attention.shape == (1, HEADS, TOKENS)
        assert torch.allclose(attention.sum(-1), torch.full((1, HEADS), 3.0 * TOKENS), rtol=0.01)
        assert torch.allclose(attention, received(weights[layer], HEADS), rtol=0.2, atol=0.3)
    assert torch.equal(output.logits[:, -1].argmax(-1), prefilled.logits.argmax(-1))


def test_heavy_hitters_keep_the_first_token_of_a_real_prompt(
    default_model: tuple[Any, Any], prefilled: Prefilled
) -> None:
    """The first token draws attention in nearly every head (the sink of StreamingLLM)."""
    model, _ = default_model
    cache = prefilled.fill(LossyCache(model.config, lambda: HeavyHitterLayer(8, 8)))
    first = [layer.keys[0, :, :1] for layer in prefilled.cache.layers]
    kept = [
        torch.equal(layer.keys[0, head, :1], first[index][head])
        for index, layer in enumerate(cache.layers)
        for head in range(HEADS)
    ]
    assert sum(kept) > 0.9 * len(kept)
    assert all(layer.held_tokens == 16 for layer in cache.layers)


def test_layers_that_slide_stay_the_librarys(text: torch.Tensor) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}
    config = Gemma2Config(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    from transformers import Gemma2ForCausalLM

    model = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    filled = read(model, text[:, :40].remainder(128), chunk_tokens=16)
    cache = filled.fill(LossyCache(config, lambda: HeavyHitterLayer(4, 4)))
    forced(model, cache, text[:, 40:60].remainder(128))
    assert [type(layer).__name__ for layer in cache.layers] == [
        "DynamicSlidingWindowLayer",
        "HeavyHitterLayer",
    ]
    assert cache.get_seq_length() == 59
    assert cache.layers[1].held_tokens == 8


def test_a_batch_without_padding_runs() -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        vocab_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(0, 128, (3, 30), generator=torch.Generator().manual_seed(0))
    filled = read(model, ids, chunk_tokens=16)
    for make in (partial(HeavyHitterLayer, 4, 4), partial(WindowLayer, 6, 2)):
        cache = filled.fill(LossyCache(config, make))
        alone = read(model, ids[1:2], chunk_tokens=16).fill(LossyCache(config, make))
        assert torch.allclose(cache.layers[0].keys[1:2], alone.layers[0].keys, atol=1e-5)
