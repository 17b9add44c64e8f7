"""Values of a packed row in 16 and 8 bits, as code that kernels call.

A value between two that the format can hold becomes one of them, drawn so that it is right on average
(stochastic rounding, Gupta and others, 2015): small updates are not lost. The random bits are a hash of
table, id, step and place, so every server, a replay of the log and a standby draw the same. A value that the
format can hold stays as it is.

psfleet.core.engine.kernels.device.cuda_arithmetic has what 16 bits need for devices,
with their own `mix`.
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
    """The float32 of these bits."""
    return np.uint32(bits).view(np.float32)


@helper
def bits_of(value):
    """The bits of a float32."""
    return np.float32(value).view(np.uint32)


@helper
def random_base(hash_, stream, step):
    """From which `noise` draws for one row. hash_: hash of its id; stream: of its table."""
    return _W(mix(hash_ ^ mix(stream + uint64(step) * uint64(GOLDEN))))


@helper
def noise(base, place):
    """32 random bits for one value of a row. The mixing function is Wellons' lowbias32 (2018)."""
    x = _W(base + _W(place) * _W(0x9E3779B9))
    x = _W((x ^ (x >> _W(16))) * _W(0x7FEB352D))
    x = _W((x ^ (x >> _W(15))) * _W(0x846CA68B))
    return _W(x ^ (x >> _W(16)))


@helper
def nearest(x):
    """The bfloat16 nearest to the float32 with bits x; ties to even."""
    even = (x >> _W(16)) & _W(1)
    quiet = (x >> _W(16)) | _W(0x40)
    half = _W(x + _W(0x7FFF) + even) >> _W(16)
    return _W(quiet if (x & _W(_MAGNITUDE)) > _W(_INFINITE) else half)


@helper
def drawn(x, random):
    """A bfloat16 next to the float32 with bits x. No finite value becomes infinite."""
    magnitude = x & _W(_MAGNITUDE)
    down = (x >> _W(16)) | (_W(0x40) if magnitude > _W(_INFINITE) else _W(0))
    up = _W(x + (random >> _W(16))) >> _W(16)
    fits = magnitude < _W(_INFINITE) and (up & _W(0x7FFF)) < _W(0x7F80)
    return _W(up if fits else down)


@helper
def scale_of(most):
    """The step of a column: the smallest power of two that is at least 1/127 of its largest magnitude.

    most: The bits of that magnitude.

    Multiples of a power of two are exact, so a column that is read and stored again keeps its values. Below
    2^-120 all become 0. A column with an infinity or NaN becomes NaN as a whole, so that it shows.
    """
    exponent = (most + _W(0x1FFFF)) >> _W(23)  # one more where the fraction exceeds 127/64
    bits = (exponent - _W(6)) << _W(23) if exponent > _W(6) else _W(0)
    return float_of(_W(bits if most < _W(_INFINITE) else _W(0x7FC00000)))


@helper
def code_of(x, scale, random):
    """The float32 with bits x in steps of `scale`, -127 to 127."""
    inverse = float_of(_W(_W(254 << 23) - bits_of(scale)))
    # Exact beside a whole number up to 127.
    part = float32(random >> _W(16)) * float32(2.0**-16)
    steps = float_of(x) * inverse + part if scale > float32(0) else float32(0)
    return int8(np.floor(steps))
