"""Arithmetic of rules that gives the same bits on a device as on the CPU.

NVIDIA's compiler joins a product and a sum into one operation with one rounding wherever it may, and numba
has no switch against that. The compiler leaves a product alone that names its rounding (mul.rn of the PTX
ISA), as `rounded_product` does. Numba's sums, divisions and square roots on a device round to nearest and
keep subnormal numbers, as on the CPU. `math.pow` is another function there; its last bit may differ.

The simulator runs kernels as Python, whose `math` answers in float64. There the rules get the one of the
reference in NumPy.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

import operator
from typing import Any

from numba import config, cuda

__all__ = ["math", "rounded_product"]

math: Any
rounded_product: Any

if config.ENABLE_CUDASIM:
    from psfleet.kernels.reference import FLOAT32_MATH as math

    rounded_product = operator.mul
else:
    import math

    from numba.cuda import libdevice

    @cuda.jit(device=True, inline="always")
    def rounded_product(a, b):
        """a * b in float32, rounded before anything is added to it."""
        return libdevice.fmul_rn(a, b)
