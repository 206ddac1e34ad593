"""What can be known to be wrong is refused before anything starts, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gaac_lab import notebook, plan, records
from gaac_lab.errors import RequestError
from tests.lab.workspace import FIXTURES, PRESET_WITHOUT_VALUES, ask, make_home


def refusal(asked: plan.Asked, **options: Any) -> str:
    """The sentence that refuses the request."""
    with pytest.raises(RequestError) as caught:
        plan.make(asked, **options)
    return str(caught.value)


def values_of(asked: plan.Asked, name: str = "01_ok") -> dict[str, Any]:
    return plan.make(asked).parameters[name]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("05", "has 0 code cells tagged 'parameters' and needs exactly one"),
        ("06", "line 4: 'batch = rounds \\* 10' is not a name and a literal"),
        ("07", "parameters cell: there is no parameter 'colour'"),
        ("13", "without an id"),
        ("14", "parameters cell: batch=0 is not allowed"),
    ],
)
def test_a_notebook_that_papermill_would_run_on_wrong_values_is_refused(
    tmp_path: Path, number: str, message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(RequestError, match=message):
        plan.make(ask(make_home(tmp_path / "home", "01", number), out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("rounds = 1\nrounds = 2", "'rounds' is set twice"),
        ("rounds = batch = 1", "is not a name and a literal"),
        ("rounds: int", "is not a name and a literal"),
        ("import os", "is not a name and a literal"),
        ("%time rounds = 1", "is not plain Python"),
        ("rounds = int('1')", "is not a name and a literal"),
        ("lengths = (16, 32)", "must be a list"),
    ],
)
def test_only_plain_literals_are_parameters(tmp_path: Path, cell: str, message: str) -> None:
    content = json.loads((FIXTURES / "01_ok.ipynb").read_text())
    content["cells"][1]["source"] = cell
    path = tmp_path / "01_ok.ipynb"
    path.write_text(json.dumps(content))
    with pytest.raises(notebook.NotebookError, match=message):
        notebook.inspect(path)


def test_literals_of_every_kind_are_read_without_running_the_cell(tmp_path: Path) -> None:
    content = json.loads((FIXTURES / "01_ok.ipynb").read_text())
    content["cells"][1]["source"] = [
        "# a comment\n",
        'model: str = "default"  # with a hint\n',
        "lengths = [\n    16,\n    32,\n]\n",
        "min_throughput = 0.9",
    ]
    path = tmp_path / "01_ok.ipynb"
    path.write_text(json.dumps(content))
    assert notebook.inspect(path).defaults == {
        "model": "default",
        "lengths": [16, 32],
        "min_throughput": 0.9,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is not valid JSON"), ("[]", "is not a notebook"), ("{}", "save it as nbformat 4.5")],
)
def test_a_damaged_notebook_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "01_ok.ipynb"
    path.write_text(text)
    with pytest.raises(notebook.NotebookError, match=message):
        notebook.inspect(path)


def test_a_folder_without_notebooks_is_refused(tmp_path: Path) -> None:
    assert "holds no notebooks" in refusal(ask(make_home(tmp_path / "home"), tmp_path / "out"))


def test_the_nearest_value_wins(tmp_path: Path) -> None:
    """Default, preset for all, preset for one, --set for all, --set for one."""
    home = make_home(tmp_path / "home", "01", "02", preset=PRESET_WITHOUT_VALUES)
    out = tmp_path / "out"
    assert values_of(ask(home, out)) == {"out_dir": "", "rounds": 1, "lengths": [16, 32]}
    text = "description: x\nparameters: {rounds: 3}\n"
    (home / "preset.yaml").write_text(text)
    assert values_of(ask(home, out))["rounds"] == 3
    (home / "preset.yaml").write_text(text + "notebooks: {01_ok: {rounds: 4}}\n")
    assert values_of(ask(home, out))["rounds"] == 4
    assert values_of(ask(home, out), "02_raises")["rounds"] == 3
    assert values_of(ask(home, out, sets=["rounds=5"]))["rounds"] == 5
    asked = ask(home, out, sets=["01.rounds=6", "rounds=5", "lengths=[64, 128]"])
    assert values_of(asked) == {"out_dir": "", "rounds": 6, "lengths": [64, 128]}
    assert values_of(asked, "02_raises")["rounds"] == 5


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["round=3"], "there is no parameter 'round': did you mean 'rounds'?"),
        (["rounds=0"], "rounds=0 is not allowed"),
        (["rounds=true"], "rounds=True is not allowed"),
        (["lengths=16"], "lengths=16 is not allowed: it must be a list"),
        (["lengths=[32, 16]"], "strictly increasing"),
        (["batch=2"], "there is no parameter 'batch'"),
        (["08.rounds=2"], "there is no parameter 'rounds'"),
        (["09_other.rounds=2"], "'09_other' is no notebook"),
        (["rounds"], "write name=value"),
        (["=3"], "write name=value"),
        (["out_dir=/tmp"], "the run's folder is given with --out"),
    ],
)
def test_a_wrong_set_is_refused(tmp_path: Path, sets: list[str], message: str) -> None:
    home, out = make_home(tmp_path / "home", "01", "08"), tmp_path / "out"
    assert message in refusal(ask(home, out, sets=sets))
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters: {batch: 2}", "no notebook has the parameter 'batch'"),
        ("notebooks: {04_sweep: {rounds: 2}}", "there is no notebook '04_sweep'"),
        ("notebooks: {01_ok: {batch: 2}}", "01_ok: there is no parameter 'batch'"),
    ],
)
def test_a_preset_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    home = make_home(tmp_path / "home", "01", preset=f"description: x\n{text}\n")
    assert message in refusal(ask(home, tmp_path / "out"))


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ([], ["01_ok", "02_raises", "10_full_disk", "11_other_values"]),
        (["01"], ["01_ok"]),
        (["11_other", "01_ok"], ["01_ok", "11_other_values"]),
    ],
)
def test_only_chooses_by_name_or_by_its_beginning(
    tmp_path: Path, only: list[str], names: list[str]
) -> None:
    home = make_home(tmp_path / "home", "01", "02", "10", "11")
    assert [n.name for n in plan.make(ask(home, None, only=only)).chosen] == names


@pytest.mark.parametrize(
    ("only", "message"),
    [("1", "could be several notebooks"), ("7", "is no notebook"), ("", "could be several")],
)
def test_only_refuses_what_is_unclear(tmp_path: Path, only: str, message: str) -> None:
    home = make_home(tmp_path / "home", "01", "10", "11")
    assert message in refusal(ask(home, None, only=[only]))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    home, out = make_home(tmp_path / "home", "15", preset=PRESET_WITHOUT_VALUES), tmp_path / "out"
    folder = tmp_path / "my model"
    assert "There is no folder" in refusal(ask(home, out, model=str(folder)))
    folder.mkdir()
    assert "holds no config.json" in refusal(ask(home, out, model=str(folder)))
    assert not out.exists()


def test_a_models_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels work in the run's folder, where a relative path would mean something else."""
    home = make_home(tmp_path / "home", "15", preset=PRESET_WITHOUT_VALUES)
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    planned = plan.make(ask(home, None, model="./my model"))
    assert planned.parameters["15_with_model"]["model"] == str(tmp_path / "my model")
    assert not planned.needs_default_model
    assert plan.make(ask(home, None)).needs_default_model


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["prompt=nothing_like_this"], "there is no prompt 'nothing_like_this': choose from"),
        (["device=mps"], "device='mps' is not allowed"),
    ],
)
def test_prompts_and_devices_are_checked(tmp_path: Path, sets: list[str], message: str) -> None:
    home = make_home(tmp_path / "home", "15", preset=PRESET_WITHOUT_VALUES)
    assert message in refusal(ask(home, tmp_path / "out", sets=sets))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    home, out = make_home(tmp_path / "home", "01"), tmp_path / "out"
    out.write_text("")
    assert "is a file" in refusal(ask(home, out))
    out.unlink()
    out.mkdir()
    plan.make(ask(home, out))
    (out / "thesis.tex").write_text("")
    assert "neither empty nor the folder of a run" in refusal(ask(home, out))
    records.write_json(out / "manifest.json", {})
    assert "holds a run already: add --resume" in refusal(ask(home, out))
    assert "was not written by this version" in refusal(ask(home, out, resume=True))


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    home, out = make_home(tmp_path / "home", "01"), tmp_path / "out"
    message = refusal(ask(home, out), min_free_bytes=2**60)
    assert "MiB are free in" in message
    assert "choose another folder with --out" in message
    assert not out.exists()


def test_there_must_be_a_run_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path / "home", "01")
    monkeypatch.setenv("GAAC_LAB_HOME", str(home))
    assert "there is no run to resume" in refusal(ask(home, None, resume=True))


def test_a_fingerprint_follows_all_that_results_depend_on(tmp_path: Path) -> None:
    n = notebook.inspect(FIXTURES / "01_ok.ipynb")
    mark = plan.fingerprint(n, n.defaults)
    assert plan.fingerprint(n, n.defaults | {"out_dir": "/elsewhere"}) == mark
    assert plan.fingerprint(n, n.defaults | {"rounds": 2}) != mark
    other = notebook.Notebook(n.name, n.path, n.source + " ", n.defaults)
    assert plan.fingerprint(other, n.defaults) != mark
    folder = tmp_path / "model"
    folder.mkdir()
    with_model = n.defaults | {"model": str(folder)}
    empty = plan.fingerprint(n, with_model)
    (folder / "config.json").write_text("{}")
    assert plan.fingerprint(n, with_model) != empty
