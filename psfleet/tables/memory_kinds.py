"""The kinds of memory of tables.

A new one is an entry here, a name in psfleet/settings/choices.py, and what devices.py and the budgets of
psfleet/shard/shard_tables.py say of where it may be used, and how much of it.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import Device, TableSpec
from psfleet.tables.budget import MemoryBudget
from psfleet.tables.dense_memory import DenseMemory, HostDenseMemory
from psfleet.tables.index import RowIndex
from psfleet.tables.packed_rows import PackedRows
from psfleet.tables.row_memory import RowMemory
from psfleet.tables.row_update import HostRowUpdate, RowUpdate

__all__ = ["KINDS", "MemoryKind"]

Floats = NDArray[np.float32]


class MemoryKind(ABC):
    """Makes what tables in one kind of memory consist of. Loads no library of a device before that."""

    @abstractmethod
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        """Memory for a part of a dense table that starts with these weights, float32 [m].

        width: How many weights one update spans.

        Raises:
            UsageError: There is too little.
        """

    @abstractmethod
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, device: MemoryBudget | None
    ) -> tuple[RowMemory, RowUpdate]:
        """Memory for the rows of a sparse table, and the table's rule for these rows.

        host, device: What the table may take of either memory.

        Raises:
            UsageError: There is too little, or `max_rows` is none.
        """


class _HostMemory(MemoryKind):
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        """See MemoryKind."""
        return HostDenseMemory(spec, value, width)

    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, device: MemoryBudget | None
    ) -> tuple[RowMemory, RowUpdate]:
        """See MemoryKind."""
        rows = _host_rows(spec, max_rows)
        return rows, HostRowUpdate(spec, rows)


class _CudaMemory(MemoryKind):
    """Of an NVIDIA GPU. Rows for which it has no room are in host memory."""

    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        """See MemoryKind."""
        from psfleet.tables.device_dense import DeviceDenseMemory

        return DeviceDenseMemory(spec, value, width)

    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, device: MemoryBudget | None
    ) -> tuple[RowMemory, RowUpdate]:
        """See MemoryKind."""
        from psfleet.tables.tiered_row_update import TieredRowUpdate
        from psfleet.tables.tiered_rows import TieredRowMemory

        rows = TieredRowMemory(spec, _host_rows(spec, max_rows), host, device or MemoryBudget())
        return rows, TieredRowUpdate(spec, rows)


def _host_rows(spec: TableSpec, max_rows: int) -> RowIndex:
    return RowIndex(PackedRows(spec).width, max_rows, spec.every_row)


KINDS: dict[Device, MemoryKind] = {"cpu": _HostMemory(), "cuda": _CudaMemory()}
