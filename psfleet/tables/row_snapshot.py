"""Tables as a snapshot reads them: the columns of snapshot_columns.py, filled page by page."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import TableSpec
from psfleet.tables.copy_on_write import FrozenArrays, FrozenRows
from psfleet.tables.row_data import CandidateData, RowData, TableClock
from psfleet.tables.snapshot_columns import (
    REMOVED,
    Columns,
    candidate_columns,
    column_groups,
    row_columns,
    row_group,
)

__all__ = ["FrozenDenseTable", "FrozenSparseTable", "FrozenTable"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class FrozenTable(Protocol):
    """One server's part of a table at one moment. Read once, by any thread, then closed."""

    @property
    def spec(self) -> TableSpec: ...
    @property
    def clock(self) -> TableClock: ...
    def columns(self) -> Columns:
        """What `pages` will fill."""

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Parts of columns, each to be put behind the one before."""

    def close(self) -> None:
        """The table need not remember the moment any more. Safe to call twice."""


class FrozenSparseTable:
    """Rows, candidates and what went, of a sparse table."""

    def __init__(
        self,
        spec: TableSpec,
        clock: TableClock,
        rows: Sequence[FrozenRows],
        candidates: CandidateData,
        removed: Ids | None,
        evictions: Mapping[str, NDArray[Any]],
        as_rows: Callable[[Ids, Floats, Ids], RowData],
    ) -> None:
        self.spec = spec
        self.clock = clock
        self._rows = rows
        self._candidates = candidates
        self._removed = removed
        self._evictions = evictions
        self._as_rows = as_rows

    def columns(self) -> Columns:
        """See FrozenTable."""
        columns = row_group(self.spec).sized(sum(rows.count for rows in self._rows))
        for page in self._others():
            columns |= {name: (column.dtype, column.shape) for name, column in page.items()}
        return columns

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """See FrozenTable."""
        for page in itertools.chain.from_iterable(rows.pages() for rows in self._rows):
            yield row_columns(self._as_rows(*page))
        yield from self._others()

    def _others(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The columns besides those of rows."""
        if self._removed is not None:
            yield {REMOVED: self._removed}
        if len(self._candidates):
            yield candidate_columns(self._candidates)
        if self._evictions:
            yield self._evictions

    def close(self) -> None:
        """See FrozenTable."""
        for rows in self._rows:
            rows.close()


class FrozenDenseTable:
    """Of a dense table: one column for the weights ("value") and each state slot."""

    def __init__(
        self,
        spec: TableSpec,
        step: int,
        count: int,
        arrays: FrozenArrays,
        spread: Callable[[Floats], Floats],
        forget: Callable[[FrozenArrays], None],
    ) -> None:
        self.spec = spec
        self.clock = TableClock(step)
        self._count = count
        self._arrays = arrays
        self._spread = spread
        self._forget: Callable[[FrozenArrays], None] | None = forget

    def columns(self) -> Columns:
        """See FrozenTable."""
        (weights,) = column_groups(self.spec)
        return weights.sized(self._count)

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """See FrozenTable."""
        arrays = self._arrays.take()
        for name, array in zip(self.spec.slot_names, arrays, strict=True):
            yield {name: self._spread(array)}

    def close(self) -> None:
        """See FrozenTable."""
        if self._forget is not None:
            self._forget(self._arrays)
            self._forget = None
