"""Plain JSON out of what a measurement holds, and files that are either whole or not there.

JSON knows no NaN and no infinity: both become null, because a number that is unknown is not zero.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_plain(value: Any) -> Any:
    """The value as JSON knows it: dict, list, str, int, float, bool or None.

    Takes dicts, lists, tuples, sets, dataclasses, pydantic models, pandas frames, numpy arrays,
    numpy and torch scalars, paths, dates and enums. NaN and infinity become None.
    Raises TypeError for anything else.
    """
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain(item) for item in value), key=repr)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    return _library_value(value)


def _library_value(value: Any) -> Any:
    """Values of libraries that this module does not import: recognised by what they can do."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump())
    if hasattr(value, "columns") and hasattr(value, "to_dict"):
        frame = value.reset_index() if any(value.index.names) else value
        return to_plain(frame.to_dict("records"))
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    raise TypeError(
        f"a {type(value).__name__} cannot be kept as JSON: hand over numbers, text, lists, dicts, "
        "a data class, a pydantic model or a pandas frame."
    )


def _key(key: Any) -> str:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise TypeError(f"a record's key must be text or a whole number, and {key!r} is neither.")
    return str(key)


def dump(value: Any) -> str:
    """The value as JSON text: two spaces, non-ASCII letters as they are, never NaN."""
    return json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def write_bytes(path: Path, content: bytes) -> None:
    """Write the file whole or not at all: a temporary file beside it, then one rename.

    Raises OSError, and then leaves the file as it was.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write the value as JSON, whole or not at all."""
    write_bytes(path, (dump(value) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON in the file.

    Raises FileNotFoundError if there is none, ValueError if the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and run again.") from error
