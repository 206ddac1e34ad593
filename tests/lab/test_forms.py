"""Six forms on a tiny random model: what is equal, what is counted, what is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gaac_lab import bandwidth, forms, kv, step_split, twin, verify
from gaac_lab.attention import switched
from gaac_lab.compare import Comparison, compare
from gaac_lab.configuration import BASELINE, EAGER, GROUPED, Configuration
from gaac_lab.measure import Failure, Ratio
from gaac_lab.request import Request

FUSED = Configuration(level=1, block_tokens=32, integration="fused")
RAW_KERNEL = FUSED.raw_twin


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 128, (2, 100), generator=torch.Generator().manual_seed(1))


def only(outcomes: list[Comparison | Failure]) -> Comparison:
    (outcome,) = outcomes
    assert isinstance(outcome, Comparison)
    return outcome


@pytest.mark.parametrize(
    "configuration",
    [
        GROUPED,
        EAGER,
        FUSED,
        RAW_KERNEL,
        FUSED.model_copy(update={"scope": "k"}),
        FUSED.model_copy(update={"window": 40}),
        FUSED.model_copy(update={"level": 3}),
    ],
    ids=lambda one: one.label,
)
def test_another_kernel_is_compared_bit_for_bit_with_itself_on_raw_kv(
    tiny: Any, ids: torch.Tensor, configuration: Configuration
) -> None:
    before = tiny.config._attn_implementation
    outcome = only(compare(tiny, ids, [configuration], new_tokens=6, rounds=2))
    assert tiny.config._attn_implementation == before
    assert outcome.tensor_equal
    assert outcome.logit_max_abs_diff < 0.1
    assert outcome.eager_logit_max_abs_diff is not None
    assert outcome.eager_logit_max_abs_diff < 0.1
    assert outcome.kv_raw_bytes == 2 * 2 * 2 * 64 * 2 * 2 * (100 + 6)


def test_where_attention_is_kept_there_is_no_yardstick(tiny: Any, ids: torch.Tensor) -> None:
    outcome = only(compare(tiny, ids, [BASELINE], new_tokens=2, rounds=1))
    assert outcome.eager_logit_max_abs_diff is None


def test_steps_run_under_the_attention_that_was_asked_for(
    tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the uncompressed cache, stepped in turn, under the model's own."""
    seen: list[tuple[str, str]] = []
    plain = Request._advance

    def advance(self: Request, given: torch.Tensor) -> None:
        if given.shape[1] == 1:
            seen.append((type(self.cache).__name__, tiny.config._attn_implementation))
        plain(self, given)

    monkeypatch.setattr(Request, "_advance", advance)
    with switched(tiny, "fused"):
        fused_name = tiny.config._attn_implementation
    compare(tiny, ids, [FUSED], new_tokens=4, rounds=1)
    assert set(seen) >= {("BlockCompressedCache", fused_name), ("DynamicCache", "sdpa")}
    assert ("DynamicCache", fused_name) not in seen
    assert ("BlockCompressedCache", "sdpa") not in seen


