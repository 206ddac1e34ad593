"""Whether fused attention changes what a model says, with the rounding of bf16 taken out.

    python benchmarks/attention_ids.py [--model NAME] [--prompts all] [--prompt-tokens 512]
                                       [--new-tokens 256] [--own] [--json]

The model computes in float32. Two caches keep its keys and values rounded to bf16, in the layers
that keep every token: a DynamicCache read by SDPA, and packed pages read by fused attention. Both
keep what the first computes: on its own, the other would now and then round a last bit the other
way, and each such flip changes logits by a tenth. (--own lets it: ids then part after some dozens
of tokens on some prompts, as they do between any two kernels.) So the two differ by the order of
sums in attention alone, and greedy decoding must give the same ids. Of each prompt: how many ids
are equal, the largest difference of logits while they are, and the packed bytes. The last line is
one JSON document; the exit status is 1 if any id differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from gaac.hf import BlockCompressedCache, use_fused_attention
from gaac.hf.layer import BlockCompressedLayer
from gaac.hf.lazy import LazyStates
from gaac_lab import models, prompts
from gaac_lab.request import Request

States = tuple[torch.Tensor, torch.Tensor]


class Rounding:
    """Keeps bf16 where every token is kept, and gives dense states back as float32."""

    layers: list[Any]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **more: Any
    ) -> States:
        if not isinstance(self.layers[layer], BlockCompressedLayer) and (
            type(self.layers[layer]) is not DynamicLayer
        ):
            return super().update(keys, values, layer, *rest, **more)  # type: ignore[misc, no-any-return]
        held = super().update(keys.bfloat16(), values.bfloat16(), layer, *rest, **more)  # type: ignore[misc]
        k, v = (states if type(states) is LazyStates else states.float() for states in held)
        return k, v


class RoundingDynamicCache(Rounding, DynamicCache):
    pass


class RoundingCompressedCache(Rounding, BlockCompressedCache):
    followed: DynamicCache | None = None  # whose last token is kept instead of one's own

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **more: Any
    ) -> States:
        if self.followed is not None and keys.shape[-2] == 1:
            held = self.followed.layers[layer]
            keys, values = (states[..., -1:, :].to(keys) for states in (held.keys, held.values))
        return super().update(keys, values, layer, *rest, **more)


def compare(model: Any, ids: torch.Tensor, new_tokens: int, *, own: bool) -> dict[str, Any]:
    """Both caches, a step each in turn."""
    dense = Request(model, ids, RoundingDynamicCache(config=model.config))
    cache = RoundingCompressedCache(model.config)
    cache.followed = None if own else dense.cache
    packed = Request(model, ids, cache)
    equal, largest = 0, 0.0
    for number in range(new_tokens):
        if number:
            dense.step()
            with use_fused_attention(model):
                packed.step()
        else:
            dense.prefill()
            packed.prefill()
        assert dense.logits is not None
        assert packed.logits is not None
        if equal == number:
            difference = (dense.logits - packed.logits).abs().max()
            largest = max(largest, float(difference))
            equal += int(torch.equal(dense.new_tokens[:, -1], packed.new_tokens[:, -1]))
    return {
        "tokens": int(ids.shape[1]),
        "new_tokens": new_tokens,
        "equal_ids": equal,
        "logit_max_abs_diff": largest,
        "kv_raw_bytes": packed.cache.raw_bytes,
        "kv_stored_bytes": packed.cache.stored_bytes,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("prompt", "tokens", "equal ids", "largest |Δ logit|", "KV of raw")
    for row in rows:
        table.add_row(
            row["prompt"],
            f"{row['tokens']:,}",
            f"{row['equal_ids']} of {row['new_tokens']}",
            f"{row['logit_max_abs_diff']:.1e}",
            f"{row['kv_stored_bytes'] / row['kv_raw_bytes']:.3f}",
        )
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=models.DEFAULT, help="a folder or hub id")
    parser.add_argument("--prompts", nargs="+", default=["all"], help="names, or all")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--own", action="store_true", help="each cache keeps its own new tokens")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    model, tokenizer = models.load(options.model, dtype="float32", device="cpu")
    names = prompts.names() if options.prompts == ["all"] else options.prompts
    rows = []
    for name in names:
        ids = prompts.build(name, options.prompt_tokens, tokenizer).input_ids
        rows.append({"prompt": name, **compare(model, ids, options.new_tokens, own=options.own)})
    Console(quiet=options.json).print(table_of(rows))
    equal = all(row["equal_ids"] == row["new_tokens"] for row in rows)
    print(json.dumps({"model": options.model, "equal": equal, "rows": rows}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
