"""Where the project's folders are: one resolver, so that the current directory never matters."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "GAAC_LAB_HOME"
MARKERS = ("notebooks", "data")


class ProjectNotFound(ValueError):
    """There is no clone of the project where one was looked for."""


def is_project(folder: Path) -> bool:
    """True if the folder holds what a clone holds: `notebooks/` and `data/`."""
    return all((folder / name).is_dir() for name in MARKERS)


def project_root() -> Path:
    """The clone's folder: GAAC_LAB_HOME where it is set, else the clone around this package.

    Raises ProjectNotFound when neither is a clone.
    """
    override = os.environ.get(HOME_VARIABLE, "").strip()
    if override:
        root = Path(override).expanduser().resolve()
        if not is_project(root):
            raise ProjectNotFound(
                f"{HOME_VARIABLE} is set to {override!r}, where there are no notebooks/ and data/: "
                "point it at a clone, or unset it."
            )
        return root
    root = Path(__file__).resolve().parent.parent
    if not is_project(root):
        raise ProjectNotFound(
            "gaac_lab is installed outside a clone of the project, and its notebooks and data are "
            f"not beside it: set {HOME_VARIABLE} to the clone's folder."
        )
    return root


def notebooks_dir() -> Path:
    """The notebooks as they are kept in the clone (never written to by a run)."""
    return project_root() / "notebooks"


def data_dir() -> Path:
    """Prompts, model configs and the accelerator table."""
    return project_root() / "data"


def models_dir() -> Path:
    """Where fetched models lie; ignored by git, and it may not exist yet."""
    return data_dir() / "models"


def runs_dir() -> Path:
    """Where run folders go by default; ignored by git, and it may not exist yet."""
    return data_dir() / "runs"
