"""Quantised KV: errors within half a step, bytes as counted by hand, codes never touched again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gaac_lab import kv, prompts
from gaac_lab.lossy_layer import LossyCache
from gaac_lab.prefilled import Prefilled, read
from gaac_lab.quality import forced
from gaac_lab.quantised import (
    BITS,
    BLOCK_TOKENS,
    QuantisedLayer,
    codes_of,
    dequantise,
    quantise,
)

HEADS, HEAD_DIM = 3, 64
TOKENS = 200  # three blocks and eight tokens
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def states(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values [1, 3, tokens, 64], with one channel twenty times as large, as keys have."""
    made = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    made[..., 7] *= 20
    return made.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [-2, -1])
@pytest.mark.parametrize("bits", BITS)
def test_no_value_moves_by_more_than_half_a_step(
    bits: int, shared: int, dtype: torch.dtype
) -> None:
    blocks = states(128, dtype=dtype).unflatten(-2, (2, 64))
    packed = quantise(blocks, bits, shared)
    error = (dequantise(packed).float() - blocks.float()).abs()
    rounding = blocks.float().abs() * torch.finfo(dtype).eps
    assert bool((error <= packed.scale.float() / 2 + rounding + 1e-6).all())
    spread = blocks.float().amax(shared, keepdim=True) - blocks.float().amin(shared, keepdim=True)
    assert bool((packed.scale.float() <= spread / (2**bits - 1) * (1 + 1 / 64)).all())
    assert int(codes_of(packed).max()) == 2**bits - 1  # no level is wasted


@pytest.mark.parametrize("bits", BITS)
def test_an_outlier_channel_of_k_does_not_touch_the_others(bits: int) -> None:
    blocks = states(64).unflatten(-2, (1, 64))
    error = (dequantise(quantise(blocks, bits, -2)).float() - blocks.float())[..., :7]
    assert error.abs().max() < 4.2 / (2**bits - 1) + 0.02  # half of 8.4, its own spread


def test_keys_share_a_scale_by_channel_and_values_by_token() -> None:
    """An outlier channel costs no other keys anything, an outlier token no other values."""
    keys, values = states(64), torch.randn(1, HEADS, 64, HEAD_DIM).to(torch.bfloat16)
    values[..., 5, :] *= 20
    layer = QuantisedLayer(4)
    layer.update(keys, values)
    assert (layer.keys - keys)[..., :7].abs().max() < 0.4
    assert (layer.values - values)[..., 6:, :].abs().max() < 0.4
    assert layer.packed[0].scale.shape == (1, HEADS, 1, 1, HEAD_DIM)
    assert layer.packed[1].scale.shape == (1, HEADS, 1, 64, 1)


@pytest.mark.parametrize("bits", BITS)
def test_constant_values_come_back(bits: int) -> None:
    blocks = torch.full((1, 1, 1, 64, 64), -3.25, dtype=torch.bfloat16)
    assert torch.equal(dequantise(quantise(blocks, bits, -2)), blocks)


