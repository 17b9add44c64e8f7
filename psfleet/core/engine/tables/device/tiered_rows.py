"""TieredRowMemory: a sparse table on a GPU that overflows into host memory.

A push moves its rows to the device as far as they fit. If device memory is short, the rows whose last push is
the longest ago move to the host. Host and device compute bit-identical results, so the place of a row affects
only the speed. All calls run under the lock of the table.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.engine.device_arrays import DeviceArray, DeviceSums
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.budget import MemoryAccount, MemoryBudget
from psfleet.core.engine.tables.device.device_rows import DeviceRowMemory
from psfleet.core.engine.tables.device.device_updates import device_row_update
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.row_data import PackedRows
from psfleet.core.engine.tables.row_memory import EVERY, Listed, RowMemory, RowStore
from psfleet.core.engine.tables.row_update import HostRowUpdate, RowUpdate, RowValues

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

_BATCH = (
    16  # at least 1/16 of the device's rows move to the host at once: finding the oldest scans all
)
_PAGE = 1 << 16  # rows that are copied at a time


class TieredRowMemory(RowMemory):
    """Rows on the device, and in host memory when the device is full. Each row is in one of the two.

    A positive slot number is a slot on the device, a negative one a slot on the host, and 0 means unknown:

        slot   -3            0          5
               host slot 3   unknown    device slot 5

    An id has a slot in at most one memory, so `device slot - host slot` merges the two results.

    Args:
        spec: Definition of the table.
        max_rows: Largest number of rows on device and host together.
        budget: Budget of host memory, which the tables of the server share.
        device_budget: Budget of the device's memory, shared in the same way.

    Raises:
        UsageError: The device has too little memory for an empty table.
    """

    def __init__(
        self, spec: TableSpec, max_rows: int, budget: MemoryBudget, device_budget: MemoryBudget
    ) -> None:
        width = PackedRows(spec).width
        self.host = HostRowMemory(width, max_rows, spec.every_row)
        self.max_rows = self.host.max_rows
        self.device = DeviceRowMemory(width, self.max_rows, spec.every_row)
        self._account = MemoryAccount(spec, self.device, None, 0, device_budget, self.max_rows)
        self._budget = budget

    @property
    @override
    def stores(self) -> tuple[RowStore, RowStore]:
        return self.device, self.host

    def __len__(self) -> int:
        return len(self.device) + len(self.host)

    @property
    @override
    def bytes(self) -> int:
        return self.device.bytes + self.host.bytes

    @property
    @override
    def device_bytes(self) -> int:
        return self.device.bytes

    @property
    @override
    def spare(self) -> int:
        return self.max_rows - len(self)

    @property
    @override
    def free(self) -> int:
        return self.host.free

    @override
    def has_lines(self, count: int) -> bool:
        return self.host.has_lines(count)

    @override
    def bytes_with(self, more: int) -> int:
        """Return the bytes of host memory taken after `more` rows are added.

        Device memory is left out, because it has a separate budget.
        """
        return self.host.bytes_with(more - self.rows_for_device(more) if more else 0)

    @override
    def most_bytes_with(self, more: int) -> int:
        """Return an upper bound of `bytes_with`, as if no new row fitted on the device."""
        return self.host.most_bytes_with(more)

    @override
    def keep_ahead(self, available: int | None = None) -> None:
        self._account.charge_budget()
        if len(self.host):
            self.host.keep_ahead(available)

    @override
    def reserve(self, rows: int) -> None:
        on_device = len(self.device) + self.rows_for_device(max(rows - len(self), 0))
        self.device.reserve(on_device)
        self._account.charge_budget()
        if rows > on_device:
            self.host.reserve(rows - on_device)

    def rows_for_device(self, rows: int) -> int:
        """Return the number of rows, up to `rows`, that can be added on the device."""
        if self._account.can_surely_add(rows):
            return rows
        return min(self._account.most_affordable(rows), self.max_rows - len(self.device))

    def fetch(self, ids: Ids, step: int) -> Mask:
        """Move the rows of a push to the device as far as they fit, if necessary in place of older rows.

        Args:
            ids: int64 [n], without repeats.
            step: Step of the push.

        Returns:
            Mask of the ids whose row remains on the host, or is new and has to be added there.
        """
        if self.rows_for_device(len(ids)) < len(ids):
            # Record the push for rows that are on the device already, so that `_spill` does not choose them
            # as the oldest.
            missing = self.device.touch(ids, step)[1]
            if self.rows_for_device(missing) < missing:
                self._spill(missing, step)
        # Move rows from the host only now, because `_spill` has made room for new rows and for these.
        cold = ids[self.on_host(ids)]
        self._move(cold[: self.rows_for_device(len(cold))], self.host, self.device, step)
        return self._beyond(ids)

    def _spill(self, min_rows: int, step: int) -> None:
        """Move at least `min_rows` of the device's oldest rows to the host, if they fit there."""
        count = max(len(self.device) // _BATCH, min_rows)
        limit, extra_bytes = (
            self._budget.limit,
            self.host.bytes_with(count) - self.host.bytes_with(0),
        )
        if limit is None or extra_bytes <= self._budget.available_for():
            self._move(self.device.oldest(step, count, least=1), self.device, self.host, step)

    def _move(self, ids: Ids, source: RowStore, target: RowStore, step: int) -> None:
        """Move rows from one memory to the other. A row is removed only after it was copied."""
        for start in range(0, len(ids), _PAGE):
            part, slots, steps = source.recall(ids[start : start + _PAGE], step)
            target.put(part, steps, source.gather(slots))
            source.remove(part)

    def on_host(self, ids: Ids) -> Mask:
        """Return a mask of the ids that have a row in host memory."""
        if not len(self.host):
            return np.zeros(len(ids), np.bool_)
        mask: Mask = self.host.locate(ids)[0] != 0
        return mask

    def _beyond(self, ids: Ids) -> Mask:
        """Return a mask of the ids whose row is on the host, or is new and does not fit on the device."""
        mask = self.on_host(ids)
        fitting = self.rows_for_device(len(ids))
        if fitting < len(ids):
            new = ~mask & (self.device.locate(ids)[0] == 0)
            mask |= new & (np.cumsum(new) > fitting)
        return mask

    @override
    def locate(self, ids: Ids) -> tuple[Ids, int]:
        slots, unknown = self.device.locate(ids)
        on_host, missing = self.host.locate(ids)
        return slots - on_host, unknown + missing - len(ids)

    @override
    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        slots, unknown = self.device.touch(ids, step)
        on_host, missing = self.host.touch(ids, step)
        return slots - on_host, unknown + missing - len(ids)

    @override
    def find_or_add(self, ids: Ids, steps: Ids) -> Ids:
        slots, on_host = np.empty(len(ids), np.int64), self._beyond(ids)
        slots[on_host] = -self.host.find_or_add(ids[on_host], steps[on_host])
        slots[~on_host] = self.device.find_or_add(ids[~on_host], steps[~on_host])
        return slots

    @override
    def remove(self, ids: Ids) -> int:
        return self.device.remove(ids) + self.host.remove(ids)

    @override
    def recall(self, ids: Ids, step: int) -> Listed:
        _, slots, steps = self.device.recall(ids, step)
        _, on_host, host_steps = self.host.recall(ids, step)
        return ids, slots - on_host, steps + host_steps

    @override
    def restamp(self, old: int, new: int) -> None:
        for store in self.stores:
            store.restamp(old, new)

    @override
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        ids, slots, ages = self.device.aged(step, least, segments, most)
        host_ids, on_host, host_ages = self.host.aged(step, least, segments, most)
        return np.append(ids, host_ids), np.append(slots, -on_host), np.append(ages, host_ages)

    @override
    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        return self.device.histogram(step, shift, bins) + self.host.histogram(step, shift, bins)

    @override
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        return np.concatenate([store.decay(place, factors, least) for store in self.stores])

    @override
    def gather(self, slots: Ids) -> Floats:
        out = np.empty((len(slots), self.device.width), np.float32)
        for store, part, store_slots in self._parts(slots):
            out[part] = store.gather(store_slots)
        return out

    @override
    def scatter(self, slots: Ids, rows: Floats) -> None:
        for store, part, store_slots in self._parts(slots):
            store.scatter(store_slots, rows[part])

    def _parts(self, slots: Ids) -> Iterator[tuple[RowStore, Mask, Ids]]:
        """Yield each memory, a mask of those row positions that are in it, and its own numbers for them."""
        on_host = slots < 0
        yield self.device, ~on_host, slots[~on_host]
        yield self.host, on_host, -slots[on_host]


class TieredRowUpdate(RowUpdate):
    """Pulls and pushes of a table in two memories. A row is read and updated in the memory where it is."""

    def __init__(self, spec: TableSpec, memory: TieredRowMemory) -> None:
        self._memory = memory
        self._device = device_row_update(spec, memory.device)
        self._host = HostRowUpdate(spec, memory.host)

    def pull_into(self, ids: Ids, out: Floats) -> int:
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
        return self._device.mean(parts)

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        if isinstance(gradients, DeviceSums):
            self._device.push_from_device(gradients, scalars, step)
            return
        on_host = self._memory.fetch(ids, step)
        if on_host.any():
            values = gradients if isinstance(gradients, np.ndarray) else gradients.to_host()
            self._host.push(ids[on_host], values[on_host], scalars, step)
            ids, gradients = ids[~on_host], values[~on_host]
        self._device.push(ids, gradients, scalars, step)

    def update_other_rows(self, scalars: Floats, step: int) -> None:
        self._device.update_other_rows(scalars, step)
        self._host.update_other_rows(scalars, step)

    @override
    def can_share(self, count: int) -> bool:
        fits = self._memory.rows_for_device(count) == count and not len(self._memory.host)
        return fits and self._device.initializes_on_device

    @override
    def pull_to_device(self, ids: DeviceArray, out: DeviceArray) -> bool:
        if not self.can_share(0):
            return False
        self._device.pull_to_device(ids, out)
        return True
