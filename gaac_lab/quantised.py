"""Lower precision: K and V in 8, 4 or 2 bits a value, as in KIVI (Liu et al. 2024, 2402.02750).

Why not the backends of transformers' QuantizedCache? They were tried first, on a CPU with
transformers 5.24 and torch 2.13:

- hqq 0.2.8.post1 runs at all three widths in bf16, and does not fit KV. It cuts the flat tensor
  into runs of 64 values: with axis 0 keys get a scale a channel only where kv_heads * tokens is a
  multiple of 64 (with 512 tokens, not with 500 or 513, where an outlier channel spreads its error
  to all), and with axis 1 an odd kv_heads * tokens raises RuntimeError at 4 and 2 bits.
- The cache quantises everything anew each 128 tokens, from what it had dequantised: at 4 bits the
  error of old keys doubled in eight such rounds. Here a block is quantised once.
- optimum-quanto 0.2.7 has no 8 bits there, and compiles C++ at its first use.

On the default model at 2 bits (64 tokens after a context of 512), hqq cost 0.93 nats a token or
more and this 0.39, in the same bytes; at 4 and 8 bits both cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaac_lab.lossy_layer import FixedRowsLayer

BITS = (8, 4, 2)
BLOCK_TOKENS = 64

_TOKENS, _CHANNELS = -2, -1


@dataclass(frozen=True, eq=False)
class Packed:
    """Blocks of K or V as codes: value = low + code * scale.

    codes: uint8 [batch, kv_heads, blocks, block_tokens, head_dim * bits / 8], 8 / bits codes to a
    byte, the first in the lowest bits. scale, low: in the dtype of the values, one for each
    [batch, kv_heads, blocks, 1, head_dim] or [batch, kv_heads, blocks, block_tokens, 1].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor
    bits: int

    @property
    def blocks(self) -> int:
        return int(self.codes.shape[2])

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is stored."""
        yield from (self.codes, self.scale, self.low)

    def joined(self, other: Packed) -> Packed:
        """The blocks of both."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        codes, scale, low = (torch.cat(pair, dim=2) for pair in pairs)
        return replace(self, codes=codes, scale=scale, low=low)

    def without_first(self, blocks: int) -> Packed:
        """A copy without the first blocks, whose memory is freed with this one."""
        codes, scale, low = (tensor[:, :, blocks:].clone() for tensor in self.tensors())
        return replace(self, codes=codes, scale=scale, low=low)


def quantise(blocks: torch.Tensor, bits: int, shared: int) -> Packed:
    """Codes of [batch, kv_heads, blocks, block_tokens, head_dim] values, fp16, bf16 or fp32.

    shared: the axis along which values share a scale: -2 for a scale a channel (and block), -1 for
    one a token. The scale is (highest - lowest) / (2**bits - 1), rounded up to the values' dtype,
    so no code is clipped and no value moves by more than half a scale, and the rounding of the
    result. Raises ValueError for values that are not finite.
    """
    levels = 2**bits - 1
    low, high = torch.aminmax(blocks, dim=shared, keepdim=True)
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError("K or V holds values that are not finite, which have no quantised form.")
    scale = _rounded_up((high.float() - low.float()) / levels, blocks.dtype)
    steps = (blocks.float() - low.float()) / scale.float().clamp(min=torch.finfo().tiny)
    return Packed(_pack(steps.round_().to(torch.uint8), bits), scale, low, bits)


def dequantise(packed: Packed) -> torch.Tensor:
    """The values that the codes stand for, in their first dtype and shape."""
    values = codes_of(packed).float() * packed.scale.float() + packed.low.float()
    return values.to(packed.scale.dtype)


def codes_of(packed: Packed) -> torch.Tensor:
    """One code a byte: uint8 [batch, kv_heads, blocks, block_tokens, head_dim]."""
    if packed.bits == 8:
        return packed.codes
    shifts = _shifts(packed.bits, packed.codes.device)
    apart = packed.codes.unsqueeze(-1) >> shifts
    return (apart & (2**packed.bits - 1)).flatten(-2)


