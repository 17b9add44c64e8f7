"""Tables take back what a snapshot holds of them."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from psfleet.tables.dense import DenseTable
from psfleet.tables.row_data import TableClock
from psfleet.tables.snapshot_columns import (
    CANDIDATE_IDS,
    EVICTED,
    REMOVED,
    ROW_IDS,
    candidates_of,
    column_of,
    rows_of,
)
from psfleet.tables.sparse import SparseTable

__all__ = ["check_room", "refill"]


def check_room(table: DenseTable | SparseTable, columns: Mapping[str, NDArray[Any]]) -> None:
    """Refuse columns for whose rows the table has no room.

    Raises:
        UsageError: It has none; nothing was changed.
    """
    if ROW_IDS in columns and isinstance(table, SparseTable):
        table.check_room([columns[ROW_IDS]], written=True)


def refill(
    table: DenseTable | SparseTable, clock: TableClock, columns: Mapping[str, NDArray[Any]]
) -> None:
    """Set a part of a table from the columns of psfleet.tables.snapshot_columns.

    Raises:
        UsageError: The table is full, or the columns are not its own; nothing was changed.
    """
    spec = table.spec
    if isinstance(table, DenseTable):
        table.restore(clock.step, [column_of(spec, columns, name) for name in spec.slot_names])
        return
    if table.clock != clock:
        table.set_clock(clock)
    if REMOVED in columns:
        table.remove(columns[REMOVED])
    if ROW_IDS in columns:
        table.write(rows_of(spec, columns))
    if CANDIDATE_IDS in columns:
        table.write_candidates(candidates_of(spec, columns))
    if EVICTED[0] in columns:
        table.set_evictions(columns)
