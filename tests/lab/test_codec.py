"""KVCodec: every backend gives back every bit, and damaged blobs are refused by its header."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gaac_lab import kv
from gaac_lab.codec import CodecError, KVCodec
from gaac_lab.peers import PEERS, available

BACKENDS = ["gaac", *PEERS]


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every bit pattern there is: NaNs with payloads, infinities, -0.0, denormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)


def test_every_peer_is_installed_where_the_tests_run() -> None:
    assert available() == list(PEERS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 600])
def test_round_trip(backend: str, dtype: torch.dtype, tokens: int) -> None:
    tensor = words(1, 2, tokens, 64).view(dtype)
    before = tensor.clone()
    codec = KVCodec(backend=backend)
    back = codec.decode(codec.encode(tensor), shape=tuple(tensor.shape), dtype=dtype)
    assert kv.same_bits(tensor, back)
    assert kv.same_bits(tensor, before), "the codec wrote to its input"


@given(
    tokens=st.integers(0, 70),
    head_dim=st.integers(1, 40),
    block=st.integers(1, 64),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_of_any_shape(tokens: int, head_dim: int, block: int, seed: int) -> None:
    tensor = words(2, 1, tokens, head_dim, seed=seed).view(torch.bfloat16)
    codec = KVCodec(level=1, block_tokens=block)
    assert kv.same_bits(tensor, codec.decode(codec.encode(tensor)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_realistic_kv_shrinks(backend: str) -> None:
    scale = torch.linspace(0.1, 3, 64)
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(1, 2, 512, 64, generator=generator) * scale).to(torch.bfloat16)
    blob = KVCodec(backend=backend).encode(tensor)
    # Bit-shuffled lz4 is the weakest of them; it still finds something.
    assert len(blob) < 0.9 * tensor.numel() * 2


def test_a_strided_input_is_encoded_as_seen() -> None:
    tensor = words(1, 64, 300).view(torch.bfloat16).transpose(1, 2)
    codec = KVCodec()
    assert kv.same_bits(tensor, codec.decode(codec.encode(tensor)))


def test_a_blob_may_be_a_uint8_tensor() -> None:
    tensor = words(1, 2, 30, 8).view(torch.float16)
    codec = KVCodec()
    blob = torch.frombuffer(bytearray(codec.encode(tensor)), dtype=torch.uint8)
    assert kv.same_bits(tensor, codec.decode(blob))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"backend": "gzip"}, "choose gaac or one of"),
        ({"level": 7}, "gaac has the levels"),
        ({"block_tokens": 0}, "at least one token"),
    ],
)
def test_a_wrong_request_says_what_is_right(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(CodecError, match=sentence):
        KVCodec(**arguments)  # type: ignore[arg-type]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(CodecError, match="convert it first"):
        KVCodec().encode(torch.zeros(1, 1, 4, 4))


def test_a_blob_that_is_not_whole_is_refused() -> None:
    codec = KVCodec()
    blob = codec.encode(words(1, 1, 20, 8).view(torch.bfloat16))
    for broken in (blob[:-1], blob + b"\0", blob[:9], b"", b"KVC2" + blob[4:]):
        with pytest.raises(CodecError):
            codec.decode(broken)


def test_an_expected_shape_or_dtype_is_checked() -> None:
    codec = KVCodec()
    blob = codec.encode(words(1, 1, 20, 8).view(torch.bfloat16))
    with pytest.raises(CodecError, match="holds shape"):
        codec.decode(blob, shape=(1, 1, 8, 20))
    with pytest.raises(CodecError, match="holds bfloat16"):
        codec.decode(blob, dtype=torch.float16)
