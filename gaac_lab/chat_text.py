"""Messages as text: by the tokenizer's chat template where it has one, by plain role names else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gaac_lab.prompt_catalogue import Messages, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = (
    "[[content goes here]]"  # no template changes it: it holds no special token and no outer space
)
PLAIN = {"system": "System: ", "user": "User: ", "assistant": "Assistant: "}


def message(role: str, content: str) -> dict[str, str]:
    """One message, as chat templates take it."""
    return {"role": role, "content": content}


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, answer_follows: bool) -> str:
    """The messages as text, with the assistant's opening behind them if an answer follows.

    Raises PromptError if the tokenizer's template refuses them (some want the roles to alternate).
    """
    if tokenizer.chat_template is None:
        plain = "".join(f"{PLAIN[said['role']]}{said['content']}\n\n" for said in messages)
        return plain + ("Assistant:" if answer_follows else "")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer_follows
        )
    except Exception as error:  # whatever the template raises
        raise PromptError(
            f"The tokenizer's chat template refuses the prompt's messages ({error}): change their "
            "roles, or give the prompt as plain text."
        ) from error
    return text


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What a template writes before and behind one message of the user's; without one, nothing."""
    if tokenizer.chat_template is None:
        return "", ""
    return _around_mark(rendered(tokenizer, [message("user", MARK)], answer_follows=True))


def conversation_so_far(
    tokenizer: PreTrainedTokenizerBase, turns: Messages
) -> tuple[str, str, str]:
    """A conversation in which the user speaks next, in three parts.

    They are the turns up to the end of the last answer, what stands between that and the user's
    next words, and what follows those. A turn cut short is thus closed before the next begins.
    """
    before, after = _around_mark(rendered(tokenizer, [*turns, message("user", MARK)], True))
    answer = turns[-1]["content"].strip()
    end = before.rfind(answer) + len(answer)
    if answer not in before:
        raise PromptError(
            "The tokenizer's chat template rewrites answers: give plain text prompts."
        )
    return before[:end], before[end:], after


def _around_mark(text: str) -> tuple[str, str]:
    before, found, after = text.partition(MARK)
    if not found:
        raise PromptError("The tokenizer's chat template leaves the user's words out: use another.")
    return before, after
