"""Which kernels this CPU runs, and how they are compiled.

`path()` names one of three ways to code a segment, all with the same blobs and results:

- "vbmi2": vectors and the compress and expand instructions of AVX-512 (Zen 4, Ice Lake and later);
- "plain": vectors alone, for any CPU that numba compiles for;
- "numpy": no compiled code, and numba is not even imported.

The environment variable GAAC_KERNELS forces one of them; it is read once, at the first segment. If
numba is told to compile for another CPU (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES), that one decides.

A kernel is compiled at its first call, which takes seconds, and then kept on disk by numba: in
`__pycache__` beside this file if that can be written, else in the user's cache folder, or wherever
NUMBA_CACHE_DIR says. Where nothing can be kept, every process compiles anew. Numba itself notices
only changes in the file of a kernel, not in what the kernel calls or in constants it imports; so
the names of files in the cache carry a hash of `gaac/kernels`, `gaac/levels` and the CPU. Files of
older versions stay until the folder is emptied, which is safe at any time.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gaac.errors import GaacError

PATHS = ("vbmi2", "plain", "numpy")
FORCE = "GAAC_KERNELS"
VBMI2_FEATURES = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vbmi2", "bmi2"})
NOTICE_AFTER_S = 1.0
OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

_log = logging.getLogger("gaac")


@functools.cache
def path() -> str:
    """The path of this process, one of PATHS.

    Raises GaacError if GAAC_KERNELS names no path, or one that this CPU or numba's settings rule
    out.
    """
    forced = os.environ.get(FORCE) or None
    if forced not in (None, *PATHS):
        raise GaacError(f"{FORCE} is {forced!r}: use one of {', '.join(PATHS)}, or leave it unset.")
    if forced == "numpy":
        return forced
    able = able_paths()
    if forced is not None and forced not in able:
        raise GaacError(f"{FORCE} is {forced!r}, which cannot run here: use {' or '.join(able)}.")
    return forced or able[0]


def able_paths() -> tuple[str, ...]:
    """The paths that can run here, fastest first."""
    from numba.core import config

    if config.DISABLE_JIT:
        return PATHS[2:]
    features = _target()[2].split(",")
    return PATHS if {f"+{name}" for name in VBMI2_FEATURES} <= set(features) else PATHS[1:]


@functools.cache
def has_feature(name: str) -> bool:
    """Whether numba compiles for a CPU with this feature, by LLVM's name for it."""
    return f"+{name}" in _target()[2].split(",")


def _target() -> tuple[str, str, str]:
    """What numba compiles for: the triple, the CPU's name, its features as "+one,-other"."""
    from numba.core.registry import cpu_target

    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, name, features


@functools.cache
def _compiling() -> threading.RLock:
    """What a thread holds while it compiles."""
    return threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compiling.cache_clear)  # no thread there lets go of it


class Kernel:
    """A function that is compiled when it is first called; the GIL is released while it runs.

    Arguments may be integers, arrays, and tuples of them. Numba checks the kind of each and the
    size of an array's items, but not their type, nor axes, strides or whether the array may be
    written to: those are for the caller to get right.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = signature
        self._entry: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._entry or self.compiled())(*arguments)

    def compiled(self) -> Callable[..., Any]:
        """The compiled function itself, without the cost of a Python call; any thread may ask."""
        with _compiling():
            if self._entry is None:
                with _notice():
                    self._entry = _compile(self._function, self._signature)
            return self._entry


def kernel(signature: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a Kernel of a function, with a signature in numba's words, such as "int64(int64)"."""
    return lambda function: Kernel(function, signature)


def inlined(function: Callable[..., Any]) -> Any:
    """A function that kernels call, as part of their own code. Imports numba."""
    from numba import njit

    return njit(forceinline=True, **OPTIONS)(function)


def outlined(function: Callable[..., Any]) -> Any:
    """A function that kernels call and that is compiled by itself, once for each set of constants
    that it is passed. For pieces so large that to inline them costs more than to call them.

    It may be called from kernels and from other outlined functions, not from inlined ones: numba
    hands their `forceinline` on to what they call.
    """
    from numba import njit

    return njit(**OPTIONS)(function)


def _compile(function: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """The function compiled for one signature, out of the cache where there is one."""
    from numba import njit

    name = function.__qualname__
    function.__qualname__ = f"{name}_{_fingerprint()}"
    try:
        compiled = njit(signature, cache=True, **OPTIONS)(function)
    except Exception as error:  # no folder, a full disk, a broken file; what else, comes up again
        _log.info("numba's cache cannot be used, so kernels are compiled anew: %s", error)
        compiled = njit(signature, **OPTIONS)(function)
    finally:
        function.__qualname__ = name
    # There is one signature, so calls need no choice between overloads.
    (overload,) = compiled.overloads.values()
    entry: Callable[..., Any] = overload.entry_point
    return entry


@functools.cache
def _fingerprint() -> str:
    """A hash of what decides the machine code of a kernel and numba's cache does not look at."""
    digest = hashlib.sha256(repr(_target()).encode())
    package = Path(__file__).parents[1]
    for folder in ("kernels", "levels"):
        for source in sorted((package / folder).glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _notice() -> Iterator[None]:
    """Say so, once in a process, if what is done inside takes longer than a second."""
    timer = threading.Timer(NOTICE_AFTER_S, _say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _say() -> None:
    _log.warning(
        "Compiling kernels for this CPU, which takes some seconds; they are kept for later "
        "processes, in numba's cache (NUMBA_CACHE_DIR)."
    )
