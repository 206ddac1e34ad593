"""The error of attention against float64 is no larger than torch's own, in the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.gaac.attention_cases import Layer, as_float64, attend, expected, layer
from tests.gaac.data import DTYPES

SEEDS = range(5)


def sdpa(given: Layer) -> torch.Tensor:
    """What transformers uses by default."""
    return torch.nn.functional.scaled_dot_product_attention(
        given.q[:, :, None], given.keys, given.values, enable_gqa=True
    )[:, :, 0]


def eager(given: Layer) -> torch.Tensor:
    """The steps of transformers' eager attention."""
    group = given.q.shape[1] // given.keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (given.keys, given.values))
    scores = given.q[:, :, None] @ keys.transpose(2, 3) * given.q.shape[2] ** -0.5
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(given.q.dtype)
    return (weights @ values)[:, :, 0]


def looking_real(given: Layer) -> Layer:
    """Keys whose channels have a mean, a query near them, and a first token that draws most."""
    generator = torch.Generator().manual_seed(7)
    batch, kv_heads, _, head_dim = given.keys.shape
    mean = torch.randn((batch, kv_heads, 1, head_dim), generator=generator)
    group = given.q.shape[1] // kv_heads
    q = given.q.float() + 0.5 * mean[:, :, 0].repeat_interleave(group, 1)
    keys = given.keys.float() + mean
    keys[:, :, 0] = 1.5 * mean[:, :, 0]
    dtype = given.keys.dtype
    return Layer(q.to(dtype), keys.to(dtype), given.values)


def errors(of: Callable[[Layer], torch.Tensor], layers: list[Layer]) -> tuple[float, float]:
    """Root mean square and maximum."""
    found = [as_float64(of(given)) - expected(given) for given in layers]
    return float(np.sqrt(np.mean(np.square(found)))), float(np.abs(found).max())


@pytest.mark.parametrize("kind", ["normal", "random", "looking real"])
@pytest.mark.parametrize("shape", [((9, 3), (64, 64)), ((8, 1), (256, 256))], ids=str)
@pytest.mark.parametrize("tokens", [300, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_larger_than_torchs_own(
    dtype: str, tokens: int, shape: tuple[tuple[int, int], tuple[int, int]], kind: str
) -> None:
    made = "random" if kind == "random" else "normal"
    layers = [layer(*shape, tokens=tokens, dtype=dtype, kind=made, seed=seed) for seed in SEEDS]
    if kind == "looking real":
        layers = [looking_real(given) for given in layers]
    own = errors(attend, layers)
    for other in (sdpa, eager):
        theirs = errors(other, layers)
        assert own[0] <= theirs[0], f"{other.__name__}, root mean square"
        assert own[1] <= theirs[1], f"{other.__name__}, maximum"
