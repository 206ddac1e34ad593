"""What many tests share: the real default model, and the real package of figures it decides on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's folder, fetched if this machine has not got it yet."""
    from gaac_lab import models

    return models.fetch_default()


@pytest.fixture(scope="session")
def default_model(default_model_path: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of the default model in bf16 on the CPU."""
    from gaac_lab import models

    return models.load("default", dtype="bfloat16", device="cpu")
