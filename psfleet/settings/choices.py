"""Choices that several parts of psfleet share."""

from typing import Literal

__all__ = ["Device", "Format", "Schedule"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Device = Literal["cpu", "cuda"]
"""Whose memory holds a table: the host's, or that of an NVIDIA GPU. See psfleet/tables/memory_kinds.py."""
Format = Literal["float32", "bfloat16", "int8"]
