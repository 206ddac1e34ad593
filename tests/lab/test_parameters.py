"""Parameters and presets: what is allowed passes unchanged, all else is one clear sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaac_lab import parameters, plan, preset
from gaac_lab.errors import RequestError
from gaac_lab.parameters import ParameterError
from gaac_lab.preset import PresetError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("out_dir", ""),
        ("model", "/models/a b/中"),
        ("device", "cuda:1"),
        ("dtype", "float16"),
        ("seed", 0),
        ("seq_len", 10_000_000),
        ("batch", 4096),
        ("entropy_tokens", 64),
        ("lengths", [16]),
        ("lengths", [512, 2048, 1_000_000]),
        ("new_tokens", 2),
        ("level", 3),
        ("block_tokens", 16),
        ("levels", [3, 1]),
        ("scopes", ["kv", "k", "v"]),
        ("windows", [1024, 0]),
        ("peers", []),
        ("prompt_names", ["all"]),
        ("batches", [1, 2, 4, 8]),
        ("min_throughput", 0.95),
    ],
)
def test_what_is_allowed_passes_unchanged(name: str, value: Any) -> None:
    assert parameters.check({name: value}) == {name: value}


def test_a_whole_number_is_a_number() -> None:
    assert parameters.check({"min_throughput": 1}) == {"min_throughput": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rounds", True, "a whole number from 1 to 1000"),
        ("rounds", 0, "a whole number from 1 to 1000"),
        ("rounds", 3.0, "a whole number from 1 to 1000"),
        ("rounds", "3", "a whole number from 1 to 1000"),
        ("rounds", None, "a whole number from 1 to 1000"),
        ("new_tokens", 1, "a whole number from 2 to 100000"),
        ("seed", -1, "a whole number from 0 to"),
        ("model", "", "'default', a folder or a hub id"),
        ("model", 7, "'default', a folder or a hub id"),
        ("device", "tpu", "auto, cpu, cuda or cuda:N"),
        ("dtype", "float32", "one of auto, bfloat16, float16"),
        ("level", 4, "one of 0, 1, 2, 3, 5"),
        ("level", True, "one of 0, 1, 2, 3, 5"),
        ("lengths", [], "not empty"),
        ("lengths", 512, r"a list like \[512, 2048\]"),
        ("lengths", (512, 2048), r"a list like \[512, 2048\]"),
        ("lengths", [2048, 512], "strictly increasing"),
        ("lengths", [512, 512], "strictly increasing"),
        ("lengths", [8, 512], "each a whole number from 16 to 1000000"),
        ("lengths", [512, True], "each a whole number from 16"),
        ("levels", [1, 1], "none of them twice"),
        ("levels", [1, 7], "each one of 0, 1, 2, 3, 5"),
        ("scopes", ["q"], "each one of kv, k, v"),
        ("windows", [-1], "each a whole number from 0"),
        ("prompt_names", "all", r"a list like \[all\]"),
        ("batches", [2, 1], "strictly increasing"),
        ("min_throughput", 0, "a number above 0 and up to 2"),
        ("min_throughput", 2.5, "a number above 0 and up to 2"),
        ("min_throughput", float("nan"), "a number above 0 and up to 2"),
    ],
)
def test_what_is_not_allowed_is_named_with_what_is(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ParameterError, match=rf"^{name}=.* is not allowed: it must be .*{allowed}"):
        parameters.check({name: value})


def test_every_wrong_value_gets_its_own_sentence() -> None:
    with pytest.raises(ParameterError) as caught:
        parameters.check({"rounds": 0, "lenghts": [1], "lengths": [8, 8, 4], "seed": 1})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "lengths=[8,",
        "rounds=0",
        "there",
    ]
    assert "did you mean 'lengths'?" in str(caught.value)


@pytest.mark.parametrize("name", parameters.names())
def test_every_parameter_says_what_it_is_and_takes(name: str) -> None:
    assert parameters.describe(name)
    assert parameters.allowed(name)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rounds", "3", 3),
        ("rounds", "true", True),
        ("min_throughput", "0.9", 0.9),
        ("lengths", "[512, 2_048]", [512, 2048]),
        ("scopes", "[kv, k]", ["kv", "k"]),
        ("model", "007", "007"),
        ("model", "true", "true"),
        ("model", "a: b [", "a: b ["),
        ("prompt", "no", "no"),
    ],
)
def test_text_from_the_command_line_is_yaml_unless_a_text_is_wanted(
    name: str, text: str, value: Any
) -> None:
    parsed = parameters.parse(name, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("lengths", "[1, 2", "cannot be read: it must be a list"), ("round", "3", "'rounds'")],
)
def test_text_that_cannot_be_read_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        parameters.parse(name, text)


def test_the_presets_of_the_project() -> None:
    assert set(preset.names()) == {"smoke", "quick", "full"}
    for name in preset.names():
        assert preset.load(name).description


@pytest.mark.parametrize("name", ["smoke", "quick", "full"])
def test_the_presets_fit_the_workbook(name: str, tmp_path: Path) -> None:
    """Every notebook of the project passes the runner's checks, with every preset's values."""
    from gaac_lab import paths

    planned = plan.make(plan.Asked(paths.notebooks_dir(), preset=name, out=tmp_path / "run"))
    assert [n.name[:2] for n in planned.chosen] == [
        "00",
        "01",
        "02",
        "03",
        "04",
        "05",
        "06",
        "07",
        "08",
    ]
    assert (
        planned.parameters["02_baseline"]["lengths"]
        == (preset.load(name).notebooks["02_baseline"]["lengths"])
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("01.compared_models=[qwen]", "there is no model config 'qwen': choose from .*qwen3-8b"),
        ("07.bill_models=[llama-2]", "there is no model config 'llama-2'"),
        ("01.memory=H1000", "memory='H1000': give a number of GiB, or one of NVIDIA H200"),
        ("07.kept_tokens=100", "kept_tokens=100 is not allowed: it must be a multiple of 64"),
        ("07.bill_bits=5", "bill_bits=5 is not allowed: it must be 16, 8, 4 or 2"),
        ("07.depths=[0.5, 0.1]", "depths=.* strictly increasing"),
        ("07.depths=[0.5, 1.5]", "depths=.* each a number from 0 to 1"),
    ],
)
def test_models_memory_and_settings_that_are_not_there_are_refused(
    given: str, message: str, tmp_path: Path
) -> None:
    from gaac_lab import paths

    asked = plan.Asked(paths.notebooks_dir(), preset="smoke", sets=[given], out=tmp_path / "run")
    with pytest.raises(RequestError, match=message):
        plan.make(asked)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no mapping"),
        ("[1, 2]", "is no mapping"),
        ("parameters: {rounds: 3}", "wrong at 'description': field required"),
        ("description: x\nparameter: {}", "wrong at 'parameter': it may hold description"),
        ("description: x\nparameters: [1]", "wrong at 'parameters'"),
        (
            "description: x\nparameters: {rounds: 3, rounds: 4}",
            "the key 'rounds' stands there twice",
        ),
        ("description: x\nparameters: {round: 3}", "parameters: .*'rounds'"),
        ("description: x\nnotebooks: {04_sweep: {rounds: yes}}", "04_sweep: rounds=True is not"),
        ("description: x\nparameters: {rounds: [}", "line 2 is not valid YAML"),
    ],
)
def test_a_preset_file_that_is_not_right_is_one_sentence(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match=message) as caught:
        preset.load(str(path))
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)


def test_a_preset_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(
        PresetError, match=r"did you mean quick\?\): give one of full, quick, smoke"
    ):
        preset.load("quik")
    with pytest.raises(PresetError, match="there is no preset file"):
        preset.load(str(tmp_path / "none.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PresetError, match="is not valid YAML"):
        preset.load(str(tmp_path / "binary.yaml"))
