"""What the constructor refuses, each with one sentence, and what depends on the version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from gaac.hf import BlockCompressedCache, cache_argument
from gaac.hf.versions import is_supported, require_transformers

CONFIG = LlamaConfig(num_hidden_layers=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": 4}, ValueError, r"level=4: gaac has the levels \[0, 1, 2, 3, 5\]"),
        ({"level": True}, ValueError, "level=True"),
        ({"level": [1]}, ValueError, "level="),
        ({"block_tokens": 0}, ValueError, "block_tokens=0: a block holds at least one token"),
        ({"block_tokens": 2.0}, ValueError, "block_tokens=2.0"),
        ({"scope": "K"}, ValueError, "scope='K': choose"),
        ({"scope": "vk"}, ValueError, "scope='vk'"),
        ({"window": -1}, ValueError, "window=-1"),
        ({"window": None}, ValueError, "window=None"),
        ({"codec": object()}, TypeError, "codec is a object: it needs encode and decode"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        BlockCompressedCache(CONFIG, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [None, {}, [(torch.zeros(1), torch.zeros(1))]])
def test_a_config_is_needed(config: Any) -> None:
    with pytest.raises(TypeError, match=r"pass the model's, model\.config"):
        BlockCompressedCache(config)


def test_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match="without layers"):
        BlockCompressedCache(LlamaConfig(num_hidden_layers=0))


def test_the_arguments_can_be_read_back() -> None:
    cache = BlockCompressedCache(CONFIG, level=3, block_tokens=16, scope="v", window=4)
    read = (cache.level, cache.block_tokens, cache.scope, cache.window, cache.codec)
    assert read == (3, 16, "v", 4, None)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("4.57.1", False),
        ("5.16.2", False),
        ("5.17.0", True),
        ("5.17.0.dev0", True),
        ("5.24.0", True),
        ("5.100.0rc1", True),
        ("6.0.0", False),
        ("6.0.0.dev0", False),
    ],
)
def test_versions(version: str, supported: bool) -> None:
    assert is_supported(version) == supported


def test_another_version_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    with pytest.raises(ImportError, match=r">= 5\.17, < 6, and this is transformers 4\.57\.1"):
        require_transformers()


def test_the_name_of_the_argument() -> None:
    class Newer:
        def forward(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...

    class Older:
        def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...

    assert cache_argument(Newer()) == "cache"
    assert cache_argument(Older()) == "past_key_values"
