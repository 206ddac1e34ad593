"""What this machine is: processor, memory, accelerator, versions. Unknown is None."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gaac_lab.errors import RequestError

PACKAGES = ("torch", "transformers", "numpy", "numba", "papermill")
GIB = 2**30
PROBE_TIMEOUT_S = 120
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# In a process of its own: asking torch for a device's name opens the device and keeps its memory.
_PROBE = """
import json, torch
found = None
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    gib = round(p.total_memory / 2**30, 1)
    found = {"name": p.name, "count": torch.cuda.device_count(), "memory_gib": gib}
print(json.dumps(found))
"""


class ProbeError(RequestError):
    """torch could not be asked what accelerator there is."""


def describe() -> dict[str, Any]:
    """The machine, for the manifest: cpu, cores, gaac_kernels, memory_gib, accelerator, os."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "gaac_kernels": gaac_kernels(),
        "memory_gib": round(memory_bytes() / GIB, 1),
        "accelerator": accelerator(),
        "os": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that results depend on; None if not installed."""
    import gaac_lab

    own = gaac_lab.__version__
    found = {name: installed_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "gaac": own, "gaac_lab": own, **found}


def installed_version(package: str) -> str | None:
    """The installed version of a package, without importing it; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str | None:
    """The processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine() or None


def gaac_kernels() -> str:
    """Which of gaac's kernels run here: "vbmi2", "plain" or "numpy".

    Raises RequestError if GAAC_KERNELS asks for what this processor cannot do.
    """
    from gaac.errors import GaacError
    from gaac.kernels import cpu

    try:
        return cpu.path()
    except GaacError as error:
        raise RequestError(str(error)) from None


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or a container's limit below it."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        total = min(total, limit)
    return total


@functools.cache
def accelerator() -> dict[str, Any] | None:
    """The first CUDA device as torch sees it (name, count, memory_gib), or None if there is none.

    Raises ProbeError if torch cannot be asked.
    """
    if (installed_version("torch") or "").endswith("+cpu"):
        return None  # a build without CUDA: no need to wait for its import
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProbeError(f"torch cannot be used ({last}): install it anew.") from error
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"torch gave no answer within {PROBE_TIMEOUT_S} s.") from error
    found: dict[str, Any] | None = json.loads(answer.stdout.splitlines()[-1])
    return found
