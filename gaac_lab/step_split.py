"""Where the time of a decode step goes: attention, unpacking and packing blocks, the cache, the
rest.

Timers sit inside the step, so a split step is slower than an untimed one; the shares are the
result.
"""

from __future__ import annotations

from typing import Any

import torch

from gaac_lab.configuration import Configuration
from gaac_lab.measure import Tally
from gaac_lab.request import Request, warm_up

_NAME = "gaac_lab_split"  # must not hold the name of a library attention: those are special-cased


class _TimedCodec:
    def __init__(self, codec: Any, encode: Tally, decode: Tally) -> None:
        self._codec, self._encode, self._decode = codec, encode, decode

    def encode(self, tensor: torch.Tensor) -> Any:
        return self._encode.run(lambda: self._codec.encode(tensor))

    def decode(self, blob: Any) -> torch.Tensor:
        return self._decode.run(lambda: self._codec.decode(blob))


def measure(
    model: Any, input_ids: torch.Tensor, configuration: Configuration, *, steps: int
) -> dict[str, Any]:
    """Mean seconds of a step by part: attention_s, unpack_s, pack_s, cache_s, rest_s and step_s.

    cache_s is the cache's update without packing and unpacking: joining old and new tokens.
    """
    device = model.device
    attention, update, pack, unpack = (Tally(device) for _ in range(4))
    codec = None
    if not configuration.is_baseline:
        codec = _TimedCodec(configuration.make_codec(), pack, unpack)
    cache = configuration.make_cache(model.config, codec=codec)
    plain_update = cache.update
    cache.update = lambda *args, **kwargs: update.run(lambda: plain_update(*args, **kwargs))
    with _timed_attention(model, attention):
        warm_up(model, lambda: configuration.make_cache(model.config))
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


class _timed_attention:
    """Routes the model's attention through a timer, and puts the model back as it was."""

    def __init__(self, model: Any, tally: Tally) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._model, self._before = model, model.config._attn_implementation
        if self._before == "eager":
            raise ValueError("the time split needs attention by name; load the model with sdpa")
        plain = ALL_ATTENTION_FUNCTIONS[self._before]

        def attention(*args: Any, **kwargs: Any) -> Any:
            return tally.run(lambda: plain(*args, **kwargs))

        AttentionInterface.register(_NAME, attention)
        # Without a mask function of its own name, transformers would give padded batches no mask.
        AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[self._before])

    def __enter__(self) -> None:
        self._model.set_attn_implementation(_NAME)

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation(self._before)
