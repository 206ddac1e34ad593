"""Which levels there are."""

from __future__ import annotations

from gaac.levels.base import Level
from gaac.levels.context import Context
from gaac.levels.entropy import Entropy
from gaac.levels.packed import Packed
from gaac.levels.stored import Stored
from gaac.levels.tiered import Tiered

STORED = Stored()
REGISTRY: dict[int, Level] = {
    level.number: level for level in (STORED, Packed(), Tiered(), Entropy(), Context())
}
