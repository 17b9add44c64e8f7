"""Pushes become updates of tables: whether there is room, what is corrected, and the updates.

In sync mode the pushes that are held for a round update the tables together, so what is asked for
with the next one is asked for beside them.

A gradient is taken at the weights w0 that its worker pulled and applied to the weights w of now. Between
them lie the pushes of other workers, whose number is the staleness. Two corrections, each off at 0:

- damping p: the learning rate is divided by (1 + staleness)^p. p = 1 is about the staleness-aware rate of
  Zhang et al. (2016), "Staleness-aware Async-SGD for Distributed Deep Learning", who divide by it.
- compensation c: the gradient g becomes g + c * g * g * (w - w0), the first-order term of its change with
  the diagonal of g * g for the Hessian. This is DC-ASGD-c of Zheng et al. (2017), "Asynchronous Stochastic
  Gradient Descent with Delay Compensation". A server keeps the values of each worker's last pull for it.

A push is corrected before it is recorded, so a replay or a standby needs neither staleness nor old values.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.interface import Gradient, Read
from psfleet.core.engine.schema.table import OWN
from psfleet.core.engine.shard.events import Correction, Evict, PartState, Push
from psfleet.core.engine.shard.shard_tables import ShardTables, Table
from psfleet.core.engine.tables.assigned_weights import add_rows, add_values
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


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


Parts = Sequence[Gradient] | Sequence[PartState]


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


class StaleGradients:
    """Corrections of stale gradients in one shard, and the values kept for them."""

    def __init__(self) -> None:
        self._pulled: dict[int, dict[int, tuple[Ids | None, Floats]]] = {}
        self._lock = threading.Lock()

    def keep(self, worker: int, reads: Sequence[Read], values: Sequence[Floats]) -> None:
        """Remember what a worker is given; any thread may call."""
        copies = {
            read.table: (None, array.copy()) if read.ids is None else _by_id(read.ids, array)
            for read, array in zip(reads, values, strict=True)
        }
        with self._lock:
            self._pulled.setdefault(worker, {}).update(copies)

    def forget(self, worker: int) -> None:
        """The worker's incarnation is over, or a new one begins."""
        with self._lock:
            self._pulled.pop(worker, None)

    def correct(self, push: Push, staleness: int, tables: ShardTables) -> Push:
        """The push as it is to be applied; it itself if there is nothing to correct."""
        correction = push.correction
        if correction is None or not staleness:
            return push
        factor = float((1 + staleness) ** -correction.damping)
        gradients = tuple(
            gradient
            if tables[gradient.table].spec.name.startswith(OWN)
            else dataclasses.replace(
                gradient,
                values=self._compensated(push.worker, gradient, correction, tables),
                learning_rate=gradient.learning_rate * factor,
            )
            for gradient in push.gradients
        )
        return dataclasses.replace(push, gradients=gradients)

    def _compensated(
        self, worker: int, gradient: Gradient, correction: Correction, tables: ShardTables
    ) -> Floats:
        with self._lock:
            pull = self._pulled.get(worker, {}).get(gradient.table)
        if not correction.compensation or pull is None:
            return gradient.values
        table = tables[gradient.table]
        if isinstance(table, DenseTable):
            change = np.empty(table.count, np.float32)
            table.pull_into(change)
            change -= pull[1]
            return _with_delay(gradient.values, _at(change, gradient.ids), correction.compensation)
        assert gradient.ids is not None
        there, places = _found(gradient.ids, pull[0])
        now = np.empty((len(gradient.ids), table.spec.dim), np.float32)
        table.pull_into(gradient.ids, now)
        change = np.where(there[:, None], now - pull[1][places], np.float32(0))
        values = gradient.values.copy()  # shows and clicks behind the gradient stay
        dim = table.spec.dim
        values[:, :dim] = _with_delay(values[:, :dim], change, correction.compensation)
        return values


def _with_delay(gradient: Floats, change: Floats, compensation: float) -> Floats:
    result: Floats = gradient + np.float32(compensation) * gradient * gradient * change
    return result


def _at(values: Floats, places: Ids | None) -> Floats:
    return values if places is None else values[places]


def _by_id(ids: Ids, rows: Floats) -> tuple[Ids, Floats]:
    """Copies in ascending order of id."""
    order = np.argsort(ids)
    return ids[order], rows[order]


def _found(ids: Ids, sorted_ids: Ids | None) -> tuple[NDArray[np.bool_], Ids]:
    """Find ids among ascending ones: a mask and their positions, 0 for those missing."""
    if sorted_ids is None or not len(sorted_ids):
        return np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    places = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return sorted_ids[places] == ids, places
