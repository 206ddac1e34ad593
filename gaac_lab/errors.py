"""The error that stands for a wrong request: nothing has been run, and the exit status is 2."""

from __future__ import annotations


class RequestError(ValueError):
    """What was asked for cannot be done as it was asked. The message says what to change."""
