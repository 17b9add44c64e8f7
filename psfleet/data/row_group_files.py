"""Samples in files that are read row group by row group, in an order that follows from positions."""

import functools
import glob
import os
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.arrow import pa
from psfleet.core.base.errors import UsageError, not_installed
from psfleet.core.base.logs import log_of
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.engine.round_plan import Range
from psfleet.data.feature_sets.feature_batches import no_samples
from psfleet.data.feature_sets.feature_lookup import refused_samples
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.packed_bags import RowBuffers, RowGroupStream
from psfleet.data.parquet_rows import BadRow, Rows, joined_rows, partition_of, reason_of, rows_of
from psfleet.data.sample_batch import RowSequence, SampleBatch

_log = log_of(__name__)

T = TypeVar("T")
_SAID = 5  # bad rows of which a line is printed
_ROWS = 8192  # rows that are decoded at once


def files_of(paths: Any, endings: Sequence[str]) -> list[str]:
    """The files that paths, patterns such as `clicks/*.parquet`, and URLs name.

    Args:
        endings: Endings of the names of files that are read of a folder, in any case; none: all files. Hidden
            and temporary files, whose names begin with `.` or `_`, are never read of a folder.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in names for file in _matching(str(path), tuple(endings))]
    if not files:
        raise UsageError(f"{paths!r} names no {' or '.join(endings)} file")
    return files


def _matching(path: str, endings: tuple[str, ...]) -> list[str]:
    """The files that a path, a pattern or a URL names, by name."""
    system, place = _fsspec().core.url_to_fs(path) if "://" in path else (None, path)
    exists, is_folder = (system.exists, system.isdir) if system else (os.path.exists, os.path.isdir)
    if is_folder(place):
        files = list(_inside(system, place, endings))
    elif (magic := re.search(r"[*[]" if system else r"[*?[]", place)) and not exists(place):
        files, base = [], len(place[: magic.start()].rpartition("/")[0])
        for name in system.glob(place) if system else glob.glob(place, recursive=True):
            if any(map(_is_hidden, name[base:].split("/"))):
                continue
            files += _inside(system, name, endings) if is_folder(name) else [name]
    else:
        return [path]
    return sorted({system.unstrip_protocol(name) for name in files} if system else set(files))


def _inside(system: Any, folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """The data files of a folder, and of folders in it that are partitions, such as `dt=2026-11-01`."""
    if system:
        entries = [(e["name"], e["type"] == "directory") for e in system.ls(folder, detail=True)]
    else:
        entries = [(str(entry), entry.is_dir()) for entry in Path(folder).iterdir()]
    for name, is_folder in entries:
        last = Path(name).name
        if _is_hidden(name) or name.strip("/") == folder.strip("/"):
            continue
        if is_folder and "=" in last:
            yield from _inside(system, name, endings)
        elif not is_folder and (not endings or last.lower().endswith(endings)):
            yield name


def _is_hidden(name: str) -> bool:
    return Path(name).name.startswith((".", "_"))


def opened(file: str) -> Any:
    """A file or URL to read bytes from, which may be sought in. The caller closes it."""
    return _fsspec().open(file).open() if "://" in file else pa.OSFile(file)


def _fsspec() -> Any:
    try:
        import fsspec
    except ModuleNotFoundError:
        raise not_installed("files at a URL need", "fsspec", "parquet") from None
    return fsspec


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a file that are read together: their number there, how many, and what their format needs."""

    file: str
    number: int
    rows: int
    metadata: Any


def with_partition(table: Any, file: str, columns: Sequence[str]) -> Any:
    """A table with those of the columns that it lacks and the path of its file names, as texts."""
    for name, value in partition_of(file).items():
        if name in columns and name not in table.column_names:
            texts = pa.repeat(pa.scalar(value, pa.string()), table.num_rows)
            table = table.append_column(name, texts)
    return table


