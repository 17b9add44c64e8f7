"""How a row of a sparse table is stored: its weights, its state, its scores, side by side."""

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.kernels.row_codec import pack_rows, unpack_rows
from psfleet.kernels.row_format import RowFormat
from psfleet.schema.table import TableSpec
from psfleet.tables.row_data import RowData

__all__ = ["PackedRows", "check_rows"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# To compare a dtype with a type takes six times as long.
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class PackedRows:
    """Of one table. A state slot that a whole row shares is stored once; outside it has dim columns.

    Attributes:
        scores: Where within a stored row its scores begin, if there are any: the width of all else.
        width: Of a stored row.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._form = RowFormat(spec.rule, spec.dim, spec.precision)
        self.scores = self._form.words
        self.width = self.scores + spec.scores

    def unpack(self, ids: Ids, stored: Floats, touched: Ids) -> RowData:
        """Stored rows [n, width] with all that is known of them."""
        scores = np.ascontiguousarray(stored[:, self.scores :])
        return RowData(ids, self.values(stored), touched, scores)

    def values(self, stored: Floats) -> Floats:
        """Of stored rows [n, width] weights and state [n, dim * (1 + slots)]."""
        dim, columns, rows = self._spec.dim, self._form.columns, unpack_rows(self._form, stored)
        if all(column.count == dim for column in columns):
            return np.ascontiguousarray(rows)
        parts = [
            np.broadcast_to(rows[:, column.place : column.place + column.count], (len(rows), dim))
            for column in columns
        ]
        return np.concatenate(parts, axis=1)

    def pack(self, rows: RowData) -> Floats:
        """The opposite of `unpack`: [n, width].

        Raises:
            ShapeError: They are none of this table.
        """
        name, dim = self._spec.name, self._spec.dim
        count, scores = len(rows.ids), self._spec.scores
        check_rows(name, rows.ids, rows.values, dim * (1 + len(self._spec.rule.slots)))
        if rows.touched.shape != (count,) or rows.scores.shape != (count, scores):
            raise ShapeError(
                f"table {name!r}: {count} rows come with touched {rows.touched.shape} "
                f"and scores {rows.scores.shape}; they must be {(count,)} and {(count, scores)}"
            )
        columns = enumerate(self._form.columns)
        parts = [rows.values[:, i * dim : i * dim + column.count] for i, column in columns]
        packed = pack_rows(self._form, np.concatenate(parts, axis=1, dtype=np.float32))
        if not scores:
            return packed
        return np.concatenate([packed, rows.scores.astype(np.float32)], axis=1)


def check_rows(table: str, ids: Ids, rows: Floats, width: int) -> Ids:
    """The ids [n], one after the other in memory.

    Raises:
        ShapeError: They are not int64 [n], or the rows not float32 [n, width].
    """
    if ids.ndim != 1 or ids.dtype != _INT64:
        raise ShapeError(
            f"table {table!r}: ids are {ids.dtype} {ids.shape}, they must be int64 [n]"
        )
    if rows.shape != (len(ids), width) or rows.dtype != _FLOAT32:
        raise ShapeError(
            f"table {table!r}: rows are {rows.dtype} {rows.shape}, they must "
            f"be float32 {(len(ids), width)}"
        )
    return np.ascontiguousarray(ids)
