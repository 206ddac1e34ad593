"""Which prompts there are: the recipes in data/prompts, and the user's own files beside them.

A recipe is a .yaml file. A .txt file is one prompt, named after the file. A .jsonl file holds one
prompt a line: an object with "text" or with chat "messages", and a "name" if it likes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gaac_lab.paths import data_dir
from gaac_lab.prompt_sources import CONVERSATIONS, SOURCES

ROLES = ("system", "user", "assistant")
Messages = list[dict[str, str]]


class PromptError(ValueError):
    """A prompt cannot be built; the message names the file and what to change in it."""


class Recipe(BaseModel):
    """One YAML file: what the text is made of, by one of `source`, `conversation` and `filler`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(min_length=1)
    about: str = Field(min_length=1)
    seed: int = Field(ge=0)
    source: str | None = None
    conversation: str | None = None
    filler: str | None = Field(default=None, min_length=1)
    opening: str = ""
    question: str = Field(min_length=1)

    @field_validator("source")
    @classmethod
    def _source_exists(cls, name: str | None) -> str | None:
        return _one_of(name, SOURCES)

    @field_validator("conversation")
    @classmethod
    def _conversation_exists(cls, name: str | None) -> str | None:
        return _one_of(name, CONVERSATIONS)

    @model_validator(mode="after")
    def _one_body(self) -> Recipe:
        if sum(part is not None for part in (self.source, self.conversation, self.filler)) != 1:
            raise ValueError("give exactly one of source, conversation and filler")
        return self


@dataclass(frozen=True)
class UserText:
    """One text of the user's: plain, or the messages of a chat."""

    title: str
    text: str | None
    messages: Messages | None


def catalogue() -> dict[str, Recipe | UserText]:
    """Every prompt by its name; raises PromptError for a bad file or a name that is there twice."""
    found: dict[str, Recipe | UserText] = {}
    came_from: dict[str, Path] = {}
    folder = data_dir() / "prompts"
    readers = {".yaml": _read_recipe, ".txt": _read_text, ".jsonl": _read_jsonl}
    files = [path for path in sorted(folder.glob("*")) if not path.name.startswith(".")]
    for suffix, read in readers.items():
        for path in (path for path in files if path.suffix == suffix):
            for name, entry in read(path).items():
                if name in found or name == "all":
                    other = came_from[name].name if name in found else "the name for all prompts"
                    raise PromptError(
                        f"{path}: the prompt name {name!r} is taken ({other}): rename the file."
                    )
                found[name], came_from[name] = entry, path
    return found


def _one_of(name: str | None, known: Collection[str]) -> str | None:
    if name is not None and name not in known:
        raise ValueError(f"there is no {name!r}; choose from {', '.join(sorted(known))}")
    return name


def _read_recipe(path: Path) -> dict[str, Recipe | UserText]:
    try:
        fields = yaml.safe_load(_read(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise PromptError(f"{path}{line}: this is not valid YAML.") from error
    if not isinstance(fields, dict):
        raise PromptError(f"{path}: a recipe is a mapping of title, about, source and so on.")
    try:
        return {_name(path.stem): Recipe.model_validate(fields)}
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the recipe"
        raise PromptError(f"{path}: {where}: {first['msg']}.") from error


def _read_text(path: Path) -> dict[str, Recipe | UserText]:
    text = _read(path)
    if not text.strip():
        raise PromptError(f"{path}: the file is empty: put text into it, or remove it.")
    return {_name(path.stem): UserText(path.name, text, None)}


def _read_jsonl(path: Path) -> dict[str, Recipe | UserText]:
    found: dict[str, Recipe | UserText] = {}
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        name, entry = _parse_line(line, where, path.name)
        name = name or f"{_name(path.stem)}-{len(found) + 1}"
        if name in found:
            raise PromptError(f"{where}: the name {name!r} is there twice: change one of them.")
        found[name] = entry
    if not found:
        raise PromptError(f"{path}: the file is empty: put JSON objects into it, or remove it.")
    return found


def _parse_line(line: str, where: str, title: str) -> tuple[str | None, UserText]:
    """(name or None, text) of one line of a .jsonl file."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: this is not valid JSON ({error}).") from error
    if not isinstance(record, dict) or ("text" in record) == ("messages" in record):
        raise PromptError(f'{where}: give an object with either "text" or "messages".')
    name = record.get("name")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise PromptError(f'{where}: "name" must be a text that is not empty.')
    text = record.get("text")
    if "text" in record and (not isinstance(text, str) or not text.strip()):
        raise PromptError(f'{where}: "text" must be a text that is not empty.')
    messages = _messages(record["messages"], where) if "messages" in record else None
    return (_name(name) if name else None), UserText(title, text, messages)


def _messages(messages: Any, where: str) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise PromptError(f'{where}: "messages" must be a list with at least one message.')
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise PromptError(
                f'{where}: each message needs a "role" out of {", ".join(ROLES)} and a "content" '
                "that is text."
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise PromptError(
            f"{path}, line {line}: this is not UTF-8 text: convert the file."
        ) from error
    except OSError as error:
        raise PromptError(f"{path}: the file cannot be read ({error.strerror}).") from error


def _name(stem: str) -> str:
    """A name without spaces, as it can be given on a command line."""
    return "_".join(stem.split())
