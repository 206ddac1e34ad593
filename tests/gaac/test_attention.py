"""Decode attention against the oracle: every shape, dtype, cut, mask and option."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import gaac
from gaac.attention import decode_attention
from gaac.kernels import reference_attention
from gaac.pages import KIND, RAW_REPEATED
from tests.gaac.attention_cases import (
    Layer,
    assert_right,
    attend,
    expected,
    layer,
    left_padded,
    paged,
    shared_table,
)
from tests.gaac.data import DTYPES, same

Heads = tuple[int, int]

SHAPES: dict[str, tuple[Heads, tuple[int, int]]] = {
    "9q 3kv d64": ((9, 3), (64, 64)),
    "32q 8kv d128": ((32, 8), (128, 128)),
    "8q 1kv d256": ((8, 1), (256, 256)),
    "4q 4kv d80": ((4, 4), (80, 80)),
    "6q 2kv d96": ((6, 2), (96, 96)),
    "5q 1kv d64": ((5, 1), (64, 64)),
    "2q 1kv d192/128": ((2, 1), (192, 128)),
    "4q 2kv d9/5": ((4, 2), (9, 5)),
    "17q 1kv d64": ((17, 1), (64, 64)),
}
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = 600


@pytest.mark.parametrize("q_dtype", Q_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_dtypes(shape: str, dtype: str, q_dtype: torch.dtype) -> None:
    given = layer(*SHAPES[shape], tokens=330, dtype=dtype, q_dtype=q_dtype)
    result = attend(given, paged(given.keys, 256, 74), paged(given.values, 256, 74))
    assert_right(given, result)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tail_tokens", [0, 1, 63, 300])
@pytest.mark.parametrize("page_tokens", [256, 100, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_and_tails(dtype: str, page_tokens: int, tail_tokens: int, batch: int) -> None:
    given = layer(tokens=400, batch=batch, dtype=dtype, q_dtype=torch.float32)
    cut = (page_tokens, tail_tokens)
    assert_right(given, attend(given, paged(given.keys, *cut), paged(given.values, *cut)))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 256, 257, 513])
@pytest.mark.parametrize("page_tokens", [None, 256])
def test_lengths(tokens: int, page_tokens: int | None) -> None:
    given = layer(tokens=tokens, batch=2, q_dtype=torch.float32)
    assert_right(given, attend(given, paged(given.keys, page_tokens), paged(given.values)))
    cut = (page_tokens, tokens)  # everything in the tail
    assert_right(given, attend(given, paged(given.keys, *cut), paged(given.values, *cut)))


KEY_AND_VALUE_CUTS = {
    "scope K": ((256, 88), (None, 0)),
    "scope V": ((None, 0), (256, 88)),
    "scope V of small pages": ((None, 0), (100, 0)),
    "other pages": ((256, 88), (100, 0)),
    "other tails": ((256, 0), (256, 344)),
    "one long page": ((600, 0), (200, 0)),
}


@pytest.mark.parametrize("name", KEY_AND_VALUE_CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_cut_apart(dtype: str, name: str) -> None:
    given = layer(tokens=TOKENS, batch=2, dtype=dtype, q_dtype=torch.float32)
    keys, values = KEY_AND_VALUE_CUTS[name]
    assert_right(given, attend(given, paged(given.keys, *keys), paged(given.values, *values)))


@pytest.mark.parametrize("level", gaac.LEVELS)
@pytest.mark.parametrize("kind", ["normal", "random", "repeating"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level(dtype: str, kind: str, level: int) -> None:
    given = layer(tokens=TOKENS, batch=2, dtype=dtype, kind=kind, q_dtype=torch.float32)
    keys, values = (paged(part, 256, 88, level) for part in (given.keys, given.values))
    assert_right(given, attend(given, keys, values))


def test_levels_side_by_side() -> None:
    given = layer(tokens=TOKENS, q_dtype=torch.float32)
    assert_right(given, attend(given, paged(given.keys, level=1), paged(given.values, level=3)))
    mixed = gaac.attention.Pages.of(
        [[gaac.encode(given.keys[:, :, a : a + 200], level=a // 200) for a in (0, 200, 400)]],
        given.keys[:, :, TOKENS:],
    )
    assert_right(given, attend(given, mixed, paged(given.values)))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_repeats_in_one_of_both(part: str) -> None:
    """As in the first layer, where values repeat and rotated keys do not."""
    plain, repeated = (layer(tokens=TOKENS, batch=2, kind=k) for k in ("normal", "repeating"))
    parts = {"keys": plain.keys, "values": plain.values, part: getattr(repeated, part)}
    given = Layer(plain.q.float(), **parts)
    assert_right(given, attend(given, paged(given.keys, 256, 88), paged(given.values, 256, 88)))


def test_random_rows_that_repeat() -> None:
    """Their pages hold repeats of raw rows."""
    given = layer(tokens=60, kind="random", q_dtype=torch.float32)
    again = torch.arange(TOKENS) % 60
    given = Layer(given.q, given.keys[:, :, again], given.values[:, :, again])
    keys = paged(given.keys)
    assert (keys.table.regions[..., KIND] == RAW_REPEATED).any()
    raw = attend(given, paged(given.keys, level=0), paged(given.values, level=0))
    assert_right(given, raw)
    assert torch.equal(attend(given, keys), raw)


# Masks.

PADDINGS = {
    "none": (0, 0, 0),
    "a few tokens": (3, 0, 17),
    "whole tiles": (64, 128, 300),
    "whole pages": (256, 0, 512),
    "all but one": (TOKENS - 1, 0, 5),
    "a row that sees nothing": (TOKENS, 0, 5),
}


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", PADDINGS)
def test_left_padding(name: str, sinks: bool, as_float: bool) -> None:
    mask = left_padded(PADDINGS[name], TOKENS)
    given = layer(tokens=TOKENS, batch=3, q_dtype=torch.float32)
    shown = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if as_float else mask
    given = given.having(mask=shown, sinks=torch.linspace(-2, 2, 9) if sinks else None)
    result = attend(given, paged(given.keys, 256, 88), paged(given.values, 256, 88))
    assert_right(given, result)
    blind = ~mask.any(1)
    assert not result[blind].any()


def test_any_mask() -> None:
    """Holes anywhere: single tokens, whole tiles in the middle, the last token."""
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[0, 192:448] = False
    mask[:, -1] = False
    given = layer(tokens=TOKENS, batch=2, q_dtype=torch.float32).having(mask=mask)
    assert_right(given, attend(given, paged(given.keys, 256, 88), paged(given.values, 100)))


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_additive_masks(mask_dtype: torch.dtype) -> None:
    """As ALiBi has them, and with the most negative number where others have -inf."""
    mask = -0.05 * torch.arange(TOKENS).flip(0).repeat(2, 1)
    mask[0, :70] = torch.finfo(torch.bfloat16).min
    given = layer(tokens=TOKENS, batch=2, q_dtype=torch.float32).having(mask=mask.to(mask_dtype))
    assert_right(given, attend(given, paged(given.keys, 256, 88), paged(given.values, 256, 88)))


def test_masked_tokens_do_not_matter() -> None:
    """However large: the result has the same bits whatever the hidden tokens hold."""
    mask = left_padded((70, 0), TOKENS)
    given = layer(tokens=TOKENS, batch=2).having(mask=mask)
    other = layer(tokens=TOKENS, batch=2, seed=5)
    hidden = ~mask[:, None, :, None]
    changed = Layer(
        given.q,
        torch.where(hidden, other.keys * 1000, given.keys),
        torch.where(hidden, other.values * 1000, given.values),
        given.options,
    )
    assert same(attend(given), attend(changed))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("level", [0, 1])
def test_what_is_not_a_number_spreads_as_in_torch(level: int, wrong: float) -> None:
    """A masked token has weight 0, and 0 * inf and 0 * NaN are NaN: nothing is papered over."""
    given = layer(heads=(2, 2), tokens=TOKENS).having(mask=left_padded((20,), TOKENS))
    given.values[0, 0, 10] = wrong
    result = attend(given, paged(given.keys, level=level), paged(given.values, level=level))
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        given.q[:, :, None],
        given.keys,
        given.values,
        attn_mask=given.options["mask"][:, None, None],
    )[:, :, 0]
    assert by_torch[0, 0].isnan().all()
    assert not by_torch[0, 1].isnan().any()
    assert torch.equal(result.isnan(), by_torch.isnan())


# Scores.


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("scaling", [None, 0.01, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_and_softcap(dtype: str, scaling: float | None, softcap: float | None) -> None:
    given = layer(tokens=TOKENS, dtype=dtype, q_dtype=torch.float32)
    given = given.having(scaling=scaling, softcap=softcap)
    assert_right(given, attend(given, paged(given.keys, 256, 88), paged(given.values, 256, 88)))


@pytest.mark.parametrize("size", [-1e4, -30.0, 0.0, 30.0, 1e4])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_sinks(size: float, sink_dtype: torch.dtype) -> None:
    """Far below the scores they change nothing, far above them they take everything."""
    sinks = (torch.linspace(-1, 1, 9) + size).to(sink_dtype)
    given = layer(tokens=TOKENS, batch=2, q_dtype=torch.float32).having(sinks=sinks)
    result = attend(given, paged(given.keys, 256, 88), paged(given.values, 256, 88))
    assert_right(given, result)
    if size == 1e4:
        assert not result.any()
    if size == -1e4:
        assert_right(given.having(sinks=None), result)


@pytest.mark.parametrize("size", [1e3, 1e4])
@pytest.mark.parametrize("level", [0, 1])
def test_extreme_scores(level: int, size: float) -> None:
    """Scores of up to +-size after scaling, their maximum in the first page, a later one, the tail.

    Every other token then has the weight zero, or nearly, and a score without its maximum taken
    off would overflow.
    """
    plain = layer(tokens=TOKENS, batch=3, q_dtype=torch.float32)
    direction = torch.nn.functional.normalize(plain.q[:, :1], dim=-1)
    q = direction.expand(-1, 9, -1) * 8  # scaled by 1/8: the score is the projection
    reach = torch.linspace(-size, size, TOKENS)
    keys = torch.stack([reach.roll(shift) for shift in (0, 250, 550)])
    keys = keys[:, None, :, None] * direction[:, :, None]
    given = Layer(q.contiguous(), keys.expand(-1, 3, -1, -1).to(torch.bfloat16), plain.values)
    scores = torch.einsum("bd,btd->bt", q[:, 0], given.keys[:, 0].float()) / 8
    assert scores.max() > 0.9 * size
    assert scores.min() < -0.9 * size
    parts = (paged(part, 256, 88, level) for part in (given.keys, given.values))
    assert_right(given, attend(given, *parts))


def test_scores_that_are_all_far_below_zero() -> None:
    given = layer(tokens=TOKENS, q_dtype=torch.float32)
    keys = (-8 * given.q[:, ::3, None] + 0.01 * given.keys.float()).to(torch.bfloat16)
    given = Layer(given.q[:, ::3].contiguous(), keys, given.values, {"scaling": 100.0})
    assert_right(given, attend(given, paged(given.keys, 256, 88), paged(given.values, 256, 88)))


def test_one_token_takes_all() -> None:
    """Then the result is that token's value, bit for bit."""
    given = layer(tokens=TOKENS, batch=1)
    for token in (0, 100, 255, 256, 520, TOKENS - 1):
        mask = torch.arange(TOKENS)[None] == token
        result = attend(given.having(mask=mask), paged(given.keys, 256, 88))
        assert same(result, given.values[:, :, token].repeat_interleave(3, 1))


