"""SIMD values for kernels: 64 bytes at a time, as types and operations that numba can compile.

A value of type `u8x64`, `u16x32` or `u32x16` is one LLVM vector; it lives in registers, and LLVM
cuts it to what the CPU has (one AVX-512 register, two of AVX2, four of SSE2 or NEON). A *mask* is a
uint64, or an integer that becomes one, whose bit i speaks of lane i. An *address* is an integer;
nothing is checked, and no alignment is needed. Lanes count from the lowest address, which is also
the lowest bit: these operations are for little-endian machines.

Operations are called from kernels only, as `vector.add(a, b)`. The section "x86 only" needs what
`gaac.kernels.cpu` calls the path "vbmi2"; everything else is generic LLVM IR, for any CPU.

Each operation below is a function that writes LLVM IR; its result and arguments have the types
named above it (`Vector`: any of them, everywhere the same). Mask arithmetic (&, |, ~) is ordinary
uint64 arithmetic. Mind numba's rule that uint64 with int64 becomes float64: keep addresses and
counts int64 (numba's own integers), masks uint64, and wrap a literal mask in `vector.bits`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from gaac.kernels.vector_ir import (
    I1,
    I8,
    I16,
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
    read_part,
    suffix,
    to_mask,
    u8x64,
    u16x8,
    u16x32,
    u32x16,
    write_part,
)

# Memory.


@operation(u8x64, address)
def load_u8x64(builder: ir.IRBuilder, where: Any) -> Any:
    """The 64 bytes at an address."""
    return read(builder, where, u8x64.ir_type)


@operation(u16x32, address)
def load_u16x32(builder: ir.IRBuilder, where: Any) -> Any:
    """The 32 words of two bytes at an address."""
    return read(builder, where, u16x32.ir_type)


@operation(u16x8, address)
def load_u16x8(builder: ir.IRBuilder, where: Any) -> Any:
    """The eight words of two bytes at an address."""
    return read(builder, where, u16x8.ir_type)


@operation(u32x16, address)
def load_u32x16(builder: ir.IRBuilder, where: Any) -> Any:
    """The 16 words of four bytes at an address."""
    return read(builder, where, u32x16.ir_type)


@operation(mask, address)
def load_u64(builder: ir.IRBuilder, where: Any) -> Any:
    """The eight bytes at an address, as a mask."""
    return read(builder, where, I64)


@operation(integer, address)
def load_u32(builder: ir.IRBuilder, where: Any) -> Any:
    """The four bytes at an address, as an integer."""
    return builder.zext(read(builder, where, I32), I64)


@operation(integer, address)
def load_u16(builder: ir.IRBuilder, where: Any) -> Any:
    """The two bytes at an address, as an integer."""
    return builder.zext(read(builder, where, I16), I64)


@operation(integer, address)
def load_u8(builder: ir.IRBuilder, where: Any) -> Any:
    """The byte at an address, as an integer."""
    return builder.zext(read(builder, where, I8), I64)


@operation(u8x64, address, integer)
def load_part_u8x64(builder: ir.IRBuilder, where: Any, count: Any) -> Any:
    """The first `count` bytes at an address, 0 to 64; nothing beyond them is read. Else zeros."""
    return read_part(builder, where, count, u8x64.ir_type)


@operation(u16x32, address, integer)
def load_part_u16x32(builder: ir.IRBuilder, where: Any, count: Any) -> Any:
    """As load_part_u8x64, as words; `count` is in bytes."""
    return read_part(builder, where, count, u16x32.ir_type)


@operation(mask, address, integer)
def load_part_u64(builder: ir.IRBuilder, where: Any, count: Any) -> Any:
    """The first `count` bytes at an address, 0 to 8, as a mask; nothing beyond them is read."""
    return read_part(builder, where, count, I64)


@operation(types.void, address, Vector)
def store(builder: ir.IRBuilder, where: Any, value: Any) -> None:
    """Write the 64 bytes of a vector to an address."""
    builder.store(value, builder.inttoptr(where, value.type.as_pointer())).align = 1


@operation(types.void, address, Vector, integer)
def store_part(builder: ir.IRBuilder, where: Any, value: Any, count: Any) -> None:
    """Write the first `count` bytes of a vector, 0 to 64, and nothing beyond them."""
    write_part(builder, where, value, count)


@operation(types.void, address, mask)
def store_u64(builder: ir.IRBuilder, where: Any, bits: Any) -> None:
    """Write a mask to an address: eight bytes."""
    builder.store(bits, builder.inttoptr(where, I64.as_pointer())).align = 1


@operation(types.void, address, mask, integer)
def store_part_u64(builder: ir.IRBuilder, where: Any, bits: Any, count: Any) -> None:
    """Write the first `count` bytes of a mask, 0 to 8, and nothing beyond them."""
    write_part(builder, where, bits, count)


@operation(types.void, address, integer)
def store_u32(builder: ir.IRBuilder, where: Any, value: Any) -> None:
    """Write the low four bytes of an integer."""
    builder.store(builder.trunc(value, I32), builder.inttoptr(where, I32.as_pointer())).align = 1


@operation(types.void, address, integer)
def store_u16(builder: ir.IRBuilder, where: Any, value: Any) -> None:
    """Write the low two bytes of an integer."""
    builder.store(builder.trunc(value, I16), builder.inttoptr(where, I16.as_pointer())).align = 1


@operation(types.void, address, integer)
def store_u8(builder: ir.IRBuilder, where: Any, value: Any) -> None:
    """Write the low byte of an integer."""
    builder.store(builder.trunc(value, I8), builder.inttoptr(where, I8.as_pointer())).align = 1


@operation(types.void, address, address, integer)
def copy(builder: ir.IRBuilder, target: Any, source: Any, count: Any) -> None:
    """Copy `count` bytes between places that do not overlap."""
    places = [builder.inttoptr(where, I8.as_pointer()) for where in (target, source)]
    cgutils.raw_memcpy(builder, places[0], places[1], count, 1)


# Lane by lane.


def _splat(builder: ir.IRBuilder, value: Any, vector: Vector) -> Any:
    kind = vector.ir_type
    cut = builder.trunc(value, kind.element)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), cut, ir.Constant(I32, 0))
    return pick(builder, first, first, [0] * vector.lanes)


@operation(u8x64, integer)
def splat_u8x64(builder: ir.IRBuilder, value: Any) -> Any:
    """The low byte of an integer in every lane."""
    return _splat(builder, value, u8x64)


@operation(u16x32, integer)
def splat_u16x32(builder: ir.IRBuilder, value: Any) -> Any:
    """The low two bytes of an integer in every lane."""
    return _splat(builder, value, u16x32)


@operation(u16x8, integer)
def splat_u16x8(builder: ir.IRBuilder, value: Any) -> Any:
    """The low two bytes of an integer in every lane."""
    return _splat(builder, value, u16x8)


@operation(u32x16, integer)
def splat_u32x16(builder: ir.IRBuilder, value: Any) -> Any:
    """The low four bytes of an integer in every lane."""
    return _splat(builder, value, u32x16)


@operation(Vector, Vector, Vector)
def add(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a + b, modulo the size of a lane."""
    return builder.add(a, b)


