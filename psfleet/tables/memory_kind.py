"""What a kind of memory for tables has to know. A new one is a file like host_memory.py or cuda_memory.py."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import Device, TableSpec
from psfleet.tables.budget import MemoryBudget
from psfleet.tables.dense_memory import DenseMemory, dense_bytes
from psfleet.tables.row_memory import RowMemory
from psfleet.tables.row_update import RowUpdate

__all__ = ["MemoryKind"]

Floats = NDArray[np.float32]


class MemoryKind(ABC):
    """Says where tables may be, and makes what they consist of there.

    It loads no library of a device before it is asked for a table or whether one is here.

    Attributes:
        name: As settings and tables name it (psfleet/settings/choices.py).
        label: Whose memory it is, as messages say it.
        setting: The setting that says how much of it tables may take; "": there is none.
        is_host: Kernels for the CPU reach it, and every process has it.
    """

    name: Device
    label: ClassVar[str]
    setting: ClassVar[str] = ""
    is_host: ClassVar[bool] = False

    # -- where it may be used ------------------------------------------------------------------

    def why_missing(self) -> str:
        """Why this process cannot use it, as the end of a sentence; empty: it can."""
        return ""

    def why_not(self, spec: TableSpec) -> str:
        """Why this table cannot be in it wherever there is one, likewise; empty: it can."""
        return ""

    # -- how much of it ------------------------------------------------------------------------

    def limit(self, asked: int) -> int | None:
        """Bytes that tables may take in all, before there is any; None: as many as they like.

        asked: By the setting; 0: it is not said.
        """
        return asked or None

    def budget(self) -> MemoryBudget:
        """What the tables of a shard share, without its limit."""
        flag = f", or give tables more of it (--{self.setting.replace('_', '-')})"
        advice = f"Use device='cpu' or more servers{flag if self.setting else ''}"
        return MemoryBudget(place=self.label, advice=advice)

    def dense_bytes(self, spec: TableSpec, count: int) -> int:
        """Memory that a part of `count` weights of a dense table takes with its state, and with its gradients
        if they get places here."""
        return dense_bytes(spec, count)

    # -- tables --------------------------------------------------------------------------------

    @abstractmethod
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        """Memory for a part of a dense table that starts with these weights, float32 [m].

        width: How many weights one update spans.

        Raises:
            UsageError: There is too little.
        """

    @abstractmethod
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        """Memory for the rows of a sparse table, the table's rule for these rows, and of which budget the
        table takes what `RowMemory.taken` says: of this memory's own, or of the host's.

        host, own: What the table may take of either memory.

        Raises:
            UsageError: There is too little, or `max_rows` is none.
        """
