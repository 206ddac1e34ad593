"""A small workbook of fixture notebooks, and the means to run it for real."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from gaac_lab import plan, runner
from gaac_lab.progress import Progress

FIXTURES = Path(__file__).parent / "fixtures" / "notebooks"
PRESET = "description: for tests\nparameters: {rounds: 3}\n"
PRESET_WITHOUT_VALUES = "description: for tests\n"


def make_home(folder: Path, *names: str, preset: str = PRESET) -> Path:
    """A project folder with the fixture notebooks named (by their numbers), and a preset."""
    (folder / "notebooks").mkdir(parents=True)
    (folder / "data").mkdir()
    for name in names:
        (path,) = FIXTURES.glob(f"{name}_*.ipynb")
        shutil.copy(path, folder / "notebooks")
    (folder / "preset.yaml").write_text(preset)
    return folder


def ask(home: Path, out: Path | None, **more: Any) -> plan.Asked:
    """A request for everything in that project."""
    options: dict[str, Any] = {"preset": str(home / "preset.yaml"), **more}
    return plan.Asked(notebooks_dir=home / "notebooks", out=out, **options)


def run(asked: plan.Asked, *, timeout_s: float = 60) -> tuple[runner.Result, str]:
    """Run the request; the result and what was said."""
    said = io.StringIO()
    console = Console(file=said, force_terminal=False, soft_wrap=True)
    result = runner.run(
        plan.make(asked), Progress(console), timeout_s=timeout_s, write_report=write_report
    )
    return result, said.getvalue()


def write_report(run_dir: Path) -> Path:
    """The shortest report there is: the runner only needs a function that writes one."""
    path = run_dir / "report.html"
    path.write_text("<p>report</p>")
    return path


def is_alive(pid: int) -> bool:
    """True if a process with that id runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what a surrounding run may have set."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("GAAC_LAB_")}
    return keep | more
