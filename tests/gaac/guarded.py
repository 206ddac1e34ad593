"""Arrays between two pages that no one may touch: a read or write outside them ends the process."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty(shape: Any, dtype: Any, at_end: bool = True) -> np.ndarray:
    """An array of exact size, its end (else its start) at a guard page."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    whole = np.frombuffer(memory, np.uint8)
    for guard in (0, PAGE + room):
        if _libc.mprotect(whole.ctypes.data + guard, PAGE, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE + (room - size if at_end else 0)
    return whole[start : start + size].view(dtype).reshape(shape)


class Allocator:
    """A stand-in for the module numpy that places each array at one of its guard pages."""

    def __init__(self) -> None:
        self._at_end = itertools.cycle((True, False))

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return empty(shape, dtype, next(self._at_end))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def copies(array: np.ndarray) -> list[np.ndarray]:
    """The same array twice, its end and its start at a guard page."""
    made = [empty(array.shape, array.dtype, at_end) for at_end in (True, False)]
    for copy in made:
        copy[...] = array
    return made
