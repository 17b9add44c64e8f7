"""Pulls and pushes of a sparse table on a CUDA device, for float32 rows and for packed rows.

The results are bit-identical to those on the host (row_update.py), so that rows may move between host and
device. `device_row_update` chooses the class. Work is executed in the order in which it is added to the
table's queue. A method returns before the device has finished, except if it copies a result to the host.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import override

from psfleet.core.engine.device_arrays import DeviceArray, DeviceSums
from psfleet.core.engine.kernels.device.cuda import CudaUpdate, table_kernels
from psfleet.core.engine.kernels.device.cuda_launch import CudaArray, to_device
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.kernels.hashing import CONSTANT, UNIFORM
from psfleet.core.engine.kernels.initial_values import initial_rows, initializer_arguments
from psfleet.core.engine.kernels.number_formats import encode, pack_rows, rounded
from psfleet.core.engine.kernels.row_format import RowColumn, RowFormat
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.device.device_distinct import DistinctIds
from psfleet.core.engine.tables.device.device_rows import DeviceRowMemory
from psfleet.core.engine.tables.row_update import RowValues

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_PAGE = 1 << 16  # rows that one launch updates without a gradient, or widens to float32

cuda_rows = table_kernels("cuda_rows")


class MergedRows:
    """Mean gradients of a round on the device, one row for each id.

    Attributes:
        values: float32 [n * width] on the device, flat, in a buffer that later calls overwrite.
        ids: Ids of the rows, uint64 [n] on the device, or None if they are only on the host.
    """

    def __init__(
        self, values: Any, width: int, buffers: DeviceBuffers, queue: DeviceQueue, ids: Any = None
    ) -> None:
        self.values = values
        self.ids = ids
        self._width = width
        self._buffers = buffers
        self._queue = queue

    def __getitem__(self, mask: NDArray[np.bool_]) -> "MergedRows":
        row_numbers = self._buffers.fill("kept", np.flatnonzero(mask))
        values = self._buffers.get("gradients", (len(row_numbers) * self._width,), np.float32)
        self._queue.launch(
            cuda_rows.gather,
            len(values),
            self.values,
            self._width,
            row_numbers,
            len(values),
            values,
        )
        return MergedRows(values, self._width, self._buffers, self._queue)

    def to_host(self) -> Floats:
        return self._queue.read(self.values).reshape(-1, self._width)


class DeviceRowUpdate:
    """Pulls and pushes of rows that are stored as float32. Implements RowUpdate.

    Constant and uniform initial values are computed on the device. Normally distributed ones are computed on
    the host: they need a logarithm and a cosine, whose results differ between host and device.
    """

    def __init__(self, spec: TableSpec, memory: DeviceRowMemory) -> None:
        self._spec = spec
        self._memory = memory
        self._queue = memory.queue
        self._form = RowFormat(spec.rule, spec.dim, spec.precision)
        self._update = CudaUpdate(
            spec.rule,
            spec.decay,
            self._queue,
            spec.dim,
            push_scores=spec.pushed_scores,
            row_scores=spec.scores if self._form.plain else 0,
        )
        self._buffers = DeviceBuffers(self._queue)
        self._distinct = DistinctIds(self._queue)
        kind, low, span, stream = initializer_arguments(spec.initializer, spec.seed, spec.name)
        self._on_host = kind not in (CONSTANT, UNIFORM)
        # The kernel computes low + fraction * span. For a constant, adding -0.0 changes no value, not even
        # -0.0.
        self._first = np.float32(low), np.float32(span if kind == UNIFORM else -0.0), stream
        self._state = to_device(self._new_row())

    def pull_into(self, ids: Ids, out: Floats) -> int:
        if not len(ids):
            return 0
        memory, dim = self._memory, self._spec.dim
        device_ids = memory.send(ids)
        slots, _ = memory.find(device_ids)
        weights = self._buffers.get("weights", (len(ids) * dim,), np.float32)
        self._read_weights(device_ids, slots, weights)
        new = (
            memory.unknown()
        )  # only now, so that the device does not wait for the next call meanwhile
        self._queue.read_into(weights, out)
        if self._on_host and new:
            unknown = self._queue.read(slots) == 0
            out[unknown] = self._first_values(ids[unknown])
        return new

    def mean(self, parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, MergedRows]:
        all_ids = np.concatenate([ids for ids, _ in parts]).view(np.uint64)
        unique, all_codes = self._distinct.find(self._buffers.fill("all ids", all_ids))
        ids, width = self._queue.read(unique).view(np.int64), self._spec.push_width
        sums = self._buffers.get("sums", (len(ids) * width,), np.float32)
        self._queue.zero(sums)
        start = 0
        for part_ids, rows in parts:
            codes = all_codes[start : start + len(part_ids)]
            values = self._buffers.fill("gradients", rows.reshape(-1))
            self._queue.launch(
                cuda_rows.merge, len(values), codes, len(values), width, values, sums
            )
            start += len(part_ids)
        factor = np.float32(1.0 / len(parts))
        self._queue.launch(
            cuda_rows.scale, len(sums), sums, len(sums), width, self._spec.dim, factor
        )
        return ids, MergedRows(sums, width, self._buffers, self._queue, unique)

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        memory, spec = self._memory, self._spec
        # All launches below go to one queue, so each sees the results of those before it.
        sent = gradients.ids if isinstance(gradients, MergedRows) else None
        device_ids = memory.send(ids) if sent is None else sent
        slots, fresh = memory.add(device_ids, np.array([step]))
        if fresh is not None:
            self._fill_new_rows(ids, device_ids, slots, fresh)
        if isinstance(gradients, MergedRows):
            values = gradients.values
        else:
            assert isinstance(gradients, np.ndarray)
            values = self._buffers.fill("gradients", gradients.reshape(-1))
        self._apply(slots, device_ids, values, scalars, step)
        self._queue.launch(
            cuda_rows.add_scores,
            len(ids) * spec.pushed_scores,
            *(memory.rows, memory.width, slots, len(ids)),
            *(self._form.words, spec.pushed_scores, values, spec.dim),
        )
        self._pushed = slots  # for `update_other_rows`, which comes right after

    def update_other_rows(self, scalars: Floats, step: int) -> None:
        width = self._spec.push_width
        other_slots, ids = self._memory.others(self._pushed)
        gradients = self._buffers.get(
            "resting", (min(len(other_slots), _PAGE) * width,), np.float32
        )
        self._queue.zero(gradients)
        for start in range(0, len(other_slots), _PAGE):
            slots = other_slots[start : start + _PAGE]
            self._apply(
                slots, ids[start : start + _PAGE], gradients[: len(slots) * width], scalars, step
            )

    def _fill_new_rows(self, ids: Ids, device_ids: Any, slots: Any, fresh: Any) -> None:
        """Set new rows (those whose `fresh` is not 0) to their initial weights and optimizer state."""
        memory, dim = self._memory, self._spec.dim if self._form.plain else 0
        self._queue.launch(
            cuda_rows.begin,
            len(ids) * memory.width,
            *(memory.rows, memory.width, device_ids, slots, fresh, len(ids), dim),
            *(*self._first, self._state),
        )
        if self._on_host:
            new = self._queue.read(fresh) != 0
            self._set_weights(self._queue.read(slots)[new], self._first_values(ids[new]))

    def _read_weights(self, ids: Any, slots: Any, out: Any) -> None:
        """Write weights of rows to `out`, float32 [n * dim]: initial weights for an id without a row."""
        memory, first = self._memory, self._first
        self._queue.launch(
            cuda_rows.weights,
            len(out),
            *(memory.rows, memory.width, ids, slots, len(out), self._spec.dim, *first, out),
        )

    def _set_weights(self, slots: Ids, weights: Floats) -> None:
        """Store initial weights that the host has computed: float32 [n, dim]."""
        self._memory.set_first(slots, weights)

    def _apply(self, slots: Any, ids: Any, gradients: Any, scalars: Floats, step: int) -> None:
        """Apply the optimizer rule to rows; slots, ids and gradients are on the device."""
        self._update.rows(self._memory.rows, slots, gradients, scalars, step)

    def _first_values(self, ids: Ids) -> Floats:
        spec = self._spec
        return initial_rows(ids, spec.dim, spec.initializer, spec.seed, spec.name)

    @property
    def initializes_on_device(self) -> bool:
        """True if initial values of rows are computed on the device."""
        return not self._on_host

    def pull_to_device(self, ids: DeviceArray, out: DeviceArray) -> None:
        with self._queue.in_turn_with(ids.stream):
            device_ids = _flat(ids, np.uint64)
            slots, _ = self._memory.find(device_ids)
            self._read_weights(device_ids, slots, _flat(out, np.float32))

    def push_from_device(self, sums: DeviceSums, scalars: Floats, step: int) -> None:
        with self._queue.in_turn_with(sums.stream):
            flat = _flat(sums, np.float32)
            values = MergedRows(flat, sums.shape[1], self._buffers, self._queue)
            self.push(_flat(sums.ids, np.uint64), values, scalars, step)

    def _new_row(self) -> Floats:
        """Return a new row in stored form, with initial state and scores, and zeros for the weights."""
        initial = [0.0, *(slot.initial for slot in self._spec.rule.slots)]
        counts = [column.count for column in self._form.columns]
        row = np.repeat(np.array(initial, np.float32), counts)[None]
        scores = np.zeros(self._spec.scores, np.float32)
        scores[self._spec.pushed_scores :] = 1  # frequency: the update that adds a row names it
        return np.append(pack_rows(self._form, row)[0], scores)


def _flat(array: DeviceArray, dtype: DTypeLike) -> Any:
    """Return another library's array as a flat array for kernels, which keeps it alive."""
    return CudaArray(array.address, (math.prod(array.shape),), np.dtype(dtype), array)


