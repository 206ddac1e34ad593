"""The whole workbook under the smoke preset, as a user runs it, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gaac_lab import forms, parameters, paths, runs
from tests import check_notebooks

pytestmark = pytest.mark.notebooks
NOTEBOOKS = sorted(path.stem for path in paths.notebooks_dir().glob("*.ipynb"))


@pytest.fixture(scope="module")
def smoke(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a run") / "smoke"
    command = [sys.executable, "-m", "gaac_lab.cli", "run", "--preset", "smoke"]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert str(folder / "report.html") in done.stdout
    return folder


@pytest.mark.parametrize("path", sorted(check_notebooks.NOTEBOOKS.glob("*.ipynb")), ids=str)
def test_a_committed_notebook_is_clean(path: Path) -> None:
    assert check_notebooks.problems(path) == []


def test_every_notebook_of_the_workbook_ran_to_its_end(smoke: Path) -> None:
    manifest = runs.read_manifest(smoke)
    assert list(manifest.notebooks) == NOTEBOOKS
    assert {state.status for state in manifest.notebooks.values()} == {"done"}
    assert list(runs.read_receipts(smoke)) == NOTEBOOKS


def test_the_decision_has_a_row_for_each_configuration_with_every_field(smoke: Path) -> None:
    decision = json.loads((smoke / "decision.json").read_text())
    assert decision["verdict"] in ("enable", "do not enable", "undecided")
    sweep = json.loads((smoke / "results" / "sweep.json").read_text())
    assert len(decision["rows"]) == len(sweep) >= 8
    for row in decision["rows"]:
        for field in (
            "kv_raw_bytes", "kv_stored_bytes", "peak_bytes", "ttft_s", "decode_tok_s",
            "ratio_to_baseline", "ratio_low", "ratio_high", "tensor_equal", "logit_max_abs_diff",
            "tokens_equal", "read_gb_s",
        ):  # fmt: skip
            assert row[field] is not None, (row["label"], field)
        assert row["tensor_equal"]
        if row["integration"] == "fused":  # another kernel, as eager attention is one
            assert row["logit_max_abs_diff"] < 4 * row["eager_logit_max_abs_diff"]
        else:
            assert row["logit_max_abs_diff"] == 0.0
            assert row["tokens_equal"]


def test_the_sweep_stands_around_a_fused_reference(smoke: Path) -> None:
    rows = json.loads((smoke / "decision.json").read_text())["rows"]
    by_variable = {row["variable"]: row for row in rows}
    assert by_variable["reference"]["integration"] == "fused"
    assert by_variable["integration"]["integration"] == "materialise"
    assert by_variable["level"]["integration"] == "fused"
    assert by_variable["codec"]["integration"] == "materialise"


def test_six_forms_stand_side_by_side_and_the_report_splits_the_gain(smoke: Path) -> None:
    found = json.loads((smoke / "results" / "forms.json").read_text())
    assert [row["name"] for row in found["rows"]] == list(forms.six())
    assert all(row["tensor_equal"] for row in found["rows"])
    (gain,) = found["gains"]
    assert {"total", "kernel", "compression", "torch"} <= set(gain)
    split = json.loads((smoke / "results" / "time_split.json").read_text())
    assert [row["name"] for row in split] == list(forms.six())
    for name in ("report.md", "report.html"):
        assert (
            "is the kernel (default to the same kernel on raw pages)" in (smoke / name).read_text()
        )


def test_the_budget_of_the_model_is_confirmed_and_others_stand_beside_it(smoke: Path) -> None:
    rows = pd.DataFrame(json.loads((smoke / "results" / "three_ways.json").read_text()))
    assert {"formula", "oracle", "transformers"} <= set(rows["way"])
    assert rows["total_bytes"].nunique() == 1
    models = json.loads((smoke / "results" / "models.json").read_text())
    assert len(models) >= 4
    assert all(row["total_bytes"] > 0 for row in models)
    assert json.loads((smoke / "results" / "wrong_numbers.json").read_text())


def test_every_route_is_measured_and_only_lossless_is_exact(smoke: Path) -> None:
    rows = pd.DataFrame(json.loads((smoke / "results" / "routes.json").read_text()))
    assert set(rows["kind"]) == {"none", "lossless", "precision", "tokens", "stacked"}
    exact = rows["kind"].isin(["none", "lossless"])
    assert rows.loc[exact, "exact"].all()
    assert (rows.loc[exact, "perplexity_ratio"] == 1).all()
    assert not rows.loc[~exact, "exact"].any()
    assert (rows.loc[rows["kind"] != "none", "share_of_raw"] < 1).all()
    assert rows[["recall_hits", "step_ratio", "nll_diff_se"]].notna().all().all()


def test_the_stacked_bill_and_three_answers(smoke: Path) -> None:
    bill = pd.DataFrame(
        json.loads((smoke / "results" / "stacked_bill.json").read_text())["promised"]
    )
    assert [round(size / 2**30, 2) for size in bill["total_bytes"]] == [40, 20, 1.25, 64, 32, 2]
    answers = json.loads((smoke / "results" / "answers.json").read_text())
    assert [row["question"][:5] for row in answers] == ["How m", "Which", "What "]
    report = (smoke / "report.md").read_text()
    assert report.index("- The three other routes:") < report.index("- The decision:")


def test_forks_share_what_a_deep_copy_holds_again(smoke: Path) -> None:
    found = json.loads((smoke / "results" / "forks.json").read_text())
    assert found["forked_bytes"] < 0.6 * found["copied_bytes"]


def test_the_uncompressed_cache_is_measured_against_itself(smoke: Path) -> None:
    (baseline,) = [
        row
        for row in json.loads((smoke / "decision.json").read_text())["rows"]
        if row["codec"] == "none"
    ]
    assert baseline["kv_raw_bytes"] == baseline["kv_stored_bytes"]
    assert baseline["ratio_low"] != baseline["ratio_high"]


def test_compressed_rows_hold_less(smoke: Path) -> None:
    rows = pd.DataFrame(json.loads((smoke / "decision.json").read_text())["rows"])
    gaac = rows[rows["codec"] == "gaac"]
    assert (gaac["kv_stored_bytes"] < gaac["kv_raw_bytes"]).all()


def test_figures_are_kept_as_png_and_svg_with_captions(smoke: Path) -> None:
    kept = [figure for receipt in runs.read_receipts(smoke).values() for figure in receipt.figures]
    assert len(kept) >= 10
    for figure in kept:
        assert figure.caption.endswith(".")
        assert (smoke / figure.png).stat().st_size > 5_000
        assert (smoke / figure.svg).stat().st_size > 5_000


def test_executed_notebooks_show_each_figure_as_a_picture(smoke: Path) -> None:
    for name, receipt in runs.read_receipts(smoke).items():
        notebook = json.loads((smoke / "notebooks" / f"{name}.ipynb").read_text())
        data = [
            output.get("data", {})
            for cell in notebook["cells"]
            for output in cell.get("outputs", [])
        ]
        shown = [one for one in data if "Figure" in "".join(one.get("text/plain", ""))]
        assert len(shown) >= len(receipt.figures), name
        assert all("image/png" in one for one in shown), name


def test_executed_notebooks_hold_no_warnings(smoke: Path) -> None:
    for name in NOTEBOOKS:
        notebook = json.loads((smoke / "notebooks" / f"{name}.ipynb").read_text())
        streams = [
            "".join(output["text"])
            for cell in notebook["cells"]
            for output in cell.get("outputs", [])
            if output.get("name") == "stderr"
        ]
        assert not streams, (name, streams[0][:500])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_parameter_is_known_and_every_default_allowed(name: str) -> None:
    import ast

    import nbformat

    notebook = nbformat.read(paths.notebooks_dir() / f"{name}.ipynb", as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    defaults: dict[str, Any] = {
        node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
        for node in ast.parse(cell.source).body
    }
    assert parameters.check(defaults) == defaults


def test_one_notebook_runs_alone_with_its_defaults(
    default_model_path: Path, tmp_path: Path
) -> None:
    """The decision has most to do on its own: it measures a small sweep first."""
    import papermill

    previous = os.getcwd()
    os.chdir(tmp_path)
    try:
        papermill.execute_notebook(
            paths.notebooks_dir() / "08_decision.ipynb",
            tmp_path / "08.ipynb",
            parameters={"out_dir": str(tmp_path / "alone"), "lengths": [300], "new_tokens": 3},
            kernel_name="python3",
            progress_bar=False,
        )
    finally:
        os.chdir(previous)
    decision = json.loads((tmp_path / "alone" / "decision.json").read_text())
    assert len(decision["rows"]) >= 4
    assert (tmp_path / "alone" / "report.html").exists()
