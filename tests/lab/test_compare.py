"""Comparisons on a tiny random model: what they count, and that a lossy codec cannot hide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gaac_lab import codec_speed, kv, step_split, verify
from gaac_lab.compare import Comparison, compare, max_abs_diff
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.measure import Failure
from gaac_lab.request import Request, warm_up

PACKED = Configuration(level=1, block_tokens=16)


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 128, (2, 100), generator=torch.Generator().manual_seed(1))


def test_a_comparison_counts_steps_bytes_and_bits(tiny: Any, ids: torch.Tensor) -> None:
    plain, packed = compare(tiny, ids, [BASELINE, PACKED], new_tokens=6, rounds=3)
    assert isinstance(plain, Comparison)
    assert isinstance(packed, Comparison)
    raw_bytes = 2 * 2 * 2 * 32 * 2 * 2 * (100 + 6)  # K and V, layers, KV heads, dim, bf16, batch
    assert plain.kv_raw_bytes == plain.kv_stored_bytes == packed.kv_raw_bytes == raw_bytes
    assert packed.kv_stored_bytes < raw_bytes
    assert packed.step.n == packed.ratio.n == 3 * 6
    assert packed.ratio.rounds == packed.ttft.n == 3
    assert packed.tensor_equal
    assert packed.tokens_equal
    assert packed.logit_max_abs_diff == 0.0
    assert packed.decode_tok_s.median == pytest.approx(2 / packed.step.median)


def test_one_wrong_bit_in_a_cache_is_seen(
    tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = PACKED.make_codec()

    class Wrong:
        """The lowest bit of one value a block, at every decoding."""

        def encode(self, tensor: torch.Tensor) -> bytes:
            return codec.encode(tensor)

        def decode(self, blob: bytes) -> torch.Tensor:
            return verify.OneWrongBit(codec).decode(blob)

    monkeypatch.setattr(Configuration, "make_codec", lambda self: Wrong())
    wrong = Configuration(codec="zstd", level=None, block_tokens=16)
    (outcome,) = compare(tiny, ids, [wrong], new_tokens=3, rounds=1)
    assert isinstance(outcome, Comparison)
    assert not outcome.tensor_equal


def test_no_memory_becomes_a_failure_in_its_place(
    tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Greedy:
        def encode(self, tensor: torch.Tensor) -> bytes:
            torch.empty(2**60, dtype=torch.uint8)
            raise AssertionError

        def decode(self, blob: bytes) -> torch.Tensor:
            raise AssertionError

    greedy = Configuration(codec="zstd", level=None, block_tokens=64)
    monkeypatch.setattr(Configuration, "make_codec", lambda self: Greedy())
    plain, failed = compare(tiny, ids, [BASELINE, greedy], new_tokens=2, rounds=1)
    assert isinstance(plain, Comparison)
    assert isinstance(failed, Failure)
    assert failed.kind == "out_of_memory"


def test_a_request_is_greedy_generation(tiny: Any, ids: torch.Tensor) -> None:
    request = Request(tiny, ids, BASELINE.make_cache(tiny.config))
    request.prefill()
    for _ in range(7):
        request.step()
    expected = tiny.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=-1
    )
    assert torch.equal(request.new_tokens, expected[:, 100:])


def test_a_step_before_the_prefill_is_refused(tiny: Any, ids: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="prefill"):
        Request(tiny, ids, BASELINE.make_cache(tiny.config)).step()


def test_the_parts_of_a_step_add_up_and_the_model_is_left_as_it_was(
    tiny: Any, ids: torch.Tensor
) -> None:
    before = tiny.config._attn_implementation
    plain = step_split.measure(tiny, ids, BASELINE, steps=3)
    packed = step_split.measure(tiny, ids, PACKED, steps=3)
    assert tiny.config._attn_implementation == before
    for split in (plain, packed):
        for part in ("attention_s", "cache_s", "rest_s"):
            assert 0 < split[part] < split["step_s"]
    assert plain["unpack_s"] == plain["pack_s"] == 0
    assert packed["unpack_s"] > 0


def test_what_another_thread_packs_is_timed_beside_the_step(tiny: Any, ids: torch.Tensor) -> None:
    # 100 tokens read; the first step is not timed, the next ones reach 112 = 7 * 16.
    split = step_split.measure(tiny, ids, PACKED, steps=12)
    assert split["pack_s"] > 0
    parts = (split[name] for name in ("attention_s", "unpack_s", "cache_s", "rest_s"))
    assert sum(parts) == pytest.approx(split["step_s"])


def test_a_warm_up_packs_and_unpacks(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a codec's first use, its import included, would fall to a clock or a memory meter."""
    codec, calls = PACKED.make_codec(), []

    class Counting:
        def encode(self, tensor: torch.Tensor) -> bytes:
            calls.append("encode")
            return codec.encode(tensor)

        def decode(self, blob: bytes) -> torch.Tensor:
            calls.append("decode")
            return codec.decode(blob)

    monkeypatch.setattr(Configuration, "make_codec", lambda self: Counting())
    warm_up(tiny, Configuration(codec="zstd", level=None, block_tokens=4096, window=512))
    assert {"encode", "decode"} <= set(calls)