# What the arguments may look like, and may not.


def test_rows_that_share_pages() -> None:
    one = layer(tokens=TOKENS, q_dtype=torch.float32)
    three = layer(tokens=1, batch=3, q_dtype=torch.float32)
    keys, values = (shared_table(paged(p, 256, 88), 3) for p in (one.keys, one.values))
    wide = [part.expand(3, -1, -1, -1) for part in (one.keys, one.values)]
    assert_right(Layer(three.q, *wide), decode_attention(three.q, keys, values))


def test_a_strided_query_and_tails_of_any_stride() -> None:
    given = layer(tokens=TOKENS, batch=2)
    spread = torch.randn(2, 64, 27)[:, :, ::3].transpose(1, 2).to(torch.bfloat16)
    by_token = [p.transpose(1, 2).contiguous().transpose(1, 2) for p in (given.keys, given.values)]
    strided = Layer(spread, *by_token)
    for cut in ((None, 0), (256, 88)):
        parts = (paged(strided.keys, *cut), paged(strided.values, *cut))
        assert_right(strided, attend(strided, *parts))


def test_nothing_that_is_given_is_changed() -> None:
    given = layer(tokens=TOKENS, batch=2)
    mask, sinks = torch.zeros(2, TOKENS), torch.ones(9)
    keys, values = paged(given.keys, 256, 88), paged(given.values, 256, 88)
    before = [t.clone() for t in (given.q, given.keys, given.values, mask, sinks)]
    payloads = [page.payload.clone() for row in keys.table.rows for page in row]
    decode_attention(given.q, keys, values, mask=mask, sinks=sinks)
    after = (given.q, given.keys, given.values, mask, sinks)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    kept = [page.payload for row in keys.table.rows for page in row]
    assert all(torch.equal(a, b) for a, b in zip(payloads, kept, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q of four axes": ({"q": torch.zeros(1, 9, 1, 64)}, "q is"),
    "q of another batch": ({"q": torch.zeros(2, 9, 64)}, "q is"),
    "q of another head_dim": ({"q": torch.zeros(1, 9, 32)}, "q is"),
    "query heads that do not divide": ({"q": torch.zeros(1, 10, 64)}, "multiple of the KV heads"),
    "fewer values": ({"values": paged(layer(tokens=99).values)}, "they need the same"),
    "other KV heads": ({"values": paged(layer((9, 1), tokens=100).values)}, "they need the same"),
    "sinks for other heads": ({"sinks": torch.zeros(3)}, "sinks has 3 values"),
    "a mask of other tokens": ({"mask": torch.ones(1, 99, dtype=torch.bool)}, "mask is"),
    "a mask of four axes": ({"mask": torch.ones(1, 1, 1, 100)}, "mask is"),
    "no softcap at all": ({"softcap": 0.0}, "softcap is 0.0"),
    "a softcap below zero": ({"softcap": -1.0}, "softcap is -1.0"),
    "a softcap that is no number": ({"softcap": math.nan}, "softcap is nan"),
    "no threads": ({"threads": 0}, "threads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    wrong, message = REFUSED[name]
    given = layer(tokens=100)
    right = {"q": given.q, "keys": paged(given.keys), "values": paged(given.values)}
    with pytest.raises(gaac.GaacError, match=message):
        decode_attention(**{**right, **wrong})


def test_a_damaged_page_is_refused() -> None:
    given = layer(tokens=256)
    keys = paged(given.keys)
    keys.table.rows[0][0].payload[-1] ^= 1
    with pytest.raises(gaac.CorruptFrame):
        attend(given, keys)


# The oracle itself, where the result is known without it.


def test_the_oracle() -> None:
    given = layer(tokens=50, batch=2)
    q, keys, values = (part.double() for part in (given.q, given.keys, given.values))
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], keys, values, enable_gqa=True
    )
    assert np.allclose(expected(given), by_torch[:, :, 0].numpy(), rtol=1e-12, atol=1e-14)
    uniform = reference_attention.attend(
        np.zeros((1, 2, 4)), np.ones((1, 1, 3, 4)), np.arange(6.0).reshape(1, 1, 3, 2)
    )
    assert np.allclose(uniform, [[[2, 3], [2, 3]]])
    with_sink = reference_attention.attend(
        np.zeros((1, 1, 4)),
        np.ones((1, 1, 3, 4)),
        np.arange(6.0).reshape(1, 1, 3, 2),
        sinks=np.array([math.log(3)]),
    )
    assert np.allclose(with_sink, [[[1, 1.5]]])
    capped = reference_attention.scores_of(np.ones(1), np.full((1, 1), 1e9), 1.0, 5.0, None)
    assert np.allclose(capped, 5)
