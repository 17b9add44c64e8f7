"""Memory limits of a server: MemoryBudget for all tables of a server, MemoryAccount for one sparse table.

A table asks before it grows, so that a push is refused with a sentence while nothing has changed yet, and
the server is never killed because memory is short. The figures are upper bounds: whole pages, and an index
that has just grown. There is a budget for each memory: the host's, a device's, and that of rows on disk.
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
    """Bytes that each table of a server takes of one memory, and the limit of all together.

    Attributes:
        limit: Bytes that all tables may take, or None for no limit.
        spare: Bytes beyond the limit that tables may take while a snapshot is loaded. What fitted when it was
            saved then fits again.
        held: Bytes of pushes that wait for their round.
        place: Name of the memory, for messages.
        advice: Advice for a memory that is too small, for messages.
        only_reads: True if the tables are filled once and then only read.
        folder: Folder of the files of rows on disk, or empty.
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
    _taken: dict[str, int] = field(default_factory=dict)
    _plans: dict[str, int] | None = None
    _grants: bool = False

    def charge(self, table: str, total: int) -> None:
        """Note the bytes that the table takes now."""
        self._taken[table] = total

    def available_for(self, table: str = "") -> int:
        """Return the bytes that this table may take in all; without a name, the bytes that are left."""
        assert self.limit is not None
        return self.limit - self.held - self.charged(besides=table)

    def charged(self, besides: str = "") -> int:
        """Bytes that tables take, but for this one; within `planning` those that they are going to take."""
        plans = self._plans
        totals = self._taken if plans is None else self._taken | plans
        return sum(total for name, total in totals.items() if name != besides)

    @property
    def used(self) -> float:
        """Part of the limit that tables and held pushes take, or 0 without a limit."""
        return 1 - self.available_for() / self.limit if self.limit else 0.0

    def can_charge(self, table: str, total: int) -> bool:
        """Return whether the table may take so many bytes in all."""
        if self.limit is None or self._grants:
            return True
        return total <= max(self.available_for(table), self._taken.get(table, 0))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let tables take the `spare` bytes too, within the block: processes differ in what they need."""
        limit = self.limit
        if limit is not None:
            self.limit = limit + self.spare
        try:
            yield
        finally:
            self.limit = limit

    @property
    def is_planning(self) -> bool:
        """True within `planning`."""
        return self._plans is not None

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Within, each `check` counts what the tables that were checked before it are going to take.

        Tables share the memory: what there is room for in each of them alone may be too much for all.
        """
        self._plans = {}
        try:
            yield
        finally:
            self._plans = None

    @contextlib.contextmanager
    def granting(self) -> Iterator[None]:
        """Within, tables may take what they need for updates for which room was found before.

        What a table will take is an estimate: new ids in the slots of removed rows may still enlarge its
        index by a few pages. Without this, the last table of a push would refuse after the others have
        changed.
        """
        self._grants = True
        try:
            yield
        finally:
            self._grants = False

    def growth(self, table: str, total: int) -> int:
        """Return the number of bytes by which `total` exceeds what the table takes now."""
        return max(total - self._taken.get(table, 0), 0)

    def check_charge(self, table: str, total: int, action: str) -> None:
        """Refuse an action for which the table would need more than it may have.

        Args:
            table: Name of the table.
            total: Bytes that the table would take.
            action: Action that the table was asked for, for the message.

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
    """Return the bytes that tables may take.

    An eighth is left for the gradients, ids and sums of the calls in progress.

    Args:
        free: Bytes that are free now.
        most: Limit by the settings, or 0 for none.
    """
    return min(free * 7 / 8, most or math.inf)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


class MemoryAccount:
    """Memory and rows of one sparse table, against its budget. Not thread-safe, except `can_surely_add`.

    Args:
        spec: Definition of the table.
        index: Index of the rows.
        waiting: The candidates, or None if every id gets a row.
        fixed: Bytes that the table takes for other things, independent of its rows.
        budget: Memory that the table shares with other tables.
        limit: Largest number of rows that pushes may bring the table to.

    Attributes:
        limit: The argument `limit`, or fewer rows if the address space is too small for it.
        evicts: True if rows are evicted when a full table needs others.

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
        """Number of rows that pushes may add before others are evicted."""
        return max(self.limit - len(self._index), 0)

    @property
    def evicts_for_memory(self) -> bool:
        """True if rows are evicted when there is no memory for others."""
        return self.evicts and self._budget.limit is not None

    def can_surely_add(self, count: int) -> bool:
        """Return whether any so many ids fit. Any thread may ask."""
        if (
            not self._have_places(count) or self._budget.is_planning
        ):  # a plan counts the ids exactly
            return False
        if self._budget.limit is None:
            return True
        # Counting the rows takes longer than the rest, so first try the bound that ignores free slots.
        return self._budget.can_charge(
            self._name, self._most_bytes_with(count)
        ) or self._budget.can_charge(self._name, self._bytes_with(count))

    def growth_bound(self, count: int, *, counts_rows: bool) -> float:
        """Return an upper bound of the bytes that the table needs for any `count` ids.

        Infinite if they may not fit for another reason.

        Args:
            count: Number of ids.
            counts_rows: Count the free slots of removed rows, which takes longer.
        """
        if not self._have_places(count):
            return math.inf
        total = self._bytes_with(count) if counts_rows else self._most_bytes_with(count)
        return self._budget.growth(self._name, total)

    def _have_places(self, count: int) -> bool:
        """Return whether rows and index surely have places for any `count` new ids, given the memory."""
        index = self._index
        return count <= index.spare - (index.max_rows - self.limit) and index.has_lines(count)

    def reserve(self, rows: int) -> None:
        more = max(rows - len(self._index), 0)
        self._budget.check_charge(self._name, self._bytes_with(more), f"reserve {rows} rows")
        self._index.reserve(rows)
        self._budget.charge(self._name, self._bytes_with(0))

    def charge_budget(self) -> None:
        """Charge what the table takes now, and prepare memory for the next rows in the background."""
        if self._budget.only_reads:
            return
        if self._budget.limit is None:
            self._index.keep_ahead()
        else:
            self._budget.charge(self._name, self._bytes_with(0))
            self._index.keep_ahead(self._budget.available_for())

    def most_affordable(self, most: int) -> int:
        """Return the number of rows, `most` at most, that may be added within the free memory."""
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
        """Refuse an update of `count` rows, of which these are new, if there is no room for it.

        Args:
            count: Number of rows that the update sets.
            new: Ids of those that are new.
            unknown: Number of ids that need a row or a place to wait.
            written: True if the rows are written, not pushed.
            evicted: Number of other rows that will be evicted before the update.
        """
        most = self._index.max_rows if written else self.limit
        there = len(self._index) - evicted
        if self.evicts and count > most:
            raise UsageError(
                f"table {self._name!r} holds at most {most} rows on this server and was asked "
                f"to set {count} at once; push fewer at a time or give it more room"
            )
        if not self.evicts and len(new) > max(most - there, 0):
            raise UsageError(
                f"table {self._name!r} is full: it holds {there} rows of "
                f"at most {most} and was asked to add {len(new)}"
            )
        self._index.grow(max(min(len(new), max(most - there, 0)) - evicted, 0))
        if not self._index.has_lines(len(new)):
            raise UsageError(
                f"table {self._name!r} cannot add {len(new)} ids whose hashes are so much "
                "alike that its index would outgrow its place; renumber them"
            )
        more = len(new) if self._waiting is None else unknown
        if (
            not more
        ):  # memory that was prepared ahead counts as taken, and must not refuse an update
            return
        self._budget.check_charge(
            self._name, self._bytes_with(more, evicted), f"add {len(new)} rows"
        )

    def _bytes_with(self, more: int, evicted: int = 0) -> int:
        """Memory that the table takes at most once `more` unknown ids have been pushed.

        The first of them take the slots of `evicted` rows that will have gone.
        """
        # Beyond the most rows, new ones take the places of others.
        slots = more - evicted
        rows = max(min(slots, self._index.max_rows - len(self._index)), 0) if more else 0
        total = self._fixed + self._index.bytes_with(rows)
        if self._waiting is not None:
            total += self._waiting.index.bytes_with(min(more, self._waiting.free_places))
        return total

    def _most_bytes_with(self, more: int) -> int:
        """Return an upper bound of `_bytes_with`, in less time."""
        total = self._fixed + self._index.most_bytes_with(more)
        if self._waiting is not None:
            total += self._waiting.index.most_bytes_with(more)
        return total
