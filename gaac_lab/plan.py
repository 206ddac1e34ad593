"""What a run will do, settled before anything starts: notebooks, parameters, folder.

Everything that can be known to be wrong is found here, and is a RequestError.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaac_lab import machine, notebook, parameters, preset, records, runs
from gaac_lab.errors import RequestError
from gaac_lab.manifest import MANIFEST, Manifest, RunRequest
from gaac_lab.notebook import Notebook
from gaac_lab.preset import Preset

DEFAULT_PRESET = "quick"
MIN_FREE_BYTES = 512 * 2**20
Values = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What the user asks for. `sets` are texts like "rounds=3" or "04_sweep.rounds=3".

    `out` None is a fresh folder under the project's runs, or, to resume, the newest one there.
    """

    notebooks_dir: Path
    preset: str | None = None
    model: str | None = None
    sets: list[str] = field(default_factory=list)
    out: Path | None = None
    resume: bool = False
    only: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """A request that has passed every check; `previous` is the manifest that it continues."""

    notebooks: list[Notebook]
    chosen: list[Notebook]
    parameters: dict[str, Values]
    request: RunRequest
    out: Path | None
    previous: Manifest | None

    @property
    def needs_default_model(self) -> bool:
        """True if the default model is wanted; it may have to be fetched first."""
        return any(self.parameters[n.name].get("model") == "default" for n in self.chosen)

    def make_folder(self) -> Path:
        """The run's folder, made now if it is not there. Raises RunError if it cannot be."""
        folder = self.out or runs.fresh_folder(self.request.preset)
        runs.make_folders(folder)
        return folder


def make(asked: Asked, *, min_free_bytes: int = MIN_FREE_BYTES) -> Plan:
    """Check the whole request; nothing is written. Raises RequestError: what to change."""
    notebooks = notebook.discover(asked.notebooks_dir)
    chosen = notebook.select(notebooks, asked.only)
    out, previous = _place(asked)
    _check_room(out or runs.paths.runs_dir(), min_free_bytes)
    chosen_preset, request = _request(asked, notebooks, chosen, previous)
    values = {n.name: _values(n, chosen_preset, request) for n in notebooks}
    _check_existence([values[n.name] for n in chosen])
    machine.describe()  # an installation whose torch does not start is found here
    return Plan(notebooks, chosen, values, request, out, previous)


def _place(asked: Asked) -> tuple[Path | None, Manifest | None]:
    """The folder to use (None: a fresh one) and the manifest of the run in it, if it has one."""
    out = asked.out.expanduser().resolve() if asked.out is not None else None
    if out is None and asked.resume:
        out = _newest_run()
    if out is None or not out.exists():
        return out, None
    if not out.is_dir():
        raise RequestError(f"{out} is a file: give a folder with --out.")
    if (out / MANIFEST).is_file():
        if not asked.resume:
            raise RequestError(
                f"{out} holds a run already: add --resume to continue it, or choose another folder."
            )
        return out, runs.read_manifest(out)
    if any(out.iterdir()):
        raise RequestError(f"{out} is neither empty nor the folder of a run: choose another one.")
    return out, None


def _newest_run() -> Path:
    folder = runs.paths.runs_dir()
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not found:
        raise RequestError(f"there is no run to resume in {folder}: name its folder with --out.")
    return found[-1]


def _check_room(folder: Path, min_free_bytes: int) -> None:
    """The nearest folder that exists must be writable and have some space."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RequestError(f"{there} cannot be written to: choose another folder with --out.")
    free = shutil.disk_usage(there).free
    if free < min_free_bytes:
        raise RequestError(
            f"only {free / 2**20:.0f} MiB are free in {there}, and a run needs "
            f"{min_free_bytes / 2**20:.0f} MiB: free some, or choose another folder with --out."
        )


def _request(
    asked: Asked, notebooks: list[Notebook], chosen: list[Notebook], previous: Manifest | None
) -> tuple[Preset, RunRequest]:
    """The request in full: what is given now wins over what a resumed run was asked for."""
    before = previous.request if previous else RunRequest(preset=DEFAULT_PRESET)
    if asked.preset is not None:
        before = before.model_copy(update={"preset": _absolute(asked.preset)})
    found = preset.load(before.preset)
    _check_preset_names(found, notebooks)
    shared, by_notebook = dict(before.shared), {k: dict(v) for k, v in before.by_notebook.items()}
    sets = [*asked.sets, *([f"model={asked.model}"] if asked.model is not None else [])]
    for text in sets:
        where, name, value = _parse_set(text, notebooks)
        owners = [where] if where is not None else chosen
        if not any(name in owner.defaults for owner in owners):
            names = sorted({known for owner in owners for known in owner.defaults})
            raise RequestError(f"--set {text}: {parameters.unknown(name, names)}")
        if where is None:
            shared[name] = value
        else:
            by_notebook.setdefault(where.name, {})[name] = value
    return found, RunRequest(preset=before.preset, shared=shared, by_notebook=by_notebook)


def _check_preset_names(found: Preset, notebooks: list[Notebook]) -> None:
    known = {n.name: n.defaults for n in notebooks}
    for name in found.parameters:
        if not any(name in defaults for defaults in known.values()):
            raise RequestError(f"preset {found.name}: no notebook has the parameter {name!r}.")
    for where, values in found.notebooks.items():
        if where not in known:
            raise RequestError(f"preset {found.name}: there is no notebook {where!r}.")
        for name in values:
            if name not in known[where]:
                hint = parameters.unknown(name, list(known[where]))
                raise RequestError(f"preset {found.name}, {where}: {hint}")


def _parse_set(text: str, notebooks: list[Notebook]) -> tuple[Notebook | None, str, Any]:
    """--set's "name=value" or "notebook.name=value", its value read and checked."""
    left, equals, right = text.partition("=")
    prefix, _, name = left.strip().rpartition(".")
    if not equals or not name:
        raise RequestError(f"--set {text}: write name=value, for example --set rounds=3.")
    if name == "out_dir":
        raise RequestError("--set out_dir: the run's folder is given with --out.")
    where = notebook.select(notebooks, [prefix])[0] if prefix else None
    value = parameters.parse(name, right)
    checked = parameters.check({name: value})[name]
    return where, name, _absolute(checked) if name == "model" else checked


