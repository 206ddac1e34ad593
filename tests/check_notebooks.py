"""What every committed notebook must be: clean, taught in a fixed order, free of definitions.

`python -m tests.check_notebooks` prints what is wrong and exits with 1; `make lint` runs it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def problems(path: Path) -> list[str]:
    """Sentences about `path`; empty when it is as it should be."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    checks = [_clean, _metadata, _parameters, _structure, _no_definitions]
    return [f"{path.name}: {problem}" for check in checks for problem in check(notebook)]


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _clean(notebook: Any) -> list[str]:
    dirty = [cell for cell in _code(notebook) if cell.outputs or cell.execution_count is not None]
    return [f"{len(dirty)} cells hold outputs or counts; clear them"] if dirty else []


def _metadata(notebook: Any) -> list[str]:
    found = []
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        found.append("older than nbformat 4.5, so its cells have no ids")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("its kernel is not the plain python3")
    return found


def _parameters(notebook: Any) -> list[str]:
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        return [f"{len(tagged)} cells are tagged parameters; one must be"]
    for node in ast.parse(tagged[0].source).body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return ["the parameters cell may hold assignments only"]
        try:
            ast.literal_eval(node.value)
        except ValueError:
            return ["the parameters cell may hold literals only"]
    return []


def _structure(notebook: Any) -> list[str]:
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    titles = [line for line in prose.splitlines() if line.startswith("# ")]
    found = [] if len(titles) == 1 else [f"{len(titles)} titles; one is needed"]
    for heading in ("## Overview", "## Prerequisites", "## Summary"):
        if heading not in prose:
            found.append(f"no section {heading!r}")
    if "**Next:**" not in prose and "**To go on:**" not in prose:
        found.append("does not say what to read next")
    return found


def _no_definitions(notebook: Any) -> list[str]:
    found = []
    for cell in _code(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append(f"defines {node.name}; definitions belong in gaac_lab")
        if len(cell.source.splitlines()) > 20:
            found.append(f"a cell of {len(cell.source.splitlines())} lines; keep cells short")
    return found


def main() -> int:
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    found = [problem for path in paths for problem in problems(path)]
    print("\n".join(found) or f"{len(paths)} notebooks are clean")
    return 1 if found or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