def test_codecs_alone_are_timed_on_full_blocks(tiny: Any, ids: torch.Tensor) -> None:
    keys_only = Configuration(level=1, block_tokens=32, scope="k")
    too_long = Configuration(level=1, block_tokens=128)
    plain, both, keys, none = codec_speed.measure(
        tiny, ids, [BASELINE, Configuration(level=1, block_tokens=32), keys_only, too_long],
        repeats=2,
    )  # fmt: skip
    assert set(plain) == set(both) == set(codec_speed.COLUMNS)
    assert set(plain.values()) == set(none.values()) == {None}
    # 2 rows of 100 tokens: 3 full blocks for K and for V in each of 2 layers, twice.
    assert both["block_n"] == 2 * keys["block_n"] == 3 * 2 * 2 * 2
    assert both["decode_block_p50_s"] <= both["decode_block_p95_s"]
    assert both["codec_ratio"] > 1
    per_token = both["encode_block_p50_s"] * 2 * 2 / 32
    assert both["pack_s_per_token"] == pytest.approx(per_token)


def test_a_difference_with_nans_is_not_zero() -> None:
    a = torch.tensor([[1.0, float("nan")]])
    assert max_abs_diff(a, a.clone()) == 0.0
    assert max_abs_diff(a, torch.tensor([[1.0, 2.0]])) > 1e38
    assert max_abs_diff(torch.tensor([[1.0]]), torch.tensor([[1.5]])) == 0.5


def test_tensors_are_compared_as_integers() -> None:
    zeros = torch.zeros(4, dtype=torch.bfloat16)
    assert not kv.same_bits(zeros, -zeros)
    nan = torch.full((4,), 0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    assert kv.same_bits(nan, nan.clone())
    assert not kv.same_bits(zeros, zeros[:3])


def test_verification_passes_on_a_lossless_codec_and_its_controls_bite(
    tiny: Any, ids: torch.Tensor
) -> None:
    cache = verify.read(tiny, ids)
    codec = PACKED.make_codec()
    records = verify.tensors(cache, codec)
    assert len(records) == 2 * 2
    assert all(record["equal"] for record in records)
    assert all(control["as_expected"] for control in verify.controls(cache, codec))


def test_a_control_fails_when_the_codec_hides_the_bit(tiny: Any, ids: torch.Tensor) -> None:
    """A codec that keeps a copy of what it was given would look lossless: it also shrinks noise."""

    class Cheat:
        def encode(self, tensor: torch.Tensor) -> bytes:
            self.kept = tensor
            return b"small"

        def decode(self, blob: bytes) -> torch.Tensor:
            return self.kept

    controls = verify.controls(verify.read(tiny, ids), Cheat())
    assert not controls[1]["as_expected"]
