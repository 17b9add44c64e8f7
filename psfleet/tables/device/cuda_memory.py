"""The memory of an NVIDIA GPU, for tables. Its library is loaded when a table is made, or looked for."""

import functools
import math
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.errors import UsageError
from psfleet.rules.rule import is_same_on_devices
from psfleet.schema.table import Device, TableSpec
from psfleet.tables.budget import MemoryBudget, tables_share
from psfleet.tables.memory_kind import DenseMemory, MemoryKind, dense_bytes, gradient_places
from psfleet.tables.row_memory import RowMemory
from psfleet.tables.row_update import RowUpdate

Floats = NDArray[np.float32]


class CudaMemory(MemoryKind):
    """Memory of an NVIDIA GPU. Rows for which it has no room are in host memory."""

    name: Device = "cuda"
    label = "the GPU's memory"
    setting = "device_memory"

    @override
    def why_missing(self) -> str:
        return why_no_gpu()

    def why_not(self, spec: TableSpec) -> str:
        """See MemoryKind: it has to let the same rows go as the CPU."""
        score = spec.policy.score()
        if score is None or is_same_on_devices(score):
            return ""
        return (
            f"its eviction policy {spec.policy.name!r} takes powers or remainders, whose "
            "last bits differ on a GPU"
        )

    def limit(self, most: int) -> int | None:
        """See MemoryKind; under a simulator there is as much as is asked for."""
        limit = tables_share(_free_and_total()[0], most)
        return int(limit) if math.isfinite(limit) else None

    @override
    def dense_bytes(self, spec: TableSpec, count: int) -> int:
        return dense_bytes(spec, count, gradient_places(count))

    @override
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        from psfleet.tables.device.device_memory import DeviceDenseMemory

        return DeviceDenseMemory(spec, value, width)

    @override
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        from psfleet.tables.device.tiered_rows import TieredRowMemory, TieredRowUpdate

        rows = TieredRowMemory(spec, max_rows, host, own)
        return rows, TieredRowUpdate(spec, rows), host


@functools.cache
def why_no_gpu() -> str:
    """Explain why this process cannot use a GPU, as the end of a sentence; empty: it can."""
    missing = "numba's CUDA target is not installed; pip install '.[cuda]' in psfleet's checkout"
    try:
        from numba import config, cuda
    except ImportError:
        return missing
    try:
        cuda.current_context()  # type: ignore[no-untyped-call]
    except Exception as error:  # no driver, or what numba and cuda.core say of a GPU that refuses
        why = " ".join(str(error).split()).removeprefix("Error at driver init: ")
        return f"there is no usable NVIDIA GPU or driver here ({why.split('. ')[0].rstrip('.')})"
    simulated = config.ENABLE_CUDASIM  # type: ignore[attr-defined]
    return "" if simulated or find_spec("numba_cuda") else missing  # numba's own one is old


def _free_and_total() -> tuple[float, float]:
    """Bytes of the GPU's memory; under a simulator infinitely many."""
    from numba import cuda

    free, total = cuda.current_context().get_memory_info()  # type: ignore[no-untyped-call]
    return free, total


def check_device_memory(table: str, size: int) -> None:
    """Refuse a table that is larger than what the GPU has left.

    Raises:
        UsageError: It is.
    """
    free, total = _free_and_total()
    if size > free:
        raise UsageError(
            f"table {table!r} needs {size >> 20:,} MiB of the GPU's memory, of which "
            f"{int(free) >> 20:,} of {int(total) >> 20:,} MiB are free; use device='cpu' or more servers"
        )
