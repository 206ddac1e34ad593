"""From measured rows to one verdict: enable, do not enable, or undecided.

The rule: among the configurations that are lossless, save memory, do not raise the peak and keep
an acceptable share of the baseline's decode throughput, the one that saves most is chosen. If none
is acceptable, compression is not worth it here. Throughput is judged by its interval, not by its
median: a configuration whose interval holds the threshold, or covers too little to say, is neither
accepted nor refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gaac_lab.configuration import Configuration, Integration, Scope

Verdict = Literal["enable", "do not enable", "undecided"]

# Two rounds that agree prove little: five give an interval of 94 %.
MIN_CONFIDENCE = 0.9

# The process meter repeats to about half a percent; less than this is no rise.
PEAK_TOLERANCE = 0.01


class Row(BaseModel):
    """One configuration at one prompt length. Numbers that were not measured are null.

    ratio_*: decode throughput over the uncompressed cache's, median and interval.
    logit_max_abs_diff, tokens_equal: against the uncompressed cache under the model's own
    attention; another kernel moves them without any compression. eager_logit_max_abs_diff: how far
    transformers' eager attention does, for scale.
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
    prefill_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None
    ttft_s: float | None = None
    decode_tok_s: float | None = None
    ratio_to_baseline: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_n: int | None = None
    ratio_rounds: int | None = None
    ratio_confidence: float | None = None
    tensor_equal: bool | None = None
    logit_max_abs_diff: float | None = None
    tokens_equal: bool | None = None
    eager_logit_max_abs_diff: float | None = None
    read_gb_s: float | None = None
    judgement: str | None = None

    @property
    def is_baseline(self) -> bool:
        return self.configuration.is_baseline

    @property
    def is_compressed(self) -> bool:
        return self.configuration.is_compressed

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
    """decision.json: the verdict, its reason in a sentence, what was chosen, and every row.

    `subject` is the row that the reason speaks of; null when nothing that saves memory ran.
    """

    verdict: Verdict
    reason: str
    chosen: Chosen | None
    subject: Row | None
    min_throughput: float = Field(gt=0)
    rows: list[Row]


def rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows of a sweep's records; columns that a row has no use for are left out."""
    return [Row(**record) for record in records]


def decide(rows: Sequence[Row], *, min_throughput: float = 0.95) -> Decision:
    """The verdict over `rows`, which must hold the baseline at each length and batch.

    A configuration is judged over all its rows: the worst counts. A length at which the baseline
    itself did not run says nothing; if no length says anything, the verdict is "undecided". Raises
    ValueError without compressed rows or without a baseline to judge against.
    """
    judged = _judge_all(rows, min_throughput)
    groups: dict[Configuration, list[Row]] = defaultdict(list)
    for row in judged:
        if row.is_compressed and row.judgement != NO_BASELINE:
            groups[row.configuration].append(row)
    if not any(row.is_compressed for row in rows):
        raise ValueError("no compressed configuration was measured; there is nothing to decide")
    accepted = _saves_most(groups.values(), {ACCEPTABLE})
    unclear = _saves_most(groups.values(), {ACCEPTABLE, UNCLEAR})
    chosen = None
    verdict: Verdict
    if not groups:
        verdict, subject = "undecided", None
        reason = f"Nothing could be measured: {next(row.reason for row in rows if row.reason)}."
    elif accepted:
        verdict, subject = "enable", _slowest(accepted)
        reason = _why(subject, accepted, min_throughput)
        chosen = Chosen(**{name: getattr(subject, name) for name in Chosen.model_fields})
    elif unclear:
        verdict = "undecided"
        subject = _slowest([row for row in unclear if row.judgement == UNCLEAR])
        reason = _why_unclear(subject, unclear, min_throughput)
    else:
        verdict, subject = "do not enable", _nearest_miss(groups.values())
        reason = _why_not(subject, groups.values(), min_throughput)
    return Decision(
        verdict=verdict,
        reason=reason,
        chosen=chosen,
        subject=subject,
        min_throughput=min_throughput,
        rows=judged,
    )


ACCEPTABLE = "acceptable"
NO_BASELINE = "nothing to compare with"
UNCLEAR = "throughput unclear"
LOSSY = "not lossless"
UNCOMPRESSED = "not compressed"


def _judge_all(rows: Sequence[Row], min_throughput: float) -> list[Row]:
    """The rows again, each with its judgement; the baseline is what the others are judged by."""
    baselines = {(row.tokens, row.batch): row for row in rows if row.is_baseline}
    judged = []
    for row in rows:
        if not row.is_baseline:
            baseline = baselines.get((row.tokens, row.batch))
            if baseline is None:
                raise ValueError(f"no uncompressed row at {row.batch} × {row.tokens} tokens")
            judgement = _judge(row, baseline, min_throughput)
            row = row.model_copy(update={"judgement": judgement})
        judged.append(row)
    return judged


