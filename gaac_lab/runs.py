"""A run's folder: what a notebook leaves there, and how others read it.

    manifest.json             what ran, versions, machine, parameters, status of each notebook
    receipts/<notebook>.json  written by a notebook's last cell: the proof that it ran to its end
    results/*.json            tidy records, units in the names
    figures/*.png, *.svg      the pictures; their captions are in the receipts
    notebooks/*.ipynb         the executed notebooks
    decision.json             the verdict

While a notebook is at work, receipts/<notebook>.json.open names the files that it has begun, so
that a notebook that dies leaves nothing that nobody owns.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gaac_lab import paths, records
from gaac_lab.manifest import Manifest, NotebookStatus, RunError, read_manifest, write_manifest

__all__ = [
    "Figure", "Manifest", "NotebookStatus", "Receipt", "Run", "RunError", "clear", "fresh_folder",
    "read_manifest", "read_receipt", "read_receipts", "write_manifest",
]  # fmt: skip

TOKEN_VARIABLE = "GAAC_LAB_RUN_TOKEN"
DECISION = "decision.json"
FOLDERS = ("results", "figures", "notebooks", "receipts")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


class Figure(BaseModel):
    """One picture of a run; the paths are relative to the run's folder."""

    model_config = ConfigDict(extra="forbid")

    name: str
    caption: str
    png: str
    svg: str


class Receipt(BaseModel):
    """What one notebook did: its parameters, the names of its results, its figures and notes."""

    model_config = ConfigDict(extra="forbid")

    notebook: str
    parameters: dict[str, Any]
    started: str
    finished: str | None = None
    token: str | None = None
    python: str
    executable: str
    results: list[str] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
    notes: dict[str, Any] = Field(default_factory=dict)
    decision: bool = False


class Run:
    """One notebook's hold on a run's folder. Open it first, call `finish` in the last cell."""

    def __init__(self, folder: Path, receipt: Receipt) -> None:
        self.dir = folder
        self.notebook = receipt.notebook
        self._receipt = receipt

    @classmethod
    def open(cls, out_dir: str | Path, notebook: str, parameters: dict[str, Any]) -> Run:
        """Start `notebook` in the folder `out_dir`, and take away what it left there before.

        An empty `out_dir` gives a fresh folder under the project's runs. `parameters` are the
        notebook's parameters as they were given to it.
        Raises RunError if the folder cannot be used.
        """
        _check_name(notebook, "a notebook's name")
        folder = (
            Path(out_dir).expanduser().resolve() if str(out_dir) else fresh_folder("interactive")
        )
        make_folders(folder)
        clear(folder, notebook)
        receipt = Receipt(
            notebook=notebook,
            parameters=records.to_plain(parameters),
            started=now(),
            token=os.environ.get(TOKEN_VARIABLE),
            python=sys.version.split()[0],
            executable=sys.executable,
        )
        run = cls(folder, receipt)
        run._keep_journal()
        return run

    def save(self, name: str, values: Any) -> Path:
        """Keep tidy records as results/<name>.json and return its path.

        `values`: a list of dicts, a dict, a pandas frame, data classes or pydantic models. NaN and
        infinity become null. Saving the same name again replaces it.
        Raises RunError if another notebook of this run keeps that name, TypeError for values that
        JSON cannot hold.
        """
        _check_name(name, "a result's name")
        text = records.dump(values)
        self._refuse_foreign("results", name)
        if name not in self._receipt.results:
            self._receipt.results.append(name)
            self._keep_journal()
        path = self.dir / "results" / f"{name}.json"
        records.write_bytes(path, (text + "\n").encode())
        return path

    def load(self, name: str) -> Any:
        """The records kept under that name by any notebook of this run: a list or a dict.

        Raises RunError if there are none.
        """
        path = self.dir / "results" / f"{name}.json"
        try:
            return records.read_json(path)
        except FileNotFoundError:
            raise RunError(
                f"this run holds no results named {name!r} ({path} is missing): "
                "run the notebook that measures them first, with the same out_dir."
            ) from None
        except ValueError as error:
            raise RunError(str(error)) from error

    def has(self, name: str) -> bool:
        """True if this run holds records under that name."""
        return (self.dir / "results" / f"{name}.json").is_file()

    def figure(self, fig: Any, name: str, caption: str) -> Path:
        """Keep a matplotlib figure as figures/<name>.png (150 dpi) and .svg; return the png's path.

        Raises RunError if another notebook of this run keeps that name.
        """
        _check_name(name, "a figure's name")
        if not caption.strip():
            raise RunError(
                f"the figure {name!r} needs a caption: one sentence that says what it shows."
            )
        self._refuse_foreign("figures", name)
        kept = Figure(
            name=name, caption=caption.strip(), png=f"figures/{name}.png", svg=f"figures/{name}.svg"
        )
        others = [figure for figure in self._receipt.figures if figure.name != name]
        self._receipt.figures = [*others, kept]
        self._keep_journal()
        for relative in (kept.png, kept.svg):
            _save_figure(fig, self.dir / relative)
        return self.dir / kept.png

    def note(self, key: str, value: Any) -> None:
        """Keep one headline fact for the report, e.g. `note("bf16_ratio", 1.49)`."""
        self._receipt.notes[key] = records.to_plain(value)
        self._keep_journal()

    def decide(self, decision: Any) -> Path:
        """Keep the verdict as decision.json in the run's folder and return its path."""
        text = records.dump(decision)
        self._receipt.decision = True
        self._keep_journal()
        path = self.dir / DECISION
        records.write_bytes(path, (text + "\n").encode())
        return path

    def finish(self) -> Path:
        """Write the receipt, last of all, and return its path."""
        self._receipt.finished = now()
        path = receipt_path(self.dir, self.notebook)
        records.write_json(path, self._receipt)
        journal_path(self.dir, self.notebook).unlink(missing_ok=True)
        return path

    def _keep_journal(self) -> None:
        records.write_json(journal_path(self.dir, self.notebook), self._receipt)

    def _refuse_foreign(self, kind: str, name: str) -> None:
        for receipt in _all_receipts(self.dir):
            if receipt.notebook == self.notebook:
                continue
            owned = receipt.results if kind == "results" else [f.name for f in receipt.figures]
            if name in owned:
                raise RunError(
                    f"{kind}/{name} belongs to the notebook {receipt.notebook}: "
                    f"choose another name in {self.notebook}."
                )


