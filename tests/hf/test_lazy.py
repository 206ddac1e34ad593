"""A tensor without storage: what it says of itself, when it opens, and what attention then does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import gaac
from gaac.hf import BlockCompressedCache
from gaac.hf.attention import FUSED, fused_attention
from gaac.hf.lazy import LazyStates

from .fused import counted

HEADS, WIDTH, TOKENS = 2, 16, 21


def states(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, tokens, WIDTH, generator=generator).bfloat16()


def filled(**options: Any) -> BlockCompressedCache:
    """A cache of one layer that is asked by fused attention, one token short of TOKENS."""
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = FUSED
    cache = BlockCompressedCache(config, **({"block_tokens": 8} | options))
    cache.update(states(TOKENS - 1, 0), states(TOKENS - 1, 1), 0)
    return cache


def step(cache: BlockCompressedCache) -> tuple[Any, Any]:
    return cache.update(states(1, 2), states(1, 3), 0)


@pytest.fixture
def lazy() -> tuple[LazyStates, torch.Tensor]:
    """Keys that have not been opened, and their content."""
    keys, _ = step(filled())
    assert type(keys) is LazyStates
    return keys, torch.cat([states(TOKENS - 1, 0), states(1, 2)], 2)


def test_describing_it_does_not_open_it(lazy: tuple[LazyStates, torch.Tensor]) -> None:
    keys, dense = lazy
    assert keys.shape == dense.shape
    assert (keys.dtype, keys.device, keys.ndim) == (dense.dtype, dense.device, dense.ndim)
    assert (keys.size(2), keys.dim(), keys.numel()) == (TOKENS, 4, dense.numel())
    assert (keys.is_cuda, keys.requires_grad, keys.is_floating_point()) == (False, False, True)
    assert keys.pages is not None
    assert keys.pages.shape == dense.shape


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 0,
        lambda x: x.clone(),
        lambda x: x[:, :, 3:].transpose(1, 2),
        lambda x: torch.cat([x, x], 2),
        lambda x: torch.cat(tensors=[x, x], dim=2),
        lambda x: x.view(torch.int16),
        lambda x: x.float().numpy(),
        lambda x: copy.deepcopy(x),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        lambda x: x.tolist(),
        lambda x: x.stride(),
    ],
)
def test_any_other_use_sees_an_ordinary_tensor(
    lazy: tuple[LazyStates, torch.Tensor], use: Callable[[torch.Tensor], Any]
) -> None:
    keys, dense = lazy
    ours, theirs = use(keys), use(dense)
    assert type(ours) is type(theirs)
    assert keys.pages is None
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert str(ours) == str(theirs)


def test_callers_in_c_see_one_too(lazy: tuple[LazyStates, torch.Tensor]) -> None:
    keys, dense = lazy
    with torch._C.DisableTorchFunctionSubclass():
        ours = torch.ops.aten.mul.Tensor(keys, keys)
    assert type(ours) is torch.Tensor
    assert torch.equal(ours, dense * dense)


def test_what_the_cache_does_later_does_not_show(lazy: Any) -> None:
    cache = filled()
    keys, _ = step(cache)
    for _ in range(30):
        step(cache)
    cache.crop(-40)
    cache.update(states(9, 5), states(9, 6), 0)
    assert torch.equal(keys, lazy[1])


@pytest.mark.parametrize("options", [{"scope": "k"}, {"scope": "v"}, {"window": 50}, {"level": 3}])
def test_raw_sides_are_lazy_too(options: dict[str, Any]) -> None:
    cache = filled(**options)
    for ours, seed in zip(step(cache), (0, 1), strict=True):
        assert type(ours) is LazyStates
        dense = torch.cat([states(TOKENS - 1, seed), states(1, seed + 2)], 2)
        assert ours.pages is not None
        raw = cache.layers[0].lanes[seed].tail.shape[2]
        assert ours.pages.tail.shape[2] == raw
        assert torch.equal(ours, dense)


def test_pages_stay_the_same_until_a_block_is_added() -> None:
    """A table remembers where its pages lie, and the packing thread has looked that up."""
    cache = filled()  # 20 tokens, two blocks
    tables = [step(cache)[0].pages.table for _ in range(9)]
    assert all(table is tables[0] for table in tables[:4])
    assert tables[4] is not tables[0]  # the step after the one that made the third block due
    assert all(table is tables[4] for table in tables[4:])
    assert all("regions" in table.__dict__ for table in tables)


@pytest.mark.parametrize("options", [{"scope": "k"}, {"scope": "v"}, {"window": 4000}])
def test_a_step_copies_no_long_raw_side(options: dict[str, Any]) -> None:
    cache = filled(block_tokens=64, **options)
    cache.update(states(1600, 5), states(1600, 6), 0)
    raw = 0 if options.get("scope") != "k" else 1
    places = [step(cache)[raw].pages.tail.data_ptr() for _ in range(100)]
    assert len(set(places)) == 1  # moved once, to 101 tokens of room


def test_several_tokens_are_given_dense() -> None:
    assert [type(x) for x in filled().update(states(2, 2), states(2, 3), 0)] == [torch.Tensor] * 2


def test_gradients_are_given_dense() -> None:
    new = states(1, 2).requires_grad_()
    keys, values = filled().update(new, new, 0)
    assert type(keys) is type(values) is torch.Tensor
    (keys.sum() + values.sum()).backward()
    assert torch.equal(new.grad, torch.full_like(new, 2))


# -- the attention function, called as models call it


def attend(
    keys: Any, values: Any, mask: Any = None, training: bool = False, **options: Any
) -> torch.Tensor:
    module: Any = SimpleNamespace(training=training, num_key_value_groups=2, is_causal=True)
    query = torch.randn(2, 4, 1, WIDTH, generator=torch.Generator().manual_seed(9))
    query = query.bfloat16().requires_grad_(options.pop("grad", False))
    out, weights = fused_attention(module, query, keys, values, mask, eager=False, **options)
    assert weights is None
    assert out.shape == (2, 1, 4, WIDTH)
    return out


def mask(heads: int = 1) -> torch.Tensor:
    allowed = torch.ones(2, heads, 1, TOKENS, dtype=torch.bool)
    allowed[0, :, :, :9] = False
    allowed[:, -1, :, 12] = False
    return allowed


BIAS = torch.randn(1, 4, 1, TOKENS, generator=torch.Generator().manual_seed(4)).bfloat16()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.1},
        {"mask": mask()},
        {"mask": mask()[1:]},
        {"mask": torch.zeros(2, 1, 1, TOKENS).masked_fill(~mask(), -1e30).bfloat16()},
        {"position_ids": torch.tensor([[3]]), "sliding_window": None, "output_attentions": False},
    ],
)
def test_what_streams(options: dict[str, Any]) -> None:
    keys, values = step(filled())
    with counted() as counts:
        ours = attend(keys, values, **options)
    assert (counts.steps, counts.unpacked) == (1, 0)
    theirs = attend(keys.clone(), values.clone(), **options)
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": mask(heads=4)},
        {"position_bias": BIAS},
        {"unknown": 3},
        {"dropout": 1e-9},
        {"training": True},
        {"grad": True},
    ],
)
def test_what_does_not_stream_is_the_librarys(options: dict[str, Any]) -> None:
    keys, values = step(filled())
    with counted() as counts:
        ours = attend(keys, values, **options)
    assert (counts.steps, counts.unpacked) == (0, 2 * 2 * 2)  # rows, sides, blocks
    options = dict(options)
    grad, allowed = options.pop("grad", False), options.pop("mask", None)
    module: Any = SimpleNamespace(training=False, num_key_value_groups=2, is_causal=True)
    query = torch.randn(2, 4, 1, WIDTH, generator=torch.Generator().manual_seed(9)).bfloat16()
    options.pop("training", None)
    theirs, _ = sdpa_attention_forward(
        module, query, keys.clone(), values.clone(), allowed, **options
    )
    assert torch.equal(ours, theirs)
    assert ours.requires_grad == grad


def test_one_opened_side_is_enough_to_be_dense() -> None:
    keys, values = step(filled())
    keys.mul_(2)
    with counted() as counts:
        ours = attend(keys, values)
    assert counts.steps == 0
    unscaled, other = step(filled())
    assert torch.equal(ours, attend(unscaled.clone() * 2, other.clone()))


def test_a_selection_of_tokens_is_refused() -> None:
    keys, values = step(filled())
    with pytest.raises(gaac.GaacError, match="of its own choice, which fused attention does not"):
        attend(keys, values, indices=torch.zeros(2, 1, 3, dtype=torch.long))
