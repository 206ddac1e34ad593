"""Segments coded by several threads: the same blobs, the same tensors, the same errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gaac
from gaac import pool
from gaac.frame import read_segments, unseal
from gaac.kernels import cpu
from gaac.levels.base import FORMATS, Hints
from gaac.levels.registry import REGISTRY
from tests.gaac.data import LEVELS, bits, gaussian, repeating, same
from tests.gaac.forging import reseal

CODED = [level for level in LEVELS if level]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [2, 3, 16, None])
def test_the_same_whatever_their_number(threads: int | None, level: int) -> None:
    matrices = 2 if level == 5 else 9
    shape = (1, matrices, 2300, 64)
    for value in (gaussian(shape, "bfloat16"), repeating(shape, "float16")):
        blob = gaac.encode(value, level=level)
        assert gaac.encode(value, level=level, threads=threads) == blob
        assert same(gaac.decode(blob, threads=threads), value)
        data = bits(value).numpy().tobytes()
        assert gaac.decompress(blob, threads=threads) == data
        packed = gaac.compress(data, level=level, row=64)
        assert gaac.compress(data, level=level, row=64, threads=threads) == packed


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2", [2]])
def test_bad_numbers(threads: object) -> None:
    blob = gaac.encode(gaussian((1, 8), "float16"))
    for call, argument in (
        *((gaac.encode, gaussian((1, 8), "float16")), (gaac.compress, b"")),
        *((gaac.decode, blob), (gaac.decompress, blob)),
    ):
        with pytest.raises(gaac.GaacError, match="all cores"):
            call(argument, threads=threads)  # type: ignore[operator]


def test_none_means_the_cores_of_this_process() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert pool.thread_count(None) == len(os.sched_getaffinity(0))
    assert pool.thread_count(None) >= 1


def test_damage_in_any_segment_is_found() -> None:
    blob = gaac.encode(gaussian((1, 6, 4096, 64), "float16"), level=1)
    array = np.frombuffer(bytearray(blob), np.uint8)
    pieces, _ = read_segments(unseal(array), array, REGISTRY)
    assert len(pieces) == 6
    for _, coded in pieces:
        base = coded.streams[0]
        before, base[7] = base[7], 255
        forged = reseal(array.tobytes())
        base[7] = before
        for threads in (1, 2, 5):
            with pytest.raises(gaac.CorruptFrame):
                gaac.decode(forged, threads=threads)


def test_map_all_keeps_order_and_raises_when_all_have_stopped() -> None:
    assert pool.map_all(lambda number: number * number, range(100), 4) == [
        n * n for n in range(100)
    ]
    busy = set()

    def work(number: int) -> None:
        busy.add(number)
        time.sleep(0.001)
        busy.remove(number)
        if number == 7:
            raise KeyError(number)

    for threads in (1, 4):
        with pytest.raises(KeyError):
            pool.map_all(work, range(30), threads)
        assert not busy


def test_several_threads_are_at_work() -> None:
    meeting = threading.Barrier(3)
    pool.map_all(lambda _: meeting.wait(timeout=30), range(3), 3)


def test_many_callers_at_once() -> None:
    value = gaussian((1, 8, 2048, 64), "bfloat16")
    blob = gaac.encode(value, level=1)
    with ThreadPoolExecutor(8) as callers:
        blobs = list(callers.map(lambda _: gaac.encode(value, level=1, threads=3), range(40)))
        tensors = list(callers.map(lambda _: gaac.decode(blob, threads=3), range(40)))
    assert set(blobs) == {blob}
    assert all(same(tensor, value) for tensor in tensors)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Without torch, whose own threads do not survive a fork: its larger operations would hang."""
    code = """
import os, sys, threading, numpy as np, gaac
from gaac import pool
value = np.random.default_rng(0).normal(size=(1, 8, 2048, 64)).astype(np.float16)
blob = gaac.encode(value, level=1, threads=3)
child = os.fork()
if child == 0:
    meeting = threading.Barrier(3)
    pool.map_all(lambda _: meeting.wait(timeout=30), range(3), 3)
    equal = gaac.encode(value, level=1, threads=3) == blob
    equal &= gaac.decompress(blob, threads=3) == value.tobytes()
    os._exit(0 if equal else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.fixture
def turns() -> Iterator[list[int]]:
    """A counter that another thread raises whenever it is given the interpreter.

    It gives it back at once, and nobody else is made to: so it only counts while this thread has
    let go of the interpreter by itself.
    """
    count, done = [0], threading.Event()

    def run() -> None:
        while not done.is_set():
            count[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    watcher = threading.Thread(target=run)
    watcher.start()
    sys.setswitchinterval(1000)
    try:
        yield count
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)


@pytest.mark.skipif(cpu.path() == "numpy", reason="GAAC_KERNELS=numpy: nothing is compiled")
@pytest.mark.parametrize("level", [1, 3])  # whose decoding is one kernel and nothing else
def test_kernels_let_other_threads_run(level: int, turns: list[int]) -> None:
    words = bits(gaussian((64, 1024, 128), "bfloat16")).numpy().view(np.uint16)
    out, fmt, hints = np.empty_like(words), FORMATS["bfloat16"], Hints()
    streams = REGISTRY[level].encode(words, fmt, hints)
    assert streams is not None
    REGISTRY[level].decode(streams, out, fmt, hints)  # compiles, which lets others run, too
    most = 0
    for _ in range(100):
        start = turns[0]
        REGISTRY[level].decode(streams, out, fmt, hints)
        most = max(most, turns[0] - start)
        if most > 2:
            break
    assert most > 2  # 0 while a kernel holds the interpreter, a dozen where it does not
    assert np.array_equal(out, words)
