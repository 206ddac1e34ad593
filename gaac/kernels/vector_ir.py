"""The vector types of `gaac.kernels.vector`, and how an operation on them is made.

An operation is a function that writes LLVM IR with llvmlite; `operation` turns it into a numba
intrinsic. The other functions here write the pieces that several operations share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


class Vector(types.Type):
    """The numba type of a vector of `lanes` unsigned integers of `bits` bits each."""

    def __init__(self, bits: int, lanes: int, name: str | None = None) -> None:
        self.bits = bits
        self.lanes = lanes
        super().__init__(name=name or f"u{bits}x{lanes}")

    @property
    def ir_type(self) -> ir.VectorType:
        return ir.VectorType(ir.IntType(self.bits), self.lanes)


class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.ir_type)


def register(kind: type[Vector]) -> None:
    """Let numba hold values of a class of vectors."""
    register_model(kind)(_VectorModel)


register(Vector)


u8x64 = Vector(8, 64)
u16x32 = Vector(16, 32)
u16x8 = Vector(16, 8)
u32x16 = Vector(32, 16)

address = types.int64
mask = types.uint64
integer = types.int64

Build = Callable[..., Any]


def operation(result: Any, *arguments: Any) -> Callable[[Build], Any]:
    """Make an intrinsic of a function (builder, *values) -> value that writes LLVM IR.

    arguments: the numba type of each; or `Vector`, for any of the vector types, the same in every
    place. result: a numba type, or `Vector` for the type of the arguments.
    """

    def wrap(build: Build) -> Any:
        def typer(_: Any, *given: Any) -> Any:
            vectors = {type_ for type_ in given if isinstance(type_, Vector)}
            if Vector in arguments and len(vectors) != 1:
                return None
            place = {Vector: next(iter(vectors), None)}
            taken = [place.get(argument, argument) for argument in arguments]
            if any(isinstance(t, Vector) and t != g for t, g in zip(taken, given, strict=True)):
                return None
            return place.get(result, result)(*taken), emit

        def emit(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> Any:
            value = build(builder, *values)
            return context.get_dummy_value() if value is None else value

        # numba reads the number and names of arguments from the signature.
        signature = inspect.signature(build)
        typer.__signature__ = signature  # type: ignore[attr-defined]
        typer.__name__ = typer.__qualname__ = build.__name__
        typer.__doc__ = build.__doc__
        typer.__module__ = build.__module__
        return intrinsic(typer)

    return wrap


# Helpers that write IR.


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: Any) -> Any:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def suffix(value: Any) -> str:
    """How the name of an overloaded LLVM intrinsic ends for a vector: v64i8 and so on."""
    return f"v{value.type.count}i{value.type.element.width}"


def fill(like: ir.VectorType, number: int) -> ir.Constant:
    return ir.Constant(like, [number] * like.count)


def pick(builder: ir.IRBuilder, a: Any, b: Any, lanes: list[int]) -> Any:
    """The lanes named, of a and b laid end to end."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def from_mask(builder: ir.IRBuilder, bits: Any, lanes: int) -> Any:
    """A vector of i1 from a u64."""
    cut = bits if lanes == 64 else builder.trunc(bits, ir.IntType(lanes))
    return builder.bitcast(cut, ir.VectorType(I1, lanes))


def to_mask(builder: ir.IRBuilder, flags: Any) -> Any:
    """A u64 from a vector of i1; bits beyond its lanes are zero."""
    bits = builder.bitcast(flags, ir.IntType(flags.type.count))
    return bits if flags.type.count == 64 else builder.zext(bits, I64)


def read(builder: ir.IRBuilder, where: Any, kind: ir.Type) -> Any:
    value = builder.load(builder.inttoptr(where, kind.as_pointer()))
    value.align = 1
    return value


def read_part(builder: ir.IRBuilder, where: Any, count: Any, kind: ir.Type) -> Any:
    """The first `count` bytes at an address, the rest zero, by way of the stack."""
    slot = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), slot)
    source = builder.inttoptr(where, I8.as_pointer())
    cgutils.raw_memcpy(builder, builder.bitcast(slot, I8.as_pointer()), source, count, 1)
    return builder.load(slot)


def write_part(builder: ir.IRBuilder, where: Any, value: Any, count: Any) -> None:
    slot = cgutils.alloca_once_value(builder, value)
    target = builder.inttoptr(where, I8.as_pointer())
    cgutils.raw_memcpy(builder, target, builder.bitcast(slot, I8.as_pointer()), count, 1)
