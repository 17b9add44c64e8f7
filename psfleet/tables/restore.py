"""Tables take back what a snapshot holds of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.tables.dense import DenseTable
from psfleet.tables.eviction_stream import EVICTED
from psfleet.tables.row_data import CANDIDATES, CandidateData, RowData, TableClock
from psfleet.tables.sparse import SparseTable

__all__ = ["refill"]


def refill(
    table: DenseTable | SparseTable, clock: TableClock, columns: Mapping[str, NDArray[Any]]
) -> None:
    """Set a part of a table from columns as psfleet.tables.row_snapshot names them.

    Raises:
        UsageError: The table is full, or the columns are not its own; nothing was changed.
    """
    if isinstance(table, DenseTable):
        table.restore(clock.step, [_column(table, columns, name) for name in table.spec.slot_names])
        return
    if table.clock != clock:
        table.set_clock(clock)
    if "removed" in columns:
        table.remove(columns["removed"])
    if "ids" in columns:
        ids = columns["ids"]
        scores = columns.get("scores", np.zeros((len(ids), 0), np.float32))
        rows = _column(table, columns, "rows")
        table.write(RowData(ids, rows, _column(table, columns, "touched"), scores))
    if CANDIDATES[0] in columns:
        found = (_column(table, columns, name) for name in CANDIDATES)
        table.write_candidates(CandidateData(*found))
    if EVICTED[0] in columns:
        table.set_evictions(columns)


def _column(
    table: DenseTable | SparseTable, columns: Mapping[str, NDArray[Any]], name: str
) -> NDArray[Any]:
    if name not in columns:
        raise ShapeError(f"table {table.spec.name!r}: the part that is set has no {name!r}")
    return columns[name]
