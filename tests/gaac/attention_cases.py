"""Layers for the tests of attention: queries, keys and values of every kind, and pages of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import gaac
from gaac.attention import Page, Pages, PageTable, decode_attention
from gaac.kernels import reference_attention
from tests.gaac.data import DTYPES, gaussian, random_words, repeating, tensor

# Half the distance between neighbouring numbers, relative to the smaller one at most.
HALF_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


@dataclass(frozen=True)
class Layer:
    """The arguments of one attention, as plain tensors.

    q: [batch, query_heads, head_dim]. keys, values: [batch, kv_heads, tokens, head_dim], bfloat16
    or float16. options: keywords of `decode_attention`.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    def having(self, **options: Any) -> Layer:
        return replace(self, options={**self.options, **options})


def layer(
    heads: tuple[int, int] = (9, 3),
    head_dims: tuple[int, int] = (64, 64),
    tokens: int = 300,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    q_dtype: torch.dtype | None = None,
    kind: str = "normal",
    seed: int = 0,
) -> Layer:
    """A layer of (query heads, KV heads) and (head_dim of K, of V).

    kind: "normal", a scale for each channel; "random", words of any exponent but no NaN or
    infinity, which pack badly and are stored raw; "repeating", rows that repeat.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn((batch, heads[0], head_dims[0]), generator=generator)
    keys, values = (
        made((batch, heads[1], tokens, width), dtype, kind, seed + number)
        for number, width in enumerate(head_dims)
    )
    return Layer(q.to(q_dtype or DTYPES[dtype]), keys, values)


def made(shape: tuple[int, ...], dtype: str, kind: str, seed: int) -> torch.Tensor:
    if kind == "normal":
        return gaussian(shape, dtype, seed)
    if kind == "repeating":
        return repeating(shape, dtype, seed)
    assert kind == "random"
    words = random_words(shape, seed)
    # The top exponent bits are cleared: values up to 2, of as many exponents as there are.
    return tensor(words & np.uint16(0xBFFF), dtype)


def paged(
    value: torch.Tensor,
    page_tokens: int | None = 256,
    tail_tokens: int = 0,
    level: int = 1,
) -> Pages:
    """Pages of a [batch, kv_heads, tokens, head_dim] tensor, all of page_tokens but the last.

    page_tokens: None puts everything in the tail, which is a view of the tensor.
    """
    packed = 0 if page_tokens is None else value.shape[2] - tail_tokens
    starts = range(0, packed, page_tokens or 1)
    rows = [
        [
            gaac.encode(one[None, :, start : min(start + (page_tokens or 1), packed)], level=level)
            for start in starts
        ]
        for one in value
    ]
    return Pages.of(rows, value[:, :, packed:])


def attend(given: Layer, keys: Pages | None = None, values: Pages | None = None) -> torch.Tensor:
    """decode_attention, on 256-token pages unless other ones of the same layer are given."""
    keys = paged(given.keys) if keys is None else keys
    values = paged(given.values) if values is None else values
    return decode_attention(given.q, keys, values, **given.options)


def expected(given: Layer) -> np.ndarray:
    """What the oracle gives, float64."""
    return _reference(given, given.values)


def error_bound(given: Layer, out: np.ndarray) -> np.ndarray:
    """How far from the oracle's `out` a result in float32 arithmetic may lie, rounded at the end.

    A score is a sum of head_dim products, so its error grows with the size of those; the weights
    inherit that error, and the result is a mean of |v| under such weights.
    """
    kept = given.options.get("mask")
    mean_size = _reference(given, given.values.abs())
    query, keys = given.q.double().abs(), given.keys.double().abs()
    per_head = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    sizes = torch.einsum("bhd,bhtd->bht", query, per_head)
    if kept is not None and kept.dtype == torch.bool:
        sizes = sizes * kept[:, None]
    scaling = abs(given.options.get("scaling") or given.q.shape[2] ** -0.5)
    largest = scaling * sizes.amax(-1, keepdim=True).numpy()
    half_step = HALF_STEP[given.q.dtype]
    smallest = torch.finfo(given.q.dtype).smallest_normal
    bound: np.ndarray = mean_size * (2**-17 + largest * 2**-22) + np.abs(out) * half_step + smallest
    return bound


def assert_right(given: Layer, result: torch.Tensor) -> None:
    """The result is the oracle's within rounding, value for value."""
    out = expected(given)
    assert result.dtype == given.q.dtype
    assert tuple(result.shape) == out.shape
    error = np.abs(as_float64(result) - out)
    bound = error_bound(given, out)
    worst = np.unravel_index(np.argmax(error / bound), error.shape)
    assert (error <= bound).all(), f"{worst}: error {error[worst]:.3g}, may be {bound[worst]:.3g}"


def as_float64(value: torch.Tensor) -> np.ndarray:
    array: np.ndarray = value.double().numpy()
    return array


def bias_of(mask: torch.Tensor | None) -> np.ndarray | None:
    """A mask of either kind as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else as_float64(mask)
    return np.where(mask.numpy(), 0.0, -math.inf)


def _reference(given: Layer, values: torch.Tensor) -> np.ndarray:
    sinks = given.options.get("sinks")
    return reference_attention.attend(
        as_float64(given.q),
        as_float64(given.keys),
        as_float64(values),
        scaling=given.options.get("scaling"),
        softcap=given.options.get("softcap"),
        sinks=None if sinks is None else as_float64(sinks),
        bias=bias_of(given.options.get("mask")),
    )


def left_padded(padding: Sequence[int], tokens: int) -> torch.Tensor:
    """[batch, tokens] bool that hides so many tokens at the start of each row."""
    return torch.arange(tokens)[None] >= torch.tensor(padding)[:, None]


def shared_table(pages: Pages, batch: int) -> Pages:
    """Pages of a batch whose rows all hold the pages of one row, and its tail."""
    row: tuple[Page, ...] = pages.table.rows[0]
    return Pages(PageTable((row,) * batch), pages.tail.expand(batch, -1, -1, -1))
