"""The lossless codecs one can install, each at the setting that did best on real KV, one thread.

A peer turns a flat array of 16-bit words into bytes and back. numcodecs carries zstd, lz4 and
pcodec behind one interface; it has no blosc2, so that one is called directly.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Words = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(frozen=True)
class Peer:
    """A lossless codec: how it is set, which packages it needs, its two functions.

    compress(words, dtype) takes a flat uint16 array; decompress(data, dtype, count) gives one back.
    """

    setting: str
    packages: tuple[str, ...]
    compress: Callable[[Words, str], bytes]
    decompress: Callable[[memoryview, str, int], Words]

    def missing(self) -> str | None:
        """The packages that are not installed, as words for pip; None when all are there."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return " ".join(absent) or None


def available() -> list[str]:
    """The peers that can be used here."""
    return [name for name, peer in PEERS.items() if peer.missing() is None]


def words_of(tensor: torch.Tensor) -> Words:
    """A 16-bit tensor's bits as a flat uint16 array on the CPU; a private copy where needed."""
    import torch

    flat = tensor.detach().contiguous().view(torch.int16).cpu().reshape(-1)
    return flat.numpy().view(np.uint16)


def _zstd_compress(words: Words, dtype: str) -> bytes:
    from numcodecs import Zstd

    planes = words.view(np.uint8).reshape(-1, 2)
    high = bytes(Zstd(level=1).encode(np.ascontiguousarray(planes[:, 1])))
    return len(high).to_bytes(4, "little") + high + planes[:, 0].tobytes()


def _zstd_decompress(data: memoryview, dtype: str, count: int) -> Words:
    from numcodecs import Zstd

    size = int.from_bytes(data[:4], "little")
    planes = np.empty((count, 2), np.uint8)
    planes[:, 1] = np.frombuffer(Zstd().decode(data[4 : 4 + size]), np.uint8)
    planes[:, 0] = np.frombuffer(data[4 + size :], np.uint8)
    return planes.reshape(-1).view(np.uint16)


def _lz4() -> Any:
    from numcodecs import Blosc

    return Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)


def _blosc2_compress(words: Words, dtype: str) -> bytes:
    import blosc2

    shuffle = [blosc2.Filter.NOFILTER] * 5 + [blosc2.Filter.SHUFFLE]
    packed: bytes = blosc2.compress2(
        words,
        typesize=2,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        filters=shuffle,
        filters_meta=[0] * 6,
        nthreads=1,  # its pool costs more than a block of KV takes
    )
    return packed


def _blosc2_decompress(data: memoryview, dtype: str, count: int) -> Words:
    import blosc2

    return np.frombuffer(bytearray(blosc2.decompress2(bytes(data), nthreads=1)), np.uint16)


def _pcodec() -> Any:
    from numcodecs import PCodec

    return PCodec(level=8)


@functools.cache  # making one takes longer than a block of KV does
def _zipnn(dtype: str) -> Any:
    from zipnn import ZipNN

    return ZipNN(method="HUFFMAN", input_format="byte", bytearray_dtype=dtype, threads=1)


def _zipnn_compress(words: Words, dtype: str) -> bytes:
    # zipnn rewrites the buffer that it is given: it gets a copy of its own.
    return bytes(_zipnn(dtype).compress(bytearray(words.tobytes())))


def _zipnn_decompress(data: memoryview, dtype: str, count: int) -> Words:
    return np.frombuffer(bytearray(_zipnn(dtype).decompress(bytes(data))), np.uint16)


PEERS: dict[str, Peer] = {
    "zstd": Peer(
        "level 1 on the high bytes, low bytes raw",
        ("numcodecs",),
        _zstd_compress,
        _zstd_decompress,
    ),
    "lz4": Peer(
        "bit shuffle, level 5 (Blosc)",
        ("numcodecs",),
        lambda words, dtype: bytes(_lz4().encode(words)),
        lambda data, dtype, count: np.frombuffer(bytearray(_lz4().decode(data)), np.uint16),
    ),
    "blosc2": Peer("zstd level 1, byte shuffle", ("blosc2",), _blosc2_compress, _blosc2_decompress),
    "pcodec": Peer(
        "level 8 on 16-bit integers",
        ("numcodecs", "pcodec"),
        lambda words, dtype: bytes(_pcodec().encode(words)),
        lambda data, dtype, count: np.asarray(_pcodec().decode(bytes(data))).view(np.uint16),
    ),
    "zipnn": Peer("Huffman", ("zipnn",), _zipnn_compress, _zipnn_decompress),
}
