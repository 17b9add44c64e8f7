"""Tables as a snapshot reads them: named columns of known shape, filled page by page."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import TableSpec
from psfleet.tables.copy_on_write import FrozenArrays, FrozenRows
from psfleet.tables.row_data import CANDIDATES, CandidateData, RowData, TableClock

__all__ = ["Columns", "FrozenDenseTable", "FrozenSparseTable", "FrozenTable"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Columns = dict[str, tuple[Any, tuple[int, ...]]]
"""Of each column its dtype and shape."""


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
    """Columns: ids, rows (weights and state), touched, scores; removed; candidates/*; evicted/*."""

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
        waiting, spec = len(self._candidates), self.spec
        n = sum(rows.count for rows in self._rows)
        columns: Columns = {
            "ids": (np.int64, (n,)),
            "rows": (np.float32, (n, spec.dim * (1 + len(spec.rule.slots)))),
            "touched": (np.int64, (n,)),
        }
        if spec.scores:
            columns["scores"] = np.float32, (n, spec.scores)
        if self._removed is not None:
            columns["removed"] = np.int64, (len(self._removed),)
        if waiting:
            columns |= dict.fromkeys(CANDIDATES, (np.int64, (waiting,)))
        evicted = {name: (column.dtype, column.shape) for name, column in self._evictions.items()}
        return columns | evicted

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """See FrozenTable."""
        for page in itertools.chain.from_iterable(rows.pages() for rows in self._rows):
            rows = self._as_rows(*page)
            found: dict[str, NDArray[Any]] = {
                "ids": rows.ids,
                "rows": rows.values,
                "touched": rows.touched,
            }
            if self.spec.scores:
                found["scores"] = rows.scores
            yield found
        if self._removed is not None:
            yield {"removed": self._removed}
        if len(self._candidates):
            yield self._candidates.columns()
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
        return dict.fromkeys(self.spec.slot_names, (np.float32, (self._count,)))

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
