"""Operators of variables: `+`, `-`, `*`, `/`, `**`, `@`, and the methods reshape and astype.

If one operand is a number and the variable is a float, the number becomes a setting of the operation (`x * 2`
is Scale(2)). As a constant it would need a variable, broadcasting and a gradient.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from psfleet.core.base.validation.annotations import checked, is_number
from psfleet.core.graph.program.operation import Op, dtype_of
from psfleet.core.graph.program.ops import arithmetic
from psfleet.core.graph.program.ops import manipulate as shaping
from psfleet.core.graph.program.ops import matmul as products

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


@checked
class Operators:
    """Operators for expressions like `x * 2 + y` of variables, parameters, arrays and numbers."""

    dtype: np.dtype[Any]

    def _apply(self, op: Op, *inputs: Any) -> "Variable":
        raise NotImplementedError

    def reshape(self, shape: Sequence[int]) -> "Variable":
        """Return the values in another shape. An extent -1 is computed from the number of values."""
        return self._apply(shaping.Reshape(tuple(int(n) for n in shape)), self)

    def astype(self, dtype: DTypeLike) -> "Variable":
        """Return the values in another dtype."""
        return self._apply(shaping.Cast(dtype_of(dtype).name), self)

    def __add__(self, other: Any) -> "Variable":
        return self._binary(arithmetic.Add(), self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Variable":
        return self._binary(arithmetic.Sub(), self, other)

    def __rsub__(self, other: Any) -> "Variable":
        if is_number(other):
            return self._apply(arithmetic.Scale(-1.0, float(other)), self)
        return self._binary(arithmetic.Sub(), other, self)

    def __mul__(self, other: Any) -> "Variable":
        return self._binary(arithmetic.Mul(), self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Variable":
        return self._binary(arithmetic.Div(), self, other)

    def __rtruediv__(self, other: Any) -> "Variable":
        if is_number(other):
            return self._apply(
                arithmetic.Scale(float(other)), self._apply(arithmetic.Power(-1.0), self)
            )
        return self._binary(arithmetic.Div(), other, self)

    def __pow__(self, other: Any) -> "Variable":
        if is_number(other):
            return self._apply(arithmetic.Power(float(other)), self)
        return self._binary(arithmetic.Pow(), self, other)

    def __neg__(self) -> "Variable":
        return self._apply(arithmetic.Scale(-1.0), self)

    def __matmul__(self, other: Any) -> "Variable":
        return self._apply(products.MatMul(), self, other)

    def __rmatmul__(self, other: Any) -> "Variable":
        return self._apply(products.MatMul(), other, self)

    # Without this, in `array + variable` NumPy would add the variable to each element of the array by itself.
    __array_ufunc__ = None

    def _binary(self, op: Op, first: Any, second: Any) -> "Variable":
        """Apply an operation to two operands. A number as the second operand of a float becomes a setting."""
        if is_number(second) and self.dtype.kind == "f":
            number = float(second)
            match op:
                case arithmetic.Add():
                    return self._apply(arithmetic.Scale(1.0, number), first)
                case arithmetic.Sub():
                    return self._apply(arithmetic.Scale(1.0, -number), first)
                case arithmetic.Mul():
                    return self._apply(arithmetic.Scale(number), first)
                case arithmetic.Div() if number:
                    return self._apply(arithmetic.Scale(1.0 / number), first)
        return self._apply(op, first, second)