def wrong_bit(cache: Any) -> Any:
    """A cache that stores the lowest bit of one value a call wrongly."""
    update = cache.update

    def wrong(keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = keys.clone()
        keys.view(torch.int16)[0, 0, 0, 0] ^= 1
        return update(keys, *args, **kwargs)

    cache.update = wrong
    return cache


@pytest.mark.parametrize("level", [0, 1])
def test_one_wrong_bit_under_another_kernel_is_seen(
    tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    made = []
    make = Configuration.make_cache

    def first_is_wrong(self: Configuration, config: Any) -> Any:
        cache = make(self, config)
        if self.integration != "fused" or self.block_tokens != 32:
            return cache
        made.append(self)
        return wrong_bit(cache) if len(made) == 1 else cache

    monkeypatch.setattr(Configuration, "make_cache", first_is_wrong)
    configuration = FUSED.model_copy(update={"level": level})
    outcome = only(compare(tiny, ids, [configuration], new_tokens=3, rounds=1))
    assert not outcome.tensor_equal


def run_for(request: Request, steps: int) -> list[torch.Tensor]:
    """The logits of the prefill and of each step."""
    logits = []
    for number in range(steps + 1):
        request.step() if number else request.prefill()
        assert request.logits is not None
        logits.append(request.logits.clone())
    return logits


def test_a_kernel_whose_logits_differ_by_a_bit_is_seen(tiny: Any, ids: torch.Tensor) -> None:
    request = Request.of(tiny, ids, FUSED)
    logits = run_for(request, 2)
    assert twin.agrees(tiny, ids, FUSED, request, logits)
    logits[2].view(torch.int16)[1, 5] ^= 1
    assert not twin.agrees(tiny, ids, FUSED, request, logits)


def test_a_cache_that_holds_another_bit_is_seen_whatever_the_logits(
    tiny: Any, ids: torch.Tensor
) -> None:
    request = Request.of(tiny, ids, FUSED)
    logits = run_for(request, 2)
    changed = wrong_bit(FUSED.make_cache(tiny.config))
    for layer in kv.layers(request.cache):
        changed.update(layer.keys, layer.values, layer.layer)
    request.cache = changed
    assert not twin.agrees(tiny, ids, FUSED, request, logits)


def test_packed_pages_against_raw_pages_step_in_turn(tiny: Any, ids: torch.Tensor) -> None:
    outcome = only(compare(tiny, ids, [FUSED], against=RAW_KERNEL, new_tokens=6, rounds=2))
    assert outcome.tensor_equal
    assert outcome.tokens_equal
    assert outcome.logit_max_abs_diff == 0.0
    assert outcome.kv_stored_bytes < outcome.kv_raw_bytes


def test_outputs_under_fused_attention_are_verified_against_raw_pages(
    tiny: Any, ids: torch.Tensor
) -> None:
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    for given in (None, mask):
        record = verify._compare_outputs(tiny, FUSED, ids, given, 5)
        assert record["tensor_equal"]
        assert record["logit_bits_equal"]
        assert record["tokens_equal"]
        assert record["kv_stored_bytes"] < record["kv_raw_bytes"]


def test_the_six_forms_are_measured_and_the_gain_is_split(tiny: Any, ids: torch.Tensor) -> None:
    records, gain = forms.run(tiny, ids, level=1, block_tokens=32, new_tokens=3, rounds=2)
    assert [record["name"] for record in records] == list(forms.six())
    assert len({record["label"] for record in records}) == 6
    assert all(record["tensor_equal"] for record in records)
    by_name = {record["name"]: record for record in records}
    raw = by_name[forms.DEFAULT]["kv_raw_bytes"]
    assert by_name[forms.FUSED]["moved_bytes"] == by_name[forms.FUSED]["kv_stored_bytes"] < raw
    assert by_name["transformers' eager"]["moved_bytes"] == 3 * raw + 2 * 3 * raw
    assert gain is not None
    assert gain.total.median == by_name[forms.FUSED]["ratio_to_baseline"]
    assert gain.kernel.median == by_name[forms.RAW_KERNEL]["ratio_to_baseline"]
    assert gain.torch.median == by_name[forms.TORCH]["ratio_to_baseline"]
    assert gain.compression.rounds == 2


def test_what_does_not_fit_leaves_reasons_and_no_gain(
    tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(forms, "require_room", full)
    records, gain = forms.run(tiny, ids, level=1, block_tokens=32, new_tokens=3, rounds=2)
    assert gain is None
    assert {record["status"] for record in records} == {"out_of_memory"}
    assert all("no room" in record["reason"] for record in records)


def test_the_sentence_says_what_is_kernel_and_what_is_compression() -> None:
    total, kernel, compression, torch_form = (
        Ratio(value, value - 0.1, value + 0.1, 8, 2, 0.5) for value in (4.0, 3.5, 1.2, 2.0)
    )
    sentence = forms.Gain(4096, total, kernel, compression, torch_form).sentence
    for words in (
        "At 4,096 tokens", "4.00× [3.90, 4.10] of transformers' default",
        "3.50× [3.40, 3.60] is the kernel", "1.20× [1.10, 1.30] the compression",
        "torch form reaches 2.00×",
    ):  # fmt: skip
        assert words in sentence


@pytest.mark.parametrize("name", list(forms.six()))
def test_the_parts_of_a_step_add_up_in_every_form(tiny: Any, ids: torch.Tensor, name: str) -> None:
    before = tiny.config._attn_implementation
    configuration = forms.six(1, 32)[name]
    split = step_split.measure(tiny, ids, configuration, steps=3)
    assert tiny.config._attn_implementation == before
    for part in ("attention_s", "cache_s", "rest_s"):
        assert 0 < split[part] < split["step_s"]
    assert (split["unpack_s"] > 0) == (name == "compressed, materialised")


def test_the_split_takes_its_timers_away_again(tiny: Any, ids: torch.Tensor) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = ("sdpa", "eager")
    before = [ALL_ATTENTION_FUNCTIONS.get(name) for name in names]
    for configuration in (BASELINE, EAGER):
        step_split.measure(tiny, ids, configuration, steps=1)
    assert [ALL_ATTENTION_FUNCTIONS.get(name) for name in names] == before


def test_traffic_counts_what_each_form_moves() -> None:
    moved = {
        name: bandwidth.traffic(one, 100, 70, heads_per_kv_head=3).total_bytes
        for name, one in forms.six().items()
    }
    assert list(moved.values()) == [300, 900, 100, 70, 270, 70]
    assert bandwidth.traffic(EAGER, 100, 100).total_bytes == 300  # one head each: nothing repeats


def test_switching_back_keeps_the_caches_apart(tiny: Any, ids: torch.Tensor) -> None:
    """A fused cache that the model's own attention reads gives full tensors: right, only slower."""
    fused = Request.of(tiny, ids, FUSED)
    fused.prefill()
    fused.step()
    own = Request(tiny, ids, None)
    own.resume(fused, fused.cache.fork())
    own.step()
    assert kv.raw_bytes(own.cache) == kv.raw_bytes(fused.cache) + 2 * 2 * 2 * 64 * 2 * 2
    assert own.logits is not None
    assert torch.isfinite(own.logits.float()).all()


def test_what_caches_share_counts_once(tiny: Any, ids: torch.Tensor) -> None:
    fused = Request.of(tiny, ids, FUSED)
    fused.prefill()
    fused.settle()
    forks = [fused.cache.fork() for _ in range(5)]
    assert kv.bytes_together([fused.cache, *forks]) == kv.stored_bytes(fused.cache)
    plain = Request.of(tiny, ids, BASELINE)
    plain.prefill()
    copies = [copy.deepcopy(plain.cache) for _ in range(5)]
    assert kv.bytes_together([plain.cache, *copies]) == 6 * kv.stored_bytes(plain.cache)