def _absolute(name: str) -> str:
    """A path that exists, made absolute: kernels work in another folder. Other names stay."""
    path = Path(name).expanduser()
    is_path = path.exists() and ("/" in name or path.is_dir() or path.suffix in preset.SUFFIXES)
    return str(path.resolve()) if is_path else name


def _values(n: Notebook, found: Preset, request: RunRequest) -> Values:
    """The notebook's defaults, the preset's values over them, the user's over those."""
    layers: list[Mapping[str, Any]] = [
        {k: v for k, v in found.parameters.items() if k in n.defaults},
        found.notebooks.get(n.name, {}),
        {k: v for k, v in request.shared.items() if k in n.defaults},
        request.by_notebook.get(n.name, {}),
    ]
    values = dict(n.defaults)
    for layer in layers:
        values |= layer
    return parameters.check(values)


def _check_existence(all_values: list[Values]) -> None:
    """That the models, prompts, peers and devices named are there."""

    def given(name: str) -> set[Any]:
        return {values[name] for values in all_values if name in values}

    def listed(name: str) -> set[Any]:
        return set().union(*(values.get(name, []) for values in all_values))

    for name in sorted(given("model") - {"default"}):
        from gaac_lab import models

        try:
            models.locate(name)
        except models.ModelError as error:
            raise RequestError(str(error)) from error
    if wanted := given("prompt") | listed("prompts") - {"all"}:
        from gaac_lab import prompts

        _refuse_unknown("prompt", wanted, prompts.names())
    if wanted := (listed("compared_models") | listed("bill_models")) - {"all"}:
        from gaac_lab import model_table

        _refuse_unknown("model config", wanted, model_table.names())
    for name in given("memory"):
        from gaac_lab import model_table

        try:
            model_table.memory_bytes(name)
        except ValueError as error:
            raise RequestError(str(error)) from error
    if wanted := listed("peers"):
        from gaac_lab.peers import PEERS

        _refuse_unknown("peer", wanted, list(PEERS))
    for name in sorted(given("device") - {"auto", "cpu"}):
        if machine.accelerator() is None:
            raise RequestError(f"device={name}: torch sees no CUDA device; give auto or cpu.")


def _refuse_unknown(what: str, wanted: set[str], known: list[str]) -> None:
    for name in sorted(wanted - set(known)):
        raise RequestError(f"there is no {what} {name!r}: choose from {', '.join(known)}.")


def fingerprint(n: Notebook, values: Values) -> str:
    """A hash of all that the notebook's results depend on: its text, its parameters, the code of
    gaac and gaac_lab, the versions of Python, torch and transformers, the model, the machine.
    """
    here = machine.describe()
    parts = {
        "source": n.source,
        "parameters": {k: v for k, v in values.items() if k != "out_dir"},
        "code": code_digest(),
        "versions": {k: machine.versions()[k] for k in ("python", "torch", "transformers")},
        "model": _model_files(str(values.get("model", ""))),
        "machine": [here["cpu"], here["cores"], here["accelerator"]],
    }
    text = json.dumps(records.to_plain(parts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def code_digest() -> str:
    """A hash of every Python file of gaac and gaac_lab."""
    digest = hashlib.sha256()
    for package in ("gaac", "gaac_lab"):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec else None) or []:
            for path in sorted(Path(location).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(location)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _model_files(name: str) -> list[tuple[str, int]]:
    """Names and sizes of a model folder's files; empty for a model that is no folder."""
    folder = Path(name)
    if not name or not folder.is_dir():
        return []
    return sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
