"""What the installed transformers really keeps: run a model of the same family and count.

The model is small where the cache cannot see it (`gaac_lab.shrink`) and has weights of zero, for
what a cache holds does not depend on them. It must hold the same at two sizes, or, where head_dim
had to be written in, the same as at full size. If there is no such small model, as where keys are
as wide as the model, the full-size one runs on torch's meta device: every operation of the model
and its cache, on tensors that have a shape and a dtype but no memory.

Bytes are counted by what a tensor shows. A window's keys are a view, and its storage can be longer
until the next step; `gaac_lab.kv.stored_bytes` counts that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gaac_lab.families.config_fields import read_config
from gaac_lab.shrink import Shrunk, has_head_dim, shrink

DTYPES = ("float32", "bfloat16", "float16")
# The cache is read at these lengths: a prompt and one step, then a longer prompt and two steps.
LENGTHS = (2, 3, 40, 41, 42)
ENCODER_TOKENS = 7
MOST_PARAMETERS = 200_000_000


class CannotProbe(ValueError):
    """The installed transformers cannot be asked about this model; the message says why."""


@dataclass(frozen=True)
class ProbedLayer:
    """What one layer of the cache keeps for one sequence.

    kept_tokens: the most tokens that it holds between steps; None for all of them.
    state_bytes: the part that does not grow.
    """

    kind: str
    bytes_per_token: int
    kept_tokens: int | None
    state_bytes: int


@dataclass(frozen=True)
class Probed:
    """The cache of one model as this transformers builds it; bytes are for one sequence.

    device: "cpu" if the real tensors of a small model were counted, "meta" if the shapes of the
    full-size one. cross_bytes_per_encoder_token: of the second cache of an encoder-decoder,
    None where there is none.
    """

    layers: tuple[ProbedLayer, ...]
    cross_bytes_per_encoder_token: int | None
    max_context_tokens: int | None
    dtype: str
    device: str
    transformers_version: str

    @property
    def bytes_per_token(self) -> int:
        """What one more token adds when every window is full that the context can fill."""
        context = self.max_context_tokens or float("inf")
        return sum(
            layer.bytes_per_token
            for layer in self.layers
            if layer.kept_tokens is None or layer.kept_tokens >= context - 1
        )

    @property
    def bytes_per_token_below_window(self) -> int:
        """What one more token adds before any window is full."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def fixed_state_bytes_per_sequence(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def window_kept_tokens(self) -> int | None:
        """The most tokens that a layer with a window keeps, None if there is none."""
        return max((n for n in (layer.kept_tokens for layer in self.layers) if n), default=None)

    @property
    def layers_with_kv(self) -> int:
        return sum(layer.bytes_per_token > 0 for layer in self.layers)

    def total_bytes(self, seq_len: int, batch: int = 1) -> int:
        """Bytes between two steps for `batch` sequences of `seq_len` tokens, without the state."""
        total = 0
        for layer in self.layers:
            kept = seq_len if layer.kept_tokens is None else min(seq_len, layer.kept_tokens)
            total += layer.bytes_per_token * kept
        return total * batch


@dataclass(frozen=True)
class _Reading:
    """A layer at one length: its class, its window if it has one, and bytes by attribute."""

    kind: str
    window: int | None
    held: Mapping[str, int]


_Layers = tuple[tuple[ProbedLayer, ...], int | None]


def probe(config: Any, *, dtype: str = "bfloat16") -> Probed:
    """Run the model of a config (anything that `config_fields.read_config` reads) and count.

    `dtype` is the model's, and so the cache's. Takes a second or two. Raises CannotProbe, with the
    reason, for a model that this transformers does not know, cannot run so, or whose cache does
    not grow by the same bytes with every token; UnsupportedConfig for a file that cannot be read.
    """
    import transformers

    if dtype not in DTYPES:
        raise CannotProbe(f"dtype={dtype!r}: a model runs in one of {', '.join(DTYPES)}.")
    with _quiet():
        auto, built = _model_config(config)
        layers, cross, device = _measure(auto, built, getattr(torch, dtype))
        context = getattr(built, "max_position_embeddings", None)
    return Probed(layers, cross, context, dtype, device, transformers.__version__)


