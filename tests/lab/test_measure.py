"""Clocks and statistics: what they claim is checked against arithmetic done here by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gaac_lab.measure import (
    Failure,
    Ratio,
    Series,
    Stopwatch,
    Tally,
    attempt,
    median_interval,
    paired_ratio,
    repeat,
    timed,
)

CPU = torch.device("cpu")


def test_a_stopwatch_waits_for_the_device_before_each_reading_of_the_clock() -> None:
    events: list[str] = []
    with Stopwatch(CPU, wait=lambda device: events.append("wait")) as watch:
        events.append("work")
    assert events == ["wait", "work", "wait"]
    assert watch.seconds is not None
    assert watch.seconds > 0


def test_timed_gives_the_result_beside_the_seconds() -> None:
    result, seconds = timed(CPU, lambda: 7)
    assert result == 7
    assert seconds > 0


def test_repeat_throws_the_first_call_away() -> None:
    calls: list[int] = []
    assert len(repeat(CPU, lambda: calls.append(1), repeats=3)) == 3
    assert len(calls) == 4


def test_a_tally_adds_up_calls() -> None:
    tally = Tally(CPU)
    assert [tally.run(lambda: 1), tally.run(lambda: 2)] == [1, 2]
    once = tally.seconds
    assert once > 0
    tally.run(lambda: 3)
    assert tally.seconds > once
    tally.reset()
    assert tally.seconds == 0.0


def test_series_gives_median_and_quartiles() -> None:
    assert Series.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Series(3.0, 2.0, 4.0, 5)
    assert Series.of([2.0]) == Series(2.0, 2.0, 2.0, 1)


def test_a_rate_turns_the_spread_around() -> None:
    assert Series(0.5, 0.25, 1.0, 3).rate() == Series(2.0, 1.0, 4.0, 3)


def test_nothing_measured_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Series.of([])
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])


@pytest.mark.parametrize(
    ("n", "k", "coverage"),
    # By hand: 1 - 2 * sum(C(n, i), i < k) / 2**n
    [(1, 1, 0.0), (5, 1, 0.9375), (6, 1, 0.96875), (10, 2, 1 - 2 * 11 / 1024)],
)
def test_the_interval_of_the_median_covers_what_it_says(n: int, k: int, coverage: float) -> None:
    low, high, claimed = median_interval([float(value) for value in range(1, n + 1)])
    assert (low, high) == (k, n + 1 - k)
    assert claimed == pytest.approx(coverage)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_the_interval_holds_the_median(values: list[float]) -> None:
    low, high, coverage = median_interval(values)
    assert low <= Series.of(values).median <= high
    assert 0 <= coverage <= 1


def test_pairs_cancel_a_drift_that_hits_both() -> None:
    drifting = [(2.0 * slow, 1.0 * slow) for slow in (1.0, 1.5, 3.0, 10.0)]
    assert paired_ratio([drifting]) == Ratio(2.0, 2.0, 2.0, n=4, rounds=1, confidence=0.0)


def test_a_round_that_differs_widens_the_interval() -> None:
    steady = [(1.0, 1.0)] * 20
    odd = [(2.0, 1.0)] * 3
    ratio = paired_ratio([steady, odd])
    assert ratio.median == 1.0
    assert ratio.high == 2.0


@pytest.mark.parametrize(("rounds", "claimed"), [(2, 0.5), (3, 0.75), (5, 0.9375)])
def test_the_interval_covers_what_it_says_when_rounds_differ(rounds: int, claimed: float) -> None:
    """Rounds that share a state of the machine: 2 % between them, 1 % within, 16 pairs each."""
    rng = np.random.default_rng(0)
    hits, trials = 0, 400
    for _ in range(trials):
        truth = np.exp(rng.normal(0, 0.02, rounds))
        pairs = [[(m * np.exp(rng.normal(0, 0.01)), 1.0) for _ in range(16)] for m in truth]
        ratio = paired_ratio(pairs)
        assert ratio.confidence == pytest.approx(claimed)
        hits += ratio.low <= 1.0 <= ratio.high
    assert hits / trials >= claimed - 0.05


def test_out_of_memory_becomes_a_reason() -> None:
    outcome = attempt(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "out_of_memory"
    assert "fewer tokens" in outcome.reason


def test_other_errors_stay_errors() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        attempt(lambda: _raise(RuntimeError("something else")))


def _raise(error: Exception) -> None:
    raise error


def test_confidence_of_many_pairs_is_at_least_what_was_asked() -> None:
    for n in range(6, 200):
        assert median_interval([math.sin(i) for i in range(n)])[2] >= 0.95
