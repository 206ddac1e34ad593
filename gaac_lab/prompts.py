"""On which prompts a model is measured: each in exactly the number of tokens asked for.

A prompt is put together as opening, body, question, inside the tokenizer's chat template where it
has one. The body is as long as needed and is cut after the last token that fits, so that the
question survives at the end; where not even that fits, its last tokens remain. A user's own text is
cut in the middle: the end stays (a quarter of the prompt, 256 tokens at most), as questions stand
there. A text too short is begun again, and the prompt says so. A cut may split a word, or a
character of several bytes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gaac_lab.chat_text import conversation_so_far, frame, message, rendered
from gaac_lab.prompt_catalogue import Messages, PromptError, Recipe, UserText, catalogue
from gaac_lab.prompt_sources import CONVERSATIONS, SOURCES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "PromptError", "build", "names"]

USER_TAIL_TOKENS = 256


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt of exactly `tokens` tokens.

    `input_ids` is an int64 CPU tensor [1, tokens]; `sha256` is taken over its values as
    little-endian int64; `repeated` says that the text was too short and was begun again.
    """

    name: str
    title: str
    tokens: int
    sha256: str
    input_ids: torch.Tensor
    text: str
    repeated: bool


def names() -> list[str]:
    """The prompts there are, recipes first; raises PromptError if a file cannot be read."""
    return list(catalogue())


def build(name: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt `name` in exactly `tokens` tokens of this tokenizer.

    The same on every call with one Python version and tokenizer. Raises PromptError for an unknown
    name, a length that is no count, or a file that cannot be used.
    """
    import torch

    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise PromptError(f"tokens={tokens!r}: give a whole number of at least 1.")
    entries = catalogue()
    if name not in entries:
        raise PromptError(f"There is no prompt {name!r}: choose from {', '.join(entries)}.")
    entry = entries[name]
    if isinstance(entry, UserText):
        ids, repeated = _user_text(entry, tokens, tokenizer)
    elif entry.conversation is not None:
        ids, repeated = _conversation(entry, tokens, tokenizer)
    else:
        ids, repeated = _document(entry, tokens, tokenizer)
    input_ids = torch.tensor([ids], dtype=torch.int64)
    return Prompt(
        name=name,
        title=entry.title,
        tokens=len(ids),
        sha256=hashlib.sha256(input_ids.numpy().astype("<i8").tobytes()).hexdigest(),
        input_ids=input_ids,
        text=tokenizer.decode(ids),
        repeated=repeated,
    )


def _document(
    recipe: Recipe, tokens: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], bool]:
    """One message of the user's: opening, body, question."""
    before, after = frame(tokenizer)

    def pieces() -> Iterator[str]:
        if recipe.source is None:
            return iter([recipe.filler or ""])
        return SOURCES[recipe.source](random.Random(recipe.seed))

    head = f"{before}{recipe.opening.strip()}\n\n" if recipe.opening else before
    tail = f"\n\n{recipe.question.strip()}{after}"
    return _join(head, pieces, tail, tokens, tokenizer)


def _conversation(
    recipe: Recipe, tokens: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], bool]:
    """Turns of user and assistant, and the question as the user's last turn."""
    turns = CONVERSATIONS[recipe.conversation or ""]

    def exchanges() -> Iterator[Messages]:
        for asked, answered in turns(random.Random(recipe.seed)):
            yield [message("user", asked), message("assistant", answered)]

    def pieces() -> Iterator[str]:
        last: Messages = []
        for exchange in exchanges():  # what the template writes depends on the turn before at most
            before = conversation_so_far(tokenizer, last)[0] if last else ""
            yield conversation_so_far(tokenizer, last + exchange)[0].removeprefix(before)
            last = exchange

    _, seam, after = conversation_so_far(tokenizer, next(exchanges()))
    return _join("", pieces, seam + recipe.question.strip() + after, tokens, tokenizer)


def _user_text(
    entry: UserText, tokens: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], bool]:
    """The user's text, cut in the middle or begun again."""
    if entry.messages is not None:
        waits = entry.messages[-1]["role"] == "user"
        before, text, after = "", rendered(tokenizer, entry.messages, waits), ""
    else:
        (before, after), text = frame(tokenizer), (entry.text or "")
    times = 1
    ids = _encode(before + text + after, tokenizer)
    while len(ids) < tokens:
        times += max(1, times * (tokens - len(ids)) // len(ids))
        begun_again = (text.rstrip("\n") + "\n") * (times - 1) + text
        ids = _encode(before + begun_again + after, tokenizer)
    kept = min(USER_TAIL_TOKENS, tokens // 4)
    if len(ids) > tokens:
        ids = ids[: tokens - kept] + ids[len(ids) - kept :]
    return ids, times > 1


def _join(
    head: str,
    pieces: Callable[[], Iterator[str]],
    tail: str,
    tokens: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[int], bool]:
    """Exactly `tokens` tokens of head, as many pieces as fit, and tail; True if any came twice."""
    tail_ids = _encode(tail, tokenizer, beginning=False)
    room = tokens - len(tail_ids)
    if room <= 0:
        return tail_ids[-tokens:], False
    body, length, wanted, repeated = [head], len(head), 4 * room, False
    for piece, again in _endless(pieces):
        if length >= wanted or (again and not repeated):
            ids = _encode("".join(body), tokenizer)
            if len(ids) >= room:
                return ids[:room] + tail_ids, repeated
            wanted = 2 * length
        repeated = again
        body.append(piece)
        length += len(piece)
    raise PromptError("The prompt's source gives no text: Python's own files are missing here.")


def _endless(pieces: Callable[[], Iterator[str]]) -> Iterator[tuple[str, bool]]:
    """The pieces, and whether they come again, for ever; nothing at all if there is no text."""
    again = False
    while True:
        some = False
        for piece in pieces():
            some = some or bool(piece.strip())
            yield piece, again
        if not some:
            return
        again = True


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, *, beginning: bool = True) -> list[int]:
    """The text's ids; a beginning gets the tokenizer's start token where no template writes it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not beginning or tokenizer.chat_template is not None:
        return ids
    special = tokenizer("", verbose=False)["input_ids"]
    starts = special[:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id, *ids] if starts else ids
