"""Where the text of the prompts comes from: Python's own documentation and sources, and generators.

A source gives pieces of text, each ending with a newline; a finite one is begun again when the
prompt is longer. The same seed gives the same text on the same Python version.
"""

from __future__ import annotations

import datetime
import difflib
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

Source = Callable[[random.Random], Iterator[str]]
Turns = Callable[[random.Random], Iterator[tuple[str, str]]]

START: Final = datetime.datetime(2026, 3, 2, 8, 0, 0)
SERVICES: Final = ("gateway", "billing", "search", "sessions", "mailer", "catalogue", "scheduler")
PEOPLE: Final = ("Amara", "Jonas", "Mei", "Ravi", "Sofia", "Tomás")
CITIES: Final = ("Aarhus", "Bologna", "Chengdu", "Durban", "Fukuoka", "Gdańsk", "Hobart", "Izmir")
GOODS: Final = ("bearing", "cable drum", "gearbox", "heat pump", "inverter", "pump seal", "valve")


def python_documentation(rng: random.Random) -> Iterator[str]:
    """The language reference that comes with Python, section by section, in a shuffled order."""
    for title, text in _topics(rng):
        yield f"# {title}\n\n{text.strip()}\n\n"


def python_sources(rng: random.Random) -> Iterator[str]:
    """Modules of the standard library, each under its file name, in a shuffled order."""
    for name, text in _modules(rng):
        yield f"# ==== {name} ====\n{text.strip()}\n\n"


def code_review(rng: random.Random) -> Iterator[str]:
    """Unified diffs of standard library modules in which names were changed, as for a review."""
    for name, text in _modules(rng):
        before = text.splitlines(keepends=True)[:400]
        words = sorted(set(re.findall(r"\b[a-z]+_[a-z_]+\b", "".join(before))))
        renamed = {word: f"new_{word}" for word in rng.sample(words, min(4, len(words)))}
        after = [_rename(line, renamed) for line in before]
        yield "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=3)) + "\n"


def service_log(rng: random.Random) -> Iterator[str]:
    """Log lines of a few services; every sixtieth or so is an error, the first comes early."""
    clock, next_error = START, 3
    line = 0
    while True:
        line += 1
        clock += datetime.timedelta(milliseconds=rng.randrange(3, 900))
        service, request = rng.choice(SERVICES), f"{rng.getrandbits(32):08x}"
        head = f"{clock.isoformat(sep=' ', timespec='milliseconds')} [{service}] request={request}"
        if line == next_error:
            next_error += rng.randrange(40, 80)
            limit = rng.choice((250, 500, 1000))
            took = limit + rng.randrange(90)
            yield f"{head} ERROR upstream timed out after {took} ms (limit {limit} ms)\n"
        else:
            status, took = rng.choice((200, 200, 200, 201, 204, 304, 404)), rng.randrange(1, 240)
            yield f"{head} INFO status={status} took={took} ms bytes={rng.randrange(120, 90_000)}\n"


def order_records(rng: random.Random) -> Iterator[str]:
    """Orders as JSON, one object a line."""
    number = 1000
    while True:
        number += rng.randrange(1, 5)
        items = [
            {
                "article": rng.choice(GOODS),
                "quantity": rng.randrange(1, 40),
                "unit_price_eur": round(rng.uniform(2, 900), 2),
            }
            for _ in range(rng.randrange(1, 4))
        ]
        day = START.date() + datetime.timedelta(days=rng.randrange(60))
        record = {"order": number, "city": rng.choice(CITIES), "due": str(day), "items": items}
        yield json.dumps(record, ensure_ascii=False) + "\n"


def meeting_minutes(rng: random.Random) -> Iterator[str]:
    """Minutes of weekly meetings: who said what about which service, and what was decided."""
    week = 0
    while True:
        week += 1
        day = START.date() + datetime.timedelta(weeks=week)
        present = rng.sample(PEOPLE, 4)
        yield f"Minutes of {day}. Present: {', '.join(present)}.\n"
        for point in range(1, 5):
            service, (first, second, third) = rng.choice(SERVICES), rng.sample(present, 3)
            share, days = rng.randrange(5, 60), rng.randrange(2, 20)
            yield (
                f"{point}. {first} reported that {rng.choice(PROBLEMS).format(service, share)}. "
                f"{second} {rng.choice(ANSWERS)}. Decided: {third} {rng.choice(TASKS)} for "
                f"{service} within {days} days.\n"
            )
        yield "\n"


PROBLEMS: Final = (
    "the {} service answers {} % slower since the last release",
    "the queue in front of {} grew by {} % over the weekend",
    "{} kept {} % of its memory in caches that nobody reads",
    "the tests of {} fail in {} % of the nightly runs",
)
ANSWERS: Final = (
    "suspected the new connection pool and asked for a trace",
    "had seen the same in March and pointed to the disk",
    "preferred to wait for one more week of numbers",
    "offered to go back to the previous version on one machine",
)
TASKS: Final = ("writes a plan", "measures again", "prepares the roll-back", "asks the supplier")


def documentation_questions(rng: random.Random) -> Iterator[tuple[str, str]]:
    """A conversation: the user asks about the Python language, the answers quote its reference."""
    asks = ("Can you explain {}?", "And what about {}?", "I am stuck on {}. What does it say?")
    for title, text in _topics(rng):
        paragraphs = [part for part in text.strip().split("\n\n") if part.strip()]
        ask = rng.choice(asks).format(title.lower())
        while paragraphs:
            size = rng.randrange(3, 7)
            yield ask, "\n\n".join(paragraphs[:size]).strip()
            paragraphs, ask = paragraphs[size:], rng.choice(("Go on, please.", "And then?"))


def _topics(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(title, text) of the sections of the reference."""
    from pydoc_data.topics import topics

    for name in _shuffled(sorted(topics), rng):
        title, _, text = topics[name].partition("\n")
        yield title.replace('"', "").strip() or name, text.lstrip("*=~-\n")


def _modules(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(file name, text) of the standard library's public top-level modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.name for path in folder.glob("[a-z]*.py"))
    for name in _shuffled(names, rng):
        yield name, (folder / name).read_text(encoding="utf-8", errors="replace")


def _shuffled(names: list[str], rng: random.Random) -> list[str]:
    return sorted(names, key=lambda _: rng.random())


def _rename(line: str, renamed: dict[str, str]) -> str:
    return re.sub(r"\b[a-z]+_[a-z_]+\b", lambda word: renamed.get(word[0], word[0]), line)


SOURCES: Final[dict[str, Source]] = {
    "code_review": code_review,
    "meeting_minutes": meeting_minutes,
    "order_records": order_records,
    "python_documentation": python_documentation,
    "python_sources": python_sources,
    "service_log": service_log,
}
CONVERSATIONS: Final[dict[str, Turns]] = {"documentation_questions": documentation_questions}
