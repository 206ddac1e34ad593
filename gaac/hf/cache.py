"""The compressed KV cache for transformers: a DynamicCache whose full-attention layers hold blocks.

Lossless by construction: attention gets the very bits that DynamicCache would have given it. What
it saves is memory between steps; every step decodes the blocks of one layer at a time, or, with
`use_fused_attention`, none of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig

import gaac
from gaac.hf.accounting import LayerBytes, count_layer
from gaac.hf.blocks import Codec, Packer
from gaac.hf.layer import BlockCompressedLayer
from gaac.hf.rope import rope_of_layer

SCOPES = ("kv", "k", "v")
HINTED_LEVEL = 5  # the level of gaac that knows what to do with a rope


class BlockCompressedCache(DynamicCache):
    """Holds KV in losslessly packed blocks; attention sees what DynamicCache would give it.

    config: the model's. Layers that slide, share, or carry a recurrent state stay the library's.
    level: gaac's level, one of gaac.LEVELS (unused where `codec` is given).
    block_tokens: tokens in a block. scope: "kv" packs keys and values, "k" or "v" that side alone.
    window: the most recent tokens that stay raw, after a prefill too; a block is packed as soon as
    block_tokens + window tokens are raw.
    codec: None for gaac, else anything with encode([1, kv_heads, tokens, head_dim] tensor) ->
    bytes-like and decode(bytes) -> the tensor again.

    Raises TypeError or ValueError for an argument out of range. Updating raises
    gaac.UnsupportedTensor for KV in another dtype than fp16 or bf16, unless `codec` is given.
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        level: int = 1,
        block_tokens: int = 256,
        scope: str = "kv",
        window: int = 0,
        codec: Codec | None = None,
    ) -> None:
        _check_arguments(config, level, block_tokens, scope, window, codec)
        super().__init__(config=config)
        if not self.layers:
            raise ValueError("config describes a model without layers, so there is no KV to hold.")
        packer = Packer(level, block_tokens, window, codec)
        values = replace(packer, kind="v") if "v" in scope else None
        attending = config.get_text_config(decoder=True)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                rope = rope_of_layer(config, index) if level == HINTED_LEVEL else None
                keys = replace(packer, kind="k", rope=rope) if "k" in scope else None
                self.layers[index] = BlockCompressedLayer(keys, values, attending)
        self.level, self.block_tokens, self.scope, self.window = level, block_tokens, scope, window
        self.codec = codec

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockCompressedCache:
        """A copy with its own tails; blocks are immutable and stay shared, and so is the codec."""
        twin = self._twin(copy.deepcopy(layer, memo) for layer in self.layers)
        memo[id(self)] = twin
        return twin

    def fork(self) -> BlockCompressedCache:
        """An independent cache with the same content that shares blocks and tails with this one.

        Nothing shared is ever written to, so memory grows only by what each side adds. The
        library's own layers are copied.
        """
        return self._twin(
            layer.fork() if isinstance(layer, BlockCompressedLayer) else copy.deepcopy(layer)
            for layer in self.layers
        )

    def flush(self) -> None:
        """Wait until every block that is due has been packed.

        Nothing needs it for being right: whatever is asked of a layer waits for that layer.
        Raises what packing raised; no token is lost, and later updates try again.
        """
        for layer in self.layers:
            if isinstance(layer, BlockCompressedLayer):
                layer.flush()

    def layer_bytes(self) -> list[LayerBytes]:
        """What each layer holds, in order."""
        return [count_layer(index, layer) for index, layer in enumerate(self.layers)]

    @property
    def raw_bytes(self) -> int:
        """Bytes that the K and V held by all layers would take uncompressed."""
        return sum(record.raw_bytes for record in self.layer_bytes())

    @property
    def stored_bytes(self) -> int:
        """Bytes of memory that the K and V of all layers take now: payloads and raw tensors.

        Whole storages are counted, so a view that keeps a larger tensor alive shows, and so does
        the room behind raw tokens; a block that batch rows share counts once.
        """
        return sum(record.stored_bytes for record in self.layer_bytes())

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent and convolution states, which do not grow and are not KV."""
        return sum(record.state_bytes for record in self.layer_bytes())

    def _twin(self, layers: Iterable[Any]) -> BlockCompressedCache:
        twin = copy.copy(self)
        twin.layers = list(layers)
        return twin


def _check_arguments(
    config: Any, level: Any, block_tokens: Any, scope: Any, window: Any, codec: Any
) -> None:
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config is a {type(config).__name__}: pass the model's, model.config.")
    if not _is_int(level) or level not in gaac.LEVELS:
        raise ValueError(f"level={level!r}: gaac has the levels {sorted(gaac.LEVELS)}.")
    if not _is_int(block_tokens) or block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens!r}: a block holds at least one token.")
    if scope not in SCOPES:
        raise ValueError(f'scope={scope!r}: choose "kv", "k" or "v".')
    if not _is_int(window) or window < 0:
        raise ValueError(f"window={window!r}: the number of recent raw tokens is 0 or more.")
    if codec is not None and not all(
        callable(getattr(codec, name, None)) for name in ("encode", "decode")
    ):
        raise TypeError(f"codec is a {type(codec).__name__}: it needs encode and decode.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
