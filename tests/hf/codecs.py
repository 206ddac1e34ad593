"""Foreign codecs: what someone else might plug into the cache, good and bad."""

from __future__ import annotations

import pickle
import zlib

import torch


class ZlibCodec:
    """A lossless codec that is not gaac: zlib over the tensor's bytes."""

    def __repr__(self) -> str:
        return type(self).__name__

    def encode(self, tensor: torch.Tensor) -> bytes:
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        return zlib.compress(pickle.dumps((tuple(tensor.shape), tensor.dtype, raw)), 1)

    def decode(self, blob: bytes) -> torch.Tensor:
        shape, dtype, raw = pickle.loads(zlib.decompress(blob))
        return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


class CountingCodec(ZlibCodec):
    """Counts what it encodes and decodes."""

    def __init__(self) -> None:
        self.encoded = self.decoded = 0

    def encode(self, tensor: torch.Tensor) -> bytes:
        self.encoded += 1
        return super().encode(tensor)

    def decode(self, blob: bytes) -> torch.Tensor:
        self.decoded += 1
        return super().decode(blob)


class FlippingCodec(ZlibCodec):
    """Loses one bit of every block: the lowest of its first value."""

    def decode(self, blob: bytes) -> torch.Tensor:
        tensor = super().decode(blob)
        tensor.view(torch.int16).view(-1)[0] ^= 1
        return tensor


class ScramblingCodec(ZlibCodec):
    """Destroys the tensor that it was given, as some real codecs do."""

    def encode(self, tensor: torch.Tensor) -> bytes:
        blob = super().encode(tensor)
        tensor.zero_()
        return blob


class PaddedCodec(ZlibCodec):
    """Makes every block larger than it was, and gives it as a uint8 tensor."""

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        blob = pickle.dumps((tuple(tensor.shape), tensor.dtype, raw))
        return torch.frombuffer(bytearray(blob + bytes(1000)), dtype=torch.uint8)

    def decode(self, blob: bytes) -> torch.Tensor:
        shape, dtype, raw = pickle.loads(blob)
        return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


class FailingCodec(ZlibCodec):
    """Fails at the encode call number `at`, counted from 1."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def encode(self, tensor: torch.Tensor) -> bytes:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("no memory left")
        return super().encode(tensor)


class ShapelessCodec(ZlibCodec):
    """Gives the values back, but not their shape."""

    def decode(self, blob: bytes) -> torch.Tensor:
        return super().decode(blob).flatten()
