"""Rows of a sparse table by id, in host memory, on a device or in both: what each of these does."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hash_index import SEGMENT_COUNT
from psfleet.kernels.hashing import hash_ids
from psfleet.schema.table import TableSpec

__all__ = [
    "EVERY",
    "ROW_BYTES",
    "Keys",
    "Listed",
    "RowMemory",
    "RowStore",
    "RowView",
    "StoreScores",
]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Listed = tuple[Ids, Ids, Ids]
"""Ids, slots, and the step of each row's last push."""

Keys = NDArray[np.uint64]
"""Of rows: the lower the sooner a row goes. Score, then age."""

EVERY = (0, SEGMENT_COUNT)
"""All segments."""
ROW_BYTES = 34  # of index, for each row: the most that random ids take
_BINS = 4096  # of ages


class RowView(Protocol):
    """Reads the rows of a moment while they change: psfleet.tables.copy_on_write.FrozenRows."""

    def keep(self, ids: Ids) -> None:
        """Rows of these ids are about to change or to go."""

    def keep_segments(self, first: int, last: int) -> None:
        """Any row of segments first to last - 1 may be about to change."""


class StoreScores(Protocol):
    """The scores of the rows in one memory, by the eviction policy of their table."""

    def keys(self, step: int, least: int, most: int) -> Keys:
        """The keys up to `most` of rows at least `least` old."""

    def listed(self, step: int, least: int, most: int, count: int) -> tuple[Ids, Keys]:
        """Ids and keys of these rows, of which there are `count`."""

    def use(self, ids: Ids, step: int) -> None:
        """The update of this step names these ids; those that have a row count as pushed at it."""


