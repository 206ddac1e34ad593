"""Reuse is not compression: what sharing a prefix saves, and what it cannot.

Three kinds are in use. Paged blocks give a request its memory block by block, so that nothing is
reserved for tokens that never come. A radix tree finds the longest prefix that was read before, for
any request. In a conversation the next turn continues the cache of the last one. All three avoid
holding or computing the same token twice; none makes a token smaller, so none makes room for one
request that is too long. Numbers here are tokens; `kv_budget` turns them into bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from gaac_lab import budget


def tokens_held(requests: int, prefix_tokens: int, own_tokens: int, *, shared: bool) -> int:
    """Tokens whose KV is held for `requests` that begin with one prefix and go on by themselves.

    Apart: N (P + S). Shared: P + N S. Raises ValueError for fewer than one request or tokens below
    zero.
    """
    _check(requests=requests, prefix_tokens=prefix_tokens, own_tokens=own_tokens)
    if shared:
        return prefix_tokens + requests * own_tokens
    return requests * (prefix_tokens + own_tokens)


def break_even_requests(times_smaller: float, prefix_tokens: int, own_tokens: int) -> int | None:
    """The fewest requests at which sharing saves as much as a codec of that ratio; None: never.

    N (P + S) / (P + N S) grows with N towards (P + S) / S, so a ratio above that is out of reach.
    Raises ValueError for a ratio below 1.
    """
    _check(prefix_tokens=prefix_tokens, own_tokens=own_tokens)
    if not times_smaller >= 1:
        raise ValueError(f"times_smaller={times_smaller!r}: give a ratio of at least 1.")
    gain_a_request = prefix_tokens + own_tokens - times_smaller * own_tokens
    if gain_a_request <= 0:
        return 1 if times_smaller == 1 else None
    return max(1, math.ceil(times_smaller * prefix_tokens / gain_a_request - 1e-9))


def tokens_read(turns: int, tokens_a_turn: int, *, kept: bool) -> int:
    """Tokens that a conversation's prefills read: all of it at each turn, or only what is new.

    The KV held at the end is the same; what is saved is time to first token.
    """
    _check(turns=turns, tokens_a_turn=tokens_a_turn)
    return turns * tokens_a_turn if kept else tokens_a_turn * turns * (turns + 1) // 2


def tokens_paged(tokens: int, block_tokens: int) -> int:
    """Tokens that a paged cache sets aside for a request: whole blocks, the last partly empty."""
    _check(tokens=tokens)
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}: give at least one token.")
    return -(-tokens // block_tokens) * block_tokens


def table(
    config: Any,
    requests: Sequence[int],
    *,
    prefix_tokens: int,
    own_tokens: int,
    dtype: Any = "bfloat16",
) -> pd.DataFrame:
    """One row a number of requests: KV bytes apart and shared.

    Columns: requests, apart_bytes, shared_bytes, times_smaller, longest_request_bytes. The last is
    what one request takes on its own, and no sharing changes it. A layer with a window shares what
    is left of the prefix in it; a fixed recurrent state belongs to each request and is not counted.
    """
    one = budget.kv_budget(config, seq_len=prefix_tokens + own_tokens, dtype=dtype).total_bytes
    own = budget.kv_budget(config, seq_len=own_tokens, dtype=dtype).total_bytes
    rows = []
    for count in requests:
        apart = tokens_held(count, one - own, own, shared=False)
        shared = tokens_held(count, one - own, own, shared=True)
        rows.append(
            {
                "requests": count,
                "apart_bytes": apart,
                "shared_bytes": shared,
                "times_smaller": apart / shared,
                "longest_request_bytes": one,
            }
        )
    return pd.DataFrame(rows)


def in_words(
    times_smaller: float,
    *,
    prefix_tokens: int,
    own_tokens: int,
    turns: int = 10,
    block_tokens: int = 16,
) -> list[str]:
    """The three kinds of reuse in numbers, a sentence each; `times_smaller` is a codec's ratio."""
    even = break_even_requests(times_smaller, prefix_tokens, own_tokens)
    whole = prefix_tokens + own_tokens
    paged = tokens_paged(whole + 1, block_tokens)
    again = tokens_read(turns, own_tokens, kept=False)
    once = tokens_read(turns, own_tokens, kept=True)
    return [
        f"A shared prefix saves {times_smaller:.2f}×, as a codec does, from {even} requests on; "
        f"it never saves more than {whole / own_tokens:.1f}×."
        if even is not None
        else f"A shared prefix never saves as much as a codec of {times_smaller:.2f}×.",
        f"{whole + 1:,} tokens in pages of {block_tokens} set {paged:,} aside, however long the "
        "request may still become.",
        f"{turns} turns of {own_tokens:,} tokens read {once:,} when each goes on from the last "
        f"one's cache, {again:,} when each begins anew; held at the end are {once:,} either way.",
    ]


def _check(**counts: int) -> None:
    for name, count in counts.items():
        least = 1 if name in ("requests", "turns") else 0
        if count < least:
            raise ValueError(f"{name}={count}: give at least {least}.")
