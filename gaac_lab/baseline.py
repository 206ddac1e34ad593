"""The uncompressed cache at several prompt lengths: TTFT, decode tokens/s, peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gaac_lab import kv, memory, memory_probe, prompts
from gaac_lab.configuration import BASELINE
from gaac_lab.measure import Failure, Series, attempt, quiet_collector
from gaac_lab.request import Request, warm_up

Record = dict[str, Any]


def run(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    prompt: str,
    lengths: Sequence[int],
    new_tokens: int,
    repeats: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Record]:
    """One record a length, in order; `name` is what the model was loaded from.

    Keys: tokens, status ("measured", "out_of_memory", "skipped", ...), reason, ttft_s and
    decode_tok_s with their quartiles (_low, _high) and N, kv_raw_bytes, the peaks of
    `memory_probe.measure`, prompt and prompt_sha256. A length that cannot run keeps its record,
    with the reason and no numbers.
    """
    records = []
    for tokens in lengths:
        say(f"{tokens:,} tokens")
        reason = beyond_context(model, tokens + new_tokens)
        if reason is not None:
            records.append(_without_numbers(tokens, Failure("skipped", reason)))
            continue
        timing = attempt(
            lambda: _time(model, tokenizer, prompt, tokens, new_tokens, repeats)  # noqa: B023
        )
        if isinstance(timing, Failure):
            records.append(_without_numbers(tokens, timing))
            continue
        job = memory_probe.MemoryJob(configuration=BASELINE, prompt=prompt, tokens=tokens)
        (peaks,) = memory_probe.measure([job], model=model, tokenizer=tokenizer, name=name)
        records.append({**memory_fields(peaks), **timing})
    return records


def beyond_context(model: Any, tokens: int) -> str | None:
    """Why `tokens` do not fit the model's context, or None when they do or it states no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or tokens <= limit:
        return None
    return f"{tokens:,} tokens are beyond this model's context of {limit:,}"


def memory_fields(peaks: Record | Failure) -> Record:
    """Columns of a peak measurement; a failure keeps its reason and leaves the numbers null."""
    if isinstance(peaks, Failure):
        return {"peak_bytes": None, "memory_method": f"not measured: {peaks.reason}"}
    return peaks


def series_fields(name: str, series: Series) -> Record:
    """{name: median, name_low, name_high, name_n} of a series."""
    return {
        name: series.median,
        f"{name}_low": series.low,
        f"{name}_high": series.high,
        f"{name}_n": series.n,
    }


def require_room(model: Any, tokens: int, batch: int = 1) -> None:
    """Raise MemoryError when two copies of the KV do not fit: one held, one as torch.cat grows."""
    from gaac_lab.budget import UnsupportedConfig, kv_budget

    dtype = str(model.dtype).removeprefix("torch.")
    try:
        budget = kv_budget(model.config, seq_len=tokens, batch=batch, dtype=dtype)
    except UnsupportedConfig:
        return  # a model whose KV cannot be counted beforehand is still measured
    need = 2 * budget.total_bytes
    memory.require(need, model.device, f"the KV cache of {batch} × {tokens:,} tokens")


def _time(
    model: Any, tokenizer: Any, name: str, tokens: int, new_tokens: int, repeats: int
) -> Record:
    require_room(model, tokens + new_tokens)
    prompt = prompts.build(name, tokens, tokenizer)
    warm_up(model, BASELINE)
    ttft_s, step_s = [], []
    for _ in range(repeats):
        request = Request.of(model, prompt.input_ids, BASELINE)
        with quiet_collector():
            ttft_s.append(request.prefill())
            step_s += [request.step() for _ in range(new_tokens)]
    return {
        "tokens": prompt.tokens,
        "status": "measured",
        "reason": None,
        **series_fields("ttft_s", Series.of(ttft_s)),
        **series_fields("decode_tok_s", Series.of(step_s).rate()),
        "kv_raw_bytes": kv.raw_bytes(request.cache),
        "prompt": prompt.name,
        "prompt_sha256": prompt.sha256,
    }


def _without_numbers(tokens: int, failure: Failure) -> Record:
    return {"tokens": tokens, "status": failure.kind, "reason": failure.reason}
