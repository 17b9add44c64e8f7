# ruff: noqa
# mypy: ignore-errors
import numpy as np
from numba import float32, int8, int64, types, uint32, uint64, void

from psfleet.kernels.hashing import mix
from psfleet.kernels.intrinsics import helper, inlined, kernel

DIM = 4
SMALLEST = uint32(27 << 23)  # bits of 2^-100: a block whose largest value is below becomes zero
INFINITE = uint32(0x7F800000)

F32, I8, I64, U32 = (
    types.Array(kind, 1, "C", readonly=True) for kind in (float32, int8, int64, uint32)
)


@helper
def float_of(bits):
    """The float32 of these bits."""
    return np.uint32(bits).view(np.float32)


@inlined
def largest(bits, at, size):
    """Bits of the largest magnitude of a block: whole numbers are compared many at a time."""
    most = uint32(0)
    for k in range(size):
        most = max(most, uint32(bits[at + k] & uint32(0x7FFFFFFF)))
    return most


@inlined
def scale_of(most):
    """The step of a block with this largest value; 0: nothing counts; NaN: it has an infinity or NaN."""
    step = float_of(most) / np.float32(127) if most >= SMALLEST else np.float32(0)
    return step if most < INFINITE else np.float32(np.nan)


@inlined
def inverse_of(most):
    """Return the factor that turns the values of such a block into steps."""
    counts = most >= SMALLEST and most < INFINITE
    return np.float32(127) / float_of(most) if counts else np.float32(0)


@inlined
def steps_of(value, inverse):
    """A value in steps, -127 to 127."""
    return min(max(value * inverse, np.float32(-127)), np.float32(127))
