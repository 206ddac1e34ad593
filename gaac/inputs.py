"""What callers hand in, seen as numpy views of its bits: bytes-like objects, tensors, arrays.

Nothing here writes to what it is given, and torch is looked up only where the caller imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from gaac.errors import UnsupportedTensor
from gaac.frame import DTYPE_CODES, MAX_NDIM

if TYPE_CHECKING:
    import torch


def as_bytes(data: Any, name: str) -> np.ndarray:
    """A uint8 view of a bytes-like object, copied only where it has gaps or lies on a device."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(data, torch_module.Tensor):
        if data.dtype != torch_module.uint8:
            raise TypeError(f"{name} is a {data.dtype} tensor: give bytes, or use gaac.encode.")
        view: np.ndarray = data.detach().cpu().reshape(-1).numpy()
        return view
    try:
        memory = memoryview(data)
    except TypeError:
        kind = type(data).__name__
        raise TypeError(f"{name} is of type {kind}: give a bytes-like object.") from None
    if memory.nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer(memory if memory.c_contiguous else memory.tobytes(), np.uint8)


def as_words(tensor: Any) -> tuple[np.ndarray, str]:
    """A uint16 view of a tensor's bits, strides kept, and the name of its dtype."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        name = str(tensor.dtype).removeprefix("torch.")
        _check_tensor(name, tensor.ndim)
        if tensor.layout != torch_module.strided:
            raise UnsupportedTensor("The tensor is not dense: call .to_dense() on it first.")
        if tensor.is_meta:
            raise UnsupportedTensor("The tensor has no values: it is on the meta device.")
        bits = tensor.detach().cpu().view(torch_module.int16)
        return bits.numpy().view(np.uint16), name
    if isinstance(tensor, np.ndarray):
        name = tensor.dtype.name
        _check_tensor(name, tensor.ndim)
        if not tensor.dtype.isnative:
            tensor = tensor.astype(tensor.dtype.newbyteorder("="))
        return np.asarray(tensor).view(np.uint16), name
    kind = type(tensor).__name__
    raise UnsupportedTensor(
        f"encode takes a torch tensor or a numpy array, not {kind}: use gaac.compress for bytes."
    )


def _check_tensor(dtype: str, ndim: int) -> None:
    if dtype not in DTYPE_CODES:
        raise UnsupportedTensor(
            f"The tensor is {dtype}: gaac codes float16 and bfloat16 without loss, so convert it "
            "to one of them first if that loss is acceptable."
        )
    if not 1 <= ndim <= MAX_NDIM:
        raise UnsupportedTensor(
            f"The tensor has {ndim} axes: reshape it to between 1 and {MAX_NDIM}."
        )


def check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
    """Raise UnsupportedTensor unless `out` can take the content of a blob."""
    import torch

    if not isinstance(out, torch.Tensor):
        raise UnsupportedTensor(f"out is of type {type(out).__name__}: give a torch tensor.")
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise UnsupportedTensor(
            f"out is {out.dtype} {tuple(out.shape)}, the blob holds {dtype} {shape}: give a tensor "
            "of that shape and dtype."
        )
    spread = zip(out.stride(), shape, strict=True)
    if out.numel() and any(stride == 0 and size > 1 for stride, size in spread):
        raise UnsupportedTensor("out is an expanded view, whose values share memory: clone it.")
    if device is not None and torch.device(device).type != out.device.type:
        raise UnsupportedTensor(f"out is on {out.device}, device asks for {device}: give only one.")
