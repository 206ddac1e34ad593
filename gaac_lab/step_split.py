"""Where the time of a decode step goes: attention, unpacking blocks, the cache, the rest; and what
is packed beside it.

Timers sit inside the step, so a split step is slower than an untimed one; the shares are the
result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaac.hf.blocks import Packer
from gaac_lab.attention import switched
from gaac_lab.configuration import Configuration
from gaac_lab.measure import Tally
from gaac_lab.request import Request, warm_up


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
    """Mean seconds of a step by part: attention_s, unpack_s, cache_s, rest_s and their sum, step_s.

    attention_s of a fused configuration is the kernel on the pages. cache_s is the cache's update
    without unpacking: joining old and new tokens, and waiting for a block that another thread has
    not packed yet. pack_s is no part of the sum: what that thread packed meanwhile, for each step.
    """
    device = model.device
    attention, update, pack, unpack = (Tally(device) for _ in range(4))
    cache = configuration.make_cache(model.config)
    plain_update = cache.update
    cache.update = lambda *args, **kwargs: update.run(lambda: plain_update(*args, **kwargs))
    warm_up(model, configuration)
    request = Request(model, input_ids, cache, integration=configuration.integration)
    with _timed_attention(model, configuration, attention), _timed_packing(pack, unpack):
        request.prefill()
        request.step()
        request.settle()
        for tally in (attention, update, pack, unpack):
            tally.reset()
        step_s = sum(request.step() for _ in range(steps)) / steps
        request.settle()
    parts = {
        "attention_s": attention.seconds / steps,
        "unpack_s": unpack.seconds / steps,
        "cache_s": (update.seconds - unpack.seconds) / steps,
    }
    return {
        "label": configuration.label,
        "tokens": int(input_ids.shape[1]),
        "batch": int(input_ids.shape[0]),
        "steps": steps,
        **parts,
        "rest_s": step_s - sum(parts.values()),
        "step_s": step_s,
        "pack_s": pack.seconds / steps,
    }


@contextmanager
def _timed_attention(model: Any, configuration: Configuration, tally: Tally) -> Iterator[None]:
    """A timer around the attention that `configuration` decodes with, under its own name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with switched(model, configuration.integration):
        name = model.config._attn_implementation
    plain: Callable[..., Any] = (
        _eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    )
    # An override on the library's own table: taking it away brings back what was there.
    ALL_ATTENTION_FUNCTIONS[name] = lambda *args, **kwargs: tally.run(
        lambda: plain(*args, **kwargs)
    )
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _eager_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of the model's own file, which has no name in the library's table."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)
