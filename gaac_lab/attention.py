"""Which attention reads the cache: switched on around a step, and the model left as it was found.

One model serves all configurations of a comparison, which take turns step by step. Switching takes
less than a millisecond and lies outside of every clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gaac_lab.configuration import Integration


@contextmanager
def switched(model: Any, integration: Integration) -> Iterator[None]:
    """`model` with the attention that `integration` asks for, then with its own again.

    "none" and "materialise" ask for the model's own. Raises ValueError where the model's class does
    not take its attention by name.
    """
    if integration in ("none", "materialise"):
        yield
        return
    if integration == "fused":
        from gaac.hf import use_fused_attention

        with use_fused_attention(model):
            yield
        return
    own = _implementations(model.config)
    try:
        _choose(model, integration)
        yield
    finally:
        model.set_attn_implementation(own)


def _choose(model: Any, integration: Integration) -> None:
    name = "eager"
    if integration == "grouped":
        from gaac_lab.grouped import register

        name = register()
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # the library only warns
        raise ValueError(
            f"{type(model).__name__} does not take its attention by name, so it cannot run with "
            f"integration={integration!r}: choose none or materialise"
        )


def _implementations(config: Any) -> Any:
    """What set_attn_implementation takes to restore a config: a name, with parts a dict of them."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    inner = {key: _implementations(part) for key, part in parts.items() if part is not None}
    own = config._attn_implementation
    return {"": own, **inner} if inner else own
