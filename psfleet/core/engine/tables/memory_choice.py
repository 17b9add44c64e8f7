"""MemoryChoice: decides whether a table is stored in host memory, on disk or on an NVIDIA GPU.

The table's definition decides first (its `device`), then the process's setting PSFLEET_DEVICE. The three
kinds of memory are defined here too. The CUDA library is loaded only when a table is made on a GPU or when
the process checks whether it has a GPU.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, one_line
from psfleet.core.base.settings.declared_settings import JobSettings
from psfleet.core.engine.kernels.cache import load_in_any_order
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.row_format import RowFormat
from psfleet.core.engine.schema.table import Device, TableSpec
from psfleet.core.engine.tables.budget import MemoryBudget, tables_share
from psfleet.core.engine.tables.disk_arena import MappedRowMemory, row_pad
from psfleet.core.engine.tables.disk_rows import DiskRowMemory, DiskRowUpdate
from psfleet.core.engine.tables.host_rows import HostRowMemory, index_kernels
from psfleet.core.engine.tables.memory_kind import (
    DenseMemory,
    HostDenseMemory,
    MemoryKind,
    dense_bytes,
    gradient_places,
)
from psfleet.core.engine.tables.row_data import PackedRows
from psfleet.core.engine.tables.row_memory import RowMemory
from psfleet.core.engine.tables.row_update import (
    HostRowUpdate,
    RowUpdate,
    host_kernels,
    host_pull_kernels,
)

Floats = NDArray[np.float32]


_AUTO = "auto"


class HostMemory(MemoryKind):
    """Host memory (RAM). Its tables share the memory limit of the whole server process."""

    name: Device = "cpu"
    label = "memory"
    is_host = True

    @override
    def budget(self) -> MemoryBudget:
        return MemoryBudget()

    @override
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        return HostDenseMemory(spec, value, width)

    @override
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        removes = spec.entry is not None
        _load_kernels(spec, *index_kernels(removes))
        rows = HostRowMemory(
            PackedRows(spec).width, max_rows, spec.every_row, removes, host.only_reads
        )
        return rows, HostRowUpdate(spec, rows), host


class DiskMemory(HostMemory):
    """Files for the rows of sparse tables. Recently used rows are cached in host memory."""

    name: Device = "disk"
    label = "memory"
    needs_folder = True

    @override
    def why_not(self, spec: TableSpec) -> str:
        return "" if spec.kind == "sparse" else "only the rows of sparse tables may be on disk"

    @override
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        kernels = "disk_rows", *index_kernels(spec.entry is not None)
        _load_kernels(spec, *kernels, pad=row_pad(spec))
        if spec.every_row:
            memory = MappedRowMemory(spec, max_rows, host, own)
            return memory, HostRowUpdate(spec, memory), host
        rows = DiskRowMemory(spec, max_rows, host, own)
        return rows, DiskRowUpdate(spec, rows), host


class CudaMemory(MemoryKind):
    """Memory of an NVIDIA GPU. Rows for which the GPU has no space are stored in host memory."""

    name: Device = "cuda"
    label = "the GPU's memory"
    setting = "device_memory"

    @override
    def why_missing(self) -> str:
        return why_no_gpu()

    @override
    def why_not(self, spec: TableSpec) -> str:
        if spec.policy.score() is not None:
            return (
                f"its eviction policy {spec.policy.name!r} ranks rows by a score, which no GPU does"
            )
        if spec.kind == "sparse" and RowFormat(spec.rule, spec.dim, spec.precision).has_codes:
            return f"its precision {spec.precision!r} keeps state in 8 bits, which no GPU does"
        return ""

    def limit(self, most: int) -> int | None:
        """Return the number of bytes that all tables may take on the GPU.

        This is 7/8 of the free memory, or the setting if that is smaller. Returns None for no limit, which
        only happens in numba's CUDA simulator.

        Args:
            most: Limit by the setting in bytes, or 0 for none.
        """
        from psfleet.core.engine.tables.device.device_room import device_memory  # loads numba.cuda

        limit = tables_share(device_memory()[0], most)
        return int(limit) if math.isfinite(limit) else None

    @override
    def dense_bytes(self, spec: TableSpec, count: int) -> int:
        return dense_bytes(spec, count, gradient_places(count))

    @override
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        from psfleet.core.engine.tables.device.device_memory import DeviceDenseMemory

        return DeviceDenseMemory(spec, value, width)

    @override
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        from psfleet.core.engine.tables.device.tiered_rows import TieredRowMemory, TieredRowUpdate

        rows = TieredRowMemory(spec, max_rows, host, own)
        return rows, TieredRowUpdate(spec, rows), host


def _load_kernels(spec: TableSpec, *names: str, pad: int = 0) -> None:
    """Load the kernels of a new table, and those that check ids, so that no push waits for them."""
    rule_kernels = [
        partial(host_kernels, spec, rests, pad) for rests in (False, True)[: 1 + spec.every_row]
    ]
    load_in_any_order(
        *(partial(static_kernels, name) for name in (*names, "dedup")),
        *rule_kernels,
        partial(host_pull_kernels, spec),
    )


HOST, DISK = HostMemory(), DiskMemory()
KINDS: dict[str, MemoryKind] = {kind.name: kind for kind in (HOST, CudaMemory(), DISK)}
"""Kinds of memory by name. The setting `auto` takes the first kind that is available, other than host memory.

