"""What the memory of this device allows: read bandwidth, and the least time that a step can take.

Source of the floor: a decode step must read the whole KV cache once (and the weights once), so it
cannot be faster than those bytes over the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gaac_lab import accelerators
from gaac_lab.configuration import Configuration
from gaac_lab.measure import Series, repeat

# Far beyond any CPU's last-level cache and any GPU's L2, small enough for a laptop.
_BUFFER_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}


def read_gb_s(device: torch.device, *, repeats: int = 9) -> Series:
    """Read bandwidth in GB/s (1e9 bytes): the sum of a buffer much larger than any cache."""
    size_bytes = _BUFFER_BYTES.get(device.type, _BUFFER_BYTES["cpu"])
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    seconds = repeat(device, buffer.sum, repeats=repeats)
    return Series.of([size_bytes / value / 1e9 for value in seconds])


def beside_data_sheet(device: torch.device, gb_s: float) -> str:
    """The measured bandwidth beside the device's data sheet, in a sentence."""
    if device.type != "cuda":
        return "A CPU's peak depends on its memory modules, which are not known here."
    name = torch.cuda.get_device_name(device)
    known = accelerators.find(name)
    if known is None:
        return f"{name} is not in data/accelerators.csv."
    peak = known.memory_bandwidth_gb_s
    return f"{gb_s / peak:.0%} of the {peak:,.0f} GB/s of its data sheet ({known.source})."


@dataclass(frozen=True)
class Traffic:
    """KV bytes that one decode step moves, by what moves them."""

    label: str
    read_bytes: int
    written_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def floor_s(self, gb_s: float) -> float:
        """Least seconds for this traffic at `gb_s`, writes counted like reads."""
        return self.total_bytes / (gb_s * 1e9)


def ideal(kv_bytes: int) -> Traffic:
    """The floor: every byte held is read once and nothing is written."""
    return Traffic("read once", kv_bytes, 0)


def traffic(
    configuration: Configuration,
    raw_bytes: int,
    stored_bytes: int,
    *,
    heads_per_kv_head: int = 1,
) -> Traffic:
    """What this way of keeping and reading the cache moves in a step at the least, counted from its
    definition.

    raw_bytes, stored_bytes: of the whole cache. heads_per_kv_head: query heads that share a KV
    head. transformers' DynamicCache appends with torch.cat: it reads the old tensors and writes new
    ones, and attention reads those; eager attention first repeats them for each query head and
    reads the copies. Materialising reads the blocks, writes full tensors, and attention reads
    those; what the codec touches in between comes on top. Appending in place, and attention on the
    pages, read what is held once: the floor.
    """
    if configuration.integration == "grouped":
        return Traffic("appended in place, read once", raw_bytes, 0)
    if configuration.integration == "fused":
        return Traffic("pages read in place", stored_bytes, 0)
    if configuration.integration == "eager":
        repeated = raw_bytes * heads_per_kv_head if heads_per_kv_head > 1 else 0
        read = 2 * raw_bytes + repeated
        return Traffic("torch.cat and repeated heads each step", read, raw_bytes + repeated)
    if configuration.integration == "none":
        return Traffic("uncompressed, torch.cat each step", 2 * raw_bytes, raw_bytes)
    return Traffic("blocks materialised each step", stored_bytes + raw_bytes, raw_bytes)


def crossing(xs: list[float], ratios: list[float], level: float = 1.0) -> float | None:
    """Where a ratio measured at rising xs first reaches `level`, by linear interpolation.

    None when it never does; the first x when it does from the start.
    """
    if not xs or len(xs) != len(ratios):
        raise ValueError("xs and ratios must be non-empty and of one length")
    if ratios[0] >= level:
        return xs[0]
    steps = zip(zip(xs, ratios, strict=True), list(zip(xs, ratios, strict=True))[1:], strict=False)
    for (x0, r0), (x1, r1) in steps:
        if r0 < level <= r1:
            return x0 + (level - r0) / (r1 - r0) * (x1 - x0)
    return None
