"""Loading a model by name, folder or hub id, and what is said when it cannot be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gaac_lab import models
from gaac_lab.models import ModelError
from gaac_lab.paths import HOME_VARIABLE
from tests.lab import tiny_models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.model_folder(tmp_path_factory.mktemp("models") / "a tiny llama")


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "broken"))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that nobody answers for, and an empty cache."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


# ---- what can be had


def test_the_default_model(default_model: tuple[Any, Any], default_model_path: Path) -> None:
    model, tokenizer = default_model
    info = models.describe(model)
    assert (info.name, info.model_type, info.layers) == ("default", "llama", 30)
    assert (info.parameters, info.weight_bytes) == (134_515_008, 269_030_016)
    assert (info.dtype, info.device, info.max_context) == ("bfloat16", "cpu", 8192)
    assert info.attn_implementation == "sdpa"  # the library's choice
    assert (info.revision or "").startswith("sha256:")
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert models.config_file("default") == default_model_path / "config.json"

    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text + "The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=1).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_a_folder(tiny: Path) -> None:
    model, tokenizer = models.load(str(tiny), device="cpu")
    info = models.describe(model, str(tiny))
    assert info.dtype == "bfloat16"  # on a CPU, though the checkpoint is float16
    assert info.revision is None
    assert info.max_context == 128
    assert info.weight_bytes == 2 * info.parameters
    assert tokenizer.chat_template
    assert models.config_file(str(tiny)) == tiny / "config.json"


@pytest.mark.parametrize("dtype", ["float16", "float32", torch.float16])
def test_a_dtype_that_is_asked_for(tiny: Path, dtype: str | torch.dtype) -> None:
    model, _ = models.load(str(tiny), dtype=dtype, device="cpu")
    assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")


def test_auto() -> None:
    assert models.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    resolve = models.resolve_dtype
    assert resolve("auto", "cpu", checkpoint="float16") == torch.bfloat16
    assert resolve("auto", "cuda", checkpoint="float16") == torch.float16
    assert resolve("auto", torch.device("cuda"), checkpoint=torch.float32) == torch.bfloat16
    assert resolve("auto", "cuda") == torch.bfloat16
    assert resolve("float16", "cpu") == torch.float16


# ---- what cannot


def refusal(name: str, **options: Any) -> str:
    """The one sentence that says why."""
    with pytest.raises(ModelError) as caught:
        models.load(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_before_it_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    assert not models.is_fetched()
    assert "run `gaac-lab fetch-model`" in refusal("default")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "abacus"}, "give auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "give auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"dtype": "int8"}, "give auto, bfloat16, float16, float32"),
    ],
)
def test_devices_and_dtypes(tiny: Path, options: dict[str, str], words: str) -> None:
    assert words in refusal(str(tiny), **options)


def test_no_such_folder(tmp_path: Path) -> None:
    assert "There is no folder" in refusal(str(tmp_path / "nothing here"))
    assert "There is no folder" in refusal("./nothing")


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(str(tmp_path))


def test_a_file(tiny: Path) -> None:
    assert "is a file" in refusal(str(tiny / "config.json"))


@pytest.mark.parametrize("name", ["somebody/some-model", "some-model"])
def test_a_hub_that_cannot_be_asked(name: str, no_hub: None) -> None:
    assert "the model hub could not be asked" in refusal(name)


def test_config_that_is_no_json(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(str(broken))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_code_of_its_own_is_never_run(broken: Path, tmp_path: Path) -> None:
    (broken / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    change_config(broken, model_type="own", auto_map={"AutoConfig": "own.Config"})
    assert "never run here" in refusal(str(broken))
    assert not (tmp_path / "ran").exists()


def test_a_family_that_nobody_knows(broken: Path) -> None:
    change_config(broken, model_type="brand_new")
    assert "config.json cannot be loaded" in refusal(str(broken))


def test_no_tokenizer(broken: Path) -> None:
    for path in broken.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer" in refusal(str(broken))


def test_no_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "the weights" in refusal(str(broken))


def test_damaged_weights(broken: Path) -> None:
    (broken / "model.safetensors").write_bytes(b"damaged " * 9)
    assert "the weights" in refusal(str(broken))


def test_a_checkpoint_with_holes_is_not_filled_with_random_numbers(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    said = refusal(str(broken))
    assert "lacks 1 of the model's tensors" in said
    assert "layers.1.self_attn.k_proj" in said
