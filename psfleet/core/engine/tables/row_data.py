"""Rows, candidates and clock of a sparse table as values, and the columns in which snapshots store them.

RowData represents rows independently of how a table stores them; PackedRows converts between the two. The
functions `..._columns` and `..._of` convert to and from the named columns of a snapshot, which
docs/formats.md describes. To change the columns, raise the version of the format
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
"""Ids of rows that existed in the snapshot that a delta is based on, and no longer exist."""
CANDIDATE_IDS = "candidates"
_CANDIDATE_TOUCHED = "candidate_touched"
EVICTED = ("evicted", "evicted_steps", "evicted_causes", "evicted_next")
"""Columns of an EvictionStream. The last column is a single number, the position of the next eviction."""


def _none() -> Ids:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowData:
    """Rows of a sparse table with their whole state.

    Attributes:
        ids: Ids of the rows: int64 [n].
        values: Weights, then each value of optimizer state: float32 [n, dim * (1 + state values)]. A state
            value that a whole row shares is repeated for each weight.
        touched: Step of each row's last push: int64 [n]. For a row that has not been pushed for more than
            2**31 steps, this is the step 2**31 steps ago.
        scores: Shows and clicks, then the frequency at the last push, in tables that count these: float32
            [n, TableSpec.scores].
    """

    ids: Ids
    values: Floats
    touched: Ids
    scores: Floats


@dataclass(frozen=True, slots=True)
class CandidateData:
    """Ids that have been pushed, but not yet often enough to get a row.

    Attributes:
        ids: Ids of the candidates: int64 [n], ascending.
        values: Values that the table's admission rule stores for each id (Entry.candidate), by name: int64 or
            float32 [n].
        touched: Step of each id's last push: int64 [n].
    """

    ids: Ids = field(default_factory=_none)
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    touched: Ids = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TableClock:
    """Number of updates of a table, and times that its expiry of rows depends on. Part of a snapshot.

    Attributes:
        step: Number of updates of the table so far.
        shrinks: Steps of the table at its last calls of `shrink`, ascending.
        ticks: Pairs (time in seconds, number of updates until then), ascending. Only for tables whose rows
            expire after a time.
    """

    step: int = 0
    shrinks: tuple[int, ...] = ()
    ticks: tuple[tuple[float, int], ...] = ()


def furthest(clocks: Iterable[TableClock]) -> TableClock:
    """Return the clock with the most updates, among the clocks of a table's parts on several servers.

    Of equal numbers of updates, compares the shrinks and then the times.
    """
    return max(clocks, key=lambda clock: (clock.step, clock.shrinks, clock.ticks))


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Mark in a table's history, made by `SparseTable.mark` and valid for that table only.

    Attributes:
        era: Number of times that the table's step (number of updates) had been set before, as when a snapshot
            is loaded. Steps of rows can be compared with `step` only in the same era.
        step: Step of the table at the mark.
        event: Number of the next removal or direct write of rows, as ChangeHistory counts them.
        evicted: Position in the table's record of evictions (EvictionStream.point), or None if it records
            none.
        bounded: True if the mark is given up when too many rows are removed.
    """

    era: int
    step: int
    event: int
    evicted: tuple[int, int] | None = None
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes of a table since a mark, an earlier point in its history.

    Attributes:
        ids: Ids of rows that are new or may have changed: int64 [n], ascending.
        removed: Ids of rows that were removed since the mark and do not exist now: int64 [m], ascending.
        evicted: Position in the table's record of evictions at the mark (EvictionStream.point), or None if it
            records none.
    """

    ids: Ids = field(default_factory=_none)
    removed: Ids = field(default_factory=_none)
    evicted: tuple[int, int] | None = None


_ROWS, _TOUCHED, _SCORES = "rows", "touched", "scores"


@dataclass(frozen=True)
class ColumnGroup:
    """Columns (named arrays) of equal length that appear in a snapshot's file together.

    Attributes:
        entries: Maps the name of a column to its dtype and the shape of one of its entries.
        need: "always" if every file has the columns, or "if there are any" if the columns are left out when
            they would be empty.
        length: Length of each column, or None if it varies.
    """

    entries: Columns
    need: Literal["always", "if there are any"] = "always"
    length: int | None = None

    def sized(self, count: int) -> Columns:
        """Return the dtype and the shape of each column if the columns have `count` entries."""
        return {name: (dtype, (count, *shape)) for name, (dtype, shape) in self.entries.items()}


def column_groups(spec: TableSpec) -> Sequence[ColumnGroup]:
    """Return all columns (named arrays) that a snapshot file may have for the table, in groups."""
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
    """Return the column (array) of this name from a snapshot.

    Raises:
        ShapeError: The column is missing.
    """
    if name not in columns:
        raise ShapeError(f"table {spec.name!r}: the part that is set has no {name!r}")
    return columns[name]


def row_group(spec: TableSpec) -> ColumnGroup:
    """Return the columns of a sparse table's rows, in the order of RowData."""
    width = spec.dim * len(spec.slot_names)
    entries: Columns = {
        ROW_IDS: (np.int64, ()),
        _ROWS: (np.float32, (width,)),
        _TOUCHED: (np.int64, ()),
    }
    return ColumnGroup(entries | ({_SCORES: (np.float32, (spec.scores,))} if spec.scores else {}))


