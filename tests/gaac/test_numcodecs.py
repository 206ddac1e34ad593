"""gaac named as a codec: by numcodecs, by Zarr arrays of both formats, by a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

import gaac
from gaac.numcodecs_codec import Gaac
from gaac.zarr_codec import GaacCodec
from tests.gaac.data import SPECIAL, bits, gaussian

SHAPE = (1, 2, 512, 80)


def halves() -> np.ndarray:
    """float16 [1, 2, 512, 80] with every kind of special value in it."""
    words = bits(gaussian(SHAPE, "float16")).numpy().copy().view(np.uint16)
    words.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return words.view(np.float16)


def brains() -> np.ndarray:
    """bfloat16 as numpy holds it, uint16 [1, 2, 512, 80]."""
    return bits(gaussian(SHAPE, "bfloat16")).numpy().view(np.uint16)


def content(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("level", gaac.LEVELS)
@pytest.mark.parametrize("threads", [1, 2, None])
def test_round_trip(level: int, threads: int | None) -> None:
    array, codec = halves(), Gaac(level=level, threads=threads)
    blob = codec.encode(array)
    assert codec.decode(blob) == content(array)
    assert gaac.inspect(blob).level == level
    assert (len(blob) < array.nbytes) == (level > 0)


def test_it_writes_what_compress_writes() -> None:
    array = brains()
    expected = gaac.compress(content(array), level=1, dtype="bfloat16", row=80)
    assert Gaac(level=1, dtype="bfloat16").encode(array) == expected
    assert Gaac(level=1, dtype="bfloat16", row=80).encode(content(array)) == expected


def test_fortran_order_keeps_the_order_of_the_bytes() -> None:
    array = np.asfortranarray(halves()[0, 0])
    blob = Gaac().encode(array)
    assert blob == gaac.compress(array.tobytes(order="A"), row=512)
    assert Gaac().decode(blob) == array.tobytes(order="A")


def test_decode_into_an_array() -> None:
    array = halves()
    out = np.zeros(SHAPE, np.float16)
    result = Gaac().decode(Gaac().encode(array), out)
    assert np.shares_memory(result, out)
    assert content(out) == content(array)


def test_decode_into_an_array_of_another_size_leaves_it() -> None:
    out = np.zeros(7, np.float16)
    with pytest.raises(gaac.GaacError, match="14 bytes"):
        Gaac().decode(Gaac().encode(halves()), out)
    assert not out.any()


@pytest.mark.parametrize("buffer", [b"", b"\x01", bytearray(range(255)), memoryview(b"abc" * 50)])
def test_any_buffer_where_the_dtype_is_said(buffer: Any) -> None:
    codec = Gaac(dtype="bfloat16")
    assert codec.decode(codec.encode(buffer)) == bytes(buffer)


def test_an_array_of_another_dtype_is_refused() -> None:
    for array in (np.zeros(9, np.float32), brains(), b"bytes"):
        with pytest.raises(gaac.UnsupportedTensor, match="dtype"):
            Gaac().encode(array)


def test_gaps_and_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Gaac().encode(halves()[:, :, ::2])
    with pytest.raises(TypeError, match="object"):
        Gaac(dtype="float16").encode(np.array([{}]))


@pytest.mark.parametrize(
    "wrong", [{"level": 4}, {"dtype": "float32"}, {"row": 0}, {"row": "64"}, {"threads": 0}]
)
def test_a_wrong_configuration_is_refused_at_once(wrong: dict[str, Any]) -> None:
    for codec in (Gaac, GaacCodec):
        with pytest.raises(gaac.GaacError):
            codec(**wrong)


def test_damage_is_refused() -> None:
    blob = bytearray(Gaac().encode(halves()))
    blob[len(blob) // 2] ^= 1
    with pytest.raises(gaac.CorruptFrame):
        Gaac().decode(bytes(blob))


def test_the_configuration_survives_json() -> None:
    codec = Gaac(level=1, dtype="bfloat16", row=128, threads=None)
    config = json.loads(json.dumps(codec.get_config()))
    assert config == {
        "id": "gaac",
        "level": 1,
        "dtype": "bfloat16",
        "row": 128,
        "threads": None,
    }
    assert numcodecs.get_codec(config) == codec


def run(code: str, *arguments: str) -> str:
    """What a new process prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_new_process_finds_the_codec_by_its_name() -> None:
    code = "import numcodecs; print(numcodecs.get_codec({'id': 'gaac', 'level': 1}))"
    assert run(code) == "Gaac(dtype=None, level=1, row=None, threads=1)"


def test_gaac_alone_does_not_import_numcodecs() -> None:
    code = "import gaac, sys; print({'numcodecs', 'zarr'} & set(sys.modules))"
    assert run(code) == "set()"


ARRAYS = [(halves, None), (brains, "bfloat16")]


def chunk_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if path.name not in ("zarr.json", ".zarray", ".zattrs")]


def compressors(zarr_format: int, dtype: str | None) -> Gaac | GaacCodec:
    made: type[Gaac | GaacCodec] = Gaac if zarr_format == 2 else GaacCodec
    return made(level=3, dtype=dtype)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(("make", "dtype"), ARRAYS)
def test_zarr_array(zarr_format: int, make: Any, dtype: str | None, tmp_path: Path) -> None:
    array = make()
    written = zarr.create_array(
        store=tmp_path / "kv.zarr",
        shape=array.shape,
        chunks=(1, 1, 256, 80),
        dtype=array.dtype,
        compressors=compressors(zarr_format, dtype),
        zarr_format=zarr_format,
    )
    written[...] = array
    assert content(zarr.open_array(tmp_path / "kv.zarr", mode="r")[...]) == content(array)
    assert written.nbytes_stored() < array.nbytes
    blobs = [path.read_bytes() for path in chunk_files(tmp_path)]
    pieces = [array[:, head, start : start + 256] for head in (0, 1) for start in (0, 256)]
    # The last axis of a chunk is the row.
    expected = [gaac.compress(content(p), dtype=dtype or "float16", row=80) for p in pieces]
    assert sorted(blobs) == sorted(expected)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_new_process_reads_a_zarr_array(zarr_format: int, tmp_path: Path) -> None:
    array = halves()
    zarr.create_array(
        store=tmp_path / "kv.zarr",
        data=array,
        compressors=compressors(zarr_format, None),
        zarr_format=zarr_format,
    )
    code = "import sys, zarr; print(zarr.open_array(sys.argv[1], mode='r')[...].tobytes().hex())"
    assert bytes.fromhex(run(code, str(tmp_path / "kv.zarr"))) == content(array)


def test_zarr_array_of_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gaac.UnsupportedTensor, match="uint16"):
        zarr.create_array(
            store=tmp_path / "kv.zarr", shape=(4, 64), dtype="uint16", compressors=GaacCodec()
        )


def test_a_damaged_zarr_chunk_is_refused(tmp_path: Path) -> None:
    array = zarr.create_array(store=tmp_path / "kv.zarr", data=halves(), compressors=GaacCodec())
    chunk = chunk_files(tmp_path)[0]
    damaged = bytearray(chunk.read_bytes())
    damaged[100] ^= 4
    chunk.write_bytes(damaged)
    with pytest.raises(gaac.CorruptFrame):
        array[...]