class RowMemory(ABC):
    """Rows of `width` float32 by id. Not thread-safe.

    A row has a slot, the number of its place. Which slot a new row gets means nothing: no result and no
    snapshot depends on it. An id belongs to one of SEGMENT_COUNT segments, chosen by its hash for ever.

    Attributes:
        max_rows: The most rows it can hold.
    """

    max_rows: int

    @property
    @abstractmethod
    def stores(self) -> "Sequence[RowStore]":
        """The memories in which its rows are, each row in one of them."""

    # -- memory --------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory in use by rows and index."""

    @property
    def device_bytes(self) -> int:
        """How much of it is a device's."""
        return 0

    @property
    @abstractmethod
    def spare(self) -> int:
        """At least so many rows can be added. Costs nothing to ask."""

    @property
    @abstractmethod
    def free(self) -> int:
        """So many rows can be added without more memory: there are slots of rows that were removed."""

    @abstractmethod
    def has_lines(self, count: int) -> bool:
        """Whether the index has a place for so many new ids, whatever they are; costs nothing to ask.

        False only if most hashes of its ids have been much alike.
        """

    @abstractmethod
    def taken(self, more: int) -> int:
        """Memory that this takes with `more` rows: whole pages, the index as if it had just grown."""

    @abstractmethod
    def taken_at_most(self, more: int) -> int:
        """As `taken`, as if no row had ever been removed. Costs nothing to ask."""

    @abstractmethod
    def keep_ahead(self, room: int | None = None) -> None:
        """Have memory for the next rows made in the background, a part of `room` bytes at most."""

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Have memory for so many rows in all made now."""

    # -- ids -----------------------------------------------------------------------------------

    @abstractmethod
    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """The slot of each id, 0 for an unknown one, and how many were unknown.

        Slots are of use until the next update: rows may move.
        """

    @abstractmethod
    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """`locate`; the rows that are there count as pushed at this step."""

    @abstractmethod
    def place(self, ids: Ids, steps: Ids) -> Ids:
        """The slot of each id, a new one for an unknown id; its row counts as pushed at its step."""

    @abstractmethod
    def remove(self, ids: Ids) -> int:
        """Forget ids; returns how many were there."""

    @abstractmethod
    def recall(self, ids: Ids, step: int) -> Listed:
        """The rows of these ids; slot and step 0 for an unknown one. `step`: of the table."""

    @abstractmethod
    def restamp(self, old: int, new: int) -> None:
        """The table's step goes from `old` to `new`; rows keep the step of their last push."""

    # -- rows ----------------------------------------------------------------------------------

    @abstractmethod
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        """Ids, slots and ages of the rows of these segments that are so old, in no good order."""

    @abstractmethod
    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        """How many rows have each age >> shift: int64 [bins]; the last bin takes what is older."""

    @abstractmethod
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """Shrink the shows and clicks that begin with value `place` of each row.

        factors: by which both are multiplied; the worth of a show without a click; that of a click.

        Returns:
            Ids of the rows that are now worth less than `least`.
        """

    @abstractmethod
    def gather(self, slots: Ids) -> Floats:
        """Whole rows: float32 [n, width]."""

    @abstractmethod
    def scatter(self, slots: Ids, rows: Floats) -> None:
        """Set whole rows."""

    # -- what follows from these ---------------------------------------------------------------

    def entries(self) -> tuple[Ids, Ids]:
        """Every id, ascending, and its slot."""
        ids, slots, _ = self.aged(0)
        order = np.argsort(ids)
        return ids[order], slots[order]

    def oldest(self, step: int, count: int, least: int) -> Ids:
        """Ids of the `count` rows that were pushed the longest time ago, fewer if fewer are `least` old.

        Of equally old rows those whose ids have the smallest hash.
        """
        for shift in (0, 10, 20):  # the finest bins whose last one need not be opened
            bins = self.histogram(step, shift, _BINS)
            if bins[-1] < count:
                break
        reach = np.cumsum(bins[::-1])[::-1]  # rows in this bin or in older ones
        enough = np.flatnonzero(reach >= count)
        first = int(enough[-1]) << shift if len(enough) else 0
        ids, _, ages = self.aged(step, max(first, least))
        if len(ids) <= count:
            return np.ascontiguousarray(ids)
        edge = np.partition(ages, len(ages) - count)[len(ages) - count]
        older, level = ids[ages > edge], ids[ages == edge]
        left = count - len(older)
        return np.append(older, level[np.argpartition(hash_ids(level), left - 1)[:left]])

    def keep(self, ids: Ids) -> None:
        """Rows of these ids are about to change."""
        for store in self.stores:
            for view in store.views:
                view.keep(ids)

    def keep_segments(self, first: int, last: int) -> None:
        """Any row of segments first to last - 1 may be about to change."""
        for store in self.stores:
            for view in store.views:
                view.keep_segments(first, last)


class RowStore(RowMemory):
    """Rows in one memory, where each stays in its slot until it is removed.

    Attributes:
        listed_at_once: How many segments a view should ask for at a time: a power of two.
        views: Of moments whose rows are being read; told of every change before it is made. Whoever
            changes rows otherwise than by a method of this class tells them with `keep`.
    """

    listed_at_once: ClassVar[int] = 1
    views: list[RowView]

    @property
    def stores(self) -> "Sequence[RowStore]":
        """See RowMemory."""
        return (self,)

    @property
    @abstractmethod
    def next_slot(self) -> int:
        """The first slot that no row has had; slot 0 is none."""

    @property
    def spare(self) -> int:
        """See RowMemory."""
        return self.max_rows + 1 - self.next_slot

    @property
    def free(self) -> int:
        """See RowMemory."""
        return self.next_slot - 1 - len(self)

    @abstractmethod
    def free_slots(self) -> Ids:
        """The slots below `next_slot` that have no row; slot 0 is not among them."""

    @abstractmethod
    def scores(self, spec: TableSpec, place: int) -> StoreScores:
        """Of these rows; `place`: where within a stored row they begin.

        Raises:
            RuleError: The compiler does not take the policy's score function.
        """

    def listed(self, first: int, last: int, step: int) -> Listed:
        """The rows of segments first to last - 1. `step`: of the table."""
        ids, slots, ages = self.aged(step, segments=(first, last))
        return ids, slots, step - ages
