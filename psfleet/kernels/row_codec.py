"""Between rows as a table stores them and rows in float32, in plain NumPy."""

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.float16 import encode, widen
from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial_values import address_of
from psfleet.kernels.row_format import RowColumn, RowFormat

__all__ = ["draw_weights", "pack_rows", "unpack_rows"]

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]


def unpack_rows(form: RowFormat, stored: Floats) -> Floats:
    """Stored rows [n, form.words or more] as float32 [n, form.width]."""
    if form.plain:
        return stored[:, : form.width]
    return np.concatenate([_unpacked(column, stored) for column in form.columns], axis=1)


def pack_rows(form: RowFormat, rows: Floats) -> Floats:
    """Rows [n, form.width] as they are stored [n, form.words], each value rounded to the nearest.

    Rows that `unpack_rows` gave come back with the same values.
    """
    if form.plain:
        return rows
    parts = [
        _packed(column, rows[:, column.place : column.place + column.count])
        for column in form.columns
    ]
    return np.concatenate(parts, axis=1).view(np.float32)


def draw_weights(
    form: RowFormat, ids: NDArray[np.int64], weights: Floats, stream: np.uint64, step: int
) -> Floats:
    """Weights that the rows hold exactly, rounded as a push of this step would do.

    Args:
        form: Of the rows.
        ids: int64 [n].
        weights: float32 [n, dim].
        stream: Of psfleet.kernels.initial_values.initializer_arguments.
        step: The table's.
    """
    if form.columns[0].format == "float32":
        return weights
    ids, out = np.ascontiguousarray(ids), weights.copy()
    static_kernels("drawing").draw(address_of(out), address_of(ids), *out.shape, stream, step)
    return out


def _unpacked(column: RowColumn, stored: Floats) -> Floats:
    part = stored[:, column.word : column.word + column.words]
    if column.format == "float32":
        return part
    part = np.ascontiguousarray(part)
    if column.format == "bfloat16":
        out = np.empty(part.size * 2, np.float32)
        widen(part.view(np.uint16).reshape(-1), out)
        return out.reshape(len(part), 2 * column.words)[:, : column.count]
    codes = part[:, 1:].copy().view(np.int8)[:, : column.count]
    scaled: Floats = codes.astype(np.float32) * part[:, :1]
    return scaled


def _packed(column: RowColumn, values: Floats) -> Words:
    values = np.ascontiguousarray(values)
    if column.format == "float32":
        return values.view(np.uint32)
    if column.format == "bfloat16":
        padding = (0, 0), (0, 2 * column.words - column.count)
        return np.pad(encode(values, "bfloat16"), padding).view(np.uint32)
    scales = _scales(np.abs(values).max(axis=1, keepdims=True))
    codes = np.zeros((len(values), 4 * column.words - 4), np.int8)
    counts = scales > 0
    steps = np.divide(values, scales, out=np.zeros_like(values), where=counts)
    codes[:, : column.count] = np.rint(steps)
    return np.concatenate([scales.view(np.uint32), codes.view(np.uint32)], axis=1)


def _scales(most: Floats) -> Floats:
    """See psfleet.kernels.rounding.scale_of."""
    exponents = (most.view(np.uint32) + np.uint32(0x1FFFF)) >> np.uint32(23)
    bits = np.where(exponents > 6, (exponents - np.uint32(6)) << np.uint32(23), np.uint32(0))
    return np.where(np.isfinite(most), bits.view(np.float32), np.float32(np.nan))
