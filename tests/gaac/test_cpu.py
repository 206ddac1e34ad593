"""The choice of kernels, and when and how they are compiled."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gaac
from gaac.kernels import cpu
from tests.gaac.paths import PATHS, skip_unless_it_runs

PACKAGE = Path(gaac.__file__).parent

BLOBS = """
import sys, numpy, gaac
rng = numpy.random.default_rng(0)
data = (rng.normal(size=(2, 300, 80)) * numpy.exp2(rng.integers(-3, 4, 80))).astype("f2").tobytes()
for dtype in ("float16", "bfloat16"):
    for level in gaac.LEVELS:
        blob = gaac.compress(data, level=level, dtype=dtype, row=80)
        assert gaac.decompress(blob) == data
        print(dtype, level, hash(blob))
print("numba" in sys.modules)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def output(code: str, **environment: str) -> list[str]:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("path", PATHS)
def test_forced_paths_make_the_same_blobs(path: str) -> None:
    skip_unless_it_runs(path)
    *blobs, numba = output(BLOBS, GAAC_KERNELS=path)
    assert numba == str(path != "numpy")
    assert blobs == output(BLOBS, GAAC_KERNELS="numpy")[:-1]


PATH = "from gaac.kernels import cpu; print(cpu.path())"


def test_the_fastest_path_is_the_default() -> None:
    able = output("from gaac.kernels import cpu; print(*cpu.able_paths())")
    assert output(PATH, GAAC_KERNELS="")[0] == able[0]
    assert output(PATH, GAAC_KERNELS="", NUMBA_CPU_NAME="generic") == ["plain"]
    assert output(PATH, GAAC_KERNELS="", NUMBA_DISABLE_JIT="1") == ["numpy"]
    features = ",".join(f"+{name}" for name in sorted(cpu.VBMI2_FEATURES))
    zen4 = {"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": features}
    assert output(PATH, GAAC_KERNELS="", **zen4) == ["vbmi2"]
    for name in cpu.VBMI2_FEATURES:
        zen4["NUMBA_CPU_FEATURES"] = features.replace(f"+{name}", f"-{name}")
        assert output(PATH, GAAC_KERNELS="", **zen4) == ["plain"]


@pytest.mark.parametrize("cpu_name", ["generic", "haswell"])
def test_plain_kernels_on_lesser_cpus(cpu_name: str) -> None:
    """SSE2 and AVX2 code, made and run here: CPUs of x86 only ever gain instructions."""
    settings = {"NUMBA_CPU_NAME": cpu_name, "GAAC_KERNELS": "plain"}
    assert output(BLOBS, **settings)[:-1] == output(BLOBS, GAAC_KERNELS="numpy")[:-1]


@pytest.mark.parametrize(
    ("forced", "environment", "why"),
    [
        ("avx2", {}, "GAAC_KERNELS is 'avx2': use one of vbmi2, plain, numpy, or leave it unset."),
        (
            "vbmi2",
            {"NUMBA_CPU_NAME": "generic"},
            "GAAC_KERNELS is 'vbmi2', which cannot run here: use plain or numpy.",
        ),
        (
            "plain",
            {"NUMBA_DISABLE_JIT": "1"},
            "GAAC_KERNELS is 'plain', which cannot run here: use numpy.",
        ),
    ],
)
def test_a_wrong_path_is_refused(forced: str, environment: dict[str, str], why: str) -> None:
    done = run("import gaac; gaac.compress(bytes(999))", GAAC_KERNELS=forced, **environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"gaac.errors.GaacError: {why}"


@pytest.fixture
def fresh_notice() -> Iterator[None]:
    cpu._say.cache_clear()
    yield
    cpu._say.cache_clear()


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "gaac"]


@pytest.mark.usefixtures("fresh_notice")
def test_long_compilation_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = threading.Event()
    say = cpu._say

    def say_and_tell() -> None:
        say()
        said.set()

    def compile_until_said(*_: object) -> object:
        assert said.wait(60), "nothing was logged"
        said.clear()
        return abs

    monkeypatch.setattr(cpu, "_say", say_and_tell)
    monkeypatch.setattr(cpu, "NOTICE_AFTER_S", 0.01)
    monkeypatch.setattr(cpu, "_compile", compile_until_said)
    with caplog.at_level(logging.WARNING, "gaac"):
        for _ in range(2):
            assert cpu.Kernel(abs, "")(-3) == 3
    (notice,) = notices(caplog)
    assert "Compiling kernels" in notice


