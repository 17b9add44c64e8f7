"""Rows of one sparse table in memory for prediction, stored as float32, bfloat16, int8 or int4.

A table has dense arrays of ids, encoded rows (codes) and scales. A hash index leads from an id to its
position in these arrays. The index is compiled (kernel source `served_index`):

    _slots   [ 0 2 0 0 1 0 3 ]         uint32: position + 1, or 0 for a free slot
    _keys    [ id | id | id | ... ]    the first _count entries are rows
    _codes   [ row | row | row | ... ]
    _scales  [ s | s | s | ... ]       only int8 and int4

As long as all ids are smaller than the number of slots, the slot of an id has the id as its number
(`_direct`), and no hash is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.settings.kinds import RowForm
from psfleet.core.engine.kernels import number_formats
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of, initial_rows
from psfleet.core.engine.kernels.number_formats import decode_int8, encode_int8
from psfleet.core.engine.schema.table import TableSpec

Floats = NDArray[np.float32]
Codes = NDArray[Any]


_SMALLEST = 2.0**-100  # smallest scale; a row that needs a smaller scale becomes zeros
_NO_SCALES: Floats = np.empty(0, np.float32)
Ids = NDArray[np.int64]
_GROWTH = 9, 8  # a full array grows to 9/8 of its length
_SLOTS = 5, 4  # minimum number of index slots per row (5/4)


@dataclass(frozen=True)
class RowCodec:
    """Encoding of rows in one number format.

    Attributes:
        dtype: NumPy type of a code, the unit of an encoded row.
        encode: Function from rows, float32 [n, dim], to codes [n, width] and scales, float32 [n]. Scales
            have length 0 if the format has none.
        decode: Function from codes, scales and dim to rows, float32 [n, dim].
    """

    dtype: Any
    per_code: int
    encode: Callable[[Floats], tuple[Codes, Floats]]
    decode: Callable[[Codes, Floats, int], Floats]

    @property
    def has_scales(self) -> bool:
        """True if the format has a scale for each row."""
        return self.dtype in (np.int8, np.uint8)

    def width(self, dim: int) -> int:
        """Return the number of codes (units of an encoded row) that a row of `dim` values takes."""
        return -(-dim // self.per_code)


def _bytes(rows: Floats) -> tuple[Codes, Floats]:
    codes, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    encode_int8(np.ascontiguousarray(rows).reshape(-1), rows.shape[1], scales, codes.reshape(-1))
    return codes, scales


def _of_bytes(codes: Codes, scales: Floats, dim: int) -> Floats:
    rows = np.empty(codes.shape, np.float32)
    decode_int8(codes.reshape(-1), scales, dim, rows.reshape(-1))
    return rows


def _pairs(rows: Floats) -> tuple[Codes, Floats]:
    """Encode rows as int4: two values in a byte, the value of the even column in the low half.

    scale = max(|row|) / 7,   half a byte = round(value / scale) + 8, which is 1 to 15
    """
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


class ServedTable:
    """Map from ids to rows. An id without a row has the initial value that it would have in training.

    Not thread-safe: ServedRows and Follower use locks.
    """

    def __init__(self, spec: TableSpec, form: RowForm = "float32") -> None:
        self.spec = spec
        self.form = form
        self._codec = CODECS[form]
        self._index = static_kernels("served_index")
        self._count = 0
        self._keys = np.empty(0, np.int64)
        self._codes: Codes = np.empty((0, self._codec.width(spec.dim)), self._codec.dtype)
        self._scales = np.empty(0, np.float32)
        self._slots = np.zeros(64, np.uint32)
        self._largest = 0  # largest id that ever had a row; negative ids count as uint64
        self._direct = True  # True while an id is the number of its slot

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    @property
    def bytes(self) -> int:
        """Memory that rows and index take, in bytes."""
        arrays = self._keys, self._codes, self._scales, self._slots
        return sum(array.nbytes for array in arrays)

    def look_up(self, ids: Ids) -> Floats:
        """Return the rows of ids, int64 [n], as float32 [n, dim]."""
        # The kernel copies float32 rows while it finds them. Other formats are decoded afterwards, for all
        # ids at once; for these the kernel gets an array of width 0 and copies nothing.
        spec, out = self.spec, self._codec.dtype is np.float32
        rows = np.empty((len(ids), spec.dim if out else 0), np.float32)
        positions, missing = self._places(ids, rows)
        if not missing:
            return rows if out else self._rows(positions)
        unknown = positions < 0
        if not out:
            rows = np.empty((len(ids), spec.dim), np.float32)
            rows[~unknown] = self._rows(positions[~unknown])
        rows[unknown] = initial_rows(ids[unknown], spec.dim, spec.initializer, spec.seed, spec.name)
        return rows

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Return bool [n]: True for each id that has a row."""
        return self._places(ids, np.empty((len(ids), 0), np.float32))[0] >= 0

    def _places(self, ids: Ids, rows: Floats) -> tuple[Ids, int]:
        """Find the positions of ids in the table's arrays.

        Args:
            ids: int64 [n].
            rows: Array into which rows of a float32 table are copied, [n, dim]. An array [n, 0] copies none.

        Returns:
            Positions, int64 [n], with -1 for an id without a row, and the number of such ids.
        """
        codes, positions = self._codes, np.empty(len(ids), np.int64)
        at, width, to = address_of(codes), codes.strides[0], address_of(rows)
        missing: int = self._index.find(
            ids, self._keys, self._slots, self._direct, positions, at, width, to, rows.shape[1]
        )
        return positions, missing

    def _rows(self, positions: NDArray[Any]) -> Floats:
        codes = self._codes.take(positions, axis=0)
        scales = self._scales.take(positions) if self._codec.has_scales else self._scales
        return self._codec.decode(codes, scales, self.spec.dim)

    def put(self, ids: Ids, rows: Floats) -> None:
        """Set the rows, float32 [n, dim], of distinct ids, int64 [n]."""
        self.put_codes(ids, *self._codec.encode(rows))

    def put_codes(self, ids: Ids, codes: Codes, scales: Floats) -> None:
        """Set rows that are already encoded in the table's format."""
        self._largest = max(self._largest, int(ids.view(np.uint64).max(initial=0)))
        self.reserve(self._count + len(ids))
        if self._direct and self._largest >= len(self._slots):
            self._index_anew(len(self._slots))
        positions, codes, stored = (
            np.empty(len(ids), np.int64),
            np.ascontiguousarray(codes),
            self._codes,
        )
        addresses = address_of(stored), stored.strides[0], address_of(codes)
        self._count = self._index.put(
            ids, self._keys, self._slots, self._direct, self._count, positions, *addresses
        )
        if self._codec.has_scales:
            self._scales[positions] = scales

    def remove(self, ids: Ids) -> None:
        """Remove the rows of ids, int64 [n]. Ids without a row are ignored."""
        # The last rows move into the positions of removed ones, so that rows stay dense. The kernel has
        # moved keys and slots, and lists the positions in its order. The same moves follow here for codes
        # and scales.
        holes, last = np.empty(len(ids), np.int64), self._count
        self._count = self._index.remove(
            ids, self._keys, self._slots, self._direct, self._count, holes
        )
        for hole in holes[holes >= 0]:
            last -= 1
            self._codes[hole] = self._codes[last]
            if self._codec.has_scales:
                self._scales[hole] = self._scales[last]

    def reserve(self, count: int) -> None:
        """Enlarge the arrays and the index so that at least `count` rows fit."""
        if count > len(self._keys):
            size = _grown(count, len(self._keys))
            self._keys = _longer(self._keys, size)
            self._codes = _longer(self._codes, size)
            if self._codec.has_scales:
                self._scales = _longer(self._scales, size)
        slots = count * _SLOTS[0] // _SLOTS[1] + 1
        if slots > len(self._slots):
            self._index_anew(_grown(slots, len(self._slots)))

    def _index_anew(self, slots: int) -> None:
        """Build the hash index from ids to positions again, with this number of slots (entries)."""
        self._slots, self._direct = np.zeros(slots, np.uint32), self._largest < slots
        self._index.index(self._keys, self._slots, self._direct, self._count)

    def content(self) -> tuple[Ids, Codes, Floats]:
        """Return all ids in ascending order, with their codes and scales."""
        order = np.argsort(self._keys[: self._count])
        scales = self._scales[order] if self._codec.has_scales else self._scales
        return self._keys[order], self._codes[order], scales


def _longer(array: NDArray[Any], count: int) -> NDArray[Any]:
    longer = np.empty((count, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _grown(count: int, before: int) -> int:
    """Return the new length of an array of length `before` that must have at least `count` entries."""
    return max(count, before * _GROWTH[0] // _GROWTH[1])
