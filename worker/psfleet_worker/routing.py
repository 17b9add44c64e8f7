"""What of a pull or push goes to which server, and back."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import Dedup, dedup
from psfleet.routing import check_gradient, check_ids
from psfleet.runtime import Gradient, Read
from psfleet.shard.layout import dense_ranges
from psfleet.tables.spec import TableSpec

__all__ = ["DenseRead", "SparseRead", "deal_gradient", "deal_read"]

Floats = NDArray[np.float32]


class DenseRead:
    """A pull of a whole array: each server gives its range."""

    def __init__(self, spec: TableSpec, servers: int) -> None:
        self._spec = spec
        self._ranges = dense_ranges(spec, servers)
        self.parts = [Read(spec.key) if high > low else None for low, high in self._ranges]

    def join(self, values: Sequence[Floats | None]) -> Floats:
        """The array, from what each server gave."""
        out = np.empty(self._spec.size, np.float32)
        for (low, high), value in zip(self._ranges, values, strict=True):
            if value is not None:
                out[low:high] = value
        return out.reshape(self._spec.shape)


class SparseRead:
    """A pull of rows: each server gives the distinct rows that it owns."""

    def __init__(self, spec: TableSpec, read: Read, servers: int) -> None:
        ids = check_ids(spec, read.ids)
        self._spec = spec
        self._shape = ids.shape
        self._dedup = dedup(ids.reshape(-1), servers)
        self.parts = [Read(spec.key, mine) if len(mine) else None for mine in self._dedup.unique]

    def join(self, values: Sequence[Floats | None]) -> Floats:
        """One row per id that was asked for, from what each server gave."""
        nothing = np.empty((0, self._spec.dim), np.float32)
        rows = self._dedup.expand([nothing if value is None else value for value in values])
        return rows.reshape(*self._shape, self._spec.dim)


def deal_read(spec: TableSpec, read: Read, servers: int) -> DenseRead | SparseRead:
    """A read, dealt to the servers."""
    return DenseRead(spec, servers) if spec.kind == "dense" else SparseRead(spec, read, servers)


def deal_gradient(spec: TableSpec, gradient: Gradient, servers: int) -> list[Gradient]:
    """A gradient's part for every server, empty ones too: all servers count the same steps."""
    values, ids = check_gradient(spec, gradient)
    if ids is None:
        return [Gradient(spec.key, values[low:high], None, gradient.learning_rate)
                for low, high in dense_ranges(spec, servers)]
    distinct: Dedup = dedup(ids, servers)
    return [Gradient(spec.key, rows, mine, gradient.learning_rate)
            for mine, rows in zip(distinct.unique, distinct.merge(values), strict=True)]
