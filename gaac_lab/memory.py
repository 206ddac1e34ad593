"""Meters of peak memory, and a guard that refuses what cannot fit.

On CUDA torch's allocator keeps the count: allocated (what tensors hold) is the headline, reserved
(what the allocator keeps from others) decides whether something fits, and the device's own figure
is given beside them. On a Linux CPU the kernel keeps it: the process's high-water mark, reset
before each phase. Elsewhere peak memory is not measured, and says so.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Peak:
    """Peak bytes above the idle state (model loaded, nothing running); None where not measured.

    peak_bytes is the headline: `allocated_bytes` on CUDA, `process_bytes` on a CPU. On CUDA
    `process_bytes` is no peak: it is what the whole device holds when read, others' included.
    """

    peak_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    method: str


class PeakMeter:
    """Peaks of consecutive phases above one idle state.

    meter = PeakMeter(device); meter.start(); ...; peak = meter.read()
    `start` begins a phase and may be called again for the next one; the idle state is the one found
    when the meter was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Asked once: the question itself resets the mark.
        self._has_process_meter = device.type != "cuda" and can_measure_process()
        release_freed_memory(device)
        self._idle = self._now()

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._has_process_meter:
            _CLEAR_REFS.write_text("5")

    def read(self) -> Peak:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            allocated = torch.cuda.max_memory_allocated(self._device) - self._idle[0]
            reserved = torch.cuda.max_memory_reserved(self._device) - self._idle[1]
            used = _device_used_bytes(self._device) - self._idle[2]
            return Peak(allocated, allocated, reserved, used, "torch.cuda peak statistics")
        if not self._has_process_meter:
            reason = "not measured: the process's peak needs Linux and a writable /proc/self"
            return Peak(None, None, None, None, reason)
        peak = _status_bytes("VmHWM") - self._idle[0]
        return Peak(peak, None, None, peak, "VmHWM, reset before each phase")

    def _now(self) -> tuple[int, int, int]:
        if self._device.type == "cuda":
            return (
                torch.cuda.memory_allocated(self._device),
                torch.cuda.memory_reserved(self._device),
                _device_used_bytes(self._device),
            )
        return (_status_bytes("VmRSS") if self._has_process_meter else 0, 0, 0)


def can_measure_process() -> bool:
    """Whether the kernel lets this process reset its own high-water mark; asking resets it."""
    if not sys.platform.startswith("linux") or not _CLEAR_REFS.exists():
        return False
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def release_freed_memory(device: torch.device) -> None:
    """Give back what is free already, so that the idle state is really idle.

    It slows the next allocations down, so it belongs around a memory run, never around a timed one.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)


def available_bytes(device: torch.device) -> int:
    """What could still be allocated on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held_by_allocator = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held_by_allocator
    return psutil.virtual_memory().available


def require(need_bytes: int, device: torch.device, what: str) -> None:
    """Raise MemoryError with one sentence when `need_bytes` are not to be had on `device`.

    Asked before a run, since a CPU process that takes too much is killed without a word.
    """
    have = available_bytes(device)
    if need_bytes > have:
        raise MemoryError(
            f"{what} needs at least {need_bytes / 2**30:.2f} GiB and "
            f"{have / 2**30:.2f} GiB are free on {device}"
        )


def _device_used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no line {field}")
