"""How far lossless can go on a KV tensor: the entropy of its signs, exponents and mantissas.

Order-0 entropy in bits: H = -sum p log2 p over the frequencies p of a field's values (Shannon
1948). From few samples this plug-in estimate comes out too low, which would promise too much, so
the Miller-Madow correction is added to each: (symbols seen - 1) / (2 N ln 2) bits for N samples
(Miller 1955). It matters for the tables per channel, where N is the number of tokens; below about a
thousand tokens what is left of the bias still flatters, and the number is no more than a hint.

These are floors for coders that look at one value at a time. One that predicts values from others
(other layers, the tokens themselves) can go below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RAW_BITS = 16
CAST_SHARE = 0.99  # of values ending in three zero bits; one in eight does so by chance
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}


@dataclass(frozen=True)
class EntropyFloor:
    """Bits per value of one K or V tensor, or the mean over several; ratios are 16 bits over bits.

    `ratio` belongs to sign, exponent and mantissa coded apart, with one table each. With one table
    for sign and exponent per (head, channel) it is `channel_ratio`; the mantissa counts the same.
    """

    dtype: str
    values: int
    sign_bits: float
    exponent_bits: float
    mantissa_bits: float
    total_bits: float
    ratio: float
    sign_exponent_given_channel_bits: float
    channel_total_bits: float
    channel_ratio: float


def floors(tensor: torch.Tensor) -> EntropyFloor:
    """The entropy floor of one K or V tensor [batch, kv_heads, tokens, head_dim], bf16 or fp16.

    The tensor must have been computed in that dtype (or in a wider one and rounded). Only bit
    patterns are counted, so NaNs and infinities are values like others. Rows of a batch count as
    more samples of the same channels. Raises ValueError for another dtype or shape, for a tensor
    without values, and for float16 that was cast from bfloat16, whose empty low bits would flatter.
    """
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in MANTISSA_BITS:
        raise ValueError(f"The tensor is {dtype}: give bfloat16 or float16, as the cache holds it.")
    if tensor.dim() != 4 or tensor.numel() == 0:
        raise ValueError(
            f"The tensor has the shape {tuple(tensor.shape)}: give [batch, kv_heads, tokens, "
            "head_dim] with at least one value."
        )
    mantissa_bits = MANTISSA_BITS[dtype]
    symbols = 2 ** (RAW_BITS - mantissa_bits)  # sign and exponent together
    channels = tensor.shape[3]
    offset = torch.arange(channels, device=tensor.device, dtype=torch.int32) * symbols
    mantissas = torch.zeros(2**mantissa_bits, dtype=torch.int64)
    tops = torch.zeros(symbols, dtype=torch.int64)
    given_channel = 0.0
    for head in range(tensor.shape[1]):  # one head at a time keeps the counting small
        bits = tensor[:, head].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        mantissas += _counts(bits & (2**mantissa_bits - 1), len(mantissas))
        per_channel = _counts((bits >> mantissa_bits) + offset, channels * symbols)
        per_channel = per_channel.reshape(channels, symbols)
        tops += per_channel.sum(0)
        given_channel += sum(entropy_bits(row) for row in per_channel)
    if dtype == "float16" and int(mantissas[::8].sum()) > CAST_SHARE * tensor.numel():
        raise ValueError(
            "The float16 tensor holds bfloat16 values (the last three mantissa bits are 0), which "
            "understates its entropy: compute it in float16 or float32 instead."
        )
    by_sign = tops.reshape(2, symbols // 2)
    return _floor(
        dtype=dtype,
        values=tensor.numel(),
        sign=entropy_bits(by_sign.sum(1)),
        exponent=entropy_bits(by_sign.sum(0)),
        mantissa=entropy_bits(mantissas),
        given_channel=given_channel / (tensor.shape[1] * channels),
    )


def mean_floor(parts: Sequence[EntropyFloor]) -> EntropyFloor:
    """The floor over several tensors, each weighted by its number of values.

    The bits are averaged and the ratios taken from the averages: it is the floor of a coder that
    keeps tables per tensor. Raises ValueError for no parts, or parts of two dtypes.
    """
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise ValueError(f"A mean needs floors of one dtype, and these are of {len(dtypes)}.")
    values = sum(part.values for part in parts)

    def mean(field: str) -> float:
        return sum(float(getattr(part, field)) * part.values for part in parts) / values

    return _floor(
        dtype=dtypes.pop(),
        values=values,
        sign=mean("sign_bits"),
        exponent=mean("exponent_bits"),
        mantissa=mean("mantissa_bits"),
        given_channel=mean("sign_exponent_given_channel_bits"),
    )


def entropy_bits(counts: torch.Tensor) -> float:
    """Entropy in bits from an integer count per symbol, with the Miller-Madow correction.

    Not more than log2 of the table's size, which is the most that any source can have.
    """
    seen = counts[counts > 0].double()
    samples = float(seen.sum())
    plug_in = math.log2(samples) - float((seen * seen.log2()).sum()) / samples
    corrected = plug_in + (len(seen) - 1) / (2 * samples * math.log(2))
    return min(corrected, math.log2(counts.numel()))


def _floor(
    *, dtype: str, values: int, sign: float, exponent: float, mantissa: float, given_channel: float
) -> EntropyFloor:
    total, channel_total = sign + exponent + mantissa, given_channel + mantissa
    return EntropyFloor(
        dtype=dtype,
        values=values,
        sign_bits=sign,
        exponent_bits=exponent,
        mantissa_bits=mantissa,
        total_bits=total,
        ratio=_ratio(total),
        sign_exponent_given_channel_bits=given_channel,
        channel_total_bits=channel_total,
        channel_ratio=_ratio(channel_total),
    )


def _ratio(bits: float) -> float:
    return RAW_BITS / bits if bits > 0 else math.inf


def _counts(symbols: torch.Tensor, size: int) -> torch.Tensor:
    import torch

    return torch.bincount(symbols.flatten(), minlength=size).cpu()
