"""Inputs for the codec's tests: realistic KV, special values, tensors of any shape and stride."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

import gaac

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BYTE_DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
LEVELS = tuple(gaac.LEVELS)

# Words whose meaning is special in one format or the other: zeros, denormals, infinities, quiet
# and signalling NaNs with payloads, largest and smallest values.
SPECIAL = [
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00),
    *(0x7C01, 0x7DFF, 0x7E00, 0xFE55, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC1, 0xFFFF),
]


def tensor(words: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor with these bits, uint16 or uint8."""
    return torch.from_numpy(np.ascontiguousarray(words)).view({**DTYPES, **BYTE_DTYPES}[dtype])


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, for comparisons in which NaN payloads and -0.0 count."""
    return (
        value.detach().contiguous().view(torch.int16 if value.element_size() == 2 else torch.int8)
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def gaussian(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Normal values with a scale for each channel, as keys and values have."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randn(shape[-1], generator=generator))
    return (torch.randn(shape, generator=generator) * scale).to(DTYPES[dtype])


def repeating(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Values as the first layer's are: a token has the same rows wherever it stands."""
    tokens, vocabulary = shape[-2], max(shape[-2] // 3, 1)
    table = gaussian((*shape[:-2], vocabulary, shape[-1]), dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    return table[..., ids, :]


def random_words(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, shape, dtype=np.uint16)


# Parts of an array of at least (3, 100, 128), strided in every way that a tensor may be.
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "some rows": lambda whole: whole[:, 10:50, :64],
    "every other row": lambda whole: whole[:, ::2, :128],
    "some channels": lambda whole: whole[:, :, 3:67],
    "an odd width": lambda whole: whole[:, :, 3:60],
    "every other channel": lambda whole: whole[:, :, ::2],
    "one row": lambda whole: whole[:, 5:6, 7:100],
    "one channel": lambda whole: whole[:, :, 7:8],
    "blocks and rows exchanged": lambda whole: whole.transpose(1, 0, 2)[:5],
    "backwards": lambda whole: whole[::-1, ::-1],
    "the last axis first": lambda whole: whole.transpose(0, 2, 1),
}


@st.composite
def word_arrays(draw: st.DrawFn, max_values: int = 6000) -> np.ndarray:
    """uint16 arrays of one to five axes: normal, random, special or constant bits."""
    ndim = draw(st.integers(1, 5))
    last = draw(st.one_of(st.integers(1, 24), st.sampled_from([64, 80, 128, 511, 512])))
    shape = [last]
    for _ in range(ndim - 1):
        room = max(max_values // max(int(np.prod(shape)), 1), 1)
        shape.insert(0, draw(st.integers(0, min(room, 300))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pattern = draw(
        st.sampled_from(["normal16", "normalbf", "random", "special", "constant", "mix"])
    )
    if pattern == "random":
        return rng.integers(0, 65536, shape, dtype=np.uint16)
    if pattern == "special":
        return rng.choice(np.array(SPECIAL, np.uint16), shape)
    if pattern == "constant":
        return np.full(shape, draw(st.integers(0, 65535)), np.uint16)
    normal = rng.normal(size=shape).astype(np.float32) * np.exp2(rng.integers(-3, 4, last))
    if pattern == "normal16":
        return normal.astype(np.float16).view(np.uint16)
    words = (normal.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if pattern == "mix":
        where = rng.random(shape) < 0.05
        words[where] = rng.choice(np.array(SPECIAL, np.uint16), int(where.sum()))
    return words
