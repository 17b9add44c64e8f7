"""Base class of all data sources that read files or Arrow tables: RowGroupSource.

A row group is a number of rows that are read together. Each format (Parquet, text, Arrow data) lists its
row groups in `_row_groups`, and reads a row group with pyarrow in `_records`. Everything else is here and
the same for every format: the order of an epoch, shuffles, reading at any position, bad rows, and files
that cannot be read to their end.

Reading a row group takes much longer than a batch of its rows, so decoded rows are kept. Without a shuffle,
a group is decoded about 8,192 rows at a time as positions advance (RowGroupStream). In a shuffled epoch a
whole group is decoded and put into the epoch's order (RowBuffers), and at most `interleave` + 1 groups are
in memory.

Bad rows have positions like good rows. Otherwise all files would have to be read before the first step, to
count the good rows. A batch with bad rows is smaller. Only one thread at a time uses a source.
`fleet.dataset` may read ahead in a thread, so bad rows are not reported until a batch is used (`prepare`).
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
from psfleet.core.base.logs import FirstLinesLog, log_of
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.engine.round_plan import Range
from psfleet.data.arrow_conversion import Rows, joined_rows, reason_of, rows_of
from psfleet.data.data_files import partition_of, with_partition
from psfleet.data.feature_sets.feature_lookup import refused_samples
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.feature_sets.feature_values import no_samples
from psfleet.data.packed_bags import RowBuffers, RowGroupStream
from psfleet.data.row_order import RowSequence
from psfleet.data.sample_batch import SampleBatch

_log = log_of(__name__)

T = TypeVar("T")
_ROWS = 8192  # rows decoded at once, which stay in the processor's cache until they are copied


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Part of a file that is read at once: a number of consecutive rows.

    Attributes:
        file: Path or URL of the file, or a name for data that is not in a file.
        number: Number of the row group within its file.
        rows: Number of rows, including bad ones.
        schema: Arrow schema of the file's columns, or None for data that is not in a file.
        content: Data that the format needs in order to read the rows, such as a position in the file.
    """

    file: str
    number: int
    rows: int
    schema: Any
    content: Any


@dataclass(frozen=True, slots=True)
class Records:
    """Some rows of a row group, as Arrow has read them.

    Attributes:
        table: Columns of the rows, as a pyarrow.Table.
        bad: Maps the number in the table of each row that could not be parsed, such as a broken line, to the
            reason. The table has null in each cell of such a row.
        lines: Line in the file of each row, or None for a format without lines.
    """

    table: Any
    bad: Mapping[int, str] = field(default_factory=dict)
    lines: Sequence[int] | None = None


