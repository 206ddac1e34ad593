"""From measured rows to one verdict: enable, do not enable, or undecided.

The rule: among the configurations that are lossless, save memory and keep an acceptable share of
the baseline's decode throughput, the one that saves most is chosen. If none is acceptable,
compression is not worth it here. Throughput is judged by its interval, not by its median: a
configuration whose interval holds the threshold is neither accepted nor refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gaac_lab.configuration import Configuration, Integration, Scope

Verdict = Literal["enable", "do not enable", "undecided"]

# The process meter repeats to about half a percent; less than this is no rise.
PEAK_TOLERANCE = 0.01


class Row(BaseModel):
    """One configuration at one prompt length. Numbers that were not measured are null.

    ratio_*: decode throughput over the uncompressed cache's, median and interval.
    read_gb_s: KV bytes held over the time of a step: what a step must at least read.
    """

    model_config = ConfigDict(extra="ignore")

    label: str
    variable: str = ""
    codec: str
    level: int | None
    block_tokens: int
    scope: Scope
    window: int
    integration: Integration
    tokens: int
    batch: int = 1
    status: str = "measured"
    reason: str | None = None
    kv_raw_bytes: int | None = None
    kv_stored_bytes: int | None = None
    peak_bytes: int | None = None
    ttft_s: float | None = None
    decode_tok_s: float | None = None
    ratio_to_baseline: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_n: int | None = None
    tensor_equal: bool | None = None
    logit_max_abs_diff: float | None = None
    tokens_equal: bool | None = None
    read_gb_s: float | None = None
    judgement: str | None = None

    @property
    def is_baseline(self) -> bool:
        return self.codec == "none"

    @property
    def configuration(self) -> Configuration:
        names = Configuration.model_fields
        return Configuration(**{name: getattr(self, name) for name in names})

    @property
    def saved_bytes(self) -> int | None:
        """KV bytes that this configuration does not hold; negative when it holds more."""
        if self.kv_raw_bytes is None or self.kv_stored_bytes is None:
            return None
        return self.kv_raw_bytes - self.kv_stored_bytes


class Chosen(BaseModel):
    """What to switch on."""

    codec: str
    level: int | None
    block_tokens: int
    scope: Scope
    window: int
    integration: Integration


class Decision(BaseModel):
    """decision.json: the verdict, its reason in a sentence, what was chosen, and every row."""

    verdict: Verdict
    reason: str
    chosen: Chosen | None
    min_throughput: float = Field(gt=0)
    rows: list[Row]


def rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows of a sweep's records; columns that a row has no use for are left out."""
    return [Row(**record) for record in records]


def decide(rows: Sequence[Row], *, min_throughput: float = 0.95) -> Decision:
    """The verdict over `rows`, which must hold the baseline at each length and batch.

    A configuration is judged over all its rows: the worst counts. A length at which the baseline
    itself did not run says nothing. Raises ValueError without rows or without a baseline to judge
    against.
    """
    baselines = {(row.tokens, row.batch): row for row in rows if row.is_baseline}
    by_configuration: dict[Configuration, list[Row]] = defaultdict(list)
    judged = []
    for row in rows:
        if not row.is_baseline:
            baseline = baselines.get((row.tokens, row.batch))
            if baseline is None:
                raise ValueError(f"no uncompressed row at {row.batch} × {row.tokens} tokens")
            judgement = _judge(row, baseline, min_throughput)
            row = row.model_copy(update={"judgement": judgement})
            if judgement != NO_BASELINE:
                by_configuration[row.configuration].append(row)
        judged.append(row)
    if not by_configuration:
        raise ValueError("no compressed configuration was measured; there is nothing to decide")
    accepted = _best(by_configuration, allow_unclear=False)
    unclear = _best(by_configuration, allow_unclear=True)
    best = accepted or unclear
    if best is None:
        verdict: Verdict = "do not enable"
        reason = _why_not(by_configuration, min_throughput)
    else:
        verdict = "enable" if accepted else "undecided"
        reason = _why(best, min_throughput, clear=accepted is not None)
    chosen = None
    if accepted:
        names = Chosen.model_fields
        chosen = Chosen(**{name: getattr(accepted[0], name) for name in names})
    return Decision(
        verdict=verdict, reason=reason, chosen=chosen, min_throughput=min_throughput, rows=judged
    )


