"""A configuration against the uncompressed cache, step by step, in one process.

Both answer the same prompt. After each has read it, they take turns: one decode step with the
uncompressed cache, one with the other, the order changing from step to step. Whatever the machine
does meanwhile, it does to both, and each pair of neighbouring steps gives one ratio. Each step runs
under the attention that its configuration names; switching lies outside of the clock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaac_lab import kv, twin
from gaac_lab.configuration import BASELINE, EAGER, Configuration
from gaac_lab.measure import Failure, Ratio, Series, attempt, paired_ratio, quiet_collector
from gaac_lab.request import Request, warm_up


@dataclass(frozen=True)
class Comparison:
    """What one configuration did beside another, the uncompressed cache unless said otherwise.

    ttft, step: seconds. ratio: decode throughput as a multiple of the other's (above 1 is faster).
    tensor_equal: every layer's K and V are, bit for bit, what uncompressed storage gives under the
    same attention; where that is not the other one's, the logits of each step too, against a twin
    (`gaac_lab.twin`), in one round. logit_max_abs_diff: between the two, over the logits of every
    step up to the first token that differs; tokens_equal: the same ids. eager_logit_max_abs_diff:
    the same between transformers' eager attention and the model's own, where attentions differ:
    how far two kernels are apart without any compression. The prefills do not take turns, so TTFT
    has no ratio.
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
    eager_logit_max_abs_diff: float | None = None

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
    against: Configuration = BASELINE,
    say: Callable[[str], None] = lambda line: None,
) -> list[Comparison | Failure]:
    """Each configuration against the uncompressed cache, over `rounds` complete runs, in order.

    input_ids: [batch, tokens]. against: what to compare with instead of the uncompressed cache; its
    prompt is read anew in every round. `against` among the configurations is measured like any
    other: its ratio, near 1, shows the noise. A run that ends for want of memory gives a `Failure`
    in its place.
    """
    tapes = [_Tape() for _ in configurations]
    attempt(lambda: warm_up(model, against))  # what fails here fails again where it is recorded
    for configuration, tape in zip(configurations, tapes, strict=True):
        warm = attempt(lambda: warm_up(model, configuration))  # noqa: B023
        tape.failure = warm if isinstance(warm, Failure) else None
    kernels_differ = not all(configuration.keeps_attention for configuration in configurations)
    eager_diff: float | Failure | None = None
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        outcome = attempt(lambda: _read_prompt(model, input_ids, against))
        if number == 0 and kernels_differ and against.is_baseline and isinstance(outcome, tuple):
            read, _ = outcome
            eager_diff = attempt(lambda: _eager_diff(model, input_ids, read, new_tokens))  # noqa: B023
        for configuration, tape in zip(configurations, tapes, strict=True):
            if tape.failure is None:
                pair = (configuration, against)
                tape.failure = (
                    outcome
                    if isinstance(outcome, Failure)
                    else _one_round(model, input_ids, pair, outcome[0], new_tokens, tape)
                )
    yardstick = None if isinstance(eager_diff, Failure) else eager_diff
    return [
        tape.failure or _comparison(configuration, input_ids, tape, yardstick)
        for configuration, tape in zip(configurations, tapes, strict=True)
    ]


def _read_prompt(
    model: Any, input_ids: torch.Tensor, configuration: Configuration
) -> tuple[Request, float]:
    """A request that has read its prompt, and its TTFT in seconds."""
    request = Request.of(model, input_ids, configuration)
    with quiet_collector():
        seconds = request.prefill()
    request.settle()
    return request, seconds


def _continued(
    model: Any, input_ids: torch.Tensor, configuration: Configuration, read: Request
) -> Request:
    """A request that goes on from a prompt that another has read; that one stays as it is."""
    request = Request(model, input_ids, None, integration=configuration.integration)
    with torch.inference_mode():
        request.resume(read, copy.deepcopy(read.cache))
    return request


def _one_round(
    model: Any,
    input_ids: torch.Tensor,
    pair: tuple[Configuration, Configuration],
    read: Request,
    new_tokens: int,
    tape: _Tape,
) -> Failure | None:
    outcome = attempt(lambda: _run_pair(model, input_ids, pair, read, new_tokens, tape))
    return outcome if isinstance(outcome, Failure) else None


def _run_pair(
    model: Any,
    input_ids: torch.Tensor,
    pair: tuple[Configuration, Configuration],
    read: Request,
    new_tokens: int,
    tape: _Tape,
) -> None:
    configuration, against = pair
    request, ttft_s = _read_prompt(model, input_ids, configuration)
    other = _continued(model, input_ids, against, read)
    pairs, logits = [], [_kept_logits(request)]
    with quiet_collector():
        for index in range(new_tokens):
            agree = torch.equal(other.new_tokens, request.new_tokens)
            pairs.append(_turn(other, request, own_first=bool(index % 2)))
            logits.append(_kept_logits(request))
            if agree:
                tape.logit_diff = max(tape.logit_diff, max_abs_diff(other.logits, request.logits))
    tape.ttft_s.append(ttft_s)
    tape.step_s += [own for _, own in pairs]
    tape.raw_bytes = kv.raw_bytes(request.cache)
    tape.stored_bytes = kv.stored_bytes(request.cache)
    tape.tokens_equal &= torch.equal(other.new_tokens, request.new_tokens)
    if configuration.raw_twin == against:
        tape.tensor_equal &= kv.same_cache(other.cache, request.cache)
    elif not tape.step_rounds:
        tape.tensor_equal = twin.agrees(model, input_ids, configuration, request, logits)
    tape.step_rounds.append(pairs)


def _kept_logits(request: Request) -> torch.Tensor:
    """A copy: what the model gives back may be a view of the logits of a whole prompt."""
    assert request.logits is not None
    return request.logits.clone()


def _turn(other: Request, request: Request, *, own_first: bool) -> tuple[float, float]:
    """One step of each; (the other's seconds, the request's own)."""
    seconds = {}
    for one in (request, other) if own_first else (other, request):
        seconds[one] = one.step()
        one.settle()
    return seconds[other], seconds[request]


def _eager_diff(model: Any, input_ids: torch.Tensor, read: Request, new_tokens: int) -> float:
    """Largest difference of logits between the model's own attention and transformers' eager."""
    own = _continued(model, input_ids, BASELINE, read)
    eager = _continued(model, input_ids, EAGER, read)
    largest = 0.0
    for _ in range(new_tokens):
        if not torch.equal(own.new_tokens, eager.new_tokens):
            break
        own.step()
        eager.step()
        largest = max(largest, max_abs_diff(own.logits, eager.logits))
    return largest


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


def _comparison(
    configuration: Configuration, input_ids: torch.Tensor, tape: _Tape, eager_diff: float | None
) -> Comparison:
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
        eager_logit_max_abs_diff=None if configuration.keeps_attention else eager_diff,
    )
