"""The three lists of packages say the same, and the documents' examples run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name_of(name): version for name, version in pairs}


def test_everything_that_is_asked_for_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["peers"]]
    names = {name_of(requirement) for requirement in wanted}
    # torch's CUDA builds ask for exactly one triton, their own: a pin could rule them out.
    assert names - {"triton"} <= set(pins())
    assert "triton" not in pins()


def test_the_pins_are_what_the_tests_run_with() -> None:
    from importlib.metadata import version

    for name in map(name_of, PROJECT["dependencies"]):
        assert version(name).split("+")[0] == pins()[name], name


def test_conda_installs_the_same_set() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pip == ["--constraint constraints.txt", "--editable .[dev,peers]"]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/adding-a-codec.md"])
def test_the_examples_in_the_documents_run(
    document: str, default_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gaac_lab import peers

    monkeypatch.setattr(peers, "PEERS", dict(peers.PEERS))
    model, tokenizer = default_model
    inputs = {**tokenizer("Keys and values", return_tensors="pt"), "max_new_tokens": 4}
    namespace: dict[str, Any] = {"model": model, "inputs": inputs, "torch": torch}
    blocks = python_blocks(ROOT / document)
    assert blocks
    for block in blocks:
        exec(compile(block, document, "exec"), namespace)


def test_every_document_that_is_linked_exists() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
