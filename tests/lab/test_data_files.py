"""Every file in data/ can be read and says what it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaac_lab import accelerators
from gaac_lab.paths import data_dir
from gaac_lab.prompt_sources import CONVERSATIONS, SOURCES

CONFIGS = sorted((data_dir() / "model_configs").glob("*.json"))
TEXTS = [
    path
    for pattern in ("*.*", "prompts/*", "model_configs/*")
    for path in sorted(data_dir().glob(pattern))
    if path.is_file()
]


def test_there_are_files() -> None:
    assert len(CONFIGS) > 30
    assert len(TEXTS) > 40


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_texts_are_clean(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert "\t" not in text
    for mark in ("<<<<<<<", "=======", ">>>>>>>"):  # what a merge leaves behind
        assert mark not in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_model_config_names_its_source_and_what_to_expect(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    record = config["_about"]
    assert set(record) == {
        "name", "parameters_billion", "kind", "source", "notes", "expected",
        "max_context_tokens", "wrong_bytes_per_token",
    }  # fmt: skip
    assert record["source"]
    assert record["parameters_billion"] is None or record["parameters_billion"] > 0
    assert config["model_type"]
    expected = record["expected"]
    assert 0 <= expected["bytes_per_token"] <= expected["bytes_per_token_below_window"]
    assert expected["total_bytes_at_32768_tokens"] > 0
    for wrong in record["wrong_bytes_per_token"].values():
        assert wrong != expected["bytes_per_token"]


def test_the_accelerators() -> None:
    found = {entry.device: entry for entry in accelerators.accelerators()}
    assert len(found) >= 12
    h200 = found["NVIDIA H200"]
    assert (h200.memory_gib, h200.memory_bandwidth_gb_s) == (141, 4800)
    assert found["NVIDIA H100 80GB HBM3"].memory_bandwidth_gb_s == 3350
    assert all("NVIDIA" in entry.source or "AMD" in entry.source for entry in found.values())
    assert accelerators.find("NVIDIA L4") == found["NVIDIA L4"]
    assert accelerators.find("abacus") is None


HEAD = "device,memory_gib,memory_bandwidth_gb_s,source\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device,memory\nA,1\n", "the first line must read device,memory_gib"),
        (HEAD + "A,80,3350,sheet\nB,80,fast,sheet\n", "line 3: .* must be numbers"),
        (HEAD + "A,80,3350\n", "line 2: four values"),
        (HEAD + "A,80,3350,sheet,more\n", "line 2: four values"),
        (HEAD + "A,80,3350,\n", "line 2: four values"),
        (HEAD + "A,80,3.35,sheet\n", "line 2: .* out of all proportion"),
        (HEAD + "A,80,3350,sheet\nA,80,3350,sheet\n", "each device stands once"),
        (HEAD, "no device"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "accelerators.csv"
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        accelerators.accelerators(table)


def test_the_readme_names_every_generator() -> None:
    readme = (data_dir() / "README.md").read_text(encoding="utf-8")
    for name in (*SOURCES, *CONVERSATIONS):
        assert f"`{name}`" in readme
