"""Elementwise arithmetic with broadcasting, and similarity measures.

The functions `elementwise_*` have Paddle's argument `axis`: the axis of x that y's first axis is aligned
with. -1 aligns the last axes, as NumPy does. With x of shape [2, 3, 4] and y of shape [3], `axis=1` adds y
along axis 1.
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
    """Apply an operation with y's first axis aligned with x's axis `axis`. -1 aligns the last axes."""
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
    """Return x + y with broadcasting.

    Args:
        x, y: Variables or numbers.
        axis: Axis of x that y's first axis is aligned with. -1 aligns the last axes, as NumPy does.
        act: Name of an activation (psfleet.layers.activations), or None.
        name: Name of the operation.
    """
    return _elementwise(arithmetic.Add(), x, y, axis, act, name)


@checked
def elementwise_sub(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """Return x - y. Broadcasting and arguments are those of elementwise_add."""
    return _elementwise(arithmetic.Sub(), x, y, axis, act, name)


@checked
def elementwise_mul(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """Return x * y. Broadcasting and arguments are those of elementwise_add."""
    return _elementwise(arithmetic.Mul(), x, y, axis, act, name)


@checked
def elementwise_div(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """Return x / y. Broadcasting and arguments are those of elementwise_add."""
    return _elementwise(arithmetic.Div(), x, y, axis, act, name)


@checked
def elementwise_max(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """Return the larger of x and y, elementwise. Broadcasting and arguments are those of elementwise_add."""
    return _elementwise(arithmetic.Max(), x, y, axis, act, name)


@checked
def elementwise_min(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """Return the smaller of x and y, elementwise. Broadcasting and arguments are those of elementwise_add."""
    return _elementwise(arithmetic.Min(), x, y, axis, act, name)


@checked
def elementwise_pow(
    x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None
) -> Variable:
    """Return x ** y. Broadcasting and arguments are those of elementwise_add."""
    return _elementwise(arithmetic.Pow(), x, y, axis, act, name)


@checked
def exp(x: Variable, name: str | None = None) -> Variable:
    """Return e ** x, elementwise."""
    return apply(arithmetic.Exp(), x, name=name)


@checked
def log(x: Variable, name: str | None = None) -> Variable:
    """Return the natural logarithm, elementwise."""
    return apply(arithmetic.Log(), x, name=name)


@checked
def sqrt(x: Variable, name: str | None = None) -> Variable:
    """Return the square root, elementwise."""
    return apply(arithmetic.Sqrt(), x, name=name)


@checked
def square(x: Variable, name: str | None = None) -> Variable:
    """Return x * x, elementwise."""
    return apply(arithmetic.Square(), x, name=name)


@checked
def abs(x: Variable, name: str | None = None) -> Variable:
    """Return the absolute value, elementwise."""
    return apply(arithmetic.Abs(), x, name=name)


@checked
def pow(x: Variable, factor: float = 1.0, name: str | None = None) -> Variable:
    """Return x ** factor, elementwise."""
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
    """Return scale * x + bias, or scale * (x + bias) if `bias_after_scale` is False."""
    offset = bias if bias_after_scale else scale * bias
    op = arithmetic.Scale(float(scale), float(offset))
    return activate(apply(op, x, name=name if act is None else None), act, name)


@checked
def clip(x: Variable, min: AnyNumber, max: AnyNumber, name: str | None = None) -> Variable:
    """Return x with values below `min` set to `min` and values above `max` set to `max`."""
    if min > max:
        raise ShapeError(f"clip: min {min!r} is above max {max!r}")
    return apply(arithmetic.Clip(float(min), float(max)), x, name=name)


@checked
def dot(x: Variable, y: Variable, name: str | None = None) -> Variable:
    """Return the inner product of x and y over the last axis. The last axis of the result has extent 1."""
    product = apply(arithmetic.Mul(), x, y)
    return apply(reduce.ReduceSum((-1,), True), product, name=name)


@checked
def l2_normalize(
    x: Variable, axis: int = -1, epsilon: float = 1e-12, name: str | None = None
) -> Variable:
    """Return x / sqrt(sum(x^2) + epsilon), with the sum along an axis."""
    squares = apply(reduce.ReduceSum((axis,), True), square(x))
    return apply(arithmetic.Div(), x, sqrt(scale(squares, bias=epsilon)), name=name)


@checked
def cos_sim(X: Variable, Y: Variable, name: str | None = None) -> Variable:  # noqa: N803, RUF100
    """Return the cosine of the angle between rows of X and Y, shape [n, 1].

    Args:
        X: Variable [n, d].
        Y: Variable [n, d], or [1, d] to compare all rows of X with the same row.
    """
    return dot(l2_normalize(X), l2_normalize(Y), name=name)
