"""One request as a server sees it: a prefill, then greedy decoding one token at a time.

The steps are driven by hand, not by `generate`, so that two requests can be stepped in turn and
each step read by a clock.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from gaac_lab import prompts
from gaac_lab.attention import switched
from gaac_lab.configuration import Configuration, Integration
from gaac_lab.measure import timed


class Request:
    """A batch of prompts being answered greedily with one cache.

    input_ids: [batch, tokens] int64. After `prefill()` one new token per row is known; each
    `step()` adds another. `logits` are the last position's, [batch, vocabulary], in the model's
    dtype. integration: whose attention decodes (see `Configuration`); between calls the model has
    its own. Prompts are read with the model's own attention, and with integration "fused" by
    what that makes of it, since users switch it on once.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        cache: Any,
        attention_mask: torch.Tensor | None = None,
        *,
        integration: Integration = "none",
    ) -> None:
        self._model, self.cache, self._integration = model, cache, integration
        self._input_ids = input_ids.to(model.device)
        self._mask = None if attention_mask is None else attention_mask.to(model.device)
        self._arguments = _forward_arguments(model)
        self._new: list[torch.Tensor] = []
        self.logits: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        input_ids: torch.Tensor,
        configuration: Configuration,
        attention_mask: torch.Tensor | None = None,
    ) -> Request:
        """A request with an empty cache and the attention that `configuration` names."""
        cache = configuration.make_cache(model.config)
        return cls(model, input_ids, cache, attention_mask, integration=configuration.integration)

    @property
    def batch(self) -> int:
        return int(self._input_ids.shape[0])

    @property
    def new_tokens(self) -> torch.Tensor:
        """[batch, tokens decoded so far]."""
        return torch.cat(self._new, dim=1)

    def prefill(self, *, chunk_tokens: int | None = None) -> float:
        """Read the prompt; seconds until the first new token is known (TTFT), cache included.

        chunk_tokens: read it in chunks of so many tokens, which the cache packs as they come.
        """
        with switched(self._model, "fused" if self._integration == "fused" else "none"):
            _, seconds = timed(self._model.device, lambda: self._read(chunk_tokens))
        return seconds

    def step(self) -> float:
        """Decode one token per row; seconds."""
        if not self._new:
            raise RuntimeError("call prefill() before step()")
        if self._mask is not None:
            one = self._mask.new_ones((self.batch, 1))
            self._mask = torch.cat([self._mask, one], dim=1)
        with switched(self._model, self._integration):
            _, seconds = timed(self._model.device, lambda: self._advance(self._new[-1]))
        return seconds

    def settle(self) -> None:
        """Wait for what the cache packs in the background, so that it takes nothing from whoever
        has the next turn."""
        if hasattr(self.cache, "flush"):
            self.cache.flush()

    def resume(self, other: Request, cache: Any) -> None:
        """Take over `other`'s prompt as read, with `cache` holding the same tokens."""
        self._new, self.logits, self.cache = list(other._new), other.logits, cache
        self._mask = other._mask

    def _read(self, chunk_tokens: int | None) -> None:
        if chunk_tokens is None:
            self._advance(self._input_ids)
            return
        from gaac.hf import prefill

        with torch.inference_mode():
            output = prefill(
                self._model,
                self._input_ids,
                self.cache,
                chunk_tokens=chunk_tokens,
                attention_mask=self._mask,
                **self._arguments.last_only,
            )
            self._take(output)

    def _advance(self, ids: torch.Tensor) -> None:
        extra = {} if self._mask is None else {"attention_mask": self._mask}
        with torch.inference_mode():
            output = self._model(
                input_ids=ids,
                use_cache=True,
                **{self._arguments.cache: self.cache},
                **self._arguments.last_only,
                **extra,
            )
            self._take(output)

    def _take(self, output: Any) -> None:
        self.logits = output.logits[:, -1]
        # The token is needed on the host before the next step: what a server waits for too.
        self._new.append(self.logits.argmax(-1, keepdim=True))


@dataclass(frozen=True)
class _ForwardArguments:
    cache: str
    last_only: dict[str, int]


def _forward_arguments(model: Any) -> _ForwardArguments:
    from gaac.hf import cache_argument

    parameters = inspect.signature(model.forward).parameters
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    return _ForwardArguments(cache_argument(model), last_only)


def warm_up(model: Any, configuration: Configuration, *, tokens: int = 32, steps: int = 2) -> None:
    """A short request that is thrown away: a first prefill and first steps are never typical.

    It packs and unpacks blocks too, so that no codec is loaded while a clock or a meter runs.
    """
    if configuration.is_compressed:
        short = {"block_tokens": tokens // 2, "window": 0}
        configuration = configuration.model_copy(update=short)
    ids = torch.arange(tokens).remainder(model.config.get_text_config().vocab_size).unsqueeze(0)
    request = Request.of(model, ids, configuration)
    request.prefill()
    for _ in range(steps):
        request.step()
    request.settle()


def prompt_batch(
    tokenizer: Any, *, tokens: int, batch: int = 1, first: str = "long_document"
) -> tuple[torch.Tensor, list[prompts.Prompt]]:
    """[batch, tokens] ids and their prompts: `first`, then the others of the set in turn."""
    others = [name for name in prompts.names() if name != first]
    order = [first, *others]
    chosen = [
        prompts.build(order[row % len(order)], tokens, tokenizer)
        for row in range(min(batch, len(order)))
    ]
    rows = [chosen[row % len(chosen)] for row in range(batch)]
    return torch.cat([prompt.input_ids for prompt in rows]), chosen
