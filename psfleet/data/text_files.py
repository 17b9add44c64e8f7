"""Lines of CSV, TSV and libsvm files as Arrow parses them, which is far faster than one by one.

files = TextFiles("clicks.tsv", features, labels=["click"])
for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
    loss = loss_fn(embed(batch.features), batch.labels["click"])
"""

import csv
import functools
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.arrow import pa, pc, pcsv
from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.data.feature_sets.feature_set import FeatureSet, Number
from psfleet.data.gzip_file import GzipFile, GzipPoint
from psfleet.data.parquet_rows import BadRow, Rows, check_columns, opened, rows_of
from psfleet.data.row_group_files import RowGroup, RowGroupFiles
from psfleet.data.sample_batch import LARGEST, batch_of, sample_of, time_of

_READ_OTHERWISE = (b'"', b"0x", b"0X", b"\xef\xbb\xbf")  # by csv, int and the codec of Python
# Comments, values of several numbers, and what Python takes for spaces or ends of lines.
_NO_PAIRS = (b"#", b"|", b"\v", b"\f", b"\x1c", b"\x1d", b"\x1e", b"\x1f")


def parsed(
    data: bytes,
    names: Sequence[str],
    delimiter: str,
    converters: Mapping[str, Callable[[str], Any]],
    lists: Collection[str],
) -> Any:
    """A pyarrow.Table of some columns, or None where a line may be wrong or mean something else to Python.

    Args:
        delimiter: Between cells; "": the lines are those of libsvm.
        converters: By column int, float or str: what its values are. Empty cells are null.
        lists: Columns that always have lists; others have them where a cell has a `|`.
    """
    if len(set(names)) < len(names) or any(mark in data for mark in _READ_OTHERWISE):
        return None
    try:
        texts = (
            _parsed_cells(data, names, delimiter, list(converters)) if delimiter else _pairs(data)
        )
        if texts is None:
            return None
        columns = {
            name: _converted(texts.column(name), make, name in lists)
            for name, make in converters.items()
        }
    except pa.ArrowException:
        return None
    finite = all(_is_finite(columns[name]) for name, make in converters.items() if make is float)
    return pa.table(columns) if finite else None


def _parsed_cells(data: bytes, names: Sequence[str], delimiter: str, columns: Sequence[str]) -> Any:
    return pcsv.read_csv(
        pa.BufferReader(data),
        pcsv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        pcsv.ParseOptions(delimiter=delimiter, quote_char=False),
        pcsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=columns,
            strings_can_be_null=True,
            null_values=[""],
        ),
    )


def _pairs(data: bytes) -> Any:
    """The texts in lines of libsvm: label, and lists of indices and values. None as for `parsed`."""
    if not data.isascii() or any(mark in data for mark in _NO_PAIRS):
        return None
    lines = pa.array(data.decode().splitlines(), pa.string())
    words = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(lines))
    counts = pc.list_value_length(words).to_numpy()
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    flat, is_pair = pc.list_flatten(words), np.ones(starts[-1], np.bool_)
    is_pair[starts[:-1]] = False
    pairs = pc.split_pattern(flat.filter(pa.array(is_pair)), ":")
    if not (pc.list_value_length(pairs).to_numpy() == 2).all():
        return None
    if not pc.binary_length(pc.list_flatten(pairs)).to_numpy().all():  # to Python `:3` has no index
        return None
    offsets = pa.array(starts - np.arange(len(starts), dtype=np.int32))
    index, value = (
        pa.ListArray.from_arrays(offsets, pc.list_element(pairs, side)) for side in (0, 1)
    )
    labels = pc.replace_substring_regex(flat.take(pa.array(starts[:-1])), r"^\+(\d)", r"\1")
    return pa.table({"label": labels, "index": index, "value": value})


def _converted(texts: Any, make: Callable[[str], Any], is_list: bool) -> Any:
    kind = {int: pa.int64(), float: pa.float64()}.get(make, pa.string())  # type: ignore[call-overload]
    if pa.types.is_list(texts.type):
        return texts.cast(pa.list_(kind))
    if is_list or pc.any(pc.match_substring(texts, "|")).as_py():
        return pc.split_pattern(texts, "|").cast(pa.list_(kind))
    return texts.cast(kind)


def _is_finite(column: Any) -> bool:
    """Return whether all numbers are finite as float32."""
    flat = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    values = flat.drop_null().to_numpy()
    return bool((np.abs(values) <= LARGEST).all())


