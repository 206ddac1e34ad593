"""The entropy floor, on data whose entropy is known, and on the default model's own cache."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gaac_lab import entropy, models, prompts


def bits_to_tensor(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.to(torch.int16).view(dtype)


def known(
    exponents: torch.Tensor, *, dtype: torch.dtype, mantissa_bits: int, seed: int = 0
) -> torch.Tensor:
    """A tensor with these exponents, random signs and random mantissas."""
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, exponents.shape, generator=rng)
    mantissas = torch.randint(0, 2**mantissa_bits, exponents.shape, generator=rng)
    bits = (signs << 15) | (exponents << mantissa_bits) | mantissas
    return bits_to_tensor(bits, dtype)


CASES = [(torch.bfloat16, 7, 120), (torch.float16, 10, 12)]


@pytest.mark.parametrize(("dtype", "mantissa_bits", "exponent"), CASES)
def test_random_mantissas_under_one_exponent(
    dtype: torch.dtype, mantissa_bits: int, exponent: int
) -> None:
    shape = (1, 2, 4096, 64)
    floor = entropy.floors(
        known(torch.full(shape, exponent), dtype=dtype, mantissa_bits=mantissa_bits)
    )
    assert floor.sign_bits == pytest.approx(1, abs=1e-4)
    assert floor.exponent_bits == 0
    assert floor.mantissa_bits == pytest.approx(mantissa_bits, abs=2e-3)
    assert floor.ratio == pytest.approx(16 / (1 + mantissa_bits), rel=1e-3)
    assert floor.sign_exponent_given_channel_bits == pytest.approx(1, abs=1e-3)
    assert floor.values == math.prod(shape)


@pytest.mark.parametrize(("dtype", "mantissa_bits", "exponent"), CASES)
def test_exponents_that_the_channel_decides(
    dtype: torch.dtype, mantissa_bits: int, exponent: int
) -> None:
    """Four equally common exponents are 2 bits apart from the channel, and none within it."""
    exponents = exponent + torch.arange(64).remainder(4).expand(1, 3, 4096, 64)
    floor = entropy.floors(known(exponents, dtype=dtype, mantissa_bits=mantissa_bits))
    assert floor.exponent_bits == pytest.approx(2, abs=1e-4)
    assert floor.sign_exponent_given_channel_bits == pytest.approx(1, abs=1e-3)
    assert floor.channel_ratio == pytest.approx(16 / (1 + mantissa_bits), rel=1e-3)


def test_exponents_that_the_head_decides() -> None:
    exponents = 120 + torch.arange(4).view(1, 4, 1, 1).expand(1, 4, 4096, 8)
    floor = entropy.floors(known(exponents, dtype=torch.bfloat16, mantissa_bits=7))
    assert floor.exponent_bits == pytest.approx(2, abs=1e-4)
    assert floor.sign_exponent_given_channel_bits == pytest.approx(1, abs=1e-3)


def test_few_tokens_are_corrected_for() -> None:
    """8 equally common exponents and a sign, 64 tokens a channel: 4 bits, and not visibly less."""
    rng = torch.Generator().manual_seed(3)
    exponents = 120 + torch.randint(0, 8, (1, 8, 64, 128), generator=rng)
    tensor = known(exponents, dtype=torch.bfloat16, mantissa_bits=7)
    floor = entropy.floors(tensor)
    assert floor.sign_exponent_given_channel_bits == pytest.approx(4, abs=0.02)

    tops = (tensor.view(torch.int16).int() & 0xFFFF) >> 7
    plug_in = []
    for head in range(8):
        for channel in range(128):
            _, counts = tops[0, head, :, channel].unique(return_counts=True)
            share = counts / 64
            plug_in.append(float(-(share * share.log2()).sum()))
    assert sum(plug_in) / len(plug_in) < 3.9  # what would be promised without the correction


def test_nans_infinities_and_zeros_are_values_like_others() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=torch.bfloat16)
    floor = entropy.floors(special.view(1, 1, 5, 1).expand(2, 3, 5, 16))
    assert all(math.isfinite(getattr(floor, f"{part}_bits")) for part in ("sign", "exponent"))
    assert floor.exponent_bits > 0


def test_random_bits_have_nothing_to_gain() -> None:
    rng = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (1, 2, 8192, 32), generator=rng)
    floor = entropy.floors(bits_to_tensor(bits, torch.bfloat16))
    assert floor.ratio == pytest.approx(1, abs=1e-3)
    assert floor.ratio >= 1


def test_a_layout_that_is_not_contiguous_counts_the_same() -> None:
    tensor = torch.randn(2, 50, 3, 16, dtype=torch.bfloat16).transpose(1, 2)
    assert not tensor.is_contiguous()
    assert entropy.floors(tensor) == entropy.floors(tensor.contiguous())


def test_the_mean_weighs_by_values() -> None:
    zeros = entropy.floors(torch.zeros(1, 1, 300, 8, dtype=torch.bfloat16))
    assert (zeros.total_bits, zeros.ratio) == (0, math.inf)
    signs = torch.ones(1, 1, 100, 8, dtype=torch.bfloat16)
    signs[:, :, ::2] = -1
    mean = entropy.mean_floor([zeros, entropy.floors(signs)])
    assert mean.sign_bits == pytest.approx(0.25, abs=1e-3)
    assert mean.ratio == pytest.approx(64, rel=5e-3)
    assert mean.values == 3200


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1, 1, 4, 4), "float32: give bfloat16 or float16"),
        (torch.zeros(4, 4, dtype=torch.bfloat16), "give \\[batch, kv_heads, tokens, head_dim\\]"),
        (torch.zeros(1, 1, 0, 4, dtype=torch.bfloat16), "at least one value"),
        (torch.randn(1, 1, 64, 64).bfloat16().half(), "holds bfloat16 values"),
    ],
)
def test_what_cannot_be_counted_is_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entropy.floors(tensor)


def test_no_mean_of_nothing_or_of_two_dtypes() -> None:
    one = entropy.floors(torch.randn(1, 1, 8, 8).bfloat16())
    other = entropy.floors(torch.randn(1, 1, 8, 8).half())
    for parts in ([], [one, other]):
        with pytest.raises(ValueError, match="floors of one dtype"):
            entropy.mean_floor(parts)


def test_the_default_models_floor_is_what_bf16_and_fp16_allow(default_model_path: Path) -> None:
    """About a third can go in bf16, and about a seventh in fp16."""
    model, tokenizer = models.load(dtype="float32", device="cpu")
    ids = prompts.build("long_document", 128, tokenizer).input_ids
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1)["past_key_values"]
    for dtype, ratio in ((torch.bfloat16, 1.50), (torch.float16, 1.17)):
        parts = [entropy.floors(layer.keys.to(dtype)) for layer in cache.layers]
        parts += [entropy.floors(layer.values.to(dtype)) for layer in cache.layers]
        assert entropy.mean_floor(parts).ratio == pytest.approx(ratio, abs=0.03)
