"""One source of samples under every format of files and tables: rows by row groups, with positions.

A format says which row groups there are, and reads one of them piece by piece with pyarrow
(`RowGroupSource._row_groups` and `_records`). Order, shuffles, shards for workers, resuming, bad rows and
rows that cannot be read are here, the same for Parquet, text files and tables of Arrow.
"""

import functools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.arrow import pa
from psfleet.core.base.errors import UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.engine.round_plan import Range
from psfleet.data.arrow_rows import Rows, joined_rows, reason_of, rows_of
from psfleet.data.data_files import partition_of, with_partition
from psfleet.data.feature_sets.feature_batches import no_samples
from psfleet.data.feature_sets.feature_lookup import refused_samples
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.packed_bags import RowBuffers, RowGroupStream
from psfleet.data.row_order import RowSequence
from psfleet.data.sample_batch import SampleBatch

_log = log_of(__name__)

T = TypeVar("T")
_SAID = 5  # bad rows of which a line is printed
_ROWS = 8192  # rows that are decoded at once


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a file that are read together.

    Attributes:
        file: Path or URL of the file, or a name of data that is in no file.
        number: Number of the row group in its file.
        rows: Number of rows, bad ones included.
        schema: Schema of Arrow of the file's columns, or None for data that is in no file.
        content: What the format needs to read the rows.
    """

    file: str
    number: int
    rows: int
    schema: Any
    content: Any


@dataclass(frozen=True, slots=True)
class Records:
    """Rows that follow each other in a row group, as Arrow has read them.

    Attributes:
        table: The columns as a pyarrow.Table.
        bad: Reason for each row, counted from 0 within the table, whose cells cannot be told apart. Its cells
            are null.
        lines: Line of each row in the file, or None for a format without lines.
    """

    table: Any
    bad: Mapping[int, str] = field(default_factory=dict)
    lines: Sequence[int] | None = None


class RowGroupSource(ABC):
    """Rows as samples of a feature set, row group by row group: a source of `fleet.dataset`.

    Each format derives from it; see `psfleet.data.parquet.ParquetFiles` for the other arguments and errors.

    Args:
        paths: The files, or the data of a format without files; its meaning is up to `_row_groups`.

    Attributes:
        skipped: Number of rows that this process has skipped.
    """

    waits = False

    @checked
    def __init__(
        self,
        paths: Any,
        features: FeatureSet,
        labels: Sequence[str] = (),
        bad_rows: Literal["fail", "skip"] = "fail",
        interleave: PositiveInt = 4,
    ) -> None:
        self.features = features
        self.labels = list(labels)
        self.skipped = 0
        self._told = 0
        self._skips = bad_rows == "skip"
        self._interleave = interleave
        self._columns = list(dict.fromkeys([*features.columns, *self.labels]))
        self._groups = list(self._row_groups(paths))
        self._size = sum(group.rows for group in self._groups)
        if not self._size:
            raise UsageError(f"{paths!r} has no row")
        self._sequences: OrderedDict[tuple[int, int | None, int], RowSequence] = OrderedDict()
        self._streams: OrderedDict[tuple[int, int], RowGroupStream] = OrderedDict()
        self._shuffled: OrderedDict[tuple[int, int, int], _ShuffledGroup] = OrderedDict()
        self._buffers = RowBuffers()

    @abstractmethod
    def _row_groups(self, paths: Any) -> Iterator[RowGroup]:
        """Yield all row groups of the files, in their order."""

    @abstractmethod
    def _records(
        self, group: RowGroup, names: Sequence[str], rows: int, is_raw: bool = False
    ) -> Iterator[Records]:
        """Yield the rows of a group in order, in pieces of `rows` rows at most.

        OSError and errors of Arrow mean that the rest of the group cannot be read.

        Args:
            names: Columns that are read. Those that only the file's folders name may be left out.
            is_raw: Leave texts as they are in the file, which a format without types would interpret.
        """

    def __len__(self) -> int:
        """The number of rows, bad ones included."""
        return self._size

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The row groups of all files, in order."""
        return self._groups

    def names(self, group: RowGroup) -> Sequence[str]:
        """The columns of a group's file, and those that its folders name."""
        own = group.schema.names
        return [*own, *(name for name in partition_of(group.file) if name not in own)]

    def group(self, number: int) -> Rows:
        """The rows of a row group that can be used, in the order of the file.

        Raises:
            UsageError: Errors as for `read`.
        """
        group = self._groups[number]
        parts = list(self._decoded(group, _ROWS))
        rows = joined_rows(parts) if parts else self._no_rows()
        usable, texts = _without_bad(group, rows)
        self._report(texts, group.rows - len(rows))
        return usable

    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Columns of chosen rows of a row group as pyarrow has them, by name.

        Raises:
            UsageError: They cannot be read.
        """
        group = self._groups[number]
        tables = [group.schema.empty_table()]
        try:
            if len(rows):
                tables = [each.table for each in self._records(group, names, _ROWS, is_raw=True)]
        except (OSError, pa.ArrowException) as error:
            raise UsageError(
                f"{group.file} row group {group.number}: columns {', '.join(names)} cannot be read: "
                f"{reason_of(error)}"
            ) from None
        table = with_partition(pa.concat_tables(tables), group.file, names).take(pa.array(rows))
        return {name: table.column(name) for name in names}

    def _decoded(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        """Yield the rows of a group piece by piece, up to where it cannot be read."""
        count = 0
        try:
            for records in self._records(group, self._columns, rows):
                part = self._rows_of(group, records, count)
                yield part
                count += len(part)
        except (OSError, pa.ArrowException) as error:
            where = f" from row {count} on" if count else ""
            what = (
                f"{group.file} row group {group.number} cannot be read{where}: {reason_of(error)}"
            )
            self._skip_unreadable(what, f"its {group.rows - count} rows are skipped")

    def _skip_unreadable(self, what: str, consequence: str) -> None:
        """Report data that cannot be read, or raise UsageError if bad rows are to fail."""
        if not self._skips:
            raise UsageError(what) from None
        self._say(f"{what}; {consequence}")

    def _rows_of(self, group: RowGroup, records: Records, first: int) -> Rows:
        """The features and labels of a piece, whose first row has the number `first` in its group."""
        table = with_partition(records.table, group.file, self._columns)
        rows, bad = rows_of(table, self.features, self.labels, records.bad)
        rows.numbers += first
        if self._skips:  # otherwise the look-up raises the error
            good = np.flatnonzero(~np.isin(np.arange(len(rows)), list(bad)))
            features = rows.features if len(good) == len(rows) else rows.chosen(good).features
            refused = refused_samples(self.features, features, len(good))
            bad |= {int(good[place]): text for place, text in refused.items()}
        for row, text in bad.items():
            place = (
                f"row group {group.number} row {first + row}"
                if records.lines is None
                else f"line {records.lines[row]}"
            )
            rows.bad[first + row] = f"{place}: {text}"
        return rows

    def _no_rows(self) -> Rows:
        labels = {name: np.empty(0, np.float32) for name in self.labels}
        return Rows(no_samples(self.features), labels, np.empty(0, np.int64))

    def read(self, ranges: Sequence[Range], batch_size: int, seed: int | None) -> SampleBatch:
        """The samples at these positions; row i of epoch e has the position e * len + i.

        The same positions give the same samples for any number of workers. Bad rows are left out.

        Args:
            ranges: Positions, see psfleet.core.engine.round_plan.
            batch_size: Batch size of the dataset: so many rows in a row are of one row group.
            seed: Seed that shuffles each epoch, or None for the order of the files.

        Raises:
            UsageError: A row cannot be used, or a file cannot be read, and bad rows are to fail.
        """
        return self.prepare(ranges, batch_size, seed)()

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """Do the work of `read`, in one thread at a time; what is returned reports bad rows and ends it."""
        good, bad, unreadable = [], [], 0
        for low, high in ranges:
            for group, rows in self._parts(low, high, batch_size, seed):
                if isinstance(rows, int):
                    unreadable += rows
                    continue
                usable, texts = _without_bad(group, rows)
                good.append(usable)
                bad += texts
        joined = joined_rows(good) if good else self._no_rows()
        batch = SampleBatch(joined.features, joined.labels)
        return functools.partial(self._reported, batch, bad, unreadable)

    def _reported(self, batch: SampleBatch, bad: Sequence[str], unreadable: int) -> SampleBatch:
        self._report(bad, unreadable)
        return batch

    def _report(self, bad: Sequence[str], unreadable: int) -> None:
        if bad and not self._skips:
            raise UsageError(f"{bad[0]}; correct it, or set bad_rows='skip'")
        for text in bad:
            self._say(f"{text}; the row is skipped")
        self.skipped += len(bad) + unreadable

    def _parts(
        self, low: int, high: int, batch_size: int, seed: int | None
    ) -> Iterator[tuple[RowGroup, Rows | int]]:
        """Yield the rows at these positions; a number stands for so many that cannot be read."""
        epoch, first = divmod(low, self._size)
        order = self._order(batch_size, seed, epoch)
        for span in order.ranges(first, first + high - low):
            if seed is None:
                parts = self._stream(span.group, batch_size).rows(span.low, span.high)
            else:
                rows_in_order = self._shuffled_group(order, span.group, seed, epoch)
                parts = rows_in_order.rows(span.low, span.high)
            for rows in parts:
                yield self._groups[span.group], rows

    def _order(self, batch_size: int, seed: int | None, epoch: int) -> RowSequence:
        key = (batch_size, seed, epoch)
        if key not in self._sequences:
            sizes = [group.rows for group in self._groups]
            self._sequences[key] = RowSequence(sizes, batch_size, self._interleave, seed, epoch)
            _trim(self._sequences, 2)
        return self._sequences[key]

    def _stream(self, number: int, batch_size: int) -> RowGroupStream:
        """The rows of a group in the order of the file."""
        key, group = (number, batch_size), self._groups[number]
        if key not in self._streams:
            blocks = max(_ROWS // batch_size, 1)
            begin = functools.partial(self._decoded, group, blocks * batch_size)
            self._streams[key] = RowGroupStream(group.rows, begin)
            _trim(self._streams, self._interleave + 1)
        self._streams.move_to_end(key)
        return self._streams[key]

    def _shuffled_group(
        self, order: RowSequence, number: int, seed: int, epoch: int
    ) -> "_ShuffledGroup":
        """The rows of a group in the epoch's order."""
        key = (number, seed, epoch)
        if key not in self._shuffled:
            for old in _trim(self._shuffled, self._interleave):
                if old.readable is not None:
                    self._buffers.give_back(old.readable)
            places = order.rows_of(number)
            parts = self._decoded(self._groups[number], _ROWS)
            self._shuffled[key] = _ShuffledGroup(places, self._buffers.ordered(parts, places))
        self._shuffled.move_to_end(key)
        return self._shuffled[key]

    def _say(self, text: str) -> None:
        """Print a line, for the first few."""
        self._told += 1
        if self._told <= _SAID:
            more = "; more such lines are left out" if self._told == _SAID else ""
            _log.warning(f"psfleet: {text}{more}")