class RowGroupSource(ABC):
    """Rows of files or tables as samples of a feature set: a source of `fleet.dataset`. Each format is a
    subclass.

    The arguments that are not listed here, and the errors, are those of `psfleet.data.parquet.ParquetFiles`.

    Args:
        paths: Files, or the data itself for a format without files, in a form that the subclass's
            `_row_groups` takes.

    Attributes:
        skipped: Number of rows that this process has left out.
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
        self._warnings = FirstLinesLog(_log)
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
        """Yield all row groups of the files, in the order of the files."""

    @abstractmethod
    def _records(
        self, group: RowGroup, names: Sequence[str], rows: int, is_raw: bool = False
    ) -> Iterator[Records]:
        """Yield the rows of a row group in file order, at most `rows` rows at a time.

        If this raises an OSError or an error of Arrow, the remaining rows of the group are taken as
        unreadable.

        Args:
            names: Columns to read. Columns that the file lacks, because only its folders name them, may be
                left out.
            is_raw: True to return texts exactly as they are in the file. Otherwise a format without types
                splits texts into lists and replaces missing values.
        """

    def __len__(self) -> int:
        """Return the number of rows of all groups, including bad ones."""
        return self._size

    @property
    def groups(self) -> Sequence[RowGroup]:
        """Row groups of all files, in the order of the files."""
        return self._groups

    def names(self, group: RowGroup) -> Sequence[str]:
        """Return the columns of a group's file, and the columns in its folder names (such as `day=3/`)."""
        file_names = group.schema.names
        return [*file_names, *(name for name in partition_of(group.file) if name not in file_names)]

    def group(self, number: int) -> Rows:
        """Read the good rows of one row group, in the order of the file.

        Raises:
            UsageError: A row or the file cannot be read, and `bad_rows` is "fail".
        """
        group = self._groups[number]
        parts = list(self._decoded(group, _ROWS))
        rows = joined_rows(parts) if parts else self._no_rows()
        usable, texts = _without_bad(group, rows)
        self._report(texts, group.rows - len(rows))
        return usable

    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Read columns of some rows of a row group without converting them. Returns pyarrow arrays by column.

        Args:
            names: Columns to read. They need not belong to a feature.
            rows: Numbers of the rows within the group, int64 [n].

        Raises:
            UsageError: The file cannot be read.
        """
        group = self._groups[number]
        tables = [group.schema.empty_table()]
        try:
            if len(rows):
                tables = [
                    records.table for records in self._records(group, names, _ROWS, is_raw=True)
                ]
        except (OSError, pa.ArrowException) as error:
            raise UsageError(
                f"{group.file} row group {group.number}: columns {', '.join(names)} cannot be read: "
                f"{reason_of(error)}"
            ) from None
        table = with_partition(pa.concat_tables(tables), group.file, names).take(pa.array(rows))
        return {name: table.column(name) for name in names}

    def _decoded(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        """Yield the converted rows of a group, some thousand at a time, up to the first row that cannot be
        read.
        """
        count = 0
        try:
            for records in self._records(group, self._columns, rows):
                part = self._rows_of(group, records, count)
                yield part
                count += len(part)
        except (OSError, pa.ArrowException) as error:
            where = f" from row {count} on" if count else ""
            failure = (
                f"{group.file} row group {group.number} cannot be read{where}: {reason_of(error)}"
            )
            self._skip_unreadable(failure, f"its {group.rows - count} rows are skipped")

    def _skip_unreadable(self, failure: str, consequence: str) -> None:
        """Count and log rows that cannot be read, or raise UsageError if `bad_rows` is "fail"."""
        if not self._skips:
            raise UsageError(failure) from None
        self._warnings.say(f"psfleet: {failure}; {consequence}")

    def _rows_of(self, group: RowGroup, records: Records, first: int) -> Rows:
        """Convert rows of a group to features and labels.

        Args:
            records: Rows as Arrow has read them.
            first: Number within the group of the first of these rows.
        """
        table = with_partition(records.table, group.file, self._columns)
        rows, bad = rows_of(table, self.features, self.labels, records.bad)
        rows.numbers += first
        # If `bad_rows` is "fail", the lookup itself raises an error for a value that it refuses. To skip
        # rows with such values, they must be found here.
        if self._skips:
            good = np.flatnonzero(~np.isin(np.arange(len(rows)), list(bad)))
            features = rows.features if len(good) == len(rows) else rows.chosen(good).features
            refused = refused_samples(self.features, features, len(good))
            bad |= {int(good[index]): text for index, text in refused.items()}
        for row, text in bad.items():
            position_text = (
                f"row group {group.number} row {first + row}"
                if records.lines is None
                else f"line {records.lines[row]}"
            )
            rows.bad[first + row] = f"{position_text}: {text}"
        return rows

    def _no_rows(self) -> Rows:
        labels = {name: np.empty(0, np.float32) for name in self.labels}
        return Rows(no_samples(self.features), labels, np.empty(0, np.int64))

    def read(self, ranges: Sequence[Range], batch_size: int, seed: int | None) -> SampleBatch:
        """Read the samples at these positions. Position e * len + i is row i in the order of epoch e.

        The samples at a position do not depend on the number of workers. Bad rows are left out.

        Args:
            ranges: Ranges of positions (psfleet.core.engine.round_plan).
            batch_size: Batch size of the dataset. It affects the order, because a block of `batch_size`
                positions is read from one row group.
            seed: Seed that shuffles each epoch, or None for the order of the files.

        Raises:
            UsageError: A row cannot be used or a file cannot be read, and `bad_rows` is "fail".
        """
        return self.prepare(ranges, batch_size, seed)()

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """Read the samples at these positions, and return a function that returns them when the batch is
        used.

        This method may run ahead in another thread. Only the returned function counts and logs bad rows, or
        raises an error for them.
        """
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
            self._warnings.say(f"psfleet: {text}; the row is skipped")
        self.skipped += len(bad) + unreadable

    def _parts(
        self, low: int, high: int, batch_size: int, seed: int | None
    ) -> Iterator[tuple[RowGroup, Rows | int]]:
        """Yield the rows at these positions in parts. An integer n represents n rows that cannot be read."""
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
        """Return the stream that decodes a group in file order. If there is none yet, start it."""
        key, group = (number, batch_size), self._groups[number]
        if key not in self._streams:
            # Decode whole blocks of `batch_size` rows, so that a block is never split between two decoded
            # parts.
            blocks = max(_ROWS // batch_size, 1)
            begin = functools.partial(self._decoded, group, blocks * batch_size)
            self._streams[key] = RowGroupStream(group.rows, begin)
            _trim(self._streams, self._interleave + 1)
        self._streams.move_to_end(key)
        return self._streams[key]

    def _shuffled_group(
        self, order: RowSequence, number: int, seed: int, epoch: int
    ) -> "_ShuffledGroup":
        """Return the rows of a group in the epoch's order. If they are not in memory, decode them now."""
        key = (number, seed, epoch)
        if key not in self._shuffled:
            # Make room before decoding, so that the memory of the oldest group is used for the new one.
            for old in _trim(self._shuffled, self._interleave):
                if old.readable is not None:
                    self._buffers.give_back(old.readable)
            file_positions = order.rows_of(number)
            parts = self._decoded(self._groups[number], _ROWS)
            self._shuffled[key] = _ShuffledGroup(
                file_positions, self._buffers.ordered(parts, file_positions)
            )
        self._shuffled.move_to_end(key)
        return self._shuffled[key]


