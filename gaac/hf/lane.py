"""One layer's keys, or its values: packed blocks followed by a raw tail.

Lanes are never changed in place. Every operation gives a new one that shares blocks with the old,
so an update that fails half-way leaves the cache as it was, and a fork costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from gaac.hf.blocks import Block, Packer


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Keys or values of one layer, [batch, kv_heads, tokens, head_dim] in pieces.

    name: "keys" or "values", for messages. packer: None keeps everything in the raw tail.
    rows: per batch row its blocks, oldest first, as many in each row and block_tokens long.
    tail: the tokens after them, raw, in a tensor that owns exactly its own storage.
    """

    name: str
    packer: Packer | None
    rows: tuple[tuple[Block, ...], ...]
    tail: torch.Tensor

    @staticmethod
    def like(states: torch.Tensor, name: str, packer: Packer | None) -> Lane:
        """An empty lane for states of this shape, dtype and device."""
        shape = (*states.shape[:-2], 0, states.shape[-1])
        return Lane(name, packer, ((),) * states.shape[0], states.new_empty(shape))

    @property
    def packed_tokens(self) -> int:
        """Tokens that lie in blocks."""
        return self._blocks * self.packer.block_tokens if self.packer else 0

    @property
    def tokens(self) -> int:
        """Tokens held, packed and raw."""
        return self.packed_tokens + self.tail.shape[-2]

    @property
    def raw_bytes(self) -> int:
        """Bytes that the tokens held would take uncompressed, every batch row counted."""
        per_token = self.tail.element_size() * self.tail.shape[-1]
        for size in self.tail.shape[:-2]:
            per_token *= size
        return per_token * self.tokens

    def tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor that this lane keeps alive; one that rows share comes once a row."""
        yield self.tail
        for row in self.rows:
            for block in row:
                yield block.payload

    def full(self) -> torch.Tensor:
        """All tokens as one tensor, decoded anew (the tail itself if nothing is packed)."""
        return self._joined(None) if self.packed_tokens else self.tail

    def append(self, states: torch.Tensor) -> tuple[torch.Tensor, Lane]:
        """All tokens with `states` at the end, as one tensor, and the lane that holds them.

        states: [batch, kv_heads, new tokens, head_dim]; neither kept nor written to. What comes
        back is laid out as the library's own layer would give it, so that attention computes the
        same bits. Gradients reach `states`, not what earlier calls have stored. Raises ValueError
        for another batch size, head count, head_dim or dtype than the lane holds.
        """
        lane = self if self.tokens else Lane.like(states, self.name, self.packer)
        lane = lane.to(states.device)
        lane._check_fits(states)
        full = lane._joined(states) if lane.tokens else states.contiguous()
        held = full.detach()
        rows, packed = lane._with_due_blocks(held)
        # Without blocks the whole tensor is the tail: keep it, unless it is the caller's own.
        owned = packed == 0 and full is not states
        return full, replace(lane, rows=rows, tail=held if owned else _copied(held, packed))

    def crop(self, tokens: int) -> Lane:
        """The lane without everything after the first `tokens` tokens.

        A block that the cut goes through is opened, and its first part becomes the tail.
        """
        packed = self.packed_tokens
        if tokens >= packed or self.packer is None:
            return replace(self, tail=self.tail.narrow(-2, 0, tokens - packed).clone())
        keep, rest = divmod(tokens, self.packer.block_tokens)
        size = (*self.tail.shape[:-2], self.packer.block_tokens, self.tail.shape[-1])
        opened = self.tail.new_empty(size)
        if rest:
            self._open(keep, opened)
        rows = tuple(row[:keep] for row in self.rows)
        return replace(self, rows=rows, tail=opened.narrow(-2, 0, rest).clone())

    def select(self, indices: list[int]) -> Lane:
        """The lane with these batch rows, in this order; blocks are shared, the tail is copied."""
        picked = torch.tensor(indices, dtype=torch.long, device=self.tail.device)
        rows = tuple(self.rows[index] for index in indices)
        return replace(self, rows=rows, tail=self.tail.index_select(0, picked))

    def to(self, device: torch.device) -> Lane:
        """The lane on `device`; itself if it is there already."""
        if self.tail.device == device:
            return self
        rows = tuple(tuple(block.to(device) for block in row) for row in self.rows)
        return replace(self, rows=rows, tail=self.tail.to(device))

    def _check_fits(self, states: torch.Tensor) -> None:
        held, new = self.tail, states
        same_shape = held.shape[:-2] == new.shape[:-2] and held.shape[-1] == new.shape[-1]
        if not same_shape or held.dtype != new.dtype:
            raise ValueError(
                f"the cache holds {self.name} of {held.dtype}, shape {tuple(held.shape[:-2])} x "
                f"{self.tokens} tokens x {held.shape[-1]}, and cannot take {new.dtype}, "
                f"shape {tuple(new.shape)}: start a new cache or call reset()."
            )

    def _joined(self, states: torch.Tensor | None) -> torch.Tensor:
        """Blocks, tail and `states` in one new tensor; blocks are decoded in place."""
        new_tokens = 0 if states is None else states.shape[-2]
        shape = (*self.tail.shape[:-2], self.tokens + new_tokens, self.tail.shape[-1])
        full = self.tail.new_empty(shape)
        packed = self.packed_tokens
        for index in range(self._blocks):
            size = packed // self._blocks
            self._open(index, full.narrow(-2, index * size, size))
        full.narrow(-2, packed, self.tail.shape[-2]).copy_(self.tail)
        if states is not None:
            full.narrow(-2, self.tokens, new_tokens).copy_(states)
        return full

    @property
    def _blocks(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    def _open(self, index: int, out: torch.Tensor) -> None:
        """Decode block `index` of every row into `out`; one that rows share is decoded once."""
        assert self.packer is not None  # only a packer makes blocks
        done: dict[int, int] = {}
        for row, blocks in enumerate(self.rows):
            block, target = blocks[index], out.narrow(0, row, 1)
            if id(block) in done:
                target.copy_(out.narrow(0, done[id(block)], 1))
            else:
                self.packer.unpack(block, target)
                done[id(block)] = row

    def _with_due_blocks(self, full: torch.Tensor) -> tuple[tuple[tuple[Block, ...], ...], int]:
        """The rows once every block that is due has been packed from `full`, and their tokens."""
        packed = self.packed_tokens
        if self.packer is None:
            return self.rows, packed
        size, due = self.packer.block_tokens, self.packer.blocks_due(full.shape[-2] - packed)
        starts = [packed + index * size for index in range(due)]
        rows = tuple(
            row
            + tuple(
                self.packer.pack(full.narrow(0, index, 1).narrow(-2, start, size))
                for start in starts
            )
            for index, row in enumerate(self.rows)
        )
        return rows, packed + due * size


def _copied(full: torch.Tensor, start: int) -> torch.Tensor:
    """Everything from token `start` on, in a tensor of its own."""
    part = full.narrow(-2, start, full.shape[-2] - start)
    return part.clone(memory_format=torch.contiguous_format)
