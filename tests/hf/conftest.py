"""Tiny models, built once a session, and one thread: they are too small for two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from .models import build
from .scenarios import SCENARIOS, Outcome, dynamic


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], PreTrainedModel]:
    """model_of("llama"): a tiny bf16 model, always the same one."""
    models: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in models:
            models[name] = build(name)
        return models[name]

    return get


@pytest.fixture(scope="session")
def expected(model_of: Callable[[str], PreTrainedModel]) -> Callable[[str, str], Outcome]:
    """expected("llama", "greedy"): what the library's own cache gives."""
    outcomes: dict[tuple[str, str], Outcome] = {}

    def get(name: str, scenario: str) -> Outcome:
        if (name, scenario) not in outcomes:
            model = model_of(name)
            outcomes[name, scenario] = SCENARIOS[scenario](model, dynamic(model))
        return outcomes[name, scenario]

    return get
