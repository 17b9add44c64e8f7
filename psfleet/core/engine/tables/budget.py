"""Memory limits of a server: MemoryBudget for all tables together, MemoryAccount for one sparse table.

A table checks its budget before it grows. So a push that needs too much memory is refused with an error
before anything changes, and the server is never killed for lack of memory. All figures are upper bounds: they
assume whole pages, and an index that has just been enlarged. There is one budget for host memory, one for
each kind of device, and one for rows on disk. How many rows are evicted when the memory is too small is
decided in admission.py and eviction_choice.py.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.schema.entry import CapacityEntry, part_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.candidates import CandidateIds
from psfleet.core.engine.tables.row_memory import RowMemory

Ids = NDArray[np.int64]


@dataclass
class MemoryBudget:
    """Memory taken by each table of a server in one kind of memory, and the limit of all together.

    Attributes:
        limit: Bytes that all tables may take, or None for no limit.
        spare: Bytes beyond the limit that tables may take while a snapshot is loaded, so that a table that
            fitted when it was saved fits again.
        held: Bytes of pushes that wait for the other workers' pushes of the same round (sync mode).
        place: Name of the memory in messages.
        advice: Advice for messages about a memory that is too small.
        only_reads: True if the tables are filled once and then only read.
        folder: Folder of the files of rows on disk, or empty.
        grants: True while an update is applied that has passed its checks: nothing is refused then. A check
            only estimates the growth of a table. Even new ids that use the memory of removed rows may enlarge
            the index by a few pages, so the last table of a push could otherwise refuse its update after
            other tables have changed.
    """

    limit: int | None = None
    spare: int = 0
    held: int = 0
    place: str = "memory"
    advice: str = (
        "Give the server more memory, use more servers, or let rows go (entry=CapacityEntry())"
    )
    only_reads: bool = False
    folder: str = ""
    grants: bool = False
    _taken: dict[str, int] = field(default_factory=dict)
    _plans: dict[str, int] | None = None

    def charge(self, table: str, total: int) -> None:
        """Record that the table takes `total` bytes now."""
        self._taken[table] = total

    def release(self, table: str) -> None:
        """Forget the bytes of a table that was not made in the end."""
        self._taken.pop(table, None)

    def available_for(self, table: str = "") -> int:
        """Return the total bytes that this table may take; without a name, the bytes that are still free."""
        assert self.limit is not None
        return self.limit - self.held - self.charged(besides=table)

    def charged(self, besides: str = "") -> int:
        """Return the bytes that all tables except `besides` take.

        Within a `with planning()` block, includes the growth that was checked there.
        """
        plans = self._plans
        totals = self._taken if plans is None else self._taken | plans
        return sum(total for name, total in totals.items() if name != besides)

    @property
    def used(self) -> float:
        """Part of the limit that is taken by tables and waiting pushes, from 0 to 1, or 0 without a limit."""
        return 1 - self.available_for() / self.limit if self.limit else 0.0

    def can_charge(self, table: str, total: int) -> bool:
        """Return whether the table may take a total of `total` bytes. It may always keep the bytes it has."""
        if self.limit is None or self.grants:
            return True
        return total <= max(self.available_for(table), self._taken.get(table, 0))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Raise the limit by `spare` within the block, for loading a snapshot.

        The process that saved the snapshot may have needed less memory besides its tables.
        """
        limit = self.limit
        if limit is not None:
            self.limit = limit + self.spare
        try:
            yield
        finally:
            self.limit = limit

    @property
    def is_planning(self) -> bool:
        """True within a `with planning()` block."""
        return self._plans is not None

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Plan an update of several tables: each `check_charge` in the block adds to earlier checks.

        Tables share the memory, so tables may fit one by one, but not all together.
        """
        self._plans = {}
        try:
            yield
        finally:
            self._plans = None

    def growth(self, table: str, total: int) -> int:
        """Return the additional bytes that the table needs to take a total of `total` bytes."""
        return max(total - self._taken.get(table, 0), 0)

    def check_charge(self, table: str, total: int, action: str) -> None:
        """Raise an error if the table may not take this much memory.

        Args:
            table: Name of the table.
            total: Bytes that the table would take.
            action: Action in words, for the message: "add 3 rows".

        Raises:
            UsageError: There is not enough memory.
        """
        if not self.can_charge(table, total):
            raise UsageError(
                f"table {table!r} was asked to {action}, for which it needs {_mib(total)} of {self.place}; "
                f"this server may give it {_mib(max(self.available_for(table), 0))}. {self.advice}"
            )
        if self._plans is not None:
            self._plans[table] = max(total, self._taken.get(table, 0))


def tables_share(free: float, most: int) -> float:
    """Return the bytes that tables may take: 7/8 of the free memory, or the settings' limit if lower.

    The remaining eighth is for gradients, ids and sums of the calls in progress.

    Args:
        free: Bytes that are free now.
        most: Limit of the settings, or 0 for none.
    """
    return min(free * 7 / 8, most or math.inf)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


class MemoryAccount:
    """Memory and row limits of one sparse table. Not thread-safe, except `can_surely_add`.

    Args:
        spec: Definition of the table.
        index: Storage of the rows.
        waiting: The candidates (ids without a row yet), or None if every id gets a row.
        fixed: Bytes that the table takes besides rows and candidates.
        budget: Memory that the table shares with other tables.
        limit: Largest number of rows that the table may have after a push.

    Attributes:
        limit: The argument `limit`, or less if the address space is too small for that many rows.
        evicts: True if old rows are evicted to make room for new rows when the table is full.

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
        budget.check_charge(spec.name, self._bytes_with(0), "be made")
        budget.charge(spec.name, self._bytes_with(0))

    @property
    def free_places(self) -> int:
        """Number of rows that pushes may add before the table is full."""
        return max(self.limit - len(self._index), 0)

    @property
    def evicts_for_memory(self) -> bool:
        """True if rows are evicted when memory is short."""
        return self.evicts and self._budget.limit is not None

    def can_surely_add(self, count: int) -> bool:
        """Return whether `count` new ids certainly fit. A quick check that any thread may call."""
        # Within `planning` this bound is not exact enough: the plan counts the new ids of each table exactly.
        if not self._have_places(count) or self._budget.is_planning:
            return False
        if self._budget.limit is None:
            return True
        # Counting the free slots takes longer than the comparison, so first try the bound that ignores them.
        return self._budget.can_charge(
            self._name, self._most_bytes_with(count)
        ) or self._budget.can_charge(self._name, self._bytes_with(count))

    def growth_bound(self, count: int, *, counts_rows: bool) -> float:
        """Return an upper bound of the additional bytes for `count` ids, or infinity if they may not fit.

        Args:
            count: Number of ids, each of which may be new.
            counts_rows: True to take into account that new rows can use the memory of removed rows. The
                result is then smaller, and takes longer to compute.
        """
        if not self._have_places(count):
            return math.inf
        total = self._bytes_with(count) if counts_rows else self._most_bytes_with(count)
        return self._budget.growth(self._name, total)

    def _have_places(self, count: int) -> bool:
        """Return whether there are row positions and index entries for `count` new ids.

        Ignores the budget.
        """
        index = self._index
        return count <= index.spare - (index.max_rows - self.limit) and index.has_lines(count)

    def reserve(self, rows: int) -> None:
        """Allocate memory for a total of `rows` rows now, at most for those that the table can hold.

        Raises:
            UsageError: There is not enough memory.
        """
        rows = min(rows, self._index.max_rows)
        new_rows = max(rows - len(self._index), 0)
        self._budget.check_charge(self._name, self._bytes_with(new_rows), f"reserve {rows} rows")
        self._index.reserve(rows)
        self._budget.charge(self._name, self._bytes_with(0))

    def charge_budget(self) -> None:
        """Record the table's present size in the budget; allocate memory for the next rows in background."""
        if self._budget.only_reads:
            return
        if self._budget.limit is None:
            self._index.keep_ahead()
        else:
            self._budget.charge(self._name, self._bytes_with(0))
            self._index.keep_ahead(self._budget.available_for())

    def most_affordable(self, most: int) -> int:
        """Return the number of new rows, up to `most`, for which there is memory. Found by bisection."""
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._budget.can_charge(self._name, self._bytes_with(middle)):
                low = middle
            else:
                high = middle - 1
        return max(low, min(most, self._index.free))

    def check_update(
        self, count: int, new: Ids, unknown: int, written: bool = False, evicted: int = 0
    ) -> None:
        """Raise an error if the table has no room for the new rows of an update. Changes nothing.

        Args:
            count: Number of rows that the update changes, including new rows.
            new: Ids that get a row in the update: int64 [n].
            unknown: Number of ids without a row, including those that get none in this update (candidates).
            written: True if the rows are written or restored, False for a push.
            evicted: Number of rows that will be evicted before the update.

        Raises:
            UsageError: There is no room.
        """
        row_limit = self._index.max_rows if written else self.limit
        row_count = len(self._index) - evicted
        if self.evicts and count > row_limit:
            raise UsageError(
                f"table {self._name!r} holds at most {row_limit} rows on this server and was asked "
                f"to set {count} at once; push fewer at a time or give it more room"
            )
        if not self.evicts and len(new) > max(row_limit - row_count, 0):
            raise UsageError(
                f"table {self._name!r} is full: it holds {row_count} rows of "
                f"at most {row_limit} and was asked to add {len(new)}"
            )
        self._index.grow(max(min(len(new), max(row_limit - row_count, 0)) - evicted, 0))
        if not self._index.has_lines(len(new)):
            raise UsageError(
                f"table {self._name!r} cannot add {len(new)} ids whose hashes are so much "
                "alike that its index would outgrow its place; renumber them"
            )
        new_ids = len(new) if self._waiting is None else unknown
        # An update that adds nothing must not be refused: memory that was allocated in advance counts as
        # taken, so the check below could fail.
        if not new_ids:
            return
        self._budget.check_charge(
            self._name, self._bytes_with(new_ids, evicted), f"add {len(new)} rows"
        )

    def _bytes_with(self, new_ids: int, evicted: int = 0) -> int:
        """Return an upper bound of the table's bytes after a push of `new_ids` ids without a row.

        The first new rows use the memory of the `evicted` rows.
        """
        # A table at its largest number of rows evicts one row for each new row, and grows no further.
        slots = new_ids - evicted
        rows = max(min(slots, self._index.max_rows - len(self._index)), 0) if new_ids else 0
        total = self._fixed + self._index.bytes_with(rows)
        if self._waiting is not None:
            total += self._waiting.index.bytes_with(min(new_ids, self._waiting.free_places))
        return total

    def _most_bytes_with(self, new_ids: int) -> int:
        """Return an upper bound of `_bytes_with` that is cheaper to compute."""
        total = self._fixed + self._index.most_bytes_with(new_ids)
        if self._waiting is not None:
            total += self._waiting.index.most_bytes_with(new_ids)
        return total
