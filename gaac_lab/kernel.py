"""One notebook in one fresh kernel: papermill runs the cells, this module owns the process.

papermill works in a thread of its own, so that the main thread keeps the clock, the progress line
and Ctrl-C. The kernel is always this Python (never a kernelspec that happens to be called python3),
speaks over a private socket file instead of TCP ports, keeps out of the user's IPython profile, and
is dead when `execute` returns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK_S = 0.1
START_TIMEOUT_S = 180
GRACE_S = 30.0
SOCKET_PATH_LIMIT = 90  # bytes; the system's limit is 104 to 108, and a suffix is added

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYTHONFAULTHANDLER": "1",
}


@dataclass
class Execution:
    """How an execution ended. `cell` counts code cells from 1, like Jupyter's In [n]."""

    seconds: float = 0.0
    cell: int = 0
    cells: int = 0
    timed_out: bool = False
    interrupted: bool = False
    error: Exception | None = None
    exit_code: int | None = None
    log: str = ""

    @property
    def is_cell_error(self) -> bool:
        """True if a cell raised; then the kernel was well."""
        return type(self.error).__name__ == "PapermillExecutionError"


@dataclass
class _Process:
    """The kernel's process, known from the moment it is launched."""

    popen: subprocess.Popen[bytes] | None = None
    group: int | None = None

    def kill(self) -> None:
        """End the kernel and everything it started, now."""
        if self.popen is None:
            return
        import psutil

        family = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self.popen.pid).children(recursive=True)
        self._kill_group()
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()

    def _kill_group(self) -> None:
        """The kernel leads a process group of its own, which outlives it if it leaves children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.group is not None:
                os.killpg(self.group, signal.SIGKILL)

    def bury(self) -> None:
        """Make sure that nothing is left."""
        self.kill()
        if self.popen is not None:
            self.popen.wait()


def execute(
    source: Path,
    output: Path,
    parameters: dict[str, Any],
    *,
    cwd: Path,
    environment: dict[str, str],
    timeout_s: float,
    on_tick: Callable[[Execution], None] = lambda execution: None,
) -> Execution:
    """Run the notebook at `source` with `parameters`; the executed copy goes to `output`.

    `on_tick` is called about ten times a second. The kernel and its children are killed after
    `timeout_s` seconds, and on Ctrl-C or SIGTERM, which are reported and not raised. The result
    says how it ended; whether the notebook did its work is for its receipt to say.
    """
    execution, process = Execution(), _Process()
    log = output.with_suffix(".log")
    with _private_folder() as private, log.open("wb") as log_file:
        manager = _manager_class(process, private, cwd, environment, log_file)
        worker = threading.Thread(
            target=_work, args=(source, output, parameters, manager, execution), daemon=True
        )
        try:
            with _signals_noted(execution):
                worker.start()
                _watch(worker, process, execution, timeout_s, on_tick)
        finally:
            process.bury()
    execution.exit_code = process.popen.returncode if process.popen is not None else None
    execution.log = log.read_text(errors="replace")
    if execution.error is None or execution.is_cell_error or not execution.log:
        log.unlink()  # it tells nothing that the executed notebook does not
    return execution


def _watch(
    worker: threading.Thread,
    process: _Process,
    execution: Execution,
    timeout_s: float,
    on_tick: Callable[[Execution], None],
) -> None:
    """Wait for papermill; on Ctrl-C or past the deadline, kill the kernel and give it a moment."""
    started, killed = time.monotonic(), None
    while worker.is_alive():
        worker.join(TICK_S)
        execution.seconds = time.monotonic() - started
        if execution.interrupted or execution.timed_out or execution.seconds > timeout_s:
            execution.timed_out = not execution.interrupted
            process.kill()
            killed = killed or execution.seconds
            if execution.seconds - killed > GRACE_S:
                return
        else:
            on_tick(execution)


def _work(
    source: Path, output: Path, parameters: dict[str, Any], manager: type, execution: Execution
) -> None:
    """papermill's part, in its thread. Whatever it raises is kept, not raised."""

    def count(cell: Any, cell_index: int) -> None:
        execution.cell += cell["cell_type"] == "code"

    try:
        import nbformat
        import papermill

        _silence("papermill", "traitlets", "asyncio")
        node = nbformat.read(source, as_version=4)
        # papermill adds one cell: the values that it was given.
        execution.cells = 1 + sum(cell.cell_type == "code" for cell in node.cells)
        papermill.execute_notebook(
            node,
            str(output).replace("{", "{{").replace("}", "}}"),  # papermill formats its paths
            parameters=parameters,
            kernel_name="python3",
            progress_bar=False,
            start_timeout=START_TIMEOUT_S,
            iopub_timeout=START_TIMEOUT_S,
            kernel_manager_class=manager,
            on_cell_start=count,
        )
    except Exception as error:
        execution.error = error


def _manager_class(
    process: _Process, private: Path, cwd: Path, environment: dict[str, str], log: Any
) -> type:
    """A kernel manager that starts this Python, and tells `process` what it started."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    sockets = private / "k"
    short = len(os.fsencode(sockets)) <= SOCKET_PATH_LIMIT
    own = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="Python 3",
        language="python",
    )

    class OwnKernelManager(AsyncKernelManager):
        """See the module's text."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.connection_file = str(private / "kernel.json")
            if os.name == "posix" and short:
                self.transport, self.ip = "ipc", str(sockets)

        @property
        def kernel_spec(self) -> KernelSpec:
            return own

        async def start_kernel(self, **options: Any) -> None:
            options |= {"cwd": str(cwd), "stdout": log, "stderr": log}
            options["env"] = os.environ | environment | {"IPYTHONDIR": str(private / "ipython")}
            await super().start_kernel(**options)
            process.popen, process.group = self.provisioner.process, self.provisioner.pgid

    return OwnKernelManager


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Sockets, the connection file and an empty IPython profile; only this user can read it."""
    with tempfile.TemporaryDirectory(prefix="gaac-lab-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _signals_noted(execution: Execution) -> Iterator[None]:
    """Ctrl-C and SIGTERM are noted and not raised, so that no moment is left without a cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        execution.interrupted = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence(*names: str) -> None:
    """Their messages repeat what the error says, or warn of what is checked elsewhere."""
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
