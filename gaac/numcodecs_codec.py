"""gaac as a numcodecs codec: for Zarr arrays of format 2, and other users of numcodecs.

`numcodecs.get_codec({"id": "gaac", "level": 3})` finds the class through the entry point that this
package declares; importing gaac alone does not import numcodecs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray, ndarray_copy

import gaac
from gaac.errors import GaacError
from gaac.header import MAX_WIDTH


class Gaac(Codec):
    """A lossless compressor of 16-bit floats and of the one-byte formats that gaac knows.

    level: a key of `gaac.LEVELS`.
    dtype: how to read the buffer's bytes, a dtype name as `gaac.compress` takes it; None takes the
    array's own. Whatever the dtype, the same bytes come back: a bfloat16 array that numpy holds as
    uint16 needs dtype="bfloat16" here.
    row: values per row, the head_dim where known; None takes the length of the axis that is
    contiguous in memory, for arrays of two axes or more.
    threads: how many to use, None for all cores; it does not change the bytes.
    Raises GaacError, or UnsupportedTensor for the dtype, at once if one of them is none of these.
    """

    codec_id = "gaac"

    def __init__(
        self,
        level: int = 3,
        dtype: str | None = None,
        row: int | None = None,
        threads: int | None = 1,
    ) -> None:
        gaac.compress(b"", level=level, dtype=dtype or "float16", row=row, threads=threads)
        self.level = level
        self.dtype = dtype
        self.row = row
        self.threads = threads

    def encode(self, buf: Any) -> bytes:
        """Compress an array or buffer that is contiguous, in C or Fortran order; it is only read.

        Raises UnsupportedTensor if dtype is None and the array's own is none that gaac codes,
        ValueError for an array with gaps, TypeError for one of objects.
        """
        array = ensure_contiguous_ndarray(buf, flatten=False)
        shape = array.shape if array.flags.c_contiguous else array.shape[::-1]
        return gaac.compress(
            ensure_contiguous_ndarray(array).view(np.uint8),
            level=self.level,
            dtype=self.dtype or array.dtype.name,
            row=self.row or row_of(shape),
            threads=self.threads,
        )

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Give back the bytes, or write them into `out`, an array of exactly their size.

        Raises CorruptFrame and UnsupportedFrame as `gaac.decompress` does, GaacError if `out` is of
        another size; then it is left as it was.
        """
        blob = ensure_contiguous_ndarray(buf).view(np.uint8)
        content = gaac.decompress(blob, threads=self.threads)
        if out is None:
            return content
        room = ensure_contiguous_ndarray(out).nbytes
        if room != len(content):
            raise GaacError(f"out has {room} bytes, the content {len(content)}: give an equal one.")
        return ndarray_copy(content, out)


def row_of(shape: tuple[int, ...]) -> int | None:
    """Values per row of an array of this shape; None where it has no axis to cut rows by."""
    return shape[-1] if len(shape) > 1 and 1 <= shape[-1] <= MAX_WIDTH else None
