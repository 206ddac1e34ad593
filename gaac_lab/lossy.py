"""The routes that are measured beside each other: what each keeps of one and the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers.cache_utils import DynamicCache

from gaac.hf import BlockCompressedCache
from gaac_lab.codec import KVCodec
from gaac_lab.lossy_layer import LossyCache
from gaac_lab.prefilled import Prefilled
from gaac_lab.quantised import BITS, BLOCK_TOKENS, QuantisedLayer
from gaac_lab.token_policies import HeavyHitterLayer, PackedWindowLayer, WindowLayer

Kind = Literal["none", "lossless", "precision", "tokens", "stacked"]

SINKS = 4  # StreamingLLM's choice


@dataclass(frozen=True)
class Route:
    """A way of keeping KV. `empty(config)` makes its cache, `make(prefilled)` one with a prompt.

    setting: its parameters in words. note: bit-exact, approximate, or what it changes.
    """

    name: str
    kind: Kind
    setting: str
    note: str
    empty: Callable[[Any], Any]

    def make(self, config: Any, prefilled: Prefilled) -> Any:
        """A cache of this route that holds what was read; `prefilled` stays as it is."""
        return prefilled.fill(self.empty(config))


def default_routes(
    *,
    budget_tokens: int,
    levels: Sequence[int] = (1, 3),
    bits: Sequence[int] = BITS,
    block_tokens: int = 128,
) -> list[Route]:
    """Every route, the uncompressed one first.

    budget_tokens: what each token policy holds, sinks and recent tokens included, so that policies
    can be compared; a multiple of 64 of at least 64, which the quantised window holds exactly.
    block_tokens: of gaac's blocks. Raises ValueError for another budget.
    """
    if budget_tokens < BLOCK_TOKENS or budget_tokens % BLOCK_TOKENS:
        raise ValueError(
            f"budget_tokens={budget_tokens}: give a multiple of {BLOCK_TOKENS}, which quantised "
            "windows are cut by."
        )
    return [
        uncompressed(),
        *(_lossless(level, block_tokens) for level in levels),
        *(_precision(width) for width in bits),
        *_tokens(budget_tokens),
        *_stacked(budget_tokens, block_tokens),
    ]


def uncompressed() -> Route:
    """The route that all others stand beside."""
    return Route("uncompressed", "none", "", "bit-exact", _dynamic)


def _dynamic(config: Any) -> DynamicCache:
    return DynamicCache(config=config)


def _lossless(level: int, block_tokens: int) -> Route:
    return Route(
        f"gaac L{level}",
        "lossless",
        f"blocks of {block_tokens} tokens",
        "bit-exact",
        partial(BlockCompressedCache, level=level, block_tokens=block_tokens),
    )


def _precision(bits: int) -> Route:
    return Route(
        f"{bits} bit",
        "precision",
        f"K per channel in blocks of {BLOCK_TOKENS} tokens, V per token",
        "approximate",
        partial(LossyCache, make_layer=partial(QuantisedLayer, bits)),
    )


def _tokens(budget: int) -> list[Route]:
    heavy = budget // 2
    return [
        Route(
            "window",
            "tokens",
            f"last {budget} tokens",
            "approximate: what is dropped is gone",
            partial(LossyCache, make_layer=partial(WindowLayer, budget)),
        ),
        Route(
            "sinks + window",
            "tokens",
            f"first {SINKS} and last {budget - SINKS} tokens",
            "approximate: what is dropped is gone",
            partial(LossyCache, make_layer=partial(WindowLayer, budget - SINKS, SINKS)),
        ),
        Route(
            "heavy hitters",
            "tokens",
            f"{heavy} by attention and last {budget - heavy} tokens, per KV head",
            "approximate: what is dropped is gone",
            partial(LossyCache, make_layer=partial(HeavyHitterLayer, heavy, budget - heavy)),
        ),
    ]


def _stacked(budget: int, block_tokens: int) -> list[Route]:
    codec = KVCodec(level=1, block_tokens=block_tokens)
    return [
        Route(
            "8 bit + window",
            "stacked",
            f"last {budget} tokens or up to {BLOCK_TOKENS - 1} more, 8 bits a value",
            "approximate: what is dropped is gone",
            partial(LossyCache, make_layer=partial(QuantisedLayer, 8, window=budget)),
        ),
        Route(
            "gaac L1 + window",
            "stacked",
            f"last {budget} tokens, packed anew at every step",
            "the same bits as the window alone",
            partial(LossyCache, make_layer=partial(PackedWindowLayer, budget, codec=codec)),
        ),
    ]
