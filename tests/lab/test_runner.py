"""The runner against real kernels: every way in which a notebook can go wrong is told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import filelock
import nbformat
import pytest

from gaac_lab import notebook, runner, runs
from gaac_lab.manifest import NotebookStatus, RunError
from tests.lab.workspace import FIXTURES, ask, clean_environment, is_alive, make_home, run

MIXED = ("01", "02", "03", "08", "09", "10", "11", "12", "16", "18")


class Mixed:
    """One run of notebooks that fail in different ways."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out 运行 {x}"
        self.home = make_home(folder / "home", *MIXED)
        self.result, self.said = run(ask(self.home, self.out))

    def state(self, number: str) -> NotebookStatus:
        (found,) = (s for n, s in self.result.manifest.notebooks.items() if n.startswith(number))
        return found

    def results(self, name: str) -> Any:
        return json.loads((self.out / "results" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    os.environ.pop(runs.TOKEN_VARIABLE, None)
    return Mixed(tmp_path_factory.mktemp("mixed"))


def test_failures_do_not_stop_the_others_and_the_exit_status_says_so(mixed: Mixed) -> None:
    states = {name[:2]: s.status for name, s in mixed.result.manifest.notebooks.items()}
    assert states == {n: "done" if n in ("01", "08") else "failed" for n in MIXED}
    assert mixed.result.exit_status == runner.FAILED
    assert mixed.result.report == mixed.out / "report.html"
    assert runs.read_manifest(mixed.out) == mixed.result.manifest


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        ("02", "ValueError: the answer is not 42 (in cell [5])"),
        ("03", "was killed from outside, most likely because memory ran out, in cell [4] of 5: "
               "ask for less than lengths=[16, 32] (with --set), or use a smaller model."),
        ("09", "it ended without its receipt: its last cell must call run.finish()."),
        ("10", "no space is left (in cell [4]): free some where"),
        ("11", "it used rounds=7 although rounds=3 was given."),
        ("12", "ended by itself with exit status 3 in cell [4] of 5."),
        ("16", "it ended without its receipt"),
        ("18", "memory ran out in cell [4]: ask for less than lengths=[16, 32]"),
    ],
)  # fmt: skip
def test_each_reason_is_one_sentence(mixed: Mixed, number: str, reason: str) -> None:
    state = mixed.state(number)
    assert state.reason is not None
    assert reason in state.reason
    assert len(state.reason.splitlines()) == 1
    assert state.reason in mixed.said
    assert state.fingerprint is None


def test_values_that_are_given_arrive(mixed: Mixed) -> None:
    assert [(r["length_tokens"], r["rounds"]) for r in mixed.results("sums")] == [(16, 3), (32, 3)]
    assert mixed.result.manifest.parameters["01_ok"]["rounds"] == 3
    assert mixed.result.manifest.parameters["01_ok"]["out_dir"] == str(mixed.out)


def test_what_was_finished_before_a_failure_is_kept(mixed: Mixed) -> None:
    assert mixed.results("before") == [{"kept": True}]
    written = ["01_ok", "08_decision", "11_other_values", "16_stale_receipt"]
    assert list(runs.read_receipts(mixed.out)) == written


def test_the_kernel_is_this_python_and_dead_afterwards(mixed: Mixed) -> None:
    assert runs.read_receipts(mixed.out)["01_ok"].notes["kernel"] == sys.executable
    pids = {record["pid"] for record in mixed.results("sums")}
    assert os.getpid() not in pids
    assert not any(is_alive(pid) for pid in pids)


def test_executed_notebooks_are_sound_and_failed_ones_say_so(mixed: Mixed) -> None:
    paths = sorted((mixed.out / "notebooks").glob("*.ipynb"))
    assert len(paths) == len(MIXED)
    for path in paths:
        assert notebook.validate(path) is None
        content = nbformat.read(path, as_version=4)
        reason = mixed.state(path.name[:2]).reason
        banner = f"**This notebook did not finish:** {reason}"
        assert (content.cells[0].source == banner) is (reason is not None)
        assert content.metadata.get("gaac_lab", {}).get("reason") == reason


def test_executed_notebooks_carry_no_noise(mixed: Mixed) -> None:
    """ipykernel warns on each run that it speaks over TCP; here it does not."""
    (path,) = (mixed.out / "notebooks").glob("01_*.ipynb")
    assert "WARNING" not in path.read_text()
    logs = {p.name: p.read_text() for p in (mixed.out / "notebooks").glob("*.log")}
    assert logs == {}


def test_a_log_of_the_run_has_one_line_a_notebook(mixed: Mixed) -> None:
    lines = mixed.said.splitlines()
    assert len(lines) == 1 + len(MIXED)
    assert lines[0] == f"{len(MIXED)} notebooks, into {mixed.out}"
    assert lines[1].startswith("01_ok            ... done in ")


def test_committed_notebooks_are_not_touched(mixed: Mixed) -> None:
    for path in (mixed.home / "notebooks").iterdir():
        assert path.read_bytes() == (FIXTURES / path.name).read_bytes()


