"""Rows of a sparse table by id, in host memory, on a device or in both: what each of these does."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.id_routing import largest_share
from psfleet.core.engine.schema.entry import CapacityEntry, part_of
from psfleet.core.engine.schema.table import TableSpec

if TYPE_CHECKING:
    from psfleet.core.engine.tables.row_snapshot import FrozenRows

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Listed = tuple[Ids, Ids, Ids]
"""Ids, slots, and the step of each row's last push."""

Keys = NDArray[np.uint64]
"""Eviction keys of rows: the lower, the sooner. Score, then age."""

EVERY = (0, SEGMENT_COUNT)
"""All segments."""
ROW_BYTES = 34  # of index, for each row: the most that random ids take
_BINS = 4096  # of ages


_DEVIATIONS = 6


class RowMemory(ABC):
    """Rows of `width` float32 by id. Not thread-safe.

    A row has a slot, the number of its place. Which slot a new row gets means nothing: no result and no
    snapshot depends on it. An id belongs to one of SEGMENT_COUNT segments, chosen by its hash for ever.

    Attributes:
        max_rows: The most rows it can hold.
        paging: Traffic with a disk; None: the rows are in memory.
    """

    max_rows: int
    paging: "DiskTraffic | None" = None

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
        """Bytes of it in a device's memory."""
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
        """Return whether the index has a place for any so many new ids; costs nothing to ask.

        False only if most hashes of its ids have been much alike.
        """

    def grow(self, more: int) -> None:
        """Have places for so many new rows, in a memory that has to make them first.

        Raises:
            UsageError: There is no room; nothing was changed.
        """
        return

    @abstractmethod
    def taken(self, more: int) -> int:
        """Memory that this takes with `more` rows: whole pages, the index as if it had just grown."""

    @abstractmethod
    def taken_at_most(self, more: int) -> int:
        """Return an upper bound of `taken`, as if no row had ever been removed. Costs nothing to ask."""

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
        """Count the rows by age >> shift: int64 [bins]; the last bin takes what is older."""

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

    def put(self, ids: Ids, steps: Ids, rows: Floats) -> None:
        """Set the rows of these ids, new ones for unknown ids, which count as pushed at these steps."""
        self.scatter(self.place(ids, steps), rows)

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
        rest = count - len(older)
        return np.append(older, level[np.argpartition(hash_ids(level), rest - 1)[:rest]])

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
        listed_at_once: Number of segments that a view should ask for at a time: a power of two.
        views: Views of the rows at some moment, being read. Each change calls their `keep` before
            it is made; code that changes rows otherwise than by a method of this class calls it
            too.
    """

    listed_at_once: ClassVar[int] = 1
    views: "list[FrozenRows]"

    @property
    @override
    def stores(self) -> "Sequence[RowStore]":
        return (self,)

    @property
    @abstractmethod
    def next_slot(self) -> int:
        """The first slot that no row has had; slot 0 is none."""

    @property
    @override
    def spare(self) -> int:
        return self.max_rows + 1 - self.next_slot

    @override
    def keep(self, ids: Ids) -> None:
        for view in self.views:
            view.keep(ids)

    @property
    @override
    def free(self) -> int:
        return self.next_slot - 1 - len(self)

    @abstractmethod
    def free_slots(self) -> Ids:
        """The slots below `next_slot` that have no row; slot 0 is not among them."""

    def used(self) -> NDArray[np.uint64]:
        """A bit for each slot below `next_slot`, set in those that have a row."""
        bits = np.full(self.next_slot // 64 + 1, 2**64 - 1, np.uint64)
        clear_bits(bits, np.append(self.free_slots(), 0))
        return bits

    def listed(self, first: int, last: int, step: int) -> Listed:
        """The rows of segments first to last - 1. `step`: of the table."""
        ids, slots, ages = self.aged(step, segments=(first, last))
        return ids, slots, step - ages


class RowLimits(NamedTuple):
    """The limits of one server's part.

    The hash of an id decides on its server. Of n rows a server gets its share of the virtual shards on
    average, with a standard deviation below the root of that. So a table that is full on some number of
    servers has more than a server's part on some servers of another fleet: what is restored or written may
    exceed it.

    Attributes:
        pushed: Pushes add rows up to this number.
        held: Rows that are restored or written may be this many.
    """

    pushed: int
    held: int

    @classmethod
    def of(cls, spec: TableSpec, row_width: int, servers: int, most: int) -> "RowLimits":
        """Those of a table's entry.

        Args:
            row_width: float32 values of a row with its state.
            servers: Number of servers that share the rows.
            most: Rows of one server's part, whatever the entry says.
        """
        capacity = part_of(spec.entry, CapacityEntry)
        if capacity is None:
            return cls(most, most)
        row = 4 * row_width + ROW_BYTES
        limits = [capacity.rows, capacity.bytes // row if capacity.bytes else 0]
        limit = min([limit for limit in limits if limit], default=most * servers)
        share = max(-(-limit // servers), 1)
        largest = max(math.ceil(limit * largest_share(servers)), share)
        more = _DEVIATIONS * math.isqrt(largest) if servers > 1 else 0
        return cls(min(share, most), min(largest + more, most))


@dataclass
class RowTraffic:
    """Counts ids of one server's part. Workers name an id once in a call.

    Attributes:
        pulled: Ids whose weights were read.
        unknown: Those of them without a row.
        updated: Rows that pushes have updated; pushes of one round count as one.
        restored: Rows that were written from elsewhere, as from a snapshot.
    """

    pulled: int = 0
    unknown: int = 0
    updated: int = 0
    restored: int = 0


@dataclass
class DiskTraffic:
    """Counts rows of a table on disk.

    Attributes:
        found: Rows that were asked for and in memory.
        read: Those that were in the file. For each of them a page or two are read.
        written: Rows that went to the file, those included that moved within it.
        seconds: Time in which calls waited for reads.
        disk_bytes: Bytes of the rows that are in the file now.
    """

    found: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0
    disk_bytes: int = 0

    @property
    def used(self) -> int:
        """Rows that were asked for."""
        return self.found + self.read


def clear_bits(bits: NDArray[np.uint64], places: Ids) -> None:
    """Clear these bits of a row of words."""
    np.bitwise_and.at(bits, places >> 6, ~(np.uint64(1) << (places & 63).astype(np.uint64)))
