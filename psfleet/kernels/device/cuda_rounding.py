"""Values of a packed row in 16 and 8 bits, for kernels of a device: the text of psfleet.kernels.rounding."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

from types import FunctionType
from typing import Any

import numpy as np
from numba import float32, int32, uint32

from psfleet.kernels import rounding
from psfleet.kernels.device.cuda_arithmetic import SIMULATED, device_function, mix, rounded_product

bits_of: Any
float_of: Any
floor: Any

if SIMULATED:
    bits_of = rounding.bits_of.py_func
    float_of = rounding.float_of.py_func
    floor = rounding.floor.py_func
else:
    from numba.cuda import libdevice

    @device_function
    def bits_of(value):
        """The bits of a float32."""
        return uint32(libdevice.float_as_int(float32(value)))

    @device_function
    def float_of(bits):
        """The float32 of these bits."""
        return libdevice.int_as_float(int32(bits))

    @device_function
    def floor(value):
        """The largest whole number up to a float32."""
        return libdevice.floorf(value)


_own = {
    "bits_of": bits_of,
    "float_of": float_of,
    "floor": floor,
    "mix": mix,
    "product": rounded_product,
}


def _of_device(function: Any) -> Any:
    """A function of `rounding` that calls those of a device."""
    plain = function.py_func
    copy = FunctionType(plain.__code__, {**plain.__globals__, **_own}, plain.__name__)
    return device_function(_unwarned(copy) if SIMULATED else copy)


def _unwarned(function: Any) -> Any:
    """The function without NumPy's warnings of sums and products of whole numbers that wrap around."""

    def quiet(*arguments):
        with np.errstate(over="ignore"):
            return function(*arguments)

    return quiet


nearest = _of_device(rounding.nearest)
drawn = _of_device(rounding.drawn)
noise = _of_device(rounding.noise)
random_base = _of_device(rounding.random_base)
scale_of = _of_device(rounding.scale_of)
code_of = _of_device(rounding.code_of)
