"""SIMD values of float32 for kernels, beside the integers of `gaac.kernels.vector`.

`f32x16` and `f32x64` are LLVM vectors as those are; one of 64 floats holds a step of 64 words.
Words are widened in whatever order costs least, the *lane order* of their dtype: `widen_bfloat16`
gives even words before odd ones, 32 at a time. `spread` and `gather` go from the natural order to
that one and back. Sums over lanes are taken in one fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from gaac.kernels.vector_ir import (
    I8,
    I32,
    I64,
    Vector,
    address,
    call,
    fill,
    from_mask,
    integer,
    mask,
    operation,
    pick,
    read,
    register,
    u16x32,
)

F32 = ir.FloatType()


class FloatVector(Vector):
    """The numba type of a vector of `lanes` float32."""

    def __init__(self, lanes: int) -> None:
        super().__init__(32, lanes, name=f"f32x{lanes}")

    @property
    def ir_type(self) -> ir.VectorType:
        return ir.VectorType(F32, self.lanes)


register(FloatVector)

f32x16 = FloatVector(16)
f32x64 = FloatVector(64)
real = types.float32


@operation(f32x16, address)
def load_f32x16(builder: ir.IRBuilder, where: Any) -> Any:
    """The 16 floats at an address."""
    return read(builder, where, f32x16.ir_type)


@operation(f32x64, address)
def load_f32x64(builder: ir.IRBuilder, where: Any) -> Any:
    """The 64 floats at an address."""
    return read(builder, where, f32x64.ir_type)


@operation(real, address)
def load_f32(builder: ir.IRBuilder, where: Any) -> Any:
    """The float at an address."""
    return read(builder, where, F32)


@operation(types.void, address, real)
def store_f32(builder: ir.IRBuilder, where: Any, value: Any) -> None:
    """Write a float to an address."""
    builder.store(value, builder.inttoptr(where, F32.as_pointer())).align = 1


@operation(f32x64, real)
def splat_f32x64(builder: ir.IRBuilder, value: Any) -> Any:
    """A float in every lane."""
    first = builder.insert_element(
        ir.Constant(f32x64.ir_type, ir.Undefined), value, ir.Constant(I32, 0)
    )
    return pick(builder, first, first, [0] * 64)


@operation(f32x64, f32x64, f32x64)
def plus(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@operation(f32x64, f32x64, f32x64)
def minus(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a - b."""
    return builder.fsub(a, b)


