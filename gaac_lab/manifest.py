"""manifest.json: what was asked of a run, on which machine, with which versions, how it went."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gaac_lab import records
from gaac_lab.errors import RequestError

MANIFEST = "manifest.json"


class RunError(RequestError):
    """Something is wrong with a run's folder or with what is asked of it."""


class NotebookStatus(BaseModel):
    """How one notebook of the run ended.

    `fingerprint` stands for all that its results depend on (source, parameters, versions, machine);
    it is None unless the notebook is done.
    """

    model_config = ConfigDict(extra="forbid")

    status: Literal["done", "failed", "not run"] = "not run"
    seconds: float | None = None
    reason: str | None = None
    fingerprint: str | None = None


class RunRequest(BaseModel):
    """What the user asked for, so that a resumed run asks for the same."""

    model_config = ConfigDict(extra="forbid")

    preset: str
    shared: dict[str, Any] = Field(default_factory=dict)
    by_notebook: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Manifest(BaseModel):
    """The whole of manifest.json."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    created: str
    updated: str
    command: list[str]
    preset: str
    request: RunRequest
    parameters: dict[str, dict[str, Any]]
    versions: dict[str, str | None]
    machine: dict[str, Any]
    notebooks: dict[str, NotebookStatus]

    def failed(self) -> list[str]:
        """The notebooks that failed, in order."""
        return [name for name, state in self.notebooks.items() if state.status == "failed"]


def read_manifest(run_dir: Path) -> Manifest:
    """The manifest of a run's folder.

    Raises RunError if the folder holds none, or one that cannot be read.
    """
    path = Path(run_dir) / MANIFEST
    try:
        return Manifest.model_validate(records.read_json(path))
    except FileNotFoundError:
        raise RunError(f"{run_dir} is not the folder of a run: it holds no {MANIFEST}.") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise RunError(
            f"{path} was not written by this version (at {where!r}): start a new run."
        ) from error
    except ValueError as error:
        raise RunError(str(error)) from error


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    """Write manifest.json, whole or not at all."""
    records.write_json(Path(run_dir) / MANIFEST, manifest)
