"""The oracle's part for level 5, from docs/format.md alone, one value at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import cache

PARTS = {1: 4, 2: 8}  # by dtype: parts of an exponent
SHIFT = {1: 10, 2: 7}  # by dtype: where the exponent starts


def decode(
    streams: list[bytes],
    dtype: int,
    shape: tuple[int, int, int],
    turns: tuple[int, ...],
    interleaved: bool,
) -> Iterator[int]:
    """The words of a segment of (blocks, rows, width), block by block, row by row."""
    blocks, rows, width = shape
    states, words, escapes, tops, scales, means, low = streams
    state = list(struct.unpack("<8Q", states))
    word = iter(struct.unpack(f"<{len(words) // 4}I", words))
    escape = iter(struct.unpack(f"<{len(escapes) // 2}H", escapes))
    pair_of = _pairs(width, len(turns), interleaved)
    index = 0
    for block in range(blocks):
        (top,) = struct.unpack_from("<H", tops, 2 * block)
        if turns and top >= 32768:
            top, pair_of = top - 32768, _pairs(width, 0, interleaved)
        scale = [top - code for code in scales[block * width : (block + 1) * width]]
        mean = struct.unpack_from(f"<{width}b", means, block * width)
        for row in range(rows):
            for c in range(width):
                a, b, pair = pair_of[c]
                unit = max(scale[a], scale[b])
                predicted = 16384 * mean[c]
                if pair is not None:
                    angle = row * turns[pair] % 65536 // 16
                    sine, cosine = _sine(angle), _sine(angle + 1024)
                    if c == a:
                        predicted = mean[a] * cosine - mean[b] * sine
                    else:
                        predicted = mean[a] * sine + mean[b] * cosine
                ratio = _ratio(abs(predicted), unit - scale[c])
                lane = index % 8
                start, size, symbol = _find(ratio, scale[c] % 8, dtype, state[lane] % 65536)
                state[lane] = size * (state[lane] // 65536) + state[lane] % 65536 - start
                if state[lane] < 2**32:
                    state[lane] = state[lane] * 2**32 + next(word)
                size_low = 8 if dtype == 1 else 4
                bits_low = _low(low, index, size_low)
                if symbol == 0:
                    yield next(escape) | bits_low
                else:
                    step, part = divmod(symbol, PARTS[dtype])
                    agrees, step = divmod(step, 16)
                    exponent = step + scale[c] // 8 - 12 + _lift(ratio)
                    sign = (predicted < 0) == (agrees == 1)
                    yield (sign << 15 | exponent << SHIFT[dtype] | part << size_low | bits_low)
                index += 1


def _pairs(width: int, count: int, interleaved: bool) -> list[tuple[int, int, int | None]]:
    """For each channel, the first and second of its pair and the pair's number."""
    pairs: list[tuple[int, int, int | None]] = [(c, c, None) for c in range(width)]
    for j in range(count):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + count)
        pairs[a] = pairs[b] = (a, b, j)
    return pairs


@cache
def _sine(angle: int) -> int:
    return round(16384 * math.sin(2 * math.pi * (angle % 4096) / 4096))


def _ratio(predicted: int, above: int) -> int:
    """The class of |predicted| / scale; `above`: eighths of an octave from scale to unit."""
    if predicted == 0:
        return 0
    octave = predicted.bit_length() - 1
    eighths = 8 * octave + 8 * predicted // 2**octave - 8
    return min(max((eighths - 128 + above) // 4 + 8, 0), 19)


def _lift(ratio: int) -> int:
    return max(0, (ratio - 12) // 2)


def _low(low: bytes, index: int, bits: int) -> int:
    if bits == 8:
        return low[index]
    return low[index // 2] >> 4 * (index % 2) & 15


def _find(ratio: int, fraction: int, dtype: int, slot: int) -> tuple[int, int, int]:
    """Start, frequency and number of the symbol in whose range a slot falls."""
    start = 0
    for symbol, frequency in enumerate(_frequencies(ratio, fraction, PARTS[dtype])):
        if slot < start + frequency:
            return start, frequency, symbol
        start += frequency
    raise AssertionError("The frequencies of a context add up to 65536.")


@cache
def _frequencies(ratio: int, fraction: int, parts: int) -> list[int]:
    """The frequencies of all symbols of a context, for 8 parts or 4."""
    if parts == 4:
        eight = _frequencies(ratio, fraction, 8)
        return [a + b for a, b in zip(eight[::2], eight[1::2], strict=True)]
    scale = round(65536 * 2 ** ((2 * fraction + 1) / 16))
    centre = round(65536 * 2 ** ((2 * ratio - 15) / 4)) if ratio else round(65536 * 2**-4.5)
    mean = centre * scale // 65536
    weights = {}
    for agrees in (0, 1):
        for step in range(1, 16):
            for part in range(8):
                low, high = (
                    (8 + k) * 65536 * 2 ** (step + _lift(ratio)) // 2**15 for k in (part, part + 1)
                )
                if not agrees:
                    low, high = -high, -low
                weight = _t((high - mean) * 65536 // scale) - _t((low - mean) * 65536 // scale)
                weights[(agrees * 16 + step) * 8 + part] = max(0, weight)
    total = sum(weights.values())
    result = [0] * 256
    result[0] = 24
    for symbol, weight in weights.items():
        result[symbol] = 1 + weight * (65536 - 24 - 240) // total
    result[result.index(max(result))] += 65536 - sum(result)
    return result


def _t(x: int) -> int:
    """2^30 times the distribution function of Student's t with 8 degrees of freedom."""
    t = x * 75674 // 65536
    square = t * t + 8 * 2**32
    sine = abs(t) * 2**30 // math.isqrt(square)
    c = 8 * 2**62 // square
    series = 3 * 2**27 + 5 * c // 16
    series = 2**29 + c * series // 2**30
    series = 2**30 + c * series // 2**30
    half = sine * series // 2**31
    return 2**29 + half if t >= 0 else 2**29 - half
