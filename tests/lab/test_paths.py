"""Where the project is found, and what is said where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gaac_lab
from gaac_lab import paths

PACKAGE = Path(gaac_lab.__file__).parent


def test_the_clone_around_the_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(paths.HOME_VARIABLE, raising=False)
    assert paths.project_root() == PACKAGE.parent
    assert paths.notebooks_dir() == PACKAGE.parent / "notebooks"
    assert paths.models_dir() == PACKAGE.parent / "data" / "models"
    assert paths.runs_dir() == PACKAGE.parent / "data" / "runs"


def test_the_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "a clone"
    (home / "notebooks").mkdir(parents=True)
    (home / "data").mkdir()
    monkeypatch.setenv(paths.HOME_VARIABLE, str(home))
    assert paths.data_dir() == home / "data"


def test_a_variable_that_names_no_clone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()  # half a clone is none
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path))
    with pytest.raises(paths.ProjectNotFound, match=r"GAAC_LAB_HOME .* point it at a clone"):
        paths.project_root()


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop(paths.HOME_VARIABLE, None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True
    )


def test_outside_a_clone_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "gaac_lab").mkdir()
    for name in ("__init__.py", "paths.py"):
        shutil.copy(PACKAGE / name, tmp_path / "gaac_lab" / name)
    done = run_python("from gaac_lab import paths; paths.project_root()", tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "outside a clone" in last
    assert "set GAAC_LAB_HOME" in last


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[0]); import gaac_lab, gaac_lab.paths, "
        "gaac_lab.budget, gaac_lab.models, gaac_lab.entropy; "
        "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = run_python(code, PACKAGE.parent)
    assert done.stdout.strip() == "[]", done.stderr
