"""The memory of the host, for tables."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.cache import load_in_any_order
from psfleet.kernels.generate import static_kernels
from psfleet.schema.table import Device, TableSpec
from psfleet.tables.budget import MemoryBudget
from psfleet.tables.dense_memory import DenseMemory, HostDenseMemory
from psfleet.tables.host_rows import HostRowMemory, index_kernels
from psfleet.tables.memory_kind import MemoryKind
from psfleet.tables.packed_rows import PackedRows
from psfleet.tables.row_memory import RowMemory
from psfleet.tables.row_update import HostRowUpdate, RowUpdate, host_kernels, host_pull_kernels

__all__ = ["HostMemory"]

Floats = NDArray[np.float32]


class HostMemory(MemoryKind):
    """See MemoryKind. How much of it a server's tables may take follows from all that the server may."""

    name: Device = "cpu"
    label = "memory"
    is_host = True

    def budget(self) -> MemoryBudget:
        """See MemoryKind."""
        return MemoryBudget()

    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        """See MemoryKind."""
        return HostDenseMemory(spec, value, width)

    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        """See MemoryKind."""
        removes = spec.entry is not None
        index = (partial(static_kernels, name) for name in index_kernels(removes))
        own_kernels = (partial(load, spec) for load in (host_kernels, host_pull_kernels))
        load_in_any_order(*index, *own_kernels)
        rows = HostRowMemory(PackedRows(spec).width, max_rows, spec.every_row, removes)
        return rows, HostRowUpdate(spec, rows), host
