"""Which kernels code a tensor that lies on a device, and how streams travel there and back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType

import numpy as np
import torch

from gaac.kernels import cpu
from gaac.levels.base import FORMATS, Hints
from gaac.levels.packed import Packed

_log = logging.getLogger("gaac")


def packed_on_device(device: torch.device | str | int) -> ModuleType | None:
    """Level 1's kernels for this device, `gaac.kernels.packed_triton`, or None: use the CPU.

    None where the device is not CUDA, Triton cannot be imported, GAAC_KERNELS=numpy forbids
    compiled code, or the kernels do not give what the CPU gives when they are first tried on the
    device; the last two are logged, once, as a warning. The first call for a device compiles the
    kernels, which takes seconds unless Triton has them in its cache.
    """
    place = torch.device(device)
    if place.type != "cuda" or cpu.path() == "numpy":
        return None
    return _tried(place)


def to_device(streams: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copy streams, uint8 with one axis, to a device, in one transfer."""
    joined = torch.from_numpy(np.concatenate(streams)).to(device)
    return list(joined.split([len(stream) for stream in streams]))


def to_host(streams: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copy streams, uint8 with one axis, from a device, in one transfer."""
    joined = torch.cat(list(streams)).cpu().numpy()
    return np.split(joined, list(accumulate(len(stream) for stream in streams))[:-1])


@functools.cache
def _tried(device: torch.device) -> ModuleType | None:
    """The kernels, if they can be imported and work on this device."""
    try:
        from gaac.kernels import packed_triton

        trouble = None if _agrees(packed_triton, device) else "its results differ from the CPU's"
    except Exception as error:  # Triton, its compiler and the driver each raise their own kinds
        trouble = f"{type(error).__name__}: {error}"
    if trouble is None:
        return packed_triton
    _log.warning(
        "gaac codes tensors on %s on the CPU, since Triton fails there: %s", device, trouble
    )
    return None


def _agrees(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernels code a small segment of each format as the CPU does, and decode it."""
    numbers = np.arange(2 * 65 * 64).reshape(2, 65, 64)
    for fmt in FORMATS.values():
        # A multiplicative hash, so that every exponent, and so every code, comes up.
        words = (numbers * 40503 >> 4).astype(np.uint16 if fmt.word_bytes == 2 else np.uint8)
        expected = Packed().encode(words, fmt, Hints())
        source = torch.from_numpy(words.view(np.int16 if fmt.word_bytes == 2 else np.uint8))
        streams = kernels.encode(source.to(device), fmt)
        out = torch.zeros_like(source, device=device)
        kernels.decode(streams, out, fmt)
        same = map(np.array_equal, expected, to_host(streams))
        if not all(same) or not torch.equal(out.cpu(), source):
            return False
    return True
