"""The errors gaac raises; each message says what is wrong and what to do."""

from __future__ import annotations


class GaacError(ValueError):
    """Base of everything gaac raises on bad input."""


class CorruptFrame(GaacError):
    """The blob is damaged, truncated, extended, or not a gaac blob."""


class UnsupportedFrame(GaacError):
    """The blob is intact, but this version of gaac cannot do what was asked with it."""


class UnsupportedTensor(GaacError):
    """The tensor, or the place to decode into, is of a kind gaac does not handle."""
