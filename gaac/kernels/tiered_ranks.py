"""Level 2, compiled: from codes to exponents, 64 values at a time.

A value's rank is the sum of its codes (rank 9 is an escape); a code is two masks, of its low bits,
which count 1, and its high bits, which count 2. Bytes for float16 are exponents where they lie in a
word's high byte, four times as large; what is then too large is cut off by the caller.
"""

from __future__ import annotations

from typing import Any

from gaac.kernels import vector
from gaac.kernels.cpu import inlined
from gaac.kernels.packed_decode import add_bits


@inlined
def code_bytes(code: Any) -> Any:
    """The codes of 64 values as bytes; zero where there is none."""
    return add_bits(add_bits(vector.splat_u8x64(0), code[0], 1), code[1], 2)


@inlined
def add_by_lookup(exponent: Any, ranks: Any, first: Any, second: Any, third: Any, half: Any) -> Any:
    """The exponents of 64 values, from those of rank 0 and the three tiers' codes. AVX-512BW."""
    rank = vector.add(vector.add(code_bytes(first), code_bytes(second)), code_bytes(third))
    unit = 4 if half else 1
    table = 0
    for place in range(1, 8):
        table |= (unit * (ranks[place] - ranks[0]) & 255) << 8 * place
    return vector.add(exponent, vector.lookup(table, unit * (ranks[8] - ranks[0]) & 255, rank))


@inlined
def add_by_steps(exponent: Any, ranks: Any, first: Any, second: Any, third: Any, half: Any) -> Any:
    """As add_by_lookup, on any CPU: adds what lies between a tier's first rank and the others.

    Where both bits are set, that is the next tier's first rank, so all of it adds up.
    """
    unit = 4 if half else 1
    zero, one, two, three, four, five, six, seven, eight = ranks
    exponent = add_bits(exponent, first[0], unit * (one - zero))
    exponent = add_bits(exponent, first[1], unit * (two - zero))
    exponent = add_bits(exponent, first[0] & first[1], unit * (three - two - one + zero))
    exponent = add_bits(exponent, second[0], unit * (four - three))
    exponent = add_bits(exponent, second[1], unit * (five - three))
    exponent = add_bits(exponent, second[0] & second[1], unit * (six - five - four + three))
    exponent = add_bits(exponent, third[0], unit * (seven - six))
    return add_bits(exponent, third[1], unit * (eight - six))
