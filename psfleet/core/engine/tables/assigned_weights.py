"""Weights set or added to by hand, with the optimizer state of their rows left as it is."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    column_of,
    rows_of,
)
from psfleet.core.engine.tables.sparse import SparseTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def values_of(table: DenseTable) -> Floats:
    """The weights, float32 [m]."""
    out = np.empty(table.count, np.float32)
    table.pull_into(out)
    return out


def set_values(table: DenseTable, values: Floats) -> None:
    """Set every weight; counts as no update."""
    table.restore(table.step, [values, *table.state()[1:]])


def add_values(table: DenseTable, deltas: Floats) -> None:
    """Add to every weight; counts as an update."""
    weights, *state = table.state()
    table.restore(table.step + 1, [weights + deltas, *state])


def weights_of(table: SparseTable, ids: Ids) -> Floats:
    """Weights by id, float32 [n, dim]; of an id without a row its first values."""
    out = np.empty((len(ids), table.spec.dim), np.float32)
    table.pull_into(ids, out)
    return out


def set_rows(table: SparseTable, ids: Ids, weights: Floats, uses: int = 0) -> None:
    """Set the weights of rows, adding rows with fresh state for unknown ids; counts as no update.

    Args:
        ids: int64 [n], no id twice.
        weights: float32 [n, dim].
        uses: Frequency of the rows that are added, in a table that counts it.

    Raises:
        UsageError: The table is full; nothing was changed.
    """
    spec, rows = table.spec, table.rows(ids)
    fresh = [np.full_like(weights, slot.initial) for slot in spec.rule.slots]
    values = np.concatenate([weights, *fresh], axis=1)
    scores = np.zeros((len(ids), spec.scores), np.float32)
    scores[:, spec.pushed_scores :] = uses
    order = np.argsort(ids, kind="stable")
    there = order[np.searchsorted(ids, rows.ids, sorter=order)]
    values[there, spec.dim :] = rows.values[:, spec.dim :]
    scores[there] = rows.scores
    table.write(RowData(ids, values, np.full(len(ids), table.step), scores))


def add_rows(table: SparseTable, ids: Ids, deltas: Floats) -> None:
    """Add to the weights of rows, adding those of unknown ids; counts as an update.

    Args and errors as for `set_rows`. Weights that are stored in 16 bits are rounded as by a push.
    """
    spec, weights = table.spec, weights_of(table, ids) + deltas
    table.step += 1
    table.count_update(ids)
    *_, stream = initializer_arguments(spec.initializer, spec.seed, spec.name)
    form = RowFormat(spec.rule, spec.dim, spec.precision)
    set_rows(table, ids, draw_weights(form, ids, weights, stream, table.step), uses=1)


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
    """Set a part of a table from the columns of psfleet.core.engine.tables.row_data.

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
