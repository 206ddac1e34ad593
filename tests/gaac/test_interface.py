"""What the public functions accept, and the sentence each gives for what it does not."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import gaac
from gaac.kernels import reference
from gaac.rope import Rope
from tests.gaac.data import LEVELS, bits, gaussian, same

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"


def test_import_is_light() -> None:
    code = (
        "import sys, gaac; gaac.decompress(gaac.compress(b'abc', level=0));"
        "heavy = {'torch', 'transformers', 'gaac_lab', 'numba', 'numcodecs', 'triton', 'zarr'};"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_levels() -> None:
    assert gaac.LEVELS == {0: "stored", 1: "packed", 2: "tiered", 3: "entropy", 5: "context"}


@pytest.mark.parametrize("level", [4, -1, 1.0, True, "3", None, [1]])
def test_unknown_level(level: object) -> None:
    with pytest.raises(gaac.GaacError, match="choose one of 0 \\(stored\\)"):
        gaac.compress(b"", level=level)  # type: ignore[arg-type]
    with pytest.raises(gaac.GaacError, match="choose one of"):
        gaac.encode(gaussian((1, 8), "float16"), level=level)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int16, torch.int64, torch.uint8, torch.bool]
)
def test_other_torch_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(gaac.UnsupportedTensor, match="codes float16, bfloat16"):
        gaac.encode(torch.ones(2, 4).to(dtype))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "u2", "u1", "?"])
def test_other_numpy_dtypes(dtype: str) -> None:
    with pytest.raises(gaac.UnsupportedTensor, match="convert it"):
        gaac.encode(np.ones((2, 4), dtype))


def test_other_tensors() -> None:
    with pytest.raises(gaac.UnsupportedTensor, match="reshape"):
        gaac.encode(torch.tensor(1.0, dtype=torch.float16))
    with pytest.raises(gaac.UnsupportedTensor, match="reshape"):
        gaac.encode(torch.zeros([1] * 9, dtype=torch.float16))
    with pytest.raises(gaac.UnsupportedTensor, match="to_dense"):
        gaac.encode(torch.zeros(4, 4, dtype=torch.float16).to_sparse())
    with pytest.raises(gaac.UnsupportedTensor, match="no values"):
        gaac.encode(torch.zeros(4, 4, dtype=torch.float16, device="meta"))
    for other in (b"bytes", [1.0], None, "text"):
        with pytest.raises(gaac.UnsupportedTensor, match="torch tensor or a numpy array"):
            gaac.encode(other)


def test_hints() -> None:
    value = gaussian((1, 2, 64, 64), "bfloat16")
    for kind in ("k", "v", None):
        for rope in (None, np.arange(1, 33) / 32, Rope.of([1.0, 0.5])):
            assert gaac.encode(value, kind=kind, rope=rope) == gaac.encode(value)
    for bad in (10000.0, {"theta": 5e5}, [1.0] * 33, [float("nan")]):
        assert gaac.encode(value, level=1, rope=bad) == gaac.encode(value, level=1)
        with pytest.raises(gaac.GaacError, match="frequenc"):
            gaac.encode(value, level=5, rope=bad)
    for bad in ("q", "K", 1, []):
        with pytest.raises(gaac.GaacError, match="'k' for keys"):
            gaac.encode(value, kind=bad)  # type: ignore[arg-type]


def test_a_frame_keeps_the_rope_hint_of_keys_alone() -> None:
    value = gaussian((1, 2, 64, 64), "bfloat16")
    rope = Rope.of([1.0, 0.5], interleaved=True)
    for kind, pairs in (("k", 2), (None, 2), ("v", 0)):
        blob = gaac.encode(value, level=5, kind=kind, rope=rope)
        assert int.from_bytes(blob[26:28], "little") == pairs
        assert bool(blob[18] & 8) == (pairs > 0)
        assert blob[64 : 64 + 2 * pairs] == rope.turns.tobytes()[: 2 * pairs]
        assert same(gaac.decode(blob), value)
    flat = value.reshape(-1)
    assert gaac.encode(flat, level=5, rope=rope) == gaac.encode(flat, level=5)


@pytest.mark.parametrize("level", LEVELS)
def test_blobs_in_any_container(level: int) -> None:
    value = gaussian((1, 2, 256, 64), "bfloat16")
    blob = gaac.encode(value, level=level)
    spread = np.zeros(2 * len(blob), np.uint8)
    spread[::2] = np.frombuffer(blob, np.uint8)
    shifted = memoryview(b"x" + blob)[1:]
    as_torch = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    spread_torch = torch.from_numpy(spread)[::2]
    for box in (bytearray(blob), memoryview(blob), shifted, spread[::2], as_torch, spread_torch):
        assert same(gaac.decode(box), value)
        assert gaac.inspect(box).stored_bytes == len(blob)
        assert gaac.decompress(box) == bits(value).numpy().tobytes()


def test_not_bytes_like() -> None:
    for other in (None, "text", 3, [1, 2], torch.zeros(3)):
        for call in (gaac.compress, gaac.decompress, gaac.decode, gaac.inspect):
            with pytest.raises(TypeError, match="give"):
                call(other)  # type: ignore[operator]


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_in_any_container(level: int) -> None:
    data = bits(gaussian((1, 300, 64), "float16")).numpy().tobytes()
    blob = gaac.compress(data, level=level)
    array = np.frombuffer(data, np.uint16).reshape(300, 64)
    spread = np.zeros((300, 64, 2), np.uint16)
    spread[:, :, 0] = array
    turned = np.asfortranarray(array)
    for box in (bytearray(data), memoryview(data), array, spread[:, :, 0], turned):
        assert gaac.compress(box, level=level) == blob


@pytest.mark.parametrize("level", LEVELS)
def test_the_callers_buffer_is_left_alone(level: int) -> None:
    """Neither changed afterwards, nor for a moment while another thread looks on."""
    value = gaussian((1, 3, 1024, 64), "bfloat16")
    data = bytearray(bits(value).numpy().tobytes())
    before, seen, done = bytes(data), set(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(hash(bytes(data)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(5):
            gaac.compress(data, level=level, dtype="bfloat16")
            tensor = torch.frombuffer(data, dtype=torch.bfloat16).view(value.shape)
            blob = gaac.encode(tensor, level=level)
            gaac.decode(memoryview(blob))
    finally:
        done.set()
        watcher.join()
    assert seen <= {hash(before)}
    assert bytes(data) == before


def test_compress_arguments() -> None:
    for dtype in ("float32", "bf16", None, "int16", []):
        with pytest.raises(gaac.UnsupportedTensor, match="use float16, bfloat16"):
            gaac.compress(b"", dtype=dtype)  # type: ignore[arg-type]
    for row in (0, -1, 65537, 1.5, True, "64"):
        with pytest.raises(gaac.GaacError, match="values per row"):
            gaac.compress(b"", row=row)  # type: ignore[arg-type]


def test_decode_of_bytes() -> None:
    value = gaussian((500,), "bfloat16")
    data = bits(value).numpy().tobytes()
    assert same(gaac.decode(gaac.compress(data, dtype="bfloat16")), value)
    with pytest.raises(gaac.UnsupportedFrame, match=r"gaac\.decompress"):
        gaac.decode(gaac.compress(data + b"x", dtype="bfloat16"))


def test_out_must_fit() -> None:
    blob = gaac.encode(gaussian((1, 2, 64, 32), "bfloat16"), level=1)
    half, brain = torch.float16, torch.bfloat16
    for bad, why in (
        (torch.zeros(1, 2, 64, 32, dtype=half), "shape and dtype"),
        (torch.zeros(1, 2, 32, 64, dtype=brain), "shape and dtype"),
        (torch.zeros(1, 2, 1, 32, dtype=brain).expand(1, 2, 64, 32), "clone"),
        (np.zeros((1, 2, 64, 32), np.float16), "torch tensor"),
    ):
        with pytest.raises(gaac.UnsupportedTensor, match=why):
            gaac.decode(blob, out=bad)  # type: ignore[arg-type]
    good = torch.zeros(1, 2, 64, 32, dtype=brain)
    with pytest.raises(gaac.UnsupportedTensor, match="only one"):
        gaac.decode(blob, out=good, device="meta")
    assert gaac.decode(blob, out=good, device="cpu") is good


def test_device() -> None:
    value = gaussian((1, 2, 64, 32), "bfloat16")
    blob = gaac.encode(value)
    assert same(gaac.decode(blob, device="cpu"), value)
    assert gaac.decode(blob, device="meta").device.type == "meta"


def test_inspect() -> None:
    value = gaussian((1, 2, 300, 64), "float16")
    info = gaac.inspect(gaac.encode(value, level=1))
    assert list(info.streams) == ["base", "offsets", "escapes", "planes", "low"]
    assert info.streams["low"] == value.numel()
    assert info.streams["base"] == 2 * 2 * 64
    assert info.streams["offsets"] == 4 * 2 * 5
    assert 0 < info.stored_bytes - sum(info.streams.values()) < 512
    with pytest.raises(AttributeError):
        info.level = 3  # type: ignore[misc]


def test_errors_are_one_family() -> None:
    for error in (gaac.CorruptFrame, gaac.UnsupportedFrame, gaac.UnsupportedTensor):
        assert issubclass(error, gaac.GaacError)
    assert issubclass(gaac.GaacError, ValueError)


def example(name: str) -> bytes:
    """The bytes of an example in the format's specification."""
    block = re.search(rf"```hex {name}\n(.*?)```", FORMAT.read_text("utf-8"), re.S)
    assert block is not None
    blob = b""
    for line in block[1].splitlines():
        for token in line.split("#")[0].split():
            byte, _, times = token.partition("*")
            blob += bytes.fromhex(byte) * int(times or 1)
    return blob


def made(name: str) -> tuple[bytes, bytes]:
    """The blob that an example of the specification describes, and its content."""
    value = torch.ones(1, 1, 64, 8, dtype=torch.bfloat16)
    value[0, 0, 0, 0], value[0, 0, 0, 1], value[0, 0, 1, 0] = -0.0, 2.0, -1.5
    data = bits(value).numpy().tobytes()
    if name == "stored":
        corner = value[:, :, :2, :2].contiguous()
        return gaac.encode(corner, level=0), bits(corner).numpy().tobytes()
    if name == "repeats":
        return gaac.encode(value, level=1), data
    level = {"packed": 1, "entropy": 3}[name]
    return gaac.compress(data, level=level, dtype="bfloat16", row=8), data


@pytest.mark.parametrize("name", ["stored", "packed", "entropy", "repeats"])
def test_examples_of_the_specification(name: str) -> None:
    blob, content = made(name)
    assert blob.hex(" ") == example(name).hex(" ")
    assert gaac.decompress(blob) == content
    assert reference.decode(blob) == content
