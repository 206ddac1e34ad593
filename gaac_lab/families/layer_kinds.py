"""Equal layers of a model taken together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from gaac_lab.families.geometry import LayerKV


@dataclass(frozen=True)
class LayerKind:
    """The layers of one geometry: how many there are, and what each keeps per token.

    With latent attention `latent_dim` values stand for all heads, and both widths are 0. With
    sparse attention `index_dim` values are the key of an indexer.
    """

    layers: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window_tokens: int | None
    bytes_per_token: int
    latent_dim: int = 0
    index_dim: int = 0


def kinds_of(layers: Iterable[LayerKV], value_bytes: int) -> tuple[LayerKind, ...]:
    """One kind for each set of equal layers, those that keep every token first."""

    def order(layer: LayerKV) -> tuple[bool, int, int, int, int, int, int]:
        window = layer.window_tokens
        widths = (layer.k_head_dim, layer.v_head_dim, layer.latent_dim, layer.index_dim)
        return (window is not None, window or 0, layer.kv_heads, *widths)

    grouped = [list(group) for _, group in groupby(sorted(layers, key=order), key=order)]
    return tuple(
        LayerKind(
            layers=len(group),
            kv_heads=group[0].kv_heads,
            k_head_dim=group[0].k_head_dim,
            v_head_dim=group[0].v_head_dim,
            window_tokens=group[0].window_tokens,
            bytes_per_token=group[0].values_per_token() * value_bytes,
            latent_dim=group[0].latent_dim,
            index_dim=group[0].index_dim,
        )
        for group in grouped
    )
