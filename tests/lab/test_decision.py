"""The rule, on tables made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gaac_lab.decision import Row, decide

RAW = 1000


def row(name: str = "gaac", **changes: Any) -> Row:
    """A lossless row that saves 300 of 1,000 bytes at full speed, but for `changes`."""
    level = changes.pop("level", 1 if name == "gaac" else None)
    values: dict[str, Any] = {
        "codec": name,
        "level": level,
        "block_tokens": 256,
        "scope": "kv",
        "window": 0,
        "integration": "none" if name == "none" else "materialise",
        "tokens": 512,
        "kv_raw_bytes": RAW,
        "kv_stored_bytes": RAW if name == "none" else 700,
        "peak_bytes": 5000,
        "ratio_to_baseline": 1.0,
        "ratio_low": 0.99,
        "ratio_high": 1.01,
        "ratio_n": 30,
        "ratio_rounds": 5,
        "ratio_confidence": 0.94,
        "tensor_equal": True,
        "logit_max_abs_diff": 0.0,
        "tokens_equal": True,
        **changes,
    }
    return Row(label=f"{name} {values['block_tokens']}", **values)


BASE = row("none")


def speed(middle: float, spread: float = 0.01) -> dict[str, float]:
    return {
        "ratio_to_baseline": middle,
        "ratio_low": middle - spread,
        "ratio_high": middle + spread,
    }


def test_the_one_that_saves_most_among_the_acceptable_is_chosen() -> None:
    small = row(block_tokens=512, kv_stored_bytes=650)
    decision = decide([BASE, row(), small, row("zstd", kv_stored_bytes=600, **speed(0.5))])
    assert decision.verdict == "enable"
    assert decision.chosen is not None
    assert decision.chosen.block_tokens == 512
    assert "35%" in decision.reason


def test_all_too_slow_is_do_not_enable_and_names_the_fastest() -> None:
    decision = decide([BASE, row(**speed(0.6)), row(block_tokens=512, **speed(0.7))])
    assert decision.verdict == "do not enable"
    assert decision.chosen is None
    assert "gaac 512" in decision.reason
    assert "0.70×" in decision.reason


def test_an_interval_across_the_threshold_is_undecided() -> None:
    decision = decide([BASE, row(**speed(0.95, 0.05))])
    assert decision.verdict == "undecided"
    assert decision.chosen is None


def test_too_few_rounds_enable_nothing() -> None:
    decision = decide([BASE, row(ratio_rounds=2, ratio_confidence=0.5)])
    assert decision.verdict == "undecided"
    assert "2 rounds are too few" in decision.reason


def test_undecided_speaks_of_the_length_that_is_unclear() -> None:
    rows = [BASE, row(), row("none", tokens=2048), row(tokens=2048, **speed(0.97, 0.05))]
    decision = decide(rows)
    assert decision.verdict == "undecided"
    assert decision.subject is not None
    assert decision.subject.tokens == 2048
    assert "at 2,048 tokens, 0.97×" in decision.reason


def test_the_reason_does_not_call_slow_what_fails_for_memory() -> None:
    raises = row(block_tokens=512, peak_bytes=9000, **speed(0.99))
    decision = decide([BASE, row(**speed(0.5)), raises])
    assert decision.verdict == "do not enable"
    assert "1 too slow" in decision.reason
    assert "1 raises peak memory" in decision.reason
    assert "0.99×" in decision.reason
    assert "No configuration keeps" not in decision.reason


def test_nothing_measured_at_all_is_undecided_with_the_reason() -> None:
    absent = {"status": "skipped", "reason": "beyond the context"}
    decision = decide([row("none", **absent), row(**absent)])
    assert decision.verdict == "undecided"
    assert decision.subject is None
    assert "beyond the context" in decision.reason


def test_what_was_not_compared_is_not_called_lossy() -> None:
    decision = decide([BASE, row(tensor_equal=None)])
    assert decision.rows[1].judgement == "not measured"


def test_a_clear_candidate_beats_an_unclear_one_that_saves_more() -> None:
    unclear = row(block_tokens=512, kv_stored_bytes=500, **speed(0.95, 0.05))
    decision = decide([BASE, row(), unclear])
    assert decision.verdict == "enable"
    assert decision.chosen is not None
    assert decision.chosen.block_tokens == 256


def test_lossy_never_qualifies_however_good() -> None:
    decision = decide([BASE, row(tensor_equal=False, kv_stored_bytes=10, **speed(3.0))])
    assert decision.verdict == "do not enable"
    assert "1 not lossless" in decision.reason
    assert decision.subject is None


def test_a_configuration_that_raises_the_peak_does_not_qualify() -> None:
    decision = decide([BASE, row(peak_bytes=5100)])
    assert decision.verdict == "do not enable"
    assert decision.rows[1].judgement == "raises peak memory"


def test_a_peak_within_the_meter_s_own_spread_is_no_rise() -> None:
    assert decide([BASE, row(peak_bytes=5020)]).verdict == "enable"


def test_an_unknown_peak_does_not_stand_against_a_configuration() -> None:
    assert decide([BASE, row(peak_bytes=None)]).verdict == "enable"


def fused(**changes: Any) -> Row:
    """A row whose attention is another kernel: equal bits under it, other logits and ids."""
    other = {"logit_max_abs_diff": 0.5, "eager_logit_max_abs_diff": 0.4, "tokens_equal": False}
    return row(integration="fused", **{**other, **changes})


def test_another_kernel_s_logits_and_ids_do_not_make_it_lossy() -> None:
    decision = decide([BASE, row(**speed(0.5)), fused(**speed(3.0))])
    assert decision.verdict == "enable"
    assert decision.chosen is not None
    assert decision.chosen.integration == "fused"


def test_bits_that_differ_under_the_same_kernel_do() -> None:
    decision = decide([BASE, fused(tensor_equal=False, **speed(3.0))])
    assert decision.rows[1].judgement == "not lossless"
    assert decision.verdict == "do not enable"


def test_uncompressed_forms_are_shown_and_never_chosen() -> None:
    others = [row("none", integration=name, **speed(3.0)) for name in ("eager", "grouped")]
    decision = decide([BASE, *others, row(**speed(0.5))])
    assert decision.verdict == "do not enable"
    assert [r.judgement for r in decision.rows] == [None, *["not compressed"] * 2, "too slow"]
    with pytest.raises(ValueError, match="nothing to decide"):
        decide([BASE, *others])


def test_what_saves_nothing_does_not_qualify() -> None:
    decision = decide([BASE, row(kv_stored_bytes=RAW, **speed(1.5))])
    assert decision.verdict == "do not enable"
    assert decision.rows[1].judgement == "saves nothing"


def test_the_worst_length_counts() -> None:
    rows = [BASE, row(), row("none", tokens=4096), row(tokens=4096, **speed(0.5))]
    decision = decide(rows)
    assert decision.verdict == "do not enable"
    assert "4,096 tokens" in decision.reason


def test_a_length_without_a_baseline_run_says_nothing() -> None:
    absent = {"status": "out_of_memory", "reason": "out of memory"}
    rows = [BASE, row(), row("none", tokens=9999, **absent), row(tokens=9999, **absent)]
    assert decide(rows).verdict == "enable"


def test_a_configuration_that_fails_where_the_baseline_runs_is_out() -> None:
    rows = [BASE, row(status="out_of_memory", reason="out of memory", ratio_low=None)]
    decision = decide(rows)
    assert decision.verdict == "do not enable"
    assert decision.rows[1].judgement == "did not run"


def test_the_threshold_is_the_callers() -> None:
    rows = [BASE, row(**speed(0.8))]
    assert decide(rows, min_throughput=0.95).verdict == "do not enable"
    assert decide(rows, min_throughput=0.75).verdict == "enable"


def test_nothing_to_decide_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to decide"):
        decide([BASE])
    with pytest.raises(ValueError, match="no uncompressed row"):
        decide([row()])


def test_every_row_is_kept_and_judged() -> None:
    decision = decide([BASE, row(), row(block_tokens=512, **speed(0.1))])
    assert [r.judgement for r in decision.rows] == [None, "acceptable", "too slow"]
