"""Conversion of Arrow tables to features and labels: columns of any type become ids, numbers and lists of
these.

Every reader of files and tables uses this module. `check_schema` refuses a file whose columns have wrong
types before any row is read, and `rows_of` converts rows. Arrow converts whole columns whose meaning is
clear. All other values are judged one by one by `value_types.typed`, with the rules for values of requests
and messages, so that a value means the same everywhere.

A bad value does not stop the conversion. Its row is recorded with the first reason, and the caller decides
whether to skip the row or to raise an error.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.arrow import pa, pc
from psfleet.core.base.errors import UsageError, one_line
from psfleet.data.data_files import partition_of
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number
from psfleet.data.feature_sets.feature_values import kind_of
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.value_types import Kind, typed
from psfleet.data.sample_batch import chosen_columns, joined_columns

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
_NUMBERS = ("int", "float", "bool", "null")
_NUMERALS_TOO = "numbers or texts, or lists of them", (*_NUMBERS, "text")
_WHOLE: tuple[Kind, Any, str] = ("int", pa.int64(), r"^-?[0-9]{1,18}$")
_NUMERALS: dict[str, tuple[Kind, Any, str]] = {
    "int": _WHOLE,
    "id": _WHOLE,
    "float": ("float", pa.float64(), r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"),
}
"""Conversion of texts to numbers, for each kind: the kind for unusual texts, the Arrow type for usual
texts, and the pattern of usual texts. The pattern is needed because Arrow also accepts hexadecimal numbers,
for example.
"""
_KINDS = [
    ("int", pa.types.is_integer),
    ("float", pa.types.is_floating),
    ("bool", pa.types.is_boolean),
    ("null", pa.types.is_null),
    ("text", pa.types.is_string),
    ("text", pa.types.is_large_string),
    ("", lambda kind: pa.types.is_temporal(kind) or pa.types.is_nested(kind)),
]


def check_columns(names: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Check that a file has each requested column exactly once.

    Args:
        names: Columns to look for.
        where: Name of the file, for error messages.

    Raises:
        UsageError: A column is missing or occurs twice.
    """
    for column in names:
        if column not in columns:
            raise UsageError(
                f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}"
            )
        if (count := list(columns).count(column)) > 1:
            raise UsageError(f"{where} has {count} columns {column!r}; give each a name of its own")


def reason_of(error: Exception) -> str:
    """Return the message of an error in one line of at most 200 characters."""
    return one_line(error)[:200]


@dataclass(slots=True)
class Rows:
    """Rows of one row group, converted to features and labels.

    Attributes:
        features: Values of each feature, by its name: a Jagged (any number of values for each row), or
            float32 [n, dim] for a Number.
        labels: Values of each label column, by its name, float32 [n].
        numbers: Number of each row within its row group, int64 [n].
        bad: Maps the number of each bad row to a text that has its position in the file and the reason. Bad
            rows are still contained in the features and labels.
    """

    features: dict[str, Any]
    labels: dict[str, Floats]
    numbers: Ids
    bad: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, rows: Any) -> "Rows":
        """Return the rows that a slice, a mask or indices select."""
        return Rows(
            chosen_columns(self.features, rows),
            chosen_columns(self.labels, rows),
            self.numbers[rows],
            self.bad,
        )


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Join the rows of one or more parts. Features and labels of a single part are not copied."""
    return Rows(
        joined_columns([part.features for part in parts]),
        joined_columns([part.labels for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        {row: bad for part in parts for row, bad in part.bad.items()},
    )


def check_schema(schema: Any, features: FeatureSet, labels: Sequence[str], where: str) -> None:
    """Check that a file has a column for each feature and label, with a type that can hold their values.

    Args:
        schema: Arrow schema of the file.
        labels: Columns with the labels.
        where: Path of the file. Its folders may name further columns, such as `day=3/`.

    Raises:
        UsageError: A column is missing or has an unsuitable type. The message names the file, the column
            and the type.
    """
    for name, words, kinds in _wanted(features, labels):
        if name not in schema.names and name in partition_of(where):
            continue
        check_columns([name], schema.names, where)
        column = _Column(pa.schema([schema.field(name)]).empty_table(), name)
        if column.kind not in kinds or (column.is_list and "lists" not in words):
            raise UsageError(
                f"{where}: column {name!r} is of type {schema.field(name).type}; it must be of {words}"
            )


def _wanted(
    features: FeatureSet, labels: Sequence[str]
) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield for each requested column its name, and twice the types that it may have.

    The types come first as a text for messages, then as a list of `_Column.kind`.
    """
    for feature in features.given.values():
        expected: tuple[str, Sequence[str]] = {
            "int": _NUMERALS_TOO,
            "float": _NUMERALS_TOO,
            "id": ("whole numbers, or lists of them", ("int", "null")),
        }.get(
            kind_of(feature), ("whole numbers or texts, or lists of them", ("int", "text", "null"))
        )
        yield feature.columns[0], *expected
        for name in feature.columns[1:]:
            yield name, "numbers, or lists of them", _NUMBERS
    for name in labels:
        yield name, "numbers", _NUMBERS