class _ShuffledGroup:
    """Decoded rows of a group in the order of a shuffled epoch. Some rows may be unreadable.

    If a file cannot be read from its row r on, only the rows before r are decoded. In a shuffled order the
    readable rows are scattered. So `_before[i]` is the number of readable rows among the first i rows of
    the order.

    Args:
        file_positions: For each row in the epoch's order, its number in the file, int64 [n].
        readable: Rows that could be read, in the epoch's order, or None if no row could.
    """

    def __init__(self, file_positions: NDArray[np.int64], readable: Rows | None) -> None:
        self.readable = readable
        is_readable = file_positions < (0 if readable is None else len(readable))
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_readable)])

    def rows(self, low: int, high: int) -> Iterator[Rows | int]:
        """Yield the readable rows at the positions `low` to `high` - 1, and then the number of unreadable
        rows.
        """
        first, end = int(self._before[low]), int(self._before[high])
        if self.readable is not None:
            yield self.readable.chosen(slice(first, end))
        yield high - low - (end - first)


def _without_bad(group: RowGroup, rows: Rows) -> tuple[Rows, list[str]]:
    bad = [row for row in rows.numbers.tolist() if row in rows.bad] if rows.bad else []
    if not bad:
        return rows, []
    texts = [f"{group.file} {rows.bad[row]}" for row in bad]
    return rows.chosen(~np.isin(rows.numbers, list(rows.bad))), texts


def _trim(cache: OrderedDict[Any, T], limit: int) -> list[T]:
    """Drop the least recently used entries of a cache until `limit` are left, and return the
    dropped values.
    """
    return [cache.popitem(last=False)[1] for _ in range(len(cache) - limit)]
