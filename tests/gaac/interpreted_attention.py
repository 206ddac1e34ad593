"""What attention's device kernels compute, on the CPU under Triton's interpreter.

As `interpreted_triton.py`, in a process of its own with TRITON_INTERPRET=1; started by
`test_attention_triton.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gaac
from benchmarks import gpu_check
from gaac.attention import Page, Pages, PageTable
from gaac.kernels import attention_triton
from gaac.pages import KIND, PACKED, RAW, REPEATED
from tests.gaac import guarded
from tests.gaac.attention_cases import (
    Layer,
    assert_right,
    bias_of,
    layer,
    left_padded,
    paged,
    shared_table,
)

assert os.environ.get("TRITON_INTERPRET") == "1", "set it: no device is meant to be used here"

HEADS = {  # (query heads, KV heads), (head_dim of K, of V), tokens
    "9q/3kv/64": ((9, 3), (64, 64), 300),
    "8q/1kv/256": ((8, 1), (256, 256), 150),
    "4q/4kv/80": ((4, 4), (80, 80), 150),
    "32q/8kv/128": ((32, 8), (128, 128), 70),
    "V wider than K": ((2, 1), (16, 112), 140),
    "V narrower than K": ((4, 2), (96, 48), 140),
    "more heads than rows": ((20, 1), (64, 64), 140),
}


def attend(given: Layer, keys: Pages, values: Pages) -> torch.Tensor:
    """As `decode_attention` would ask for it."""
    scaling = given.options.get("scaling")
    bias = bias_of(given.options.get("mask"))
    out = attention_triton.attend(
        given.q,
        keys,
        values,
        given.q.shape[2] ** -0.5 if scaling is None else scaling,
        given.options.get("softcap"),
        given.options.get("sinks"),
        None if bias is None else torch.from_numpy(bias).float(),
    )
    assert out is not None
    return out


def assert_right_on(given: Layer, **pages: Any) -> torch.Tensor:
    """The result on pages like these (see `paged`) is the oracle's; gives it."""
    out = attend(given, paged(given.keys, **pages), paged(given.values, **pages))
    assert_right(given, out)
    return out


def kinds(pages: Pages) -> set[int]:
    assert pages.table.regions is not None
    return set(pages.table.regions[..., KIND].ravel().tolist())


def with_escapes(given: Layer) -> Layer:
    """The layer with many values far below their channel's others, also side by side."""
    generator = torch.Generator().manual_seed(7)

    def scattered(value: torch.Tensor) -> torch.Tensor:
        small = torch.rand(value.shape, generator=generator) < 0.05
        small[..., 5:7, 8:24] = True
        return torch.where(small, value * 2**-12, value)

    return replace(given, keys=scattered(given.keys), values=scattered(given.values))


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str) -> None:
    heads, head_dims, tokens = HEADS[name]
    assert_right_on(layer(heads, head_dims, tokens))


@pytest.mark.parametrize("page_tokens", [256, 100, None])
@pytest.mark.parametrize("tail_tokens", [0, 30])
def test_pages_and_tails(page_tokens: int | None, tail_tokens: int) -> None:
    assert_right_on(layer((4, 2)), page_tokens=page_tokens, tail_tokens=tail_tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype: str, q_dtype: torch.dtype) -> None:
    given = with_escapes(layer((4, 2), tokens=140, dtype=dtype, q_dtype=q_dtype))
    keys, values = paged(given.keys, tail_tokens=9), paged(given.values, tail_tokens=9)
    assert kinds(keys) == kinds(values) == {PACKED}
    assert_right(given, attend(given, keys, values))


RAW_AND_PACKED = {
    "normal": ("normal", 256),
    "odd pages": ("normal", 100),
    "repeating": ("repeating", 256),
    "repeating, odd pages": ("repeating", 101),
    "escapes": ("escapes", 256),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RAW_AND_PACKED)
