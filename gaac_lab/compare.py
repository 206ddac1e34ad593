"""A configuration against the uncompressed cache, step by step, in one process.

Both answer the same prompt. After each has read it, they take turns: one decode step with the
uncompressed cache, one with the other, the order changing from step to step. Whatever the machine
does meanwhile, it does to both, and each pair of neighbouring steps gives one ratio.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaac_lab import kv
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.measure import Failure, Ratio, Series, attempt, paired_ratio, quiet_collector
from gaac_lab.request import Request, warm_up


@dataclass(frozen=True)
class Comparison:
    """What one configuration did beside the uncompressed cache.

    ttft, step: seconds. ratio: decode throughput as a multiple of the uncompressed cache's (above 1
    is faster). tensor_equal: every layer's K and V equal bit for bit; tokens_equal: the same ids;
    logit_max_abs_diff: over the logits of every step. The prefills do not take turns, so TTFT has
    no ratio.
    """

    configuration: Configuration
    tokens: int
    batch: int
    ttft: Series
    step: Series
    ratio: Ratio
    kv_raw_bytes: int
    kv_stored_bytes: int
    tensor_equal: bool
    logit_max_abs_diff: float
    tokens_equal: bool

    @property
    def decode_tok_s(self) -> Series:
        """New tokens per second, over the whole batch."""
        rate = self.step.rate()
        return Series(
            rate.median * self.batch, rate.low * self.batch, rate.high * self.batch, rate.n
        )


@dataclass
class _Tape:
    """What the rounds of one configuration left behind."""

    ttft_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_rounds: list[list[tuple[float, float]]] = field(default_factory=list)
    raw_bytes: int = 0
    stored_bytes: int = 0
    tensor_equal: bool = True
    tokens_equal: bool = True
    logit_diff: float = 0.0
    failure: Failure | None = None


def compare(
    model: Any,
    input_ids: torch.Tensor,
    configurations: Sequence[Configuration],
    *,
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Comparison | Failure]:
    """Each configuration against the uncompressed cache, over `rounds` complete runs, in order.

    input_ids: [batch, tokens]. The uncompressed prompt is read anew in every round. `BASELINE`
    among the configurations is measured like any other: its ratio, near 1, shows the noise. A run
    that ends for want of memory gives a `Failure` in its place.
    """
    tapes = [_Tape() for _ in configurations]
    attempt(lambda: warm_up(model, BASELINE))  # what fails here fails again where it is recorded
    for configuration, tape in zip(configurations, tapes, strict=True):
        warm = attempt(lambda: warm_up(model, configuration))  # noqa: B023
        tape.failure = warm if isinstance(warm, Failure) else None
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        outcome = attempt(lambda: _read_prompt(model, input_ids, BASELINE))
        for configuration, tape in zip(configurations, tapes, strict=True):
            if tape.failure is None:
                tape.failure = (
                    outcome
                    if isinstance(outcome, Failure)
                    else _one_round(model, input_ids, configuration, outcome[0], new_tokens, tape)
                )
    return [
        tape.failure or _comparison(configuration, input_ids, tape)
        for configuration, tape in zip(configurations, tapes, strict=True)
    ]


def _read_prompt(
    model: Any, input_ids: torch.Tensor, configuration: Configuration
) -> tuple[Request, float]:
    """A request that has read its prompt, and its TTFT in seconds."""
    request = Request(model, input_ids, configuration.make_cache(model.config))
    with quiet_collector():
        return request, request.prefill()


def _one_round(
    model: Any,
    input_ids: torch.Tensor,
    configuration: Configuration,
    read: Request,
    new_tokens: int,
    tape: _Tape,
) -> Failure | None:
    outcome = attempt(lambda: _run_pair(model, input_ids, configuration, read, new_tokens, tape))
    return outcome if isinstance(outcome, Failure) else None


def _run_pair(
    model: Any,
    input_ids: torch.Tensor,
    configuration: Configuration,
    read: Request,
    new_tokens: int,
    tape: _Tape,
) -> None:
    request, ttft_s = _read_prompt(model, input_ids, configuration)
    baseline = Request(model, input_ids, None)
    with torch.inference_mode():
        baseline.resume(read, copy.deepcopy(read.cache))
    pairs = []
    with quiet_collector():
        for index in range(new_tokens):
            if index % 2:
                own_s, baseline_s = request.step(), baseline.step()
            else:
                baseline_s, own_s = baseline.step(), request.step()
            pairs.append((baseline_s, own_s))
            diff = max_abs_diff(baseline.logits, request.logits)
            tape.logit_diff = max(tape.logit_diff, diff)
    tape.ttft_s.append(ttft_s)
    tape.step_s += [own for _, own in pairs]
    tape.step_rounds.append(pairs)
    tape.raw_bytes = kv.raw_bytes(request.cache)
    tape.stored_bytes = kv.stored_bytes(request.cache)
    tape.tensor_equal &= kv.same_cache(baseline.cache, request.cache)
    tape.tokens_equal &= torch.equal(baseline.new_tokens, request.new_tokens)


def max_abs_diff(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Largest absolute difference of two logit tensors, in float32; 0.0 for equal bits.

    Where one holds a NaN that the other has not, the difference is the largest float32.
    """
    if a is None or b is None:
        raise ValueError("there are no logits before prefill()")
    if kv.same_bits(a, b):
        return 0.0
    largest = torch.finfo(torch.float32).max
    return float((a.float() - b.float()).abs().nan_to_num(nan=largest, posinf=largest).max())


def _comparison(configuration: Configuration, input_ids: torch.Tensor, tape: _Tape) -> Comparison:
    batch, tokens = input_ids.shape
    return Comparison(
        configuration=configuration,
        tokens=int(tokens),
        batch=int(batch),
        ttft=Series.of(tape.ttft_s),
        step=Series.of(tape.step_s),
        ratio=paired_ratio(tape.step_rounds),
        kv_raw_bytes=tape.raw_bytes,
        kv_stored_bytes=tape.stored_bytes,
        tensor_equal=tape.tensor_equal,
        logit_max_abs_diff=tape.logit_diff,
        tokens_equal=tape.tokens_equal,
    )
