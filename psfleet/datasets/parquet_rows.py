"""The rows of a Parquet row group as the columns of a feature set, and what is wrong in them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.data_paths import check_columns
from psfleet.datasets.sample_batch import chosen_columns, joined_columns
from psfleet.errors import UsageError
from psfleet.feature_sets.feature_set import Feature, FeatureSet, Number
from psfleet.feature_sets.jagged import Jagged
from psfleet.platform.arrow import pa, pc

__all__ = ["BadRow", "Rows", "check_schema", "joined_rows", "rows_of"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: its number in the row group, and what is wrong.

    Attributes:
        place: Where it is in the file, if there is a better name than row group and row.
    """

    row: int
    text: str
    place: str = ""


@dataclass(slots=True)
class Rows:
    """Rows with their features and labels.

    Attributes:
        features: By name: a Jagged, or for a Number float32 [n, dim].
        labels: By column: float32 [n].
        numbers: int64 [n]: of the rows in their row group.
        bad: Rows that cannot be used, by their numbers. They are among the rows.
        times: int64 [n]: the values of the time's column, if there is one.
    """

    features: dict[str, Any]
    labels: dict[str, Floats]
    numbers: Ids
    bad: dict[int, BadRow] = field(default_factory=dict)
    times: Ids | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, rows: Any) -> "Rows":
        """Some of the rows, by their places or a slice."""
        return Rows(
            chosen_columns(self.features, rows),
            chosen_columns(self.labels, rows),
            self.numbers[rows],
            self.bad,
            None if self.times is None else self.times[rows],
        )


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, of which there is at least one. A single part is not copied."""
    times = [part.times for part in parts if part.times is not None]
    return Rows(
        joined_columns([part.features for part in parts]),
        joined_columns([part.labels for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        {row: bad for part in parts for row, bad in part.bad.items()},
        np.concatenate(times) if times else None,
    )


def check_schema(
    schema: Any, features: FeatureSet, labels: Sequence[str], where: str, time: str | None = None
) -> None:
    """Refuse a file that lacks a column, or has it with a type that is not what the feature is.

    Raises:
        UsageError: Names the file, the column and its type.
    """
    for column, wanted, fits in _wanted(features, labels, time):
        check_columns([column], schema.names, where)
        kind = schema.field(column).type
        if not fits(kind):
            raise UsageError(
                f"{where}: column {column!r} is of type {kind}; it must be of {wanted}"
            )


def _wanted(
    features: FeatureSet, labels: Sequence[str], time: str | None
) -> Iterator[tuple[str, str, Any]]:
    for feature in features:
        if isinstance(feature, Number):
            yield feature.columns[0], "numbers, or lists of them", _holds(_is_number)
            continue
        ids = _is_hashable if feature.hashed else pa.types.is_integer
        texts = " or texts" if feature.hashed else ""
        yield feature.columns[0], f"whole numbers{texts}, or lists of them", _holds(ids)
        for column in feature.columns[1:]:
            yield column, "numbers, or lists of them", _holds(_is_number)
    for column in labels:
        yield column, "numbers", _is_number
    if time is not None:
        yield time, "whole numbers or timestamps", _is_time


def _is_number(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _is_time(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind))


def _is_hashable(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    )


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _holds(fits: Any) -> Any:
    """Whether a column, or the lists in it, are of a type that fits."""
    return lambda kind: fits(_plain(kind.value_type if _is_list(kind) else kind))


def _plain(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def rows_of(
    table: Any, features: FeatureSet, labels: Sequence[str], first: int = 0, time: str | None = None
) -> Rows:
    """The rows of a row group or of a part, whose columns `check_schema` has seen.

    Args:
        table: A pyarrow.Table.
        features: The set.
        labels: Columns of labels.
        first: The number of the first row in the row group.
        time: The column of times; None: there is none.
    """
    numbers = np.arange(first, first + table.num_rows, dtype=np.int64)
    bad = _BadRows(first)
    found: dict[str, Any] = {}
    for feature in features:
        columns = [_Column(table, name) for name in feature.columns]
        if isinstance(feature, Number):
            found[feature.name] = _numbers(feature, columns[0], bad)
        else:
            found[feature.name] = _ids(feature, columns, bad)
    targets = {name: _label(_Column(table, name), bad) for name in labels}
    times = None if time is None else _Column(table, time).times(bad)
    return Rows(found, targets, numbers, bad.found, times)


class _BadRows:
    """The first thing that is wrong in each row; `first` is the number of the first row."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.found: dict[int, BadRow] = {}

    def note(self, column: "_Column", rows: NDArray[Any]) -> None:
        """These rows have a value in the column that cannot be used."""
        for row in np.unique(rows).tolist():
            number = self._first + row
            self.found.setdefault(number, BadRow(number, f"{column.name} is {column.shown(row)}"))


