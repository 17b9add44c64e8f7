"""Training on text files, also compressed with gzip: TextFiles, a source of `fleet.dataset` for CSV, TSV
and libsvm.

    files = TextFiles("clicks.tsv", features, labels=["click"])
    for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
        loss = loss_fn(embed(batch.features), batch.labels["click"])

Text files have no index, so the constructor reads all files once. It makes a row group of every 65,536
rows, and records the position and line number at which each begins. Later, reading starts at these
positions. In a gzip file, the same pass saves points at which decompression can start (`gzip_file.py`).
`text_lines.py` parses the lines, and `row_groups.py` does everything else.
"""

import codecs
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from typing_extensions import override

from psfleet.core.base.arrow import pa, pc
from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import Must, PositiveInt, checked
from psfleet.data.arrow_conversion import check_columns
from psfleet.data.data_files import files_of, opened, partition_of, with_partition
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.feature_sets.value_types import MISSING_TEXTS
from psfleet.data.gzip_file import GzipFile, GzipPoint
from psfleet.data.row_groups import Records, RowGroup, RowGroupSource
from psfleet.data.text_lines import Dialect, Lines, csv_cells, csv_names, libsvm_cells, read_lines

_GROUP = 65_536  # rows of a row group
_BUFFER = 1 << 17  # bytes of a file that are read at once
_DELIMITERS = {"csv": ",", "tsv": "\t", "libsvm": ""}
_LIBSVM = ("label", "index", "value")
_Quote = Annotated[str, Must(lambda quote: len(quote) == 1 and quote.isascii(), "one character")]


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of a row group in its file.

    Attributes:
        position: Position of the row group's first byte in the decompressed file.
        line: Number of the row group's first line.
        dialect: Format of the lines.
    """

    position: int
    line: int
    dialect: Dialect


class TextFiles(RowGroupSource):
    """Lines of CSV, TSV and libsvm files as samples of a feature set: a source of `fleet.dataset`.

        TextFiles("logs/", features, ["click"])                                 # all text files of a folder
        TextFiles("part-*", features, ["click"], format="tsv", columns=names)   # files without a header line

    The first line of a `.csv` or `.tsv` file has the names of the columns, unless `columns` is given. A
    cell has one value, or several values separated by `|`. A cell that is empty or `\\N` is a missing
    feature. Cells cannot contain line breaks.

    A line of a `.libsvm` file, `label index:value index:value ...`, has the columns "label", "index" and
    "value": `Feature("x", table, weighted=True, column="index", weights_column="value")`. A `#` begins a
    comment. Empty lines are ignored.

    The constructor reads all files once, to count their lines. Files whose names end with `.gz` are
    decompressed. Values of a hashed feature are texts, even if they look like numbers. The arguments that
    are not listed here, the attributes and the errors are those of `psfleet.data.parquet.ParquetFiles`.

    Args:
        format: Format of all files. None means the format that the ending of each file's name says.
        columns: Names of the columns of all files. The first line of each file is then a row.
        null_values: Further texts that mean a missing value, such as "NA".
        quote: Character around cells that contain the delimiter. Inside such a cell it is doubled. None
            means that quotes are part of the texts.
        encoding: Encoding of the files, which must extend ASCII, such as "latin-1". A row that cannot be
            decoded is bad.
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
        format: Literal["csv", "tsv", "libsvm"] | None = None,
        columns: Sequence[str] | None = None,
        null_values: Sequence[str] = (),
        quote: _Quote | None = '"',
        encoding: str = "utf-8",
    ) -> None:
        self._format = format
        if format is not None:
            self.endings = []
        self._nulls = [*MISSING_TEXTS, *null_values]
        self._quote, self._encoding = quote, _codec(encoding)
        self._header = None if columns is None else tuple(columns)
        self._points: dict[str, list[GzipPoint]] = {}
        super().__init__(paths, features, labels, bad_rows, interleave)

    @override
    def _row_groups(self, paths: Any) -> Iterator[RowGroup]:
        for file in files_of(paths, self.endings):
            form = self._format or file.lower().removesuffix(".gz").rpartition(".")[2]
            if form not in _DELIMITERS:
                raise UsageError(
                    f"{file} ends with none of {', '.join(self.endings)}; pass its format, such as "
                    "format='tsv'"
                )
            try:
                with self._opened(file) as content:
                    dialect = Dialect(_DELIMITERS[form], self._quote, self._encoding)
                    yield from self._counted(file, content, dialect)
            except OSError as error:
                failure = f"{file} cannot be read: {error.strerror or error}"
                self._skip_unreadable(failure, "it is skipped")

    def _counted(self, file: str, content: Any, dialect: Dialect) -> Iterator[RowGroup]:
        """Read an open file to its end, and yield its row groups."""
        columns: tuple[str, ...] = (self._header or ()) if dialect.delimiter else _LIBSVM
        position, line = 0, 1
        if not columns and (text := content.readline()):
            try:
                columns = csv_names(text, dialect)
            except ValueError as error:
                raise UsageError(
                    f"{file} line 1: {error}; it must have the names of the columns"
                ) from None
            position, line = len(text), 2
        schema = pa.schema([(name, pa.string()) for name in columns])
        group_start, rows, number = _Place(position, line, dialect), 0, 0
        # A group has a whole number of reads, so that it ends after exactly _GROUP rows.
        while (lines := read_lines(content, line, max(_GROUP // 8, 1), dialect.delimiter)).size:
            rows += len(lines.texts)
            position, line = position + lines.size, lines.next_number
            if rows == _GROUP:
                yield RowGroup(file, number, rows, schema, group_start)
                group_start, rows, number = _Place(position, line, dialect), 0, number + 1
        if position:  # not in an empty file, such as Spark writes
            folder_columns = partition_of(file)
            names = [
                name for name in self._columns if name in columns or name not in folder_columns
            ]
            check_columns(names, columns, file)
        if rows:
            yield RowGroup(file, number, rows, schema, group_start)

    @override
    def _records(
        self, group: RowGroup, names: Sequence[str], rows: int, is_raw: bool = False
    ) -> Iterator[Records]:
        group_start: _Place = group.content
        remaining_rows, line = group.rows, group_start.line
        with self._opened(group.file) as file:
            file.seek(group_start.position)
            while (
                remaining_rows
                and (
                    lines := read_lines(
                        file, line, min(rows, remaining_rows), group_start.dialect.delimiter
                    )
                ).texts
            ):
                yield self._parsed(group, lines, names, is_raw)
                remaining_rows, line = remaining_rows - len(lines.texts), lines.next_number

    def _opened(self, file: str) -> Any:
        if file.lower().endswith(".gz"):
            unzipped = GzipFile(opened(file), self._points.setdefault(file, []))
            return io.BufferedReader(unzipped, _BUFFER)
        return opened(file) if "://" in file else Path(file).open("rb", _BUFFER)

    def _parsed(self, group: RowGroup, lines: Lines, names: Sequence[str], is_raw: bool) -> Records:
        """Parse lines into columns of texts. If a cell can have several values, its column has lists of
        texts.
        """
        dialect = group.content.dialect
        if dialect.delimiter:
            nulls = [] if is_raw else self._nulls
            table, bad = csv_cells(lines.texts, group.schema.names, names, dialect, nulls)
        else:
            table, bad = libsvm_cells(lines.texts, names, dialect)
        if bad:
            is_good = np.ones(len(lines.texts), np.bool_)
            is_good[list(bad)] = False
            # Insert a row of nulls for each bad line, so that row numbers and lines agree again.
            table = table.take(pa.array(np.cumsum(is_good) - 1, mask=~is_good))
        table = with_partition(table, group.file, names)
        for index, name in enumerate(table.column_names):
            column = table.column(index)
            if column.type != pa.string():
                continue
            if is_raw:
                table = table.set_column(index, name, _checked(group, names, column))
            elif name not in self.labels and pc.any(pc.match_substring(column, "|")).as_py():
                table = table.set_column(index, name, pc.split_pattern(column, "|"))
        return Records(table, bad, lines.numbers)


def _codec(encoding: str) -> str:
    """Return the name that Python gives to an encoding.

    Raises:
        UsageError: The encoding is unknown, or does not extend ASCII, so that lines could not be split as
            bytes.
    """
    ascii_texts = bytes(range(128))
    try:
        if ascii_texts.decode(encoding) == ascii_texts.decode():
            return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        pass
    raise UsageError(
        f"encoding is {encoding!r}; it must be one that extends ASCII, such as 'utf-8' or 'latin-1'"
    )


def _checked(group: RowGroup, names: Sequence[str], column: Any) -> Any:
    try:
        return column.cast(pa.binary()).cast(pa.string())  # the casts check that it is UTF-8
    except pa.ArrowInvalid:
        raise UsageError(
            f"{group.file} has a text that is not UTF-8 in {', '.join(names)}; pass its encoding"
        ) from None
