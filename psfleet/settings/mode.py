"""The consistency modes by name."""

from typing import Literal

__all__ = ["Mode"]

Mode = Literal["sync", "async", "ssp", "geo", "half-async"]
