"""What a route costs: in perplexity, in exact recall, and in the time of a decode step.

Every route starts from the same reading of the same prompt and runs the same steps under the same
attention kernel, so what differs comes from its cache. A lossless route must come out equal to the
last bit, which shows that nothing else differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from gaac.hf import cache_argument
from gaac_lab import kv, planted, prompts
from gaac_lab.attention_weights import attending
from gaac_lab.lossy import Route
from gaac_lab.measure import paired_ratio, quiet_collector, timed
from gaac_lab.prefilled import BEST_CASE, Prefilled, read

CHUNK_TOKENS = 8  # a token policy lets a query see up to one less than that over its budget
TAIL_TOKENS = 256  # more than any prompt's question and template take

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Forced:
    """What the model said of given tokens: nll in nats, float32, and its own choice; both [n]."""

    nll: torch.Tensor
    chosen: torch.Tensor


@dataclass
class _Tape:
    """What the texts left behind for one route."""

    nll: list[torch.Tensor] = field(default_factory=list)
    raw_bytes: list[int] = field(default_factory=list)
    stored_bytes: list[int] = field(default_factory=list)
    exact: bool = True


def texts(
    tokenizer: Any, prompt_names: Sequence[str], *, context_tokens: int, eval_tokens: int
) -> list[torch.Tensor]:
    """[1, context_tokens + eval_tokens + 1] ids of each prompt's beginning, without its question.

    One more than is read: the last token is only predicted.
    """
    wanted = context_tokens + eval_tokens + 1
    return [
        prompts.build(name, wanted + TAIL_TOKENS, tokenizer).input_ids[:, :wanted]
        for name in prompt_names
    ]


@torch.no_grad()
def forced(
    model: Any, cache: Any, input_ids: torch.Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Forced:
    """Go on from `cache` with [1, n + 1] given ids; what the model said of the last n of them.

    All but the last are read into the cache, `chunk_tokens` at a time.
    """
    ids, argument = input_ids.to(model.device), cache_argument(model)
    nll, chosen = [], []
    with attending(model, cache):
        for start in range(0, ids.shape[1] - 1, chunk_tokens):
            stop = min(start + chunk_tokens, ids.shape[1] - 1)
            output = model(input_ids=ids[:, start:stop], use_cache=True, **{argument: cache})
            logits = output.logits[0].float()
            following = ids[0, start + 1 : stop + 1]
            nll.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
            chosen.append(logits.argmax(-1))
    return Forced(torch.cat(nll), torch.cat(chosen))


def perplexity(
    model: Any,
    routes: Sequence[Route],
    ids: Sequence[torch.Tensor],
    *,
    context_tokens: int,
    chunk_tokens: int = CHUNK_TOKENS,
    say: Say = lambda line: None,
) -> pd.DataFrame:
    """One row a route, over all texts [1, tokens] together; the first route must be uncompressed.

    The first `context_tokens` of a text are read once, the rest is given token by token. Columns:
    route, kind, setting, note; kv_raw_bytes, kv_stored_bytes (after reading, mean of a text),
    share_of_raw; perplexity, perplexity_ratio (to uncompressed), nll_diff (mean, nats a token),
    nll_diff_se (of the token-by-token differences, as if tokens were independent), eval_tokens;
    exact: K and V of every layer and every nll are, bit for bit, those of the uncompressed cache.
    """
    _require_reference(routes)
    tapes = {route.name: _Tape() for route in routes}
    for number, text in enumerate(ids, 1):
        say(f"perplexity, text {number} of {len(ids)}")
        prefilled = read(model, text[:, :context_tokens])
        _read_on(model, routes, prefilled, text[:, context_tokens:], chunk_tokens, tapes)
    reference = torch.cat(tapes[routes[0].name].nll).double()
    return pd.DataFrame(_perplexity_row(route, tapes[route.name], reference) for route in routes)


def recall(
    model: Any,
    tokenizer: Any,
    routes: Sequence[Route],
    *,
    context_tokens: int,
    depths: Sequence[float],
    facts_per_depth: int,
    chunk_tokens: int = CHUNK_TOKENS,
    seed: int = 0,
    say: Say = lambda line: None,
) -> pd.DataFrame:
    """One row a route and depth: route, kind, depth, hits, trials.

    There are `facts_per_depth` texts a depth, each with one planted fact. A hit is the whole
    number: at each of its tokens the model's first choice, given those before it. The text was read
    before the question was known. The uncompressed cache shows what the model itself can do.
    """
    hits = {(route.name, depth): 0 for route in routes for depth in depths}
    for index, depth in enumerate(depths):
        say(f"recall, depth {index + 1} of {len(depths)}")
        for number in range(facts_per_depth):
            hay = planted.haystack(
                tokenizer,
                tokens=context_tokens,
                depth=depth,
                seed=seed + index * facts_per_depth + number,
            )
            prefilled = read(model, hay.input_ids)
            for route in routes:
                cache = route.make(model.config, prefilled)
                hits[route.name, depth] += _knows(model, tokenizer, cache, hay.fact, chunk_tokens)
    return pd.DataFrame(
        {
            "route": route.name,
            "kind": route.kind,
            "depth": depth,
            "hits": hits[route.name, depth],
            "trials": facts_per_depth,
        }
        for route in routes
        for depth in depths
    )


def step_ratios(
    model: Any, routes: Sequence[Route], prefilled: Prefilled, *, steps: int, rounds: int
) -> pd.DataFrame:
    """One row a route: route, step_s (median), step_ratio, step_ratio_low, step_ratio_high.

    step_ratio is decode speed as a multiple of the uncompressed cache's (above 1 is faster), from
    steps that took turns. These caches are plain torch: it is the time of this implementation, not
    of the idea.
    """
    _require_reference(routes)
    rows = []
    for route in routes:
        taken = [_one_round(model, routes[0], route, prefilled, steps) for _ in range(rounds)]
        ratio = paired_ratio(taken)
        own = sorted(seconds for pairs in taken for _, seconds in pairs)
        rows.append(
            {
                "route": route.name,
                "step_s": own[len(own) // 2],
                "step_ratio": ratio.median,
                "step_ratio_low": ratio.low,
                "step_ratio_high": ratio.high,
            }
        )
    return pd.DataFrame(rows)


def with_recall(table: pd.DataFrame, by_depth: pd.DataFrame) -> pd.DataFrame:
    """`table` with recall_hits and recall_trials of each route, over all depths."""
    total = by_depth.groupby("route", sort=False)[["hits", "trials"]].sum().reset_index()
    total = total.rename(columns={"hits": "recall_hits", "trials": "recall_trials"})
    return table.merge(total, on="route", how="left", validate="one_to_one")


def _read_on(
    model: Any,
    routes: Sequence[Route],
    prefilled: Prefilled,
    rest: torch.Tensor,
    chunk_tokens: int,
    tapes: dict[str, _Tape],
) -> None:
    reference: tuple[Any, torch.Tensor] | None = None
    for route in routes:
        cache, tape = route.make(model.config, prefilled), tapes[route.name]
        tape.raw_bytes.append(kv.raw_bytes(prefilled.cache))
        tape.stored_bytes.append(kv.stored_bytes(cache))
        nll = forced(model, cache, rest, chunk_tokens=chunk_tokens).nll
        reference = reference or (cache, nll)
        tape.nll.append(nll)
        tape.exact &= kv.same_bits(reference[1], nll) and kv.same_cache(reference[0], cache)


def _perplexity_row(route: Route, tape: _Tape, reference: torch.Tensor) -> dict[str, Any]:
    nll = torch.cat(tape.nll).double()
    diff = nll - reference
    raw, stored = sum(tape.raw_bytes), sum(tape.stored_bytes)
    return {
        "route": route.name,
        "kind": route.kind,
        "setting": route.setting,
        "kv_raw_bytes": raw // len(tape.raw_bytes),
        "kv_stored_bytes": round(stored / len(tape.stored_bytes)),
        "share_of_raw": stored / raw,
        "perplexity": math.exp(nll.mean()),
        "perplexity_ratio": math.exp(diff.mean()),
        "nll_diff": float(diff.mean()),
        "nll_diff_se": float(diff.std() / math.sqrt(len(diff))),
        "eval_tokens": len(diff),
        "exact": tape.exact,
        "note": route.note if route.kind in ("none", "lossless") else f"{route.note}; {BEST_CASE}",
    }


def _knows(model: Any, tokenizer: Any, cache: Any, fact: planted.Fact, chunk_tokens: int) -> bool:
    """Whether the whole number is the model's first choice; the question goes into `cache`."""
    ids, answer_tokens = planted.question(tokenizer, fact)
    said = forced(model, cache, ids, chunk_tokens=chunk_tokens).chosen.cpu()
    return torch.equal(said[-answer_tokens:], ids[0, -answer_tokens:])


