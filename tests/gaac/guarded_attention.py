"""Attention on pages that end where no one may read: python -m tests.gaac.guarded_attention

Ends with "done", or by a signal at the first touch of memory outside a payload or a tail. Level 1's
streams follow one another, so what a kernel reads ahead of itself shows at the end of a payload.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

import gaac
from gaac.attention import Pages, decode_attention
from tests.gaac import guarded
from tests.gaac.attention_cases import Layer, assert_right, layer
from tests.gaac.data import DTYPES, bits

SHAPES = [((9, 3), (64, 64)), ((4, 1), (128, 128)), ((2, 2), (80, 80)), ((2, 1), (256, 256))]
PAGES = [(256,), (100,), (1,), (256, 100, 1), (300,), (65,)]
TAILS = [0, 1, 37]


def placed(array: np.ndarray, at_end: bool) -> torch.Tensor:
    """A copy that ends, or else begins, at a guard page."""
    copy = guarded.empty(array.shape, array.dtype, at_end)
    copy[...] = array
    return torch.from_numpy(copy)


def guarded_pages(value: torch.Tensor, lengths: tuple[int, ...], level: int, at_end: bool) -> Pages:
    rows: list[list[torch.Tensor]] = [[] for _ in range(value.shape[0])]
    start = 0
    for length in lengths:
        for row, part in zip(rows, value[:, :, start : start + length].split(1), strict=True):
            blob = np.frombuffer(gaac.encode(part, level=level), np.uint8)
            row.append(placed(blob, at_end))
        start += length
    tail = value[:, :, start:]
    if tail.shape[2]:
        tail = placed(bits(tail).numpy(), at_end).view(value.dtype)
    return Pages.of(rows, tail)


def cases() -> Iterator[tuple[Layer, tuple[int, ...]]]:
    for dtype in DTYPES:
        for kind in ("normal", "random", "repeating"):
            for heads, head_dims in SHAPES:
                for number, lengths in enumerate(PAGES):
                    tokens = sum(lengths) + TAILS[number % len(TAILS)]
                    given = layer(heads, head_dims, tokens, dtype=dtype, kind=kind)
                    yield given, lengths


def main() -> None:
    for given, lengths in cases():
        for level in (0, 1):
            for at_end in (True, False):
                keys, values = (
                    guarded_pages(part, lengths, level, at_end)
                    for part in (given.keys, given.values)
                )
                assert_right(given, decode_attention(given.q, keys, values, threads=1))
    print("done")


if __name__ == "__main__":
    main()
