"""gaac as a codec of Zarr format 3: `compressors=[GaacCodec(level=3)]`, or by name from metadata.

Zarr's own wrappers of numcodecs are a closed list, so this one goes through Zarr's extension point,
the entry point group `zarr.codecs`. Format 2 takes `gaac.numcodecs_codec.Gaac` as it is.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zarr.abc.codec import BytesBytesCodec
from zarr.core.buffer.cpu import as_numpy_array_wrapper

from gaac.numcodecs_codec import Gaac, row_of

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer
    from zarr.core.chunk_grids import ChunkGrid
    from zarr.core.dtype import ZDType


@dataclass(frozen=True)
class GaacCodec(BytesBytesCodec):
    """Compresses the bytes of a chunk; the fields are those of `gaac.numcodecs_codec.Gaac`.

    A dtype of None is the array's own, a row of None the last axis of a chunk.
    """

    level: int = 3
    dtype: str | None = None
    row: int | None = None
    threads: int | None = 1

    is_fixed_size = False

    def __post_init__(self) -> None:
        Gaac(**asdict(self))  # refuses what it would refuse

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GaacCodec:
        """From Zarr metadata: {"name": "gaac", "configuration": {...}}."""
        return cls(**data.get("configuration", {}))

    def to_dict(self) -> dict[str, Any]:
        return {"name": "gaac", "configuration": asdict(self)}

    def validate(
        self, *, shape: tuple[int, ...], dtype: ZDType[Any, Any], chunk_grid: ChunkGrid
    ) -> None:
        """Raise UnsupportedTensor for an array whose dtype gaac does not code, none being named."""
        self._codec(dtype, shape)

    def _codec(self, dtype: ZDType[Any, Any], shape: tuple[int, ...]) -> Gaac:
        own = dtype.to_native_dtype().name
        return Gaac(self.level, self.dtype or own, self.row or row_of(shape), self.threads)

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        codec = self._codec(chunk_spec.dtype, chunk_spec.shape)
        return await asyncio.to_thread(
            as_numpy_array_wrapper, codec.encode, chunk_bytes, chunk_spec.prototype
        )

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(
            as_numpy_array_wrapper,
            Gaac(threads=self.threads).decode,
            chunk_bytes,
            chunk_spec.prototype,
        )

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Zarr's question to codecs of a fixed size, which gaac is not: always an error."""
        raise NotImplementedError("What a chunk shrinks to depends on its values.")
