"""What callers hand in, seen as numpy views of its bits: bytes-like objects, tensors, arrays.

Nothing here writes to what it is given, and torch is looked up only where the caller imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from gaac.errors import UnsupportedTensor
from gaac.header import DTYPE_CODES, MAX_NDIM, VALUE_BYTES

if TYPE_CHECKING:
    import torch

_NAMES = ", ".join(DTYPE_CODES)


def as_bytes(data: Any, name: str) -> np.ndarray:
    """A uint8 view of a bytes-like object, copied only where it has gaps or lies on a device."""
    if type(data) is bytes and data:
        return np.frombuffer(data, np.uint8)
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(data, torch_module.Tensor):
        if data.dtype != torch_module.uint8:
            raise TypeError(f"{name} is a {data.dtype} tensor: give bytes, or use gaac.encode.")
        view = np.ascontiguousarray(data.numpy(force=True)).reshape(-1)
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
    """A view of a tensor's bits, uint16 or uint8, strides kept, and the name of its dtype."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        name = check_tensor(tensor)
        bits = torch_module.uint16 if VALUE_BYTES[name] == 2 else torch_module.uint8
        view: np.ndarray = tensor.detach().cpu().view(bits).numpy()
        return view, name
    if isinstance(tensor, np.ndarray):
        name = tensor.dtype.name
        _check_kind(name, tensor.ndim)
        if not tensor.dtype.isnative:
            tensor = tensor.astype(tensor.dtype.newbyteorder("="))
        return np.asarray(tensor).view(f"u{VALUE_BYTES[name]}"), name
    kind = type(tensor).__name__
    raise UnsupportedTensor(
        f"encode takes a torch tensor or a numpy array, not {kind}: use gaac.compress for bytes."
    )


def check_dtype(dtype: Any) -> None:
    """Raise UnsupportedTensor unless this is the name of a dtype that gaac codes."""
    if not isinstance(dtype, str) or dtype not in DTYPE_CODES:
        raise UnsupportedTensor(f"dtype {dtype!r} is not supported: use {_NAMES}.")


def check_tensor(tensor: torch.Tensor) -> str:
    """The name of a torch tensor's dtype; raises UnsupportedTensor unless gaac can code it."""
    name = str(tensor.dtype)[len("torch.") :]
    _check_kind(name, tensor.ndim)
    if tensor.layout != sys.modules["torch"].strided:
        raise UnsupportedTensor("The tensor is not dense: call .to_dense() on it first.")
    if tensor.is_meta:
        raise UnsupportedTensor("The tensor has no values: it is on the meta device.")
    return name


def is_on_device(tensor: Any) -> bool:
    """Whether this is a torch tensor on a CUDA device."""
    return bool(getattr(tensor, "is_cuda", False))


def _check_kind(dtype: str, ndim: int) -> None:
    if dtype not in DTYPE_CODES:
        raise UnsupportedTensor(
            f"The tensor is {dtype}: gaac codes {_NAMES} without loss, so convert it to one of "
            "them first if that loss is acceptable."
        )
    if not 1 <= ndim <= MAX_NDIM:
        raise UnsupportedTensor(
            f"The tensor has {ndim} axes: reshape it to between 1 and {MAX_NDIM}."
        )


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether values of a tensor share memory with each other along some axis."""
    spread = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for stride, size in spread)


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
    if not out.is_contiguous() and _is_expanded(out):
        raise UnsupportedTensor("out is an expanded view, whose values share memory: clone it.")
    if device is not None and torch.device(device).type != out.device.type:
        raise UnsupportedTensor(f"out is on {out.device}, device asks for {device}: give only one.")