ACCEPTABLE = "acceptable"
NO_BASELINE = "nothing to compare with"
UNCLEAR = "throughput unclear"


def _judge(row: Row, baseline: Row, min_throughput: float) -> str:
    """What stands for or against one row, in a few words."""
    if baseline.status != "measured":
        return NO_BASELINE
    if row.status != "measured":
        return "did not run"
    if not row.tensor_equal:
        return "not lossless"
    if row.saved_bytes is None or row.ratio_low is None or row.ratio_high is None:
        return "not measured"
    if row.saved_bytes <= 0:
        return "saves nothing"
    if _raises_peak(row, baseline):
        return "raises peak memory"
    if row.ratio_high < min_throughput:
        return "too slow"
    return ACCEPTABLE if row.ratio_low >= min_throughput else UNCLEAR


def _raises_peak(row: Row, baseline: Row) -> bool:
    """Whether both peaks are known and this one is higher by more than the meter's own spread."""
    if row.peak_bytes is None or baseline.peak_bytes is None:
        return False
    return row.peak_bytes > baseline.peak_bytes * (1 + PEAK_TOLERANCE)


def _best(
    by_configuration: dict[Configuration, list[Row]], *, allow_unclear: bool
) -> list[Row] | None:
    """The rows of the configuration that saves most, among those with nothing against them."""
    allowed = {ACCEPTABLE, UNCLEAR} if allow_unclear else {ACCEPTABLE}
    fit = [
        group
        for group in by_configuration.values()
        if all(row.judgement in allowed for row in group)
    ]
    return max(fit, key=_share_saved, default=None)


def _share_saved(group: Sequence[Row]) -> float:
    raw = sum(row.kv_raw_bytes or 0 for row in group)
    return sum(row.saved_bytes or 0 for row in group) / raw if raw else 0.0


def _why(group: Sequence[Row], min_throughput: float, *, clear: bool) -> str:
    row = min(group, key=lambda row: row.ratio_to_baseline or 0.0)
    saved = f"{row.label} holds {_share_saved(group):.0%} less KV"
    speed = f"{_ratio(row)} of the uncompressed throughput"
    if clear:
        return (
            f"{saved}, bit for bit the same, and decodes at {speed} ({min_throughput:g} is asked)."
        )
    return (
        f"{saved}, but its throughput, {_ratio(row)}, lies on both sides of {min_throughput:g}: "
        "repeat with more rounds or on a quieter machine."
    )


def _why_not(by_configuration: dict[Configuration, list[Row]], min_throughput: float) -> str:
    groups = list(by_configuration.values())
    lossy = [group for group in groups if any(row.judgement == "not lossless" for row in group)]
    slow = [group for group in groups if any(row.judgement == "too slow" for row in group)]
    if slow:
        fastest = max(slow, key=lambda group: min(row.ratio_to_baseline or 0.0 for row in group))
        row = min(fastest, key=lambda row: row.ratio_to_baseline or 0.0)
        reason = (
            f"No configuration keeps {min_throughput:g} of the uncompressed decode throughput; the "
            f"fastest that saves memory, {row.label}, reaches {_ratio(row)} "
            f"at {row.tokens:,} tokens."
        )
    else:
        reasons = sorted({row.judgement or "" for group in groups for row in group})
        reason = f"No configuration qualifies: {', '.join(reasons)}."
    if lossy:
        reason += f" Not lossless, so out of the question: {', '.join(g[0].label for g in lossy)}."
    return reason


def _ratio(row: Row) -> str:
    if row.ratio_to_baseline is None:
        return "an unmeasured share"
    return f"{row.ratio_to_baseline:.2f}× [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