def rows_of(
    table: Any, features: FeatureSet, labels: Sequence[str], known_bad: Mapping[int, str]
) -> tuple[Rows, dict[int, str]]:
    """Convert a table to features and labels. Where numbers are needed, texts are converted to numbers.

    Args:
        table: Rows as a pyarrow.Table.
        labels: Columns with the labels.
        known_bad: Reasons for rows that are bad already, by their numbers in the table. The cells of these
            rows are null.

    Returns:
        A pair: the rows, numbered from 0, and a mapping from the number of each bad row to the first reason.
    """
    bad = _BadRows(known_bad)
    values: dict[str, Any] = {}
    for feature in features.given.values():
        columns = [_Column(table, name) for name in feature.columns]
        if isinstance(feature, Number) and not feature.jagged:
            values[feature.name] = _numbers(feature, columns[0], bad)
        else:
            values[feature.name] = _ids(feature, columns, bad)
    targets = {name: _label(_Column(table, name), bad) for name in labels}
    return Rows(values, targets, np.arange(table.num_rows, dtype=np.int64)), bad


class _BadRows(dict[int, str]):
    """First reason for each bad row, by the row's number."""

    def note(self, column: "_Column", rows: NDArray[Any]) -> None:
        """Record rows with an unusable value in a column. Rows that are bad already keep their
        first reason.
        """
        for row in np.unique(rows).tolist():
            self.setdefault(row, f"{column.name} is {column.shown(row)}")


