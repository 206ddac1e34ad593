"""Memory and memory bandwidth of common GPUs, from data/accelerators.csv."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from gaac_lab.paths import data_dir

COLUMNS = ["device", "memory_gib", "memory_bandwidth_gb_s", "source"]


@dataclass(frozen=True)
class Accelerator:
    """One device as its data sheet has it; the bandwidth is a peak in 10^9 bytes a second."""

    device: str
    memory_gib: float
    memory_bandwidth_gb_s: float
    source: str


def accelerators(path: Path | None = None) -> list[Accelerator]:
    """The devices, in the table's order; ValueError with file and line for a bad table."""
    table = path or data_dir() / "accelerators.csv"
    with table.open(encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream)
        if rows.fieldnames != COLUMNS:
            raise ValueError(f"{table}: the first line must read {','.join(COLUMNS)}.")
        found = [_checked(row, f"{table}, line {rows.line_num}") for row in rows]
    names = [entry.device for entry in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice or not found:
        raise ValueError(f"{table}: {sorted(twice) or 'no device'} where each device stands once.")
    return found


def find(device: str) -> Accelerator | None:
    """The device of that name, as torch reports it, or None if the table does not have it."""
    return next((entry for entry in accelerators() if entry.device == device), None)


def _checked(row: dict[str, str], where: str) -> Accelerator:
    if None in row or None in row.values() or not row["device"] or not row["source"]:
        raise ValueError(f"{where}: four values are needed: {', '.join(COLUMNS)}.")
    try:
        memory, bandwidth = float(row["memory_gib"]), float(row["memory_bandwidth_gb_s"])
    except ValueError as error:
        raise ValueError(f"{where}: memory and bandwidth must be numbers.") from error
    if not 1 <= memory <= 10_000 or not 10 <= bandwidth <= 100_000:
        raise ValueError(f"{where}: {memory} GiB or {bandwidth} GB/s is out of all proportion.")
    return Accelerator(row["device"], memory, bandwidth, row["source"])
