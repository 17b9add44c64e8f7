"""Which ids of a sparse table get a row, and which rows go: `layers.embedding(..., entry=...)`.

See docs/tables.md. Entries are joined with `&`.
"""

from psfleet.rules.eviction_policy import LFU, LRU, DecayedFrequency, EvictionPolicy
from psfleet.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    Entries,
    Entry,
    EvictionStreamEntry,
    ProbabilityEntry,
    ShowClickEntry,
    TTLEntry,
)

__all__ = [
    "LFU",
    "LRU",
    "CapacityEntry",
    "CountFilterEntry",
    "DecayedFrequency",
    "Entries",
    "Entry",
    "EvictionPolicy",
    "EvictionStreamEntry",
    "ProbabilityEntry",
    "ShowClickEntry",
    "TTLEntry",
]
