"""Keys or values of one decode step as a tensor without storage, which attention reads as pages.

A cache hands nothing but tensors to the model. This one says its shape, dtype and device, carries
the packed pages to the attention function, and turns into an ordinary tensor for whoever else uses
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gaac.hf.lane import Lane
from gaac.pages import Pages


class LazyStates(torch.Tensor):
    """[batch, kv_heads, tokens, head_dim] of a lane, which is unpacked at the first use.

    Once opened it stays so: an operation may have written into it, and the pages would not know.
    """

    _lane: Lane
    _opened: torch.Tensor | None

    @staticmethod
    def of(lane: Lane) -> LazyStates:
        """The content of a lane as it is now; what the lane's holders do later does not show."""
        tail = lane.tail
        shape = (*tail.shape[:-2], lane.tokens, tail.shape[-1])
        states: LazyStates = torch.Tensor._make_wrapper_subclass(
            LazyStates, shape, dtype=tail.dtype, device=tail.device
        )
        states._lane, states._opened = lane, None
        return states

    @property
    def pages(self) -> Pages | None:
        """The packed pages and the raw tail; None once the tensor has been opened."""
        return self._lane.pages if self._opened is None else None

    def opened(self) -> torch.Tensor:
        """An ordinary tensor of the same content, the same one at every call."""
        if self._opened is None:
            with torch.inference_mode(False), torch.no_grad():
                self._opened = self._lane.full()
        return self._opened

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_opened_all(args), **_opened_all(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        # For callers in C++; Python's have gone through __torch_function__.
        return func(*_opened_all(args), **_opened_all(kwargs or {}))


def _opened_all(values: Any) -> Any:
    return tree_map_only(LazyStates, LazyStates.opened, values)


# What can be said of the tensor without opening it.
_DESCRIBING = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
        ),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size),
        torch.Tensor.is_floating_point,
    }
)
