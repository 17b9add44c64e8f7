"""Stochastic rounding of row values to 16 and 8 bits, as code that kernels call.

A value between two that the format can represent is rounded up or down at random, so that it is right on
average (Gupta and others, 2015):

    down <= value < up        P(up) = (value - down) / (up - down)

Rounding to the nearest would lose every update smaller than half a step. The random bits are a hash of table,
id, step and position, so a server, a replay of its log and its standby round the same way. A value that the
format can represent is not changed.

cuda_arithmetic.py uses the functions for 16 bits on a GPU.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import float32, int8, uint32, uint64

from psfleet.core.engine.kernels.hashing import GOLDEN, mix
from psfleet.core.engine.kernels.intrinsics import helper

_W = uint32
_INFINITE = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


@helper
def float_of(bits):
    """Return the float32 with these bits."""
    return np.uint32(bits).view(np.float32)


@helper
def bits_of(value):
    """Return the bits of a float32."""
    return np.float32(value).view(np.uint32)


@helper
def random_base(hash_, stream, step):
    """Return the seed that `noise` takes for the values of one row at one step.

    hash_: hash of the row's id. stream: random seed of its table.
    """
    return _W(mix(hash_ ^ mix(stream + uint64(step) * uint64(GOLDEN))))


@helper
def noise(base, place):
    """Return 32 random bits for the value at position `place` of a row (lowbias32, Wellons, 2018)."""
    x = _W(base + _W(place) * _W(0x9E3779B9))
    x = _W((x ^ (x >> _W(16))) * _W(0x7FEB352D))
    x = _W((x ^ (x >> _W(15))) * _W(0x846CA68B))
    return _W(x ^ (x >> _W(16)))


@helper
def nearest(x):
    """Return the bfloat16 nearest to the float32 with bits x; ties to even."""
    even = (x >> _W(16)) & _W(1)
    quiet = (x >> _W(16)) | _W(0x40)
    half = _W(x + _W(0x7FFF) + even) >> _W(16)
    return _W(quiet if (x & _W(_MAGNITUDE)) > _W(_INFINITE) else half)


@helper
def drawn(x, random):
    """Round the float32 with bits x up or down to bfloat16, by 16 bits of `random`.

    No finite value becomes infinite.
    """
    #     x = [ bfloat16 below | fraction, 16 bits ]      fraction + 16 random bits carries upwards
    #
    # The probability of the carry is fraction / 2**16, as wanted. A carry that would give infinity is not
    # taken. A NaN gets the quiet bit, so that it does not become infinity when its lower bits are lost.
    magnitude = x & _W(_MAGNITUDE)
    down = (x >> _W(16)) | (_W(0x40) if magnitude > _W(_INFINITE) else _W(0))
    up = _W(x + (random >> _W(16))) >> _W(16)
    fits = magnitude < _W(_INFINITE) and (up & _W(0x7FFF)) < _W(0x7F80)
    return _W(up if fits else down)


@helper
def scale_of(most):
    """Return the scale (one step) of an int8 column.

    It is the smallest power of two that is at least the column's largest magnitude / 127. Multiples of a
    power of two are exact, so a column that is read and stored again keeps its values. A column whose
    magnitudes are below 2^-120 becomes zeros. A column with an infinity or NaN becomes NaN as a whole, so
    that the fault is not hidden.

    most: Bits of the largest magnitude, as a float32.
    """
    exponent = (most + _W(0x1FFFF)) >> _W(23)  # one more where the fraction exceeds 127/64
    bits = (exponent - _W(6)) << _W(23) if exponent > _W(6) else _W(0)
    return float_of(_W(bits if most < _W(_INFINITE) else _W(0x7FC00000)))


@helper
def code_of(x, scale, random):
    """Return the int8 code of the float32 with bits x, its rounded number of steps of `scale`.

    random: bits that decide the rounding; 16 of them are used.
    """
    # code = floor(x / scale + u), u in [0, 1). The scale is a power of two, so its inverse is exact: the
    # exponent of the inverse is 254 minus that of the scale.
    inverse = float_of(_W(_W(254 << 23) - bits_of(scale)))
    # u has 16 bits, so that adding it to a whole number up to 127 is exact.
    part = float32(random >> _W(16)) * float32(2.0**-16)
    steps = float_of(x) * inverse + part if scale > float32(0) else float32(0)
    return int8(np.floor(steps))
