"""RowMemory: the interface of a sparse table's storage, wherever its rows are.

    RowMemory                   rows by id; implemented once more for rows on a GPU with overflow to the host
     +-- RowStore               rows in one address space, which snapshots can view
          +-- HostRowMemory     host memory
          |    +-- DiskRowMemory, MappedRowMemory    host memory and a file
          +-- DeviceRowMemory   a GPU's memory

Words used throughout: a *slot* is the number of a row's place; a *segment* is one of SEGMENT_COUNT classes of
ids, chosen by their hash, in which sweeps go through a table; a *stamp* is the step of a row's last push, and
its *age* the number of updates since. Read this module first, then host_rows.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.id_routing import largest_share
from psfleet.core.engine.schema.entry import CapacityEntry, part_of
from psfleet.core.engine.schema.table import TableSpec

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Listed = tuple[Ids, Ids, Ids]
"""Ids, slots, and the step of each row's last push."""

Keys = NDArray[np.uint64]
"""Eviction keys of rows: score in the upper 32 bits, then age. Rows with low keys go first."""

EVERY = (0, SEGMENT_COUNT)
"""All segments."""
ROW_BYTES = 34  # bytes of index for each row: the most that random ids take
_BINS = 4096  # bins of the histogram of ages


_DEVIATIONS = 6  # standard deviations that a server's part may have above its expected share


class RowMemory(ABC):
    """Rows of `width` float32 values by id. Not thread-safe: the table holds its lock.

    No result and no snapshot depends on the slot that a row gets. The segment of an id never changes.

    Attributes:
        max_rows: The most rows it can hold.
        paging: Counts of rows read and written, or None if no row is on disk.
    """

    max_rows: int
    paging: "DiskTraffic | None" = None

    @property
    @abstractmethod
    def stores(self) -> "Sequence[RowStore]":
        """The memories that this one consists of. Each row is in exactly one memory."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory in use by rows and index."""

    @property
    def device_bytes(self) -> int:
        """The part of `bytes` that is in a device's memory."""
        return 0

    @property
    @abstractmethod
    def spare(self) -> int:
        """Lower bound for the number of rows that can be added; cheap to compute."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Number of rows that can be added without more memory, in slots of removed rows."""

    @abstractmethod
    def has_lines(self, count: int) -> bool:
        """Return whether the index has room for any `count` new ids; cheap to compute.

        False only if the hashes of most ids have been much alike, as of ids that were chosen on purpose.
        """

    def grow(self, more: int) -> None:
        """Prepare places for `more` new rows; only files have to be enlarged beforehand.

        Raises:
            UsageError: There is no room; nothing was changed.
        """
        return

    @abstractmethod
    def bytes_with(self, more: int) -> int:
        """Return the bytes taken after `more` new rows: whole pages, and an index that has just grown."""

    @abstractmethod
    def most_bytes_with(self, more: int) -> int:
        """Return an upper bound of `bytes_with`, as if no row had ever been removed; cheap to compute."""

    @abstractmethod
    def keep_ahead(self, available: int | None = None) -> None:
        """Make memory for the next rows in the background, at most a part of the `available` bytes."""

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Make memory for `rows` rows in all now, so that no later push waits for it."""

    @abstractmethod
    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """Return the slot of each id, 0 for unknown ids, and the number of unknown ids.

        The slots are valid until the next update: rows may move.
        """

    @abstractmethod
    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """Do what `locate` does, and stamp the rows that exist as pushed at this step."""

    @abstractmethod
    def find_or_add(self, ids: Ids, steps: Ids) -> Ids:
        """Return the slot of each id, new slots for unknown ids; stamp each row with its step of `steps`."""

    @abstractmethod
    def remove(self, ids: Ids) -> int:
        """Remove the rows of these ids; return how many existed."""

    @abstractmethod
    def recall(self, ids: Ids, step: int) -> Listed:
        """Return ids, slots and last pushes of these rows, 0 and 0 for unknown ids.

        Args:
            ids: int64 [n].
            step: Present step of the table; an age is the number of steps before it.
        """

    @abstractmethod
    def restamp(self, old: int, new: int) -> None:
        """Rewrite all stamps for a table whose step changes from `old` to `new`.

        Rows keep the step of their last push. A stamp is the low 32 bits of a step, which become ambiguous
        unless this is called now and then.
        """

    @abstractmethod
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        """Return ids, slots and ages of rows, in arbitrary order.

        Args:
            step: Present step of the table.
            least: Smallest age.
            segments: First segment, and the one after the last.
            most: Largest age.
        """

    @abstractmethod
    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        """Count the rows by age >> shift: int64 [bins]; the last bin also counts all older rows."""

    @abstractmethod
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """Decay the shows and clicks of every row.

        Args:
            place: Offset of the shows within a stored row; the clicks follow.
            factors: Factor for both, worth of a show without a click, and worth of a click.
            least: Smallest worth of a row that may stay.

        Returns:
            Ids of the rows that are now worth less than `least`.
        """

    @abstractmethod
    def gather(self, slots: Ids) -> Floats:
        """Return copies of whole rows: float32 [n, width]."""

    @abstractmethod
    def scatter(self, slots: Ids, rows: Floats) -> None:
        """Overwrite whole rows: float32 [n, width]."""

    def put(self, ids: Ids, steps: Ids, rows: Floats) -> None:
        """Set the rows of these ids, adding unknown ids, and stamp each row with its step of `steps`."""
        self.scatter(self.find_or_add(ids, steps), rows)

    def entries(self) -> tuple[Ids, Ids]:
        """Return all ids, ascending, and the slot of each."""
        ids, slots, _ = self.aged(0)
        order = np.argsort(ids)
        return ids[order], slots[order]

    def oldest(self, step: int, count: int, least: int) -> Ids:
        """Return the ids of the `count` oldest rows, or fewer if fewer have the age `least`.

        Among equally old rows those whose ids have the smallest hash are chosen, so that the choice does not
        depend on slots and a replay of the log makes the same one.
        """
        # A histogram of ages finds an age that at least `count` rows have, so that only those are listed and
        # not the whole table. Take the finest bins whose last, open one is not enough by itself.
        for shift in (0, 10, 20):
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
        remaining = count - len(older)
        return np.append(older, level[np.argpartition(hash_ids(level), remaining - 1)[:remaining]])

    def keep(self, ids: Ids) -> None:
        """Have snapshots in progress copy the rows of these ids, which are about to change or go."""
        for store in self.stores:
            for view in store.views:
                view.keep(ids)

    def keep_segments(self, first: int, last: int) -> None:
        """Have snapshots in progress copy all rows of segments `first` to `last` - 1, which may change."""
        for store in self.stores:
            for view in store.views:
                view.keep_segments(first, last)


class RowView(Protocol):
    """Snapshot in progress of one memory (row_snapshot.FrozenRows), which copies rows before they change."""

    def keep(self, ids: Ids) -> None:
        """Copy the rows of these ids. The caller holds the table's lock."""

    def keep_segments(self, first: int, last: int) -> None:
        """Copy all rows of segments `first` to `last` - 1. The caller holds the table's lock."""


