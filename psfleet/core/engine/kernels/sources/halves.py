"""Kernels that convert float32 to and from bfloat16 and float16, for messages and packed rows."""
import numpy as np
from numba import float32, types, uint16, uint32, void

from psfleet.core.engine.kernels.intrinsics import kernel

F32, U16, U32 = (types.Array(kind, 1, "C", readonly=True) for kind in (float32, uint16, uint32))


@kernel(void(U32, uint16[::1]))
def encode_bfloat16(bits, out):
    """Convert float32 to bfloat16, its upper 16 bits, rounded to the nearest, ties to even."""
    #     x = [ upper 16 bits, kept | lower 16 bits ]       half = (x + 0x7FFF + lowest kept bit) >> 16
    #
    # The sum carries into the upper half exactly if the value must be rounded up. The carry could turn a NaN
    # into an infinity, so a NaN keeps its upper half and gets the quiet bit.
    for i in range(len(bits)):
        x = bits[i]
        even = (x >> uint32(16)) & uint32(1)
        half = (x + uint32(0x7FFF) + even) >> uint32(16)
        quiet = (x >> uint32(16)) | uint32(0x40)
        out[i] = uint16(quiet if (x & uint32(0x7FFFFFFF)) > uint32(0x7F800000) else half)


@kernel(void(F32, U32, uint16[::1]))
def encode_float16(values, bits, out):
    """Convert float32 to float16 (IEEE binary16), rounded to the nearest, ties to even.

    bits: the same numbers as uint32.
    """
    # All cases are computed and one is selected, so that the loop has no branch and is vectorised:
    #
    #     normal   the exponent moved from bias 127 to 15 (112 << 23), and 13 bits rounded off as in bfloat16
    #     small    below the smallest normal number, 2**-14: a multiple of 2**-24
    #     0x7C00   infinity, from 2**16 on (`normal` already gives it from 65,520 on)
    #     0x7E00   NaN
    for i in range(len(values)):
        x = bits[i] & uint32(0x7FFFFFFF)
        odd = (x >> uint32(13)) & uint32(1)
        normal = (x - uint32(112 << 23) + uint32(0xFFF) + odd) >> uint32(13)
        small = abs(values[i]) * np.float32(2.0**24) if x < uint32(0x38800000) else np.float32(0)
        half = uint32(np.rint(small)) if x < uint32(0x38800000) else normal
        half = uint32(0x7C00) if x >= uint32(0x47800000) else half
        half = uint32(0x7E00) if x > uint32(0x7F800000) else half
        out[i] = uint16(half | ((bits[i] >> uint32(16)) & uint32(0x8000)))


@kernel(void(U16, F32, float32, float32[::1]))
def decode(halves, table, factor, out):
    """Convert 16-bit patterns to float32 by `table`, float32 [65536], and multiply by factor."""
    for i in range(len(halves)):
        out[i] = table[halves[i]] * factor


@kernel(void(U16, uint32[::1]))
def decode_bfloat16(halves, bits):
    """Convert bfloat16 to float32; both are given as their bits."""
    for i in range(len(halves)):
        bits[i] = uint32(halves[i]) << uint32(16)
