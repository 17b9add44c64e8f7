"""Changes of weights that do not go through the table's optimizer rule. The optimizer state does not change.

Geo mode adds the deltas that workers have computed (`add_values`, `add_rows`), scripts assign weights
(`set_values`, `set_rows`), and a snapshot restores parts of tables (`refill`). Adding counts as an update of
the table; setting does not.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.initial_values import initializer_arguments
from psfleet.core.engine.kernels.number_formats import draw_weights
from psfleet.core.engine.kernels.row_format import RowFormat
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_data import (
    CANDIDATE_IDS,
    EVICTED,
    REMOVED,
    ROW_IDS,
    RowData,
    TableClock,
    candidates_of,
    column_groups,
    column_of,
    rows_of,
)
from psfleet.core.engine.tables.sparse import SparseTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def values_of(table: DenseTable) -> Floats:
    """Return the weights of a dense table's part: float32 [m]."""
    out = np.empty(table.count, np.float32)
    table.pull_into(out)
    return out


def set_values(table: DenseTable, values: Floats) -> None:
    """Set every weight of a dense table's part. Does not count as an update."""
    table.restore(table.step, [values, *table.state()[1:]])


def add_values(table: DenseTable, deltas: Floats) -> None:
    """Add deltas to every weight of a dense table's part. Counts as an update."""
    weights, *state = table.state()
    table.restore(table.step + 1, [weights + deltas, *state])


def weights_of(table: SparseTable, ids: Ids) -> Floats:
    """Return the weights of ids, float32 [n, dim], with initial values for ids without a row."""
    out = np.empty((len(ids), table.spec.dim), np.float32)
    table.pull_into(ids, out)
    return out


def set_rows(table: SparseTable, ids: Ids, weights: Floats, uses: int = 0) -> None:
    """Set the weights of rows. New ids get a row with initial optimizer state. Does not count as an update.

    Args:
        table: Table to change.
        ids: int64 [n], without repeats.
        weights: float32 [n, dim].
        uses: Number of uses with which new rows begin, in a table that counts how often rows are used.

    Raises:
        UsageError: The table is full; nothing was changed.
    """
    spec, rows = table.spec, table.rows(ids)
    fresh = [np.full_like(weights, slot.initial) for slot in spec.rule.slots]
    values = np.concatenate([weights, *fresh], axis=1)
    scores = np.zeros((len(ids), spec.scores), np.float32)
    scores[:, spec.pushed_scores :] = uses
    order = np.argsort(ids, kind="stable")
    known = order[np.searchsorted(ids, rows.ids, sorter=order)]
    values[known, spec.dim :] = rows.values[:, spec.dim :]
    scores[known] = rows.scores
    table.write(RowData(ids, values, np.full(len(ids), table.step), scores))


def add_rows(table: SparseTable, ids: Ids, deltas: Floats) -> None:
    """Add deltas to the weights of rows. New ids get a row with initial values first. Counts as an update.

    Arguments and errors are those of `set_rows`. Weights that are stored in 16 bits are rounded as in a push,
    and rows that have not been updated for long expire as in a push. Every id gets a row.
    """
    spec, weights = table.spec, weights_of(table, ids) + deltas
    table.begin_update(ids)
    *_, stream = initializer_arguments(spec.initializer, spec.seed, spec.name)
    form = RowFormat(spec.rule, spec.dim, spec.precision)
    set_rows(table, ids, draw_weights(form, ids, weights, stream, table.step), uses=1)
    table.end_update()


def check_columns(table: DenseTable | SparseTable, columns: Mapping[str, NDArray[Any]]) -> None:
    """Raise an error if `refill` cannot restore these columns of a snapshot, apart from their need of room.

    Raises:
        ShapeError: A column is missing, or has another type or length.
        UsageError: The table has no place for candidates (ids without a row yet).
    """
    spec, is_dense = table.spec, isinstance(table, DenseTable)
    for group in column_groups(spec):
        if not is_dense and columns.keys().isdisjoint(group.entries):
            continue
        count = group.length or len(column_of(spec, columns, next(iter(group.entries))))
        for name, (dtype, shape) in group.sized(count).items():
            column = column_of(spec, columns, name)
            if column.dtype != dtype or column.shape != shape:
                raise ShapeError(
                    f"table {spec.name!r}: the part that is set has {name!r} as {column.dtype} "
                    f"{column.shape}; it must be {np.dtype(dtype)} {shape}"
                )
    if isinstance(table, DenseTable):
        table.check_part(0, [len(columns[name]) for name in spec.slot_names])
        return
    table.check_candidates(len(columns.get(CANDIDATE_IDS, ())))
    if EVICTED[0] in columns:
        column_of(spec, columns, EVICTED[-1])


def refill(
    table: DenseTable | SparseTable, clock: TableClock, columns: Mapping[str, NDArray[Any]]
) -> None:
    """Restore a part of a table from columns of a snapshot (psfleet.core.engine.tables.row_data).

    Args:
        table: Table to change. It has room for the rows.
        clock: Number of the table's updates in the snapshot, and the times of its shrinks.
        columns: Columns by name, which `check_columns` has accepted. For a sparse table, they may contain
            rows, removed ids, candidates (ids without a row yet) and evictions, or some of these.
    """
    spec = table.spec
    if isinstance(table, DenseTable):
        table.restore(clock.step, [columns[name] for name in spec.slot_names])
        return
    # The clock comes first: if the table evicts rows, the age of a restored row is relative to the clock.
    # Removals come before rows, to make room.
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
