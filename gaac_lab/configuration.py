"""One way of keeping the KV cache: the point of a sweep, and the row of the decision table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from transformers import Cache

Scope = Literal["kv", "k", "v"]
Integration = Literal["none", "materialise"]


class Configuration(BaseModel):
    """How one run keeps its cache.

    `codec` is "none" (transformers' `DynamicCache`, the baseline), "gaac" or a peer from
    `gaac_lab.codec.PEERS`. `level` is gaac's and null for every other codec. `block_tokens` and
    `window` are counted in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: str = "gaac"
    level: int | None = 1
    block_tokens: int = Field(default=256, ge=1)
    scope: Scope = "kv"
    window: int = Field(default=0, ge=0)
    integration: Integration = "materialise"

    @model_validator(mode="after")
    def _level_is_gaacs(self) -> Configuration:
        if (self.codec == "gaac") != (self.level is not None):
            raise ValueError(
                f"codec={self.codec!r} with level={self.level!r}: a level is needed for 'gaac' "
                "and must be null for every other codec"
            )
        if (self.codec == "none") != (self.integration == "none"):
            raise ValueError("codec='none' goes with integration='none', and no other does")
        return self

    @property
    def is_baseline(self) -> bool:
        return self.codec == "none"

    @property
    def label(self) -> str:
        """A short name, unique within a sweep, for tables and figures."""
        if self.is_baseline:
            return "uncompressed"
        name = f"gaac L{self.level}" if self.codec == "gaac" else self.codec
        scope = {"kv": "K+V", "k": "K only", "v": "V only"}[self.scope]
        window = f", window {self.window}" if self.window else ""
        return f"{name}, {scope}, block {self.block_tokens}{window}"

    def make_cache(self, model_config: Any) -> Cache:
        """An empty cache of this kind for a model's config."""
        if self.is_baseline:
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

        if self.is_baseline:
            raise ValueError("the uncompressed baseline has no codec")
        level = self.level if self.level is not None else 3
        return KVCodec(level=level, block_tokens=self.block_tokens, backend=self.codec)


BASELINE = Configuration(codec="none", level=None, integration="none")
