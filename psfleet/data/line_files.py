"""Users' own text files, line by line: ratings as MovieLens publishes them, and libsvm samples."""

import contextlib
import csv
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import FilePath, checked
from psfleet.data.feature_sets.value_types import real_number, whole_number


@contextlib.contextmanager
def lines_of(path: str | os.PathLike[str]) -> Iterator[Iterator[str]]:
    """The lines of a UTF-8 file without their ends.

    The file is closed at the end of the block, also when a reader stops at a bad line.

    Raises:
        UsageError: The file cannot be read, or is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield (line.rstrip("\r\n") for line in file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}; convert it to UTF-8") from None


def number(text: str, name: str, where: str) -> float:
    """The finite number that a text stands for.

    Args:
        name: Name of the number. where: File and line, for the message.

    Raises:
        UsageError: It stands for none.
    """
    with contextlib.suppress(ValueError):
        if math.isfinite(value := real_number(text)):
            return value
    raise UsageError(f"{where}: {name} {text!r} is not a finite number")


def whole(text: str, name: str, where: str) -> int:
    """The whole number from -2^62 to 2^62 that a text stands for, see `number`."""
    with contextlib.suppress(ValueError):
        if -(2**62) <= (value := whole_number(text)) <= 2**62:
            return value
    raise UsageError(f"{where}: {name} {text!r} is not a whole number from -2^62 to 2^62")


@dataclass(frozen=True)
class Samples:
    """Labels with their features, in the order of the file.

    Attributes:
        labels: float32 [n].
        starts: int64 [n + 1]; sample i has the features starts[i] to starts[i + 1].
        ids, values: int64 and float32, of all features.
    """

    labels: NDArray[np.float32]
    starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]

    def padded(self, missing: int = -1) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """ids and values as [n, longest sample]; what a sample lacks has the id `missing`, value 0."""
        lengths = np.diff(self.starts)
        there = np.arange(lengths.max(initial=0)) < lengths[:, None]
        ids = np.full(there.shape, missing, np.int64)
        values = np.zeros(there.shape, np.float32)
        ids[there], values[there] = self.ids, self.values
        return ids, values


@checked
def read_libsvm(path: FilePath) -> Samples:
    """The samples of a libsvm file. Empty lines and what follows a `#` are skipped.

    Raises:
        UsageError: The file cannot be read or has no sample; or a label, index or value is no number,
            an index is negative or comes twice in a line. The text names file and line.
    """
    with lines_of(path) as lines:
        return _samples(lines, Path(path).name)


def _samples(lines: Iterable[str], name: str) -> Samples:
    labels, starts, ids, values = array("f"), array("q", [0]), array("q"), array("f")
    for at, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name} line {at}"
        labels.append(number(words[0], "label", where))
        for word in words[1:]:
            index, value = _feature(word, where)
            ids.append(index)
            values.append(value)
        mine = ids[starts[-1] :]
        if len(set(mine)) < len(mine):
            twice = next(index for index in mine if mine.count(index) > 1)
            raise UsageError(f"{where}: index {twice} comes twice")
        starts.append(len(ids))
    if not labels:
        raise UsageError(f"{name} has no sample; a line is: label index:value index:value ...")
    return Samples(
        np.array(labels, np.float32),
        np.array(starts, np.int64),
        np.array(ids, np.int64),
        np.array(values, np.float32),
    )


def _feature(word: str, where: str) -> tuple[int, float]:
    index, colon, value = word.partition(":")
    if not colon:
        raise UsageError(f"{where}: feature {word!r} is not index:value")
    feature_id = whole(index, "index", where)
    if feature_id < 0:
        raise UsageError(f"{where}: index {feature_id} is negative")
    return feature_id, number(value, f"value of index {feature_id}", where)


@dataclass(frozen=True)
class Ratings:
    """Ratings of items by users, in the order of the file.

    Attributes:
        users, items: int64 [n].
        values: float32 [n].
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    values: NDArray[np.float32]


@checked
def read_ratings(
    path: FilePath, columns: Sequence[str] = ("userId", "movieId", "rating")
) -> Ratings:
    """The ratings of a CSV file with a header line.

    Args:
        path: The file. Lines with nothing on them are skipped.
        columns: Names of the columns with user, item and rating; others are not looked at.

    Raises:
        UsageError: The file cannot be read, has no such column or no rating; or a line has another
            number of fields than the header, or a field is no number. The text names file and line.
    """
    with lines_of(path) as lines:
        return _ratings(lines, columns, Path(path).name)


def _ratings(lines: Iterable[str], columns: Sequence[str], name: str) -> Ratings:
    rows = csv.reader(lines, strict=True)
    users, items, values = array("q"), array("q"), array("f")
    places: list[int] = []
    width = 0
    try:
        for row in rows:
            where = f"{name} line {rows.line_num}"
            if not row:
                continue
            if not places:
                places, width = _places(row, columns, where), len(row)
                continue
            if len(row) != width:
                raise UsageError(f"{where}: has {len(row)} field(s), the header has {width}")
            user, item, value = (row[place].strip() for place in places)
            users.append(whole(user, columns[0], where))
            items.append(whole(item, columns[1], where))
            values.append(number(value, columns[2], where))
    except csv.Error as error:
        raise UsageError(f"{name} line {rows.line_num}: is no CSV: {error}") from None
    if not values:
        raise UsageError(f"{name} has no rating; it must have a header and a line for each")
    return Ratings(
        np.array(users, np.int64), np.array(items, np.int64), np.array(values, np.float32)
    )


def _places(header: Sequence[str], columns: Sequence[str], where: str) -> list[int]:
    names = [field.strip() for field in header]
    missing = [column for column in columns if column not in names]
    if missing:
        raise UsageError(f"{where}: the header {','.join(names)!r} has no column {missing[0]!r}")
    return [names.index(column) for column in columns]
