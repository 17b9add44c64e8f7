"""Choices that several parts of psfleet share."""

from typing import Literal

__all__ = ["DEVICE_PLACES", "Device", "Format", "Schedule"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Device = Literal["cpu", "cuda"]
"""Whose memory holds a table. What each is, and what it is called: psfleet/tables/memory_choice.py."""
DEVICE_PLACES: dict[Device, str] = {
    "cpu": "in host memory",
    "cuda": "in the memory of an NVIDIA GPU",
}
"""Of each, as texts of settings say it."""
Format = Literal["float32", "bfloat16", "int8"]
