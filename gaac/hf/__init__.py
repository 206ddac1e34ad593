"""The compressed KV cache for transformers; nothing else in gaac imports transformers.

`BlockCompressedCache` takes the place of DynamicCache in `generate` or `forward`;
`cache_argument(model)` is the keyword to pass it under; `rope_of_layer` is level 5's hint for keys.
"""

from __future__ import annotations

from gaac.hf.versions import cache_argument, require_transformers

require_transformers()

from gaac.hf.accounting import LayerBytes  # noqa: E402
from gaac.hf.cache import BlockCompressedCache  # noqa: E402
from gaac.hf.rope import rope_of_layer  # noqa: E402

__all__ = ["BlockCompressedCache", "LayerBytes", "cache_argument", "rope_of_layer"]
