"""Admission and expiry of rows of a sparse table: `layers.embedding(..., entry=...)`.

See docs/tables.md. Entries are joined with `&`.
"""

from psfleet.rules.eviction_policy import LFU, LRU, DecayedFrequency, EvictionPolicy
from psfleet.schema import entry
from psfleet.schema.entry import *  # noqa: F403

__all__ = ["LFU", "LRU", "DecayedFrequency", "EvictionPolicy"]
__all__ += entry.__all__
