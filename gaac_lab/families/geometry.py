"""What a model keeps, layer by layer: KV that grows, and states of a fixed size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps of each token, in values of the cache's type.

    K and V of `kv_heads` heads; or, in latent attention, one latent of `latent_dim` for all heads
    and no K and V; and the keys of an indexer, if there is one. A layer with a window keeps that
    many tokens, others every token. With an indexer, a decode step reads at most `index_top_tokens`
    latents.
    """

    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window_tokens: int | None = None
    latent_dim: int = 0
    index_dim: int = 0
    index_top_tokens: int | None = None

    def values_per_token(self) -> int:
        """Values kept of one token, of all kinds together."""
        return (
            self.kv_heads * (self.k_head_dim + self.v_head_dim) + self.latent_dim + self.index_dim
        )

    def kept(self, tokens: int) -> int:
        """How many of so many tokens the layer keeps."""
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def values(self, tokens: int) -> int:
        """Values kept for one sequence of so many tokens."""
        return self.values_per_token() * self.kept(tokens)

    def values_read(self, tokens: int) -> int:
        """Values that one decode step of one sequence reads, with so many tokens in the cache."""
        kept = self.kept(tokens)
        read = kept if self.index_top_tokens is None else min(kept, self.index_top_tokens)
        return (self.values_per_token() - self.index_dim) * read + self.index_dim * kept


@dataclass(frozen=True)
class State:
    """What one recurrent layer keeps of a sequence, whatever its length.

    A convolution keeps `conv_columns` of `conv_channels` each, in the cache's type; the recurrence
    keeps `recurrent_values`, in that type too unless `recurrent_bytes` says how many bytes each
    takes.
    """

    conv_channels: int
    conv_columns: int
    recurrent_values: int
    recurrent_bytes: int | None = None

    def size_bytes(self, value_bytes: int) -> int:
        """Bytes for one sequence; an 8-bit cache leaves the states at 2 bytes a value."""
        value_bytes = max(value_bytes, 2)
        conv_bytes = self.conv_channels * self.conv_columns * value_bytes
        return conv_bytes + self.recurrent_values * (self.recurrent_bytes or value_bytes)


@dataclass(frozen=True)
class Geometry:
    """The layers of a model, of which `layers` there are in all, by what they keep.

    `kv_layers` hold KV of their own, `rereads` are what further layers read of others' KV, `states`
    is of the recurrent layers, `cross` of the layers that look at another sequence, in whose tokens
    they count. `expanded` is the same as `kv_layers` with the latents spread out to K and V per
    head. `held` and `held_states` are what the installed transformers keeps; None means that it has
    no class of its own for the model.
    """

    model_type: str | None
    layers: int
    kv_layers: tuple[LayerKV, ...]
    max_context_tokens: int | None
    notes: tuple[str, ...]
    states: tuple[State, ...] = ()
    rereads: tuple[LayerKV, ...] = ()
    cross: tuple[LayerKV, ...] = ()
    expanded: tuple[LayerKV, ...] = ()
    held: tuple[LayerKV, ...] | None = None
    held_states: tuple[State, ...] | None = None


def values(layers: Iterable[LayerKV], tokens: int) -> int:
    """Values that the layers keep for one sequence of so many tokens."""
    return sum(layer.values(tokens) for layer in layers)


def values_between_steps(layers: Iterable[LayerKV], tokens: int) -> int:
    """The same in transformers' DynamicCache, which keeps a token less in a window of W.

    The W-th token is the one that the next step brings.
    """
    return sum(
        layer.values_per_token()
        * (tokens if layer.window_tokens is None else min(tokens, layer.window_tokens - 1))
        for layer in layers
    )


def state_bytes(states: Iterable[State], value_bytes: int) -> int:
    """Bytes that the states of one sequence take, in a cache of `value_bytes` a value."""
    return sum(state.size_bytes(value_bytes) for state in states)
