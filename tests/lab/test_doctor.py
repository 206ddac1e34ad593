"""The doctor: right about this machine, and clear about one that lacks something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gaac_lab import doctor, machine, runner
from tests.lab.workspace import clean_environment, make_home


def diagnose(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gaac_lab.cli", "doctor", *options],
        capture_output=True,
        text=True,
        env=clean_environment(GAAC_LAB_HOME=str(home)),
    )


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    """A clone without its default model: a run could not start."""
    home = make_home(tmp_path / "home", "01")
    answer = diagnose(home)
    assert answer.returncode == runner.FAILED, answer.stdout
    lines = answer.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "default model" in line)
    assert lines[at].startswith("missing")
    assert "gaac-lab fetch-model" in lines[at + 1]
    assert lines[-1] == "not ready: see what is missing above"


def test_a_clone_without_notebooks_is_not_ready(tmp_path: Path) -> None:
    answer = diagnose(make_home(tmp_path / "home"), "--json")
    assert (answer.returncode, answer.stderr) == (runner.FAILED, "")
    found = json.loads(answer.stdout)
    assert found["ready"] is False
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert "holds no notebooks" in by_name.pop("project")["detail"]
    assert by_name.pop("default model")["state"] == "missing"
    assert [f for f in by_name.values() if f["state"] == "missing"] == []


def test_with_everything_there_it_is_ready(default_model_path: Path) -> None:
    findings = doctor.examine()
    assert doctor.fit(findings), [f for f in findings if f.state == "missing"]
    by_name = {finding.name: finding for finding in findings}
    assert by_name["python"].detail.startswith(sys.version.split()[0])
    assert by_name["default model"].detail == str(default_model_path)
    assert by_name["notebooks"].state == "ok"


def test_versions_are_compared_with_the_tested_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path / "home", "01")
    monkeypatch.setenv("GAAC_LAB_HOME", str(home))
    torch = str(machine.installed_version("torch")).partition("+")[0]
    (home / "constraints.txt").write_text(f"torch=={torch}\nnumpy==0.1\nJinja2==9.9  \n# x==1\n")
    (found,) = doctor._packages()
    assert found.state == "note"
    assert "(0.1)" in found.detail
    assert "torch" not in found.detail


def test_the_machine_is_described_as_it_is() -> None:
    found = machine.describe()
    assert found["cores"] == len(psutil.Process().cpu_affinity() or [])
    assert 0 < found["memory_gib"] <= psutil.virtual_memory().total / 2**30 + 0.1
    assert found["cpu"]
    import torch

    assert (found["accelerator"] is not None) == torch.cuda.is_available()
    assert machine.versions()["torch"] == torch.__version__
    assert machine.installed_version("no-such-package-here") is None


@pytest.mark.parametrize(
    ("forced", "state", "words"),
    [("plain", "ok", "plain: vectors"), ("numpy", "note", "unset"), ("none", "missing", "unset")],
)
def test_the_kernels_that_run_are_named(
    forced: str, state: str, words: str, tmp_path: Path
) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "gaac_lab.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=clean_environment(GAAC_LAB_HOME=str(make_home(tmp_path, "01")), GAAC_KERNELS=forced),
    )
    findings = {f["name"]: f for f in json.loads(answer.stdout)["findings"]}
    found = findings["gaac kernels"]
    assert found["state"] == state
    assert words in f"{found['detail']} {found['advice']}"
