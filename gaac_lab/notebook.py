"""A notebook as the runner needs it: checked, and with the defaults of its `parameters` cell.

The checks are stricter than papermill's, which lets a notebook without parameters, or with values
that are derived inside the parameters cell, run to its end on the wrong numbers.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaac_lab import parameters
from gaac_lab.errors import RequestError

PATTERN = "[0-9][0-9]_*.ipynb"
_TAG = "parameters"


class NotebookError(RequestError):
    """A notebook is not fit to be run with parameters."""


@dataclass(frozen=True)
class Notebook:
    """One notebook: its name (the file's, without suffix), its code and text, its defaults."""

    name: str
    path: Path
    source: str
    defaults: dict[str, Any]


def discover(folder: Path) -> list[Notebook]:
    """The numbered notebooks of a folder, in order, each checked.

    Raises NotebookError if there are none or one is not fit.
    """
    found = sorted(folder.glob(PATTERN))
    if not found:
        raise NotebookError(f"{folder} holds no notebooks named like 01_name.ipynb.")
    return [inspect(path) for path in found]


def select(notebooks: list[Notebook], wanted: list[str]) -> list[Notebook]:
    """Those that `wanted` names (by name, or by how the name begins), in order; all if it is empty.

    Raises NotebookError if one is unknown or could be more than one.
    """
    chosen = {_find(notebooks, name).name for name in wanted}
    return [notebook for notebook in notebooks if not wanted or notebook.name in chosen]


def _find(notebooks: list[Notebook], wanted: str) -> Notebook:
    begins = [n for n in notebooks if n.name.startswith(wanted)]
    matches = [n for n in notebooks if n.name == wanted] or begins
    if len(matches) != 1 or not wanted:
        names = ", ".join(n.name for n in (matches or notebooks))
        problem = "could be several notebooks" if matches else "is no notebook"
        raise NotebookError(f"{wanted!r} {problem}: choose from {names}.")
    return matches[0]


def inspect(path: Path) -> Notebook:
    """Read and check one notebook without running it.

    Raises NotebookError with one sentence if it is damaged, is not nbformat 4.5 with cell ids, has
    not exactly one cell tagged `parameters`, or if that cell holds anything but literals for known
    parameters.
    """
    content = _load(path)
    _check_format(path, content)
    cells = content["cells"]
    tagged = [c for c in cells if _TAG in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1 or tagged[0]["cell_type"] != "code":
        raise NotebookError(
            f"{path.name} has {len(tagged)} code cells tagged {_TAG!r} and needs exactly one: "
            "without it, values from outside would be ignored."
        )
    defaults = _literals(path, _text(tagged[0]))
    try:
        parameters.check(defaults)
    except parameters.ParameterError as error:
        first = str(error).splitlines()[0]
        raise NotebookError(f"{path.name}, parameters cell: {first}") from error
    source = "\n".join(f"# {cell['cell_type']}\n{_text(cell)}" for cell in cells)
    return Notebook(name=path.stem, path=path, source=source, defaults=defaults)


def validate(path: Path) -> str | None:
    """What nbformat has against the file, in a sentence; None if it is sound."""
    try:
        content = _load(path)
        _check_format(path, content)
    except NotebookError as error:
        return str(error)
    return None


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotebookError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise NotebookError(f"{path} is damaged: it is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise NotebookError(f"{path} is not a notebook.")
    return content


def _check_format(path: Path, content: dict[str, Any]) -> None:
    import nbformat

    version = (content.get("nbformat"), content.get("nbformat_minor"))
    if not (version[0] == 4 and isinstance(version[1], int) and version[1] >= 5):
        raise NotebookError(f"{path.name} is nbformat {version}: save it as nbformat 4.5 or newer.")
    ids = [cell.get("id") for cell in content.get("cells", []) if isinstance(cell, dict)]
    if None in ids or len(set(ids)) != len(ids):
        raise NotebookError(f"{path.name} has cells without an id of their own: save it anew.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nbformat.validate(nbformat.from_dict(content))
    except Exception as error:  # nbformat raises and warns with classes of several libraries
        problem = str(error).strip().splitlines()[0]
        raise NotebookError(f"{path.name} is not a valid notebook: {problem}") from error


def _text(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _literals(path: Path, source: str) -> dict[str, Any]:
    """The cell's assignments, read and not run."""
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise NotebookError(
            f"{path.name}, parameters cell, line {error.lineno}: it is not plain Python."
        ) from error
    values: dict[str, Any] = {}
    for statement in statements:
        name, value = _literal(path, source, statement)
        if name in values:
            raise NotebookError(f"{path.name}, parameters cell: {name!r} is set twice.")
        values[name] = value
    return values


def _literal(path: Path, source: str, statement: ast.stmt) -> tuple[str, Any]:
    target: ast.expr | None = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    value = getattr(statement, "value", None)
    try:
        if isinstance(target, ast.Name) and value is not None:
            return target.id, ast.literal_eval(value)
    except ValueError:
        pass
    code = re.sub(r"\s+", " ", ast.get_source_segment(source, statement) or "")[:60]
    raise NotebookError(
        f"{path.name}, parameters cell, line {statement.lineno}: {code!r} is not a name and a "
        "literal; derive values in a later cell, where the given ones are known."
    )