@operation(Vector, Vector, Vector)
def subtract(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a - b, modulo the size of a lane."""
    return builder.sub(a, b)


@operation(u16x32, u16x32, u16x32)
def multiply(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a * b, modulo the size of a lane."""
    return builder.mul(a, b)


@operation(Vector, Vector, Vector)
def add_saturated(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a + b, at most the largest value of a lane."""
    return call(builder, f"llvm.uadd.sat.{suffix(a)}", a.type, a, b)


@operation(Vector, Vector, Vector)
def subtract_saturated(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a - b, at least zero."""
    return call(builder, f"llvm.usub.sat.{suffix(a)}", a.type, a, b)


@operation(Vector, Vector, Vector)
def largest(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The larger of a and b."""
    return call(builder, f"llvm.umax.{suffix(a)}", a.type, a, b)


@operation(Vector, Vector, Vector)
def smallest(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The smaller of a and b."""
    return call(builder, f"llvm.umin.{suffix(a)}", a.type, a, b)


@operation(Vector, Vector, Vector)
def both(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a & b."""
    return builder.and_(a, b)


@operation(Vector, Vector, Vector)
def either(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@operation(Vector, Vector, Vector)
def shift_left(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a << b, lane by lane; each shift must be less than the bits of a lane."""
    return builder.shl(a, b)


@operation(Vector, Vector, Vector)
def shift_right(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """a >> b, lane by lane, zeros coming in; each shift must be less than the bits of a lane."""
    return builder.lshr(a, b)


@operation(u16x32, u16x32)
def rotate_left_1(builder: ir.IRBuilder, a: Any) -> Any:
    """Each word turned by one bit; the top bit becomes the lowest."""
    return call(builder, "llvm.fshl.v32i16", a.type, a, a, fill(a.type, 1))


@operation(u16x32, u16x32)
def rotate_right_1(builder: ir.IRBuilder, a: Any) -> Any:
    """Each word turned by one bit; the lowest bit becomes the top."""
    return call(builder, "llvm.fshl.v32i16", a.type, a, a, fill(a.type, 15))


# Masks.


@operation(mask, integer)
def bits(builder: ir.IRBuilder, value: Any) -> Any:
    """An integer as a mask: uint64, whatever numba takes a literal for."""
    return value


@operation(mask, integer)
def first_bits(builder: ir.IRBuilder, count: Any) -> Any:
    """The mask whose lowest `count` bits are set, 0 to 64."""
    one = ir.Constant(I64, 1)
    cut = builder.sub(builder.shl(one, builder.and_(count, ir.Constant(I64, 63))), one)
    whole = builder.icmp_signed(">=", count, ir.Constant(I64, 64))
    return builder.select(whole, ir.Constant(I64, -1), cut)


@operation(mask, Vector, Vector)
def greater(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The lanes where a > b, as a mask."""
    return to_mask(builder, builder.icmp_unsigned(">", a, b))


@operation(mask, Vector, Vector)
def equal(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The lanes where a == b, as a mask."""
    return to_mask(builder, builder.icmp_unsigned("==", a, b))


@operation(mask, Vector, Vector)
def any_bit(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The lanes where a & b is not zero, as a mask."""
    return to_mask(builder, builder.icmp_unsigned("!=", builder.and_(a, b), fill(a.type, 0)))


@operation(Vector, mask, Vector, Vector)
def select(builder: ir.IRBuilder, where: Any, a: Any, b: Any) -> Any:
    """a in the lanes of the mask, else b."""
    return builder.select(from_mask(builder, where, a.type.count), a, b)


@operation(integer, mask)
def popcount(builder: ir.IRBuilder, where: Any) -> Any:
    """How many bits of a mask are set."""
    return builder.ctpop(where)


@operation(integer, mask)
def trailing_zeros(builder: ir.IRBuilder, where: Any) -> Any:
    """The index of the lowest bit that is set; 64 if none is."""
    return builder.cttz(where, ir.Constant(I1, 0))


# Single lanes.


@operation(integer, u8x64, integer)
def lane(builder: ir.IRBuilder, vector: Any, index: Any) -> Any:
    """The byte of one lane, 0 to 63."""
    return builder.zext(builder.extract_element(vector, index), I64)


@operation(u8x64, u8x64, integer, integer)
def with_lane(builder: ir.IRBuilder, vector: Any, index: Any, value: Any) -> Any:
    """The vector with the low byte of an integer in one lane, 0 to 63."""
    return builder.insert_element(vector, builder.trunc(value, I8), index)


# Between bytes and words.


@operation(u8x64, u16x32, u16x32)
def low_bytes(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """The low byte of each of 64 words."""
    return _alternate(builder, first, second, 0)


@operation(u8x64, u16x32, u16x32)
def high_bytes(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """The high byte of each of 64 words."""
    return _alternate(builder, first, second, 1)


def _alternate(builder: ir.IRBuilder, first: Any, second: Any, start: int) -> Any:
    parts = [builder.bitcast(part, u8x64.ir_type) for part in (first, second)]
    return pick(builder, parts[0], parts[1], list(range(start, 128, 2)))


@operation(u16x32, u8x64, u8x64)
def join_first(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    """The first 32 of the words that have these low and high bytes."""
    return _interleave(builder, low, high, 0)


@operation(u16x32, u8x64, u8x64)
def join_second(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    """The last 32 of the words that have these low and high bytes."""
    return _interleave(builder, low, high, 32)


def _interleave(builder: ir.IRBuilder, low: Any, high: Any, start: int) -> Any:
    lanes = [lane for i in range(start, start + 32) for lane in (i, 64 + i)]
    return builder.bitcast(pick(builder, low, high, lanes), u16x32.ir_type)


# x86 only: BMI2, and AVX-512 VBMI2.


@operation(mask, mask, mask)
def pdep(builder: ir.IRBuilder, value: Any, where: Any) -> Any:
    """The lowest bits of `value`, in order, at the places of the bits of `where` (BMI2)."""
    return call(builder, "llvm.x86.bmi.pdep.64", I64, value, where)


@operation(mask, mask, mask)
def pext(builder: ir.IRBuilder, value: Any, where: Any) -> Any:
    """The bits of `value` at the places of the bits of `where`, moved together (BMI2)."""
    return call(builder, "llvm.x86.bmi.pext.64", I64, value, where)


@operation(u8x64, u8x64, mask, u8x64)
def expand(builder: ir.IRBuilder, source: Any, where: Any, other: Any) -> Any:
    """The first bytes of `source`, in order, in the lanes of the mask; else `other` (VBMI2)."""
    name = "llvm.x86.avx512.mask.expand.v64i8"
    return call(builder, name, source.type, source, other, from_mask(builder, where, 64))


@operation(u8x64, u8x64, mask)
def compress(builder: ir.IRBuilder, source: Any, where: Any) -> Any:
    """The lanes of the mask moved together in front; what is behind them is zero (VBMI2)."""
    name, zero = "llvm.x86.avx512.mask.compress.v64i8", fill(source.type, 0)
    return call(builder, name, source.type, source, zero, from_mask(builder, where, 64))


@operation(u8x64, integer, integer, u8x64)
def lookup(builder: ir.IRBuilder, first: Any, last: Any, index: Any) -> Any:
    """Bytes of a table by index, 0 to 15 (AVX-512BW).

    The table is two integers of eight bytes, byte 0 the lowest of `first`.
    """
    pair = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for place, half in enumerate((first, last)):
        pair = builder.insert_element(pair, half, ir.Constant(I32, place))
    table = builder.bitcast(pick(builder, pair, pair, [0, 1] * 4), index.type)
    return call(builder, "llvm.x86.avx512.pshuf.b.512", index.type, table, index)
