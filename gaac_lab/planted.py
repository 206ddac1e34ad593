"""A fact planted at some depth of a text that says nothing of the kind, and asked for later.

"The access code of the north gate is #48213." stands somewhere in minutes of meetings; at the end
the same words up to the number ask for it. A model completes that by copying, which a small one can
do too; whether its cache still holds the place to copy from is what is measured. One fact a text,
and a # before its number, since the default model mixes up first digits otherwise: it then recalls
nearly all up to 1,536 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch

from gaac_lab.prompt_sources import meeting_minutes

SUBJECTS = (
    "The access code of the north gate",
    "The catalogue number of the violin concerto",
    "The flight number to Lisbon",
    "The invoice number of the garden chairs",
    "The licence plate of the red truck",
    "The locker of the chess club",
    "The membership number of Doctor Weber",
    "The phone extension of the harbour office",
    "The postcode of the old lighthouse",
    "The room of the night watchman",
    "The serial number of the blue printer",
    "The ticket for the winter coat",
)
CODE_DIGITS = 5


@dataclass(frozen=True)
class Fact:
    """A subject and its number; `sentence` is planted, `question` asked, `answer` expected."""

    subject: str
    code: str

    @property
    def question(self) -> str:
        return f"{self.subject} is"

    @property
    def answer(self) -> str:
        return f" #{self.code}"

    @property
    def sentence(self) -> str:
        return f"{self.question}{self.answer}.\n"


@dataclass(frozen=True, eq=False)
class Haystack:
    """A text of exactly as many tokens as were asked for, with a fact in it.

    input_ids: [1, tokens] int64. position: the first token of the fact's sentence.
    """

    input_ids: torch.Tensor
    fact: Fact
    position: int


def haystack(tokenizer: Any, *, tokens: int, depth: float, seed: int) -> Haystack:
    """A text with one fact at `depth`, from 0 (its beginning) to 1 (its end).

    The fact is put before the line of the text that lies nearest. The same for the same seed.
    Raises ValueError for a depth that is not between 0 and 1, or too few tokens to hold the fact.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth}: give a number between 0 and 1.")
    rng = random.Random(seed)
    fact = Fact(rng.choice(SUBJECTS), str(rng.randrange(10 ** (CODE_DIGITS - 1), 10**CODE_DIGITS)))
    start, sentence = _start(tokenizer), _ids(tokenizer, fact.sentence)
    room = tokens - len(start) - len(sentence)
    if room < 1:
        raise ValueError(
            f"tokens={tokens}: the fact alone takes {tokens - room}, so ask for more tokens."
        )
    lines = _filler(tokenizer, room, rng)
    starts = [0, *accumulate(map(len, lines))]
    place = min(range(len(starts)), key=lambda index: abs(starts[index] - depth * room))
    before, after = list(chain(*lines[:place])), list(chain(*lines[place:]))
    ids = [*start, *before, *sentence, *after]
    return Haystack(torch.tensor([ids]), fact, len(start) + len(before))


def question(tokenizer: Any, fact: Fact) -> tuple[torch.Tensor, int]:
    """([1, n] ids of the question with its answer, how many of the last ones are the answer)."""
    asked, answer = _ids(tokenizer, fact.question), _ids(tokenizer, fact.answer)
    return torch.tensor([asked + answer]), len(answer)


def _filler(tokenizer: Any, tokens: int, rng: random.Random) -> list[list[int]]:
    """Lines of exactly `tokens` tokens in all; the first may have lost its beginning."""
    lines: list[list[int]] = []
    length = 0
    for line in _lines(rng):
        if length >= tokens:
            break
        lines.append(_ids(tokenizer, line))
        length += len(lines[-1])
    while length > tokens:
        cut = min(length - tokens, len(lines[0]))
        lines[0], length = lines[0][cut:], length - cut
        if not lines[0]:
            lines.pop(0)
    return lines


def _lines(rng: random.Random) -> Iterator[str]:
    for piece in meeting_minutes(rng):
        yield from piece.splitlines(keepends=True)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _start(tokenizer: Any) -> list[int]:
    """The token that this tokenizer begins a text with, if it has one."""
    special: list[int] = tokenizer("", verbose=False)["input_ids"]
    return special[:1] if special[:1] == [tokenizer.bos_token_id] else []
