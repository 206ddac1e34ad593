"""The run's folder: what is saved can be read, belongs to one notebook, and is whole."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from pydantic import BaseModel

from gaac_lab import records, runs
from gaac_lab.runs import Run, RunError


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Point:
    tokens: int
    seconds: float


class Model(BaseModel):
    name: str
    share: float | None


def open_run(folder: Path, notebook: str = "02_baseline") -> Run:
    return Run.open(folder, notebook, {"rounds": 3})


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (np.float32(1.5), 1.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, np.inf], [2.0, 3.0]]), [[1.0, None], [2.0, 3.0]]),
        (torch.tensor(2.0, dtype=torch.bfloat16), 2.0),
        (torch.tensor([1, 2]), [1, 2]),
        (True, True),
        ((1, 2), [1, 2]),
        ({3, 1, 2}, [1, 2, 3]),
        ({8: "x"}, {"8": "x"}),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (Point(8, float("nan")), {"tokens": 8, "seconds": None}),
        (Model(name="x", share=np.float64(0.5)), {"name": "x", "share": 0.5}),
        ([Point(8, 1.0)], [{"tokens": 8, "seconds": 1.0}]),
        ("长文 ×", "长文 ×"),
        (None, None),
    ],
)
def test_values_become_plain_json(value: Any, plain: Any) -> None:
    assert records.to_plain(value) == plain
    assert type(records.to_plain(value)) is type(plain)
    assert json.loads(records.dump(value)) == plain


def test_a_frame_is_its_records_with_gaps_as_null(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1.5, None], "when": [pd.Timestamp("2026-01-02"), pd.NaT]})
    run = open_run(tmp_path)
    run.save("frame", frame)
    run.save("by_name", frame.set_index("x")[["when"]].head(1))
    assert run.load("frame") == [
        {"x": 1.5, "when": "2026-01-02T00:00:00"},
        {"x": None, "when": None},
    ]
    assert run.load("by_name") == [{"x": 1.5, "when": "2026-01-02T00:00:00"}]


def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.save("sizes", [{"tokens": 1}])
    with pytest.raises(TypeError, match="a function cannot be kept as JSON"):
        run.save("sizes", [{"tokens": open_run}])
    with pytest.raises(TypeError, match="key"):
        run.save("sizes", {(1, 2): 3})
    assert run.load("sizes") == [{"tokens": 1}]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """A file size limit makes the system itself refuse the write half way."""
    path = tmp_path / "results.json"
    records.write_json(path, {"old": True})
    code = (
        "import resource, sys, pathlib\n"
        "from gaac_lab import records\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    records.write_json(pathlib.Path(sys.argv[1]), {'new': 'x' * 5000})\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "File too large"
    assert records.read_json(path) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_receipt_says_what_happened_and_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(runs.TOKEN_VARIABLE, "secret")
    folder = tmp_path / "运行 folder"
    run = open_run(folder)
    run.save("sizes", [{"tokens": 1}])
    run.save("sizes", [{"tokens": 2}])
    run.note("ratio", np.float64(1.49))
    run.decide({"verdict": "enable"})
    assert runs.read_receipts(folder) == {}
    run.finish()
    receipt = runs.read_receipts(folder)["02_baseline"]
    assert receipt.token == "secret"
    assert receipt.executable == sys.executable
    assert receipt.parameters == {"rounds": 3}
    assert (receipt.results, receipt.notes) == (["sizes"], {"ratio": 1.49})
    assert receipt.decision
    assert receipt.finished is not None
    assert receipt.started <= receipt.finished
    assert [p.name for p in (folder / "receipts").iterdir()] == ["02_baseline.json"]
    assert json.loads((folder / "decision.json").read_text()) == {"verdict": "enable"}


def test_figures_are_kept_twice_with_their_caption(tmp_path: Path) -> None:
    from PIL import Image

    fig = Figure(figsize=(4, 3))
    fig.subplots().plot([1, 2])
    run = open_run(tmp_path)
    png = run.figure(fig, "growth", "KV grows with length.")
    run.figure(fig, "growth", "KV grows with the length.")
    run.finish()
    (kept,) = runs.read_receipts(tmp_path)["02_baseline"].figures
    assert kept.model_dump() == {
        "name": "growth",
        "caption": "KV grows with the length.",
        "png": "figures/growth.png",
        "svg": "figures/growth.svg",
    }
    assert "<svg" in (tmp_path / kept.svg).read_text()
    with Image.open(png) as image:
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["growth.png", "growth.svg"]
    with pytest.raises(RunError, match="needs a caption"):
        run.figure(fig, "growth", "  ")


@pytest.mark.parametrize("finished", [True, False])
def test_another_notebooks_files_are_not_overwritten(tmp_path: Path, finished: bool) -> None:
    first = open_run(tmp_path)
    first.save("sizes", [])
    fig = Figure()
    first.figure(fig, "growth", "One.")
    if finished:
        first.finish()
    second = open_run(tmp_path, "04_sweep")
    with pytest.raises(RunError, match="results/sizes belongs to the notebook 02_baseline"):
        second.save("sizes", [])
    with pytest.raises(RunError, match="figures/growth belongs to the notebook 02_baseline"):
        second.figure(fig, "growth", "Two.")
    second.save("own", [])
    assert second.load("sizes") == []


@pytest.mark.parametrize("finished", [True, False])
def test_opening_again_takes_away_what_the_notebook_left_and_no_more(
    tmp_path: Path, finished: bool
) -> None:
    other = open_run(tmp_path, "01_budget")
    other.save("budget", [])
    other.finish()
    run = open_run(tmp_path)
    run.save("sizes", [])
    run.figure(Figure(), "growth", "One.")
    run.decide({})
    if finished:
        run.finish()
    again = open_run(tmp_path)
    assert not again.has("sizes")
    assert not (tmp_path / "decision.json").exists()
    assert list((tmp_path / "figures").iterdir()) == []
    assert again.has("budget")
    assert list(runs.read_receipts(tmp_path)) == ["01_budget"]


def test_missing_results_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no results named 'sweep'.*run the notebook"):
        open_run(tmp_path).load("sweep")


@pytest.mark.parametrize("name", ["", "../up", "Big", "a b", "a/b", ".hidden", "a.json"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="is made of small letters"):
        open_run(tmp_path).save(name, [])
    with pytest.raises(RunError, match="is made of small letters"):
        Run.open(tmp_path, name, {})


def test_without_a_folder_a_fresh_one_is_made_under_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("GAAC_LAB_HOME", str(tmp_path))
    first, second = Run.open("", "02_baseline", {}), Run.open("", "02_baseline", {})
    assert first.dir != second.dir
    assert first.dir.parent == second.dir.parent == runs.paths.runs_dir()
    assert "interactive" in first.dir.name
    assert (first.dir / "results").is_dir()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used: Not a directory"):
        open_run(tmp_path / "file" / "run")


def test_damaged_files_are_reported_by_name(tmp_path: Path) -> None:
    open_run(tmp_path).finish()
    receipt = runs.receipt_path(tmp_path, "02_baseline")
    whole = receipt.read_text()
    receipt.write_text(whole[:-20])
    with pytest.raises(RunError, match=r"02_baseline\.json is damaged"):
        runs.read_receipts(tmp_path)
    receipt.write_text('{"notebook": "02_baseline"}')
    with pytest.raises(RunError, match="not a receipt of this version"):
        runs.read_receipts(tmp_path)
    open_run(tmp_path).finish()
    assert list(runs.read_receipts(tmp_path)) == ["02_baseline"]
    with pytest.raises(RunError, match=r"holds no manifest\.json"):
        runs.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunError, match="was not written by this version"):
        runs.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        runs.read_manifest(tmp_path)
