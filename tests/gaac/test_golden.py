"""The golden blobs: every reader gives back what is recorded, and today's writer writes them.

A failure of the second kind means that the format, or a choice of the encoder, has changed. If it
was meant to, `python -m tests.gaac.make_golden` writes them anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

import pytest

import gaac
from gaac.kernels import reference
from tests.gaac import make_golden
from tests.gaac.make_golden import FOLDER, INDEX, MAX_BLOB_BYTES, path_of
from tests.gaac.paths import PATHS, run_on, skip_unless_it_runs

ENTRIES: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))
NAMES = [entry["name"] for entry in ENTRIES]
CONTENT = {entry["name"]: entry["sha256"] for entry in ENTRIES}

# Run on each kernel path: prints, for each case, a hash of what is decoded and of what is encoded.
REPORT = """
import hashlib, json, gaac
from tests.gaac import make_golden
def digest(data): return hashlib.sha256(data).hexdigest()
def decoded(case): return digest(gaac.decompress(make_golden.path_of(case.name).read_bytes()))
print(json.dumps({c.name: [decoded(c), digest(c.encode())] for c in make_golden.cases()}))
"""


def blob_of(name: str) -> bytes:
    return path_of(name).read_bytes()


@functools.cache
def report(path: str) -> dict[str, list[str]]:
    done = run_on(path, "-c", REPORT)
    assert done.returncode == 0, done.stderr
    result: dict[str, list[str]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("path", PATHS)
def test_every_path_reads_them(path: str) -> None:
    skip_unless_it_runs(path)
    assert {name: pair[0] for name, pair in report(path).items()} == CONTENT


@pytest.mark.parametrize("path", PATHS)
def test_every_path_writes_them(path: str) -> None:
    skip_unless_it_runs(path)
    committed = {name: hashlib.sha256(blob_of(name)).hexdigest() for name in NAMES}
    assert {name: pair[1] for name, pair in report(path).items()} == committed


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_reads_them(name: str) -> None:
    assert hashlib.sha256(reference.decode(blob_of(name))).hexdigest() == CONTENT[name]


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_the_header_says_what_the_index_says(entry: dict[str, Any]) -> None:
    info = gaac.inspect(blob_of(entry["name"]))
    assert [info.level, info.dtype, list(info.shape)] == [
        entry[key] for key in ("level", "dtype", "shape")
    ]


def test_the_index_is_what_would_be_written() -> None:
    assert [make_golden.entry(case) for case in make_golden.cases()] == ENTRIES


def test_nothing_lies_there_that_the_index_does_not_name() -> None:
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {path_of(name).name for name in NAMES} | {INDEX.name}
    assert all(len(blob_of(name)) <= MAX_BLOB_BYTES for name in NAMES)


def test_they_cover_every_level_dtype_and_stream() -> None:
    infos = [gaac.inspect(blob_of(name)) for name in NAMES]
    assert {info.level for info in infos} == set(gaac.LEVELS)
    assert {info.dtype for info in infos} == {*make_golden.LAYOUTS, "int8"}
    assert any("repeats" in info.streams for info in infos)
    for level in set(gaac.LEVELS) - {0}:
        assert {info.dtype for info in infos if info.level == level} >= {"float16", "bfloat16"}