def _judge(row: Row, baseline: Row, min_throughput: float) -> str:
    """What stands for or against one row, in a few words.

    Logits and ids have no say: under another attention kernel they move without any compression.
    """
    if not row.is_compressed:
        return UNCOMPRESSED
    if baseline.status != "measured":
        return NO_BASELINE
    if row.status != "measured":
        return "did not run"
    if None in (row.tensor_equal, row.saved_bytes, row.ratio_low, row.ratio_high):
        return "not measured"
    assert row.saved_bytes is not None
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    if not row.tensor_equal:
        return LOSSY
    if row.saved_bytes <= 0:
        return "saves nothing"
    if _raises_peak(row, baseline):
        return "raises peak memory"
    if row.ratio_high < min_throughput:
        return "too slow"
    sure = row.ratio_confidence is not None and row.ratio_confidence >= MIN_CONFIDENCE
    return ACCEPTABLE if sure and row.ratio_low >= min_throughput else UNCLEAR


def _raises_peak(row: Row, baseline: Row) -> bool:
    """Whether both peaks are known and this one is higher by more than the meter's own spread."""
    if row.peak_bytes is None or baseline.peak_bytes is None:
        return False
    return row.peak_bytes > baseline.peak_bytes * (1 + PEAK_TOLERANCE)


def _saves_most(groups: Iterable[list[Row]], allowed: set[str]) -> list[Row] | None:
    """The rows of the configuration that saves most, among those judged only as `allowed`."""
    fit = [group for group in groups if all(row.judgement in allowed for row in group)]
    return max(fit, key=_share_saved, default=None)


def _nearest_miss(groups: Iterable[list[Row]]) -> Row | None:
    """The slowest row of the fastest configuration that is lossless and saves memory."""
    saving = [
        group
        for group in groups
        if all(
            row.status == "measured" and row.tensor_equal and (row.saved_bytes or 0) > 0
            for row in group
        )
    ]
    return max(map(_slowest, saving), key=_throughput, default=None)


def _slowest(group: Iterable[Row]) -> Row:
    return min(group, key=_throughput)


def _throughput(row: Row) -> float:
    return row.ratio_to_baseline or 0.0


def _share_saved(group: Sequence[Row]) -> float:
    raw = sum(row.kv_raw_bytes or 0 for row in group)
    return sum(row.saved_bytes or 0 for row in group) / raw if raw else 0.0


def _why(row: Row, group: Sequence[Row], min_throughput: float) -> str:
    return (
        f"{row.label} holds {_share_saved(group):.0%} less KV, bit for bit the same, and decodes "
        f"at {_ratio(row)} of the uncompressed throughput ({min_throughput:g} is asked)."
    )


def _why_unclear(row: Row, group: Sequence[Row], min_throughput: float) -> str:
    saved = f"{row.label} holds {_share_saved(group):.0%} less KV, bit for bit the same, but"
    where = f"at {row.tokens:,} tokens"
    if row.ratio_low is not None and row.ratio_low >= min_throughput:
        rounds = "1 round" if row.ratio_rounds == 1 else f"{row.ratio_rounds} rounds"
        return f"{saved} {rounds} are too few to trust {_ratio(row)} {where}: measure more rounds."
    return (
        f"{saved} its throughput {where}, {_ratio(row)}, lies on both sides of {min_throughput:g}: "
        "measure more rounds, or on a quieter machine."
    )


def _why_not(row: Row | None, groups: Iterable[list[Row]], min_throughput: float) -> str:
    """What stands against all of them, and how near the nearest came."""
    against = Counter(_worst(group) for group in groups)
    total = sum(against.values())
    if set(against) == {"too slow"}:
        reason = f"No configuration keeps {min_throughput:g} of the uncompressed decode throughput."
    else:
        counts = ", ".join(f"{count} {judgement}" for judgement, count in against.most_common())
        reason = f"None of {total} configurations qualifies: {counts}."
    if row is not None:
        also = "" if row.judgement in ("too slow", UNCLEAR) else f" (but {row.judgement})"
        reason += (
            f" The fastest that saves memory, {row.label}, reaches {_ratio(row)} "
            f"at {row.tokens:,} tokens{also}."
        )
    return reason


def _worst(group: Sequence[Row]) -> str:
    """The judgement that keeps a configuration out."""
    return (
        next(row.judgement for row in group if row.judgement not in (None, ACCEPTABLE, UNCLEAR))
        or ""
    )


def _ratio(row: Row) -> str:
    if row.ratio_to_baseline is None:
        return "an unmeasured share"
    return f"{row.ratio_to_baseline:.2f}× [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
