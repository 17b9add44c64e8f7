"""First values: a pure function of (seed, table name, id, position), the same on every server."""

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial_code import CONSTANT, NORMAL, TRUNCATED, UNIFORM
from psfleet.schema.table import InitializerSpec, key_of

__all__ = ["address_of", "initial_array", "initial_rows", "initializer_arguments"]

_KINDS = {"constant": CONSTANT, "uniform": UNIFORM, "normal": NORMAL, "truncated": TRUNCATED}


def initial_rows(
    ids: NDArray[np.int64], dim: int, initializer: InitializerSpec, seed: int, name: str
) -> NDArray[np.float32]:
    """The first values of rows: float32 [*ids.shape, dim].

    A sparse table that inserts one of these ids gives its row the same bits.
    """
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    out = np.empty((*ids.shape, dim), np.float32)
    static_kernels("initial").fill(
        address_of(ids),
        ids.size,
        dim,
        *initializer_arguments(initializer, seed, name),
        address_of(out),
    )
    return out


def initial_array(
    shape: tuple[int, ...], initializer: InitializerSpec, seed: int, name: str
) -> NDArray[np.float32]:
    """The first values of a dense array: one long row of id 0, float32 in `shape`."""
    rows = initial_rows(np.zeros(1, np.int64), math.prod(shape), initializer, seed, name)
    return rows.reshape(shape)


def initializer_arguments(
    initializer: InitializerSpec, seed: int, name: str
) -> tuple[int, float, float, np.uint64]:
    """(kind, low, span, stream) as `filling.fill_row` takes them."""
    uniform = initializer.kind == "uniform"
    span = initializer.high - initializer.low if uniform else initializer.high
    stream = (seed * 0x9E3779B97F4A7C15 + key_of(name)) % 2**64
    return _KINDS[initializer.kind], float(initializer.low), float(span), np.uint64(stream)


def address_of(array: NDArray[Any]) -> int:
    """Where a contiguous array lies. The caller keeps the array alive while a kernel runs."""
    return _word_at(id(array) + _HEAD).value


# An array's first field is the address of its data: NumPy's binary interface (PyArrayObject_fields). To
# read it takes 0.1 us, to ask for `__array_interface__` 2 us, and a push asks a dozen times.
_HEAD = object.__basicsize__
_word_at = ctypes.c_size_t.from_address


def _asked_for(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


if address_of(_sample := np.zeros(3, np.uint8)[1:]) != _asked_for(_sample):  # another NumPy
    address_of = _asked_for
