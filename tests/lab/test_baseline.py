"""The baseline's rows: what was measured, and why something was not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gaac_lab import baseline, batches, decision, sweep
from gaac_lab.configuration import BASELINE, Configuration


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: tuple[Any, Any]) -> Any:
    """(model, tokenizer, folder): two random layers that claim an endless context."""
    _, tokenizer = default_model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=10**12,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    folder = tmp_path_factory.mktemp("tiny model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, str(folder)


def test_a_length_that_does_not_fit_keeps_its_row_and_the_run_goes_on(tiny: Any) -> None:
    model, tokenizer, folder = tiny
    said: list[str] = []
    long, short = baseline.run(
        model,
        tokenizer,
        name=folder,
        prompt="log_hunt",
        lengths=[10**11, 64],
        new_tokens=3,
        repeats=2,
        say=said.append,
    )
    assert long["status"] == "out_of_memory"
    assert "GiB are free" in long["reason"]
    assert "ttft_s" not in long
    assert short["status"] == "measured"
    assert short["ttft_s_n"] == 2
    assert short["decode_tok_s_n"] == 6
    assert short["kv_raw_bytes"] == 2 * 2 * 64 * 2 * (64 + 3)
    assert short["peak_bytes"] > 0
    assert len(short["prompt_sha256"]) == 64
    assert said == ["100,000,000,000 tokens", "64 tokens"]


def test_a_length_beyond_the_context_is_skipped_with_the_reason(
    default_model: tuple[Any, Any],
) -> None:
    model, tokenizer = default_model
    (row,) = baseline.run(
        model, tokenizer, name="default", prompt="log_hunt", lengths=[8192], new_tokens=8, repeats=1
    )
    assert row["status"] == "skipped"
    assert "context of 8,192" in row["reason"]


def test_a_sweep_keeps_rows_for_what_did_not_run_and_decides_on_the_rest(tiny: Any) -> None:
    model, tokenizer, folder = tiny
    points = sweep.points(Configuration(level=1, block_tokens=16), levels=[3])
    records = sweep.run(
        model,
        tokenizer,
        points,
        name=folder,
        prompt="log_hunt",
        lengths=[80, 10**11],
        new_tokens=3,
        rounds=2,
    )
    assert [(r["tokens"], r["status"]) for r in records] == [
        *[(80, "measured")] * 3,
        *[(10**11, "out_of_memory")] * 3,
    ]
    verdict = decision.decide(decision.rows(records))
    assert len(verdict.rows) == 6
    assert verdict.rows[1].peak_bytes is not None
    assert verdict.rows[4].judgement == decision.NO_BASELINE
    assert verdict.subject is not None
    assert verdict.subject.tokens == 80


def test_memory_that_runs_out_in_the_middle_of_a_sweep_keeps_the_rows(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, folder = tiny
    plain = type(model).forward

    def forward(self: Any, input_ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 64:
            torch.empty(2**60, dtype=torch.uint8)
        return plain(self, input_ids, cache=cache, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    points = sweep.points(Configuration(level=1, block_tokens=16))
    arguments = {"name": folder, "prompt": "log_hunt", "new_tokens": 2, "rounds": 1}
    records = sweep.run(model, tokenizer, points, lengths=[80], **arguments)
    assert [record["status"] for record in records] == ["out_of_memory"] * 2
    assert decision.decide(decision.rows(records)).verdict == "undecided"


def test_a_batch_that_does_not_fit_keeps_its_rows(tiny: Any) -> None:
    model, tokenizer, _ = tiny
    records = batches.run(
        model,
        tokenizer,
        Configuration(level=1, block_tokens=16),
        batches=[2, 10**10],
        prompt="log_hunt",
        tokens=40,
        new_tokens=2,
        rounds=1,
    )
    assert [r["status"] for r in records] == ["measured"] * 2 + ["out_of_memory"] * 2
    assert records[0]["label"] == BASELINE.label
    assert records[1]["tensor_equal"]
