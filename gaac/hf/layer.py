"""A layer of the compressed cache: what transformers' DynamicLayer does, on two lanes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from gaac.hf.blocks import Packer
from gaac.hf.lane import Lane
from gaac.hf.versions import UnboundedLength


class BlockCompressedLayer(UnboundedLength, DynamicLayer):
    """Keys and values of one full-attention layer, in packed blocks and a raw tail.

    key_packer, value_packer: None keeps that side raw. `keys` and `values` always give the full
    [batch, kv_heads, tokens, head_dim] tensors, decoded at each reading: dozens of model files
    read them directly.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, key_packer: Packer | None, value_packer: Packer | None) -> None:
        self._packers = {"keys": key_packer, "values": value_packer}
        self._lanes: dict[str, Lane] = {}
        self._tokens = 0
        super().__init__()

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, kv_heads, tokens, head_dim], all of it; None before the first update."""
        return self._lanes["keys"].full() if self._lanes else None

    @keys.setter
    def keys(self, value: None) -> None:
        self._refuse_assignment("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, kv_heads, tokens, head_dim], all of it; None before the first update."""
        return self._lanes["values"].full() if self._lanes else None

    @values.setter
    def values(self, value: None) -> None:
        self._refuse_assignment("values", value)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of keys and of values; none before the first update."""
        return tuple(self._lanes.values())

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtypes and device from the first states.

        Raises gaac.UnsupportedTensor where gaac is to pack a dtype that it has no codec for.
        """
        lanes = {}
        for name, states in (("keys", key_states), ("values", value_states)):
            packer = self._packers[name]
            if packer is not None:
                packer.check_dtype(states.dtype, "KV")
            lanes[name] = Lane.like(states, name, packer)
        self._lanes = lanes
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new states; all keys and all values, for this call alone.

        Both [batch, kv_heads, new tokens, head_dim]; neither is kept nor written to. If packing
        fails, nothing has been appended. What else models pass along is ignored, as the library's
        own layer does.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, key_lane = self._lanes["keys"].append(key_states)
        values, value_lane = self._lanes["values"].append(value_states)
        self._lanes = {"keys": key_lane, "values": value_lane}
        self._tokens += key_states.shape[-2]
        self.device = key_states.device
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens held, counted rather than read off a tensor."""
        return self._tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; 0 removes nothing.

        Raises ValueError for a positive number, which older versions of transformers took as a
        target length. The raw window may be shorter afterwards, until new tokens fill it.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding may count in a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number, the tokens to remove."
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        kept = max(0, self._tokens + tokens_to_remove)
        self._lanes = {name: lane.crop(kept) for name, lane in self._lanes.items()}
        self._tokens = kept

    def reset(self) -> None:
        """Drop everything; the next update starts anew, with any batch size or dtype."""
        self._lanes = {}
        self._tokens = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace batch row i by row beam_idx[i], sharing the blocks."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times, sharing the blocks."""
        if self._tokens:
            self._select(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows that `indices` (numbers or a mask) names, sharing the blocks."""
        self._select(indices)

    def offload(self) -> None:
        """Move blocks and tails to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move blocks and tails back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    def fork(self) -> BlockCompressedLayer:
        """An independent layer with the same content, all of it shared until one of them grows."""
        return copy.copy(self)  # lanes are replaced, never changed

    @property
    def _batch(self) -> int:
        return len(self._lanes["keys"].rows)

    def _select(self, indices: Any) -> None:
        if not self._tokens:
            return
        if isinstance(indices, torch.Tensor):
            indices = indices.cpu()
        rows = torch.arange(self._batch)[indices].tolist()
        if not rows:
            raise ValueError("no batch row is selected: call reset() to empty the cache.")
        self._lanes = {name: lane.select(rows) for name, lane in self._lanes.items()}

    def _move(self, device: torch.device) -> None:
        self._lanes = {name: lane.to(device) for name, lane in self._lanes.items()}

    def _refuse_assignment(self, name: str, value: Any) -> None:
        # The library's constructor assigns None.
        if value is not None or self._lanes:
            raise AttributeError(f"{name} of a compressed layer cannot be assigned: use update().")
