"""Work off the critical path: one thread that packs blocks while decoding goes on.

When a result is taken never depends on when it was ready: whoever takes it waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Pending(Generic[T]):
    """A result that the thread of this process is working on, or will be.

    job: called once, in the order of submission; it must not write to anything that others hold.
    device: where its tensors lie. On a CUDA device the job sees the work queued so far, and runs
    beside what is queued later.
    """

    def __init__(self, job: Callable[[], T], device: torch.device) -> None:
        self._job, self._process = job, os.getpid()
        self._future = _worker().submit(_beside(job, device))

    def result(self) -> T:
        """What the job gave, waiting for it; raises what it raised.

        A process made by a fork has no thread that works on the job, and does it by itself.
        """
        if self._process != os.getpid():
            return self._job()
        return self._future.result()


def use_here(tensors: Iterable[torch.Tensor]) -> None:
    """Let the allocator know that the caller's stream uses what a job has made."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def foreign_codec() -> threading.Lock:
    """Held around every call of a codec that is not gaac's: few can encode while they decode."""
    return _foreign


def _beside(job: Callable[[], T], device: torch.device) -> Callable[[], T]:
    if device.type != "cuda":
        return job
    queued = torch.cuda.current_stream(device).record_event()

    def run() -> T:
        side = _side_stream(device)
        with torch.cuda.stream(side):
            side.wait_event(queued)
            made = job()
            side.synchronize()
        return made

    return run


@lru_cache(1)
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="gaac-pack")


@lru_cache(16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _start_anew() -> None:
    """A forked child has none of the threads, and the lock may have been another's."""
    global _foreign
    _foreign = threading.Lock()
    _worker.cache_clear()


_foreign = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