def _model_config(config: Any) -> tuple[Any, Any]:
    """(auto class, config object of the language model)."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, __version__

    full = _config_object(config)
    text = full.get_text_config(decoder=True)
    if full.is_encoder_decoder and type(full) in AutoModelForSeq2SeqLM._model_mapping:
        return AutoModelForSeq2SeqLM, full
    # Of a flat encoder-decoder the text config is a copy that has lost its decoder's depth.
    for candidate in (full,) if type(text) is type(full) else (text, full):
        if type(candidate) in AutoModelForCausalLM._model_mapping:
            return AutoModelForCausalLM, candidate
    raise CannotProbe(f"transformers {__version__} has no language model for {full.model_type!r}.")


def _config_object(config: Any) -> Any:
    from transformers import CONFIG_MAPPING, __version__

    if hasattr(config, "get_text_config"):
        return config
    fields = {name: value for name, value in read_config(config).items() if name != "_about"}
    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise CannotProbe(f"transformers {__version__} has no class for model_type {model_type!r}.")
    try:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        raise CannotProbe(
            f"{model_type}: its class refuses these fields ({_line(error)})."
        ) from error


def _measure(
    auto: Any, config: Any, dtype: torch.dtype
) -> tuple[tuple[ProbedLayer, ...], int | None, str]:
    """(layers, bytes of the cross cache per encoder token, device)."""
    failures: list[Exception] = []

    @cache
    def attempt(scale: int | None, narrow: bool = True) -> _Layers | None:
        try:
            shrunk = shrink(config, scale=scale, narrow=narrow)
            return _layers(auto, shrunk, dtype, "meta" if scale is None else "cpu")
        except Exception as error:  # whatever a family's code says to what it was not made for
            failures.append(error)
            return None

    for narrow in (True, False):
        small = attempt(1, narrow)
        if small is None:
            continue
        guessed = narrow and not has_head_dim(config)
        if small == (attempt(None) if guessed else attempt(2, narrow)):
            return *small, "cpu"
    if full := attempt(None):
        return *full, "meta"
    reasons = "; ".join(dict.fromkeys(_line(failure) for failure in failures))
    raise CannotProbe(f"{config.model_type} cannot be counted: {reasons}") from failures[0]


def _layers(auto: Any, shrunk: Shrunk, dtype: torch.dtype, device: str) -> _Layers:
    with torch.device(device), torch.inference_mode():
        model = _build(auto, shrunk.config, dtype, device)
        short = _readings(model, LENGTHS[0], steps=1)
        long = _readings(model, LENGTHS[2], steps=2)
    layers = [
        _layer(index, list(readings), shrunk.windows)
        for index, readings in enumerate(
            zip(*(layers for layers, _ in (*short, *long)), strict=True)
        )
    ]
    return tuple(layers), long[-1][1]


def _build(auto: Any, config: Any, dtype: torch.dtype, device: str) -> Any:
    from transformers.initialization import no_init_weights

    options = {"dtype": dtype, "attn_implementation": "eager"}
    # Sending each token to its experts by their numbers needs values, which meta has none of.
    options["experts_implementation"] = "eager" if device == "cpu" else "batched_mm"
    with no_init_weights():
        model = auto.from_config(config, **options).eval()
    if device == "cpu":
        # Memory that nobody has written to costs nothing yet.
        if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
            raise CannotProbe("too large even when shrunken")
        for parameter in model.parameters():
            parameter.zero_()
    return model


def _readings(
    model: Any, prompt_tokens: int, steps: int
) -> list[tuple[list[_Reading], int | None]]:
    """What `_read` finds after the prompt and after each step."""
    from gaac.hf import cache_argument

    name = cache_argument(model)
    encoder = model.config.is_encoder_decoder
    ids = "decoder_input_ids" if encoder else "input_ids"
    given: dict[str, Any] = {"use_cache": True}
    if encoder:
        source = torch.ones(1, ENCODER_TOKENS, dtype=torch.int64)
        given["encoder_outputs"] = model.get_encoder()(input_ids=source)
    readings = []
    for tokens in (prompt_tokens, *[1] * steps):
        output = model(**{ids: torch.ones(1, tokens, dtype=torch.int64)}, **given)
        cache = output.get("cache", output.get("past_key_values"))
        readings.append(_read(cache))
        given[name] = cache
    return readings


def _read(cache: Any) -> tuple[list[_Reading], int | None]:
    """(what each layer holds, and last what lies beside the layers; cross bytes a token)."""
    cross = None
    if hasattr(cache, "cross_attention_cache"):
        held = sum(sum(_held(layer).values()) for layer in cache.cross_attention_cache.layers)
        cross, cache = held // ENCODER_TOKENS, cache.self_attention_cache
    if not hasattr(cache, "layers"):
        raise CannotProbe(f"its past is in a {type(cache).__name__}, not in a Cache of layers")
    readings = [
        _Reading(type(layer).__name__, getattr(layer, "sliding_window", None), _held(layer))
        for layer in cache.layers
    ]
    return [*readings, _Reading(type(cache).__name__, None, _held(cache))], cross


def _held(owner: Any) -> dict[str, int]:
    """Bytes of the tensors under each attribute; one tensor under two names counts once."""
    held: dict[str, int] = {}
    seen: set[int] = set()
    for name, value in vars(owner).items():
        parts = value.values() if isinstance(value, dict) else value
        for tensor in parts if isinstance(value, dict | list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and id(tensor) not in seen:
                seen.add(id(tensor))
                held[name] = held.get(name, 0) + tensor.numel() * tensor.element_size()
    return held


def _layer(
    index: int,
    readings: list[_Reading],
    windows: Mapping[str, tuple[int, int]],
) -> ProbedLayer:
    """What readings at all `LENGTHS` say about one layer, if they fit together.

    What is as large after 2 tokens as after 42 is a state.
    """
    last = readings[-1]
    parts = {name: [r.held.get(name, 0) for r in readings] for r in readings for name in r.held}
    state = sum(sizes[0] for sizes in parts.values() if len(set(sizes)) == 1)
    growing = [sizes for sizes in parts.values() if len(set(sizes)) > 1]
    held = [sum(sizes) for sizes in zip(*growing, strict=True)] or [0] * len(LENGTHS)
    rate = held[1] - held[0]
    kept = held[-1] // rate if rate > 0 and held[-1] == held[-2] else None
    if held != [rate * min(length, kept or length) for length in LENGTHS]:
        raise CannotProbe(
            f"layer {index} ({last.kind}) does not grow by the same bytes with every token: it "
            f"holds {held} bytes at {list(LENGTHS)} tokens"
        )
    if kept is not None:
        kept = _true_window(index, kept, windows)
    elif rate and last.window is not None:
        raise CannotProbe(f"layer {index} ({last.kind}) has a window that could not be shortened")
    return ProbedLayer(last.kind, rate, kept, state)


def _true_window(index: int, kept: int, windows: Mapping[str, tuple[int, int]]) -> int:
    """What the layer keeps with the window that its config really gives, from what it kept here."""
    found = {true - (size - kept) for true, size in windows.values() if size - kept in (0, 1)}
    if len(found) != 1:
        raise CannotProbe(f"layer {index} keeps {kept} tokens, which no window of its config says")
    return found.pop()


@contextmanager
def _quiet() -> Iterator[None]:
    """No words of transformers about odd configs, and no threads, which slow tiny tensors down."""
    from transformers.utils import logging

    level, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(level)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, CannotProbe) else f"{type(error).__name__}: "
    return name + (text[0] if text else "no message")[:200]
