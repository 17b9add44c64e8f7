"""RowMemory: the interface of a sparse table's row storage, for rows in memory, on disk or on a GPU.

    RowMemory                   rows by id; also implemented for rows on a GPU with overflow to host memory
     +-- RowStore               rows in one address space; snapshots can take an image of them
          +-- HostRowMemory     host memory
          |    +-- DiskRowMemory, MappedRowMemory    host memory and a file
          +-- DeviceRowMemory   a GPU's memory

Words used throughout: a *slot* is the number of a row's position; a *segment* is one of SEGMENT_COUNT classes
of ids, chosen by their hash, so that a scan can go through a table in parts; a *stamp* is the step of a row's
last push, and its *age* the number of updates since. Read this module first, then host_rows.py.
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
"""Eviction keys of rows: score in the upper 32 bits, then age. Rows with low keys are evicted first."""

EVERY = (0, SEGMENT_COUNT)
"""All segments."""
# Index bytes that a budget counts for each new row: more than the 31.5 to 33.4 bytes that a growing table
# with random ids was measured to take (docs/decisions/0003-sparse-rows.md). Chosen ids may take more.
ROW_BYTES = 34
_BINS = 4096  # bins of the histogram of ages


_DEVIATIONS = 6  # standard deviations that a server's part may have above its expected share


class RowMemory(ABC):
    """Storage of rows by id, each with `width` float32 values.

    Not thread-safe: the caller holds the table's lock.

    The slot (position) of a row affects no result and no snapshot. The segment of an id, a class that
    follows from its hash, never changes.

    Attributes:
        max_rows: Largest number of rows.
        paging: Counts of rows read from disk and written to it, or None if no row is on disk.
    """

    max_rows: int
    paging: "DiskTraffic | None" = None

    @property
    @abstractmethod
    def stores(self) -> "Sequence[RowStore]":
        """The separate memories that make up this one, such as GPU and host. A row is in only one memory."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of memory in use by rows and index."""

    @property
    def device_bytes(self) -> int:
        """The part of `bytes` that is in the memory of a GPU."""
        return 0

    @property
    @abstractmethod
    def spare(self) -> int:
        """Lower bound of the number of rows that can be added. Cheap to compute."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Number of rows that can be added without more memory, because rows were removed before."""

    @abstractmethod
    def has_lines(self, count: int) -> bool:
        """Return whether `count` new ids with any hashes have room in what is reserved; cheap to compute.

        In host memory only the index can lack room, if most ids have similar hashes, which does not happen by
        chance. On disk the file or the slots in memory may be too few as well: `grow` makes that room or
        refuses, so call it before you take False for a reason to refuse.
        """

    def grow(self, more: int) -> None:
        """Enlarge files so that `more` new rows have room. Does nothing for memory that grows by itself.

        Raises:
            UsageError: There is no room; nothing was changed.
        """
        return

    @abstractmethod
    def bytes_with(self, more: int) -> int:
        """Return the bytes taken after `more` rows are added, in whole pages and with an enlarged index."""

    @abstractmethod
    def most_bytes_with(self, more: int) -> int:
        """Return an upper bound of `bytes_with`, as if no row was ever removed; cheap to compute."""

    @abstractmethod
    def keep_ahead(self, available: int | None = None) -> None:
        """Allocate memory for the next rows in the background.

        Args:
            available: Free bytes of the budget, of which a part may be used, or None for no limit.
        """

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Allocate memory for a total of `rows` rows now, so that no later push waits for it.

        `rows`: At most `max_rows`.
        """

    @abstractmethod
    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """Return the slot (position) of each id's row, or 0, and the number of ids without a row.

        The slots are valid until the next update: rows may move.

        Args:
            ids: int64 [n].

        Returns:
            The slot of each id: int64 [n], 0 for an id without a row.
            The number of ids without a row.
        """

    @abstractmethod
    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """Return the same as `locate`, and record for each row that its last push was at this step."""

    @abstractmethod
    def find_or_add(self, ids: Ids, steps: Ids) -> Ids:
        """Return the slot (position) of each id's row, after adding rows for new ids.

        Args:
            ids: int64 [n].
            steps: Step to record as the last push of each row: int64 [n].
        """

    @abstractmethod
    def remove(self, ids: Ids) -> int:
        """Remove the rows of these ids; return the number of rows that existed."""

    @abstractmethod
    def recall(self, ids: Ids, step: int) -> Listed:
        """Return the ids, their slots (row positions) and the steps of their last pushes.

        Slot and step are 0 for an id without a row.

        Args:
            ids: int64 [n].
            step: Present step of the table, which turns stored ages into steps.
        """

    @abstractmethod
    def restamp(self, old: int, new: int) -> None:
        """Rewrite all stored steps for a table whose step changes from `old` to `new`.

        Rows keep the step of their last push. Memory stores only its low 32 bits, which become ambiguous
        unless this method is called from time to time.
        """

    @abstractmethod
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        """Return ids, slots (positions) and ages of the rows within a range of ages, in arbitrary order.

        The age of a row is the number of updates of the table since its last push. A segment is one of a
        fixed number of classes of ids, chosen by their hash.

        Args:
            step: Present step of the table.
            least: Smallest age.
            segments: First segment, and the segment after the last.
            most: Largest age.
        """

    @abstractmethod
    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        """Return a histogram of ages: the number of rows for each value of `age >> shift`.

        Returns int64 [bins]. The last bin also includes all older rows.
        """

    @abstractmethod
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """Multiply shows and clicks of every row by a factor; return ids whose score is then too low.

        The score is a weighted sum of clicks and of shows without a click.

        Args:
            place: Position of the shows within a stored row; the clicks follow.
            factors: Factor for shows and clicks, score of a show without a click, and score of a click.
            least: Smallest score of a row that may stay.

        Returns:
            Ids of the rows whose score is below `least`.
        """

    @abstractmethod
    def gather(self, slots: Ids) -> Floats:
        """Return copies of the rows at these positions: float32 [n, width]."""

    @abstractmethod
    def scatter(self, slots: Ids, rows: Floats) -> None:
        """Overwrite the rows at these positions, as returned by `find_or_add`, with float32 [n, width]."""

    def put(self, ids: Ids, steps: Ids, rows: Floats) -> None:
        """Write the rows of these ids, adding new ids, and record the step of each row's last push."""
        self.scatter(self.find_or_add(ids, steps), rows)

    def entries(self) -> tuple[Ids, Ids]:
        """Return all ids, ascending, and the slot (position) of each id's row."""
        ids, slots, _ = self.aged(0)
        order = np.argsort(ids)
        return ids[order], slots[order]

    def oldest(self, step: int, count: int, least: int) -> Ids:
        """Return the ids of the `count` oldest rows, without rows whose age is below `least`.

        Of equally old rows, those whose ids have the smallest hash are returned. So the result does not
        depend on the position of rows, and a replay of the log gives the same result.
        """
        # A histogram of ages finds an age that at least `count` rows have, so that only these rows are listed
        # and not the whole table. Use the finest bins for which the last bin, which includes all older rows,
        # has fewer than `count` rows.
        # _BINS is 2**12, so that the bins of shift 20 reach all ages, which have 32 bits.
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
        """Let snapshots in progress copy the rows of these ids, before the caller changes or removes them."""
        for store in self.stores:
            for view in store.views:
                view.keep(ids)

    def keep_segments(self, first: int, last: int) -> None:
        """Let snapshots in progress copy all rows of a range of segments before these rows change.

        Args:
            first: First segment: a class of ids, chosen by their hash.
            last: Segment after the last.
        """
        for store in self.stores:
            for view in store.views:
                view.keep_segments(first, last)


