"""Arithmetic of rules on a CUDA device, bit-identical to that of the CPU.

NVIDIA's compiler fuses a product and a sum into one operation with one rounding wherever it may:

    CPU       round(round(a * b) + c)
    device    round(a * b + c)             unless the product names its own rounding

numba has no switch against that. `rounded_product` is a product that names its rounding (mul.rn of the PTX
ISA), which the compiler does not fuse. Numba's sums, divisions and square roots on a device round to the
nearest and keep subnormal numbers, as on the CPU. `math.pow` is a different function on a device, whose last
bit may differ.

Values of a packed row in 16 bits are rounded by the functions of psfleet.core.engine.kernels.row_rounding.

The simulator runs kernels as Python, whose `math` computes in float64. There rules use the functions of the
NumPy reference.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

import math as _math
import operator
from types import FunctionType
from typing import Any

import numpy as np
from numba import config, cuda, float32, int32, int64, uint32, uint64

from psfleet.core.engine.kernels import hashing, row_rounding
from psfleet.core.engine.kernels.rule_twin import FLOAT32_MATH

SIMULATED = bool(config.ENABLE_CUDASIM)
"""True if kernels run as Python, in threads of the host."""

mix: Any
unmix: Any
random_bits: Any
rounded_product: Any
rounded_double_product: Any
bits_of: Any
float_of: Any


def device_function(function: Any) -> Any:
    """Compile a function that kernels call; its code replaces each call."""
    return function if SIMULATED else cuda.jit(device=True, inline="always")(function)


@device_function
def first_max(a, b):
    """Return what Python's max returns: a, unless b is greater."""
    return b if b > a else a


@device_function
def first_min(a, b):
    """Return what Python's min returns: a, unless b is less."""
    return b if b < a else a


math: Any = FLOAT32_MATH if SIMULATED else _math
"""Functions that rules call as `math` in kernels."""

if SIMULATED:
    from psfleet.core.engine.kernels.rule_twin import FLOAT32_MATH as math

    rounded_product = rounded_double_product = operator.mul
    bits_of = row_rounding.bits_of.py_func
    float_of = row_rounding.float_of.py_func

    def mix(x):
        """Return the hash of a uint64, by arrays: NumPy warns of overflow for single numbers."""
        return hashing.hash_ids(np.array([x], np.uint64).view(np.int64))[0]

    def unmix(x):
        """Return the uint64 whose hash is x."""
        return hashing.ids_of(np.array([x], np.uint64)).view(np.uint64)[0]

    def random_bits(hash_, stream, k):
        """Return the upper 24 bits of number k of the generator that hash and stream seed."""
        number = int(mix(hash_ ^ stream)) + (int(k) + 1) * hashing.GOLDEN
        return int(mix(number % 2**64)) >> 40

else:
    import math  # noqa: F401

    from numba.cuda import libdevice

    mix = device_function(hashing.mix.py_func)
    unmix = device_function(hashing.unmix.py_func)

    @device_function
    def random_bits(hash_, stream, k):
        """Return the upper 24 bits of number k of the generator that hash and stream seed."""
        seed = mix(hash_ ^ stream)
        return int64(mix(seed + uint64(k + 1) * uint64(hashing.GOLDEN)) >> uint64(40))

    @device_function
    def rounded_product(a, b):
        """Return a * b in float32, rounded before anything is added to it."""
        return libdevice.fmul_rn(a, b)

    @device_function
    def rounded_double_product(a, b):
        """Return a * b in float64, rounded before anything is added to it."""
        return libdevice.dmul_rn(a, b)

    @device_function
    def bits_of(value):
        """Return the bits of a float32."""
        return uint32(libdevice.float_as_int(float32(value)))

    @device_function
    def float_of(bits):
        """Return the float32 with these bits."""
        return libdevice.int_as_float(int32(bits))


def _of_device(function: Any) -> Any:
    """Return a function of `row_rounding`, compiled for the device or the simulator."""
    plain = function.py_func
    copy = FunctionType(plain.__code__, {**plain.__globals__, "mix": mix}, plain.__name__)
    return device_function(_unwarned(copy) if SIMULATED else copy)


def _unwarned(function: Any) -> Any:
    """Return the function without NumPy's warnings about whole numbers that overflow."""

    def quiet(*arguments):
        with np.errstate(over="ignore"):
            return function(*arguments)

    return quiet


nearest = _of_device(row_rounding.nearest)
drawn = _of_device(row_rounding.drawn)
noise = _of_device(row_rounding.noise)
random_base = _of_device(row_rounding.random_base)
