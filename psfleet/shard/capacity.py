"""Whether a shard has memory for what it is sent, decided before anything changes.

In sync mode the pushes that are held for a round update the tables together, so what is asked for
with the next one is asked for beside them.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.runtime.interface import Gradient
from psfleet.shard.events import PartState, Push
from psfleet.shard.shard_tables import ShardTables
from psfleet.tables.sparse import SparseTable

__all__ = ["check_room", "find_surplus", "hold"]

Ids = NDArray[np.int64]
Parts = Sequence[Gradient] | Sequence[PartState]


def check_room(
    tables: ShardTables, parts: Parts, held: Iterable[Push], written: bool = False
) -> None:
    """Refuse rows for which a table has no room beside those of the pushes that are held.

    `written`: the rows are written, not pushed.
    """
    for table, ids in _wanted(tables, parts, held):
        table.check_room(ids, written=written)


def find_surplus(tables: ShardTables, parts: Parts, held: Sequence[Push]) -> list[tuple[int, Ids]]:
    """Where memory is short: the rows that are to go, by table, of tables that may let rows go.

    Raises:
        UsageError: Rows of one table are to go, and another that may let none go has no room for its part.
    """
    if all(budget.limit is None for budget in tables.budgets.values()):
        return []
    wanted = list(_wanted(tables, parts, held))
    if not any(table.evicts for table, _ in wanted):
        return []  # then `check_room` says all that is to be said
    found = [(table, ids, table.surplus(ids)) for table, ids in wanted]
    for table, ids, gone in found:
        if not len(gone):
            table.check_room(ids)
    return [(table.spec.key, gone) for table, _, gone in found if len(gone)]


def hold(tables: ShardTables, pushes: Sequence[Push]) -> None:
    """Take memory for pushes that wait for their round, the newest last.

    Raises:
        UsageError: There is too little.
    """
    budget = tables.budget
    if budget.limit is None:
        return
    held = sum(
        gradient.values.nbytes + (0 if gradient.ids is None else gradient.ids.nbytes)
        for push in pushes
        for gradient in push.gradients
    )
    left = budget.room() + budget.held
    if held > left:
        raise UsageError(
            f"the pushes of round {pushes[-1].sequence} take {held} bytes while they wait for it, "
            f"server {tables.index} has {max(left, 0)} left for them; give the server more memory"
        )
    budget.held = held


def _wanted(
    tables: ShardTables, parts: Parts, held: Iterable[Push]
) -> Iterator[tuple[SparseTable, list[Ids]]]:
    """The sparse tables of these parts, and all ids that their next update may name."""
    wanted: dict[int, list[Ids]] = {}
    for part in parts:
        if part.ids is not None:
            wanted.setdefault(part.table, []).append(part.ids)
    for push in held:
        for gradient in push.gradients:
            if gradient.ids is not None and gradient.table in wanted:
                wanted[gradient.table].append(gradient.ids)
    for key, ids in wanted.items():
        table = tables[key]
        if isinstance(table, SparseTable):
            yield table, ids
