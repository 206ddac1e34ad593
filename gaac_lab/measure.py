"""Clocks, repeats and spread: the only code in this project that times.

Two rules keep its numbers honest. A clock is read only after the device has finished its work, and
two things are compared only by pairs that were measured next to each other, so that a machine that
slows down slows both.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished what was queued on it. A CPU never queues."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Stopwatch:
    """Seconds between two moments at which the device was idle."""

    def __init__(
        self, device: torch.device, *, wait: Callable[[torch.device], None] = synchronize
    ) -> None:
        self._device, self._wait = device, wait
        self.seconds: float | None = None

    def __enter__(self) -> Stopwatch:
        self._wait(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._device)
        self.seconds = time.perf_counter() - self._start


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """`work()` and the seconds it took on `device`."""
    with Stopwatch(device) as watch:
        result = work()
    assert watch.seconds is not None
    return result, watch.seconds


class Tally:
    """Adds up the seconds of one activity inside a larger one (time split)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0

    def run(self, work: Callable[[], T]) -> T:
        result, seconds = timed(self._device, work)
        self.seconds += seconds
        return result


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect garbage now, and not in the middle of what is timed."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Series:
    """Repeated measurements of one quantity: median, quartiles (the spread) and N."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Series:
        """Raises ValueError when there is nothing to summarise."""
        if not values:
            raise ValueError("no measurement to summarise; at least one is needed")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))

    def rate(self) -> Series:
        """The same series as events per second, where the values are seconds per event."""
        return Series(1 / self.median, 1 / self.high, 1 / self.low, self.n)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two things measured in pairs, with an interval for its median.

    n pairs were measured in `rounds` rounds. `confidence` is what the interval covers when rounds
    are independent and the pairs of one round are not: 1 - 2 * 0.5**rounds at most, so two rounds
    give 50 % and five 94 %.
    """

    median: float
    low: float
    high: float
    n: int
    rounds: int
    confidence: float


def median_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """(low, high, coverage) of the median, with no assumption about the distribution.

    Source: the sign test. The k-th smallest and k-th largest of n values enclose the median with
    probability 1 - 2 * P(Binomial(n, 1/2) < k); the largest k that still covers `confidence` is
    taken. Below six values even the extremes (k = 1) cover less than 95 %: their true coverage is
    returned.
    """
    ordered, n = sorted(values), len(values)
    if n == 0:
        raise ValueError("no measurement to summarise; at least one is needed")
    tail, best_k, best_tail = 0.0, 1, 2 * 0.5**n
    for k in range(1, n // 2 + 1):
        tail += math.comb(n, k - 1) * 0.5**n
        if 1 - 2 * tail < confidence:
            break
        best_k, best_tail = k, 2 * tail
    return ordered[best_k - 1], ordered[n - best_k], max(0.0, 1 - best_tail)


def paired_ratio(rounds: Sequence[Sequence[tuple[float, float]]]) -> Ratio:
    """Ratio a / b over rounds of pairs (a, b) that were measured next to each other.

    The interval encloses the sign test's over the medians of the rounds and the one over all pairs;
    the coverage given is that over the rounds, since pairs of one round share the state of the
    machine. Raises ValueError when there is no pair.
    """
    by_round = [[a / b for a, b in pairs] for pairs in rounds if pairs]
    ratios = [ratio for pairs in by_round for ratio in pairs]
    low, high, _ = median_interval(ratios)
    round_low, round_high, coverage = median_interval([statistics.median(r) for r in by_round])
    return Ratio(
        median=statistics.median(ratios),
        low=min(low, round_low),
        high=max(high, round_high),
        n=len(ratios),
        rounds=len(by_round),
        confidence=coverage,
    )


def repeat(device: torch.device, work: Callable[[], object], *, repeats: int) -> list[float]:
    """Seconds of `repeats` calls of `work`, after one call that is thrown away."""
    work()
    with quiet_collector():
        return [timed(device, work)[1] for _ in range(repeats)]


@dataclass(frozen=True)
class Failure:
    """Why something has no number: `kind` for machines, `reason` in one sentence for people."""

    kind: str
    reason: str


def attempt(work: Callable[[], T]) -> T | Failure:
    """`work()`, or a `Failure` when memory ran out. Every other error is raised as it is."""
    try:
        return work()
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else "the allocation was refused"
    except RuntimeError as error:
        # torch's CPU allocator has no exception class of its own.
        if "can't allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Failure("out_of_memory", f"out of memory: {reason}; try fewer tokens or a smaller batch")
