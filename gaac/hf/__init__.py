"""The compressed KV cache for transformers; nothing else in gaac imports transformers.

`BlockCompressedCache` takes the place of DynamicCache in `generate` or `forward`;
`cache_argument(model)` is the keyword to pass it under. `use_fused_attention(model)` lets decoding
read its pages where they lie, `prefill` fills it with a long prompt a chunk at a time, and
`rope_of_layer` is level 5's hint for keys.
"""

from __future__ import annotations

from gaac.hf.versions import cache_argument, require_transformers

require_transformers()

from gaac.hf.accounting import LayerBytes  # noqa: E402
from gaac.hf.attention import FusedAttention, use_fused_attention  # noqa: E402
from gaac.hf.cache import BlockCompressedCache  # noqa: E402
from gaac.hf.prefill import prefill  # noqa: E402
from gaac.hf.rope import rope_of_layer  # noqa: E402

__all__ = [
    "BlockCompressedCache",
    "FusedAttention",
    "LayerBytes",
    "cache_argument",
    "prefill",
    "rope_of_layer",
    "use_fused_attention",
]