class RowStore(RowMemory):
    """Rows in one memory. A row stays in its slot until it is removed, or moved between memory and disk.

    Attributes:
        listed_at_once: Number of segments that a view should list at a time: a power of two.
        views: Snapshots in progress. Every change calls their `keep` *before* it is made; code that changes
            rows other than through a method of this class must do so too.
    """

    listed_at_once: ClassVar[int] = 1
    views: list[RowView]

    @property
    @override
    def stores(self) -> "Sequence[RowStore]":
        return (self,)

    @property
    @abstractmethod
    def next_slot(self) -> int:
        """First slot that no row has had. Slot 0 is never used: it means unknown."""

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
        """Return the slots below `next_slot` that have no row, without slot 0."""

    def used(self) -> NDArray[np.uint64]:
        """Return a bitmap of the slots below `next_slot` that have a row, 64 slots in each word."""
        bits = np.full(self.next_slot // 64 + 1, 2**64 - 1, np.uint64)
        clear_bits(bits, np.append(self.free_slots(), 0))
        return bits

    def listed(self, first: int, last: int, step: int) -> Listed:
        """Return the rows of segments `first` to `last` - 1; `step` is the table's present step."""
        ids, slots, ages = self.aged(step, segments=(first, last))
        return ids, slots, step - ages


class RowLimits(NamedTuple):
    """Largest numbers of rows in one server's part of a table.

    The hash of an id decides on its server, so that parts differ in size: a server gets n rows on average,
    with a standard deviation below sqrt(n). If a table that is full on 4 servers is restored on 3, some of
    them get more than a third of the limit. So rows that are restored or written may exceed the limit for
    pushes, by six deviations.

    Attributes:
        pushed: Limit for pushes.
        held: Limit for rows that are restored or written.
    """

    pushed: int
    held: int

    @classmethod
    def from_spec(cls, spec: TableSpec, row_width: int, servers: int, most: int) -> "RowLimits":
        """Compute the limits of one server from the CapacityEntry of a table.

        Args:
            spec: Definition of the table.
            row_width: float32 values of a row with its state.
            servers: Number of servers that share the rows.
            most: Limit for one server's part, even if the entry allows more.
        """
        capacity = part_of(spec.entry, CapacityEntry)
        if capacity is None:
            return cls(most, most)
        row = 4 * row_width + ROW_BYTES
        limits = [capacity.rows, capacity.bytes // row if capacity.bytes else 0]
        limit = min([limit for limit in limits if limit], default=most * servers)
        share = max(-(-limit // servers), 1)
        largest = max(math.ceil(limit * largest_share(servers)), share)
        margin = _DEVIATIONS * math.isqrt(largest) if servers > 1 else 0
        return cls(min(share, most), min(largest + margin, most))


@dataclass
class RowTraffic:
    """Counts ids of one server's part of a table, for metrics. A call names each id once.

    Attributes:
        pulled: Ids whose weights were read.
        unknown: The part of `pulled` that had no row.
        updated: Rows that pushes have updated; pushes of one round count as one.
        restored: Rows that were added other than by a push, for example from a snapshot.
    """

    pulled: int = 0
    unknown: int = 0
    updated: int = 0
    restored: int = 0


@dataclass
class DiskTraffic:
    """Counts rows of a table on disk, for metrics.

    Attributes:
        found: Requested rows that were in memory.
        read: Requested rows that were in the file. Each costs a read of one or two pages.
        written: Rows written to the file, including rows that compaction moved within it.
        seconds: Seconds that calls waited for reads.
        disk_bytes: Bytes of the rows that are in the file now.
    """

    found: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0
    disk_bytes: int = 0

    @property
    def used(self) -> int:
        """Number of requested rows, in memory or in the file."""
        return self.found + self.read


def clear_bits(bits: NDArray[np.uint64], places: Ids) -> None:
    """Clear the bits of these slots in a bitmap, 64 slots in each word."""
    np.bitwise_and.at(bits, places >> 6, ~(np.uint64(1) << (places & 63).astype(np.uint64)))