class RowView(Protocol):
    """Image of the rows in one memory, for a snapshot in progress. It copies rows before they change."""

    def keep(self, ids: Ids) -> None:
        """Copy the rows of these ids before they change. The caller holds the table's lock."""

    def keep_segments(self, first: int, last: int) -> None:
        """Copy all rows of segments `first` to `last` - 1 before they change. The table's lock is held.

        A segment is a class of ids, chosen by their hash.
        """


class RowStore(RowMemory):
    """Rows in one memory, each at a fixed position called a slot.

    A row stays in its slot until it is removed, or moved between memory and disk.

    Attributes:
        listed_at_once: Number of segments (classes of ids by hash) that an image should list at a time: a
            power of two.
        views: Images of snapshots in progress. Methods of this class call their `keep` *before* each change.
            Other code that changes rows must do so too.
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
        """First slot (row position) that was never used.

        Slot 0 is reserved: it means that an id has no row.
        """

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
        """Return the row positions below `next_slot` that have no row, without position 0."""

    def used(self) -> NDArray[np.uint64]:
        """Return a bitmap of the positions below `next_slot` that have a row, 64 positions in each word."""
        bits = np.full(self.next_slot // 64 + 1, 2**64 - 1, np.uint64)
        clear_bits(bits, np.append(self.free_slots(), 0))
        return bits

    def listed(self, first: int, last: int, step: int) -> Listed:
        """Return ids, slots (positions) and steps of the last push of the rows in a range of segments.

        Args:
            first: First segment: a class of ids, chosen by their hash.
            last: Segment after the last.
            step: Present step of the table.
        """
        ids, slots, ages = self.aged(step, segments=(first, last))
        return ids, slots, step - ages


class RowLimits(NamedTuple):
    """Largest numbers of rows in one server's part of a table.

    The hash of an id decides which server stores it, so that parts differ in size: a server gets n rows on
    average, with a standard deviation below sqrt(n). If a table that is full on 4 servers is restored on 3
    servers, some servers get more than a third of the limit. So restored or written rows may exceed the limit
    for pushes by six standard deviations.

    Attributes:
        pushed: Limit for rows that pushes add.
        held: Limit for rows that are restored or written.
    """

    pushed: int
    held: int

    @classmethod
    def from_spec(cls, spec: TableSpec, row_width: int, servers: int, most: int) -> "RowLimits":
        """Compute the limits of one server from the CapacityEntry of a table.

        Args:
            spec: Definition of the table.
            row_width: Number of float32 values in a row with its optimizer state.
            servers: Number of servers that share the rows.
            most: Limit for one server's part, even if the CapacityEntry allows more.
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
    """Counts ids of one server's part of a table, for metrics. Each call counts an id once.

    In one process without servers, a pull of a batch with few repeats counts these too.

    Attributes:
        pulled: Ids whose weights were read.
        unknown: The part of `pulled` that had no row.
        updated: Rows that pushes have updated. In sync mode the pushes of one round count as one.
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
        written: Rows written to the file, including rows that compaction moved within the file.
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
    """Clear the bits of these row positions in a bitmap with 64 positions in each word."""
    np.bitwise_and.at(bits, places >> 6, ~(np.uint64(1) << (places & 63).astype(np.uint64)))
