"""Which rows of a sparse table there are: in order, and what has become of them since a mark."""

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.evicted_ids import EvictionCause
from psfleet.tables.eviction_stream import EvictionStream
from psfleet.tables.history import ChangeHistory
from psfleet.tables.row_data import HistoryPoint, TableChanges
from psfleet.tables.row_memory import RowMemory

__all__ = ["RowScan"]

Ids = NDArray[np.int64]


class RowScan:
    """The one place where a row goes. Not thread-safe.

    Args:
        index: Of the table.
        rests: Every update changes every row.
        stream: Remembers which rows go; None: nobody will ask.

    Attributes:
        dropped: Rows that went so far, for displays.
    """

    def __init__(self, index: RowMemory, rests: bool, stream: EvictionStream | None = None) -> None:
        self._index = index
        self._stream = stream
        self._rests = rests
        self.dropped = 0
        self._history = ChangeHistory()
        self._ids: Ids | None = None

    def drop(self, ids: Ids, step: int, cause: EvictionCause | None) -> int:
        """Remove rows that are there at this step of the table; how many they are.

        cause: Why they go; None: they are no evictions.
        """
        if not len(ids):
            return 0
        if self._stream is not None and cause is not None:
            self._stream.add(ids, step, cause)
        self._ids = None
        self._history.add(removed=ids)
        gone = self._index.remove(ids)
        self.dropped += gone
        return gone

    def wrote(self, ids: Ids) -> None:
        """Rows were set otherwise than by an update."""
        self._history.add(written=ids)

    def restamped(self) -> None:
        """The table's step was set: steps before it say nothing about order any more."""
        self._history.era += 1

    def ascending(self) -> Ids:
        """Every id in order; kept for the next page."""
        if self._ids is None or len(self._ids) != len(self._index):
            self._ids = self._index.entries()[0]
        return self._ids

    def mark(self, step: int) -> HistoryPoint:
        """See SparseTable.mark."""
        return HistoryPoint(self._history.era, step, self._history.mark())

    def changed_since(self, mark: HistoryPoint, step: int) -> TableChanges:
        """See SparseTable.changed_since."""
        removed, written = self._history.since(mark.event)
        everything = mark.era != self._history.era or (self._rests and step > mark.step)
        # A row whose stamp is the mark's own step was pushed before the mark.
        most = 2**32 if everything else step - mark.step - 1
        changed = self._index.aged(step, most=most)[0]
        back = self._index.locate(written)[0] != 0
        gone = self._index.locate(removed)[0] == 0
        return TableChanges(np.union1d(changed, written[back]), removed[gone])

    def release(self, mark: HistoryPoint) -> None:
        """See SparseTable.release."""
        self._history.release(mark.event)