def _one_round(
    model: Any, reference: Route, route: Route, prefilled: Prefilled, steps: int
) -> list[tuple[float, float]]:
    """(seconds of the uncompressed step, seconds of the route's), after a pair thrown away."""
    other, own = (one.make(model.config, prefilled) for one in (reference, route))
    token = prefilled.logits[:1].argmax(-1, keepdim=True)
    pairs = []
    with quiet_collector():
        for index in range(steps + 1):
            order = (own, other) if index % 2 else (other, own)
            seconds = {id(cache): _step_s(model, cache, token) for cache in order}
            pairs.append((seconds[id(other)], seconds[id(own)]))
    return pairs[1:]


@torch.no_grad()
def _step_s(model: Any, cache: Any, token: torch.Tensor) -> float:
    argument = cache_argument(model)
    with attending(model, cache):
        work = lambda: model(input_ids=token, use_cache=True, **{argument: cache})  # noqa: E731
        _, seconds = timed(model.device, work)
    return seconds


def _require_reference(routes: Sequence[Route]) -> None:
    if not routes or routes[0].kind != "none":
        raise ValueError("The first route must be the uncompressed one, which others stand beside.")
    if len({route.name for route in routes}) < len(routes):
        raise ValueError("Two routes have one name: rename one of them.")
