"""What is asked of a sparse table, counted for displays."""

from dataclasses import dataclass

__all__ = ["RowTraffic"]


@dataclass
class RowTraffic:
    """Counts ids of one server's part. Workers name an id once in a call.

    Attributes:
        pulled: Ids whose weights were read.
        unknown: Those of them without a row.
        updated: Rows that pushes have updated; pushes of one round count as one.
        restored: Rows that were written from elsewhere, as from a snapshot.
    """

    pulled: int = 0
    unknown: int = 0
    updated: int = 0
    restored: int = 0
