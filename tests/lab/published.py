"""The published models' configs of data/model_configs, by the names of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gaac_lab.paths import data_dir


def path_of(stem: str) -> Path:
    """The file of one model."""
    return data_dir() / "model_configs" / f"{stem}.json"


CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(path_of("any").parent.glob("*.json"))
}