_GROUP = 65_536  # rows that are read together
_BUFFER = 1 << 17  # bytes of a gzip file that are read at once
_DELIMITERS = {"csv": ",", "tsv": "\t", "libsvm": ""}
_LIBSVM = ("label", "index", "value")
Sample = dict[str, list[Any]]
Part = Sequence[tuple[int, bytes]]
"""Some rows of a group: number and text of each line."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """Lines of a row group: their positions, the number of the first one, and the columns of the file.

    Attributes:
        delimiter: Delimiter of the columns; "": the lines are those of libsvm.
    """

    begin: int
    first: int
    columns: tuple[str, ...]
    delimiter: str


class TextFiles(RowGroupFiles):
    """The lines of CSV, TSV and libsvm files, as samples of a feature set: a source of `fleet.dataset`.

    The first line of a `.csv` or `.tsv` file has the names of its columns, unless `columns` names them. A
    cell has one value or several, with `|` between them; an empty one is a feature that is missing. There are
    no line breaks in cells.

    A line of a `.libsvm` file, `label index:value index:value ...`, has the columns "label", "index" and
    "value": `Feature("x", table, weighted=True, column="index", weights_column="value")`. What follows a `#`
    is left out. Empty lines are no rows.

    Files are read once when it is made, to count their lines. Rows are read in groups of 65,536. A file whose
    name ends with `.gz` is decompressed. Arguments, attributes and errors are those of
    `psfleet.data.parquet.ParquetFiles`; values of a hashed feature are texts, also if they are numbers.

    Args:
        format: Format of all files, whatever their names; of a folder all files are read whose names do not
            begin with `.` or `_`. None: each file's name says it.
        columns: Names of the columns of files without a first line that has them.
    """

    endings: Sequence[str] = (".csv", ".tsv", ".libsvm", ".csv.gz", ".tsv.gz", ".libsvm.gz")

    @checked
    def __init__(
        self,
        paths: Any,
        features: FeatureSet,
        labels: Sequence[str] = (),
        bad_rows: Literal["fail", "skip"] = "fail",
        interleave: PositiveInt = 4,
        time: str | None = None,
        format: Literal["csv", "tsv", "libsvm"] | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._format = format
        self._header = None if columns is None else tuple(columns)
        self._points: dict[str, list[GzipPoint]] = {}
        if format is not None:
            self.endings = []
        super().__init__(paths, features, labels, bad_rows, interleave, time)

    @override
    def names(self, group: RowGroup) -> Sequence[str]:
        column_names: tuple[str, ...] = group.metadata.columns
        return column_names

    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Texts."""
        group, numbers = self._groups[number], set(rows.tolist())
        cells: dict[str, list[str]] = {name: [] for name in names}
        for row, (_, line) in enumerate(self._lines(group) if names else ()):
            if row in numbers:
                texts = _cells(group.metadata, _decoded(line))
                for name, column in cells.items():
                    column.append(texts[name])
        return {name: pa.array(column, pa.string()) for name, column in cells.items()}

    def _row_groups(self, file: str) -> Iterator[RowGroup]:
        form = self._format or file.removesuffix(".gz").rpartition(".")[2]
        if form not in _DELIMITERS:
            raise UsageError(
                f"{file} ends with none of {', '.join(self.endings)}; pass its format, such as format='tsv'"
            )
        try:
            with self._opened(file) as content:
                yield from self._divided(file, content, _DELIMITERS[form])
        except OSError as error:
            what = f"{file} cannot be read: {error.strerror or error}"
            if not self._skips:
                raise UsageError(what) from None
            self._say(f"{what}; it is skipped")

    def _divided(self, file: str, content: Any, delimiter: str) -> Iterator[RowGroup]:
        columns: tuple[str, ...] = (self._header or ()) if delimiter else _LIBSVM
        begin, first, rows, number, at = 0, 1, 0, 0, 0
        for line, text in enumerate(content, 1):
            if line == 1 and not columns:
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

    def _row_parts(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        part: list[tuple[int, bytes]] = []
        first = 0
        for each in self._lines(group):
            part.append(each)
            if len(part) == rows:
                yield self._rows(group.metadata, part, first)
                first, part = first + rows, []
        if part:
            yield self._rows(group.metadata, part, first)

    def _lines(self, group: RowGroup) -> Iterator[tuple[int, bytes]]:
        """The rows of a group, each with the number of its line in the file."""
        remaining = group.rows
        with self._opened(group.file) as file:
            file.seek(group.metadata.begin)
            for line, text in enumerate(file, group.metadata.first):
                if _is_row(text, group.metadata.delimiter):
                    yield line, text
                    remaining -= 1
                if not remaining:
                    return

    def _opened(self, file: str) -> Any:
        if file.endswith(".gz"):
            unzipped = GzipFile(opened(file), self._points.setdefault(file, []))
            return io.BufferedReader(unzipped, _BUFFER)
        return opened(file) if "://" in file else Path(file).open("rb")

    @functools.cached_property
    def _converters(self) -> dict[str, Callable[[str], Any]]:
        """The function that makes values of the texts, for each column."""
        converters: dict[str, Callable[[str], Any]] = dict.fromkeys(self._columns, float)
        for column, makers in self._makers.items():
            converters[column] = next(make for make in (int, str, float) if make in makers)
        if self._time is not None:
            converters[self._time] = int
        return converters

    @functools.cached_property
    def _makers(self) -> dict[str, set[Callable[[str], Any]]]:
        """By column what makes the values of each feature of it."""
        makers_of: dict[str, set[Callable[[str], Any]]] = {}
        for each in self.features.given.values():
            usual = float if not each.jagged else str if each.hashed else int
            makers = {"int": int, "float": float, "text": str}
            makers_of.setdefault(each.columns[0], set()).add(
                makers.get(each.value_type or "", usual)
            )
            for weights in each.columns[1:]:
                makers_of.setdefault(weights, set()).add(float)
        for label in self.labels:
            makers_of.setdefault(label, set()).add(float)
        return makers_of

    @functools.cached_property
    def _declared(self) -> set[str]:
        """The columns whose features all have declared types, to which `sample_of` converts texts."""
        features = self.features.given.values()
        others = {
            column for each in features for column in each.columns[each.value_type is not None :]
        }
        return {each.columns[0] for each in features} - others - set(self.labels)

    def _rows(self, lines: _Lines, part: Part, first: int) -> Rows:
        """Rows that are all good as Arrow parses them; else one by one, to say what is wrong."""
        return self._good_rows(lines, part, first) or self._one_by_one(lines, part, first)

    def _good_rows(self, lines: _Lines, part: Part, first: int) -> Rows | None:
        if any(len(makers) > 1 for makers in self._makers.values()):
            return None  # a column has values of several types, and Arrow reads it as one
        data = b"".join(text for _, text in part)
        table = parsed(data, lines.columns, lines.delimiter, self._converters, self._lists)
        if table is None or table.num_rows != len(part):
            return None
        single = [*self.labels, *([] if self._time is None else [self._time])]
        if any(pa.types.is_list(table.schema.field(name).type) for name in single):
            return None
        rows = rows_of(table, self.features, self.labels, first, self._time)
        return None if rows.bad else rows

    @functools.cached_property
    def _lists(self) -> set[str]:
        groups = (
            feature.columns
            for feature in self.features.given.values()
            if (feature.dim > 1 if isinstance(feature, Number) else feature.weighted)
        )
        return {column for columns in groups for column in columns}

    def _one_by_one(self, lines: _Lines, part: Part, first: int) -> Rows:
        samples, times, bad = [], [], {}
        for row, (line, text) in enumerate(part, first):
            try:
                sample, time = self._sample(_cells(lines, _decoded(text)))
            except ValueError as error:
                bad[row] = BadRow(row, str(error), f"line {line}")
                sample, time = {name: [] for name in self._columns}, 0
                sample |= {name: [float("nan")] for name in self.labels}
            samples.append(sample)
            times.append(time)
        batch = batch_of(self.features, self.labels, samples, times)
        numbers = np.arange(first, first + len(part), dtype=np.int64)
        row_times = None if self._time is None else batch.times
        return Rows(batch.features, batch.labels, numbers, bad, row_times)

    def _sample(self, cells: Mapping[str, str]) -> tuple[Sample, int]:
        """The values of a row, and its time.

        Raises:
            ValueError: One cannot be used.
        """
        converters = self._converters | dict.fromkeys(self._declared, str)
        values = {name: _values(name, cells[name], make) for name, make in converters.items()}
        sample = sample_of(self.features, self.labels, values)
        if self._time is None:
            return sample, 0
        whole = values[self._time]
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
        raise ValueError(f"it has {len(cells)} cells for {len(lines.columns)} columns")
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


def _is_row(text: bytes, delimiter: str) -> bool:
    return bool(text.strip(b"\r\n") if delimiter else text.partition(b"#")[0].strip())


def _decoded(text: bytes) -> str:
    return text.decode("utf-8-sig", "replace").rstrip("\r\n")
