"""Parsing of CSV, TSV and libsvm lines into Arrow columns, thousands of lines at a time.

`read_lines` reads the next lines of a file. `csv_cells` and `libsvm_cells` parse these lines all at once
with Arrow's CSV reader, which for libsvm takes a third of the time of parsing line by line. If a line is
unusual (another number of cells, a stray quote, a byte order mark, ...), all lines are first converted in
Python, one by one, to the form that Arrow can parse. Only this conversion finds bad lines. A bad line is
returned with a reason and does not stop the parsing.
"""

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psfleet.core.base.arrow import pa, pc, pcsv

_first_byte = operator.itemgetter(0)
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which may stand at the start of a line
_BLANKS = b" \t\v\f\r"
_LINE_BREAKS_FOR_BLANKS = bytes.maketrans(_BLANKS, b"\n" * len(_BLANKS))
_COMMENT = re.compile(rb"#[^\n]*")
_PAIR = re.compile(rb"[^:]+:[^:]+")
_NO_CELLS = (
    "{!r:.80} has no cells: a quoted cell does not end, or goes on behind its closing quote, or a line ends "
    "within it; pass quote=None if quotes are part of the texts"
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Format of the lines in a file.

    Attributes:
        delimiter: Delimiter between columns, or "" for libsvm.
        quote: Character around cells that contain the delimiter, or None for no quotes.
        encoding: Name of the encoding, which extends ASCII.
    """

    delimiter: str
    quote: str | None
    encoding: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Next rows of a text file, and the amount that was read to get these rows.

    Attributes:
        texts: Lines of the rows, including their line ends.
        numbers: Number of each of these lines in the file, from 1.
        size: Number of bytes that were read, including skipped lines.
    """

    texts: list[bytes]
    numbers: list[int]
    size: int
    next_number: int


def read_lines(content: Any, number: int, rows: int, delimiter: str) -> Lines:
    """Read the next lines of an open file, until there are `rows` rows or the file ends.

    Empty lines are skipped, and also lines of libsvm that have only a comment.

    Args:
        content: Open file, as an iterator of lines.
        delimiter: Delimiter between columns, or "" for libsvm.
    """
    texts: list[bytes] = []
    numbers: list[int] = []
    size, signs = 0, set(b"\r\n" if delimiter else b"\n#" + _BLANKS)
    while len(texts) < rows and (lines := list(itertools.islice(content, rows - len(texts)))):
        size += sum(map(len, lines))
        line_numbers = range(number, number + len(lines))
        number += len(lines)
        # Only a line that begins with one of these bytes can be a line to skip. Usually there is none, so
        # that single lines need not be examined. Comparing first bytes takes 40 ns a line.
        if not signs.isdisjoint(map(_first_byte, lines)):
            are_rows = [_is_row(line, delimiter) for line in lines]
            lines = [*itertools.compress(lines, are_rows)]
            line_numbers = [*itertools.compress(line_numbers, are_rows)]  # type: ignore[assignment]
        texts += lines
        numbers += line_numbers
    return Lines(texts, numbers, size, number)


def _is_row(line: bytes, delimiter: str) -> bool:
    return bool(line.strip(b"\r\n") if delimiter else line.partition(b"#")[0].strip())


def csv_cells(
    lines: list[bytes],
    columns: Sequence[str],
    names: Sequence[str],
    dialect: Dialect,
    nulls: Sequence[str],
) -> tuple[Any, dict[int, str]]:
    """Parse lines of CSV or TSV into columns of texts.

    Args:
        columns: All columns of the file, in order.
        nulls: Texts that mean a missing value.

    Returns:
        A pair: an Arrow table with a row for each good line, and a mapping from the index in `lines` of each
        bad line to the reason.
    """
    data, bad, table = _usual_form(b"".join(lines), dialect), dict[int, str](), None
    if data is not None:
        with contextlib.suppress(
            pa.ArrowInvalid
        ):  # a line has another number of cells: find it below
            table = _csv_table(data, columns, names, dialect, nulls)
    if table is None:
        texts, form = _texts(lines, dialect, bad), _csv_form(dialect)
        for row, text in enumerate(texts):
            if row in bad:
                continue
            if not form.line.fullmatch(text):
                bad[row] = _NO_CELLS.format(text)
            elif (count := 1 + len(form.cell_end.findall(text))) != len(columns):
                bad[row] = f"it has {count} cells for {len(columns)} columns"
        data = b"\n".join([text for row, text in enumerate(texts) if row not in bad])
        table = _csv_table(data, columns, names, dialect, nulls)
    return table, bad


def _csv_table(
    data: bytes,
    columns: Sequence[str],
    names: Sequence[str],
    dialect: Dialect,
    nulls: Sequence[str],
) -> Any:
    column_numbers = {name: str(columns.index(name)) for name in names if name in columns}
    if not data:
        return pa.table({name: pa.array([], pa.string()) for name in column_numbers})
    table = pcsv.read_csv(
        pa.BufferReader(data),
        pcsv.ReadOptions(
            use_threads=False,
            block_size=len(data) + 1,
            column_names=[str(number) for number in range(len(columns))],
        ),
        pcsv.ParseOptions(
            delimiter=dialect.delimiter, quote_char=dialect.quote or False, ignore_empty_lines=False
        ),
        pcsv.ConvertOptions(
            check_utf8=False,
            column_types={number: pa.string() for number in column_numbers.values()},
            include_columns=list(dict.fromkeys(column_numbers.values())),
            strings_can_be_null=bool(nulls),
            null_values=list(nulls),
        ),
    )
    return pa.table({name: table.column(number) for name, number in column_numbers.items()})


def csv_names(line: bytes, dialect: Dialect) -> tuple[str, ...]:
    """Return the names of the columns from the first line of a file. Bytes that cannot be decoded are
    escaped.

    Raises:
        ValueError: A cell of the line begins with a quote but does not end with one.
    """
    text = line.rstrip(b"\r\n").removeprefix(_MARK)
    if not _csv_form(dialect).line.fullmatch(text):
        raise ValueError(_NO_CELLS.format(text))
    data = text.decode(dialect.encoding, "backslashreplace").encode()
    form = pcsv.ParseOptions(delimiter=dialect.delimiter, quote_char=dialect.quote or False)
    options = pcsv.ReadOptions(block_size=len(data) + 2)
    return tuple(pcsv.read_csv(pa.BufferReader(data + b"\n"), options, form).column_names)


def libsvm_cells(
    lines: list[bytes], names: Sequence[str], dialect: Dialect
) -> tuple[Any, dict[int, str]]:
    """Parse lines of libsvm, `label index:value index:value ... # comment`, into columns of texts.

    Args:
        names: Columns that are needed. If "label" is not among them, a line with a bad label is still good.

    Returns:
        A pair: an Arrow table with a row for each good line, and a mapping from the index in `lines` of
        each bad line to the reason. The table's columns are "label", "index" and "value". The last two have
        lists of texts.
    """
    bad: dict[int, str] = {}
    data = _usual_form(b"".join(lines), dialect)
    table = None if data is None else _words(data, len(lines))
    if table is None:
        texts = _texts(lines, dialect, bad)
        for row, text in enumerate(texts):
            if row not in bad:
                texts[row] = _usual_line(text.partition(b"#")[0], row, names, bad)
        good = [text for row, text in enumerate(texts) if row not in bad]
        table = _words(b"\n".join(good), len(good)) if good else _words(b"0", 1).slice(1)
    return table, bad


def _usual_line(text: bytes, row: int, names: Sequence[str], bad: dict[int, str]) -> bytes:
    """Return a line of libsvm with a single blank between its words.

    If the line is bad, adds the reason to `bad`, under the number `row`.
    """
    if text.decode(errors="replace").encode() != text:
        bad[row] = f"{text!r:.80} is not UTF-8; pass its encoding"
        return text
    label, *words = text.split() or [b""]
    if not label:  # the line has nothing but a byte order mark
        bad[row] = "label is ''"
    elif wrong := [word for word in words if not _PAIR.fullmatch(word)]:
        bad[row] = f"{wrong[0].decode()!r:.80} is not index:value"
    elif b":" in label:
        if "label" in names:
            bad[row] = f"label is {label.decode()!r:.80}"
        label = b"0"  # the label is not read; any number lets the line be parsed
    return b" ".join([label, *words])


def _words(data: bytes, rows: int) -> Any:
    """Split lines of libsvm into words with Arrow's CSV reader. Returns None if a line is unusual.

    Each blank is replaced by a line break. Arrow then reads each word as a line with two cells, index and
    value, separated by ":". A label has no ":", so it gets the index "#", which also marks the beginning of
    a line of the file:

        1 5:0.5 7:2           #:1
        0 5:1           ->    5:0.5
                              7:2
                              #:0
                              5:1

    No other word contains `#`, because comments were removed before.
    """
    data = _COMMENT.sub(b"", data) if b"#" in data else data
    try:
        data.isascii() or data.decode()  # raises if it is not UTF-8; ASCII, the usual case, is checked faster
        words = b"#:" + data.rstrip(b"\n").replace(b"\n", b"\n#:")
        table = pcsv.read_csv(
            pa.BufferReader(words.translate(_LINE_BREAKS_FOR_BLANKS)),
            pcsv.ReadOptions(
                use_threads=False, block_size=len(words) + 1, column_names=["index", "value"]
            ),
            pcsv.ParseOptions(delimiter=":", quote_char=False),
            pcsv.ConvertOptions(
                check_utf8=False, column_types={"index": pa.string(), "value": pa.string()}
            ),
        )
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return None
    index, value = (column.combine_chunks() for column in table.columns)
    is_label = pc.equal(index, "#")
    starts = np.flatnonzero(is_label.to_numpy(zero_copy_only=False))
    if len(starts) != rows or any(pc.any(pc.equal(cells, "")).as_py() for cells in (index, value)):
        return None
    labels, is_pair = value.filter(is_label), pc.invert(is_label)
    index, value = index.filter(is_pair), value.filter(is_pair)
    # starts[k] is the first word of line k. Up to there, k words are labels, which are no index-value
    # pairs.
    offsets = pa.array((np.append(starts, len(is_label)) - np.arange(rows + 1)).astype(np.int32))
    lists = (pa.ListArray.from_arrays(offsets, flat) for flat in (index, value))
    return pa.table(dict(zip(("label", "index", "value"), (labels, *lists), strict=True)))


def _usual_form(data: bytes, dialect: Dialect) -> bytes | None:
    """Return lines in UTF-8 that Arrow can parse at once. Returns None if a line may be bad or must be
    converted.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if _MARK in data or b"\r" in data:
        return None
    if dialect.encoding != "utf-8":
        try:
            data = data.decode(dialect.encoding).encode()
        except ValueError:
            return None
    if dialect.delimiter and dialect.quote and dialect.quote.encode() in data:
        data = data if data.endswith(b"\n") else data + b"\n"
        return data if _csv_form(dialect).lines.fullmatch(data) else None
    return data


def _texts(lines: list[bytes], dialect: Dialect, bad: dict[int, str]) -> list[bytes]:
    """Return lines in UTF-8 without their line ends. If a line cannot be decoded, add the reason to `bad`."""
    texts = [line.rstrip(b"\r\n").removeprefix(_MARK) for line in lines]
    if dialect.encoding == "utf-8":
        return texts
    for row, text in enumerate(texts):
        try:
            texts[row] = text.decode(dialect.encoding).encode()
        except ValueError as error:
            bad[row] = f"it is not {dialect.encoding}: {error}"
    return texts


@dataclass(frozen=True, slots=True)
class _CsvForm:
    """Patterns for lines of a CSV dialect in which each cell that begins with a quote also ends with one.

    Attributes:
        lines: Pattern of any number of lines, each with a line feed.
        cell_end: Pattern of one cell and the delimiter after it.
    """

    line: re.Pattern[bytes]
    lines: re.Pattern[bytes]
    cell_end: re.Pattern[bytes]


@functools.cache
def _csv_form(dialect: Dialect) -> _CsvForm:
    end = re.escape(dialect.delimiter).encode()
    cell = rb"[^\r\n%b]*+" % end
    if dialect.quote:
        mark = re.escape(dialect.quote).encode()
        cell = rb"(?:%b(?:[^\r\n%b]++|%b%b)*+%b|(?!%b)%b)" % (*[mark] * 6, cell)
    line = rb"%b(?:%b%b)*+" % (cell, end, cell)
    return _CsvForm(*(re.compile(form) for form in (line, rb"(?:%b\n)*+" % line, cell + end)))
