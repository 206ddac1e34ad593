"""Every parameter of every notebook: its name, type, range and meaning.

A notebook's `parameters` cell may only use names from here. To add a parameter, add one line to
`Parameters`; the checks, the help and the error sentences follow from it.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

import gaac
from gaac_lab.errors import RequestError


class ParameterError(RequestError):
    """A parameter's name, type or value is not allowed. One sentence for each, one a line."""


def _rule(test: Callable[[Any], bool]) -> AfterValidator:
    def check_value(value: Any) -> Any:
        if not test(value):
            raise ValueError
        return value

    return AfterValidator(check_value)


def _p(help: str, **limits: Any) -> Any:
    """A field that may be left out; a value that is given is checked against the limits."""
    return Field(default=None, description=help, **limits)


def _words(text: str) -> dict[str, Any]:
    """What is allowed, in words, where a JSON schema cannot say it."""
    return {"json_schema_extra": {"words": text}}


_INCREASING = _rule(lambda values: all(a < b for a, b in itertools.pairwise(values)))
_DISTINCT = _rule(lambda values: len(set(values)) == len(values))
_IS_LEVEL = _rule(lambda level: level in gaac.LEVELS)
_LEVEL_WORDS = f"one of {', '.join(str(level) for level in gaac.LEVELS)}"

Tokens = Annotated[int, Field(ge=16, le=1_000_000)]
BlockTokens = Annotated[int, Field(ge=16, le=65_536)]
Batch = Annotated[int, Field(ge=1, le=4_096)]
Window = Annotated[int, Field(ge=0, le=1_000_000)]
KeptTokens = Annotated[
    int, Field(ge=64, le=1_000_000, multiple_of=64, **_words("a multiple of 64 of at least 64"))
]
Bits = Annotated[int, _rule(lambda bits: bits in (16, 8, 4, 2)), Field(**_words("16, 8, 4 or 2"))]
Depth = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Level = Annotated[int, _IS_LEVEL, Field(**_words(_LEVEL_WORDS))]
Scope = Literal["kv", "k", "v"]
LiveIntegration = Literal["fused", "materialise"]
Name = Annotated[str, Field(pattern=r"^\S+$", **_words("a name without spaces"))]
Model = Annotated[str, Field(min_length=1, **_words("'default', a folder or a hub id"))]
Memory = Annotated[
    str, Field(min_length=1, **_words("a device of data/accelerators.csv, or a number of GiB"))
]
Device = Annotated[
    str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", **_words("auto, cpu, cuda or cuda:N"))
]


def _list(help: str, example: str, rule: str, *, empty: bool = False) -> Any:
    """A list's field; `example` and `rule` are for the sentence that refuses a wrong one."""
    words = f"a list like {example}, {rule}" + ("" if empty else ", not empty")
    return _p(help, min_length=0 if empty else 1, json_schema_extra={"list": words})


