"""Moments of the tables that a later snapshot may ask the changes since."""

from collections.abc import Iterator, Mapping

from psfleet.shard.shard_tables import ShardTables, Table
from psfleet.tables.dense import DenseTable
from psfleet.tables.row_data import HistoryPoint
from psfleet.tables.row_snapshot import FrozenTable
from psfleet.tables.sparse import SparseTable

__all__ = ["DeltaBases"]


class DeltaBases:
    """Of use for this process only: one that starts again remembers none."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[int, HistoryPoint]] = {}  # cut -> table -> mark

    def __iter__(self) -> Iterator[int]:
        """The numbers of the cuts that are remembered."""
        return iter(self._marks)

    def freeze(self, tables: Mapping[int, Table], since: int) -> list[FrozenTable]:
        """The tables as they are now; of sparse ones what has changed since that cut, if it is remembered."""
        marks = self._marks.get(since, {})
        return [_frozen(table, marks.get(key)) for key, table in tables.items()]

    def remember(self, tables: ShardTables, number: int) -> None:
        """The cut of that number is made now."""
        self._marks[number] = {key: table.mark() for key, table in tables.sparse()}

    def forget(self, tables: Mapping[int, Table], base: int) -> None:
        """Cuts before `base` are not asked for any more; 0: nor is any."""
        for number in [n for n in self._marks if not 0 < base <= n]:
            for key, mark in self._marks.pop(number).items():
                table = tables[key]
                assert isinstance(table, SparseTable)
                table.release(mark)


def _frozen(table: Table, mark: HistoryPoint | None) -> FrozenTable:
    if isinstance(table, DenseTable) or mark is None:
        return table.freeze()
    changes = table.changed_since(mark)
    return table.freeze(changes.ids, changes.removed)
