"""Applies pushes to tables, and checks that all tables have room before a push is accepted.

In sync mode the stored (*held*) pushes of a round update the tables together when the round closes. No table
may be full then, since the pushes have been acknowledged. So each push, and each write between two rounds, is
checked together with all held pushes and for all tables at once, and is refused before anything changes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.shard.events import Push
from psfleet.core.engine.shard.shard_tables import ShardTables, Table
from psfleet.core.engine.tables.assigned_weights import add_rows, add_values
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Rows = Sequence[tuple[int, Ids | None]]
"""Pairs (key of a table, ids of rows), without ids for a dense table."""
Evictions = list[tuple[int, Ids]]

_NO_IDS = np.zeros(0, np.int64)


def update(tables: Mapping[int, Table], pushes: Sequence[Push]) -> None:
    """Update each table once by its optimizer rule, with the mean of the pushes' gradients for the table.

    The mean is over the pushes that have a gradient for the table, summed in the order of the pushes. A table
    whose rule counts gets one update per push instead.
    """
    if len(pushes) == 1:  # a push has one gradient per table, so there is nothing to group
        for gradient in pushes[0].gradients:
            table, ids, rate = tables[gradient.table], gradient.ids, gradient.learning_rate
            if isinstance(table, DenseTable):
                whole = gradient.values if ids is None else _whole(gradient, table.count)
                table.push(whole, rate)
            elif ids is not None:
                table.push(ids, gradient.values, rate)
        return
    by_table: dict[int, list[Gradient]] = {}
    for push in pushes:
        for gradient in push.gradients:
            by_table.setdefault(gradient.table, []).append(gradient)
    for key, gradients in by_table.items():
        table, rate = tables[key], gradients[0].learning_rate
        if isinstance(table, DenseTable):
            table.push(_mean(_whole(gradient, table.count) for gradient in gradients), rate)
        elif table.spec.rule.counts:
            for ids, values in _parts(gradients):
                table.push(ids, values, rate)
        else:
            table.push_mean(_parts(gradients), rate)


def apply_push(tables: Mapping[int, Table], push: Push, adds: bool) -> None:
    """Apply one push of a mode without rounds.

    Args:
        tables: Tables of the shard.
        push: The push.
        adds: True if the push has deltas to add to the weights (geo mode), False if it has gradients.
    """
    if adds:
        _add(tables, push)
    else:
        update(tables, [push])


def _add(tables: Mapping[int, Table], push: Push) -> None:
    """Add the deltas of a push to the weights (geo mode: the worker has applied the rule itself)."""
    for delta in push.gradients:
        table = tables[delta.table]
        if isinstance(table, DenseTable):
            add_values(table, _whole(delta, table.count))
        else:
            assert delta.ids is not None
            if table.spec.rule.counts:
                table.push(delta.ids, delta.values, delta.learning_rate)
            else:
                add_rows(table, delta.ids, delta.values)


def _parts(gradients: Sequence[Gradient]) -> list[tuple[Ids, Floats]]:
    """Return ids and values of each push for a sparse table."""
    return [(gradient.ids, gradient.values) for gradient in gradients if gradient.ids is not None]


def _whole(gradient: Gradient, count: int) -> Floats:
    """Return a dense gradient as float32 [count], with zeros where the push has no value."""
    if gradient.ids is None:
        return gradient.values
    values = np.zeros(count, np.float32)
    values[gradient.ids] = gradient.values
    return values


def _mean(gradients: Iterator[Floats]) -> Floats:
    """Return the mean of gradients, summed in the given order, so that the result is always bit-identical."""
    total = next(gradients)
    count = 1
    for values in gradients:
        total = np.add(total, values, out=total if count > 1 else None)
        count += 1
    return total if count == 1 else total * np.float32(1.0 / count)


def check_write_room(tables: ShardTables, rows: Rows, held: Mapping[int, Push]) -> None:
    """Raise an error if the tables have no room for the rows of a write and of the pushes in `held`.

    Args:
        tables: Tables of the shard.
        rows: Rows to write or restore.
        held: Pushes of the open round that wait for the pushes of other workers, by worker rank.

    Raises:
        UsageError: There is no room; nothing has changed.
    """
    _find_room(tables, rows, held.values(), is_write=True)


def plan_push_room(
    tables: ShardTables, push: Push, held: Mapping[int, Push] | None, adds: bool = False
) -> tuple[int, Evictions]:
    """Check that the tables have room for a push, and choose the rows to evict for it.

    Args:
        tables: Tables of the shard.
        push: The push, whose gradients were checked.
        held: Pushes of the open round by seat (worker rank), or None if the mode has no rounds.
        adds: True if the push has deltas to add to the weights (geo mode).

    Returns:
        The bytes of all pushes that will then wait for their round to close.
        The rows to evict before the push, as pairs (key of a table, ids).

    Raises:
        UsageError: There is no room; nothing has changed.
    """
    other_pushes: list[Push] = []
    budget = tables.budget
    before = waiting_bytes = budget.held
    if held is not None:
        other_pushes = [held_push for held_push in held.values() if held_push.worker != push.worker]
        waiting_bytes = _waiting_bytes(tables, [*other_pushes, push])
    budget.held = waiting_bytes  # for the check only: waiting pushes leave less memory for rows
    try:
        return waiting_bytes, _find_room(tables, _rows_of(push), other_pushes, adds=adds)
    finally:
        budget.held = before


def _find_room(
    tables: ShardTables,
    rows: Rows,
    held_pushes: Iterable[Push],
    *,
    is_write: bool = False,
    adds: bool = False,
) -> Evictions:
    """Return the rows to evict so that all tables have room for these rows and the held pushes.

    Raises:
        UsageError: There is no room even if rows are evicted.
    """
    demands = _demands(rows, held_pushes)
    sparse = [
        # Added deltas give every id a row (`add_rows`), but counts are pushed in each mode.
        (
            table,
            ids,
            is_write and any(written == key for written, _ in rows),
            adds and not table.spec.rule.counts,
        )
        for key, ids in demands.items()
        if isinstance(table := tables[key], SparseTable)
    ]
    budget = tables.budget
    if budget.limit is None:
        for table, ids, is_written, admits_all in sparse:
            table.check_room(ids, is_written, admits_all=admits_all)
        return []
    # Usually there is plenty of memory, and an upper bound shows it without looking up ids. Try the cheap
    # bound first, then the bound that also counts free slots.
    for counts_rows in (False, True):
        bounds = [table.growth_bound(ids, counts_rows=counts_rows) for table, ids, *_ in sparse]
        if sum(bounds) <= max(budget.available_for(), 0):
            return []
    evictions: Evictions = []
    with budget.planning():
        for table, ids, is_written, admits_all in sparse:
            surplus = _NO_IDS if is_write else table.surplus(ids, admits_all)
            table.check_room(ids, is_written, len(surplus), admits_all)
            if len(surplus):
                evictions.append((table.spec.key, surplus))
    return evictions


def _waiting_bytes(tables: ShardTables, pushes: Sequence[Push]) -> int:
    """Return the bytes of pushes that wait for their round; the newest push is last.

    Raises:
        UsageError: The budget does not have that much memory.
    """
    budget = tables.budget
    if budget.limit is None:
        return budget.held
    size = sum(
        gradient.values.nbytes + (0 if gradient.ids is None else gradient.ids.nbytes)
        for push in pushes
        for gradient in push.gradients
    )
    available = max(budget.available_for() + budget.held, 0)
    if size > available:
        raise UsageError(
            f"the pushes of round {pushes[-1].sequence} take {size} bytes while they wait for it, "
            f"server {tables.index} has {available} left for them; give the server more memory"
        )
    return size


def _demands(rows: Rows, held_pushes: Iterable[Push]) -> dict[int, list[Ids]]:
    """Return for each table the ids that its next update may change, by held pushes or these rows."""
    ids_by_table: dict[int, list[Ids]] = {}
    for key, ids in (*(part for push in held_pushes for part in _rows_of(push)), *rows):
        if ids is not None:
            ids_by_table.setdefault(key, []).append(ids)
    return ids_by_table


def _rows_of(push: Push) -> Rows:
    return [(gradient.table, gradient.ids) for gradient in push.gradients]
