"""A rule at work on rows in 16 and 8 bits of a sparse table on a CUDA device."""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from psfleet.kernels.cuda import table_kernels
from psfleet.kernels.float16 import encode, rounded
from psfleet.kernels.initial_values import initializer_arguments
from psfleet.kernels.row_format import RowColumn, RowFormat
from psfleet.schema.table import TableSpec
from psfleet.tables.device_row_update import DeviceRowUpdate
from psfleet.tables.device_rows import DeviceRowMemory

__all__ = ["DevicePackedUpdate", "device_row_update"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_PAGE = 1 << 16  # rows that are float32 at a time
_FORMS = {"float32": 0, "bfloat16": 1, "int8": 2}  # as in the kernels

cuda_packed = table_kernels("cuda_packed")


def device_row_update(spec: TableSpec, memory: DeviceRowMemory) -> DeviceRowUpdate:
    """The table's rule for its rows on a device."""
    plain = RowFormat(spec.rule, spec.dim, spec.precision).plain
    return (DeviceRowUpdate if plain else DevicePackedUpdate)(spec, memory)


class DevicePackedUpdate(DeviceRowUpdate):
    """See DeviceRowUpdate. The rule updates copies of the rows in float32, which are then rounded.

    Roundings are drawn as psfleet.kernels.rounding says.
    """

    def __init__(self, spec: TableSpec, memory: DeviceRowMemory) -> None:
        super().__init__(spec, memory)
        *_, self._stream = initializer_arguments(spec.initializer, spec.seed, spec.name)

    def _read_weights(self, given: Any, found: Any, out: Any) -> None:
        """See DeviceRowUpdate."""
        memory = self._memory
        self._queue.launch(
            cuda_packed.weights,
            len(out),
            *(self._as(np.uint16), memory.width, given, found, len(out), self._spec.dim),
            *(*self._first, out),
        )

    def _begin(self, ids: Ids, given: Any, found: Any, fresh: Any) -> None:
        """See DeviceRowUpdate."""
        super()._begin(ids, given, found, fresh)
        if not self._on_host:
            dim, width = self._spec.dim, self._memory.width
            self._queue.launch(
                cuda_packed.begin,
                len(ids) * dim,
                *(self._as(np.uint16), width, given, found, fresh, len(ids) * dim, dim),
                *self._first,
            )

    def _first_values(self, ids: Ids) -> Floats:
        """See DeviceRowUpdate."""
        return rounded(super()._first_values(ids), "bfloat16")

    def _set_weights(self, slots: Ids, weights: Floats) -> None:
        """See DeviceRowUpdate."""
        padding = (0, 0), (0, weights.shape[1] % 2)
        words = np.pad(encode(weights, "bfloat16"), padding).view(np.float32)
        self._memory.set_first(slots, words)

    def _apply(self, slots: Any, ids: Any, gradients: Any, scalars: Floats, step: int) -> None:
        """See DeviceRowUpdate."""
        width = self._form.width
        per_row = self._spec.push_width
        for start in range(0, len(slots), _PAGE):
            part, own = slots[start : start + _PAGE], ids[start : start + _PAGE]
            given = gradients[start * per_row : (start + len(part)) * per_row]
            wide = self._buffers.get("wide", (len(part) * width,), np.float32)
            for column in self._form.columns:
                self._widen(column, part, wide)
            self._update.rows(wide, _numbers()[: len(part)], given, scalars, step)
            for column in self._form.columns:
                self._narrow(column, part, own, wide, step)

    def _widen(self, column: RowColumn, slots: Any, wide: Any) -> None:
        """Copy a column of these rows to `wide` as float32."""
        n, memory = len(slots) * column.count, self._memory
        self._queue.launch(
            cuda_packed.widen,
            n,
            *(memory.rows, self._as(np.uint16), self._as(np.int8), memory.width, slots, n),
            *(_FORMS[column.format], column.word, column.count),
            *(wide, self._form.width, column.place),
        )

    def _narrow(self, column: RowColumn, slots: Any, ids: Any, wide: Any, step: int) -> None:
        """Store a column of `wide` in these rows."""
        has_codes, memory = column.format == "int8", self._memory
        n = len(slots) if has_codes else len(slots) * column.count
        form = () if has_codes else (_FORMS[column.format],)
        self._queue.launch(
            cuda_packed.narrow_codes if has_codes else cuda_packed.narrow,
            n,
            *(
                memory.rows,
                self._as(np.int8 if has_codes else np.uint16),
                memory.width,
                slots,
                ids,
                n,
            ),
            *(*form, column.word, column.count),
            *(wide, self._form.width, column.place, self._stream, step),
        )

    def _as(self, dtype: type[np.generic]) -> Any:
        """The memory of all rows as an array of this dtype."""
        return self._memory.rows.view(dtype)


@cache
def _numbers() -> Any:
    """0, 1, 2 and so on: the rows of `wide`."""
    return cuda.to_device(np.arange(_PAGE))
