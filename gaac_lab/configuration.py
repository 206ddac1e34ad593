"""One way of keeping and reading the KV cache: a point of a sweep, a row of the decision table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from transformers import Cache

Scope = Literal["kv", "k", "v"]
Integration = Literal["none", "eager", "grouped", "materialise", "fused"]
UNCOMPRESSED: tuple[Integration, ...] = ("none", "eager", "grouped")

_SCOPE_WORDS = {"kv": "K+V", "k": "K only", "v": "V only"}
_UNCOMPRESSED_LABELS = {
    "none": "uncompressed",
    "eager": "uncompressed, eager",
    "grouped": "uncompressed, grouped matmul",
}
_INTEGRATION_WORDS = {"materialise": "materialised", "fused": "fused"}


class Configuration(BaseModel):
    """How one run keeps its cache, and what reads it.

    `codec` is "none", "gaac" or a peer from `gaac_lab.codec.PEERS`. `level` is gaac's and null for
    every other codec. `block_tokens` and `window` are counted in tokens.

    `integration` says what attention reads. Uncompressed (`codec` "none"): "none" is transformers
    as it comes, the baseline; "eager" decodes through its eager attention; "grouped" is the best
    that torch allows (`gaac_lab.grouped`). Compressed: "materialise" unpacks all blocks at each
    step for the model's own attention; "fused" reads gaac's pages where they lie, at level 0 the
    raw ones: the same kernel without compression.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: str = "gaac"
    level: int | None = 1
    block_tokens: int = Field(default=256, ge=1)
    scope: Scope = "kv"
    window: int = Field(default=0, ge=0)
    integration: Integration = "materialise"

    @model_validator(mode="after")
    def _fits_together(self) -> Configuration:
        if (self.codec == "gaac") != (self.level is not None):
            raise ValueError(
                f"codec={self.codec!r} with level={self.level!r}: a level is needed for 'gaac' "
                "and must be null for every other codec"
            )
        if (self.codec == "none") != (self.integration in UNCOMPRESSED):
            raise ValueError(
                f"codec={self.codec!r} with integration={self.integration!r}: "
                f"{', '.join(UNCOMPRESSED)} go with codec 'none', materialise and fused with others"
            )
        if self.integration == "fused" and self.codec != "gaac":
            raise ValueError(
                f"codec={self.codec!r} with integration='fused': fused attention reads gaac's "
                "pages only; choose materialise"
            )
        return self

    @property
    def is_baseline(self) -> bool:
        """Whether this is transformers as it comes, which all else is compared with."""
        return self.integration == "none"

    @property
    def is_compressed(self) -> bool:
        """Whether a codec is at work (at gaac's level 0 it stores raw)."""
        return self.codec != "none"

    @property
    def keeps_attention(self) -> bool:
        """Whether the model's own attention runs, so that every bit of the output must agree."""
        return self.integration in ("none", "materialise")

    @property
    def raw_twin(self) -> Configuration:
        """The uncompressed configuration under the same attention."""
        if self.integration == "materialise":
            return BASELINE
        if self.integration == "fused":
            return self.model_copy(update={"level": 0})
        return self

    @property
    def label(self) -> str:
        """A short name, unique within a sweep, for tables and figures."""
        if not self.is_compressed:
            return _UNCOMPRESSED_LABELS[self.integration]
        name = f"gaac L{self.level}" if self.codec == "gaac" else self.codec
        how = _INTEGRATION_WORDS[self.integration]
        window = f", window {self.window}" if self.window else ""
        return f"{name} {how}, {_SCOPE_WORDS[self.scope]}, block {self.block_tokens}{window}"

    def make_cache(self, model_config: Any) -> Cache:
        """An empty cache of this kind for a model's config."""
        if self.integration == "grouped":
            from gaac_lab.grouped import GroupedCache

            return GroupedCache(model_config)
        if not self.is_compressed:
            from transformers import DynamicCache

            return DynamicCache(config=model_config)
        from gaac.hf import BlockCompressedCache

        return BlockCompressedCache(
            model_config,
            level=self.level if self.level is not None else 0,
            block_tokens=self.block_tokens,
            scope=self.scope,
            window=self.window,
            codec=None if self.codec == "gaac" else self.make_codec(),
        )

    def make_codec(self) -> Any:
        """The `KVCodec` that this configuration names."""
        from gaac_lab.codec import KVCodec

        if not self.is_compressed:
            raise ValueError("an uncompressed configuration has no codec")
        level = self.level if self.level is not None else 3
        return KVCodec(level=level, block_tokens=self.block_tokens, backend=self.codec)


BASELINE = Configuration(codec="none", level=None, integration="none")
EAGER = Configuration(codec="none", level=None, integration="eager")
GROUPED = Configuration(codec="none", level=None, integration="grouped")
