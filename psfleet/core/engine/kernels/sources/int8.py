import numpy as np
from numba import float32, int8, int64, types, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import helper, inlined, kernel

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


@kernel(void(F32, U32, float32[::1], int8[::1]))
def encode(values, bits, scales, codes):
    """Each value of a block as the nearest whole number of steps, ties to even. bits: of values.

    A block that has an infinity or NaN becomes NaN as a whole, so that it shows.
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
    """Encode rests + values as `encode` does; the remainder becomes rests. bits: of rests."""
    for block in range(len(scales)):
        at = block * DIM
        size = min(DIM, len(values) - at)
        for k in range(size):
            rests[at + k] += values[at + k]
        most = largest(bits, at, size)
        scale, inverse = scale_of(most), inverse_of(most)
        scales[block] = scale
        for k in range(size):
            steps = np.rint(steps_of(rests[at + k], inverse))
            codes[at + k] = int8(steps)
            rests[at + k] -= steps * scale


@kernel(int64(F32, U32, I64, uint64, float32[::1], int8[::1]))
def encode_drawn(values, bits, ids, salt, scales, codes):
    """Rows in steps, rounded up or down by a hash of salt, id and place: right on average.

    Returns the first row that has an infinity or NaN, or -1.
    """
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
    """The values of all blocks."""
    for block in range(len(scales)):
        at = block * DIM
        scale = scales[block]
        for k in range(min(DIM, len(codes) - at)):
            values[at + k] = np.float32(codes[at + k]) * scale
