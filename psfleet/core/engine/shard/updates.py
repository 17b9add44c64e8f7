"""Pushes become updates of tables: whether there is room, and the updates.

In sync mode the pushes that are held for a round update the tables together, so what is asked for
with the next one is asked for beside them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.shard.events import Evict, PartState, Push
from psfleet.core.engine.shard.shard_tables import ShardTables, Table
from psfleet.core.engine.tables.assigned_weights import add_rows, add_values
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


Parts = Sequence[Gradient] | Sequence[PartState]


def update(tables: Mapping[int, Table], pushes: Sequence[Push]) -> None:
    """One update of every table by its rule: the mean over the pushes that name it, in their order.

    A table that counts gets one update for each push.
    """
    if len(pushes) == 1:  # which names no table twice
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


def take(tables: Mapping[int, Table], push: Push, adds: bool) -> None:
    """One push in a mode without rounds. `adds`: it brings what is to be added to the weights."""
    if adds:
        _add(tables, push)
    else:
        update(tables, [push])


def _add(tables: Mapping[int, Table], push: Push) -> None:
    """Geo mode: what a push brings has been learned elsewhere and is added to the weights."""
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
    """Return the parts of pushes that concern a sparse table."""
    return [(gradient.ids, gradient.values) for gradient in gradients if gradient.ids is not None]


def _whole(gradient: Gradient, count: int) -> Floats:
    """A dense gradient of `count` values, zero where none was sent."""
    if gradient.ids is None:
        return gradient.values
    values = np.zeros(count, np.float32)
    values[gradient.ids] = gradient.values
    return values


def _mean(gradients: Iterator[Floats]) -> Floats:
    """The mean of gradients, summed in their order."""
    total = next(gradients)
    count = 1
    for values in gradients:
        total = np.add(total, values, out=total if count > 1 else None)
        count += 1
    return total if count == 1 else total * np.float32(1.0 / count)


def check_push_room(
    tables: ShardTables, parts: Parts, waiting: Iterable[Push], written: bool = False
) -> None:
    """Refuse rows for which a table has no room beside those of the pushes that are held.

    `written`: the rows are written, not pushed.
    """
    for table, ids in _wanted(tables, parts, waiting):
        table.check_room(ids, written=written)


def make_room(
    tables: ShardTables,
    push: Push,
    waiting: Mapping[int, Push] | None,
    record: Callable[[Evict], None],
) -> None:
    """Let rows go that a push leaves no room for, each table's after `record` has it.

    `waiting`: pushes of the open round by seat; None: the mode has no rounds.

    Raises:
        UsageError: There is no room for the push.
    """
    others: list[Push] = []
    if waiting is not None:
        others = [other for other in waiting.values() if other.worker != push.worker]
        _reserve_room(tables, [*others, push])
    for key, ids in _find_surplus(tables, push.gradients, others):
        record(Evict(key, ids))
        tables.evict(key, ids)
    check_push_room(tables, push.gradients, others)


def _find_surplus(
    tables: ShardTables, parts: Parts, waiting: Sequence[Push]
) -> list[tuple[int, Ids]]:
    """Find the rows to evict where memory is short, by table, of tables that may evict rows.

    Raises:
        UsageError: Rows of one table are to go, and another that may let none go has no room for its part.
    """
    if set(map(attrgetter("limit"), tables.budgets.values())) == {None}:
        return []
    demands = list(_wanted(tables, parts, waiting))
    if not any(table.evicts for table, _ in demands):
        return []  # then `check_room` says all that is to be said
    surplus = [(table, ids, table.surplus(ids)) for table, ids in demands]
    for table, ids, rows in surplus:
        if not len(rows):
            table.check_room(ids)
    return [(table.spec.key, rows) for table, _, rows in surplus if len(rows)]


def _reserve_room(tables: ShardTables, pushes: Sequence[Push]) -> None:
    """Take memory for pushes that wait for their round, the newest last.

    Raises:
        UsageError: There is too little.
    """
    budget = tables.budget
    if budget.limit is None:
        return
    size = sum(
        gradient.values.nbytes + (0 if gradient.ids is None else gradient.ids.nbytes)
        for push in pushes
        for gradient in push.gradients
    )
    room = max(budget.room() + budget.held, 0)
    if size > room:
        raise UsageError(
            f"the pushes of round {pushes[-1].sequence} take {size} bytes while they wait for it, "
            f"server {tables.index} has {room} left for them; give the server more memory"
        )
    budget.held = size


def _wanted(
    tables: ShardTables, parts: Parts, waiting: Iterable[Push]
) -> Iterator[tuple[SparseTable, list[Ids]]]:
    """The sparse tables of these parts, and all ids that their next update may name."""
    ids_by_table: dict[int, list[Ids]] = {}
    for part in parts:
        if part.ids is not None:
            ids_by_table.setdefault(part.table, []).append(part.ids)
    for push in waiting:
        for gradient in push.gradients:
            if gradient.ids is not None and gradient.table in ids_by_table:
                ids_by_table[gradient.table].append(gradient.ids)
    for key, ids in ids_by_table.items():
        table = tables[key]
        if isinstance(table, SparseTable):
            yield table, ids
