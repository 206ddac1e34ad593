"""Attention on a device, tested where there is none: interpreted, compiled, and what it refuses.

What the kernels compute is tested by `interpreted_attention.py`, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is published for Linux alone")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gaac
from gaac.attention import Page, Pages, PageTable
from gaac.kernels import attention_programs, attention_triton
from gaac.kernels.attention_triton import schedule
from gaac.pages import ROWS
from tests.gaac.attention_cases import Layer, layer, paged

ROOT = Path(__file__).resolve().parents[2]


def test_under_the_interpreter() -> None:
    tests = str(Path(__file__).with_name("interpreted_attention.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        cwd=ROOT,
        env={
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            **{"TRITON_INTERPRET": "1", "GAAC_KERNELS": "numpy"},
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# How the tokens are cut.


@drawn(k=st.lists(st.integers(1, 300), max_size=5), v=st.lists(st.integers(1, 300), max_size=5))
def test_every_token_is_in_one_tile(k: list[int], v: list[int]) -> None:
    tiles = schedule(k, v)
    assert tiles.dtype == np.int32
    spans = [(int(token), int(token + count)) for token, count in tiles[:, :2]]
    assert all(0 < stop - start <= 64 for start, stop in spans)
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert sum(stop - start for start, stop in spans) == max(sum(k), sum(v))
    for rows, column in ((k, 2), (v, 4)):
        places = [(region, row) for region, count in enumerate(rows) for row in range(count)]
        for (start, stop), (region, row) in zip(spans, tiles[:, column : column + 2], strict=True):
            if start < len(places):
                assert places[start] == (region, row)
                assert places[stop - 1][0] == region, "a tile crosses the end of a region"
                assert (row % 64) + (stop - start) <= 64, "a tile crosses the end of a tile"
            else:
                assert (region, row) == (-1, start - len(places))


@pytest.mark.parametrize("sequences", [1, 3, 8, 32, 1000])
@pytest.mark.parametrize("tiles", [0, 1, 7, 128, 2048, 20_000])
def test_splits_hold_all_tiles(sequences: int, tiles: int) -> None:
    splits, tiles_per_split = attention_triton._split(sequences, tiles, 132)
    assert 1 <= splits <= attention_triton.MAX_SPLITS
    assert splits * tiles_per_split >= tiles
    assert tiles == 0 or (splits - 1) * tiles_per_split < tiles, "the last split is empty"


# What the kernels do not read.


def attend(given: Layer, keys: Pages, values: Pages) -> torch.Tensor | None:
    return attention_triton.attend(given.q, keys, values, 1.0, None, None, None)


def test_other_levels_are_left_to_others() -> None:
    given = layer((2, 1), tokens=70)
    readable, level_3 = paged(given.values), paged(given.values, level=3)
    assert level_3.table.regions is None
    assert attend(given, level_3, readable) is None
    assert attend(given, readable, level_3) is None


@pytest.mark.parametrize("head_dims", [(72, 64), (64, 72), (272, 64), (64, 8)], ids=str)
def test_other_head_dims_are_left_to_others(head_dims: tuple[int, int]) -> None:
    given = layer((2, 1), head_dims, tokens=70)
    assert attend(given, paged(given.keys), paged(given.values)) is None


def test_other_dtypes_and_strides_are_left_to_others() -> None:
    given = layer((2, 1), tokens=70)
    keys, values = paged(given.keys), paged(given.values)
    assert attention_triton.supports(given.q, keys, values)
    assert not attention_triton.supports(given.q.double(), keys, values)
    assert not attention_triton.supports(given.q, keys, paged(given.values.half()))
    strided = given.keys.transpose(2, 3).contiguous().transpose(2, 3)
    assert not attention_triton.supports(given.q, Pages(PageTable(()), strided), values)


def test_batch_rows_cut_in_other_ways_are_left_to_others() -> None:
    """Pages of the same tokens, whose blocks end at different ones."""
    given = layer((2, 1), tokens=300)
    page, other = (paged(given.keys, 300).table.rows[0][0] for _ in range(2))
    assert page.regions is not None
    cut = page.regions.copy()
    cut[..., ROWS] = [200, 100]
    other.__dict__["regions"] = cut
    keys = Pages(PageTable(((page,), (other,))), given.keys[:, :, :0].expand(2, -1, -1, -1))
    twice = Layer(given.q.expand(2, -1, -1), given.keys, given.values)
    assert attend(twice, keys, keys) is None


# What allows whole words to be loaded: x86 does not mind, a device ends the process.


@pytest.mark.parametrize(
    ("kind", "page_tokens", "level", "aligned"),
    [
        *(("normal", 100, 1, True), ("normal", 101, 0, True)),
        *(("repeating", 256, 1, True), ("repeating", 101, 1, False)),
    ],
)
def test_alignment_of_pages(kind: str, page_tokens: int, level: int, aligned: bool) -> None:
    value = layer((2, 1), tokens=2 * page_tokens, kind=kind).keys
    blobs = [gaac.encode(part, level=level) for part in value.split(page_tokens, dim=2)]
    pages = Pages.of(
        [[torch.tensor(list(blob), dtype=torch.uint8) for blob in blobs]], value[:, :, :0]
    )
    assert attention_triton._side(pages.table, value.device).aligned == aligned
    cut = torch.tensor([0, *blobs[0]], dtype=torch.uint8)[1:]
    table = PageTable(((Page(cut, tuple(value[:, :, :page_tokens].shape), value.dtype),),))
    assert not attention_triton._side(table, value.device).aligned


def test_alignment_of_tails() -> None:
    tail = torch.zeros((1, 2, 10, 64), dtype=torch.bfloat16)
    wider = torch.zeros((1, 2, 10, 65), dtype=torch.bfloat16)
    assert attention_triton._is_aligned(tail)
    assert attention_triton._is_aligned(tail.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 3:])
    assert not attention_triton._is_aligned(wider[..., :64])
    assert not attention_triton._is_aligned(
        torch.zeros(5001, dtype=torch.bfloat16)[1:].view(1, 1, -1, 8)
    )


# Compilation.

TYPES = {
    **dict.fromkeys(("bias", "highest_out", "total_out", "gathered_out"), "*fp32"),
    **dict.fromkeys(("highest_in", "total_in", "gathered_in"), "*fp32"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
    **dict.fromkeys(("k_regions", "v_regions"), "*i64"),
    **{"schedule": "*i32", "sinks": "*bf16"},
}


def compiled(kernel: Any, capability: int, dtype: str, q_dtype: str, **constants: Any) -> Any:
    """The kernel as it would be compiled on a device."""
    names = kernel.arg_names
    types = {
        **TYPES,
        **dict.fromkeys(("k_tail", "v_tail"), dtype),
        **dict.fromkeys(("q", "out"), q_dtype),
    }
    used = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in used else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=used)
    warps = attention_triton._warps(constants["V_WIDTH"])
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, **attention_triton._OPTIONS}
    return triton.compile(source, target=target, options=options)


COMPILED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bfloat16": ("*bf16", "*bf16", {"HEADS": 4, "K_WIDTH": 128, "V_WIDTH": 128}),
    "float16": ("*fp16", "*fp16", {"HEADS": 8, "K_WIDTH": 256, "V_WIDTH": 256}),
    "float32 queries": ("*bf16", "*fp32", {"HEADS": 3, "K_WIDTH": 80, "V_WIDTH": 80}),
    "everything": ("*bf16", "*bf16", {"HEADS": 1, "K_WIDTH": 64, "V_WIDTH": 64, "BIASED": True}),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_cuda(name: str, capability: int) -> None:
    dtype, q_dtype, chosen = COMPILED[name]
    everything = chosen.get("BIASED", False)
    constants = {
        **{"K_ALIGNED": not everything, "V_ALIGNED": not everything, "NARROW": dtype == q_dtype},
        **{"BIASED": False, "CAPPED": everything, "SUNK": everything, **chosen},
    }
    for kernel in (attention_programs.attend_tiles, attention_programs.merge_splits):
        made = compiled(kernel, capability, dtype, q_dtype, **constants)
        assert made.asm["cubin"]
        assert made.metadata.shared <= 100 * 1024, "more shared memory than every device has"
