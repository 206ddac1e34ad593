"""The headless run: each notebook in a fresh kernel, what finished kept, the truth written down.

papermill is trusted to execute cells and with nothing else. A notebook is done when papermill
returned normally, the notebook's own last cell wrote a receipt with this run's token from this
Python, the receipt's parameters are those that were given, and the executed notebook is sound.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaac_lab import kernel, machine, notebook, plan, records, runs
from gaac_lab.failure import explain, is_full
from gaac_lab.manifest import Manifest, NotebookStatus, RunError
from gaac_lab.notebook import Notebook
from gaac_lab.plan import Plan
from gaac_lab.progress import Progress

DONE, FAILED, INTERRUPTED = 0, 1, 130
TIMEOUT_S = 4 * 3600.0
READS_OTHERS = ("08_decision",)  # stale as soon as any other notebook was run again
REPORTS = ("report.html", "report.md")

WriteReport = Callable[[Path], Path]


@dataclass(frozen=True)
class Result:
    """How a run ended; `exit_status` is the command's."""

    exit_status: int
    run_dir: Path
    manifest: Manifest
    report: Path | None


def run(
    planned: Plan,
    progress: Progress,
    *,
    timeout_s: float = TIMEOUT_S,
    command: list[str] | None = None,
    write_report: WriteReport | None = None,
) -> Result:
    """Run the plan's notebooks, one after the other, then write the report.

    A notebook that fails does not stop the others. `timeout_s` is for each. Raises RunError if the
    folder cannot be used, or if another run is at work in it: then nothing has been run.
    """
    run_dir = planned.make_folder()
    with _alone(run_dir):
        work = _Work(planned, progress, run_dir, timeout_s, _new_manifest(planned, command or []))
        try:
            interrupted = work.run_all()
            report = None if interrupted else _report(run_dir, progress, write_report)
        except OSError as error:
            if not is_full(error):
                raise
            progress.say(f"No space is left for {run_dir}: free some, then continue with --resume.")
            return Result(FAILED, run_dir, work.manifest, None)
        finally:
            progress.stop()
    if interrupted:
        return Result(INTERRUPTED, run_dir, work.manifest, None)
    good = report is not None and not any(n.name in work.manifest.failed() for n in planned.chosen)
    return Result(DONE if good else FAILED, run_dir, work.manifest, report)


@dataclass
class _Work:
    """The notebooks of one run, and the manifest that follows them."""

    planned: Plan
    progress: Progress
    run_dir: Path
    timeout_s: float
    manifest: Manifest

    def run_all(self) -> bool:
        """Run what is missing or stale; True if the user broke it off."""
        for name in REPORTS:
            (self.run_dir / name).unlink(missing_ok=True)
        self._save()
        names = [n.name for n in self.planned.chosen]
        many = "1 notebook" if len(names) == 1 else f"{len(names)} notebooks"
        self.progress.begin(f"{many}, into {self.run_dir}", names)
        for n in self.planned.chosen:
            given = self.planned.parameters[n.name] | {"out_dir": str(self.run_dir)}
            self.manifest.parameters[n.name] = given
            mark = plan.fingerprint(n, given)
            if self._still_stands(n, mark):
                self.progress.keep(n.name)
                continue
            if self._run_one(n, given, mark):
                return True
        return False

    def _run_one(self, n: Notebook, given: dict[str, Any], mark: str) -> bool:
        """Run one notebook and write down how it went; True if the user broke it off."""
        output = self.run_dir / "notebooks" / f"{n.name}.ipynb"
        runs.clear(self.run_dir, n.name)
        output.unlink(missing_ok=True)
        self._forget(n.name)
        self.progress.start(n.name)
        token = secrets.token_hex(16)
        execution = kernel.execute(
            n.path,
            output,
            {name: value for name, value in given.items() if name in n.defaults},
            cwd=self.run_dir,
            environment=_environment(token),
            timeout_s=self.timeout_s,
            on_tick=self.progress.tick,
        )
        reason = explain(execution, self.run_dir, given, self.timeout_s)
        reason = reason or _doubt(self.run_dir, n, given, token, output)
        if reason:
            _mark_failed(output, reason)
        state = NotebookStatus(
            status="failed" if reason else "done",
            seconds=round(execution.seconds, 1),
            reason=reason,
            fingerprint=None if reason else mark,
        )
        self.manifest.notebooks[n.name] = state
        self.progress.end(n.name, state)
        self._save()
        return execution.interrupted

    def _forget(self, name: str) -> None:
        """From now on it does not count as done, and what reads it is stale."""
        self.manifest.notebooks[name] = NotebookStatus()
        for reader in READS_OTHERS:
            if reader > name and reader in self.manifest.notebooks:
                self.manifest.notebooks[reader].fingerprint = None
        self._save()

    def _still_stands(self, n: Notebook, mark: str) -> bool:
        state = self.manifest.notebooks[n.name]
        if state.status != "done" or state.fingerprint != mark:
            return False
        try:
            receipt = runs.read_receipt(self.run_dir, n.name)
        except RunError:
            return False
        return receipt is not None and not _missing(self.run_dir, receipt)

    def _save(self) -> None:
        self.manifest.updated = runs.now()
        runs.write_manifest(self.run_dir, self.manifest)


