"""Lines of CSV, TSV and libsvm files as samples of a feature set, parsed by Arrow.

files = TextFiles("clicks.tsv", features, labels=["click"])
for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
    loss = loss_fn(embed(batch.features), batch.labels["click"])
"""

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.arrow import pa, pc, pcsv
from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import Must, PositiveInt, checked
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.feature_sets.value_types import MISSING_TEXTS
from psfleet.data.gzip_file import GzipFile, GzipPoint
from psfleet.data.parquet_rows import BadRow, Rows, check_columns, partition_of
from psfleet.data.row_group_files import RowGroup, RowGroupFiles, opened, with_partition

_GROUP = 65_536  # rows that are read together
_BUFFER = 1 << 17  # bytes of a gzip file that are read at once
_DELIMITERS = {"csv": ",", "tsv": "\t", "libsvm": ""}
_LIBSVM = ("label", "index", "value")
_MARK = b"\xef\xbb\xbf"  # of byte order, with which a line may begin
Part = Sequence[tuple[int, bytes]]
"""Some rows of a group: number and text of each line."""
_Quote = Annotated[str, Must(lambda quote: len(quote) == 1 and quote.isascii(), "one character")]


_NO_CELLS = (
    "{!r:.80} has no cells: a quoted cell does not end, or goes on behind its closing quote, or a line ends "
    "within it; pass quote=None if quotes are part of the texts"
)


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
    cell has one value or several, with `|` between them; a cell that is empty or `\\N` is a feature that is
    missing. There are no line breaks in cells.

    A line of a `.libsvm` file, `label index:value index:value ...`, has the columns "label", "index" and
    "value": `Feature("x", table, weighted=True, column="index", weights_column="value")`. What follows a `#`
    is left out. Empty lines are no rows.

    Files are read once when it is made, to count their lines. Rows are read in groups of 65,536. A file whose
    name ends with `.gz` is decompressed. Arguments, attributes and errors are those of
    `psfleet.data.parquet.ParquetFiles`; values of a hashed feature are texts, also if they are numbers.

    Args:
        format: Format of all files, whatever their names, or None if each file's name says it.
        columns: Names of the columns of files without a first line that has them.
        null_values: Further texts that stand for a missing value, such as "NA".
        quote: Character around cells that contain the delimiter, doubled within them. None means that quotes
            are part of the texts.
        encoding: Encoding of the files, one that extends ASCII, such as "latin-1". A row that cannot be
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
        time: str | None = None,
        format: Literal["csv", "tsv", "libsvm"] | None = None,
        columns: Sequence[str] | None = None,
        null_values: Sequence[str] = (),
        quote: _Quote | None = '"',
        encoding: str = "utf-8",
    ) -> None:
        self._format = format
        self._nulls = [*MISSING_TEXTS, *null_values]
        self._quote, self._encoding = quote, _codec(encoding)
        self._header = None if columns is None else tuple(columns)
        self._points: dict[str, list[GzipPoint]] = {}
        if format is not None:
            self.endings = []
        super().__init__(paths, features, labels, bad_rows, interleave, time)

    @override
    def names(self, group: RowGroup) -> Sequence[str]:
        own: tuple[str, ...] = group.metadata.columns
        return [*own, *(name for name in partition_of(group.file) if name not in own)]

    @override
    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        group, numbers = self._groups[number], set(rows.tolist())
        part = [line for row, line in enumerate(self._lines(group)) if row in numbers]
        table, bad = self._table(group, part, names, [])
        if bad:
            raise UsageError(f"{group.file} line {part[min(bad)][0]}: {bad[min(bad)]}")
        try:
            return {name: table.column(name).cast(pa.binary()).cast(pa.string()) for name in names}
        except pa.ArrowInvalid:
            raise UsageError(
                f"{group.file} has a text that is not UTF-8 in {', '.join(names)}; pass its encoding"
            ) from None

    def _row_groups(self, file: str) -> Iterator[RowGroup]:
        form = self._format or file.lower().removesuffix(".gz").rpartition(".")[2]
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
        line = 0
        for line, text in enumerate(content, 1):
            if line == 1 and not columns:
                columns = self._names(file, text, delimiter)
            elif _is_row(text, delimiter):
                if rows == 0:
                    begin, first = at, line
                rows += 1
            at += len(text)
            if rows == _GROUP:
                yield RowGroup(file, number, rows, _Lines(begin, first, columns, delimiter))
                rows, number = 0, number + 1
        if line:  # an empty file, of which Spark makes some, has no rows
            names = [
                name for name in self._columns if name in columns or name not in partition_of(file)
            ]
            check_columns(names, columns, file)
        if rows:
            yield RowGroup(file, number, rows, _Lines(begin, first, columns, delimiter))

    def _row_parts(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        part: list[tuple[int, bytes]] = []
        first = 0
        for each in self._lines(group):
            part.append(each)
            if len(part) == rows:
                yield self._rows(group, part, first)
                first, part = first + rows, []
        if part:
            yield self._rows(group, part, first)

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
        if file.lower().endswith(".gz"):
            unzipped = GzipFile(opened(file), self._points.setdefault(file, []))
            return io.BufferedReader(unzipped, _BUFFER)
        return opened(file) if "://" in file else Path(file).open("rb")

    def _rows(self, group: RowGroup, part: Part, first: int) -> Rows:
        table, wrong = self._table(group, part, self._columns, self._nulls)
        single = {*self.labels, self._time}
        for place, name in enumerate(table.column_names):
            column = table.column(place)
            if name in single or column.type != pa.string():
                continue
            if pc.any(pc.match_substring(column, "|")).as_py():
                table = table.set_column(place, name, pc.split_pattern(column, "|"))
        known = {first + row: BadRow(first + row, text) for row, text in wrong.items()}
        rows = self._rows_of(group, table, first, known)
        for row, bad in rows.bad.items():
            rows.bad[row] = BadRow(row, bad.text, f"line {part[row - first][0]}")
        return rows

    def _table(
        self, group: RowGroup, part: Part, names: Sequence[str], nulls: Sequence[str]
    ) -> tuple[Any, dict[int, str]]:
        """Columns of lines as texts, and what is wrong with the lines whose cells cannot be told, by row.

        Args:
            nulls: Cells that are null.
        """
        lines: _Lines = group.metadata
        bad: dict[int, str] = {}
        texts = self._texts([text for _, text in part], bad)
        cells = self._cells(lines, texts, names, nulls, bad) if lines.delimiter else None
        table = _pairs(texts, bad) if cells is None else cells
        if bad:
            good = np.ones(len(part), np.bool_)
            good[list(bad)] = False
            table = table.take(pa.array(np.cumsum(good) - 1, mask=~good))
        return with_partition(table, group.file, names), bad

    def _texts(self, texts: list[bytes], bad: dict[int, str]) -> list[bytes]:
        """The lines without their ends, in UTF-8 if they can be decoded."""
        texts = [text.rstrip(b"\r\n").removeprefix(_MARK) for text in texts]
        if self._encoding == "utf-8":
            return texts
        for row, text in enumerate(texts):
            try:
                texts[row] = text.decode(self._encoding).encode()
            except ValueError as error:
                bad[row] = f"it is not {self._encoding}: {error}"
        return texts

    def _cells(
        self,
        lines: _Lines,
        texts: list[bytes],
        names: Sequence[str],
        nulls: Sequence[str],
        bad: dict[int, str],
    ) -> Any:
        """Columns of lines, without those of bad lines, which are added to the bad ones."""
        data = b"\n".join(texts)
        if b"\r" in data or (self._quote and self._quote.encode() in data):
            form = _form_of(lines.delimiter, self._quote)
            for row, text in enumerate(texts):
                if not form.fullmatch(text):
                    bad.setdefault(row, _NO_CELLS.format(text))
        if bad:
            texts = [text for row, text in enumerate(texts) if row not in bad]
            data = b"\n".join(texts)
        places = {name: str(lines.columns.index(name)) for name in names if name in lines.columns}
        if not texts:
            return pa.table({name: pa.array([], pa.string()) for name in places})
        rows = [row for row in range(len(texts) + len(bad)) if row not in bad] if bad else None

        def note(invalid: Any) -> str:
            row = invalid.number - 1
            bad[row if rows is None else rows[row]] = (
                f"it has {invalid.actual_columns} cells for {invalid.expected_columns} columns"
            )
            return "skip"

        table = pcsv.read_csv(
            pa.BufferReader(data),
            pcsv.ReadOptions(
                use_threads=False,
                block_size=len(data) + 1,
                column_names=[str(place) for place in range(len(lines.columns))],
            ),
            pcsv.ParseOptions(
                delimiter=lines.delimiter,
                quote_char=self._quote or False,
                ignore_empty_lines=False,
                invalid_row_handler=note,
            ),
            pcsv.ConvertOptions(
                check_utf8=False,
                column_types={place: pa.string() for place in places.values()},
                include_columns=list(dict.fromkeys(places.values())),
                strings_can_be_null=bool(nulls),
                null_values=list(nulls),
            ),
        )
        return pa.table({name: table.column(place) for name, place in places.items()})

    def _names(self, file: str, text: bytes, delimiter: str) -> tuple[str, ...]:
        """The names of the columns in the first line of a file; other bytes in them are escaped."""
        line = text.rstrip(b"\r\n").removeprefix(_MARK)
        if not _form_of(delimiter, self._quote).fullmatch(line):
            raise UsageError(
                f"{file} line 1: {_NO_CELLS.format(line)}; it must have the names of the columns"
            )
        data = line.decode(self._encoding, "backslashreplace").encode()
        form = pcsv.ParseOptions(delimiter=delimiter, quote_char=self._quote or False)
        source, options = pa.BufferReader(data + b"\n"), pcsv.ReadOptions(block_size=len(data) + 2)
        return tuple(pcsv.read_csv(source, options, form).column_names)


def _form_of(delimiter: str, quote: str | None) -> re.Pattern[bytes]:
    """The form of a line, in which each cell that begins with a quote ends with one."""
    end = re.escape(delimiter).encode()
    cell = rb"[^\r%b]*+" % end
    if quote:
        mark = re.escape(quote).encode()
        cell = rb"(?:%b(?:[^\r%b]++|%b%b)*+%b|(?!%b)%b)" % (*[mark] * 6, cell)
    return re.compile(rb"%b(?:%b%b)*+" % (cell, end, cell))


def _codec(encoding: str) -> str:
    """The name of an encoding in which ASCII is as it is."""
    ascii_texts = bytes(range(128))
    try:
        if ascii_texts.decode(encoding) == ascii_texts.decode():
            return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        pass
    raise UsageError(
        f"encoding is {encoding!r}; it must be one that extends ASCII, such as 'utf-8' or 'latin-1'"
    )


def _pairs(texts: list[bytes], bad: dict[int, str]) -> Any:
    """Label, indices and values of lines of libsvm; without those of bad lines, which are added to the bad.

    Each word behind the label is index:value. A `#` begins a comment.
    """
    data = b"\n".join(texts)
    if b"#" in data:
        texts = [text.partition(b"#")[0] for text in texts]
        data = b"\n".join(texts)
    try:
        data.decode()
    except UnicodeDecodeError:
        for row, text in enumerate(texts):
            if text.decode(errors="replace").encode() != text:
                bad.setdefault(row, f"{text!r:.80} is not UTF-8; pass its encoding")
    good = [row for row in range(len(texts)) if row not in bad]
    lines = pa.array([texts[row] for row in good], pa.binary()).cast(pa.string())
    words = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(lines))
    flat, rows = pc.list_flatten(words), pc.list_parent_indices(words).to_numpy()
    is_label = np.diff(rows, prepend=-1) > 0
    sides = pc.split_pattern(flat, ":")
    is_pair = pc.match_substring_regex(flat, "^[^:]+:[^:]+$").to_numpy(zero_copy_only=False)
    wrong = ~is_label & ~is_pair
    for word, row in zip(
        flat.filter(pa.array(wrong)).to_pylist(), rows[wrong].tolist(), strict=True
    ):
        bad.setdefault(good[row], f"{word!r:.80} is not index:value")
    keeps = np.array([row not in bad for row in good], np.bool_)
    is_pair = ~is_label & keeps[rows]
    counts = np.bincount(rows[is_pair], minlength=len(good))[keeps]
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    pairs = sides.filter(pa.array(is_pair))
    index, value = (
        pa.ListArray.from_arrays(offsets, pc.list_element(pairs, side)) for side in (0, 1)
    )
    labels = flat.filter(pa.array(is_label & keeps[rows]))
    return pa.table({"label": labels, "index": index, "value": value})


def _is_row(text: bytes, delimiter: str) -> bool:
    return bool(text.strip(b"\r\n") if delimiter else text.partition(b"#")[0].strip())