def test_raw_pages_give_the_same_bits(name: str, dtype: str) -> None:
    kind, page_tokens = RAW_AND_PACKED[name]
    given = layer((4, 2), dtype=dtype, kind="repeating" if kind == "repeating" else "normal")
    given = with_escapes(given) if kind == "escapes" else given
    raw, packed = (
        [paged(value, page_tokens, 20, level) for value in (given.keys, given.values)]
        for level in (0, 1)
    )
    assert kinds(raw[0]) == kinds(raw[1]) == {RAW}
    expected = {REPEATED} if kind == "repeating" else {PACKED}
    assert kinds(packed[0]) == kinds(packed[1]) == expected
    out = attend(given, *packed)
    assert torch.equal(out, attend(given, *raw))
    assert_right(given, out)


CUT_APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keys in shorter pages": ({"page_tokens": 100}, {"page_tokens": 256}),
    "values in shorter pages": ({"page_tokens": 256}, {"page_tokens": 90, "tail_tokens": 30}),
    "keys raw": ({"page_tokens": None}, {"page_tokens": 110, "tail_tokens": 7}),
    "values raw": ({"page_tokens": 256, "tail_tokens": 7}, {"page_tokens": None}),
}


@pytest.mark.parametrize("kind", ["normal", "repeating"])
@pytest.mark.parametrize("name", CUT_APART)
def test_keys_and_values_cut_apart(name: str, kind: str) -> None:
    given = layer((4, 2), kind=kind)
    keys, values = CUT_APART[name]
    assert_right(given, attend(given, paged(given.keys, **keys), paged(given.values, **values)))


def test_pages_that_do_not_shrink() -> None:
    given = layer((4, 2), kind="random")
    assert kinds(paged(given.keys)) == {RAW}
    assert_right_on(given)


def test_tails_with_strides() -> None:
    given = layer((4, 2), tokens=140, batch=2)
    tokens_first = [
        v.transpose(1, 2).contiguous().transpose(1, 2) for v in (given.keys, given.values)
    ]
    keys, values = (paged(value, 64, 40) for value in tokens_first)
    assert not keys.tail.is_contiguous()
    assert_right(given, attend(given, keys, values))
    odd = torch.zeros((2, 2, 200, 65), dtype=torch.bfloat16)[..., 1:]
    odd[:, :, :140] = given.keys
    assert_right(given, attend(given, paged(odd[:, :, :140], None), values))


def test_rows_that_share_pages() -> None:
    given = layer((4, 2), tokens=280)
    alone = attend(given, paged(given.keys, tail_tokens=20), paged(given.values, tail_tokens=20))
    batch = replace(given, q=given.q.expand(3, -1, -1))
    keys, values = (shared_table(paged(v, tail_tokens=20), 3) for v in (given.keys, given.values))
    out = attend(batch, keys, values)
    assert all(torch.equal(row, alone[0]) for row in out)


# What is added to the scores.


