"""Six ways of attending to a cache, side by side, and how much of a gain comes from where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gaac_lab import bandwidth
from gaac_lab.baseline import require_room
from gaac_lab.compare import compare
from gaac_lab.configuration import BASELINE, EAGER, GROUPED, Configuration
from gaac_lab.measure import Failure, Ratio, attempt
from gaac_lab.sweep import comparison_fields

Record = dict[str, Any]

DEFAULT, TORCH, RAW_KERNEL, FUSED = (
    "transformers' default",
    "best uncompressed torch form",
    "raw kernel",
    "compressed, fused",
)


def six(level: int = 1, block_tokens: int = 256) -> dict[str, Configuration]:
    """The forms by name, from transformers' default to attention on packed pages.

    The raw kernel is the one of the last form on pages that are stored raw: the difference between
    the two is what compression does, and all else is what the kernel does.
    """
    fused = Configuration(level=level, block_tokens=block_tokens, integration="fused")
    return {
        DEFAULT: BASELINE,
        "transformers' eager": EAGER,
        TORCH: GROUPED,
        RAW_KERNEL: fused.raw_twin,
        "compressed, materialised": fused.model_copy(update={"integration": "materialise"}),
        FUSED: fused,
    }


@dataclass(frozen=True)
class Gain:
    """Decode throughput of the fused form, and its two causes.

    total: over transformers' default. kernel: the raw kernel over transformers' default.
    compression: packed pages over raw ones under the same kernel, steps taken in turn.
    torch: the best uncompressed torch form over transformers' default.
    """

    tokens: int
    total: Ratio
    kernel: Ratio
    compression: Ratio
    torch: Ratio

    @property
    def sentence(self) -> str:
        """How much is kernel and how much is compression, in a sentence."""
        return (
            f"At {self.tokens:,} tokens attention on packed pages decodes at {_times(self.total)} "
            f"of transformers' default: {_times(self.kernel)} is the kernel (default to the same "
            f"kernel on raw pages), {_times(self.compression)} the compression (raw pages to "
            f"packed ones); the best uncompressed torch form reaches {_times(self.torch)}."
        )


def run(
    model: Any,
    input_ids: torch.Tensor,
    *,
    level: int,
    block_tokens: int,
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Record], Gain | None]:
    """One record a form, in order, and the gain; None where memory ran out for one that it needs.

    input_ids: [batch, tokens]. Records hold name, label, the columns of `sweep.comparison_fields`,
    and moved_bytes: the KV bytes that a step moves at least (`bandwidth.traffic`).
    """
    forms = six(level, block_tokens)
    batch, tokens = input_ids.shape
    room = attempt(lambda: require_room(model, tokens + new_tokens, batch))
    if isinstance(room, Failure):
        failed = comparison_fields(room)
        return [{"name": name, "label": one.label, **failed} for name, one in forms.items()], None
    say("six forms against transformers' default")
    outcomes = compare(
        model, input_ids, list(forms.values()), new_tokens=new_tokens, rounds=rounds, say=say
    )
    say("packed pages against raw pages")
    (packed,) = compare(
        model,
        input_ids,
        [forms[FUSED]],
        against=forms[RAW_KERNEL],
        new_tokens=new_tokens,
        rounds=rounds,
    )
    records = [
        {"name": name, "label": one.label, **comparison_fields(outcome)}
        for (name, one), outcome in zip(forms.items(), outcomes, strict=True)
    ]
    by_name = dict(zip(forms, outcomes, strict=True))
    needed = [by_name[FUSED], by_name[RAW_KERNEL], packed, by_name[TORCH]]
    ratios = [one.ratio for one in needed if not isinstance(one, Failure)]
    gain = Gain(int(tokens), *ratios) if len(ratios) == len(needed) else None
    return _with_traffic(records, list(forms.values()), model), gain


def _with_traffic(
    records: Sequence[Record], forms: Sequence[Configuration], model: Any
) -> list[Record]:
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    shared = heads // (getattr(config, "num_key_value_heads", None) or heads)
    return [
        {**record, "moved_bytes": _moved(record, form, shared)}
        for record, form in zip(records, forms, strict=True)
    ]


def _moved(record: Record, form: Configuration, heads_per_kv_head: int) -> int | None:
    if record["status"] != "measured":
        return None
    return bandwidth.traffic(
        form,
        record["kv_raw_bytes"],
        record["kv_stored_bytes"],
        heads_per_kv_head=heads_per_kv_head,
    ).total_bytes


def _times(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]"