def test_values_that_are_not_finite_are_refused() -> None:
    blocks = states(64).unflatten(-2, (1, 64))
    blocks[0, 0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        quantise(blocks, 8, -2)


@pytest.mark.parametrize("bits", BITS)
def test_stored_bytes_are_codes_scales_and_tail(bits: int) -> None:
    layer = QuantisedLayer(bits)
    layer.update(states(TOKENS), states(TOKENS, seed=1))
    blocks, tail = divmod(TOKENS, BLOCK_TOKENS)
    codes = 2 * HEADS * blocks * BLOCK_TOKENS * HEAD_DIM * bits // 8
    key_scales = HEADS * blocks * HEAD_DIM * 2 * 2  # scale and low, 2 bytes each
    value_scales = HEADS * blocks * BLOCK_TOKENS * 2 * 2
    raw = 2 * HEADS * tail * HEAD_DIM * 2
    stored = sum(tensor.untyped_storage().nbytes() for tensor in layer.tensors())
    assert stored == codes + key_scales + value_scales + raw


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_written_once_and_chunks_do_not_matter(bits: int) -> None:
    keys, values = states(TOKENS), states(TOKENS, seed=1)
    whole = QuantisedLayer(bits)
    whole.update(keys, values)
    for sizes in ([1] * TOKENS, [37, 100, 63], [64, 64, 72]):
        layer, start = QuantisedLayer(bits), 0
        for size in sizes:
            layer.update(keys[..., start : start + size, :], values[..., start : start + size, :])
            start += size
        assert layer.get_seq_length() == layer.held_tokens == TOKENS
        assert kv.same_bits(layer.keys, whole.keys)
        assert kv.same_bits(layer.values, whole.values)


def test_an_update_returns_the_past_rounded_and_itself_exact() -> None:
    layer, new = QuantisedLayer(2), states(5, seed=3)
    first, _ = layer.update(states(TOKENS), states(TOKENS))
    assert torch.equal(first, states(TOKENS))
    keys, _ = layer.update(new, new)
    assert torch.equal(keys[..., TOKENS:, :], new)
    assert torch.equal(keys[..., 192:TOKENS, :], states(TOKENS)[..., 192:, :])  # the tail
    assert not torch.equal(keys[..., :192, :], states(TOKENS)[..., :192, :])


def test_a_window_drops_whole_blocks_and_frees_them() -> None:
    layer = QuantisedLayer(8, window=128)
    layer.update(states(320), states(320))
    assert layer.held_tokens == 128
    assert layer.get_mask_sizes(3) == (131, 192)
    before = QuantisedLayer(8)
    before.update(states(320), states(320))
    assert kv.same_bits(layer.keys, before.keys[..., 192:, :].contiguous())
    for tensor in layer.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    for count in range(1, 130):
        layer.update(states(1), states(1))
        assert 128 <= layer.held_tokens < 128 + BLOCK_TOKENS
        assert layer.get_seq_length() == 320 + count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits=3"),
        ({"bits": 8, "block_tokens": 0}, "block_tokens=0"),
        ({"bits": 8, "window": 63}, "window=63"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantisedLayer(**arguments)


def test_a_head_that_does_not_fill_bytes_is_refused() -> None:
    odd = states(64)[..., :62].contiguous()
    with pytest.raises(ValueError, match="head_dim=62"):
        QuantisedLayer(2).update(odd, odd)
    QuantisedLayer(8).update(odd, odd)


def test_reset_starts_anew() -> None:
    layer = QuantisedLayer(4)
    layer.update(states(TOKENS), states(TOKENS))
    layer.reset()
    assert layer.keys is None
    assert layer.get_seq_length() == layer.held_tokens == 0
    layer.update(states(70, seed=2), states(70, seed=2))
    assert layer.held_tokens == 70


def test_assignment_is_refused() -> None:
    layer = QuantisedLayer(4)
    layer.update(states(TOKENS), states(TOKENS))
    with pytest.raises(AttributeError, match="update"):
        layer.keys = states(3)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="QuantisedLayer knows no beams"):
        layer.batch_repeat_interleave(2)


# On the default model


@pytest.fixture(scope="module")
def text(default_model: tuple[Any, Any]) -> torch.Tensor:
    return prompts.build("long_document", 256 + 33, default_model[1]).input_ids


@pytest.fixture(scope="module")
def prefilled(default_model: tuple[Any, Any], text: torch.Tensor) -> Prefilled:
    return read(default_model[0], text[:, :256])


def test_fewer_bits_cost_more_on_the_default_model(
    default_model: tuple[Any, Any], prefilled: Prefilled, text: torch.Tensor
) -> None:
    from transformers import DynamicCache

    model, _ = default_model
    plain = forced(model, prefilled.fill(DynamicCache(config=model.config)), text[:, 256:]).nll
    cost, share = {}, {}
    raw = kv.raw_bytes(prefilled.cache)
    for bits in BITS:
        cache = prefilled.fill(LossyCache(model.config, lambda: QuantisedLayer(bits)))  # noqa: B023
        share[bits] = kv.stored_bytes(cache) / raw
        nll = forced(model, cache, text[:, 256:]).nll
        cost[bits] = float((nll - plain).abs().mean())
    assert 0 < cost[8] < cost[4] < cost[2]
    assert cost[8] < 0.1
    # 0.5 bits a value on top: a scale and a low of 16 bits for 64 values.
    assert all(math.isclose(share[bits], (bits + 0.5) / 16) for bits in BITS)