class _Column:
    """Column of a table, as one flat array of values and the number of values in each row.

        rows of the column    [7, 9]   null   [4]
        flat values           7 9 4
        lengths               2  0  1

    Attributes:
        is_list: True if the cells of the column are lists.
        lengths: Number of values in each row, int64 [n].
        kind: Kind of the values: "int", "float", "bool", "text", "null" if all values are null, or "" for
            types that no feature can have.
        has_nulls: True if a value is null.
    """

    def __init__(self, table: Any, name: str) -> None:
        self.name = name
        array = table.column(name)
        self._array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
        if isinstance(self._array, pa.ChunkedArray):
            self._array = (
                self._array.chunk(0) if self._array.num_chunks else pa.array([], array.type)
            )
        flat = _storage(self._array)
        self.is_list = hasattr(flat.type, "value_type")
        if self.is_list:
            lengths = pc.list_value_length(flat)
            lengths = pc.fill_null(lengths, 0) if lengths.null_count else lengths
            self.lengths = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
            flat = _storage(pc.list_flatten(flat))
        else:
            self.lengths = np.ones(len(flat), np.int64)
        self._flat, self.kind = _plain(flat)
        self._is_text = pa.types.is_string(self._flat.type) or self._flat.type == pa.large_string()
        self.has_nulls = self._flat.null_count > 0

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Mask of the flat values that are null."""
        if not self.has_nulls:
            return np.zeros(len(self._flat), np.bool_)
        mask: NDArray[np.bool_] = self._flat.is_null().to_numpy(zero_copy_only=False)
        return mask

    @functools.cached_property
    def rows(self) -> NDArray[np.int64]:
        """Row of each flat value, int64 [values].

        Computing it takes as long as reading the column, so it is used only for bad rows.
        """
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def note_bad(self, values: NDArray[np.bool_], bad: "_BadRows") -> None:
        """Record the rows of the flat values in a mask as bad."""
        if values.any():
            bad.note(self, self.rows[values])

    def typed(self, kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Convert the flat values to this kind.

        Returns:
            Values, a mask of missing values and a mask of bad values, as from `value_types.typed`.
        """
        if self._is_text and kind in ("text", "key"):
            return typed(self._texts(self._flat), kind)
        if self._is_text:
            return self._parsed(kind)
        # With nulls, `to_numpy` would turn integers into floats.
        flat = (
            pc.fill_null(self._flat, pa.scalar(0).cast(self._flat.type))
            if self.has_nulls
            else self._flat
        )
        values = flat.to_numpy(zero_copy_only=False)
        if kind in ("id", "key") and values.dtype.kind == "i":
            return values, self.missing, np.zeros(len(values), np.bool_)
        values, missing, bad = typed(values, kind)
        return values, missing | self.missing, bad

    def _texts(self, flat: Any) -> NDArray[Any]:
        """Return texts as an array of str. If a text is not UTF-8, return all as bytes. Null becomes ""."""
        flat = pc.fill_null(flat, "") if self.has_nulls else flat
        try:
            texts = flat.to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            texts = flat.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
        return np.asarray(texts, object)

    def _parsed(self, kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Convert texts to numbers. Returns what `typed` returns.

        Arrow converts all texts at once if it can. Otherwise it converts those of the usual form, and the
        remaining texts are judged one by one in Python.
        """
        is_id = kind == "id"
        kind, target, pattern = _NUMERALS[kind]
        try:
            if kind == "int" and not pc.all(pc.ascii_is_decimal(self._flat)).as_py():
                raise pa.ArrowInvalid("one may be hexadecimal, which Arrow takes")
            numbers = self._flat.cast(target)
        except pa.ArrowInvalid:
            usual = pc.match_substring_regex(self._flat, pattern)
            numbers = pc.if_else(usual, self._flat, pa.scalar(None, self._flat.type)).cast(target)
        is_unusual = numbers.is_null().to_numpy(zero_copy_only=False)
        numbers = pc.fill_null(numbers, 0) if numbers.null_count else numbers
        values, missing, bad = typed(numbers.to_numpy(zero_copy_only=False), kind)
        is_unusual = is_unusual | missing | bad
        if is_unusual.any():
            values, missing, bad = np.array(values), np.array(missing), np.array(bad)
            texts = self._texts(self._flat.filter(pa.array(is_unusual)))
            values[is_unusual], missing[is_unusual], bad[is_unusual] = typed(texts, kind)
            if is_id:  # a text such as "7.0" is an integer only for a declared dtype
                bad[is_unusual] |= [
                    ("." in text) if isinstance(text, str) else True for text in texts
                ]
        return values, missing, bad

    def floats(self) -> Floats:
        """Convert the flat values to float32. A missing value becomes NaN, and an unusable value infinity."""
        if self._is_text:
            values, missing, bad = self.typed("float")
            values = np.array(values)
            values[missing], values[bad] = np.nan, np.inf
            return values
        numbers = self._flat.cast(pa.float32(), safe=False)
        numbers = pc.fill_null(numbers, float("nan")) if self.has_nulls else numbers
        return np.asarray(numbers.to_numpy(zero_copy_only=False))

    def shown(self, row: int) -> str:
        """Return the value of a row as text, for error messages."""
        try:
            return f"{self._array[row].as_py()!r:.80}"
        except UnicodeDecodeError:
            return f"{self._array.slice(row, 1).cast(pa.large_binary())[0].as_py()!r:.80}, which is not UTF-8"


def _storage(array: Any) -> Any:
    """Decode encodings that Arrow uses only for storage: dictionaries, runs and extension types."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _storage(array.storage)
    if pa.types.is_dictionary(kind):
        return _storage(array.dictionary_decode())
    if hasattr(kind, "run_end_type"):
        return _storage(pc.run_end_decode(array))
    return array


def _plain(flat: Any) -> tuple[Any, str]:
    """Convert values to a type that NumPy has. Returns the values and their kind, as in `_Column`."""
    kind = flat.type
    if pa.types.is_decimal(kind):  # a text keeps all digits of a large integer
        return (flat.cast(pa.float64()), "float") if kind.scale else (flat.cast(pa.string()), "int")
    for name, of in _KINDS:
        if of(kind):
            return (flat.cast(pa.int64()) if name == "null" else flat), name
    try:
        return flat.cast(pa.large_string(), safe=False), "text"
    except pa.ArrowException:
        return flat, ""


def _numbers(feature: Number, column: _Column, bad: _BadRows) -> Floats:
    values, default = column.floats(), np.float32(feature.default)
    column.note_bad(np.isinf(values), bad)
    values = np.where(np.isfinite(values), values, default)
    fits = column.lengths == feature.dim
    if fits.all():
        return values.reshape(-1, feature.dim)
    bad.note(column, np.flatnonzero(~fits & (column.lengths > 0)))
    out = np.full((len(column.lengths), feature.dim), default, np.float32)
    out[fits] = values[fits[column.rows]].reshape(-1, feature.dim)
    return out


def _ids(feature: Feature | Number | Input, columns: Sequence[_Column], bad: _BadRows) -> Jagged:
    ids, *weight_columns = columns
    weights = _weights(weight_columns[0], ids, bad) if weight_columns else None
    values, missing, unusable = ids.typed(kind_of(feature))
    bags = Jagged(values, ids.lengths, weights=weights)
    ids.note_bad(unusable & ~missing, bad)
    return bags.kept(~missing) if missing.any() else bags


def _weights(column: _Column, ids: _Column, bad: _BadRows) -> Floats:
    """Return a weight for each id. If a row has not as many weights as ids, it gets zeros and is recorded
    as bad.
    """
    values, fits = column.floats(), column.lengths == ids.lengths
    column.note_bad(~np.isfinite(values), bad)
    if fits.all():
        return values
    bad.note(column, np.flatnonzero(~fits))
    out = np.zeros(int(ids.lengths.sum()), np.float32)
    out[fits[ids.rows]] = values[fits[column.rows]]
    return out


def _label(column: _Column, bad: _BadRows) -> Floats:
    values = column.floats()
    column.note_bad(~np.isfinite(values), bad)
    return values