class Parameters(BaseModel):
    """All parameters. Types are strict: true is not 1, and "8" is not 8."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # every notebook
    out_dir: str = _p("the run's folder; empty: a fresh folder under the project's runs")
    model: Model = _p("'default', a folder with config.json and safetensors, or a hub id")
    device: Device = _p("where the model runs; auto: CUDA where there is one, else the CPU")
    dtype: Literal["auto", "bfloat16", "float16"] = _p("the model's and the cache's type")
    prompt: Name = _p("the name of a prompt in data/prompts")
    seed: int = _p("seed of every generator", ge=0, le=2**32 - 1)
    # 01_budget
    seq_len: int = _p("tokens for which the cache is computed", ge=1, le=10_000_000)
    batch: Batch = _p("sequences at once")
    entropy_tokens: int = _p("tokens over which the entropy floor is measured", ge=64, le=131_072)
    compared_models: Annotated[list[Name], _DISTINCT] = _list(
        "models of data/model_configs to compare", "[all] or [qwen3-8b]", "none of them twice"
    )
    memory: Memory = _p("memory of the device that the models are held against")
    # 02_baseline
    lengths: Annotated[list[Tokens], _INCREASING] = _list(
        "prompt lengths in tokens", "[512, 2048]", "strictly increasing"
    )
    new_tokens: int = _p("tokens decoded after the prompt", ge=2, le=100_000)
    repeats: int = _p("measured repeats, after one warm-up", ge=1, le=1_000)
    # 03_integration and later
    prompt_tokens: int = _p("prompt length in tokens", ge=32, le=1_000_000)
    level: Level = _p("compression level of the live cache")
    offline_level: Level = _p("compression level of a cache at rest")
    block_tokens: BlockTokens = _p("tokens in one compressed block")
    prefill_chunk: Tokens = _p("tokens of a long prompt read at once, so that it packs as it comes")
    forks: int = _p("continuations of one prompt", ge=1, le=1_000)
    # 04_sweep
    rounds: int = _p("measured rounds; in each, every configuration runs once", ge=1, le=1_000)
    integrations: Annotated[list[LiveIntegration], _DISTINCT] = _list(
        "how attention reads the blocks: in place, or unpacked at each step",
        "[fused, materialise]",
        "none of them twice",
    )
    block_sizes: Annotated[list[BlockTokens], _INCREASING] = _list(
        "block sizes to compare, in tokens", "[128, 256]", "strictly increasing"
    )
    levels: Annotated[list[Level], _DISTINCT] = _list(
        "levels to compare", "[1, 2, 3, 5]", "none of them twice"
    )
    scopes: Annotated[list[Scope], _DISTINCT] = _list(
        "what is compressed: K and V, K only, V only", "[kv, k]", "none of them twice"
    )
    windows: Annotated[list[Window], _DISTINCT] = _list(
        "recent windows left raw, in tokens", "[0, 256]", "none of them twice"
    )
    peers: Annotated[list[Name], _DISTINCT] = _list(
        "other codecs to compare, where installed", "[zstd, lz4]", "none of them twice", empty=True
    )
    # 05_lossless
    prompt_names: Annotated[list[Name], _DISTINCT] = _list(
        "names of prompts", "[all] or [log_hunt, chinese]", "none of them twice"
    )
    # 06_bandwidth
    batches: Annotated[list[Batch], _INCREASING] = _list(
        "batch sizes to compare", "[1, 2, 4]", "strictly increasing"
    )
    # 07_routes
    eval_tokens: int = _p("tokens over which the perplexity is measured", ge=16, le=131_072)
    kept_tokens: KeptTokens = _p("tokens that a window, or another policy, keeps")
    depths: Annotated[list[Depth], _INCREASING] = _list(
        "where facts are planted, 0 being the beginning", "[0.1, 0.5, 0.9]", "strictly increasing"
    )
    facts_per_depth: int = _p("facts planted at each depth", ge=1, le=1_000)
    bill_models: Annotated[list[Name], _DISTINCT] = _list(
        "models of data/model_configs in the stacked bill", "[qwen3-8b]", "none of them twice"
    )
    bill_tokens: int = _p("length in the stacked bill, in tokens", ge=1, le=10_000_000)
    bill_bits: Bits = _p("bits a value in the stacked bill")
    bill_window: int = _p("window in the stacked bill, in tokens", ge=1, le=10_000_000)
    prefix_tokens: Tokens = _p("tokens of a prefix that requests share")
    own_tokens: Tokens = _p("tokens that each request adds to the prefix")
    # 08_decision
    min_throughput: float = _p(
        "lowest acceptable decode throughput, as a share of the baseline's",
        gt=0,
        le=2,
        allow_inf_nan=False,
    )


def names() -> list[str]:
    """Every parameter's name, in the order of the notebooks that use it first."""
    return list(Parameters.model_fields)


def describe(name: str) -> str:
    """What the parameter means, in a few words."""
    return Parameters.model_fields[name].description or ""


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values again, as their types demand.

    Raises ParameterError with one sentence for each parameter that is unknown, of a wrong type or
    outside its range.
    """
    try:
        return Parameters.model_validate(dict(values)).model_dump(exclude_unset=True)
    except ValidationError as error:
        wrong = dict.fromkeys(str(item["loc"][0]) for item in error.errors())
        raise ParameterError("\n".join(_sentence(name, values[name]) for name in wrong)) from error


def parse(name: str, text: str) -> Any:
    """The value that `text` from a command line stands for; still unchecked.

    Text is read as YAML (8, 0.95, [1, 3]), and taken as it is where the parameter is a text.
    Raises ParameterError if the name is unknown or the text is not YAML.
    """
    if name not in Parameters.model_fields:
        raise ParameterError(unknown(name, names()))
    if _schema(name).get("type") == "string":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ParameterError(
            f"{name}={text} cannot be read: it must be {allowed(name)}."
        ) from error


def allowed(name: str) -> str:
    """What values the parameter takes, in words: "a whole number from 1 to 1000"."""
    schema = _schema(name)
    if "list" in schema:
        return f"{schema['list']}, each {_one(schema['items'])}"
    return _one(schema)


def unknown(name: str, known: list[str]) -> str:
    """The sentence for a name that nobody knows, with the nearest one that exists."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    return f"there is no parameter {name!r}: {hint}"


def _sentence(name: str, value: Any) -> str:
    if name not in Parameters.model_fields:
        return unknown(name, names())
    return f"{name}={value!r} is not allowed: it must be {allowed(name)}."


def _schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = Parameters.model_json_schema()["properties"][name]
    return schema


def _one(schema: Mapping[str, Any]) -> str:
    """A single value in words, from its JSON schema."""
    if "words" in schema:
        return str(schema["words"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "string":
        return "a text"
    if "exclusiveMinimum" in schema:
        return f"a number above {schema['exclusiveMinimum']} and up to {schema['maximum']}"
    kind = "a whole number" if schema["type"] == "integer" else "a number"
    return f"{kind} from {schema['minimum']} to {schema['maximum']}"