class RowGroupFiles(ABC):
    """The rows of files, row group by row group, as samples of a feature set: a source of `fleet.dataset`.

    Formats derive from it, and say how a file is divided and how a row group is read.

    Attributes:
        skipped: Number of rows that this process has skipped.
    """

    waits = False
    endings: Sequence[str] = ()
    """Endings of the names of the files that are read of a folder."""

    @checked
    def __init__(
        self,
        paths: Any,
        features: FeatureSet,
        labels: Sequence[str] = (),
        bad_rows: Literal["fail", "skip"] = "fail",
        interleave: PositiveInt = 4,
        time: str | None = None,
    ) -> None:
        self.features = features
        self.labels = list(labels)
        self.skipped = 0
        self._skips = bad_rows == "skip"
        self._interleave = interleave
        self._time = time
        times = [] if time is None else [time]
        self._columns = list(dict.fromkeys([*features.columns, *self.labels, *times]))
        self._groups = list(self._all_groups(paths))
        self._size = sum(group.rows for group in self._groups)
        if not self._size:
            raise UsageError(f"{paths!r} has no row")
        self._sequences: OrderedDict[tuple[int, int | None, int], RowSequence] = OrderedDict()
        self._streams: OrderedDict[tuple[int, int], RowGroupStream] = OrderedDict()
        self._shuffled: OrderedDict[tuple[int, int, int], _ShuffledGroup] = OrderedDict()
        self._buffers = RowBuffers()

    def __len__(self) -> int:
        """The number of rows, bad ones included."""
        return self._size

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The row groups of all files, in order."""
        return self._groups

    def group(self, number: int) -> Rows:
        """The rows of a row group that can be used, as they are in the file.

        Raises:
            UsageError: Errors as for `read`.
        """
        group = self._groups[number]
        parts = list(self._decoded(group, _ROWS))
        rows = joined_rows(parts) if parts else self._no_rows()
        usable, texts = _without_bad(group, rows)
        self._report(texts, group.rows - len(rows))
        return usable

    @abstractmethod
    def names(self, group: RowGroup) -> Sequence[str]:
        """The columns of a group's file."""

    @abstractmethod
    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Columns of rows of a row group, as pyarrow takes them, by name.

        Raises:
            UsageError: They cannot be read.
        """

    def _all_groups(self, paths: Any) -> Iterator[RowGroup]:
        for file in files_of(paths, self.endings):
            yield from self._row_groups(file)

    @abstractmethod
    def _row_groups(self, file: str) -> Iterator[RowGroup]:
        """The row groups of a file."""

    @abstractmethod
    def _row_parts(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        """The rows of a group, so many at once."""

    def _decoded(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        """The rows of a group piece by piece, up to where it cannot be read."""
        count = 0
        try:
            for part in self._row_parts(group, rows):
                yield part
                count += len(part)
        except (OSError, pa.ArrowException) as error:
            where = f" from row {count} on" if count else ""
            what = (
                f"{group.file} row group {group.number} cannot be read{where}: {reason_of(error)}"
            )
            if not self._skips:
                raise UsageError(what) from None
            self._say(f"{what}; its {group.rows - count} rows are skipped")

    def _rows_of(
        self, group: RowGroup, table: Any, first: int, bad: Mapping[int, BadRow] | None = None
    ) -> Rows:
        """The rows of a part of a group, of which `bad` are known to be bad; see `rows_of`."""
        table = with_partition(table, group.file, self._columns)
        rows = rows_of(table, self.features, self.labels, first, self._time, bad)
        if self._skips:  # else the look-up says it
            good = np.flatnonzero(~np.isin(rows.numbers, list(rows.bad)))
            features = rows.features if len(good) == len(rows) else rows.chosen(good).features
            refused = refused_samples(self.features, features, len(good))
            for row, text in zip(
                rows.numbers[good[list(refused)]].tolist(), refused.values(), strict=True
            ):
                rows.bad[row] = BadRow(row, text)
        return rows

    def _no_rows(self) -> Rows:
        labels = {name: np.empty(0, np.float32) for name in self.labels}
        none = np.empty(0, np.int64)
        times = None if self._time is None else none
        return Rows(no_samples(self.features), labels, none, times=times)

    def read(self, ranges: Sequence[Range], batch_size: int, seed: int | None) -> SampleBatch:
        """The samples at these positions; row i of epoch e has the position e * len + i.

        The same positions give the same samples for any number of workers. Bad rows are left out.

        Args:
            ranges: Positions, see psfleet.core.engine.round_plan.
            batch_size: Batch size of the dataset: so many rows in a row are of one row group.
            seed: Shuffles each epoch; None: none.

        Raises:
            UsageError: A row cannot be used, or a file cannot be read, and bad rows are to fail.
        """
        return self.prepare(ranges, batch_size, seed)()

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """The work of `read`, in one thread at a time; what is returned reports bad rows and ends it."""
        good, bad, unreadable = [], [], 0
        for low, high in ranges:
            for group, rows in self._parts(low, high, batch_size, seed):
                if isinstance(rows, int):
                    unreadable += rows
                    continue
                usable, texts = _without_bad(group, rows)
                good.append(usable)
                bad += texts
        batch = self._batch(good)
        return functools.partial(self._reported, batch, bad, unreadable)

    def _batch(self, parts: Sequence[Rows]) -> SampleBatch:
        rows = joined_rows(parts) if parts else self._no_rows()
        return SampleBatch(rows.features, rows.labels, rows.times)

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
        """The rows at these positions; a number stands for so many that cannot be read."""
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
            # Of blocks larger than any group there is none, only what is left of each group, in their order.
            in_order = self._time is not None and seed is None
            block = self._size + 1 if in_order else batch_size
            self._sequences[key] = RowSequence(sizes, block, self._interleave, seed, epoch)
            _trim(self._sequences, 2)
        return self._sequences[key]

    def _stream(self, number: int, batch_size: int) -> RowGroupStream:
        """The rows of a group as they are."""
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
        self._told = getattr(self, "_told", 0) + 1
        if self._told <= _SAID:
            more = "; more such lines are left out" if self._told == _SAID else ""
            _log.warning(f"psfleet: {text}{more}")


class _ShuffledGroup:
    """The rows of a group in an epoch's order.

    Args:
        readable: Those that are before the place in the file where it cannot be read; None: none.
    """

    def __init__(self, places: NDArray[np.int64], readable: Rows | None) -> None:
        self.readable = readable
        there = places < (0 if readable is None else len(readable))
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(there)])

    def rows(self, low: int, high: int) -> Iterator[Rows | int]:
        """Yield rows, as `RowGroupStream.rows` does."""
        first, end = int(self._before[low]), int(self._before[high])
        if self.readable is not None:
            yield self.readable.chosen(slice(first, end))
        yield high - low - (end - first)


def _without_bad(group: RowGroup, rows: Rows) -> tuple[Rows, list[str]]:
    """The rows that can be used, and what is wrong in each of the others."""
    bad_rows = (
        [bad for row in rows.numbers.tolist() if (bad := rows.bad.get(row))] if rows.bad else []
    )
    if not bad_rows:
        return rows, []
    texts = [
        f"{group.file} {bad.place or f'row group {group.number} row {bad.row}'}: {bad.text}"
        for bad in bad_rows
    ]
    return rows.chosen(~np.isin(rows.numbers, list(rows.bad))), texts


def _trim(cache: OrderedDict[Any, T], most: int) -> list[T]:
    """Drop what was used longest ago; what is dropped."""
    return [cache.popitem(last=False)[1] for _ in range(len(cache) - most)]
