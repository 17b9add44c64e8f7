"""Choices that several parts of psfleet share."""

from typing import Literal

__all__ = ["Format", "Schedule"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Format = Literal["float32", "bfloat16", "int8"]