def test_resume_does_what_failed_and_keeps_the_rest(tmp_path: Path) -> None:
    """Also: what reads others is done again as soon as another was."""
    home, out = make_home(tmp_path / "home", "01", "02", "08"), tmp_path / "out"
    first, _ = run(ask(home, out))
    assert first.exit_status == runner.FAILED
    path = home / "notebooks" / "02_raises.ipynb"
    path.write_text(path.read_text().replace("raise ValueError", "print"))
    again, said = run(ask(home, out, resume=True))
    assert again.exit_status == runner.DONE
    assert [line.split(" ... ")[1].split()[0] for line in said.splitlines()[1:]] == [
        "kept:", "done", "done",
    ]  # fmt: skip
    assert again.manifest.created == first.manifest.created
    _, said = run(ask(home, out, resume=True))
    assert said.count("kept") == 3


def test_resume_does_what_is_stale_or_missing(tmp_path: Path) -> None:
    home, out = make_home(tmp_path / "home", "01", "11"), tmp_path / "out"
    asked = ask(home, out, sets=["11.rounds=7"])
    run(asked)
    resumed = ask(home, out, preset=None, resume=True)
    _, said = run(resumed)
    assert said.count("kept") == 2, "what was set at first must still stand"
    result, said = run(ask(home, out, resume=True, sets=["01.rounds=9"]))
    assert "01_ok           ... done" in said
    assert said.count("kept") == 1
    assert json.loads((out / "results" / "sums.json").read_text())[0]["rounds"] == 9
    (out / "results" / "sums.json").unlink()
    result, said = run(resumed)
    assert "01_ok           ... done" in said
    assert result.exit_status == runner.DONE


def test_only_leaves_the_others_and_marks_what_reads_them(tmp_path: Path) -> None:
    home, out = make_home(tmp_path / "home", "01", "08"), tmp_path / "out"
    first, _ = run(ask(home, out, only=["01"]))
    assert first.exit_status == runner.DONE
    assert first.manifest.notebooks["08_decision"].status == "not run"
    run(ask(home, out, resume=True))
    assert "2 rows" in (out / "decision.json").read_text()
    run(ask(home, out, resume=True, only=["01"], sets=["rounds=5"]))
    _, said = run(ask(home, out, resume=True))
    assert "01_ok       ... kept" in said
    assert "08_decision ... done" in said


def test_a_notebook_past_its_deadline_is_killed_with_its_children(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result, _ = run(ask(make_home(tmp_path / "home", "01", "04"), out), timeout_s=5)
    state = result.manifest.notebooks["04_hangs"]
    assert state.reason is not None
    assert state.reason.startswith("stopped after 5 s, in cell [5] of 6: allow more with --timeout")
    assert result.manifest.notebooks["01_ok"].status == "done"
    pids = json.loads((out / "results" / "pids.json").read_text())
    assert not any(is_alive(pid) for pid in pids.values())


LIMITED = """
import resource, sys
from pathlib import Path
from tests.lab.workspace import ask, run
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
result, said = run(ask(Path(sys.argv[1]), Path(sys.argv[2])))
print(said)
sys.exit(result.exit_status)
"""


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (100_000, "17_prints_a_lot ... failed in"),
        (500, "No space is left for"),
    ],
    ids=["for the executed notebook", "for the manifest"],
)
def test_a_full_disk_is_one_sentence(tmp_path: Path, limit: int, message: str) -> None:
    """A limit on the size of files: the system refuses the write, as on a disk that is full."""
    home, out = make_home(tmp_path / "home", "17", "01"), tmp_path / "out"
    answer = subprocess.run(
        [sys.executable, "-c", LIMITED, str(home), str(out), str(limit)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=Path(__file__).parents[2],
    )
    assert answer.returncode == runner.FAILED, answer.stderr
    assert answer.stderr == ""
    assert message in answer.stdout
    if limit == 100_000:
        assert f"no space is left for {out}: free some" in answer.stdout
        assert "01_ok           ... done" in answer.stdout
        assert not (out / "notebooks" / "17_prints_a_lot.ipynb").exists()


def test_a_report_that_fails_is_a_failure_with_a_sentence(tmp_path: Path) -> None:
    import io

    from rich.console import Console

    from gaac_lab import plan
    from gaac_lab.progress import Progress

    def broken(run_dir: Path) -> Path:
        raise KeyError("no template")

    said = io.StringIO()
    planned = plan.make(ask(make_home(tmp_path / "home", "01"), tmp_path / "out"))
    result = runner.run(planned, Progress(Console(file=said, width=500)), write_report=broken)
    assert (result.exit_status, result.report) == (runner.FAILED, None)
    assert "The report could not be written (KeyError: 'no template')" in said.getvalue()
    assert result.manifest.notebooks["01_ok"].status == "done"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    home, out = make_home(tmp_path / "home", "01"), tmp_path / "out"
    run(ask(home, out))
    with filelock.FileLock(out / ".lock"), pytest.raises(RunError, match="another run is at work"):
        run(ask(home, out, resume=True))


def test_a_run_works_outside_the_main_thread(tmp_path: Path) -> None:
    kept: list[int] = []
    asked = ask(make_home(tmp_path / "home", "01"), tmp_path / "out")
    thread = threading.Thread(target=lambda: kept.append(run(asked)[0].exit_status))
    thread.start()
    thread.join()
    assert kept == [runner.DONE]
