"""One variable at a time from a reference configuration, each point a complete run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gaac_lab import codec_speed, memory_probe
from gaac_lab.baseline import beyond_context, memory_fields, require_room, series_fields
from gaac_lab.compare import Comparison, compare
from gaac_lab.configuration import BASELINE, Configuration, Integration
from gaac_lab.measure import Failure, attempt
from gaac_lab.request import prompt_batch

Record = dict[str, Any]


def points(
    reference: Configuration,
    *,
    integrations: Sequence[Integration] = (),
    block_sizes: Sequence[int] = (),
    levels: Sequence[int] = (),
    scopes: Sequence[str] = (),
    windows: Sequence[int] = (),
    peers: Sequence[str] = (),
) -> list[tuple[str, Configuration]]:
    """(variable, configuration) pairs: the baseline, the reference, then one change at a time.

    A value that equals the reference's adds no point. Peers run with the reference's other
    settings, but materialised: only gaac's pages can be read in place.
    """

    def changed(**update: Any) -> Configuration:
        return Configuration(**{**reference.model_dump(), **update})

    candidates = [("baseline", BASELINE), ("reference", reference)]
    candidates += [("integration", changed(integration=name)) for name in integrations]
    candidates += [("block_tokens", changed(block_tokens=size)) for size in block_sizes]
    candidates += [("level", changed(level=level)) for level in levels]
    candidates += [("scope", changed(scope=scope)) for scope in scopes]
    candidates += [("window", changed(window=window)) for window in windows]
    candidates += [
        ("codec", changed(codec=peer, level=None, integration="materialise")) for peer in peers
    ]
    unique: dict[Configuration, str] = {}
    for variable, configuration in candidates:
        unique.setdefault(configuration, variable)
    return [(variable, configuration) for configuration, variable in unique.items()]


def run(
    model: Any,
    tokenizer: Any,
    points: Sequence[tuple[str, Configuration]],
    *,
    name: str,
    prompt: str,
    lengths: Sequence[int],
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Record]:
    """One record a point and length, ready for `decision.rows`.

    `name` is what the model was loaded from, for the memory run. A length that cannot run keeps its
    records, with the reason and no numbers.
    """
    records = []
    for tokens in lengths:
        reason = beyond_context(model, tokens + new_tokens)
        if reason is not None:
            say(reason)
            outcomes = [{"status": "skipped", "reason": reason} for _ in points]
        else:
            say(f"{len(points)} configurations at {tokens:,} tokens")
            outcomes = _at_length(
                model,
                tokenizer,
                [c for _, c in points],
                name,
                prompt,
                tokens,
                new_tokens,
                rounds,
                say,
            )
        records += [
            {
                "variable": variable,
                "label": configuration.label,
                **configuration.model_dump(),
                "tokens": tokens,
                "batch": 1,
                **outcome,
            }
            for (variable, configuration), outcome in zip(points, outcomes, strict=True)
        ]
    return records


def _at_length(
    model: Any,
    tokenizer: Any,
    configurations: Sequence[Configuration],
    name: str,
    prompt: str,
    tokens: int,
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[Record]:
    room = attempt(lambda: require_room(model, tokens + new_tokens))
    if isinstance(room, Failure):
        return [comparison_fields(room) for _ in configurations]
    ids, (built,) = prompt_batch(tokenizer, tokens=tokens, first=prompt)
    compared = compare(model, ids, configurations, new_tokens=new_tokens, rounds=rounds, say=say)
    if all(isinstance(outcome, Failure) for outcome in compared):
        return [comparison_fields(outcome) for outcome in compared]
    say("codecs alone")
    speeds = codec_speed.measure(model, ids, configurations)
    say("peak memory")
    jobs = [
        memory_probe.MemoryJob(configuration=configuration, prompt=prompt, tokens=tokens)
        for configuration in configurations
    ]
    peaks = memory_probe.measure(jobs, model=model, tokenizer=tokenizer, name=name)
    return [
        {
            **memory_fields(peak),
            **comparison_fields(outcome),
            **speed,
            "prompt": built.name,
            "prompt_sha256": built.sha256,
        }
        for outcome, speed, peak in zip(compared, speeds, peaks, strict=True)
    ]


def comparison_fields(outcome: Comparison | Failure) -> Record:
    """Columns of a comparison, units in the names; a failure keeps its kind and reason."""
    if isinstance(outcome, Failure):
        return {"status": outcome.kind, "reason": outcome.reason}
    return {
        "status": "measured",
        "reason": None,
        **series_fields("ttft_s", outcome.ttft),
        **series_fields("decode_tok_s", outcome.decode_tok_s),
        "step_s": outcome.step.median,
        "ratio_to_baseline": outcome.ratio.median,
        "ratio_low": outcome.ratio.low,
        "ratio_high": outcome.ratio.high,
        "ratio_n": outcome.ratio.n,
        "ratio_rounds": outcome.ratio.rounds,
        "ratio_confidence": outcome.ratio.confidence,
        "kv_raw_bytes": outcome.kv_raw_bytes,
        "kv_stored_bytes": outcome.kv_stored_bytes,
        "read_gb_s": outcome.kv_stored_bytes / outcome.step.median / 1e9,
        "tensor_equal": outcome.tensor_equal,
        "logit_max_abs_diff": outcome.logit_max_abs_diff,
        "tokens_equal": outcome.tokens_equal,
        "eager_logit_max_abs_diff": outcome.eager_logit_max_abs_diff,
    }
