"""What a sparse table hands out and takes back, with all that belongs to a row or to the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CandidateData", "HistoryPoint", "RowData", "TableChanges", "TableClock"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def _none() -> Ids:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowData:
    """Rows of a sparse table with everything that is known of them.

    Attributes:
        ids: int64 [n].
        values: float32 [n, dim * (1 + slots)]: the weights, then each state slot; one that a whole row
            shares is repeated for each of its weights.
        touched: int64 [n]: the table's step when the row was last pushed. A row that has not been
            pushed for 2**31 steps is said to have been pushed 2**31 steps ago.
        scores: float32 [n, TableSpec.scores]: shows and clicks, then the frequency as it was at the last
            push, in tables that count them.
    """

    ids: Ids
    values: Floats
    touched: Ids
    scores: Floats


@dataclass(frozen=True, slots=True)
class CandidateData:
    """Ids that have been pushed, but have no row yet.

    Attributes:
        ids: int64 [n], ascending.
        values: What the table's entry remembers of each (Entry.candidate), by name: int64 or float32 [n].
        touched: int64 [n]: the table's step when it was last pushed.
    """

    ids: Ids = field(default_factory=_none)
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    touched: Ids = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TableClock:
    """What a table knows of time.

    Attributes:
        step: How many updates it has had.
        shrinks: The steps at which it was last shrunk, ascending.
        ticks: (seconds, step): how far the table was at that time, both ascending.
    """

    step: int = 0
    shrinks: tuple[int, ...] = ()
    ticks: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A point in a table's history. Made by `SparseTable.mark`; of use for that table only."""

    era: int
    step: int
    event: int


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What has become of a table since a mark.

    Attributes:
        ids: int64 [n], ascending: of rows that are new or may differ.
        removed: int64 [m], ascending: of rows that were there at some time since and are not now.
    """

    ids: Ids = field(default_factory=_none)
    removed: Ids = field(default_factory=_none)