class _Column:
    """A column of a row group: its values, and how many each row has."""

    def __init__(self, table: Any, name: str) -> None:
        self.name = name
        array = table.column(name)
        self._array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
        if isinstance(self._array, pa.ChunkedArray):
            self._array = (
                self._array.chunk(0) if self._array.num_chunks else pa.array([], array.type)
            )
        self.is_list = _is_list(array.type)
        if self.is_list:
            flat = pc.list_flatten(self._array)
            lengths = pc.list_value_length(self._array)
            lengths = pc.fill_null(lengths, 0) if lengths.null_count else lengths
            self.lengths = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
        else:
            flat = self._array
            self.lengths = np.ones(len(flat), np.int64)
        self._flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
        self.has_nulls = self._flat.null_count > 0
        self.has_texts = pa.types.is_string(self._flat.type) or pa.types.is_large_string(
            self._flat.type
        )

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which of the values are null."""
        found: NDArray[np.bool_] = self._flat.is_null().to_numpy(zero_copy_only=False)
        return found

    @functools.cached_property
    def rows(self) -> NDArray[np.int64]:
        """The row of each value. It takes as long as reading the column, and is seldom needed."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def note_bad(self, values: NDArray[np.bool_], bad: "_BadRows") -> None:
        """The rows of these values are bad."""
        if values.any():
            bad.note(self, self.rows[values])

    def values(self, missing: Any) -> NDArray[Any]:
        """The values, with this one in place of those that are missing."""
        flat = pc.fill_null(self._flat, missing) if self.has_nulls else self._flat
        array: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
        return array

    def floats(self) -> Floats:
        """The values as float32; those that are missing are NaN."""
        found = self._flat.cast(pa.float32(), safe=False)
        found = pc.fill_null(found, float("nan")) if self.has_nulls else found
        return np.asarray(found.to_numpy(zero_copy_only=False))

    def times(self, bad: "_BadRows") -> Ids:
        """Whole numbers as they are, timestamps in microseconds; rows in which they are null are bad."""
        found = self._flat
        if pa.types.is_timestamp(found.type):
            found = found.cast(pa.timestamp("us", found.type.tz), safe=False)
        self.note_bad(self.missing, bad)
        found = pc.fill_null(found.cast(pa.int64()), 0)
        return np.asarray(found.to_numpy(zero_copy_only=False))

    def shown(self, row: int) -> str:
        """A row's value, for messages."""
        return f"{self._array[row].as_py()!r:.80}"


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


def _ids(feature: Feature, columns: Sequence[_Column], bad: _BadRows) -> Jagged:
    ids, *others = columns
    weights = _weights(others[0], ids, bad) if others else None
    given = Jagged(ids.values("" if ids.has_texts else 0), ids.lengths, weights=weights)
    if not ids.has_nulls:
        return given
    if ids.is_list:
        ids.note_bad(ids.missing, bad)
    return given.kept(~ids.missing)


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
