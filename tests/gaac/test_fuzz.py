"""Ten thousand damaged blobs on every kernel path: refused, or harmless, and never a crash.

To try a case again: `GAAC_KERNELS=plain python -m tests.gaac.fuzz --first CASE --count 1`.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.gaac import fuzz, make_golden, mutations
from tests.gaac.mutations import MUTATIONS, Sample
from tests.gaac.paths import PATHS, run_on, skip_unless_it_runs

CASES = 10_000
SEED = 0


@functools.cache
def outcomes(path: str) -> list[str]:
    """What came out of each case on a path; fails if a case went wrong, or took the process."""
    with tempfile.TemporaryDirectory() as folder:
        lines, place = Path(folder) / "outcomes", Path(folder) / "progress"
        arguments = ["--seed", str(SEED), "--count", str(CASES)]
        files = ["--outcomes", str(lines), "--progress", str(place)]
        done = run_on(path, "-m", "tests.gaac.fuzz", *arguments, *files)
        last = place.read_text().strip() if place.exists() else "before the first case"
        assert done.returncode == 0, (
            f"{path}, {last}: exit {done.returncode}\n{done.stderr[-3000:]}"
        )
        return lines.read_text().splitlines()


@pytest.mark.parametrize("path", PATHS)
def test_damaged_blobs(path: str) -> None:
    skip_unless_it_runs(path)
    found = outcomes(path)
    assert len(found) == CASES
    # Left wrong, the checksum stops everything; made right again, much goes through, as it must.
    taken = [index for index, word in enumerate(found) if "-" in word]
    assert CASES / 20 < len(taken) < CASES / 2


@pytest.mark.parametrize("path", [path for path in PATHS if path != "numpy"])
def test_all_paths_give_the_same_outcomes(path: str) -> None:
    skip_unless_it_runs(path)
    for number, pair in enumerate(zip(outcomes(path), outcomes("numpy"), strict=True)):
        assert pair[0] == pair[1], f"seed {SEED}, case {number}: {path} and numpy differ"


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [mutations.sample(case.name, case.encode()) for case in make_golden.cases()]


def test_a_case_can_be_made_again(samples: list[Sample]) -> None:
    cases = [fuzz.make_case(7, number, samples) for number in range(200)]
    assert cases == [fuzz.make_case(7, number, samples) for number in range(200)]
    assert len({case.blob for case in cases}) > 190
    assert {case.sealed for case in cases} == {True, False}
    assert {case.label.split()[0] for case in cases} == {kind.__name__ for kind in MUTATIONS}


def test_the_parts_of_a_sample_are_where_they_are_said_to_be(samples: list[Sample]) -> None:
    for chosen in samples:
        assert mutations.reseal(chosen.blob) == chosen.blob
        starts = [start for start, _ in chosen.streams]
        assert len(chosen.lengths) == len(starts)
        sizes = [stop - start for start, stop in chosen.streams]
        words = [np.frombuffer(chosen.blob, "<u4", 1, at)[0] for at in chosen.lengths]
        assert words == sizes


def test_what_is_wrong_is_noticed(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: an intact blob, too much memory, another error than the two."""
    intact = fuzz.Case("intact", samples[0].blob, sealed=False)
    with pytest.raises(AssertionError, match="damaged blob was taken"):
        fuzz.check(intact)
    monkeypatch.setattr(fuzz, "SPARE_BYTES", -(10**9))
    with pytest.raises(AssertionError, match="bytes were taken"):
        fuzz.check(intact)
    monkeypatch.setattr(fuzz.gaac, "inspect", lambda blob: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        fuzz.check(intact)


CRASH = """
import ctypes, pathlib, sys
from tests.gaac import fuzz
fuzz.check = lambda case: ctypes.string_at(0)
sys.argv += ["--first", "5", "--count", "1", "--progress", PLACE]
fuzz.main()
"""


def test_a_crash_is_traced_to_its_case(tmp_path: Path) -> None:
    place = tmp_path / "progress"
    done = run_on("numpy", "-c", CRASH.replace("PLACE", repr(str(place))))
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr
    assert place.read_text().startswith(f"seed 0, case 5: {MUTATIONS[5].__name__} of ")
