"""The memory of one sparse table: what it takes, and what may be added to it."""

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.schema.entry import CapacityEntry, part_of
from psfleet.schema.table import TableSpec
from psfleet.tables.budget import MemoryBudget
from psfleet.tables.candidates import CandidateIds
from psfleet.tables.row_memory import RowMemory

__all__ = ["MemoryAccount"]

Ids = NDArray[np.int64]


class MemoryAccount:
    """Not thread-safe, but for `surely_fit`.

    Args:
        spec: Of the table.
        index: Of its rows.
        waiting: The ids that wait for a row, if its entry lets them.
        fixed: Bytes that the table takes besides, however many rows it has.
        budget: The memory that it shares with other tables.
        limit: The most rows that pushes may bring it to.

    Attributes:
        limit: The same, as far as there is address space.
        evicts: Rows go when others need their places.

    Raises:
        UsageError: There is no memory for the table.
    """

    def __init__(
        self,
        spec: TableSpec,
        index: RowMemory,
        waiting: CandidateIds | None,
        fixed: int,
        budget: MemoryBudget,
        limit: int,
    ) -> None:
        self.limit = min(limit, index.max_rows)
        self._fixed = fixed
        capacity = part_of(spec.entry, CapacityEntry)
        self.evicts = capacity is not None and capacity.evicts
        self._name = spec.name
        self._index = index
        self._waiting = waiting
        self._budget = budget
        budget.check(spec.name, self._taken(0), "be made")
        budget.take(spec.name, self._taken(0))

    @property
    def places(self) -> int:
        """How many rows pushes may add before others have to go."""
        return max(self.limit - len(self._index), 0)

    @property
    def evicts_for_memory(self) -> bool:
        """Whether rows go when there is no memory for others."""
        return self.evicts and self._budget.limit is not None

    def surely_fit(self, count: int) -> bool:
        """Whether so many ids fit, whichever they are. Any thread may ask."""
        index = self._index
        if count > index.spare - (index.max_rows - self.limit) or not index.has_lines(count):
            return False
        if self._budget.limit is None:
            return True
        # To count the rows takes longer than all else here, so first as if no slot of one were free.
        return self._budget.fits(self._name, self._at_most(count)) or self._budget.fits(
            self._name, self._taken(count)
        )

    def reserve(self, rows: int) -> None:
        """See SparseTable.reserve."""
        more = max(rows - len(self._index), 0)
        self._budget.check(self._name, self._taken(more), f"reserve {rows} rows")
        self._index.reserve(rows)
        self._budget.take(self._name, self._taken(0))

    def account(self) -> None:
        """Say what the table takes now, and have some of what is left made ready for it."""
        if self._budget.limit is None:
            self._index.keep_ahead()
        else:
            self._budget.take(self._name, self._taken(0))
            self._index.keep_ahead(self._budget.room())

    def affordable(self, most: int) -> int:
        """How many rows, `most` at most, may be added within the memory that there is."""
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._budget.fits(self._name, self._taken(middle)):
                low = middle
            else:
                high = middle - 1
        return max(low, min(most, self._index.free))

    def check(self, named: int, new: Ids, unknown: int, written: bool = False) -> None:
        """Refuse an update of `named` rows, of which these are new, if there is no room for it.

        Args:
            unknown: How many ids there are for which a row or a place to wait is needed.
            written: The rows are written, not pushed.
        """
        most, there = self._index.max_rows if written else self.limit, len(self._index)
        if self.evicts and named > most:
            raise UsageError(
                f"table {self._name!r} holds at most {most} rows on this server and was asked "
                f"to set {named} at once; push fewer at a time or give it more room"
            )
        if not self.evicts and len(new) > max(most - there, 0):
            raise UsageError(
                f"table {self._name!r} is full: it holds {there} rows of "
                f"at most {most} and was asked to add {len(new)}"
            )
        if not self._index.has_lines(len(new)):
            raise UsageError(
                f"table {self._name!r} cannot add {len(new)} ids whose hashes are so much "
                "alike that its index would outgrow its place; renumber them"
            )
        more = len(new) if self._waiting is None else unknown
        if not more:  # what was made ready ahead counts, and is no reason to refuse
            return
        self._budget.check(self._name, self._taken(more), f"add {len(new)} rows")

    def _taken(self, more: int) -> int:
        """Memory that the table takes at most once `more` unknown ids have been pushed."""
        # Beyond the most rows, new ones take the places of others.
        rows = max(min(more, self._index.max_rows - len(self._index)), 0) if more else 0
        taken = self._fixed + self._index.taken(rows)
        if self._waiting is not None:
            taken += self._waiting.index.taken(min(more, self._waiting.room))
        return taken

    def _at_most(self, more: int) -> int:
        """No less than `_taken`, in less time."""
        taken = self._fixed + self._index.taken_at_most(more)
        if self._waiting is not None:
            taken += self._waiting.index.taken_at_most(more)
        return taken
