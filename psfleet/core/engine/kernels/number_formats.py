"""Converts float32 arrays to bfloat16, float16 and int8 and back, and the packed rows of a table.

Compressed messages, snapshots and served tables use this module. Inside push and pull, the kernels of rows
convert values themselves (row_format.py).

    16 bits    encode, decode                each value by itself
    8 bits     encode_int8*, decode_int8     a block of values shares a scale
    rows       pack_rows, unpack_rows        columns of a stored row, each in its own format

In 8 bits a value is stored as a whole number of steps. The size of a step is the scale of the value's block:

    scale = largest magnitude of the block / 127
    code  = value / scale, rounded
    value = code * scale

The error of a decoded value is at most half a step if it was rounded to the nearest, and less than a step if
it was rounded at random (`encode_int8_drawn`). Blocks follow each other in the flattened array, and the last
block may be shorter. A block whose largest magnitude is below 2^-100 becomes zero. Packed rows in int8 use a
power of two as the scale instead, so that packing and unpacking do not change a stored value.
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

_FLOAT16_END = 65520.0  # from this magnitude on, float16 rounds to infinity


Words = NDArray[np.uint32]
Ids = NDArray[np.int64]
Codes = NDArray[np.int8]


def encode(values: Floats, half: Half, scale: float = 1.0) -> Halves:
    """Convert values * scale to 16 bits, rounded to the nearest, ties to even.

    Args:
        values: float32 in any shape.
        half: Format of the result.
        scale: Factor in float32, such as a loss scale. `decode` with the same scale divides by it again.

    Returns:
        Bits of the values, uint16 in the shape of `values`.
    """
    flat = np.ascontiguousarray(values if scale == 1 else values * np.float32(scale)).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    if half == "bfloat16":
        shorten(flat, out)
    else:
        static_kernels("halves").encode_float16(flat, flat.view(np.uint32), out)
    return out.reshape(values.shape)


def shorten(values: Floats, out: Halves) -> None:
    """Convert float32 [n] to bfloat16 [n] in `out`, rounded to the nearest, ties to even."""
    static_kernels("halves").encode_bfloat16(values.view(np.uint32), out)


def widen(halves: Halves, out: Floats) -> None:
    """Convert bfloat16 [n] to float32 [n] in `out`."""
    static_kernels("halves").decode_bfloat16(halves, out.view(np.uint32))


def decode(halves: Halves, half: Half, scale: float = 1.0) -> Floats:
    """Convert 16 bits back to float32 and multiply by float32(1 / scale), which reverses `encode`."""
    flat = np.ascontiguousarray(halves).reshape(-1)
    out = np.empty(flat.size, np.float32)
    if half == "bfloat16" and scale == 1:
        widen(flat, out)
        return out.reshape(halves.shape)
    static_kernels("halves").decode(flat, _patterns(half), np.float32(1 / scale), out)
    return out.reshape(halves.shape)


def rounded(values: Floats, half: Half, scale: float = 1.0) -> Floats:
    """Return the values that a receiver gets if these values are sent in 16 bits: `encode`, then `decode`."""
    return decode(encode(values, half, scale), half, scale)


def overflows(values: Floats, scale: float) -> bool:
    """Return whether values * scale would contain an infinity or NaN in float16."""
    peak = np.max(np.abs(values), initial=0).astype(np.float32)  # NaN if any value is NaN
    with np.errstate(over="ignore"):
        return not float(peak * np.float32(scale)) < _FLOAT16_END  # `not <`: True for NaN too


@cache
def _patterns(half: Half) -> Floats:
    """Return the float32 value of each of the 65,536 patterns of 16 bits, a table for `decode`."""
    every = np.arange(1 << 16, dtype=np.uint16)
    if half == "float16":
        return every.view(np.float16).astype(np.float32)
    return (every.astype(np.uint32) << np.uint32(16)).view(np.float32)


def unpack_rows(form: RowFormat, words: Floats) -> Floats:
    """Convert stored rows to float32 [n, form.width].

    Args:
        form: Layout of the rows.
        words: Stored rows, [n, form.words], as words of 4 bytes. Further words of a row are ignored.

    Returns:
        Weights and state of each row. A view of `words` if rows are stored as float32.
    """
    if form.plain:
        return words[:, : form.width]
    return np.concatenate([_unpacked(column, words) for column in form.columns], axis=1)


def pack_rows(form: RowFormat, rows: Floats) -> Floats:
    """Convert float32 rows [n, form.width] to stored rows [n, form.words], each value rounded to the nearest.

    Rows from `unpack_rows` are packed without any change of a value, so snapshots restore rows exactly.
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
    """Round weights to values that rows of this format can store exactly, as a push of this step would.

    Args:
        form: Layout of the rows.
        ids: Ids of the rows, int64 [n].
        weights: Weights of the rows, float32 [n, dim].
        stream: Seed of the table's random numbers, from `initializer_arguments` of initial_values.py.
        step: Step of the table. Id, stream and step decide how a value is rounded, so a repeated call gives
            the same result.
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
    counts = scales > 0  # a column of zeros has the scale 0
    steps = np.divide(values, scales, out=np.zeros_like(values), where=counts)
    codes[:, : column.count] = np.rint(steps)
    return np.concatenate([scales.view(np.uint32), codes.view(np.uint32)], axis=1)


def _scales(largest: Floats) -> Floats:
    """Return the smallest power of two that is at least largest / 127, as `scale_of` of row_rounding.py does.

    A power of two makes code * scale exact, so that packing the value again gives the same code.

    Args:
        largest: Largest magnitude of each row's column, float32 [n, 1].
    """
    # A float32 has 8 bits of exponent above 23 bits of fraction. The sum carries into the exponent exactly if
    # the fraction exceeds 127/64. Subtracting 6 from the exponent divides by 64, so that 127 steps suffice.
    exponents = (largest.view(np.uint32) + np.uint32(0x1FFFF)) >> np.uint32(23)
    bits = np.where(exponents > 6, (exponents - np.uint32(6)) << np.uint32(23), np.uint32(0))
    return np.where(np.isfinite(largest), bits.view(np.float32), np.float32(np.nan))


def encode_int8(values: Floats, block: int, scales: Floats, codes: Codes) -> None:
    """Encode values in int8, each rounded to the nearest whole number of steps, ties to even.

    Args:
        values: float32 [n]. A block with an infinity or NaN is decoded as NaN.
        block: Number of values that share a scale.
        scales: float32 [ceil(n / block)], written.
        codes: int8 [n], written.
    """
    kernels = width_kernels("int8", block, "encode")
    kernels.encode(values, values.view(np.uint32), scales, codes)


def encode_int8_fed(
    values: Floats, rests: Floats, block: int, scales: Floats, codes: Codes
) -> None:
    """Encode values + rests as `encode_int8` does, and leave the rounding errors in `rests`.

    This is error feedback (Seide et al., 2014): each step also sends the rounding errors of the step before.

    Args:
        values: float32 [n], finite.
        rests: Rounding errors of the step before, float32 [n], 0 at first. Overwritten with those of this
            step.
        block, scales, codes: As for `encode_int8`.
    """
    kernels = width_kernels("int8", block, "encode_fed")
    kernels.encode_fed(values, rests, rests.view(np.uint32), scales, codes)


def encode_int8_drawn(
    rows: Floats, ids: Ids, salt: np.uint64, scales: Floats, codes: Codes
) -> int | None:
    """Encode rows in int8, each value rounded up or down at random so that it is right on average.

    Rows have no error feedback, because every worker would need a rounding error for each row of the table
    (decision 17). A hash of salt, id and position in the row decides whether a value is rounded up, so a
    repeated push has the same bytes.

    Args:
        rows: float32 [n, dim]; a row is a block.
        ids: Ids of the rows, int64 [n].
        salt: Seed that is different for each push, so that two pushes of a row are rounded differently.
        scales: float32 [n], written.
        codes: int8 [n * dim], written.

    Returns:
        Number of the first row that has an infinity or NaN, or None if all rows are finite. Only the rows
        before the returned row are written.
    """
    flat = rows.reshape(-1)
    kernels = width_kernels("int8", rows.shape[1], "encode_drawn")
    bad = int(kernels.encode_drawn(flat, flat.view(np.uint32), ids, salt, scales, codes))
    return None if bad < 0 else bad


def decode_int8(codes: Codes, scales: Floats, block: int, values: Floats) -> None:
    """Decode codes, int8 [n], and scales, float32 [ceil(n / block)], to `values`, float32 [n]."""
    width_kernels("int8", block, "decode").decode(codes, scales, values)
