"""A rule at work on rows of which some are on a device and some in host memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import TableSpec
from psfleet.tables.device_packed_update import device_row_update
from psfleet.tables.row_update import HostRowUpdate, RowValues
from psfleet.tables.tiered_rows import TieredRowMemory

__all__ = ["TieredRowUpdate"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class TieredRowUpdate:
    """See psfleet.tables.row_update.RowUpdate. Each row is read and updated where it is."""

    def __init__(self, spec: TableSpec, memory: TieredRowMemory) -> None:
        self._memory = memory
        self._device = device_row_update(spec, memory.device)
        self._host = HostRowUpdate(spec, memory.host)

    def pull_into(self, ids: Ids, out: Floats) -> int:
        """See RowUpdate."""
        on_host = self._memory.on_host(ids)
        if not on_host.any():
            return self._device.pull_into(ids, out)
        unknown = 0
        for rule, part in ((self._host, on_host), (self._device, ~on_host)):
            rows = np.empty((np.count_nonzero(part), out.shape[1]), np.float32)
            unknown += rule.pull_into(ids[part], rows)
            out[part] = rows
        return unknown

    def mean(self, parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, RowValues]:
        """See RowUpdate."""
        return self._device.mean(parts)

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        """See RowUpdate."""
        on_host = self._memory.fetch(ids, step)
        if on_host.any():
            values = gradients if isinstance(gradients, np.ndarray) else gradients.to_host()
            self._host.push(ids[on_host], values[on_host], scalars, step)
            ids, gradients = ids[~on_host], values[~on_host]
        self._device.push(ids, gradients, scalars, step)

    def rest(self, scalars: Floats, step: int) -> None:
        """See RowUpdate."""
        self._device.rest(scalars, step)
        self._host.rest(scalars, step)
