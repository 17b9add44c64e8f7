"""Lines of text files, a piece at a time, and their cells as columns of Arrow.

`read_lines` finds the lines that are rows. `csv_cells` and `libsvm_cells` parse a whole piece with Arrow's
CSV reader, which costs libsvm a third of what parsing line by line costs. A piece with an unusual line is
brought into the usual form line by line first, and only there a line's own mistakes are looked for.
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
_MARK = b"\xef\xbb\xbf"  # of byte order, with which a line may begin
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
    """How the lines of a file are written.

    Attributes:
        delimiter: Delimiter of the columns, or "" for the lines of libsvm.
        quote: Character around cells that contain the delimiter, or None.
        encoding: Name of the encoding, one that extends ASCII.
    """

    delimiter: str
    quote: str | None
    encoding: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that are rows.

    Attributes:
        texts: The lines with their ends.
        numbers: Number of each line in the file.
        size: Bytes that were read, lines included that are no rows.
        next_number: Number of the line after those that were read.
    """

    texts: list[bytes]
    numbers: list[int]
    size: int
    next_number: int


def read_lines(content: Any, number: int, rows: int, delimiter: str) -> Lines:
    """Read the next lines of an open file until `rows` of them are rows, or up to the end of the file.

    Empty lines are no rows, nor are lines of libsvm with nothing but a comment.

    Args:
        number: Number of the next line.
    """
    texts: list[bytes] = []
    numbers: list[int] = []
    size, signs = 0, set(b"\r\n" if delimiter else b"\n#" + _BLANKS)
    while len(texts) < rows and (lines := list(itertools.islice(content, rows - len(texts)))):
        size += sum(map(len, lines))
        found = range(number, number + len(lines))
        number += len(lines)
        # Only a line that begins with such a byte may be no row. To ask for first bytes takes 40 ns a line.
        if not signs.isdisjoint(map(_first_byte, lines)):
            are_rows = [_is_row(line, delimiter) for line in lines]
            lines = [*itertools.compress(lines, are_rows)]
            found = [*itertools.compress(found, are_rows)]  # type: ignore[assignment]
        texts += lines
        numbers += found
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
    """The cells of lines of CSV as columns of texts, and what is wrong with lines whose cells cannot be told.

    Args:
        columns: Columns of the file. names: Those of them that are read.
        nulls: Cells that are null.

    Returns:
        A table of Arrow with a row for each line that has cells, and a reason for each other line.
    """
    data, bad, table = _usual_form(b"".join(lines), dialect), dict[int, str](), None
    if data is not None:
        with contextlib.suppress(pa.ArrowInvalid):  # a line has another number of cells
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
    places = {name: str(columns.index(name)) for name in names if name in columns}
    if not data:
        return pa.table({name: pa.array([], pa.string()) for name in places})
    table = pcsv.read_csv(
        pa.BufferReader(data),
        pcsv.ReadOptions(
            use_threads=False,
            block_size=len(data) + 1,
            column_names=[str(place) for place in range(len(columns))],
        ),
        pcsv.ParseOptions(
            delimiter=dialect.delimiter, quote_char=dialect.quote or False, ignore_empty_lines=False
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


def csv_names(line: bytes, dialect: Dialect) -> tuple[str, ...]:
    """The names of the columns in the first line of a file; other bytes in them are escaped.

    Raises:
        ValueError: The line has no cells.
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
    """Label, indices and values of lines of libsvm as texts, and what is wrong with lines that have no such.

    Each word behind the label is index:value. A `#` begins a comment.

    Returns:
        A table of Arrow with a row for each good line, and a reason for each other line.
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
    """A line with one blank between its words; a line with a wrong word is added to the bad ones."""
    if text.decode(errors="replace").encode() != text:
        bad[row] = f"{text!r:.80} is not UTF-8; pass its encoding"
        return text
    label, *words = text.split() or [b""]
    if not label:  # of a line with a byte order mark alone
        bad[row] = "label is ''"
    elif wrong := [word for word in words if not _PAIR.fullmatch(word)]:
        bad[row] = f"{wrong[0].decode()!r:.80} is not index:value"
    elif b":" in label:
        if "label" in names:
            bad[row] = f"label is {label.decode()!r:.80}"
        label = b"0"  # for who does not ask for it
    return b" ".join([label, *words])


def _words(data: bytes, rows: int) -> Any:
    """The words of lines as Arrow's CSV reader finds them; None if a line is of another form.

    Each word is a line of two cells, index and value, and a label is the word "#:label". A `#` is in no other
    word, since comments are removed before.
    """
    data = _COMMENT.sub(b"", data) if b"#" in data else data
    try:
        data.isascii() or data.decode()
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
    offsets = pa.array((np.append(starts, len(is_label)) - np.arange(rows + 1)).astype(np.int32))
    lists = (pa.ListArray.from_arrays(offsets, flat) for flat in (index, value))
    return pa.table(dict(zip(("label", "index", "value"), (labels, *lists), strict=True)))


def _usual_form(data: bytes, dialect: Dialect) -> bytes | None:
    """Lines in UTF-8 that Arrow can parse as they are; None if one of them may be bad or needs a change."""
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
    """The lines without their ends, in UTF-8 if they can be decoded."""
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
    """Patterns of a dialect, in which each cell that begins with a quote ends with one."""

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