def device_row_update(spec: TableSpec, memory: DeviceRowMemory) -> DeviceRowUpdate:
    """Return the object that pulls and updates rows in the table's row format: plain float32, or packed."""
    plain = RowFormat(spec.rule, spec.dim, spec.precision).plain
    return (DeviceRowUpdate if plain else DevicePackedUpdate)(spec, memory)


class DevicePackedUpdate(DeviceRowUpdate):
    """Pulls and pushes of rows that are stored in 16 bits (precision="bfloat16" and others).

    An update converts a page of rows to float32, applies the rule to the copy, and rounds the result back
    into the rows. The rounding is random; psfleet.core.engine.kernels.row_rounding draws the same random
    numbers for host and device, so that both round in the same way.
    """

    def __init__(self, spec: TableSpec, memory: DeviceRowMemory) -> None:
        super().__init__(spec, memory)
        *_, self._stream = initializer_arguments(spec.initializer, spec.seed, spec.name)

    @override
    def _read_weights(self, ids: Any, slots: Any, out: Any) -> None:
        memory = self._memory
        self._queue.launch(
            cuda_rows.packed_weights,
            len(out),
            *(self._halves(), memory.width, ids, slots, len(out), self._spec.dim),
            *(*self._first, out),
        )

    @override
    def _fill_new_rows(self, ids: Ids, device_ids: Any, slots: Any, fresh: Any) -> None:
        super()._fill_new_rows(ids, device_ids, slots, fresh)
        if not self._on_host:
            dim, width = self._spec.dim, self._memory.width
            self._queue.launch(
                cuda_rows.packed_begin,
                len(ids) * dim,
                *(self._halves(), width, device_ids, slots, fresh, len(ids) * dim, dim),
                *self._first,
            )

    @override
    def _first_values(self, ids: Ids) -> Floats:
        return rounded(super()._first_values(ids), "bfloat16")

    @override
    def _set_weights(self, slots: Ids, weights: Floats) -> None:
        padding = (0, 0), (0, weights.shape[1] % 2)
        words = np.pad(encode(weights, "bfloat16"), padding).view(np.float32)
        self._memory.set_first(slots, words)

    @override
    def _apply(self, slots: Any, ids: Any, gradients: Any, scalars: Floats, step: int) -> None:
        width = self._form.width
        per_row = self._spec.push_width
        for start in range(0, len(slots), _PAGE):
            part, part_ids = slots[start : start + _PAGE], ids[start : start + _PAGE]
            values = gradients[start * per_row : (start + len(part)) * per_row]
            wide = self._buffers.get("wide", (len(part) * width,), np.float32)
            # wide[i] = float32 copy of row part[i]. The rule updates rows 0 to n - 1 of `wide`.
            for column in self._form.columns:
                self._widen(column, part, wide)
            self._update.rows(wide, _numbers()[: len(part)], values, scalars, step)
            for column in self._form.columns:
                self._narrow(column, part, part_ids, wide, step)

    def _widen(self, column: RowColumn, slots: Any, wide: Any) -> None:
        """Copy one column (weights or one state value) of these rows to `wide` as float32."""
        n, memory = len(slots) * column.count, self._memory
        self._queue.launch(
            cuda_rows.widen,
            n,
            *(memory.rows, self._halves(), memory.width, slots, n),
            *(column.format == "bfloat16", column.word, column.count),
            *(wide, self._form.width, column.place),
        )

    def _narrow(self, column: RowColumn, slots: Any, ids: Any, wide: Any, step: int) -> None:
        """Store one column of `wide` in these rows, rounded to the row format."""
        n, memory = len(slots) * column.count, self._memory
        self._queue.launch(
            cuda_rows.narrow,
            n,
            *(memory.rows, self._halves(), memory.width, slots, ids, n),
            *(column.format == "bfloat16", column.word, column.count),
            *(wide, self._form.width, column.place, self._stream, step),
        )

    def _halves(self) -> Any:
        """Return the memory of all rows as uint16."""
        return self._memory.rows.view(np.uint16)


@cache
def _numbers() -> Any:
    """Return the numbers 0 to _PAGE - 1 on the device: the row numbers in the buffer `wide`."""
    return to_device(np.arange(_PAGE))
