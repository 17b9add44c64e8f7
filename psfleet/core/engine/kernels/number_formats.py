"""Conversion of arrays of float32 to bfloat16, float16 and int8 and back, and of the packed rows of a table.

Messages, snapshots and served tables use it; inside push and pull the kernels of rows convert by themselves.

In 8 bits blocks of values share a scale, and a value is a whole number of steps. The step of a block is its
largest magnitude / 127, so a value comes back with an error of half a step where it is rounded to the
nearest, and of less than one where it is drawn. Blocks follow each other in the flattened array; the last one
may be shorter. A block whose largest magnitude is below 2^-100 becomes zero.
"""

from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.generate import static_kernels, width_kernels
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.kernels.row_format import RowColumn, RowFormat

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
Half = Literal["bfloat16", "float16"]

_FLOAT16_END = 65520.0  # from here on float16 rounds to infinity


Words = NDArray[np.uint32]
Ids = NDArray[np.int64]
Codes = NDArray[np.int8]


def encode(values: Floats, half: Half, scale: float = 1.0) -> Halves:
    """Convert values * scale to uint16 [same shape], rounded to the nearest, ties to even."""
    flat = np.ascontiguousarray(values if scale == 1 else values * np.float32(scale)).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    if half == "bfloat16":
        shorten(flat, out)
    else:
        static_kernels("halves").encode_float16(flat, flat.view(np.uint32), out)
    return out.reshape(values.shape)


def shorten(values: Floats, out: Halves) -> None:
    """Convert float32 [n] to bfloat16 [n], rounded to the nearest, ties to even."""
    static_kernels("halves").encode_bfloat16(values.view(np.uint32), out)


def widen(halves: Halves, out: Floats) -> None:
    """Convert bfloat16 [n] to float32 [n]."""
    static_kernels("halves").decode_bfloat16(halves, out.view(np.uint32))


def decode(halves: Halves, half: Half, scale: float = 1.0) -> Floats:
    """Convert 16 bits back to the values that `encode` was given, multiplied by float32(1 / scale)."""
    flat = np.ascontiguousarray(halves).reshape(-1)
    out = np.empty(flat.size, np.float32)
    if half == "bfloat16" and scale == 1:
        widen(flat, out)
        return out.reshape(halves.shape)
    static_kernels("halves").decode(flat, _patterns(half), np.float32(1 / scale), out)
    return out.reshape(halves.shape)


def rounded(values: Floats, half: Half, scale: float = 1.0) -> Floats:
    """Return the values that a receiver gets if these are sent in 16 bits."""
    return decode(encode(values, half, scale), half, scale)


def overflows(values: Floats, scale: float) -> bool:
    """Return whether values * scale has an infinity or NaN once it is float16."""
    peak = np.max(np.abs(values), initial=0).astype(np.float32)  # NaN if one is
    with np.errstate(over="ignore"):
        return not float(peak * np.float32(scale)) < _FLOAT16_END


@cache
def _patterns(half: Half) -> Floats:
    """Return the float32 of each of the 65,536 patterns of 16 bits."""
    every = np.arange(1 << 16, dtype=np.uint16)
    if half == "float16":
        return every.view(np.float16).astype(np.float32)
    return (every.astype(np.uint32) << np.uint32(16)).view(np.float32)


def unpack_rows(form: RowFormat, words: Floats) -> Floats:
    """Convert stored rows [n, form.words or more] to float32 [n, form.width]."""
    if form.plain:
        return words[:, : form.width]
    return np.concatenate([_unpacked(column, words) for column in form.columns], axis=1)


def pack_rows(form: RowFormat, rows: Floats) -> Floats:
    """Convert rows [n, form.width] to stored rows [n, form.words], each value rounded to the nearest.

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
    """Round weights to values that rows of this format hold exactly, as a push of this step would.

    Args:
        form: Format of the rows.
        ids: int64 [n].
        weights: float32 [n, dim].
        stream: Stream of psfleet.core.engine.kernels.initial_values.initializer_arguments.
        step: Step of the table.
    """
    if form.columns[0].format == "float32":
        return weights
    ids, out = np.ascontiguousarray(ids), weights.copy()
    static_kernels("row_weights", "draw").draw(
        address_of(out), address_of(ids), *out.shape, stream, step
    )
    return out


def _unpacked(column: RowColumn, words: Floats) -> Floats:
    part = words[:, column.word : column.word + column.words]
    if column.format == "float32":
        return part
    part = np.ascontiguousarray(part)
    if column.format == "bfloat16":
        out = np.empty(part.size * 2, np.float32)
        widen(part.view(np.uint16).reshape(-1), out)
        return out.reshape(len(part), 2 * column.words)[:, : column.count]
    codes = part[:, 1:].copy().view(np.int8)[:, : column.count]
    values: Floats = codes.astype(np.float32) * part[:, :1]
    return values


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
    exponents = (most.view(np.uint32) + np.uint32(0x1FFFF)) >> np.uint32(23)
    bits = np.where(exponents > 6, (exponents - np.uint32(6)) << np.uint32(23), np.uint32(0))
    return np.where(np.isfinite(most), bits.view(np.float32), np.float32(np.nan))


def encode_int8(values: Floats, block: int, scales: Floats, codes: Codes) -> None:
    """Encode values as the nearest whole numbers of steps; ties to even.

    Args:
        values: float32 [n]. A block with an infinity or NaN comes back as NaN.
        block: Number of values that share a scale.
        scales: float32 [ceil(n / block)], written.
        codes: int8 [n], written.
    """
    kernels = width_kernels("int8", block, "encode")
    kernels.encode(values, values.view(np.uint32), scales, codes)


def encode_int8_fed(
    values: Floats, rests: Floats, block: int, scales: Floats, codes: Codes
) -> None:
    """Encode values + rests as `encode_int8` does; the remainder that is not sent becomes `rests`.

    This is error feedback (Seide et al., 2014): a later step sends what this one leaves out.

    Args:
        values: float32 [n], finite.
        rests: float32 [n], read and written.
    """
    kernels = width_kernels("int8", block, "encode_fed")
    kernels.encode_fed(values, rests, rests.view(np.uint32), scales, codes)


def encode_int8_drawn(
    rows: Floats, ids: Ids, salt: np.uint64, scales: Floats, codes: Codes
) -> int | None:
    """Encode rows in whole steps, each value rounded up or down so that it is right on average.

    Salt, id and position in the row decide whether a value is rounded up.

    Args:
        rows: float32 [n, dim]; a row is a block.
        ids: int64 [n], of the rows.
        salt: Salt of this push.
        scales: float32 [n], written.
        codes: int8 [n * dim], written.

    Returns:
        The first row that has an infinity or NaN; then only the rows before it are written.
    """
    flat = rows.reshape(-1)
    kernels = width_kernels("int8", rows.shape[1], "encode_drawn")
    bad = int(kernels.encode_drawn(flat, flat.view(np.uint32), ids, salt, scales, codes))
    return None if bad < 0 else bad


def decode_int8(codes: Codes, scales: Floats, block: int, values: Floats) -> None:
    """Decode codes, int8 [n], and scales, float32 [ceil(n / block)], to `values`, float32 [n]."""
    width_kernels("int8", block, "decode").decode(codes, scales, values)
