"""The hint that keys carry a rotary position embedding, as a frame keeps it.

Within a block only differences of positions matter: the mean key, turned with its first token, is
turned on from there. So neither the first position nor a fine resolution is needed, and a frame
keeps each frequency as 16 bits of turns per token (an error of at most 2^-17 turns a token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaac.errors import GaacError

TURN = 65536


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation of each pair of channels from one token to the next.

    turns: uint16, one axis, turns per token times 65536 for each pair.
    interleaved: pair j is channels (2j, 2j + 1) where True (GPT-J, DeepSeek), else
    (j, j + pairs) (GPT-NeoX, Llama). Channels beyond 2 * pairs are not rotated.
    """

    turns: np.ndarray
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Keep a copy that no one can change. Raises GaacError for other turns than the above."""
        turns = self.turns
        fits = isinstance(turns, np.ndarray) and turns.dtype == np.uint16 and turns.ndim == 1
        if not fits or not 1 <= turns.size < TURN // 2:
            raise GaacError("rope: turns is one axis of uint16, 1 to 32767 of them; see Rope.of.")
        kept = turns.copy()
        kept.flags.writeable = False
        object.__setattr__(self, "turns", kept)

    @classmethod
    def of(cls, inverse_frequencies: Any, *, interleaved: bool = False) -> Rope:
        """From a model's inverse frequencies, radians per token, one for each pair of channels.

        Raises GaacError unless they are finite numbers in one axis, 1 to 32,767 of them.
        """
        try:
            values = np.asarray(inverse_frequencies, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.zeros((0, 0))
        if values.ndim != 1 or not 1 <= values.size < TURN // 2 or not np.isfinite(values).all():
            raise GaacError("rope: give the inverse frequencies, one finite number for each pair.")
        turns = np.rint(values / math.tau * TURN) % TURN
        return cls(turns.astype(np.uint16), bool(interleaved))


def as_rope(rope: Any, width: int) -> Rope | None:
    """What a caller passes as `rope`: None, a Rope, or inverse frequencies in radians per token.

    width: values of a row, the head_dim. Raises GaacError if the pairs do not fit into it.
    """
    if rope is None:
        return None
    made = rope if isinstance(rope, Rope) else Rope.of(rope)
    if 2 * made.turns.size > width:
        raise GaacError(
            f"rope has {made.turns.size} frequencies, too many for rows of {width} values: "
            "give one for each pair of channels."
        )
    return made
