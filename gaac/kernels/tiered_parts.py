"""What both directions of level 2's compiled kernels share.

Sizes, steps and masks are those of level 3 (see `entropy_parts`). A *table* of bases holds one byte
for each channel, and repeats its channels up to 64 beyond the width, so that a step is one load
from its first channel on.
"""

from __future__ import annotations

from typing import Any

from gaac.kernels import vector
from gaac.kernels.cpu import inlined
from gaac.kernels.entropy_parts import STEP


@inlined
def fill_bases(table: Any, base: Any, width: Any, more: Any, shift: Any) -> None:
    """Make the table of a block: (base + more) << shift, in bytes, for bases at an address."""
    for channel in range(0, width, STEP):
        bases = vector.load_part_u8x64(base + channel, min(STEP, width - channel))
        bases = vector.add(bases, vector.splat_u8x64(more))
        vector.store(table + channel, vector.shift_left(bases, vector.splat_u8x64(shift)))
    filled = width
    while filled < width + STEP:
        # What lies behind the channels at the front is overwritten by the next round.
        vector.store(table + filled, vector.load_u8x64(table))
        filled += width


@inlined
def load_ranks(ranks: Any) -> Any:
    """The nine ranks at an address, as integers."""
    return (
        vector.load_u8(ranks),
        vector.load_u8(ranks + 1),
        vector.load_u8(ranks + 2),
        vector.load_u8(ranks + 3),
        vector.load_u8(ranks + 4),
        vector.load_u8(ranks + 5),
        vector.load_u8(ranks + 6),
        vector.load_u8(ranks + 7),
        vector.load_u8(ranks + 8),
    )
