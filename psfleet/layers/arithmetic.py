"""Elementwise arithmetic with broadcasting, and similarity measures.

The functions `elementwise_*` take Paddle's argument `axis`: it says where the axes of y stand in the
shape of x.
"""

from typing import Any

from psfleet.core.base.errors import ShapeError
from psfleet.core.base.validation.annotations import AnyNumber, checked
from psfleet.core.graph.program.operation import Op
from psfleet.core.graph.program.ops import arithmetic, reduce
from psfleet.core.graph.program.ops.manipulate import Reshape
from psfleet.core.graph.program.variable import Variable, apply, as_variable
from psfleet.layers.activations import activate

__all__ = [
    "abs",
    "clip",
    "cos_sim",
    "dot",
    "elementwise_add",
    "elementwise_div",
    "elementwise_max",
    "elementwise_min",
    "elementwise_mul",
    "elementwise_pow",
    "elementwise_sub",
    "exp",
    "l2_normalize",
    "log",
    "pow",
    "scale",
    "sqrt",
    "square",
]


def _elementwise(op: Op, x: Any, y: Any, axis: int, act: str | None, name: str | None) -> Variable:
    """Apply an operation with y's axes aligned to those of x from `axis` on; -1 aligns the last axes."""
    x, y = as_variable(x), as_variable(y)
    after = x.ndim - axis - y.ndim
    if axis >= 0 and y.ndim and after < 0:
        raise ShapeError(
            f"y {y.name!r} {y.shape} does not fit into x {x.name!r} {x.shape} at axis {axis}"
        )
    if axis >= 0 and y.ndim and after > 0:
        extents = [0 if extent is None else extent for extent in y.shape]
        y = apply(Reshape((*extents, *(1,) * after)), y)
    return activate(apply(op, x, y, name=name if act is None else None), act, name)


@checked
def elementwise_add(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """x + y with broadcasting. `axis` is the axis of x that y's first axis is aligned with; -1 aligns the
    last axes."""
    return _elementwise(arithmetic.Add(), x, y, axis, act, name)


@checked
def elementwise_sub(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """x - y, broadcast as in elementwise_add."""
    return _elementwise(arithmetic.Sub(), x, y, axis, act, name)


@checked
def elementwise_mul(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """x * y, broadcast as in elementwise_add."""
    return _elementwise(arithmetic.Mul(), x, y, axis, act, name)


@checked
def elementwise_div(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """x / y, broadcast as in elementwise_add."""
    return _elementwise(arithmetic.Div(), x, y, axis, act, name)


@checked
def elementwise_max(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """The larger of x and y, broadcast as in elementwise_add."""
    return _elementwise(arithmetic.Max(), x, y, axis, act, name)


@checked
def elementwise_min(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """The smaller of x and y, broadcast as in elementwise_add."""
    return _elementwise(arithmetic.Min(), x, y, axis, act, name)


@checked
def elementwise_pow(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """x ** y, broadcast as in elementwise_add."""
    return _elementwise(arithmetic.Pow(), x, y, axis, act, name)


@checked
def exp(x: Variable, name: str | None = None) -> Variable:
    """e ** x."""
    return apply(arithmetic.Exp(), x, name=name)


@checked
def log(x: Variable, name: str | None = None) -> Variable:
    """The natural logarithm."""
    return apply(arithmetic.Log(), x, name=name)


@checked
def sqrt(x: Variable, name: str | None = None) -> Variable:
    """The square root."""
    return apply(arithmetic.Sqrt(), x, name=name)


@checked
def square(x: Variable, name: str | None = None) -> Variable:
    """x * x."""
    return apply(arithmetic.Square(), x, name=name)


@checked
def abs(x: Variable, name: str | None = None) -> Variable:
    """The absolute value."""
    return apply(arithmetic.Abs(), x, name=name)


@checked
def pow(x: Variable, factor: float = 1.0, name: str | None = None) -> Variable:
    """x ** factor."""
    return apply(arithmetic.Power(float(factor)), x, name=name)


@checked
def scale(
    x: Variable,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """scale * x + bias, or scale * (x + bias)."""
    offset = bias if bias_after_scale else scale * bias
    op = arithmetic.Scale(float(scale), float(offset))
    return activate(apply(op, x, name=name if act is None else None), act, name)


@checked
def clip(x: Variable, min: AnyNumber, max: AnyNumber, name: str | None = None) -> Variable:
    """x limited to [min, max]."""
    if min > max:
        raise ShapeError(f"clip: min {min!r} is above max {max!r}")
    return apply(arithmetic.Clip(float(min), float(max)), x, name=name)


@checked
def dot(x: Variable, y: Variable, name: str | None = None) -> Variable:
    """The inner product over the last axis, which stays with extent 1."""
    product = apply(arithmetic.Mul(), x, y)
    return apply(reduce.ReduceSum((-1,), True), product, name=name)


@checked
def l2_normalize(
    x: Variable, axis: int = -1, epsilon: float = 1e-12, name: str | None = None
) -> Variable:
    """x / sqrt(sum(x^2) + epsilon) along an axis."""
    squares = apply(reduce.ReduceSum((axis,), True), square(x))
    return apply(arithmetic.Div(), x, sqrt(scale(squares, bias=epsilon)), name=name)


@checked
def cos_sim(X: Variable, Y: Variable, name: str | None = None) -> Variable:  # noqa: N803, RUF100
    """The cosine of the angle between rows: [n, d] and [n, d] or [1, d] give [n, 1]."""
    return dot(l2_normalize(X), l2_normalize(Y), name=name)