def _new_manifest(planned: Plan, command: list[str]) -> Manifest:
    """The manifest of this run; what an earlier run in the folder finished stays."""
    before = planned.previous
    return Manifest(
        created=before.created if before else runs.now(),
        updated=runs.now(),
        command=command,
        preset=Path(planned.request.preset).stem,
        request=planned.request,
        parameters=dict(before.parameters) if before else {},
        versions=machine.versions(),
        machine=machine.describe(),
        notebooks={
            n.name: (before.notebooks.get(n.name) if before else None) or NotebookStatus()
            for n in planned.notebooks
        },
    )


def _environment(token: str) -> dict[str, str]:
    """What is set for a kernel. The packages are found where the runner found them."""
    root = str(Path(__file__).resolve().parent.parent)
    old = os.environ.get("PYTHONPATH")
    path = f"{root}{os.pathsep}{old}" if old else root
    return {**kernel.QUIET, "PYTHONPATH": path, runs.TOKEN_VARIABLE: token}


def _doubt(
    run_dir: Path, n: Notebook, given: dict[str, Any], token: str, output: Path
) -> str | None:
    """Why an execution that seems fine is not believed; None if it is."""
    try:
        receipt = runs.read_receipt(run_dir, n.name)
    except RunError as error:
        return str(error)
    if receipt is None or receipt.token != token:
        return "it ended without its receipt: its last cell must call run.finish()."
    if receipt.executable != sys.executable:
        return f"it ran in {receipt.executable} and not in {sys.executable}: start it from there."
    for name, value in receipt.parameters.items():
        if name in n.defaults and value != records.to_plain(given[name]):
            return f"it used {name}={value!r} although {name}={given[name]!r} was given."
    gone = _missing(run_dir, receipt)
    if gone:
        return f"its receipt names {gone}, which is not there."
    return notebook.validate(output)


def _missing(run_dir: Path, receipt: runs.Receipt) -> str | None:
    """The first file that a receipt names and that is not there."""
    named = [f"results/{name}.json" for name in receipt.results]
    named += [path for figure in receipt.figures for path in (figure.png, figure.svg)]
    named += [runs.DECISION] if receipt.decision else []
    return next((name for name in named if not (run_dir / name).is_file()), None)


def _mark_failed(output: Path, reason: str) -> None:
    """Say in the executed notebook that it failed: papermill calls a dead kernel completed."""
    import nbformat

    if notebook.validate(output) is not None:
        output.unlink(missing_ok=True)  # cut short, for example by a full disk
        return
    content = nbformat.read(output, as_version=4)
    content.metadata["gaac_lab"] = {"status": "failed", "reason": reason}
    banner = nbformat.v4.new_markdown_cell(f"**This notebook did not finish:** {reason}")
    content.cells.insert(0, banner)
    with contextlib.suppress(OSError):
        records.write_bytes(output, nbformat.writes(content).encode())


def _report(run_dir: Path, progress: Progress, write: WriteReport | None) -> Path | None:
    """Write the report; None if that failed, which has then been said."""
    try:
        if write is None:
            from gaac_lab import report

            write = report.write
        return write(run_dir)
    except Exception as error:
        if is_full(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        progress.say(
            f"The report could not be written ({type(error).__name__}: {lines[0]}); the results "
            f"are in {run_dir}, and `gaac-lab report` tries again."
        )
        return None


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Hold the folder; a second run in it would mix its results with ours."""
    import filelock

    lock = filelock.FileLock(run_dir / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise RunError(f"another run is at work in {run_dir}: wait for it, or use --out.") from None
    try:
        yield
    finally:
        lock.release()