Code reads the properties of a kind, such as `is_host`, and never compares names.
"""


@dataclass
class MemoryChoice:
    """Settings of a process that decide which memory each of its tables is in.

    Attributes:
        default: Kind of memory for tables whose definition names no device.
        has_devices: True if this process may use a GPU. Only servers and embedded training may.
        limits: Maps a kind of memory to the largest number of bytes for all tables together. For a kind that
            is missing or has 0, the default limit of the kind applies.
        is_auto: True if tables whose definition names no device may go to host memory when the default kind
            of memory is full.
        folder: Folder for rows on disk, or empty if there is none.
    """

    default: Device = HOST.name
    has_devices: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    is_auto: bool = False
    folder: str = ""

    @classmethod
    def embedded(cls, folder: str) -> "MemoryChoice":
        """Return the choice for a process that trains without servers.

        Args:
            folder: Folder for rows on disk, or empty to have tables in host memory by default.
        """
        return cls(DISK.name, True, folder=folder) if folder else cls(has_devices=True)

    @classmethod
    def of_settings(cls, settings: JobSettings) -> "MemoryChoice":
        """Return the choice made by a server's settings: device, folder on disk and memory limits.

        Raises:
            ConfigError: PSFLEET_DEVICE names a device that this process does not have.
        """
        kinds, folder = KINDS.values(), settings.disk
        limits: dict[str, int] = {
            kind.name: getattr(settings, kind.setting) for kind in kinds if kind.setting
        }
        if settings.device == _AUTO:
            available = (kind for kind in kinds if not kind.is_host and not kind.why_missing())
            return cls(next(available, DISK if folder else HOST).name, True, limits, True, folder)
        kind = KINDS[settings.device]
        choice = cls((DISK if folder and kind is HOST else kind).name, True, limits, folder=folder)
        if why := choice._why_missing(kind):
            raise ConfigError(
                f"PSFLEET_DEVICE is {kind.name!r}, but {why}. Say auto or cpu to hold tables in host memory"
            )
        return choice

    def limit(self, kind: MemoryKind) -> int | None:
        """Return how many bytes all tables may take in this kind of memory, or None for no limit.

        Call it before the first table is made, because for a GPU the limit depends on the memory that is free
        now.
        """
        return kind.limit(self.limits.get(kind.name, 0))

    def kind_for(self, spec: TableSpec, may_refuse: bool = True) -> MemoryKind:
        """Return the kind of memory in which the table is to be stored.

        Args:
            spec: Definition of the table.
            may_refuse: True for a new table: raises an error if its memory is not available. False for a
                table that exists already, for example in a snapshot of a server with another device: such a
                table is stored in host memory instead.

        Raises:
            ConfigError: The definition or PSFLEET_DEVICE names a kind of memory that cannot store the table.
        """
        # `why` is the reason against `kind`. If there is one: a new table whose definition names the kind is
        # refused; a new table that does not name it is refused unless the setting is auto; every other table
        # goes to host memory.
        kind = KINDS[spec.device or self.default]
        why = kind.why_not(spec)
        if spec.device is not None and not why:
            why = self._why_missing(kind)
        if why and spec.device is not None and may_refuse:
            raise ConfigError(
                f"table {spec.name!r} asks for device={kind.name!r}, but {why}; use device='cpu'"
            )
        if why and may_refuse and not (self.is_auto or kind.is_host):
            raise ConfigError(
                f"table {spec.name!r} would be in {kind.label}, since PSFLEET_DEVICE is {kind.name!r}, but "
                f"{why}; give it device='cpu', or say --device auto"
            )
        return HOST if why else kind

    def may_be_moved(self, spec: TableSpec, may_refuse: bool = True) -> bool:
        """Return whether a table that does not fit on the device is stored in host memory instead of refused.

        Args:
            spec: Definition of the table.
            may_refuse: True for a new table, False for a table that exists already. An existing table always
                moves.
        """
        return not may_refuse or (spec.device is None and self.is_auto)

    def _why_missing(self, kind: MemoryKind) -> str:
        if kind.needs_folder and not self.folder:
            return "no folder for it is named (--server-disk, PSFLEET_DISK)"
        if self.has_devices or kind.is_host:
            return kind.why_missing()
        return "this process keeps tables in host memory"


@functools.cache
def why_no_gpu() -> str:
    """Return the reason why this process cannot use a GPU, or "" if it can.

    The reason can end a sentence, as in "PSFLEET_DEVICE is 'cuda', but ...".
    """
    missing = "numba's CUDA target is not installed; pip install '.[cuda]' in psfleet's checkout"
    try:
        from numba import config, cuda
    except ImportError:
        return missing
    try:
        cuda.current_context()  # type: ignore[no-untyped-call]
    except Exception as error:  # no driver, or an error of numba or cuda.core about the GPU
        why = one_line(error).removeprefix("Error at driver init: ")
        return f"there is no usable NVIDIA GPU or driver here ({why.split('. ')[0].rstrip('.')})"
    simulated = config.ENABLE_CUDASIM  # type: ignore[attr-defined]
    # The CUDA target within numba is too old; numba_cuda is its successor.
    return "" if simulated or find_spec("numba_cuda") else missing