class QuantisedLayer(FixedRowsLayer):
    """K with a scale a channel and block, V with a scale a token; both per KV head.

    Tokens are quantised a whole block at a time, once, and the codes are never touched again; up to
    `block_tokens` - 1 of the last tokens stay as they came. The states of an update are seen
    exactly by their own queries, and rounded by all later ones. window: drop whole blocks while
    that many tokens remain, so that up to block_tokens - 1 more are held; None drops none.
    `keys` and `values` are [batch, kv_heads, tokens, head_dim], dequantised at each reading.
    Raises ValueError for other bits, or a window below a block.
    """

    def __init__(
        self, bits: int, *, block_tokens: int = BLOCK_TOKENS, window: int | None = None
    ) -> None:
        if bits not in BITS:
            raise ValueError(f"bits={bits}: choose from {', '.join(map(str, BITS))}.")
        if block_tokens < 1 or (window is not None and window < block_tokens):
            raise ValueError(
                f"block_tokens={block_tokens}, window={window}: a block holds at least one token, "
                "and a window at least one block."
            )
        self.bits, self.block_tokens, self.window = bits, block_tokens, window
        self._empty_sides()
        super().__init__()

    @property
    def keys(self) -> torch.Tensor | None:
        return self._keys.full() if self.is_initialized else None

    @keys.setter
    def keys(self, value: None) -> None:
        _refuse_assignment(value)

    @property
    def values(self) -> torch.Tensor | None:
        return self._values.full() if self.is_initialized else None

    @values.setter
    def values(self, value: None) -> None:
        _refuse_assignment(value)

    @property
    def held_tokens(self) -> int:
        return self._keys.tokens

    @property
    def packed(self) -> tuple[Packed | None, Packed | None]:
        """The quantised blocks of K and of V; None before the first full block."""
        return self._keys.packed, self._values.packed

    def tensors(self) -> Iterator[torch.Tensor]:
        """Codes, scales, lows and the tokens not yet quantised."""
        yield from self._keys.tensors()
        yield from self._values.tensors()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check that codes fill whole bytes: ValueError for a head_dim that they do not fill."""
        for states in (key_states, value_states):
            if states.shape[-1] * self.bits % 8:
                raise ValueError(
                    f"head_dim={states.shape[-1]} at {self.bits} bits does not fill whole bytes: "
                    "choose 8 bits."
                )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What was held, dequantised, and the new states as they come, for this call."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        full = self._keys.append(key_states), self._values.append(value_states)
        self.cumulative_length += key_states.shape[-2]
        if self.window is not None:
            over = (self.held_tokens - self.window) // self.block_tokens
            self._keys.drop_first(over)
            self._values.drop_first(over)
        return full

    def reset(self) -> None:
        """Drop everything; the next update starts anew."""
        self._empty_sides()
        self.cumulative_length, self.is_initialized = 0, False

    def _empty_sides(self) -> None:
        self._keys = _Side(self.bits, self.block_tokens, _TOKENS)
        self._values = _Side(self.bits, self.block_tokens, _CHANNELS)


class _Side:
    """K or V of one layer: packed blocks, then the tokens of a block that is not full."""

    def __init__(self, bits: int, block_tokens: int, shared: int) -> None:
        self._bits, self._block_tokens, self._shared = bits, block_tokens, shared
        self.packed: Packed | None = None
        self._tail: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        packed = self.packed.blocks * self._block_tokens if self.packed is not None else 0
        return packed + (self._tail.shape[-2] if self._tail is not None else 0)

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.packed is not None:
            yield from self.packed.tensors()
        if self._tail is not None:
            yield self._tail

    def full(self) -> torch.Tensor:
        """[batch, kv_heads, tokens, head_dim]."""
        assert self._tail is not None
        if self.packed is None:
            return self._tail
        return torch.cat([dequantise(self.packed).flatten(2, 3), self._tail], dim=-2)

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Take new states over; what attention is to see now."""
        full = states if self._tail is None else torch.cat([self.full(), states], dim=-2)
        tail = states if self._tail is None else torch.cat([self._tail, states], dim=-2)
        blocks = tail.shape[-2] // self._block_tokens
        if blocks:
            whole = tail[..., : blocks * self._block_tokens, :]
            new = quantise(
                whole.unflatten(-2, (blocks, self._block_tokens)), self._bits, self._shared
            )
            self.packed = new if self.packed is None else self.packed.joined(new)
        self._tail = tail[..., blocks * self._block_tokens :, :].clone()
        return full

    def drop_first(self, blocks: int) -> None:
        if blocks > 0 and self.packed is not None:
            self.packed = self.packed.without_first(blocks)


def _rounded_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Positive float32 values in `dtype`, never smaller than they were."""
    rounded = values.to(dtype)
    if rounded.element_size() != 2:
        return rounded
    above = (rounded.view(torch.int16) + 1).view(dtype)  # the next number of a positive float
    return torch.where(rounded.float() < values, above, rounded)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes
    apart = codes.unflatten(-1, (-1, 8 // bits)) << _shifts(bits, codes.device)
    return apart.sum(-1, dtype=torch.uint8)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _refuse_assignment(value: None) -> None:
    if value is not None:  # the library's constructor assigns None
        raise AttributeError("keys and values of a quantised layer come from update() alone.")
