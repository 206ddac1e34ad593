"""One layer's keys, or its values: packed blocks followed by a raw tail.

Lanes are never changed in place. Every operation gives a new one that shares blocks with the old,
so an update that fails half-way leaves the cache as it was, and a fork costs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaac.hf.blocks import Packer
from gaac.hf.tail import Tail
from gaac.pages import Page, Pages, PageTable

Rows = tuple[tuple[Page, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Keys or values of one layer, [batch, kv_heads, tokens, head_dim] in pieces.

    name: "keys" or "values", for messages. packer: None keeps everything in the raw tail.
    table: per batch row its blocks, oldest first, as many in each row and block_tokens long; the
    same object for as long as the blocks stay the same, for it remembers where they lie.
    raw: the tokens after them.
    """

    name: str
    packer: Packer | None
    table: PageTable
    raw: Tail

    @staticmethod
    def like(states: torch.Tensor, name: str, packer: Packer | None) -> Lane:
        """An empty lane for states of this shape, dtype and device."""
        shape = (*states.shape[:-2], 0, states.shape[-1])
        rows: Rows = ((),) * states.shape[0]
        return Lane(name, packer, PageTable(rows), Tail(states.new_empty(shape)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Lane:
        return replace(self, raw=copy.deepcopy(self.raw, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        # A table's addresses mean nothing in another process.
        return Lane, (self.name, self.packer, PageTable(self.rows), self.raw)

    @property
    def rows(self) -> Rows:
        """Per batch row its blocks, oldest first."""
        return self.table.rows

    @property
    def tail(self) -> torch.Tensor:
        """The raw tokens after the blocks: a view of a storage that may have some room behind."""
        return self.raw.states

    @property
    def packed_tokens(self) -> int:
        """Tokens that lie in blocks."""
        return self._blocks * self.packer.block_tokens if self.packer else 0

    @property
    def tokens(self) -> int:
        """Tokens held, packed and raw."""
        return self.packed_tokens + self.raw.tokens

    @property
    def blocks_due(self) -> int:
        """Blocks of the raw tail that are to be packed."""
        return self.packer.blocks_due(self.raw.tokens) if self.packer else 0

    @property
    def raw_bytes(self) -> int:
        """Bytes that the tokens held would take uncompressed, every batch row counted."""
        per_token = self.tail.element_size() * self.tail.shape[-1]
        for size in self.tail.shape[:-2]:
            per_token *= size
        return per_token * self.tokens

    @property
    def pages(self) -> Pages:
        """Blocks and tail as attention reads them where they lie."""
        return Pages(self.table, self.raw.states)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor that this lane keeps alive; one that rows share comes once a row."""
        yield self.tail
        for row in self.rows:
            for block in row:
                yield block.payload

    def full(self) -> torch.Tensor:
        """All tokens as one contiguous tensor, decoded anew."""
        if not self.packed_tokens:
            return self.tail.contiguous()
        return self._joined(None)

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """All tokens with `states` at the end, as one tensor; nothing is appended.

        states: [batch, kv_heads, new tokens, head_dim]. What comes back is laid out as the
        library's own layer would give it, so that attention computes the same bits. Gradients
        reach `states`, not what earlier calls have stored. Raises ValueError for another batch
        size, head count, head_dim or dtype than the lane holds.
        """
        lane = self._ready_for(states)
        return lane._joined(states) if lane.tokens else states.contiguous()

    def grown(self, states: torch.Tensor) -> Lane:
        """The lane with `states` at the end of its raw tail; nothing is packed.

        Only the new tokens are copied, unless the tail is out of room. Raises as `joined` does.
        """
        lane = self._ready_for(states)
        packer = lane.packer
        most = packer.block_tokens + packer.window if packer else None
        return Lane(lane.name, packer, lane.table, lane.raw.append(states, most))

    def append(self, states: torch.Tensor) -> tuple[torch.Tensor, Lane]:
        """What `joined` gives, and the lane that holds it, with every block packed that is due.

        states: neither kept nor written to. Raises as `joined` does.
        """
        lane = self._ready_for(states)
        full = lane.joined(states)
        packed = lane.packed_tokens
        held = full.detach().narrow(-2, packed, full.shape[-2] - packed)
        # Without blocks the whole tensor is the tail: keep it, unless it is the caller's own.
        if full is states or packed or (lane.packer and lane.packer.blocks_due(held.shape[-2])):
            return full, lane._with_raw(held)
        return full, replace(lane, raw=Tail(held))

    def packed(self) -> Lane:
        """The lane with every block packed that is due; itself if none is."""
        return self._with_raw(self.tail) if self.blocks_due else self

    def crop(self, tokens: int) -> Lane:
        """The lane without everything after the first `tokens` tokens.

        A block that the cut goes through is opened, and its first part becomes the tail.
        """
        packed = self.packed_tokens
        if tokens >= packed or self.packer is None:
            return replace(self, raw=Tail.copied(self.tail.narrow(-2, 0, tokens - packed)))
        keep, rest = divmod(tokens, self.packer.block_tokens)
        size = (*self.tail.shape[:-2], self.packer.block_tokens, self.tail.shape[-1])
        opened = self.tail.new_empty(size)
        if rest:
            self._open(keep, opened)
        table = PageTable(tuple(row[:keep] for row in self.rows))
        return replace(self, table=table, raw=Tail.copied(opened.narrow(-2, 0, rest)))

    def select(self, indices: list[int]) -> Lane:
        """The lane with these batch rows, in this order; blocks are shared, the tail is copied."""
        picked = torch.tensor(indices, dtype=torch.long, device=self.tail.device)
        table = PageTable(tuple(self.rows[index] for index in indices))
        return replace(self, table=table, raw=Tail(self.tail.index_select(0, picked)))

    def to(self, device: torch.device) -> Lane:
        """The lane on `device`; itself if it is there already."""
        if self.tail.device == device:
            return self
        table = PageTable(tuple(tuple(block.to(device) for block in row) for row in self.rows))
        return replace(self, table=table, raw=Tail(self.tail.to(device)))

    def _ready_for(self, states: torch.Tensor) -> Lane:
        """The lane where `states` lie; an empty one takes their shape and dtype."""
        empty = not self.raw.tokens and not self._blocks
        lane = Lane.like(states, self.name, self.packer) if empty else self.to(states.device)
        lane._check_fits(states)
        return lane

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
        full.narrow(-2, packed, self.raw.tokens).copy_(self.tail)
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

    def _with_raw(self, raw: torch.Tensor) -> Lane:
        """The lane with `raw` instead of its tail, once every block of it that is due is packed."""
        size, due = 0, 0
        if self.packer is not None:
            size, due = self.packer.block_tokens, self.packer.blocks_due(raw.shape[-2])
        table = self.table if due == 0 else PageTable(self._rows_with(raw, size, due))
        rest = raw.narrow(-2, due * size, raw.shape[-2] - due * size)
        return replace(self, table=table, raw=Tail.copied(rest))

    def _rows_with(self, raw: torch.Tensor, size: int, due: int) -> Rows:
        """The rows with the first `due` blocks of `raw`, each of `size` tokens."""
        assert self.packer is not None  # else no block is due
        return tuple(
            row
            + tuple(
                self.packer.pack(raw.narrow(0, index, 1).narrow(-2, block * size, size))
                for block in range(due)
            )
            for index, row in enumerate(self.rows)
        )
