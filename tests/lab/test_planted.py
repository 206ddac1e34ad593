"""A planted fact: where it was asked for, in exactly as many tokens, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gaac_lab import planted
from tests.lab import tiny_models


@pytest.mark.parametrize("tokens", [64, 257, 1024])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_haystack_has_its_length_and_its_fact(
    default_model: tuple[Any, Any], tokens: int, depth: float, seed: int
) -> None:
    _, tokenizer = default_model
    hay = planted.haystack(tokenizer, tokens=tokens, depth=depth, seed=seed)
    assert hay.input_ids.shape == (1, tokens)
    text = tokenizer.decode(hay.input_ids[0])
    assert text.count(hay.fact.sentence) == text.count(hay.fact.code) == 1
    rest = tokenizer.decode(hay.input_ids[0, hay.position :])
    assert rest.startswith(hay.fact.sentence)
    if depth in (0, 1):
        assert (hay.position == 0) == (depth == 0)
        assert text.endswith(hay.fact.sentence) == (depth == 1)


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_a_fact_lies_near_its_depth(default_model: tuple[Any, Any], depth: float) -> None:
    hay = planted.haystack(default_model[1], tokens=2048, depth=depth, seed=1)
    assert abs(hay.position / 2048 - depth) < 0.05


def test_seeds_decide(default_model: tuple[Any, Any]) -> None:
    def made(seed: int) -> torch.Tensor:
        return planted.haystack(default_model[1], tokens=200, depth=0.5, seed=seed).input_ids

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


def test_the_question_is_the_beginning_of_the_sentence(default_model: tuple[Any, Any]) -> None:
    _, tokenizer = default_model
    fact = planted.Fact("The room of the night watchman", "40321")
    ids, answer_tokens = planted.question(tokenizer, fact)
    assert fact.sentence.startswith(tokenizer.decode(ids[0]))
    assert tokenizer.decode(ids[0, -answer_tokens:]) == " #40321"


def test_a_start_token_comes_first() -> None:
    tokenizer = tiny_models.tokenizer(start_token=True)
    hay = planted.haystack(tokenizer, tokens=300, depth=0, seed=0)
    assert hay.input_ids.shape == (1, 300)
    assert int(hay.input_ids[0, 0]) == tokenizer.bos_token_id
    assert hay.position == 1


@pytest.mark.parametrize(
    ("tokens", "depth", "message"),
    [(300, -0.1, "between 0 and 1"), (300, 1.1, "between 0 and 1"), (10, 0.5, "the fact alone")],
)
def test_bad_requests_are_refused(
    default_model: tuple[Any, Any], tokens: int, depth: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        planted.haystack(default_model[1], tokens=tokens, depth=depth, seed=0)
