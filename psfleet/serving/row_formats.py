"""Forms in which rows are kept for prediction: float32, or fewer bits with a scale for each row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels import number_formats
from psfleet.kernels.number_formats import decode_int8, encode_int8
from psfleet.settings.kinds import RowForm

Floats = NDArray[np.float32]
Codes = NDArray[Any]


@dataclass(frozen=True)
class RowCodec:
    """Rows in one form.

    Attributes:
        dtype: Dtype of a code.
        per_code: Values in a code.
        encode: Codes [n, codes] and scales float32 [n] of rows float32 [n, dim]; scales [0]: there are none.
        decode: The rows again, from codes, scales and dim.
    """

    dtype: Any
    per_code: int
    encode: Callable[[Floats], tuple[Codes, Floats]]
    decode: Callable[[Codes, Floats, int], Floats]

    @property
    def has_scales(self) -> bool:
        """True if each row has a scale."""
        return self.dtype in (np.int8, np.uint8)

    def width(self, dim: int) -> int:
        """Number of codes of a row."""
        return -(-dim // self.per_code)


_SMALLEST = 2.0**-100  # a scale; a row whose values are all smaller becomes zeros
_NO_SCALES: Floats = np.empty(0, np.float32)


def _bytes(rows: Floats) -> tuple[Codes, Floats]:
    codes, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    encode_int8(np.ascontiguousarray(rows).reshape(-1), rows.shape[1], scales, codes.reshape(-1))
    return codes, scales


def _of_bytes(codes: Codes, scales: Floats, dim: int) -> Floats:
    rows = np.empty(codes.shape, np.float32)
    decode_int8(codes.reshape(-1), scales, dim, rows.reshape(-1))
    return rows


def _pairs(rows: Floats) -> tuple[Codes, Floats]:
    """Two values in a byte, each a whole number of -7 to 7, plus 8, of the row's steps."""
    scales = np.abs(rows).max(axis=1) / np.float32(7)
    scales[~np.isfinite(scales) | (scales < _SMALLEST)] = 0
    factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    codes = (np.rint(np.nan_to_num(rows) * factors[:, None]) + 8).astype(np.uint8)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def _of_pairs(codes: Codes, scales: Floats, dim: int) -> Floats:
    rows = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    rows[:, ::2], rows[:, 1::2] = codes & 15, codes >> 4
    rows -= 8
    rows *= scales[:, None]
    return np.ascontiguousarray(rows[:, :dim])


CODECS: dict[RowForm, RowCodec] = {
    "float32": RowCodec(
        np.float32, 1, lambda rows: (rows, _NO_SCALES), lambda codes, scales, dim: codes
    ),
    "bfloat16": RowCodec(
        np.uint16,
        1,
        lambda rows: (number_formats.encode(rows, "bfloat16"), _NO_SCALES),
        lambda codes, scales, dim: number_formats.decode(codes, "bfloat16"),
    ),
    "int8": RowCodec(np.int8, 1, _bytes, _of_bytes),
    "int4": RowCodec(np.uint8, 2, _pairs, _of_pairs),
}
