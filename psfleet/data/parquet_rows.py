"""Rows of Arrow tables as features and labels, and the files that paths and URLs of data name."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.arrow import pa, pc
from psfleet.core.base.errors import UsageError, not_installed
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.value_types import typed
from psfleet.data.sample_batch import chosen_columns, joined_columns


def files_of(paths: Any, endings: Sequence[str]) -> list[str]:
    """The files that paths and URLs name.

    Args:
        endings: Endings of the names of files that are read of a folder; none: all but hidden ones.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in names for file in _inside(str(path), tuple(endings))]
    if not files:
        raise UsageError(f"{paths!r} names no {' or '.join(endings)} file")
    return files


def _inside(path: str, endings: tuple[str, ...]) -> list[str]:
    if "://" in path:
        system, place = _fsspec().core.url_to_fs(path)
        if not system.isdir(place):
            return [path]
        inside = sorted(system.ls(place, detail=False))
        return [system.unstrip_protocol(name) for name in inside if _is_data(name, endings)]
    if Path(path).is_dir():
        return sorted(str(f) for f in Path(path).iterdir() if _is_data(f.name, endings))
    return [path]


def _is_data(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(endings) if endings else Path(name).name[0] not in "._"


def opened(file: str) -> Any:
    """A file or URL to read bytes from, which may be sought in. The caller closes it."""
    return _fsspec().open(file).open() if "://" in file else pa.OSFile(file)


def _fsspec() -> Any:
    try:
        import fsspec
    except ModuleNotFoundError:
        raise not_installed("files at a URL need", "fsspec", "parquet") from None
    return fsspec


def check_columns(names: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Refuse a file that lacks a column.

    Raises:
        UsageError: Names the file and the columns that it has.
    """
    for column in names:
        if column not in columns:
            raise UsageError(
                f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}"
            )


def reason_of(error: Exception) -> str:
    """Describe an error of reading in one short line."""
    return " ".join(str(error).split())[:200]


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: its number in the row group, and what is wrong.

    Attributes:
        place: Place in the file, if there is a better name than row group and row.
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
    for column, type_name, fits in _wanted(features, labels, time):
        check_columns([column], schema.names, where)
        kind = schema.field(column).type
        if not fits(kind):
            raise UsageError(
                f"{where}: column {column!r} is of type {kind}; it must be of {type_name}"
            )


def _wanted(
    features: FeatureSet, labels: Sequence[str], time: str | None
) -> Iterator[tuple[str, str, Any]]:
    for feature in features.given.values():
        if not feature.jagged:
            yield feature.columns[0], "numbers, or lists of them", _holds(_is_number)
            continue
        if feature.value_type in ("int", "float"):
            yield feature.columns[0], "numbers or texts, or lists of them", _holds(_is_plain)
            continue
        is_text = feature.hashed or feature.value_type == "text"
        ids = _is_hashable if is_text else pa.types.is_integer
        texts = " or texts" if is_text else ""
        yield feature.columns[0], f"whole numbers{texts}, or lists of them", _holds(ids)
    for feature in features.given.values():
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


def _is_plain(kind: Any) -> bool:
    return _is_number(kind) or _is_hashable(kind)


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _holds(fits: Any) -> Any:
    """Return whether a column, or the lists in it, are of a type that fits."""
    return lambda kind: fits(_plain(kind.value_type if _is_list(kind) else kind))


def _plain(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def rows_of(
    table: Any, features: FeatureSet, labels: Sequence[str], first: int = 0, time: str | None = None
) -> Rows:
    """The rows of a row group or of a part, whose columns `check_schema` has seen.

    Args:
        table: A pyarrow.Table.
        first: The number of the first row in the row group.
    """
    numbers = np.arange(first, first + table.num_rows, dtype=np.int64)
    bad = _BadRows(first)
    values: dict[str, Any] = {}
    for feature in features.given.values():
        columns = [_Column(table, name) for name in feature.columns]
        if isinstance(feature, Number) and not feature.jagged:
            values[feature.name] = _numbers(feature, columns[0], bad)
        else:
            values[feature.name] = _ids(feature, columns, bad)
    targets = {name: _label(_Column(table, name), bad) for name in labels}
    times = None if time is None else _Column(table, time).times(bad)
    return Rows(values, targets, numbers, bad.found, times)


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
    def filler(self) -> Any:
        """A value of the column's type, for those that are null."""
        return "" if self.has_texts else pa.scalar(0).cast(self._flat.type)

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Mask of the values that are null."""
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

    def values(self, missing: Any) -> NDArray[Any]:
        """The values, with this one in place of those that are missing."""
        flat = pc.fill_null(self._flat, missing) if self.has_nulls else self._flat
        array: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
        return array

    def floats(self) -> Floats:
        """The values as float32; those that are missing are NaN."""
        numbers = self._flat.cast(pa.float32(), safe=False)
        numbers = pc.fill_null(numbers, float("nan")) if self.has_nulls else numbers
        return np.asarray(numbers.to_numpy(zero_copy_only=False))

    def times(self, bad: "_BadRows") -> Ids:
        """Whole numbers as they are, timestamps in microseconds; rows in which they are null are bad."""
        column = self._flat
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
        self.note_bad(self.missing, bad)
        column = pc.fill_null(column.cast(pa.int64()), 0)
        return np.asarray(column.to_numpy(zero_copy_only=False))

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


def _ids(feature: Feature | Number | Input, columns: Sequence[_Column], bad: _BadRows) -> Jagged:
    ids, *others = columns
    weights = _weights(others[0], ids, bad) if others else None
    bags = Jagged(ids.values(ids.filler), ids.lengths, weights=weights)
    if feature.value_type is None and not ids.has_nulls:
        return bags
    missing = ids.missing
    if ids.is_list:
        ids.note_bad(missing, bad)
    if feature.value_type is not None:
        values, absent, unusable = typed(bags.values, feature.value_type)
        ids.note_bad(unusable & ~missing, bad)
        bags, missing = bags.with_values(values), missing | absent
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