@pytest.mark.usefixtures("fresh_notice")
def test_quick_compilation_is_not_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(cpu, "NOTICE_AFTER_S", 60.0)
    monkeypatch.setattr(cpu, "_compile", lambda *_: abs)
    assert cpu.Kernel(abs, "")(-3) == 3
    (timer,) = timers
    timer.join(30)
    assert not timer.is_alive()
    assert not notices(caplog)


def test_a_kernel_is_compiled_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, gate = [], threading.Barrier(8)

    def compile_(function: object, _: str) -> object:
        compiled.append(function)
        threading.Event().wait(0.05)
        return abs

    monkeypatch.setattr(cpu, "_compile", compile_)
    kernel, results = cpu.Kernel(abs, ""), []

    def call() -> None:
        gate.wait(30)
        results.append(kernel(-3))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [3] * 8
    assert len(compiled) == 1


FIRST_CALLS = """
import threading, numpy
from gaac.kernels.packed_parts import STRIDED
from gaac.kernels.packed_simd import KERNELS
from gaac.levels.base import FORMATS

words = numpy.random.default_rng(0).integers(0, 65536, (1, 64, 64), dtype=numpy.uint16)
packer, fmt, blobs = KERNELS["plain", "bfloat16"], FORMATS["bfloat16"], []
gate = threading.Barrier(2)

def call():
    gate.wait()
    blobs.append(b"".join(stream.tobytes() for stream in packer.encode(words, fmt)))

threads = [threading.Thread(target=call) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(blobs), len(set(blobs)))
"""


def test_two_threads_make_the_first_call(tmp_path: Path) -> None:
    assert output(FIRST_CALLS, NUMBA_CACHE_DIR=str(tmp_path)) == ["2", "1"]


# A kernel in a copy of the package, and what it calls from another module.
PROBE = """
from gaac.kernels import vector
from gaac.kernels.cpu import kernel
from gaac.levels.packed import ESCAPE

@kernel("int64(int64)")
def probe(number):
    sum_ = vector.add(vector.splat_u8x64(number), vector.splat_u8x64(ESCAPE))
    return vector.popcount(vector.greater(sum_, vector.splat_u8x64(number)))
"""
CALL = "from gaac.kernels.probe import probe; print(probe(64))"


class Copy:
    """A copy of the package that may be edited, with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        self.cache = folder / "cache"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, self.root / "gaac", ignore=ignored)
        (self.root / "gaac" / "kernels" / "probe.py").write_text(PROBE)

    def call(self, **environment: str) -> int:
        settings = {"NUMBA_CACHE_DIR": str(self.cache), **environment}
        done = subprocess.run(
            [sys.executable, "-c", CALL],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **settings},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def edit(self, module: str, old: str, new: str) -> None:
        file = self.root / "gaac" / module
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))

    def files(self) -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in self.cache.rglob("*.nb?")}


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_kernels_are_kept_for_later_processes(copy: Copy) -> None:
    assert copy.call() == 64
    files = copy.files()
    assert len(files) == 2
    assert copy.call() == 64
    assert copy.files() == files


def test_a_changed_operation_is_not_served_stale_code(copy: Copy) -> None:
    assert copy.call() == 64
    copy.edit("kernels/vector.py", "return builder.add(a, b)", "return builder.sub(a, b)")
    assert copy.call() == 0


def test_a_changed_constant_is_not_served_stale_code(copy: Copy) -> None:
    assert copy.call() == 64
    copy.edit("levels/packed.py", "\nESCAPE = 7\n", "\nESCAPE = 0\n")
    assert copy.call() == 0


def test_another_cpu_has_files_of_its_own(copy: Copy) -> None:
    assert copy.call() == 64
    assert copy.call(NUMBA_CPU_NAME="generic") == 64
    assert len(copy.files()) == 4


def test_kernels_run_without_a_cache(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    only = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    assert copy.call(NUMBA_CACHE_DIR=str(tmp_path / "file" / "folder"), **only) == 64


def test_kernels_run_with_a_broken_cache(copy: Copy) -> None:
    assert copy.call() == 64
    for file in copy.files():
        file.write_bytes(b"broken")
    assert copy.call() == 64
