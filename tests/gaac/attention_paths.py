"""Decode attention on the kernel path of this process: python -m tests.gaac.attention_paths

Ends with "done" if every case is right, has the same bits on pages of level 0 and of level 1, and
the same bits for any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gaac.attention import decode_attention
from tests.gaac.attention_cases import Layer, assert_right, layer, left_padded, paged
from tests.gaac.data import DTYPES, same

SHAPES = [
    *(((9, 3), (64, 64)), ((8, 2), (128, 128)), ((8, 1), (256, 256)), ((4, 4), (80, 80))),
    *(((6, 2), (96, 96)), ((2, 1), (192, 128)), ((17, 1), (64, 64)), ((4, 2), (9, 5))),
    ((1, 1), (512, 512)),
]
CUTS: list[tuple[int | None, int]] = [(256, 0), (256, 63), (100, 1), (600, 0), (None, 0)]
LEVELS, THREADS = (0, 1), (1, 2, 3, None)


def cases() -> Iterator[tuple[str, Layer]]:
    for dtype in DTYPES:
        for shape in SHAPES:
            yield f"{dtype} {shape}", layer(*shape, tokens=600, dtype=dtype)
        for kind in ("random", "repeating"):
            yield f"{dtype} {kind}", layer(tokens=600, batch=2, dtype=dtype, kind=kind)
        for q_dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield f"{dtype} q {q_dtype}", layer(tokens=600, dtype=dtype, q_dtype=q_dtype)
        for tokens in (1, 63, 64, 65, 1000):
            yield f"{dtype} {tokens} tokens", layer(tokens=tokens, batch=2, dtype=dtype)
        yield from options(dtype)


def options(dtype: str) -> Iterator[tuple[str, Layer]]:
    given = layer(tokens=600, batch=3, dtype=dtype, q_dtype=torch.float32)
    padded = left_padded((0, 64, 600), 600)
    holes = torch.rand(3, 600, generator=torch.Generator().manual_seed(0)) > 0.3
    sloping = (-0.02 * torch.arange(600)).flip(0).repeat(3, 1)
    for name, chosen in {
        "padding": {"mask": padded},
        "padding and sinks": {"mask": padded, "sinks": torch.linspace(-3, 3, 9)},
        "holes": {"mask": holes},
        "bias": {"mask": sloping.masked_fill(~padded, -math.inf)},
        "softcap": {"softcap": 5.0, "scaling": 0.7},
        "all": {"softcap": 20.0, "mask": holes, "sinks": torch.full((9,), 1.0)},
        "steep": {"scaling": 40.0},
    }.items():
        yield f"{dtype} {name}", given.having(**chosen)


def check(name: str, given: Layer, cut: tuple[int | None, int]) -> None:
    page_tokens, tail_tokens = cut
    tail_tokens = min(tail_tokens, given.tokens)
    results = {}
    for level in LEVELS:
        keys, values = (
            paged(part, page_tokens, tail_tokens, level) for part in (given.keys, given.values)
        )
        for threads in THREADS:
            found = decode_attention(given.q, keys, values, threads=threads, **given.options)
            results[level, threads] = found
    first = results[0, 1]
    assert_right(given, first)
    for key, other in results.items():
        assert same(words(first), words(other)), f"{name}, {cut}: level and threads {key} differ"


def words(value: torch.Tensor) -> torch.Tensor:
    """The bits of a result, two halves of them for float32."""
    return value.contiguous().view(torch.bfloat16) if value.element_size() == 4 else value


def main() -> None:
    for name, given in cases():
        shaped = " (" in name
        for cut in CUTS[:2] if shaped else CUTS:
            try:
                check(name, given, cut)
            except AssertionError as error:
                raise SystemExit(f"{name}, {cut}: {error}") from error
    print("done")


if __name__ == "__main__":
    main()
