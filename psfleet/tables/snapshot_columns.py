"""The columns of a table in a snapshot: names, types and shapes, each declared here alone.

What a new one holds of each row comes from row_data.py and packed_rows.py. docs/formats.md describes the
columns for people. A change is a new version of the format (psfleet/checkpoint/manifest.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.schema.table import TableSpec
from psfleet.tables.row_data import CandidateData, RowData

__all__ = [
    "CANDIDATE_IDS",
    "EVICTED",
    "REMOVED",
    "ROW_IDS",
    "ColumnGroup",
    "Columns",
    "candidate_columns",
    "candidate_group",
    "candidates_of",
    "column_groups",
    "column_of",
    "row_columns",
    "row_group",
    "rows_of",
]

Column = NDArray[Any]
Columns = dict[str, tuple[Any, tuple[int, ...]]]
"""Of each column its dtype and shape."""

ROW_IDS = "ids"
_ROWS, _TOUCHED, _SCORES = "rows", "touched", "scores"
REMOVED = "removed"
"""Ids of rows that were there at the snapshot before and are not now."""
CANDIDATE_IDS = "candidates"
_CANDIDATE_TOUCHED = "candidate_touched"
EVICTED = ("evicted", "evicted_steps", "evicted_causes", "evicted_next")
"""The columns of an EvictionStream; the last is a single number, the position of the next eviction."""


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of equal length that a file has all or none of.

    Attributes:
        entries: Of each column its dtype and the shape of one entry.
        need: Whether every file has them, or those that have something to say.
        length: Of every column; None: it differs.
    """

    entries: Columns
    need: Literal["always", "if there are any"] = "always"
    length: int | None = None

    def sized(self, count: int) -> Columns:
        """The columns with so many entries."""
        return {name: (dtype, (count, *shape)) for name, (dtype, shape) in self.entries.items()}


def column_groups(spec: TableSpec) -> Sequence[ColumnGroup]:
    """All columns that a file may have of the table."""
    if spec.kind == "dense":
        return [ColumnGroup(dict.fromkeys(spec.slot_names, (np.float32, ())))]
    *stream, position = EVICTED
    types = zip(stream, (np.int64, np.int64, np.uint8), strict=True)
    evicted = [
        ColumnGroup({name: (dtype, ()) for name, dtype in types}),
        ColumnGroup({position: (np.int64, ())}, length=1),
    ]
    return [
        row_group(spec),
        ColumnGroup({REMOVED: (np.int64, ())}, "if there are any"),
        *([] if spec.candidate is None else [candidate_group(spec)]),
        *(evicted if spec.streams_evictions else []),
    ]


def column_of(spec: TableSpec, columns: Mapping[str, Column], name: str) -> Column:
    """A column of the table.

    Raises:
        ShapeError: It is missing.
    """
    if name not in columns:
        raise ShapeError(f"table {spec.name!r}: the part that is set has no {name!r}")
    return columns[name]


# -- rows ----------------------------------------------------------------------------------------


def row_group(spec: TableSpec) -> ColumnGroup:
    """The columns of a sparse table's rows: of RowData."""
    width = spec.dim * len(spec.slot_names)
    entries: Columns = {
        ROW_IDS: (np.int64, ()),
        _ROWS: (np.float32, (width,)),
        _TOUCHED: (np.int64, ()),
    }
    return ColumnGroup(entries | ({_SCORES: (np.float32, (spec.scores,))} if spec.scores else {}))


def row_columns(rows: RowData) -> dict[str, Column]:
    """Rows as columns."""
    columns: dict[str, Column] = {ROW_IDS: rows.ids, _ROWS: rows.values, _TOUCHED: rows.touched}
    return columns | ({_SCORES: rows.scores} if rows.scores.shape[1] else {})


def rows_of(spec: TableSpec, columns: Mapping[str, Column]) -> RowData:
    """Columns as rows.

    Raises:
        ShapeError: A column is missing.
    """
    ids, rows, touched = (column_of(spec, columns, name) for name in (ROW_IDS, _ROWS, _TOUCHED))
    return RowData(ids, rows, touched, columns.get(_SCORES, np.zeros((len(ids), 0), np.float32)))


# -- ids that wait for a row ---------------------------------------------------------------------


def candidate_group(spec: TableSpec) -> ColumnGroup:
    """The columns of CandidateData, in the order of its attributes."""
    values: Columns = {
        _candidate(name): (np.int64 if kind is int else np.float32, ())
        for name, kind in (spec.candidate or {}).items()
    }
    entries = {CANDIDATE_IDS: (np.int64, ()), **values, _CANDIDATE_TOUCHED: (np.int64, ())}
    return ColumnGroup(entries, "if there are any")


def candidate_columns(candidates: CandidateData) -> dict[str, Column]:
    """Candidates as columns."""
    values = {_candidate(name): column for name, column in candidates.values.items()}
    return {CANDIDATE_IDS: candidates.ids, **values, _CANDIDATE_TOUCHED: candidates.touched}


def candidates_of(spec: TableSpec, columns: Mapping[str, Column]) -> CandidateData:
    """Columns as candidates.

    Raises:
        ShapeError: A column is missing.
    """
    return CandidateData(
        column_of(spec, columns, CANDIDATE_IDS),
        {name: column_of(spec, columns, _candidate(name)) for name in spec.candidate or ()},
        column_of(spec, columns, _CANDIDATE_TOUCHED),
    )


def _candidate(name: str) -> str:
    return f"candidate_{name}"
