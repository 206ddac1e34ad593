"""What the lossy caches have in common: layers that have seen more than they hold.

They stand in transformers' place of `DynamicLayer`, behind the same interface, so that a model runs
on them unchanged. Two limits: prompts without padding, since a cache never learns which of the
tokens it dropped were padding, and no way back (`crop`), since what was dropped or rounded is gone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from gaac.hf.accounting import storage_bytes


class LossyLayer(DynamicLayer):
    """A layer whose length is a counter: `held_tokens` of the `cumulative_length` tokens seen.

    The model takes positions from the counter, so a token keeps its own position whatever is
    dropped around it. To the mask all that is held lies right before the new tokens, and hence is
    visible to each of them, while the new tokens see each other causally.
    """

    is_croppable = False
    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.cumulative_length = 0

    @property
    @abstractmethod
    def held_tokens(self) -> int:
        """Tokens whose K and V are here."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that this layer keeps alive; all of them count as stored."""
        yield self.keys
        yield self.values

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that attention will see, position that the mask gives the first of them)."""
        return self.held_tokens + query_length, self.cumulative_length - self.held_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Refused with RuntimeError: what was dropped or rounded cannot be brought back."""
        raise RuntimeError(f"{type(self).__name__} cannot go back: start with an empty cache.")


class FixedRowsLayer(LossyLayer):
    """A layer whose batch rows stay as they came: it keeps more of them than K and V."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refused with RuntimeError, as are the other changes of batch rows."""
        raise RuntimeError(f"{type(self).__name__} knows no beams: decode without them.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.LongTensor([]))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(torch.LongTensor([]))


class LossyCache(DynamicCache):
    """A DynamicCache with `make_layer()` in the place of each layer that keeps every token.

    Layers that slide, share, or carry a recurrent state stay the library's. Raises ValueError for a
    model in which no layer keeps every token.
    """

    layers: list[Any]

    def __init__(self, config: Any, make_layer: Callable[[], LossyLayer]) -> None:
        super().__init__(config=config)
        self.layers = [
            make_layer() if type(layer) is DynamicLayer else layer for layer in self.layers
        ]
        if not any(isinstance(layer, LossyLayer) for layer in self.layers):
            raise ValueError(
                "No layer of this model keeps every token, so there is nothing to drop or round: "
                "choose a model with full attention."
            )

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storages that hold K and V, with scales and scores where there are any."""
        return storage_bytes(tensor for layer in self.layers for tensor in _tensors(layer))


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    if isinstance(layer, LossyLayer):
        if layer.is_initialized:
            yield from layer.tensors()
        return
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            yield tensor
