"""Which model is measured: load one by name, folder or hub id, and say what was loaded."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaac_lab.default_model import (
    SOURCE,
    WEIGHTS,
    ModelError,
    default_path,
    is_fetched,
    read_source,
)
from gaac_lab.fetch import fetch_default

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ModelError",
    "ModelInfo",
    "config_file",
    "default_path",
    "describe",
    "fetch_default",
    "is_fetched",
    "load",
    "locate",
    "resolve_device",
    "resolve_dtype",
]

DEFAULT = "default"
DTYPES = ("bfloat16", "float16", "float32")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_TIMEOUT_S = 10.0
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, for the results; `revision` is a hub commit or the weights' sha256."""

    name: str
    revision: str | None
    model_type: str
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    layers: int
    max_context: int | None
    attn_implementation: str | None


def load(
    name: str = DEFAULT, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to measure.

    `name` is "default", a folder in transformers' format, or a hub id. The model is in eval mode
    with gradients off, and keeps the library's choice of attention. Code that comes with a
    checkpoint is never run (trust_remote_code stays off). Raises ModelError with one sentence.
    """
    where = resolve_device(device)
    source, offline = locate(name)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": offline}
    _quiet_unless_terminal()
    config = _from_pretrained("AutoConfig", name, source, options)
    wanted = resolve_dtype(dtype, where, checkpoint=getattr(config, "dtype", None))
    tokenizer = _from_pretrained("AutoTokenizer", name, source, options)
    options |= {"dtype": wanted, "output_loading_info": True}
    model, loading = _from_pretrained("AutoModelForCausalLM", name, source, options)
    _require_all_weights(name, loading)
    return _place(model, where, name).eval().requires_grad_(False), tokenizer


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device: "auto" is CUDA where there is one, else the CPU; else "cpu", "cuda[:N]".

    Raises ModelError if the device is not there or is of another kind.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ModelError(f"device={device!r} is not known: give auto, cpu, cuda or cuda:N.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device={device!s}: torch sees no CUDA device here; give cpu or auto.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(f"device={device!s}: torch sees {count} CUDA device(s), counted from 0.")
    return found


def resolve_dtype(
    dtype: str | torch.dtype,
    device: str | torch.device,
    *,
    checkpoint: str | torch.dtype | None = None,
) -> torch.dtype:
    """The torch dtype of weights and KV: "auto", "bfloat16", "float16" or "float32".

    "auto" on a CPU is bfloat16 (float16 prefill takes about six times as long there); on CUDA it is
    the checkpoint's own dtype if that has 16 bits, else bfloat16. Raises ModelError otherwise.
    """
    import torch

    wanted = str(dtype).removeprefix("torch.")
    if wanted == "auto":
        own = str(checkpoint).removeprefix("torch.")
        on_cuda = torch.device(device).type == "cuda"
        wanted = own if on_cuda and own in ("bfloat16", "float16") else "bfloat16"
    if wanted not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is not known: give auto, {', '.join(DTYPES)}.")
    found: torch.dtype = getattr(torch, wanted)
    return found


def describe(model: PreTrainedModel, name: str = DEFAULT) -> ModelInfo:
    """What was loaded under `name`; sizes are counted on the model itself, shared weights once."""
    config = model.config.get_text_config()
    weights = list(model.parameters())
    limits = [getattr(config, field, None) for field in CONTEXT_FIELDS]
    return ModelInfo(
        name=name,
        revision=_revision(model, name),
        model_type=str(model.config.model_type),
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        layers=int(config.num_hidden_layers),
        max_context=next((int(limit) for limit in limits if isinstance(limit, int)), None),
        attn_implementation=getattr(model.config, "_attn_implementation", None),
    )


def locate(name: str) -> tuple[str, bool]:
    """(what to load from, whether the network must be left alone) for a name that `load` takes.

    Raises ModelError if there is nothing under that name; no weights are read.
    """
    if name == DEFAULT:
        if not is_fetched():
            raise ModelError(
                "The default model has not been fetched yet: run `gaac-lab fetch-model` once."
            )
        return str(default_path()), True
    folder = Path(name).expanduser()
    if folder.exists():
        return str(_checked_folder(folder)), True
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"There is no folder {name}: give a model's folder, a hub id or default.")
    return name, _must_stay_offline(name)


def config_file(name: str) -> Path:
    """The config.json of a model that `load` would take, fetched from the hub if need be."""
    import huggingface_hub

    source, offline = locate(name)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", local_files_only=offline))
    except Exception as error:
        raise ModelError(_why_not_loaded("AutoConfig", name, error)) from error


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file: give the folder that holds the model's config.json.")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{folder} holds no config.json: give a folder in transformers' format (config.json, "
            "safetensors, tokenizer)."
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config} is not valid JSON ({error}): fetch the file again.") from error
    return folder


def _must_stay_offline(name: str) -> bool:
    """Ask the hub once, briefly, and fall back to its cache on this machine.

    The loaders themselves retry for a long time per file when there is no network.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise ModelError(
            f"The model {name} is gated: accept its terms on its page, then log in with `hf auth "
            "login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder and no hub model {name}: check the spelling, and for a private "
            "model log in with `hf auth login`."
        ) from error
    except Exception as error:  # the HTTP library's own classes differ between hub versions
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return True
        raise ModelError(
            f"There is no folder {name}, and the model hub could not be asked for it "
            f"({type(error).__name__}): check the path or the network, or give a folder."
        ) from error
    return False


def _from_pretrained(loader: str, name: str, source: str, options: dict[str, Any]) -> Any:
    import transformers

    try:
        return getattr(transformers, loader).from_pretrained(source, **options)
    except Exception as error:  # whatever a damaged file makes the libraries raise
        raise ModelError(_why_not_loaded(loader, name, error)) from error


def _why_not_loaded(loader: str, name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text or "contains custom code" in text:
        return (
            f"{name} needs code of its own (trust_remote_code), which is never run here: choose a "
            "model of a family that transformers knows."
        )
    reason = re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")[:300] or type(error).__name__
    if loader == "AutoTokenizer":
        return (
            f"{name} has no tokenizer that can be loaded ({reason}): put the tokenizer's files "
            "beside config.json."
        )
    what = "config.json" if loader == "AutoConfig" else "weights of a causal language model"
    return f"{name}: the {what} cannot be loaded ({reason}); check the files or give another model."


def _require_all_weights(name: str, loading: dict[str, Any]) -> None:
    """The library fills what a checkpoint lacks with random numbers, and only warns."""
    lacking = sorted(loading["missing_keys"])
    if lacking:
        raise ModelError(
            f"{name}: the checkpoint lacks {len(lacking)} of the model's tensors ({lacking[0]}, "
            "...): fetch it again, or give another model."
        )


def _place(model: PreTrainedModel, device: torch.device, name: str) -> PreTrainedModel:
    import torch

    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{name} does not fit into the memory of {device}: give a smaller model or device=cpu."
        ) from error


def _revision(model: PreTrainedModel, name: str) -> str | None:
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return str(commit)
    folder = default_path() if name == DEFAULT else Path(name).expanduser()
    record = read_source(folder) if (folder / SOURCE).is_file() else None
    return f"sha256:{record['files'][WEIGHTS]['sha256']}" if record else None


def _quiet_unless_terminal() -> None:
    """Keep the libraries' progress bars out of logs: they write one line per tick there."""
    if sys.stderr.isatty():
        return
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.suppress(Exception):  # refuses when an environment variable decides
        disable_progress_bars()