def row_columns(rows: RowData) -> dict[str, Column]:
    """Convert rows to columns of a snapshot."""
    columns: dict[str, Column] = {ROW_IDS: rows.ids, _ROWS: rows.values, _TOUCHED: rows.touched}
    return columns | ({_SCORES: rows.scores} if rows.scores.shape[1] else {})


def rows_of(spec: TableSpec, columns: Mapping[str, Column]) -> RowData:
    """Convert columns of a snapshot to rows.

    Raises:
        ShapeError: A column is missing.
    """
    ids, rows, steps = (column_of(spec, columns, name) for name in (ROW_IDS, _ROWS, _TOUCHED))
    no_scores = np.zeros((len(ids), 0), np.float32)
    return RowData(ids, rows, steps, columns[_SCORES] if spec.scores else no_scores)


def candidate_group(spec: TableSpec) -> ColumnGroup:
    """Return the columns for candidates (ids without a row yet), in the order of CandidateData."""
    values: Columns = {
        _candidate(name): (np.int64 if kind is int else np.float32, ())
        for name, kind in (spec.candidate or {}).items()
    }
    entries = {CANDIDATE_IDS: (np.int64, ()), **values, _CANDIDATE_TOUCHED: (np.int64, ())}
    return ColumnGroup(entries, "if there are any")


def candidate_columns(candidates: CandidateData) -> dict[str, Column]:
    """Convert candidates (ids without a row yet) to columns of a snapshot."""
    values = {_candidate(name): column for name, column in candidates.values.items()}
    return {CANDIDATE_IDS: candidates.ids, **values, _CANDIDATE_TOUCHED: candidates.touched}


def candidates_of(spec: TableSpec, columns: Mapping[str, Column]) -> CandidateData:
    """Convert columns of a snapshot to candidates (ids without a row yet).

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


# Comparing a dtype with a dtype takes a sixth of the time of comparing it with a type.
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class PackedRows:
    """Layout of a table's stored rows, and conversion between stored rows and RowData.

        stored row   | weights | state slots | scores |       `width` float32 words
                     0                       `scores`

    Weights and optimizer state (state slots) may be packed in 16 or 8 bits. A state slot that a whole row
    shares is stored once, and becomes dim equal columns in RowData.

    Attributes:
        scores: Position of the scores within a stored row, in float32 words.
        width: Length of a stored row, in float32 words.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._form = RowFormat(spec.rule, spec.dim, spec.precision)
        self.scores = self._form.words
        self.width = self.scores + spec.scores

    def unpack(self, ids: Ids, words: Floats, steps: Ids) -> RowData:
        """Convert stored rows [n, width] and the steps of their last pushes to RowData."""
        scores = np.ascontiguousarray(words[:, self.scores :])
        return RowData(ids, self.values(words), steps, scores)

    def values(self, words: Floats) -> Floats:
        """Unpack stored rows [n, width] to weights and optimizer state [n, dim * (1 + slots)]."""
        dim, columns, rows = self._spec.dim, self._form.columns, unpack_rows(self._form, words)
        if all(column.count == dim for column in columns):
            return np.ascontiguousarray(rows)
        parts = [
            np.broadcast_to(rows[:, column.place : column.place + column.count], (len(rows), dim))
            for column in columns
        ]
        return np.concatenate(parts, axis=1)

    def pack(self, rows: RowData) -> Floats:
        """Convert RowData to stored rows: float32 [n, width], which may share memory with the RowData.

        Raises:
            ShapeError: An array does not fit this table.
        """
        name, dim = self._spec.name, self._spec.dim
        count, scores = len(rows.ids), self._spec.scores
        check_rows(name, rows.ids, rows.values, dim * (1 + len(self._spec.rule.slots)))
        if rows.touched.shape != (count,) or rows.scores.shape != (count, scores):
            raise ShapeError(
                f"table {name!r}: {count} rows come with touched {rows.touched.shape} "
                f"and scores {rows.scores.shape}; they must be {(count,)} and {(count, scores)}"
            )
        if all(column.count == dim for column in self._form.columns):
            values = np.ascontiguousarray(rows.values)
        else:
            columns = enumerate(self._form.columns)
            parts = [rows.values[:, i * dim : i * dim + column.count] for i, column in columns]
            values = np.concatenate(parts, axis=1)
        words = pack_rows(self._form, values)
        if not scores:
            return words
        return np.concatenate([words, rows.scores.astype(np.float32)], axis=1)


def check_rows(table: str, ids: Ids, rows: Floats, width: int) -> None:
    """Raise ShapeError unless `ids` is int64 [n] and `rows` is float32 [n, width]."""
    if ids.ndim != 1 or ids.dtype != _INT64:
        raise ShapeError(
            f"table {table!r}: ids are {ids.dtype} {ids.shape}, they must be int64 [n]"
        )
    if rows.shape != (len(ids), width) or rows.dtype != _FLOAT32:
        raise ShapeError(
            f"table {table!r}: rows are {rows.dtype} {rows.shape}, they must "
            f"be float32 {(len(ids), width)}"
        )
