"""What differs between versions of transformers, in one place."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

SUPPORTED = "transformers >= 5.17, < 6"
_OLDEST, _TOO_NEW = (5, 17), (6, 0)


def require_transformers() -> None:
    """Raise ImportError unless a supported version of transformers is installed.

    The cache's interface changed in almost every release before 5.17: `crop` took a target length,
    `get_mask_sizes` took a tensor, `is_croppable` was not read.
    """
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        message = f'gaac.hf needs {SUPPORTED}: pip install "transformers>=5.17,<6".'
        raise ImportError(message) from None
    if not is_supported(found):
        raise ImportError(
            f"gaac.hf needs {SUPPORTED}, and this is transformers {found}: "
            'pip install "transformers>=5.17,<6".'
        )


def is_supported(version: str) -> bool:
    """Whether gaac.hf works with this version ("5.24.0", "5.17.0.dev0") of transformers."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return _OLDEST <= (major, minor) < _TOO_NEW


def cache_argument(model: Any) -> str:
    """The keyword under which `model.forward` and `model.generate` take a cache.

    "cache" from transformers 5.24 on, "past_key_values" before. A forward that does not know the
    name swallows it in silence and runs without the cache, so ask here instead of guessing.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def dummy_layers() -> tuple[type, ...]:
    """The classes of layers that hold nothing, because another layer holds their KV.

    None in older versions of transformers, whose caches leave such layers out.
    """
    from transformers import cache_utils

    found = getattr(cache_utils, "DummyLayer", None)
    return () if found is None else (found,)


class UnboundedLength:
    """A cache layer that grows without end, under both names of the question."""

    def get_max_length(self) -> int:
        """-1: no maximum (the newer name)."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: no maximum (the older name)."""
        return -1
