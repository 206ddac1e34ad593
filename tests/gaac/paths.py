"""The kernel paths, each in a process of its own, because a process keeps the one it began with."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaac.kernels.cpu import FORCE, PATHS

ROOT = Path(__file__).parents[2]
NEEDS_A_CPU = "vbmi2"  # the others run everywhere

__all__ = ["PATHS", "run_on", "skip_unless_it_runs"]


def run_on(path: str, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on a kernel path, from the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, FORCE: path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@functools.cache
def _refusal(path: str) -> str:
    """Why this CPU cannot run a path; empty if it can."""
    done = run_on(path, "-c", "from gaac.kernels import cpu; cpu.path()")
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def skip_unless_it_runs(path: str) -> None:
    """Skip a test of instructions that this CPU lacks; every other refusal is a failure."""
    refusal = _refusal(path)
    if refusal and path == NEEDS_A_CPU and "cannot run here" in refusal:
        pytest.skip(refusal)
    assert not refusal, refusal
