"""A layer of the compressed cache: what transformers' DynamicLayer does, on two lanes.

A block that comes due while single tokens arrive is packed by a background thread. It is taken over
at the next update, or before anything else that is asked of the layer, whichever comes first, and
never later or earlier than that: order, bytes and memory do not depend on the thread's speed.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer
from transformers.configuration_utils import PreTrainedConfig

from gaac.hf.attention import is_fused
from gaac.hf.background import Pending, use_here
from gaac.hf.blocks import Packer
from gaac.hf.lane import Lane
from gaac.hf.lazy import LazyStates
from gaac.hf.versions import UnboundedLength

Lanes = dict[str, Lane]  # by side: "keys" and "values"
States = dict[str, torch.Tensor]


class BlockCompressedLayer(UnboundedLength, DynamicLayer):
    """Keys and values of one full-attention layer, in packed blocks and a raw tail.

    key_packer, value_packer: None keeps that side raw. `keys` and `values` always give the full
    [batch, kv_heads, tokens, head_dim] tensors, decoded at each reading: dozens of model files
    read them directly.
    config: of the model that attends; it tells whether attention reads pages. None: it does not.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        key_packer: Packer | None,
        value_packer: Packer | None,
        config: PreTrainedConfig | None = None,
    ) -> None:
        self._packers = {"keys": key_packer, "values": value_packer}
        packers = (key_packer, value_packer)
        self._foreign = any(packer is not None and packer.codec is not None for packer in packers)
        self._config = config
        self._lanes: Lanes = {}
        self._pending: Pending[Lanes] | None = None
        self._tokens = 0
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return self.__dict__.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockCompressedLayer:
        twin = self.fork()
        twin._lanes = copy.deepcopy(twin._lanes, memo)
        return twin

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, kv_heads, tokens, head_dim], all of it; None before the first update."""
        lanes = self._settled()
        return lanes["keys"].full() if lanes else None

    @keys.setter
    def keys(self, value: None) -> None:
        self._refuse_assignment("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, kv_heads, tokens, head_dim], all of it; None before the first update."""
        lanes = self._settled()
        return lanes["values"].full() if lanes else None

    @values.setter
    def values(self, value: None) -> None:
        self._refuse_assignment("values", value)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of keys and of values; none before the first update."""
        return tuple(self._settled().values())

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

        Both [batch, kv_heads, new tokens, head_dim]; neither is kept nor written to. Where fused
        attention is on and one token is new, what is returned is unpacked only if it is used by
        anything else. If packing fails, here or before, nothing has been appended. What else models
        pass along is ignored, as the library's own layer does.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, states = self._settled(), {"keys": key_states, "values": value_states}
        fused = is_fused(self._config) and not self._foreign
        full, lanes = _grown(before, states, fused)
        self._lanes = lanes
        self._tokens += key_states.shape[-2]
        self.device = key_states.device
        if any(
            lane.blocks_due or (fused and lane.table is not before[name].table)
            for name, lane in lanes.items()
        ):
            self._pending = Pending(partial(_packed, lanes, fused), self.device)
        return full["keys"], full["values"]

    def flush(self) -> None:
        """Wait for the blocks that are being packed, and take them over.

        Raises what packing raised; the tokens are all still there, and later updates try again.
        """
        self._settled()

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
        self._lanes = {name: lane.crop(kept) for name, lane in self._settled().items()}
        self._tokens = kept

    def reset(self) -> None:
        """Drop everything; the next update starts anew, with any batch size or dtype."""
        self._lanes, self._pending = {}, None
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
        return copy.copy(self)  # lanes are replaced, never changed; see also __getstate__

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
        self._lanes = {name: lane.select(rows) for name, lane in self._settled().items()}

    def _move(self, device: torch.device) -> None:
        self._lanes = {name: lane.to(device) for name, lane in self._settled().items()}

    def _settled(self) -> Lanes:
        """The lanes, with whatever the background thread was given to do."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._lanes = pending.result()
            use_here(tensor for lane in self._lanes.values() for tensor in lane.tensors())
        return self._lanes

    def _refuse_assignment(self, name: str, value: Any) -> None:
        # The library's constructor assigns None.
        if value is not None or self._lanes:
            raise AttributeError(f"{name} of a compressed layer cannot be assigned: use update().")


def _grown(before: Lanes, states: States, fused: bool) -> tuple[States, Lanes]:
    """What attention is given, and the lanes that hold it; of a single token none is packed yet."""
    if states["keys"].shape[-2] > 1:
        appended = {name: before[name].append(new) for name, new in states.items()}
        full = {name: everything for name, (everything, _) in appended.items()}
        return full, {name: lane for name, (_, lane) in appended.items()}
    lanes = {name: before[name].grown(new) for name, new in states.items()}
    if fused and not (torch.is_grad_enabled() and _need_grad(states)):
        return {name: LazyStates.of(lane) for name, lane in lanes.items()}, lanes
    return {name: before[name].joined(new) for name, new in states.items()}, lanes


def _packed(lanes: Lanes, fused: bool) -> Lanes:
    """The lanes with every block packed that is due; if `fused`, with its place looked up too."""
    packed = {name: lane.packed() for name, lane in lanes.items()}
    if fused:
        for lane in packed.values():
            _ = lane.table.regions  # remembered there
    return packed


def _need_grad(states: States) -> bool:
    return any(new.requires_grad for new in states.values())
