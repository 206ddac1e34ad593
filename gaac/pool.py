"""Doing the same to many segments with several threads; the kernels release the GIL."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from gaac.errors import GaacError

T = TypeVar("T")
R = TypeVar("R")


def thread_count(threads: int | None) -> int:
    """How many threads a caller asks for: None means every core that the process may use.

    Raises GaacError for anything but None and whole numbers from 1 on.
    """
    if threads is None:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise GaacError(f"threads is {threads!r}: give a number from 1 on, or None for all cores.")
    return threads


def map_all(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """[function(item) for item in items], by `threads` threads, this one among them.

    Raises what the function raises, once no thread works on the items any more.
    """
    helpers = min(threads, len(items)) - 1
    if helpers < 1:
        return [function(item) for item in items]
    results: list[Any] = [None] * len(items)
    turns = itertools.count()  # next() on it is atomic

    def work() -> None:
        while (index := next(turns)) < len(items):
            results[index] = function(items[index])

    futures = [_helpers(threads - 1).submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        # What has not begun yet would find nothing left to do, if this thread came through.
        running = [future for future in futures if not future.cancel()]
        failures = [future.exception() for future in running]
    for failure in failures:
        if failure is not None:
            raise failure
    return results


@lru_cache(8)
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="gaac")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of the threads
