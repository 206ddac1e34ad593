"""Reuse: the arithmetic of a shared prefix, of turns and of pages."""

from __future__ import annotations

import pytest

from gaac_lab import budget, model_table, reuse

LLAMA = model_table.config("llama-3.1-8b")
MISTRAL = model_table.config("mistral-7b-v0.1")  # every layer has a window of 4,096


def test_a_shared_prefix_is_held_once() -> None:
    assert reuse.tokens_held(10, 4000, 500, shared=False) == 10 * 4500
    assert reuse.tokens_held(10, 4000, 500, shared=True) == 4000 + 10 * 500


def test_one_request_gains_nothing() -> None:
    assert reuse.tokens_held(1, 4000, 500, shared=True) == 4500
    table = reuse.table(LLAMA, [1, 8], prefix_tokens=4000, own_tokens=500)
    assert table["times_smaller"][0] == 1
    assert table["shared_bytes"][0] == table["longest_request_bytes"][0]
    assert table["longest_request_bytes"].nunique() == 1


@pytest.mark.parametrize("times", [1.0, 1.43, 2.0, 5.0, 8.9])
def test_the_break_even_is_where_the_ratios_cross(times: float) -> None:
    def saved(requests: int) -> float:
        apart = reuse.tokens_held(requests, 4000, 500, shared=False)
        return apart / reuse.tokens_held(requests, 4000, 500, shared=True)

    found = reuse.break_even_requests(times, 4000, 500)
    assert found is not None
    assert saved(found) >= times - 1e-9
    assert found == 1 or saved(found - 1) < times


def test_a_ratio_beyond_the_limit_is_never_reached() -> None:
    """(P + S) / S is 9 here."""
    assert reuse.break_even_requests(9.0, 4000, 500) is None
    assert reuse.break_even_requests(1.5, 0, 500) is None
    with pytest.raises(ValueError, match="at least 1"):
        reuse.break_even_requests(0.9, 4000, 500)


def test_bytes_are_tokens_times_the_rate_without_windows() -> None:
    (row,) = reuse.table(LLAMA, [8], prefix_tokens=4000, own_tokens=500).to_dict("records")
    rate = budget.kv_budget(LLAMA, seq_len=1).bytes_per_token
    assert row["apart_bytes"] == 8 * 4500 * rate
    assert row["shared_bytes"] == (4000 + 8 * 500) * rate


def test_a_window_shares_what_is_left_of_the_prefix() -> None:
    """With 4,096 kept and 5,000 tokens of each request's own, nothing of the prefix is left."""
    beyond = reuse.table(MISTRAL, [8], prefix_tokens=4000, own_tokens=5000)
    assert beyond["times_smaller"][0] == 1
    (row,) = reuse.table(MISTRAL, [8], prefix_tokens=4000, own_tokens=500).to_dict("records")
    rate = budget.kv_budget(MISTRAL, seq_len=1).bytes_per_token_below_window
    assert row["apart_bytes"] == 8 * 4096 * rate
    assert row["shared_bytes"] == (4096 - 500 + 8 * 500) * rate


def test_a_conversation_is_read_once_or_again_and_again() -> None:
    assert reuse.tokens_read(10, 500, kept=True) == 5000
    assert reuse.tokens_read(10, 500, kept=False) == sum(500 * turn for turn in range(1, 11))


def test_pages_are_whole() -> None:
    assert [reuse.tokens_paged(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    with pytest.raises(ValueError, match="block_tokens=0"):
        reuse.tokens_paged(5, 0)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_counts_that_cannot_be_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="give at least"):
        reuse.tokens_held(*bad, shared=True)


def test_in_words() -> None:
    prefix, pages, turns = reuse.in_words(1.43, prefix_tokens=4096, own_tokens=512)
    assert "from 2 requests on; it never saves more than 9.0×" in prefix
    assert "4,609 tokens in pages of 16 set 4,624 aside" in pages
    assert "5,120" in turns
    assert "28,160" in turns
    assert "never" in reuse.in_words(10.0, prefix_tokens=4096, own_tokens=512)[0]