class _ShuffledGroup:
    """The rows of a group in an epoch's order.

    Args:
        places: Place in the file of each row, in the epoch's order.
        readable: Those of the rows that are before the place where the file cannot be read, or None if no
            row can be read.
    """

    def __init__(self, places: NDArray[np.int64], readable: Rows | None) -> None:
        self.readable = readable
        is_readable = places < (0 if readable is None else len(readable))
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_readable)])

    def rows(self, low: int, high: int) -> Iterator[Rows | int]:
        """Yield rows, as `RowGroupStream.rows` does."""
        first, end = int(self._before[low]), int(self._before[high])
        if self.readable is not None:
            yield self.readable.chosen(slice(first, end))
        yield high - low - (end - first)


def _without_bad(group: RowGroup, rows: Rows) -> tuple[Rows, list[str]]:
    """The rows that can be used, and a sentence for each of the others."""
    bad = [row for row in rows.numbers.tolist() if row in rows.bad] if rows.bad else []
    if not bad:
        return rows, []
    texts = [f"{group.file} {rows.bad[row]}" for row in bad]
    return rows.chosen(~np.isin(rows.numbers, list(rows.bad))), texts


def _trim(cache: OrderedDict[Any, T], most: int) -> list[T]:
    """Drop what was used longest ago; returns what is dropped."""
    return [cache.popitem(last=False)[1] for _ in range(len(cache) - most)]
