"""First values of a row, as code that kernels call. psfleet.kernels.initial_values is the face for Python."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math

import numpy as np
from numba import int64, uint64

from psfleet.kernels.hashing import GOLDEN, mix
from psfleet.kernels.intrinsics import helper, store_f32

__all__ = ["CONSTANT", "NORMAL", "TRUNCATED", "UNIFORM", "fill_row"]

CONSTANT, UNIFORM, NORMAL, TRUNCATED = 0, 1, 2, 3
_U = uint64
_STEP = np.float32(2.0**-24)


@helper
def normal_of(bits):
    """A number of the standard normal distribution, by Box and Muller in float64."""
    radius = (int64(bits >> _U(32)) + 1) * 2.0**-32
    angle = int64(bits & _U(0xFFFFFFFF)) * 2.0**-32
    return math.sqrt(-2.0 * math.log(radius)) * math.cos(2.0 * math.pi * angle)


@helper
def fill_row(out, hashed, dim, kind, low, span, stream):
    """Write the `dim` first values of the row whose id has the hash `hashed` to the address `out`.

    Value k comes from the k-th number of a splitmix64 generator that is seeded by id and stream.
    Uniform: 24 bits to [low, low + span), in float32. Normal: mean `low`, deviation `span`.
    Truncated: the same, drawn again while it is further than two deviations from the mean.
    Constant: low.
    """
    seed = mix(hashed ^ stream)
    if kind == CONSTANT:
        for k in range(dim):
            store_f32(out, k, np.float32(low))
    elif kind == UNIFORM:
        start, width = np.float32(low), np.float32(span)
        for k in range(dim):
            bits = mix(seed + uint64(k + 1) * _U(GOLDEN))
            store_f32(out, k, start + np.float32(int64(bits >> _U(40))) * _STEP * width)
    else:
        for k in range(dim):
            bits = mix(seed + uint64(k + 1) * _U(GOLDEN))
            value = normal_of(bits)
            while kind == TRUNCATED and abs(value) > 2.0:
                bits = mix(bits + _U(GOLDEN))
                value = normal_of(bits)
            store_f32(out, k, np.float32(low + span * value))
