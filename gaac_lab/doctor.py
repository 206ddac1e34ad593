"""What this machine has for a run, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from gaac_lab import machine, paths
from gaac_lab.errors import RequestError

DISTRIBUTION = "gaac-lab"
MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 4 * machine.GIB
LOW_DISK_BYTES = 2 * machine.GIB
KERNEL_TIMEOUT_S = 60
INSTALL = "run `make test`, or `pip install -c constraints.txt -e .` in the clone"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's. "missing" stops a run, "note" does not."""

    name: str
    state: Literal["ok", "note", "missing"]
    detail: str
    advice: str | None = None


def examine() -> list[Finding]:
    """Every check, in the order in which a run meets them."""
    return list(_findings())


def fit(findings: list[Finding]) -> bool:
    """True if all that a run needs is there."""
    return not any(finding.state == "missing" for finding in findings)


def _findings() -> Iterator[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python, _project, _packages, _kernel, _hardware, _disk, _model, _peers,
    ]  # fmt: skip
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    text = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info >= MIN_PYTHON:
        yield Finding("python", "ok", text)
    else:
        yield Finding("python", "missing", text, "install Python 3.11 or newer")


def _project() -> Iterator[Finding]:
    from gaac_lab import notebook

    try:
        root = paths.project_root()
        count = len(notebook.discover(paths.notebooks_dir()))
    except (paths.ProjectNotFound, RequestError) as error:
        yield Finding("project", "missing", str(error), "clone the project anew")
        return
    yield Finding("project", "ok", f"{root}, {count} notebooks")


def _packages() -> Iterator[Finding]:
    """What the project requires, against what is installed and against constraints.txt."""
    pins, requirements = _pins(), _requirements()
    if requirements is None:
        detail = f"the package {DISTRIBUTION} itself is not installed"
        yield Finding("packages", "missing", detail, INSTALL)
        return
    absent = [name for name in requirements if machine.installed_version(name) is None]
    if absent:
        yield Finding("packages", "missing", f"not installed: {', '.join(absent)}", INSTALL)
    other = [
        f"{name} {have} ({pins[name]})"
        for name in requirements
        if (have := _plain_version(name)) and name in pins and have != pins[name]
    ]
    if other:
        detail = f"not the tested version (in brackets): {', '.join(other)}"
        yield Finding("packages", "note", detail, f"if results look odd, {INSTALL}")
    elif not absent:
        yield Finding("packages", "ok", f"{len(requirements)} as in constraints.txt")


def _requirements() -> list[str] | None:
    """Names of the packages that the project needs, without extras; None if not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return [_name(line) for line in lines if "extra ==" not in line]


def _pins() -> dict[str, str]:
    """The tested versions, by package."""
    try:
        text = (paths.project_root() / "constraints.txt").read_text(encoding="utf-8")
    except (OSError, paths.ProjectNotFound):
        return {}
    found = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {_name(name): version for name, version in found}


def _name(requirement: str) -> str:
    """A requirement's package name, spelled the one way."""
    match = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group().lower()) if match else requirement


def _plain_version(package: str) -> str | None:
    """The installed version without what marks a build, as in 2.13.0+cpu."""
    version = machine.installed_version(package)
    return version.partition("+")[0] if version else None


def _kernel() -> Iterator[Finding]:
    """That this Python can be a notebook's kernel, and that torch starts in it."""
    code = "import torch, papermill, ipykernel.kernelapp; print(ipykernel.__version__)"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=KERNEL_TIMEOUT_S
        )
        problem = (answer.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        answer, problem = None, f"no answer within {KERNEL_TIMEOUT_S} s"
    if answer is not None and answer.returncode == 0:
        version = answer.stdout.splitlines()[-1]
        detail = f"papermill {machine.installed_version('papermill')}, ipykernel {version}"
        yield Finding("notebooks", "ok", detail)
    else:
        yield Finding("notebooks", "missing", f"this Python cannot run them: {problem}", INSTALL)


def _gaac_kernels() -> Finding:
    try:
        path = machine.gaac_kernels()
    except RequestError as error:
        return Finding("gaac kernels", "missing", str(error), "unset it")
    detail = {
        "vbmi2": "vbmi2: AVX-512 with VBMI2",
        "plain": "plain: vectors without AVX-512 VBMI2",
        "numpy": "numpy: no compiled code",
    }[path]
    slow = path == "numpy"
    advice = "unset GAAC_KERNELS and NUMBA_DISABLE_JIT: speeds mean nothing like this"
    return Finding("gaac kernels", "note" if slow else "ok", detail, advice if slow else None)


def _hardware() -> Iterator[Finding]:
    yield Finding("processor", "ok", f"{machine.cpu_model() or 'unknown'}, {machine.cores()} cores")
    yield _gaac_kernels()
    memory = machine.memory_bytes()
    low = memory < LOW_MEMORY_BYTES
    advice = "use --preset smoke, or a machine with more memory" if low else None
    yield Finding("memory", "note" if low else "ok", f"{memory / machine.GIB:.1f} GiB", advice)
    try:
        found = machine.accelerator()
    except machine.ProbeError as error:
        yield Finding("accelerator", "missing", str(error), INSTALL)
        return
    if found is None:
        yield Finding("accelerator", "note", "none that torch can use: runs take the CPU")
    else:
        detail = f"{found['count']} x {found['name']}, {found['memory_gib']} GiB"
        yield Finding("accelerator", "ok", detail)


def _disk() -> Iterator[Finding]:
    try:
        wanted = paths.runs_dir()
    except paths.ProjectNotFound:
        return
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    free = shutil.disk_usage(there).free
    detail = f"{free / machine.GIB:.1f} GiB free in {there}"
    if free < LOW_DISK_BYTES:
        yield Finding("disk", "missing", detail, "free some space, or run with --out elsewhere")
    else:
        yield Finding("disk", "ok", detail)


def _model() -> Iterator[Finding]:
    from gaac_lab import models

    try:
        if models.is_fetched():
            yield Finding("default model", "ok", str(models.default_path()))
            return
    except paths.ProjectNotFound:
        return
    detail = "not fetched yet"
    advice = "run `gaac-lab fetch-model` (93 MB), or give a model of your own with --model"
    yield Finding("default model", "missing", detail, advice)


def _peers() -> Iterator[Finding]:
    from gaac_lab.peers import PEERS, available

    have = available()
    lacking = [name for name in PEERS if name not in have]
    if lacking:
        advice = (
            "for the comparison with other codecs, `pip install -c constraints.txt -e .[peers]`"
        )
        detail = f"{', '.join(have) or 'none'} (not installed: {', '.join(lacking)})"
        yield Finding("other codecs", "note", detail, advice)
    else:
        yield Finding("other codecs", "ok", ", ".join(have))
