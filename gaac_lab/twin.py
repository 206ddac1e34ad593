"""Is what attention read from a cache what was put into it? Checked on an uncompressed twin.

Another attention kernel changes the last bits of its output, and with them every later layer's K
and V: bits can be compared only under one kernel. So a finished request is run again with the same
attention on uncompressed KV, while a plain cache keeps what the model hands over. The logits of
every step, and K and V of every layer, must be the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gaac_lab import kv
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.request import Request


def agrees(
    model: Any,
    input_ids: torch.Tensor,
    configuration: Configuration,
    finished: Request,
    logits: Sequence[torch.Tensor],
) -> bool:
    """Whether `finished`, a request of `configuration`, agrees bit for bit with its twin.

    input_ids: the prompt, [batch, tokens]. logits: those of `finished` after the prefill and after
    each of its steps, [batch, vocabulary] each.
    """
    twin = Request.of(model, input_ids, configuration.raw_twin)
    kept = _keep_updates(twin.cache, model.config)
    equal = True
    for number, expected in enumerate(logits):
        twin.step() if number else twin.prefill()
        assert twin.logits is not None
        equal &= kv.same_bits(twin.logits, expected)
    return equal and kv.same_cache(kept, finished.cache)


def _keep_updates(cache: Any, model_config: Any) -> Any:
    """A plain cache that from now on takes every update that `cache` takes, and copies it."""
    plain, update = BASELINE.make_cache(model_config), cache.update

    def update_both(keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        plain.update(keys, values, layer, *args, **kwargs)
        return update(keys, values, layer, *args, **kwargs)

    cache.update = update_both
    return plain
