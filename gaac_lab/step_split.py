"""Where the time of a decode step goes: attention, unpacking and packing blocks, the cache, the
rest.

Timers sit inside the step, so a split step is slower than an untimed one; the shares are the
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaac.hf.blocks import Packer
from gaac_lab.configuration import Configuration
from gaac_lab.measure import Tally
from gaac_lab.request import Request, warm_up

_NAME = "gaac_lab_split"  # must not hold the name of a library attention: those are special-cased


@contextmanager
def _timed_packing(pack: Tally, unpack: Tally) -> Iterator[None]:
    """Timers around the cache's own packing and unpacking, so that the path stays the real one."""
    plain_pack, plain_unpack = Packer.pack, Packer.unpack
    Packer.pack = lambda *args: pack.run(lambda: plain_pack(*args))  # type: ignore[method-assign]
    Packer.unpack = lambda *args: unpack.run(lambda: plain_unpack(*args))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Packer.pack, Packer.unpack = plain_pack, plain_unpack  # type: ignore[method-assign]


def measure(
    model: Any, input_ids: torch.Tensor, configuration: Configuration, *, steps: int
) -> dict[str, Any]:
    """Mean seconds of a step by part: attention_s, unpack_s, pack_s, cache_s, rest_s and step_s.

    cache_s is the cache's update without packing and unpacking: joining old and new tokens.
    """
    device = model.device
    attention, update, pack, unpack = (Tally(device) for _ in range(4))
    cache = configuration.make_cache(model.config)
    plain_update = cache.update
    cache.update = lambda *args, **kwargs: update.run(lambda: plain_update(*args, **kwargs))
    with _timed_attention(model, attention), _timed_packing(pack, unpack):
        warm_up(model, configuration)
        request = Request(model, input_ids, cache)
        request.prefill()
        request.step()
        for tally in (attention, update, pack, unpack):
            tally.reset()
        step_s = sum(request.step() for _ in range(steps)) / steps
    parts = {
        "attention_s": attention.seconds / steps,
        "unpack_s": unpack.seconds / steps,
        "pack_s": pack.seconds / steps,
        "cache_s": (update.seconds - pack.seconds - unpack.seconds) / steps,
    }
    return {
        "label": configuration.label,
        "tokens": int(input_ids.shape[1]),
        "batch": int(input_ids.shape[0]),
        "steps": steps,
        **parts,
        "rest_s": step_s - sum(parts.values()),
        "step_s": step_s,
    }


@contextmanager
def _timed_attention(model: Any, tally: Tally) -> Iterator[None]:
    """Routes the model's attention through a timer, and puts the model back as it was."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    if before == "eager":
        raise ValueError("the time split needs attention by name; load the model with sdpa")
    plain = ALL_ATTENTION_FUNCTIONS[before]

    def attention(*args: Any, **kwargs: Any) -> Any:
        return tally.run(lambda: plain(*args, **kwargs))

    AttentionInterface.register(_NAME, attention)
    # Without a mask function of its own name, transformers would give padded batches no mask.
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
