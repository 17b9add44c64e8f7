"""Kernels that convert blocks of DIM values to int8 with one scale for each block, and back.

    scale = largest magnitude / 127        code = value / scale, rounded        value = code * scale

psfleet/core/engine/kernels/number_formats.py calls them. The last block may be shorter.
"""
import numpy as np
from numba import float32, int8, int64, types, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import helper, inlined, kernel

DIM = 4  # `width_kernels` of generate.py replaces this line
# Bits of 2**-100: a block whose largest magnitude is smaller becomes zeros. Far below it, the scale would
# lose bits (from 2**-119 down) and its inverse would overflow (from 2**-121 down).
SMALLEST = uint32(27 << 23)
INFINITE = uint32(0x7F800000)
# Bits of the largest magnitude but one. 127 steps of it are finite as float32; of the largest they are not.
LARGEST = uint32(0x7F7FFFFE)

F32, I8, I64, U32 = (
    types.Array(kind, 1, "C", readonly=True) for kind in (float32, int8, int64, uint32)
)


@helper
def float_of(bits):
    """Return the float32 with these bits."""
    return np.uint32(bits).view(np.float32)


@inlined
def largest(bits, at, size):
    """Return the bits of the largest magnitude of a block."""
    # Without the sign, the bits of float32 are ordered as the numbers are, and the maximum of integers is
    # vectorised.
    most = uint32(0)
    for k in range(size):
        most = max(most, uint32(bits[at + k] & uint32(0x7FFFFFFF)))
    return most


@inlined
def scale_of(most):
    """Return the scale (one step) of a block whose largest magnitude has the bits `most`.

    The scale is 0 for a block that becomes zeros, and NaN for a block with an infinity or NaN.
    """
    step = float_of(min(most, LARGEST)) / np.float32(127) if most >= SMALLEST else np.float32(0)
    return step if most < INFINITE else np.float32(np.nan)


@inlined
def inverse_of(most):
    """Return 1 / scale of a block whose largest magnitude has the bits `most`.

    The result is 0 if the scale is 0 or NaN.
    """
    counts = most >= SMALLEST and most < INFINITE
    return np.float32(127) / float_of(most) if counts else np.float32(0)


@inlined
def steps_of(value, inverse):
    """Return a value as a number of steps, limited to -127 to 127.

    Without the limit, the product could be rounded beyond 127.
    """
    return min(max(value * inverse, np.float32(-127)), np.float32(127))


@kernel(void(F32, U32, float32[::1], int8[::1]))
def encode(values, bits, scales, codes):
    """Convert float32 to int8: each value becomes the nearest whole number of its block's steps.

    Ties go to the even number. bits: the values as uint32. scales: float32 [blocks], written. codes: int8,
    written, one for each value. A block with an infinity or NaN gets the scale NaN and is decoded as NaN, so
    that the fault is not hidden.
    """
    for block in range(len(scales)):
        at = block * DIM
        size = min(DIM, len(values) - at)
        most = largest(bits, at, size)
        inverse = inverse_of(most)
        scales[block] = scale_of(most)
        for k in range(size):
            value = values[at + k] if most < INFINITE else np.float32(0)
            codes[at + k] = int8(np.rint(steps_of(value, inverse)))


@kernel(void(F32, float32[::1], U32, float32[::1], int8[::1]))
def encode_fed(values, rests, bits, scales, codes):
    """Encode rests + values as `encode` does, and leave the rounding errors in `rests` for the next call.

        sum = rests + values        rests = sum - code * scale

    Over many calls no part of a value is lost (error feedback). bits: a view of `rests` as uint32, so it has
    the bits of the sums. The values are finite: the caller has refused others (`GradientCompressor.check`),
    because a NaN would stay in `rests`. A sum beyond float32 becomes the largest number instead of infinity,
    for the same reason.
    """
    for block in range(len(scales)):
        at = block * DIM
        size = min(DIM, len(values) - at)
        for k in range(size):
            rests[at + k] += values[at + k]
        most = largest(bits, at, size)
        if most >= INFINITE:
            end = float_of(LARGEST)
            for k in range(size):
                rests[at + k] = min(max(rests[at + k], -end), end)
            most = largest(bits, at, size)
        scale, inverse = scale_of(most), inverse_of(most)
        scales[block] = scale
        for k in range(size):
            steps = np.rint(steps_of(rests[at + k], inverse))
            codes[at + k] = int8(steps)
            rests[at + k] -= steps * scale


@kernel(int64(F32, U32, I64, uint64, float32[::1], int8[::1]))
def encode_drawn(values, bits, ids, salt, scales, codes):
    """Encode rows, each a block, rounding values up or down at random so that they are right on average.

    The random number is a hash of salt, id and position in the row, so a repeated call gives the same codes.
    Returns -1, or the number of the first row with an infinity or NaN, where it stops.
    """
    # code = floor(value / scale + u) with u in [0, 1), so the probability of rounding up is the fraction of
    # value / scale. u has 24 random bits of lowbias32 (as `noise` of row_rounding.py).
    for row in range(len(ids)):
        at = row * DIM
        most = largest(bits, at, DIM)
        if most >= INFINITE:
            return row
        inverse = inverse_of(most)
        scales[row] = scale_of(most)
        base = uint32(mix(uint64(ids[row]) ^ salt))
        for k in range(DIM):
            x = uint32(base + uint32(k) * uint32(0x9E3779B9))
            x = uint32((x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
            x = uint32((x ^ (x >> uint32(15))) * uint32(0x846CA68B))
            x = uint32(x ^ (x >> uint32(16)))
            part = np.float32(x >> uint32(8)) * np.float32(2.0**-24)
            codes[at + k] = int8(np.floor(steps_of(values[at + k], inverse) + part))
    return -1


@kernel(void(I8, F32, float32[::1]))
def decode(codes, scales, values):
    """Write the value of each code: code * scale of its block."""
    for block in range(len(scales)):
        at = block * DIM
        scale = scales[block]
        for k in range(min(DIM, len(codes) - at)):
            values[at + k] = np.float32(codes[at + k]) * scale
