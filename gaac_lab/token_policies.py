"""Fewer tokens: caches that drop most of a prompt, and really free what they drop.

Whoever drops tokens decides before the question comes. `WindowLayer` keeps the last ones, with or
without the first few as attention sinks (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453);
`HeavyHitterLayer` keeps those that got the most attention so far (H2O, Zhang et al. 2023, arXiv
2306.14048). Original positions are kept: StreamingLLM numbers the held tokens anew, which matters
beyond the model's context only, and nothing here goes there.

Each query of a chunk of new tokens sees what was held before the chunk, and the chunk's own tokens
up to itself. Step by step a query sees the budget and itself; in a chunk of n, up to n - 1 more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gaac_lab.codec import KVCodec
from gaac_lab.lossy_layer import FixedRowsLayer, LossyLayer


class WindowLayer(LossyLayer):
    """The first `sinks` tokens and the last `window`, [batch, kv_heads, tokens, head_dim] each.

    Raises ValueError for a window below 1 or a negative number of sinks.
    """

    def __init__(self, window: int, sinks: int = 0) -> None:
        if window < 1 or sinks < 0:
            raise ValueError(
                f"window={window}, sinks={sinks}: keep at least the last token, and 0 or more of "
                "the first."
            )
        super().__init__()
        self.window, self.sinks = window, sinks

    @property
    def held_tokens(self) -> int:
        return min(self.cumulative_length, self.sinks + self.window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What was held and the new states, for this call; afterwards the budget is kept of it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = self._kept(keys), self._kept(values)
        return keys, values

    def _kept(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[-2] <= self.sinks + self.window:
            return states
        # cat copies even a single part, so nothing of the old storage stays alive.
        return torch.cat([states[..., : self.sinks, :], states[..., -self.window :, :]], dim=-2)


class PackedWindowLayer(WindowLayer):
    """A `WindowLayer` whose tokens lie losslessly packed between steps: the same bits, fewer bytes.

    Everything held is packed anew at every update, as its first block moves with the window: right
    for counting bytes, and slow. KV must be fp16 or bf16 (CodecError).
    """

    def __init__(self, window: int, sinks: int = 0, *, codec: KVCodec) -> None:
        self._codec = codec
        self._blobs: dict[str, torch.Tensor | None] = {}
        super().__init__(window, sinks)

    @property
    def keys(self) -> Any:
        """[batch, kv_heads, tokens, head_dim], unpacked at each reading."""
        return self._unpacked("keys")

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._pack("keys", states)

    @property
    def values(self) -> Any:
        """[batch, kv_heads, tokens, head_dim], unpacked at each reading."""
        return self._unpacked("values")

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._pack("values", states)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The two blobs."""
        yield from (blob for blob in self._blobs.values() if blob is not None)

    def _pack(self, name: str, states: torch.Tensor | None) -> None:
        if states is not None and states.numel():
            states = torch.frombuffer(bytearray(self._codec.encode(states)), dtype=torch.uint8)
        self._blobs[name] = states

    def _unpacked(self, name: str) -> torch.Tensor | None:
        blob = self._blobs[name]
        if blob is None or not blob.numel():
            return blob
        return self._codec.decode(blob).to(self.device)


class HeavyHitterLayer(FixedRowsLayer):
    """Per KV head, the `heavy` tokens that got the most attention, and the last `recent`.

    Attention is summed over all queries so far and over the query heads that share the KV head, in
    float32. It is known only after the model has attended, so `observe` must follow each `update`
    (run the model inside `gaac_lab.attention_weights.attending`). Early tokens have had more
    queries to be seen by, which favours them; H2O has it so.
    Raises ValueError for heavy or recent below 1.
    """

    def __init__(self, heavy: int, recent: int) -> None:
        if heavy < 1 or recent < 1:
            raise ValueError(
                f"heavy={heavy}, recent={recent}: keep at least one token of each kind."
            )
        super().__init__()
        self.heavy, self.recent = heavy, recent
        self._received: torch.Tensor | None = None
        self._waits = False

    @property
    def held_tokens(self) -> int:
        return min(self.cumulative_length, self.heavy + self.recent)

    def tensors(self) -> Iterator[torch.Tensor]:
        """K, V and the attention that each token got."""
        yield from super().tensors()
        if self._received is not None:
            yield self._received

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; nothing is dropped before `observe`. RuntimeError if that was left out before."""
        if self._waits:
            raise RuntimeError(
                "Heavy hitters need the attention weights of every step: run the model inside "
                "gaac_lab.attention_weights.attending."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._received = torch.zeros(
                (*key_states.shape[:2], 0), dtype=torch.float32, device=key_states.device
            )
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        self.cumulative_length += key_states.shape[-2]
        self._waits = True
        return self.keys, self.values

    def observe(self, received: torch.Tensor) -> None:
        """Add the attention that each token just got, and drop what is over the budget.

        received: [batch, kv_heads, tokens], float32, for the tokens that `update` returned.
        """
        assert self._received is not None
        total = received.clone()
        total[..., : self._received.shape[-1]] += self._received
        tokens = total.shape[-1]
        if tokens > self.heavy + self.recent:
            heavy = total[..., : tokens - self.recent].topk(self.heavy, dim=-1).indices
            recent = torch.arange(tokens - self.recent, tokens, device=total.device)
            kept = torch.cat([heavy.sort(dim=-1).values, recent.expand(*heavy.shape[:2], -1)], -1)
            total = total.gather(-1, kept)
            self.keys = _gathered(self.keys, kept)
            self.values = _gathered(self.values, kept)
        self._received, self._waits = total, False

    def reset(self) -> None:
        """Drop everything; the next update starts anew."""
        super().reset()
        self._received, self._waits = None, False


def _gathered(states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The tokens `kept` [batch, kv_heads, n] of [batch, kv_heads, tokens, head_dim] states."""
    return states.gather(-2, kept.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))
