"""Initial weights of rows and arrays, addresses of arrays, and copies of large arrays.

`initial_rows` and `initial_array` compute the initial values of parameters from the job's seed, the table's
name and the id. Every process computes the same values, so no process has to send them.

`address_of` returns the address that a kernel takes for an array, in 0.1 us.

`copy_over` copies large arrays past the caches. An ordinary store first reads the cache line that it is about
to overwrite, and evicts other lines from the caches for a line that is not used again here. A streamed store
goes straight to memory. It takes 0.044 CPU seconds per GB, against 0.07 of np.copyto, for arrays of 2 MB in
memory, and 0.024 against 0.05 if the source is in a cache (AMD Zen 5).
"""

import ctypes
import math
import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.hashing import CONSTANT, NORMAL, TRUNCATED, UNIFORM
from psfleet.core.engine.schema.table import InitializerSpec, key_of

_KINDS = {"constant": CONSTANT, "uniform": UNIFORM, "normal": NORMAL, "truncated": TRUNCATED}


# The first field of a NumPy array object, behind the fields that every Python object has, is the address of
# its data (PyArrayObject_fields of NumPy's binary interface). Reading this field takes 0.1 us and
# `array.__array_interface__` 2 us; a push needs a dozen addresses.
_HEAD = object.__basicsize__
_word_at = ctypes.c_size_t.from_address
STREAM_FROM = 1 << 20
"""Bytes from which `copy_over` writes past the caches. A smaller array is likely to be read again soon."""
_LINE = 64  # bytes of a cache line
_KNOWN = platform.machine() in (
    "x86_64",
    "AMD64",
)  # on other processors streamed stores need other fences


def initial_rows(
    ids: NDArray[np.int64], dim: int, initializer: InitializerSpec, seed: int, name: str
) -> NDArray[np.float32]:
    """Compute the initial weights of rows, float32 [*ids.shape, dim].

    A sparse table that inserts a row for one of these ids starts with bit-identical weights.

    Args:
        ids: Ids of the rows, int64 in any shape.
        dim: Number of weights of a row.
        initializer: Distribution of the values.
        seed: Seed of the job.
        name: Name of the table.
    """
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    out = np.empty((*ids.shape, dim), np.float32)
    static_kernels("row_weights", "fill").fill(
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
    """Compute the initial values of a dense array, float32 in `shape`.

    They are the initial weights of a sparse table's row with id 0 and as many weights.
    """
    rows = initial_rows(np.zeros(1, np.int64), math.prod(shape), initializer, seed, name)
    return rows.reshape(shape)


def initializer_arguments(
    initializer: InitializerSpec, seed: int, name: str
) -> tuple[int, float, float, np.uint64]:
    """Return (kind, low, span, stream), the arguments of `hashing.fill_row` for an initializer.

    `stream` seeds the table's random numbers. It is computed from the job's seed and the table's name, so
    that tables of a job start with different values.
    """
    uniform = initializer.kind == "uniform"
    span = initializer.high - initializer.low if uniform else initializer.high
    stream = (seed * 0x9E3779B97F4A7C15 + key_of(name)) % 2**64
    return _KINDS[initializer.kind], float(initializer.low), float(span), np.uint64(stream)


def address_of(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array. The caller keeps the array alive while a kernel runs."""
    return _word_at(id(array) + _HEAD).value


def _asked_for(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# Fall back to the slower function if a future NumPy lays out its array objects differently.
if address_of(_sample := np.zeros(3, np.uint8)[1:]) != _asked_for(_sample):
    address_of = _asked_for


def int64s_at(address: int, count: int) -> NDArray[np.int64]:
    """Return an array of the int64 [count] at an address, without a copy. Valid as long as the memory."""
    numbers: Any = (ctypes.c_int64 * count).from_address(address)
    return np.frombuffer(numbers, np.int64)


def floats_at(address: int, count: int) -> NDArray[np.float32]:
    """Return an array of the float32 [count] at an address, without a copy. Valid as long as the memory."""
    numbers: Any = (ctypes.c_float * count).from_address(address)
    return np.frombuffer(numbers, np.float32)


def copy_over(out: NDArray[Any], values: NDArray[Any]) -> None:
    """Copy `values` to `out`, past the caches if both are large and contiguous.

    The arrays have the same shape and dtype and do not overlap.

    Args:
        out: Contiguous array. From STREAM_FROM bytes on, it is written past the caches.
        values: Array to copy. If it is not contiguous, the copy goes through the caches.
    """
    if not _KNOWN or out.nbytes < STREAM_FROM or not values.flags.c_contiguous:
        out[...] = values  # np.copyto takes 0.3 us more
        return
    # Streamed stores write whole cache lines. The bytes before the first whole line and behind the last one
    # are copied in the ordinary way.
    flat, source = out.reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8)
    head = -address_of(flat) % _LINE
    lines = (len(flat) - head) // _LINE
    end = head + lines * _LINE
    flat[:head] = source[:head]
    static_kernels("arrays", "copy_lines").copy_lines(
        address_of(flat) + head, address_of(source) + head, lines
    )
    flat[end:] = source[end:]
