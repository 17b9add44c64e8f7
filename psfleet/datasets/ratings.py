"""Ratings as MovieLens publishes them: a CSV file with userId, movieId and rating."""

import csv
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.lines import lines_of, number, whole
from psfleet.errors import UsageError

__all__ = ["Ratings", "read_ratings"]


@dataclass(frozen=True)
class Ratings:
    """Who has rated what how, in the order of the file.

    Attributes:
        users, items: int64 [n].
        values: float32 [n].
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    values: NDArray[np.float32]


def read_ratings(
    path: str | Path, columns: Sequence[str] = ("userId", "movieId", "rating")
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