def read_receipt(run_dir: Path, notebook: str) -> Receipt | None:
    """The receipt of a notebook that ran to its end, or None.

    Raises RunError if it is damaged.
    """
    return _read(receipt_path(Path(run_dir), notebook))


def read_receipts(run_dir: Path) -> dict[str, Receipt]:
    """The receipts of all notebooks that ran to their end, by notebook, in order.

    Raises RunError if one is damaged.
    """
    found = (_read(path) for path in sorted((Path(run_dir) / "receipts").glob("*.json")))
    return {receipt.notebook: receipt for receipt in found if receipt is not None}


def clear(run_dir: Path, notebook: str) -> None:
    """Delete a notebook's receipt, the files that it names, and what it began and never ended."""
    for path in (receipt_path(run_dir, notebook), journal_path(run_dir, notebook)):
        try:
            receipt = _read(path)
        except RunError:
            receipt = None  # damaged: it names nothing that can be trusted, so only it goes
        path.unlink(missing_ok=True)
        if receipt is None:
            continue
        for name in receipt.results:
            (run_dir / "results" / f"{name}.json").unlink(missing_ok=True)
        for figure in receipt.figures:
            (run_dir / figure.png).unlink(missing_ok=True)
            (run_dir / figure.svg).unlink(missing_ok=True)
        if receipt.decision:
            (run_dir / DECISION).unlink(missing_ok=True)


def fresh_folder(suffix: str) -> Path:
    """A new, empty folder under the project's runs: the time, then the suffix."""
    base = paths.runs_dir() / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{suffix}"
    for attempt in range(1, 1000):
        folder = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"the folder {folder} cannot be made: {error.strerror}.") from error
        return folder
    raise RunError(f"{base} and a thousand names like it are taken: clean {base.parent}.")


def make_folders(run_dir: Path) -> None:
    """Make a run's folder and the folders in it. Raises RunError if that is not possible."""
    try:
        for name in FOLDERS:
            (run_dir / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the folder {run_dir} cannot be used: {error.strerror}.") from error


def receipt_path(run_dir: Path, notebook: str) -> Path:
    """Where a notebook's receipt lies."""
    return run_dir / "receipts" / f"{notebook}.json"


def journal_path(run_dir: Path, notebook: str) -> Path:
    """Where a notebook that is at work names the files that it has begun."""
    return run_dir / "receipts" / f"{notebook}.json.open"


def now() -> str:
    """This moment as ISO 8601, with its offset from UTC."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _read(path: Path) -> Receipt | None:
    try:
        return Receipt.model_validate(records.read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunError(f"{path} is not a receipt of this version: delete it.") from error
    except ValueError as error:
        raise RunError(str(error)) from error


def _all_receipts(run_dir: Path) -> list[Receipt]:
    """Receipts of notebooks that ended and of those at work."""
    folder = run_dir / "receipts"
    found = [_read(path) for path in [*folder.glob("*.json"), *folder.glob("*.json.open")]]
    return [receipt for receipt in found if receipt is not None]


def _save_figure(fig: Any, path: Path) -> None:
    """The suffix stays last, because matplotlib takes the format from it."""
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        fig.savefig(temporary, dpi=150, bbox_inches="tight")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise RunError(
            f"{what} is made of small letters, digits, '_' and '-', and {name!r} is not."
        )