def test_left_padding_is_not_read() -> None:
    """Padding of whole tiles and parts of one, holding what would spoil everything."""
    given = layer((4, 2), batch=2)
    masked = given.having(mask=left_padded([0, 200], 300))
    expected = attend(masked, paged(given.keys, 100), paged(given.values, 100))
    assert_right(masked, expected)
    for value, spoiled in ((given.keys, math.nan), (given.values, math.inf)):
        padding = value[1, :, :200]
        padding[torch.rand(padding.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = (
            spoiled
        )
    assert torch.equal(attend(masked, paged(given.keys, 100), paged(given.values, 100)), expected)


def test_rows_that_attend_to_nothing_give_zeros() -> None:
    given = layer((4, 2), batch=2, tokens=140).having(mask=left_padded([140, 3], 140))
    out = assert_right_on(given)
    assert not out[0].any()
    assert out[1].any()


def test_float_masks() -> None:
    bias = torch.randn((2, 140), generator=torch.Generator().manual_seed(0))
    bias[:, 70] = -math.inf
    assert_right_on(layer((4, 2), batch=2, tokens=140).having(mask=bias))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softcap_sinks_and_scaling(dtype: str) -> None:
    given = layer((9, 3), tokens=140, dtype=dtype)
    sinks = torch.linspace(-2, 6, 9, dtype=given.q.dtype)
    assert_right_on(given.having(softcap=5.0))
    assert_right_on(given.having(sinks=sinks))
    assert_right_on(given.having(sinks=sinks, softcap=30.0, scaling=0.3))


def test_scores_far_apart() -> None:
    """The first tile's scores are far below, then far above, all others."""
    given = layer((4, 2), tokens=140)
    for scale in (2**-6, 2**6):
        given.keys[:, :, :64] *= scale
        assert_right_on(given)


# Splits.


@pytest.mark.parametrize("multiprocessors", [1, 3, 100])
def test_any_number_of_splits(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "INTERPRETED_MULTIPROCESSORS", multiprocessors)
    given = layer((2, 1), tokens=18 * 64 + 5).having(sinks=torch.zeros(2))
    given.keys[:, :, -64:] *= 2  # more splits than are merged at a time, and the last weigh most
    first = assert_right_on(given, tail_tokens=30)
    assert torch.equal(first, assert_right_on(given, tail_tokens=30))


def test_nothing_at_all() -> None:
    """No tokens but a sink, in pages or tails of none."""
    tail = torch.zeros((1, 2, 0, 64), dtype=torch.bfloat16)
    given = Layer(torch.ones((1, 4, 64), dtype=torch.bfloat16), tail, tail)
    for options in ({}, {"sinks": torch.zeros(4)}):
        for table in (PageTable(()), PageTable(((),))):
            out = attend(given.having(**options), Pages(table, tail), Pages(table, tail))
            assert torch.equal(out, torch.zeros_like(given.q))


@pytest.mark.parametrize("kind", ["normal", "repeating", "random"])
def test_nothing_outside_pages_is_read(kind: str) -> None:
    """Each page ends, then begins, where reading further ends the process."""
    given = layer((2, 2), (16, 48), tokens=70, kind=kind, dtype="float16")
    for place in range(2):
        sides = [
            Pages(PageTable(((guarded_page(value, place),),)), value[:, :, :0])
            for value in (given.keys, given.values)
        ]
        assert_right(given, attend(given, *sides))


def guarded_page(value: torch.Tensor, place: int) -> Page:
    blob = np.frombuffer(gaac.encode(value, level=1), np.uint8)
    return Page.of(torch.from_numpy(guarded.copies(blob)[place]))


# The script for a device.


def test_gpu_check_finds_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "HEADS", {"2q/1kv/16": (2, 1, 16)})
    cpu = torch.device("cpu")

    def spoiled(change: Callable[[torch.Tensor, Pages], torch.Tensor | None]) -> Any:
        def wrong(q: torch.Tensor, keys: Pages, *rest: Any) -> torch.Tensor | None:
            out = attention_triton.attend(q, keys, *rest)
            assert out is not None
            return change(out, keys)

        return SimpleNamespace(attend=wrong)

    for change, message in (
        (lambda out, keys: None, "does not read"),
        (lambda out, keys: out * 1.02, "an error of"),
        (lambda out, keys: out + (kinds(keys) == {RAW}), "different bits"),
    ):
        found = list(gpu_check.check_attention(spoiled(change), cpu, small=True))
        assert len(found) == 4
        assert all(message in problem for problem in found)


def test_gpu_check_measures_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timing part, with another clock: a device's there is none of."""
    monkeypatch.setattr(gpu_check, "TIMED_TOKENS", (256, 512))
    monkeypatch.setattr(gpu_check, "TIMED_BATCHES", (1,))
    monkeypatch.setattr(gpu_check, "TIMED_HEADS", ("4q/4kv/80",))
    monkeypatch.setattr(gpu_check, "graphed", lambda operation: operation)
    monkeypatch.setattr(gpu_check, "flash", lambda q, k, v: None)
    monkeypatch.setattr(gpu_check, "WARM_UPS", 0)
    monkeypatch.setattr(gpu_check, "elapsed_s", lambda operation: (operation(), 1e-6)[1])
    figures = list(gpu_check.measure_attention(attention_triton, torch.device("cpu"), 2))
    assert [figure.operation for figure in figures] == ["SDPA", "packed", "raw"] * 2
    assert [figure.raw_bytes for figure in figures[::3]] == [2 * 2 * 4 * 80 * n for n in (256, 512)]
    for plain, packed, raw in (figures[:3], figures[3:]):
        assert plain.share == 1
        assert 1 < raw.share < 1.01
        assert 0.65 < packed.share < 0.8