@operation(f32x64, f32x64, f32x64)
def times(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a * b."""
    return builder.fmul(a, b)


@operation(f32x64, f32x64, f32x64)
def over(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a / b."""
    return builder.fdiv(a, b)


@operation(f32x64, f32x64, f32x64, f32x64)
def times_plus(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma.v64f32", a.type, a, b, c)


@operation(f32x64, f32x64, f32x64)
def larger(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a where a > b, else b."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(f32x64, f32x64, f32x64)
def smaller(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a where a < b, else b."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@operation(f32x64, f32x64, f32x64, f32x64)
def zero_below(builder: ir.IRBuilder, value: Any, x: Any, least: Any) -> Any:
    """The lanes of `value` where x >= least (or x is a NaN), 0 elsewhere."""
    below = builder.fcmp_ordered("<", x, least)
    return builder.select(below, ir.Constant(value.type, [0.0] * 64), value)


@operation(f32x64, f32x64, f32x64)
def with_sign_of(builder: ir.IRBuilder, size: Any, sign: Any) -> Any:
    """The size of one, the sign of the other."""
    return call(builder, "llvm.copysign.v64f32", size.type, size, sign)


@operation(f32x64, mask, f32x64, f32x64)
def choose(builder: ir.IRBuilder, where: Any, a: Any, b: Any) -> Any:
    """a in the lanes of the mask, else b."""
    return builder.select(from_mask(builder, where, 64), a, b)


@operation(f32x64, f32x64)
def nearest(builder: ir.IRBuilder, a: Any) -> Any:
    """Each lane rounded to a whole number, ties to even."""
    return call(builder, "llvm.rint.v64f32", a.type, a)


@operation(f32x64, f32x64, f32x64)
def times_power_of_2(builder: ir.IRBuilder, a: Any, n: Any) -> Any:
    """a * 2^n for whole n from -126 to 127."""
    numbers = ir.VectorType(I32, 64)
    exponent = builder.add(builder.fptosi(n, numbers), fill(numbers, 127))
    power = builder.bitcast(builder.shl(exponent, fill(numbers, 23)), a.type)
    return builder.fmul(a, power)


# Words to floats, and orders.


@operation(f32x64, u16x32, u16x32)
def widen_bfloat16(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """64 bfloat16 words as floats in lane order: of each 32, the even ones, then the odd ones."""
    pairs = ir.VectorType(I32, 16)
    parts = []
    for words in (first, second):
        both = builder.bitcast(words, pairs)
        parts.append(builder.shl(both, fill(pairs, 16)))
        parts.append(builder.and_(both, fill(pairs, 0xFFFF0000)))
    return builder.bitcast(_join(builder, parts), f32x64.ir_type)


@operation(f32x64, u16x32, u16x32)
def widen_float16(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """64 float16 words as floats; their lane order is the natural one."""
    halves = ir.VectorType(ir.HalfType(), 32)
    floats = ir.VectorType(F32, 32)
    a, b = (builder.fpext(builder.bitcast(words, halves), floats) for words in (first, second))
    return pick(builder, a, b, list(range(64)))


@operation(f32x64, f32x64)
def narrow(builder: ir.IRBuilder, natural: Any) -> Any:
    """64 floats that are bfloat16 numbers, as their words: two to a lane, in the first 32 lanes."""
    words = builder.bitcast(natural, ir.VectorType(ir.IntType(16), 128))
    zero = ir.Constant(words.type, None)
    upper = pick(builder, words, zero, [2 * i + 1 for i in range(64)] + [128] * 64)
    return builder.bitcast(upper, natural.type)


_LANES = [32 * half + 2 * i + odd for half in (0, 1) for odd in (0, 1) for i in range(16)]


@operation(f32x64, f32x64)
def spread(builder: ir.IRBuilder, natural: Any) -> Any:
    """Floats in natural order, in the lane order of bfloat16."""
    return pick(builder, natural, natural, _LANES)


@operation(f32x64, f32x64)
def gather(builder: ir.IRBuilder, lanes: Any) -> Any:
    """Undo `spread`."""
    return pick(builder, lanes, lanes, [_LANES.index(i) for i in range(64)])


def _join(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """Vectors of equal length laid end to end; their number is a power of two."""
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        parts = [pick(builder, a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# Sums and maxima over lanes.


@operation(f32x16, f32x64, f32x64)
def fold_product(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a * b, added up over the four quarters: lane i has the sum of lanes i, i + 16, ..."""
    folded = None
    for start in range(0, 64, 16):
        x, y = (pick(builder, v, v, list(range(start, start + 16))) for v in (a, b))
        if folded is None:
            folded = builder.fmul(x, y)
        else:
            folded = call(builder, "llvm.fma.v16f32", x.type, x, y, folded)
    return folded


@operation(f32x16, u16x32, u16x32, f32x64)
def dot_narrow(builder: ir.IRBuilder, first: Any, second: Any, other: Any) -> Any:
    """64 bfloat16 words times those that `narrow` gave, added up: lane i has 2i, 2i + 1 of each 32.

    x86 with AVX512-BF16 only. Products are exact; sums are rounded to float32, denormal ones to 0.
    """
    pairs = ir.VectorType(I32, 16)
    others = builder.bitcast(other, ir.VectorType(I32, 64))
    folded = ir.Constant(f32x16.ir_type, [0.0] * 16)
    for words, start in ((first, 0), (second, 16)):
        part = pick(builder, others, others, list(range(start, start + 16)))
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        folded = call(builder, name, f32x16.ir_type, folded, builder.bitcast(words, pairs), part)
    return folded


@operation(f32x16, f32x16, f32x16)
def plus_16(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@operation(f32x16, address)
def sum_rows(builder: ir.IRBuilder, where: Any) -> Any:
    """The sums of 16 vectors of 16 floats that lie one behind the other; sum i in lane i."""
    rows = [
        read(builder, builder.add(where, ir.Constant(I64, 64 * i)), f32x16.ir_type)
        for i in range(16)
    ]
    # Each turn adds halves of two rows into one: after four, a lane holds the sum of a row.
    for distance in (8, 4, 2, 1):
        rows = [_fold_two(builder, *pair, distance) for pair in _pairs(rows)]
    return rows[0]


def _pairs(rows: list[Any]) -> list[tuple[Any, Any]]:
    half = len(rows) // 2
    return list(zip(rows[:half], rows[half:], strict=True))


def _fold_two(builder: ir.IRBuilder, a: Any, b: Any, distance: int) -> Any:
    """Lanes of a and b whose number lacks the bit `distance` added to those that have it.

    Sums of a stay where the bit is not set, those of b come where it is.
    """
    low = [i if not i & distance else 16 + i - distance for i in range(16)]
    high = [i + distance if not i & distance else 16 + i for i in range(16)]
    return builder.fadd(pick(builder, a, b, low), pick(builder, a, b, high))


def _reduce(builder: ir.IRBuilder, value: Any, combine: Any) -> Any:
    count = value.type.count
    while count > 1:
        count //= 2
        a = pick(builder, value, value, list(range(count)))
        b = pick(builder, value, value, list(range(count, 2 * count)))
        value = combine(a, b)
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(real, f32x64)
def total(builder: ir.IRBuilder, a: Any) -> Any:
    """The sum of all lanes."""
    return _reduce(builder, a, builder.fadd)


@operation(real, f32x64)
def highest(builder: ir.IRBuilder, a: Any) -> Any:
    """The largest lane; NaN is passed over where it can be."""
    return _reduce(builder, a, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


# Memory and threads.


@operation(types.void, address)
def prefetch(builder: ir.IRBuilder, where: Any) -> None:
    """Ask for the cache line at an address, which need not be mapped."""
    pointer = builder.inttoptr(where, I8.as_pointer())
    number = [ir.Constant(I32, n) for n in (0, 3, 1)]  # read, keep in all caches, data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *number)


@operation(integer, address)
def take_turn(builder: ir.IRBuilder, counter: Any) -> Any:
    """The number at an address, which is one more for the next thread that asks."""
    place = builder.inttoptr(counter, I64.as_pointer())
    return builder.atomic_rmw("add", place, ir.Constant(I64, 1), "monotonic")


@operation(types.void)
def apart(builder: ir.IRBuilder) -> None:
    """Keep LLVM from inlining the function that calls this (see `cpu.outlined`)."""
    builder.function.attributes.add("noinline")
