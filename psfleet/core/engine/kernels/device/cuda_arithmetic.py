"""Arithmetic of rules that gives the same bits on a device as on the CPU.

NVIDIA's compiler joins a product and a sum into one operation with one rounding wherever it may, and numba
has no switch against that. The compiler leaves a product alone that names its rounding (mul.rn of the PTX
ISA), as `rounded_product` does. Numba's sums, divisions and square roots on a device round to nearest and
keep subnormal numbers, as on the CPU. `math.pow` is another function there; its last bit may differ.

Values of a packed row in 16 bits are rounded by the text of psfleet.core.engine.kernels.row_rounding.

The simulator runs kernels as Python, whose `math` answers in float64. There the rules get the one of the
reference in NumPy.
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
    """A function that kernels call; its text takes the place of the call."""
    return function if SIMULATED else cuda.jit(device=True, inline="always")(function)


@device_function
def first_max(a, b):
    """Python's max: the first one, unless the second is greater."""
    return b if b > a else a


@device_function
def first_min(a, b):
    """Python's min: the first one, unless the second is less."""
    return b if b < a else a


math: Any = FLOAT32_MATH if SIMULATED else _math
"""Functions that rules call as `math` in kernels."""

if SIMULATED:
    from psfleet.core.engine.kernels.rule_twin import FLOAT32_MATH as math

    rounded_product = rounded_double_product = operator.mul
    bits_of = row_rounding.bits_of.py_func
    float_of = row_rounding.float_of.py_func

    def mix(x):
        """The hash of a uint64. Sums and products of NumPy's numbers would warn of their overflow."""
        return hashing.hash_ids(np.array([x], np.uint64).view(np.int64))[0]

    def unmix(x):
        """The uint64 whose hash is x."""
        return hashing.ids_of(np.array([x], np.uint64)).view(np.uint64)[0]

    def random_bits(hash_, stream, k):
        """Return random bits, as the function below."""
        number = int(mix(hash_ ^ stream)) + (int(k) + 1) * hashing.GOLDEN
        return int(mix(number % 2**64)) >> 40

else:
    import math  # noqa: F401

    from numba.cuda import libdevice

    mix = device_function(hashing.mix.py_func)
    unmix = device_function(hashing.unmix.py_func)

    @device_function
    def random_bits(hash_, stream, k):
        """The upper 24 bits of number k of the generator that hash and stream seed."""
        seed = mix(hash_ ^ stream)
        return int64(mix(seed + uint64(k + 1) * uint64(hashing.GOLDEN)) >> uint64(40))

    @device_function
    def rounded_product(a, b):
        """a * b in float32, rounded before anything is added to it."""
        return libdevice.fmul_rn(a, b)

    @device_function
    def rounded_double_product(a, b):
        """The same in float64."""
        return libdevice.dmul_rn(a, b)

    @device_function
    def bits_of(value):
        """The bits of a float32."""
        return uint32(libdevice.float_as_int(float32(value)))

    @device_function
    def float_of(bits):
        """The float32 of these bits."""
        return libdevice.int_as_float(int32(bits))


def _of_device(function: Any) -> Any:
    """A function of `row_rounding` that calls the hash of a device."""
    plain = function.py_func
    copy = FunctionType(plain.__code__, {**plain.__globals__, "mix": mix}, plain.__name__)
    return device_function(_unwarned(copy) if SIMULATED else copy)


def _unwarned(function: Any) -> Any:
    """The function without NumPy's warnings of sums and products of whole numbers that wrap around."""

    def quiet(*arguments):
        with np.errstate(over="ignore"):
            return function(*arguments)

    return quiet


nearest = _of_device(row_rounding.nearest)
drawn = _of_device(row_rounding.drawn)
noise = _of_device(row_rounding.noise)
random_base = _of_device(row_rounding.random_base)
