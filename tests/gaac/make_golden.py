"""Write the golden blobs: `python -m tests.gaac.make_golden`, only when the format changes.

Each blob pins one way of coding; test_golden.py reads them on every kernel path and checks that
today's encoder still writes them. What they hold is built from integers alone, so it is the same
on every machine and with every version of numpy and torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gaac
from gaac.rope import Rope

FOLDER = Path(__file__).parent / "golden"
INDEX = FOLDER / "index.json"
MAX_BLOB_BYTES = 12 * 1024

UNIT_BITS = 20  # values are integers, in units of 2^-20
TURN = 65536

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FloatLayout:
    """A float format: bits of exponent and mantissa, and the exponent's bias."""

    exponent_bits: int
    mantissa_bits: int
    bias: int

    @property
    def bytes(self) -> int:
        return (1 + self.exponent_bits + self.mantissa_bits) // 8

    def bits(self, value: int) -> int:
        """The bits of value * 2^-20, cut off; zero where too small for a normal number."""
        magnitude = abs(value)
        sign = int(value < 0) << (self.exponent_bits + self.mantissa_bits)
        power = magnitude.bit_length() - 1
        exponent = power - UNIT_BITS + self.bias
        if magnitude == 0 or exponent < 1:
            return sign
        mantissa = (magnitude << self.mantissa_bits >> power) - (1 << self.mantissa_bits)
        return sign | exponent << self.mantissa_bits | mantissa


LAYOUTS = {
    "float16": FloatLayout(5, 10, 15),
    "bfloat16": FloatLayout(8, 7, 127),
    "float8_e4m3fn": FloatLayout(4, 3, 7),
    "float8_e5m2": FloatLayout(5, 2, 15),
}


class Numbers:
    """A linear congruential generator modulo 2^64 (Knuth's MMIX constants); the high bits count."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, bound: int) -> int:
        """An integer of [0, bound), bound at most 2^32."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 32) * bound >> 32

    def bell(self, spread: int) -> int:
        """About normal around 0 with a standard deviation of `spread`: four uniform numbers."""
        return sum(self.below(2 * spread) for _ in range(4)) * 7 // 8 - 7 * spread // 2


