"""A configuration beside the uncompressed cache at several batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gaac_lab.baseline import require_room
from gaac_lab.compare import Comparison, compare
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.measure import Failure, attempt
from gaac_lab.request import prompt_batch
from gaac_lab.sweep import comparison_fields

Record = dict[str, Any]


def run(
    model: Any,
    tokenizer: Any,
    configuration: Configuration,
    *,
    batches: Sequence[int],
    prompt: str,
    tokens: int,
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Record]:
    """Two records a batch size: the uncompressed cache against itself, and `configuration`.

    A batch that does not fit in memory keeps its records, with the reason and no numbers.
    """
    pair = [BASELINE, configuration]
    records = []
    for batch in batches:
        say(f"batch {batch}")
        outcomes = _compare(model, tokenizer, pair, batch, prompt, tokens, new_tokens, rounds)
        records += [
            {"label": one.label, "batch": batch, "tokens": tokens, **comparison_fields(outcome)}
            for one, outcome in zip(pair, outcomes, strict=True)
        ]
    return records


def _compare(
    model: Any,
    tokenizer: Any,
    pair: list[Configuration],
    batch: int,
    prompt: str,
    tokens: int,
    new_tokens: int,
    rounds: int,
) -> list[Comparison | Failure]:
    room = attempt(lambda: require_room(model, tokens + new_tokens, batch))
    if isinstance(room, Failure):
        return [room for _ in pair]
    ids, _ = prompt_batch(tokenizer, tokens=tokens, batch=batch, first=prompt)
    return compare(model, ids, pair, new_tokens=new_tokens, rounds=rounds)
