"""Why a notebook failed, in one sentence: what happened, and what to do."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaac_lab.kernel import Execution

SIZES = ("lengths", "prompt_tokens", "seq_len", "entropy_tokens", "batches", "batch")
LONGEST = 300
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "CUDA out of memory")


def explain(
    execution: Execution, run_dir: Path, parameters: Mapping[str, Any], timeout_s: float
) -> str | None:
    """The reason for an execution that went wrong; None if papermill saw nothing wrong."""
    if execution.interrupted:
        return f"interrupted {_where(execution)}; continue with --resume."
    if execution.timed_out:
        return (
            f"stopped after {timeout_s:.0f} s, {_where(execution)}: allow more with --timeout, or "
            f"{_smaller(parameters)}."
        )
    if execution.error is None:
        return None
    if is_full(execution.error):
        return f"no space is left for {run_dir}: free some, or choose another folder with --out."
    if execution.is_cell_error:
        return _cell_error(execution.error, run_dir, parameters)
    if execution.exit_code is not None and execution.cell > 0:
        return _dead_kernel(execution, parameters)
    detail = _one_line(execution.log or str(execution.error), last=True)
    return f"its Python process did not start ({detail}): check it with gaac-lab doctor."


def is_full(error: BaseException) -> bool:
    """True for an error that says that a disk, a quota or a file size limit is used up."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in numbers


def _cell_error(error: Any, run_dir: Path, parameters: Mapping[str, Any]) -> str:
    text = f"{error.ename}: {error.evalue}"
    cell = f"in cell [{error.exec_count}]"
    if any(sign in text for sign in _FULL):
        return (
            f"no space is left ({cell}): free some where {run_dir} and the temporary folder lie, "
            "or choose another folder with --out."
        )
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return f"memory ran out {cell}: {_smaller(parameters)}."
    return f"{_one_line(text)} ({cell})"


def _dead_kernel(execution: Execution, parameters: Mapping[str, Any]) -> str:
    code, where = execution.exit_code or 0, _where(execution)
    if code == -signal.SIGKILL:
        return (
            "its Python process was killed from outside, most likely because memory ran out, "
            f"{where}: {_smaller(parameters)}."
        )
    if code < 0:
        name = signal.Signals(-code).name
        detail = _one_line(execution.log)
        return f"its Python process crashed with {name} {where}{f' ({detail})' if detail else ''}."
    return f"its Python process ended by itself with exit status {code} {where}."


def _where(execution: Execution) -> str:
    return f"in cell [{execution.cell}] of {execution.cells}"


def _smaller(parameters: Mapping[str, Any]) -> str:
    """What to make smaller, in terms of the parameters that this notebook has."""
    sizes = [f"{name}={parameters[name]}" for name in SIZES if name in parameters]
    if not sizes:
        return "give it a smaller model"
    return f"ask for less than {' '.join(sizes)} (with --set), or use a smaller model"


def _one_line(text: str, *, last: bool = False) -> str:
    """The first (or last) line that says something, without colour codes, not too long."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    lines = [line for line in lines if line] or [""]
    line = lines[-1 if last else 0]
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
