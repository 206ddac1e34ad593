"""The raw tokens at the end of a lane, in a buffer with room for more.

Appending writes one token and copies nothing, until the room is used up. Tails are immutable to
their holders all the same: what a tail shows is never written again. Two copies of one share the
buffer; the first that appends owns its end, and the other moves to a buffer of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

LEAST_ROOM_TOKENS = 16
ROOM_SHARE = 16  # a longer tail gets a 16th of its length as room


class Tail:
    """The first tokens of a buffer, [batch, kv_heads, tokens, head_dim], values side by side.

    states: a view of them; its storage may be larger than what it shows by a 16th, or 16 tokens.
    """

    __slots__ = ("_buffer", "states", "tokens")

    def __init__(self, states: torch.Tensor, buffer: _Buffer | None = None) -> None:
        """states: kept as they are, neither copied nor ever written to."""
        self.states, self.tokens = states, states.shape[-2]
        self._buffer = buffer or _Buffer(states)

    @classmethod
    def copied(cls, states: torch.Tensor) -> Tail:
        """A tail of its own, without room: its storage is as long as the states."""
        return cls(states.clone(memory_format=torch.contiguous_format))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tail:
        return Tail.copied(self.states)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tail.copied, (self.states,)

    def append(self, states: torch.Tensor, most: int | None) -> Tail:
        """A tail with these states at its end; they are copied, and gradients end here.

        most: tokens after which the tail will be cut anyway, so that no room is needed for more;
        None if it grows without end.
        """
        tokens = self.tokens + states.shape[-2]
        buffer = self._buffer
        if not buffer.take(self.tokens, tokens):
            buffer = _Buffer(_with_room(self.states, _room_tokens(tokens, most)), written=tokens)
        new = buffer.tensor.narrow(-2, self.tokens, tokens - self.tokens)
        new.copy_(states.detach())
        return Tail(buffer.tensor.narrow(-2, 0, tokens), buffer)


class _Buffer:
    """A tensor of which the first `written` tokens are taken."""

    __slots__ = ("_lock", "tensor", "written")

    def __init__(self, tensor: torch.Tensor, written: int | None = None) -> None:
        self.tensor = tensor
        self.written = tensor.shape[-2] if written is None else written
        self._lock = threading.Lock()  # copies may be used by several threads

    def take(self, start: int, stop: int) -> bool:
        """Whether the tokens from start to stop are free; they are the caller's from then on."""
        with self._lock:
            free = self.written == start and stop <= self.tensor.shape[-2]
            if free:
                self.written = stop
            return free


def _room_tokens(tokens: int, most: int | None) -> int:
    room = tokens + max(LEAST_ROOM_TOKENS, tokens // ROOM_SHARE)
    return room if most is None else max(tokens, min(room, most))


def _with_room(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """The states at the start of a new tensor for so many tokens."""
    shape = (*states.shape[:-2], tokens, states.shape[-1])
    with torch.inference_mode(False):  # else it could not be written to outside of that mode
        buffer = torch.empty(shape, dtype=states.dtype, device=states.device)
    buffer.narrow(-2, 0, states.shape[-2]).copy_(states)
    return buffer
