"""The codecs that are compared: gaac at every level, and the peers that are installed.

Each is called as directly as its Python interface allows; whatever has to be copied or converted
to suit it happens in `prepare`, which is not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from kv_pieces import Piece

import gaac


@dataclass(frozen=True)
class Contender:
    """Something that codes one piece.

    prepare: makes its input. encode: from that to a blob. decode: back, to a tensor or a buffer.
    threads: how many it was told to use.
    """

    name: str
    threads: int
    prepare: Callable[[Piece], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def ours(level: int, threads: int) -> Contender:
    def encode(piece: Piece) -> bytes:
        return gaac.encode(
            piece.tensor, level=level, kind=piece.part, rope=piece.rope, threads=threads
        )

    name = f"gaac {level} {gaac.LEVELS[level]}"
    return Contender(
        name, threads, lambda piece: piece, encode, partial(gaac.decode, threads=threads)
    )


def zipnn(dtype: str, threads: int) -> Contender:
    """Huffman codes of the high bytes; it overwrites what it compresses, so calls need a copy."""
    codec = import_module("zipnn").ZipNN(
        method="HUFFMAN", input_format="byte", bytearray_dtype=dtype, threads=threads
    )
    return Contender(
        "zipnn",
        threads,
        lambda piece: bytearray(piece.to_bytes()),
        codec.compress,
        codec.decompress,
    )


def pcodec(dtype: str, threads: int) -> Contender:
    """Level 8, its default, on 16-bit integers, which did better than on floats."""
    module = import_module("pcodec")
    encode = partial(module.standalone.simple_compress, config=module.ChunkConfig())
    return Contender("pcodec u16", 1, _words, encode, module.standalone.simple_decompress)


def blosc2(dtype: str, threads: int) -> Contender:
    module = import_module("blosc2")
    encode = partial(module.compress, typesize=2, clevel=1, codec=module.Codec.ZSTD)

    def prepare(piece: Piece) -> bytes:
        module.set_nthreads(threads)
        return piece.to_bytes()

    return Contender("blosc2 zstd-1 shuffle", threads, prepare, encode, module.decompress)


def zstd(dtype: str, threads: int) -> Contender:
    module = import_module("zstandard")
    encode, decode = module.ZstdCompressor(level=1).compress, module.ZstdDecompressor().decompress
    return Contender("zstd-1", 1, Piece.to_bytes, encode, decode)


def lz4(dtype: str, threads: int) -> Contender:
    module = import_module("lz4.frame")
    return Contender("lz4 frame", 1, Piece.to_bytes, module.compress, module.decompress)


PEERS = (zipnn, pcodec, blosc2, zstd, lz4)


def contenders(dtype: str, threads: int) -> list[Contender]:
    """All that can use this many threads. A peer that is not installed is named on stderr."""
    found = [ours(level, threads) for level in gaac.LEVELS]
    for make in PEERS:
        try:
            found.append(make(dtype, threads))
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    return [contender for contender in found if contender.threads == threads]


def _words(piece: Piece) -> np.ndarray:
    return np.frombuffer(piece.to_bytes(), np.uint16)
