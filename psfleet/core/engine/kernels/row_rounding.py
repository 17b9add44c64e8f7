"""Rounding of the values of packed rows to 16 and 8 bits, as code that kernels call.

A value between two that the format can hold becomes one of these, drawn at random so that it is right on
average (stochastic rounding, Gupta and others, 2015). Rounding to the nearest would lose updates that are
smaller than half a step. The random bits are a hash of table, id, step and position, so a server, a replay of
its log and a standby draw the same. A value that the format can hold stays as it is.

cuda_arithmetic.py has the functions for 16 bits on devices.
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
    """Return the seed for `noise` in one row at one step.

    hash_: hash of the row's id. stream: stream of its table.
    """
    return _W(mix(hash_ ^ mix(stream + uint64(step) * uint64(GOLDEN))))


@helper
def noise(base, place):
    """Return 32 random bits for the value at position `place` of a row (Wellons' lowbias32, 2018)."""
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
    """Return one of the two bfloat16 next to the float32 with bits x. No finite value becomes infinite."""
    # The lower 16 bits are the fraction of a step. To add 16 random bits carries with just this probability.
    # A carry that would reach infinity is not taken; a NaN gets the quiet bit, so that it does not become
    # infinity.
    magnitude = x & _W(_MAGNITUDE)
    down = (x >> _W(16)) | (_W(0x40) if magnitude > _W(_INFINITE) else _W(0))
    up = _W(x + (random >> _W(16))) >> _W(16)
    fits = magnitude < _W(_INFINITE) and (up & _W(0x7FFF)) < _W(0x7F80)
    return _W(up if fits else down)


@helper
def scale_of(most):
    """Return the step of an int8 column: the smallest power of two >= its largest magnitude / 127.

    most: Bits of that magnitude.

    Multiples of a power of two are exact, so a column that is read and stored again keeps its values. A
    column whose magnitudes are below 2^-120 becomes zeros. A column with an infinity or NaN becomes NaN as a
    whole, so that the fault is not hidden.
    """
    exponent = (most + _W(0x1FFFF)) >> _W(23)  # one more where the fraction exceeds 127/64
    bits = (exponent - _W(6)) << _W(23) if exponent > _W(6) else _W(0)
    return float_of(_W(bits if most < _W(_INFINITE) else _W(0x7FC00000)))


@helper
def code_of(x, scale, random):
    """Return the float32 with bits x in steps of `scale`, -127 to 127, rounded by 16 bits of `random`."""
    # The scale is a power of two, so its inverse is exact: the exponent is 254 minus its own.
    inverse = float_of(_W(_W(254 << 23) - bits_of(scale)))
    # Exact beside a whole number up to 127.
    part = float32(random >> _W(16)) * float32(2.0**-16)
    steps = float_of(x) * inverse + part if scale > float32(0) else float32(0)
    return int8(np.floor(steps))
