"""gaac: lossless compression of KV tensors in float16, bfloat16 and float8.

`encode` and `decode` take tensors, `compress` and `decompress` take bytes, `inspect` reads a
header. Importing this package imports numpy and xxhash, and neither torch nor transformers; numba
is imported when a first segment is coded.
"""

from __future__ import annotations

import sys

from gaac.codec import LEVELS, compress, decode, decompress, encode, inspect
from gaac.errors import CorruptFrame, GaacError, UnsupportedFrame, UnsupportedTensor
from gaac.frame import FrameInfo
from gaac.rope import Rope

if sys.byteorder != "little":
    raise ImportError("gaac needs a little-endian machine: it keeps words as they lie in memory.")

__all__ = [
    "LEVELS",
    "CorruptFrame",
    "FrameInfo",
    "GaacError",
    "Rope",
    "UnsupportedFrame",
    "UnsupportedTensor",
    "compress",
    "decode",
    "decompress",
    "encode",
    "inspect",
]