def wave(turn: int) -> int:
    """About 2^15 times the sine of turn / 65536 of a circle, by two parabolas."""
    half = turn % (TURN // 2)
    height = half * (TURN // 2 - half) >> 13
    return height if turn % TURN < TURN // 2 else -height


def channel_scales(numbers: Numbers, width: int) -> list[int]:
    """One spread for each channel, in units, between 2^-4 and 4 or so."""
    return [(16 + numbers.below(16)) << (12 + numbers.below(7)) for _ in range(width)]


def values_like_v(shape: Shape, seed: int) -> list[int]:
    """Bell-shaped values, each channel with a spread of its own."""
    *matrices, tokens, width = shape
    numbers = Numbers(seed)
    result = []
    for _ in range(int(np.prod(matrices))):
        scales = channel_scales(numbers, width)
        result += [numbers.bell(scale) for _ in range(tokens) for scale in scales]
    return result


def values_like_k(shape: Shape, seed: int, rope: Rope) -> list[int]:
    """A mean that turns from token to token as `rope` says, and noise a third of it."""
    *matrices, tokens, width = shape
    pairs = len(rope.turns)
    numbers = Numbers(seed)
    result = []
    for _ in range(int(np.prod(matrices))):
        scales = channel_scales(numbers, width)
        for token in range(tokens):
            for channel, scale in enumerate(scales):
                pair, half = (channel // 2, channel % 2) if rope.interleaved else (0, 0)
                if not rope.interleaved:
                    half, pair = divmod(channel, pairs)
                mean = scale * (1 + pair % 3)
                if pair < pairs and half < 2:
                    turn = token * int(rope.turns[pair]) + pair * 9000 - half * TURN // 4
                    mean = mean * wave(turn) >> 15
                result.append(mean + numbers.bell(scale // 3))
    return result


def repeat_tokens(values: list[int], shape: Shape, seed: int, distinct: int) -> list[int]:
    """The values with each token replaced by one of the first `distinct`, in all matrices alike."""
    array = np.array(values, np.int64).reshape(-1, *shape[-2:])
    numbers = Numbers(seed)
    chosen = [numbers.below(distinct) for _ in range(shape[-2])]
    return [int(value) for value in array[:, chosen].reshape(-1)]


def pack(values: list[int], dtype: str) -> bytes:
    """The values as little-endian floats of a dtype; as int8, an eighth of them, wrapped."""
    if dtype == "int8":
        return bytes(value >> 17 & 0xFF for value in values)
    layout = LAYOUTS[dtype]
    return b"".join(layout.bits(value).to_bytes(layout.bytes, "little") for value in values)


def noise(count: int, seed: int) -> bytes:
    numbers = Numbers(seed)
    return bytes(numbers.below(256) for _ in range(count))


@dataclass(frozen=True)
class Case:
    """One golden blob: what it holds and how it is made."""

    name: str
    level: int
    dtype: str
    shape: Shape
    content: bytes
    encode: Callable[[], bytes]


def tensor_case(
    name: str, level: int, dtype: str, shape: Shape, content: bytes, **hints: Any
) -> Case:
    tensor = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).reshape(shape)
    encode = partial(gaac.encode, tensor, level=level, **hints)
    return Case(f"{dtype}-{level}-{name}", level, dtype, shape, content, encode)


def cases() -> Iterator[Case]:
    """All golden blobs, in the order of the index."""
    for dtype in ("float16", "bfloat16"):
        for level in (1, 2, 3, 5):
            yield from _sixteen_bits(dtype, level)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for level in (1, 2, 3, 5):
            yield _eight_bits(dtype, level)
    yield _eight_bits("int8", 3)
    yield from _stored()


def _sixteen_bits(dtype: str, level: int) -> Iterator[Case]:
    make = partial(tensor_case, level=level, dtype=dtype)
    turns = np.array([10430 >> pair for pair in range(8)], np.uint16)
    for name, rope, width in (
        ("k", Rope(turns), 16),
        ("k-interleaved", Rope(turns[:6], interleaved=True), 17),
    ):
        shape = (1, 2, 72, width)
        content = pack(values_like_k(shape, 11, rope), dtype)
        yield make(name, shape=shape, content=content, kind="k", rope=rope)

    shape = (2, 1, 100, 18)
    yield make("v", shape=shape, content=pack(values_like_v(shape, 12), dtype), kind="v")

    shape = (1, 2, 300, 5)  # a column of full blocks and one of the rest, which is noise
    words = np.frombuffer(pack(values_like_v(shape, 13), dtype), np.uint16).reshape(shape).copy()
    words[:, :, 256:] = np.frombuffer(noise(2 * 2 * 44 * 5, 14), np.uint16).reshape(1, 2, 44, 5)
    yield make("segments", shape=shape, content=words.tobytes())

    shape = (1, 2, 280, 16)
    values = repeat_tokens(values_like_v(shape, 15), shape, 16, distinct=30)
    yield make("repeats", shape=shape, content=pack(values, dtype), kind="v")

    content = pack(values_like_v((1, 500, 3), 17), dtype) + b"\x7f"
    encode = partial(gaac.compress, content, level=level, dtype=dtype)
    yield Case(f"{dtype}-{level}-bytes", level, dtype, (len(content),), content, encode)


def _eight_bits(dtype: str, level: int) -> Case:
    shape = (1, 2, 70, 12)
    values = [value >> 2 for value in values_like_v(shape, 18)]
    return tensor_case("v", level, dtype, shape, pack(values, dtype))


def _stored() -> Iterator[Case]:
    shape = (1, 1, 12, 10)
    values = values_like_v(shape, 19)
    for dtype in (*LAYOUTS, "int8"):
        yield tensor_case("stored", 0, dtype, shape, pack(values, dtype))
    yield tensor_case("noise", 3, "bfloat16", (3, 40), noise(240, 20))
    yield tensor_case(
        "one-axis", 3, "float16", (700,), pack(values_like_v((1, 100, 7), 21), "float16")
    )
    yield Case("empty", 3, "float16", (0,), b"", partial(gaac.compress, b"", level=3))


def entry(case: Case) -> dict[str, Any]:
    """What the index says of a case."""
    return {
        "name": case.name,
        "level": case.level,
        "dtype": case.dtype,
        "shape": list(case.shape),
        "sha256": hashlib.sha256(case.content).hexdigest(),
    }


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.gaac"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.gaac"):
        old.unlink()
    index, total_bytes = [], 0
    for case in cases():
        blob = case.encode()
        if gaac.decompress(blob) != case.content:
            raise SystemExit(f"{case.name} does not come back.")
        if len(blob) > MAX_BLOB_BYTES:
            raise SystemExit(f"{case.name} takes {len(blob)} bytes: make it smaller.")
        path_of(case.name).write_bytes(blob)
        index.append(entry(case))
        total_bytes += len(blob)
    INDEX.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    print(f"{len(index)} blobs, {total_bytes} bytes, in {FOLDER}")


if __name__ == "__main__":
    main()
