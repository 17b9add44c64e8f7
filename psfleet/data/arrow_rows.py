"""Rows of Arrow tables as features and labels: columns of any type, and texts, as ids and numbers.

Every reader of files and tables ends here. Arrow converts what it can convert without a doubt;
`value_types.typed` judges each other value, as it does for values of requests and messages.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.arrow import pa, pc
from psfleet.core.base.errors import UsageError
from psfleet.data.data_files import partition_of
from psfleet.data.feature_sets.feature_batches import kind_of
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number
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
"""Kind that texts are judged as, the type that Arrow converts the usual ones to, and the form of these."""
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
    """Refuse a file that lacks a column, or has two of its name.

    Raises:
        UsageError: Names the file and the columns that it has.
    """
    for column in names:
        if column not in columns:
            raise UsageError(
                f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}"
            )
        if (count := list(columns).count(column)) > 1:
            raise UsageError(f"{where} has {count} columns {column!r}; give each a name of its own")


def reason_of(error: Exception) -> str:
    """Describe an error of reading in one short line."""
    return " ".join(str(error).split())[:200]


@dataclass(slots=True)
class Rows:
    """Rows with their features and labels.

    Attributes:
        features: By name: a Jagged, or for a Number float32 [n, dim].
        labels: By column: float32 [n].
        numbers: int64 [n]: of the rows in their row group.
        bad: Place and reason of each row that cannot be used, by their numbers. They are among the rows.
    """

    features: dict[str, Any]
    labels: dict[str, Floats]
    numbers: Ids
    bad: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, rows: Any) -> "Rows":
        """Some of the rows, by their places or a slice."""
        return Rows(
            chosen_columns(self.features, rows),
            chosen_columns(self.labels, rows),
            self.numbers[rows],
            self.bad,
        )


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, of which there is at least one. A single part is not copied."""
    return Rows(
        joined_columns([part.features for part in parts]),
        joined_columns([part.labels for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        {row: bad for part in parts for row, bad in part.bad.items()},
    )


def check_schema(schema: Any, features: FeatureSet, labels: Sequence[str], where: str) -> None:
    """Refuse a file that lacks a column, or has it with a type that is not what the feature is.

    Raises:
        UsageError: Names the file, the column and its type.
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
    """The columns, what each of them must be of, and the kinds of `_Column` that are."""
    for feature in features.given.values():
        what: tuple[str, Sequence[str]] = {
            "int": _NUMERALS_TOO,
            "float": _NUMERALS_TOO,
            "id": ("whole numbers, or lists of them", ("int", "null")),
        }.get(
            kind_of(feature), ("whole numbers or texts, or lists of them", ("int", "text", "null"))
        )
        yield feature.columns[0], *what
        for name in feature.columns[1:]:
            yield name, "numbers, or lists of them", _NUMBERS
    for name in labels:
        yield name, "numbers", _NUMBERS


def rows_of(
    table: Any, features: FeatureSet, labels: Sequence[str], known_bad: Mapping[int, str]
) -> tuple[Rows, dict[int, str]]:
    """The rows of a table, numbered from 0, and the first thing that is wrong in each bad one of them.

    Texts stand for the numbers that they are.

    Args:
        table: A pyarrow.Table.
        known_bad: What is wrong with rows that are known to be bad.
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
    """The first thing that is wrong in each bad row."""

    def note(self, column: "_Column", rows: NDArray[Any]) -> None:
        """These rows have a value in the column that cannot be used."""
        for row in np.unique(rows).tolist():
            self.setdefault(row, f"{column.name} is {column.shown(row)}")


class _Column:
    """A column of a row group: its values, and how many each row has.

    Attributes:
        kind: Kind of its values: "int", "float", "bool", "text", "null" if all are, or "" for others.
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
        """Mask of the values that are null."""
        if not self.has_nulls:
            return np.zeros(len(self._flat), np.bool_)
        mask: NDArray[np.bool_] = self._flat.is_null().to_numpy(zero_copy_only=False)
        return mask

    @functools.cached_property
    def rows(self) -> NDArray[np.int64]:
        """The row of each value. It takes as long as reading the column, and is seldom needed."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def note_bad(self, values: NDArray[np.bool_], bad: "_BadRows") -> None:
        """The rows of these values are bad."""
        if values.any():
            bad.note(self, self.rows[values])

    def typed(self, kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """The values in a type, and masks of the missing and the bad, as `value_types.typed` has them."""
        if self._is_text and kind in ("text", "key"):
            return typed(self._texts(self._flat), kind)
        if self._is_text:
            return self._parsed(kind)
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
        """Texts as objects: str, or bytes if one of them is not UTF-8. Null is as the empty text."""
        flat = pc.fill_null(flat, "") if self.has_nulls else flat
        try:
            texts = flat.to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            texts = flat.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
        return np.asarray(texts, object)

    def _parsed(self, kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Numbers that texts are: Arrow converts those of the usual form, and `typed` judges the others."""
        is_id = kind == "id"
        kind, target, pattern = _NUMERALS[kind]
        try:
            if kind == "int" and not pc.all(pc.ascii_is_decimal(self._flat)).as_py():
                raise pa.ArrowInvalid("one may be hexadecimal, which Arrow takes")
            numbers = self._flat.cast(target)
        except pa.ArrowInvalid:
            usual = pc.match_substring_regex(self._flat, pattern)
            numbers = pc.if_else(usual, self._flat, pa.scalar(None, self._flat.type)).cast(target)
        others = numbers.is_null().to_numpy(zero_copy_only=False)
        numbers = pc.fill_null(numbers, 0) if numbers.null_count else numbers
        values, missing, bad = typed(numbers.to_numpy(zero_copy_only=False), kind)
        others = others | missing | bad
        if others.any():
            values, missing, bad = np.array(values), np.array(missing), np.array(bad)
            texts = self._texts(self._flat.filter(pa.array(others)))
            values[others], missing[others], bad[others] = typed(texts, kind)
            if is_id:  # "7.0" is for declared types
                bad[others] |= [("." in text) if isinstance(text, str) else True for text in texts]
        return values, missing, bad

    def floats(self) -> Floats:
        """The values as float32; those that are missing are NaN, and those that cannot be used infinite."""
        if self._is_text:
            values, missing, bad = self.typed("float")
            values = np.array(values)
            values[missing], values[bad] = np.nan, np.inf
            return values
        numbers = self._flat.cast(pa.float32(), safe=False)
        numbers = pc.fill_null(numbers, float("nan")) if self.has_nulls else numbers
        return np.asarray(numbers.to_numpy(zero_copy_only=False))

    def shown(self, row: int) -> str:
        """A row's value, for messages."""
        try:
            return f"{self._array[row].as_py()!r:.80}"
        except UnicodeDecodeError:
            return f"{self._array.slice(row, 1).cast(pa.large_binary())[0].as_py()!r:.80}, which is not UTF-8"


def _storage(array: Any) -> Any:
    """The array without what only says how it is stored: dictionaries, runs and types of extensions."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _storage(array.storage)
    if pa.types.is_dictionary(kind):
        return _storage(array.dictionary_decode())
    if hasattr(kind, "run_end_type"):
        return _storage(pc.run_end_decode(array))
    return array


def _plain(flat: Any) -> tuple[Any, str]:
    """Values as Arrow converts them to numbers or texts, and the kind of them, see `_Column`."""
    kind = flat.type
    if pa.types.is_decimal(kind):  # as texts, which have all digits
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
    ids, *others = columns
    weights = _weights(others[0], ids, bad) if others else None
    values, missing, unusable = ids.typed(kind_of(feature))
    bags = Jagged(values, ids.lengths, weights=weights)
    ids.note_bad(unusable & ~missing, bad)
    return bags.kept(~missing) if missing.any() else bags


def _weights(column: _Column, ids: _Column, bad: _BadRows) -> Floats:
    """A weight for each id; those of rows with another number of weights are 0, and the rows bad."""
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
