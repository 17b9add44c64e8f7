"""Which ids of a sparse table get a row, and which rows go: `layers.embedding(..., entry=...)`.

See docs/tables.md. Entries are joined with `&`.
"""

from psfleet.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    Entries,
    Entry,
    ProbabilityEntry,
    ShowClickEntry,
    TTLEntry,
)

__all__ = [
    "CapacityEntry",
    "CountFilterEntry",
    "Entries",
    "Entry",
    "ProbabilityEntry",
    "ShowClickEntry",
    "TTLEntry",
]
