"""Decode attention on each kernel path, each in a process of its own."""

from __future__ import annotations

import pytest

from tests.gaac.paths import PATHS, run_on, skip_unless_it_runs


@pytest.mark.parametrize("path", PATHS)
def test_levels_and_threads_change_no_bit(path: str) -> None:
    """Right against the oracle too, for every shape and option of `attention_paths`."""
    skip_unless_it_runs(path)
    done = run_on(path, "-m", "tests.gaac.attention_paths")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["done"]


@pytest.mark.parametrize("path", PATHS)
def test_no_memory_outside_a_page_is_touched(path: str) -> None:
    """A read behind a payload or a tail ends the process with a signal."""
    skip_unless_it_runs(path)
    done = run_on(path, "-m", "tests.gaac.guarded_attention")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["done"]
