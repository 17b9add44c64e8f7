"""Which ids of a sparse table get a row: `layers.embedding(..., entry=ProbabilityEntry(0.1))`."""

from psfleet.tables.entry import ProbabilityEntry

__all__ = ["ProbabilityEntry"]
