"""Samples in CSV, TSV and libsvm files, which fleet.dataset hands out to the workers.

files = TextFiles("clicks.tsv", features, labels=["click"])
for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
    loss = loss_fn(embed(batch.features), batch.labels["click"])
"""

import csv
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.data_paths import check_columns, opened
from psfleet.datasets.mapped_samples import batch_of, sample_of, time_of
from psfleet.datasets.parquet_rows import BadRow, Rows, rows_of
from psfleet.datasets.parsed_lines import parsed
from psfleet.datasets.row_group_files import RowGroup, RowGroupFiles
from psfleet.errors import UsageError
from psfleet.feature_sets.feature_set import Number
from psfleet.platform.arrow import pa

__all__ = ["TextFiles"]

_GROUP = 65_536  # rows that are read together
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LIBSVM = ("label", "index", "value")
Sample = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class _Lines:
    """Where a row group's lines begin, the number of the first one, and the columns of the file.

    Attributes:
        delimiter: Of the columns; "": the lines are those of libsvm.
    """

    begin: int
    first: int
    columns: tuple[str, ...]
    delimiter: str


class TextFiles(RowGroupFiles):
    """The lines of CSV, TSV and libsvm files, as samples of a feature set: a source of `fleet.dataset`.

    The first line of a `.csv` or `.tsv` file has the names of its columns. A cell has one value or several,
    with `|` between them; an empty one is a feature that is missing. There are no line breaks in cells.

    A line of a `.libsvm` file, `label index:value index:value ...`, has the columns "label", "index" and
    "value": `Feature("x", table, weighted=True, column="index", weights_column="value")`. What follows a `#`
    is left out. Empty lines are no rows.

    Files are read once when it is made, to count their lines. Rows are read in groups of 65,536. Arguments,
    attributes and errors are those of `psfleet.datasets.parquet.ParquetFiles`; values of a hashed feature are
    texts, also where they are numbers.
    """

    endings = (".csv", ".tsv", ".libsvm")

    def names(self, group: RowGroup) -> Sequence[str]:
        """See RowGroupFiles."""
        found: tuple[str, ...] = group.metadata.columns
        return found

    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """See RowGroupFiles: texts."""
        group, wanted = self._groups[number], set(rows.tolist())
        cells: dict[str, list[str]] = {name: [] for name in names}
        for row, (_, line) in enumerate(_lines(group) if names else ()):
            if row in wanted:
                given = _cells(group.metadata, _decoded(line))
                for name, column in cells.items():
                    column.append(given[name])
        return {name: pa.array(column, pa.string()) for name, column in cells.items()}

    def _row_groups(self, file: str) -> Iterator[RowGroup]:
        ending = next((each for each in self.endings if file.endswith(each)), None)
        if ending is None:
            raise UsageError(
                f"{file} ends with none of {', '.join(self.endings)}; name it by its format"
            )
        try:
            with _opened(file) as content:
                yield from self._divided(file, content, _DELIMITERS.get(ending, ""))
        except OSError as error:
            what = f"{file} cannot be read: {error.strerror or error}"
            if not self._skips:
                raise UsageError(what) from None
            self._say(f"{what}; it is skipped")

    def _divided(self, file: str, content: Any, delimiter: str) -> Iterator[RowGroup]:
        """The row groups of a file."""
        columns: tuple[str, ...] = () if delimiter else _LIBSVM
        begin, first, rows, number, at = 0, 1, 0, 0, 0
        for line, text in enumerate(content, 1):
            if line == 1 and delimiter:
                columns = _header(file, _decoded(text), delimiter)
            elif _is_row(text, delimiter):
                if rows == 0:
                    begin, first = at, line
                rows += 1
            at += len(text)
            if rows == _GROUP:
                yield RowGroup(file, number, rows, _Lines(begin, first, columns, delimiter))
                rows, number = 0, number + 1
        check_columns(self._columns, columns, file)
        if rows:
            yield RowGroup(file, number, rows, _Lines(begin, first, columns, delimiter))

    def _pieces(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        converters = self._converters()
        piece: list[tuple[int, bytes]] = []
        done = 0
        for each in _lines(group):
            piece.append(each)
            if len(piece) == rows:
                yield self._rows(group.metadata, piece, done, converters)
                done, piece = done + rows, []
        if piece:
            yield self._rows(group.metadata, piece, done, converters)

    def _converters(self) -> dict[str, Callable[[str], Any]]:
        """What makes values of the texts in each column."""
        found: dict[str, Callable[[str], Any]] = dict.fromkeys(self._columns, float)
        for feature in self.features:
            if not isinstance(feature, Number):
                found[feature.columns[0]] = str if feature.hashed else int
        if self._time is not None:
            found[self._time] = int
        return found

    def _rows(
        self,
        lines: _Lines,
        piece: Sequence[tuple[int, bytes]],
        first: int,
        converters: Mapping[str, Callable[[str], Any]],
    ) -> Rows:
        """Rows that are all good as Arrow parses them; else one by one, to say what is wrong."""
        rows = self._good_rows(lines, piece, first, converters)
        return rows or self._one_by_one(lines, piece, first, converters)

    def _good_rows(
        self,
        lines: _Lines,
        piece: Sequence[tuple[int, bytes]],
        first: int,
        converters: Mapping[str, Callable[[str], Any]],
    ) -> Rows | None:
        if self._is_mixed:
            return None
        data = b"".join(text for _, text in piece)
        table = parsed(data, lines.columns, lines.delimiter, converters, self._lists)
        if table is None or table.num_rows != len(piece):
            return None
        single = [*self.labels, *([] if self._time is None else [self._time])]
        if any(pa.types.is_list(table.schema.field(name).type) for name in single):
            return None
        rows = rows_of(table, self.features, self.labels, first, self._time)
        return None if rows.bad else rows

    @functools.cached_property
    def _is_mixed(self) -> bool:
        """Whether a column has numbers for one purpose and ids for another: Arrow reads it as one kind."""
        numbers = {*self.labels}
        ids = set()
        for feature in self.features:
            is_number = isinstance(feature, Number)
            ids |= set() if is_number else {feature.columns[0]}
            numbers |= {*(feature.columns if is_number else feature.columns[1:])}
        return not ids.isdisjoint(numbers)

    @functools.cached_property
    def _lists(self) -> set[str]:
        """The columns that always have lists."""
        listed = (
            feature.columns
            for feature in self.features
            if (feature.dim > 1 if isinstance(feature, Number) else feature.weighted)
        )
        return {column for columns in listed for column in columns}

    def _one_by_one(
        self,
        lines: _Lines,
        piece: Sequence[tuple[int, bytes]],
        first: int,
        converters: Mapping[str, Callable[[str], Any]],
    ) -> Rows:
        samples, times, bad = [], [], {}
        for row, (line, text) in enumerate(piece, first):
            try:
                sample, time = self._sample(_cells(lines, _decoded(text)), converters)
            except ValueError as error:
                bad[row] = BadRow(row, str(error), f"line {line}")
                sample, time = {name: [] for name in self._columns}, 0
                sample |= {name: [float("nan")] for name in self.labels}
            samples.append(sample)
            times.append(time)
        batch = batch_of(self.features, self.labels, samples, times)
        numbers = np.arange(first, first + len(piece), dtype=np.int64)
        known = None if self._time is None else batch.times
        return Rows(batch.features, batch.labels, numbers, bad, known)

    def _sample(
        self, cells: Mapping[str, str], converters: Mapping[str, Callable[[str], Any]]
    ) -> tuple[Sample, int]:
        """The values of a row, and its time.

        Raises:
            ValueError: One cannot be used.
        """
        given = {name: _values(name, cells[name], make) for name, make in converters.items()}
        sample = sample_of(self.features, self.labels, given)
        if self._time is None:
            return sample, 0
        whole = given[self._time]
        return sample, time_of(self._time, {self._time: whole[0] if len(whole) == 1 else whole})


def _values(name: str, cell: str, make: Callable[[str], Any]) -> list[Any]:
    try:
        return [make(value) for value in cell.split("|")] if cell else []
    except ValueError:
        raise ValueError(f"{name} is {cell!r:.80}") from None


def _cells(lines: _Lines, text: str) -> dict[str, str]:
    """The cells of a line by their columns.

    Raises:
        ValueError: It has not as many as the file's first line, or is no line of libsvm.
    """
    if not lines.delimiter:
        return _libsvm_cells(text)
    cells = _split(text, lines.delimiter)
    if len(cells) != len(lines.columns):
        raise ValueError(f"it has {len(cells)} cells, the first line has {len(lines.columns)}")
    return dict(zip(lines.columns, cells, strict=True))


def _header(file: str, text: str, delimiter: str) -> tuple[str, ...]:
    try:
        return tuple(_split(text, delimiter))
    except ValueError as error:
        raise UsageError(f"{file} line 1: {error}; it must have the names of the columns") from None


def _split(text: str, delimiter: str) -> list[str]:
    try:
        (cells,) = csv.reader([text], delimiter=delimiter, strict=True)
    except csv.Error as error:
        raise ValueError(f"{text!r:.80} has no cells: {error}") from None
    return cells


def _libsvm_cells(text: str) -> dict[str, str]:
    label, *words = text.partition("#")[0].split()
    pairs = [word.split(":") for word in words]
    for pair, word in zip(pairs, words, strict=True):
        if len(pair) != 2:
            raise ValueError(f"{word!r:.80} is not index:value")
    index, value = ("|".join(pair[side] for pair in pairs) for side in (0, 1))
    return {"label": label, "index": index, "value": value}


def _lines(group: RowGroup) -> Iterator[tuple[int, bytes]]:
    """The rows of a group, each with the number of its line in the file."""
    left = group.rows
    with _opened(group.file) as file:
        file.seek(group.metadata.begin)
        for line, text in enumerate(file, group.metadata.first):
            if _is_row(text, group.metadata.delimiter):
                yield line, text
                left -= 1
            if not left:
                return


def _opened(file: str) -> Any:
    return opened(file) if "://" in file else Path(file).open("rb")


def _is_row(text: bytes, delimiter: str) -> bool:
    return bool(text.strip(b"\r\n") if delimiter else text.partition(b"#")[0].strip())


def _decoded(text: bytes) -> str:
    return text.decode("utf-8-sig", "replace").rstrip("\r\n")
