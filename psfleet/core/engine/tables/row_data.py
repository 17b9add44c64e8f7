"""Values that a sparse table reads and writes as a whole: those of rows, and those of the table.

docs/formats.md describes the columns for people. A change is a new version of the format
(psfleet/checkpoint/manifest.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.number_formats import pack_rows, unpack_rows
from psfleet.core.engine.kernels.row_format import RowFormat
from psfleet.core.engine.schema.table import TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


Column = NDArray[Any]
Columns = dict[str, tuple[Any, tuple[int, ...]]]
"""Dtype and shape of each column."""
ROW_IDS = "ids"
REMOVED = "removed"
"""Ids of rows that were there at the snapshot before and are not now."""
CANDIDATE_IDS = "candidates"
_CANDIDATE_TOUCHED = "candidate_touched"
EVICTED = ("evicted", "evicted_steps", "evicted_causes", "evicted_next")
"""The columns of an EvictionStream; the last is a single number, the position of the next eviction."""


def _none() -> Ids:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowData:
    """Rows of a sparse table with everything that is known of them.

    Attributes:
        ids: int64 [n].
        values: float32 [n, dim * (1 + slots)]: the weights, then each state slot; one that a whole row
            shares is repeated for each of its weights.
        touched: int64 [n]: the table's step when the row was last pushed. A row that has not been
            pushed for 2**31 steps is said to have been pushed 2**31 steps ago.
        scores: float32 [n, TableSpec.scores]: shows and clicks, then the frequency as it was at the last
            push, in tables that count them.
    """

    ids: Ids
    values: Floats
    touched: Ids
    scores: Floats


@dataclass(frozen=True, slots=True)
class CandidateData:
    """Ids that have been pushed, but have no row yet.

    Attributes:
        ids: int64 [n], ascending.
        values: Values that the table's entry remembers of each (Entry.candidate), by name: int64 or
            float32 [n].
        touched: int64 [n]: the table's step when it was last pushed.
    """

    ids: Ids = field(default_factory=_none)
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    touched: Ids = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TableClock:
    """Clock of a table.

    Attributes:
        step: Number of updates that it has had.
        shrinks: The steps at which it was last shrunk, ascending.
        ticks: (seconds, step): how far the table was at that time, both ascending.
    """

    step: int = 0
    shrinks: tuple[int, ...] = ()
    ticks: tuple[tuple[float, int], ...] = ()


def furthest(clocks: Iterable[TableClock]) -> TableClock:
    """Return the furthest of a table's clocks on several servers: by updates, then by shrinks, then by
    time.
    """
    return max(clocks, key=lambda clock: (clock.step, clock.shrinks, clock.ticks))


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A point in a table's history. Made by `SparseTable.mark`; of use for that table only."""

    era: int
    step: int
    event: int
    evicted: tuple[int, int] | None = None
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes of a table since a mark.

    Attributes:
        ids: int64 [n], ascending: of rows that are new or may differ.
        removed: int64 [m], ascending: of rows that were there at some time since and are not now.
        evicted: The point of the eviction stream at the mark (EvictionStream.point), if there is a stream.
    """

    ids: Ids = field(default_factory=_none)
    removed: Ids = field(default_factory=_none)
    evicted: tuple[int, int] | None = None


_ROWS, _TOUCHED, _SCORES = "rows", "touched", "scores"


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of equal length that a file has all or none of.

    Attributes:
        entries: Dtype of each column and the shape of one entry.
        need: True if every file has them, else only files with such values.
        length: Length of every column; None: it differs.
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
    eviction_groups = [
        ColumnGroup({name: (dtype, ()) for name, dtype in types}),
        ColumnGroup({position: (np.int64, ())}, length=1),
    ]
    return [
        row_group(spec),
        ColumnGroup({REMOVED: (np.int64, ())}, "if there are any"),
        *([] if spec.candidate is None else [candidate_group(spec)]),
        *(eviction_groups if spec.streams_evictions else []),
    ]


def column_of(spec: TableSpec, columns: Mapping[str, Column], name: str) -> Column:
    """A column of the table.

    Raises:
        ShapeError: It is missing.
    """
    if name not in columns:
        raise ShapeError(f"table {spec.name!r}: the part that is set has no {name!r}")
    return columns[name]


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
    ids, rows, steps = (column_of(spec, columns, name) for name in (ROW_IDS, _ROWS, _TOUCHED))
    return RowData(ids, rows, steps, columns.get(_SCORES, np.zeros((len(ids), 0), np.float32)))


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


# To compare a dtype with a type takes six times as long.
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class PackedRows:
    """Row layout of one table.

    A state slot that a whole row shares is stored once; outside it has dim columns.

    Attributes:
        scores: Offset of the scores within a stored row, if there are any: the width of all else.
        width: Width of a stored row.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._form = RowFormat(spec.rule, spec.dim, spec.precision)
        self.scores = self._form.words
        self.width = self.scores + spec.scores

    def unpack(self, ids: Ids, words: Floats, steps: Ids) -> RowData:
        """Stored rows [n, width] and the steps of their last pushes, as they are outside."""
        scores = np.ascontiguousarray(words[:, self.scores :])
        return RowData(ids, self.values(words), steps, scores)

    def values(self, words: Floats) -> Floats:
        """Unpack stored rows [n, width] to weights and state [n, dim * (1 + slots)]."""
        dim, columns, rows = self._spec.dim, self._form.columns, unpack_rows(self._form, words)
        if all(column.count == dim for column in columns):
            return np.ascontiguousarray(rows)
        parts = [
            np.broadcast_to(rows[:, column.place : column.place + column.count], (len(rows), dim))
            for column in columns
        ]
        return np.concatenate(parts, axis=1)

    def pack(self, rows: RowData) -> Floats:
        """The opposite of `unpack`: [n, width].

        Raises:
            ShapeError: They are none of this table.
        """
        name, dim = self._spec.name, self._spec.dim
        count, scores = len(rows.ids), self._spec.scores
        check_rows(name, rows.ids, rows.values, dim * (1 + len(self._spec.rule.slots)))
        if rows.touched.shape != (count,) or rows.scores.shape != (count, scores):
            raise ShapeError(
                f"table {name!r}: {count} rows come with touched {rows.touched.shape} "
                f"and scores {rows.scores.shape}; they must be {(count,)} and {(count, scores)}"
            )
        columns = enumerate(self._form.columns)
        parts = [rows.values[:, i * dim : i * dim + column.count] for i, column in columns]
        words = pack_rows(self._form, np.concatenate(parts, axis=1, dtype=np.float32))
        if not scores:
            return words
        return np.concatenate([words, rows.scores.astype(np.float32)], axis=1)


def check_rows(table: str, ids: Ids, rows: Floats, width: int) -> None:
    """Refuse ids that are not int64 [n], and rows that are not float32 [n, width]."""
    if ids.ndim != 1 or ids.dtype != _INT64:
        raise ShapeError(
            f"table {table!r}: ids are {ids.dtype} {ids.shape}, they must be int64 [n]"
        )
    if rows.shape != (len(ids), width) or rows.dtype != _FLOAT32:
        raise ShapeError(
            f"table {table!r}: rows are {rows.dtype} {rows.shape}, they must "
            f"be float32 {(len(ids), width)}"
        )
