"""Reference implementation of a rule's update in NumPy. Compiled kernels must be bit-identical to it.

It is slow and simple on purpose: it calls the rule's own functions on one weight after the other, in float32.
Tests compare the kernels of the CPU with it; training does not use it. In the simulator of a GPU, kernels use
its FLOAT32_MATH (device/cuda_arithmetic.py).
"""

import ctypes
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.rule_source import CHUNK, LANES, scalars_of
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import DecaySpec

Floats = NDArray[np.float32]

# The compiled kernels call the C library's pow, whose last bit may differ from NumPy's.
_powf = ctypes.CDLL(None).powf
_powf.restype, _powf.argtypes = ctypes.c_float, [ctypes.c_float, ctypes.c_float]

FLOAT32_MATH = SimpleNamespace(
    sqrt=np.sqrt, copysign=np.copysign, pow=lambda x, y: np.float32(_powf(float(x), float(y)))
)
"""Functions that rules call as `math`, computed in float32. Python's own module computes in float64."""

_NAMES: dict[str, Any] = {
    "math": FLOAT32_MATH,
    "max": max,  # of Python, as the compiled code: of a number and NaN it returns the first argument
    "min": min,
    "abs": np.abs,
}


def twin_push(
    rule: Rule,
    decay: DecaySpec,
    learning_rate: float,
    step: int,
    values: list[Floats],
    gradient: Floats,
    width: int,
    resting: bool = False,
) -> None:
    """Update weights and state by a rule, in place.

    Args:
        rule: Rule to apply.
        decay: Regularization that is added to the gradient.
        learning_rate: Learning rate of this push, already scaled for the parameter.
        step: Number of this update, from 1.
        values: Weights, then each slot of the state, float32 [n] each. A slot that a unit shares has its
            value once for each weight of the unit.
        gradient: Gradient of each weight, float32 [n].
        width: Number of weights of a unit (`Rule.unit`), over which a rule with sums adds up.
        resting: True if the weights are of rows that the step does not name.
    """
    scalars = scalars_of(rule, decay, learning_rate, step, resting)
    count = len(rule.scalars(learning_rate, step))
    visible_values = _in_turn(rule, step, values)
    with np.errstate(all="ignore"):
        gradient = _decayed(values[0], gradient, decay)
        for start in range(0, len(gradient), max(width, 1)):
            unit = slice(start, start + width)
            _update(rule, [v[unit] for v in visible_values], gradient[unit], tuple(scalars[:count]))


def _in_turn(rule: Rule, step: int, values: list[Floats]) -> list[Floats]:
    """Return the weights and the slots that this step updates: all slots, or one of those that take turns."""
    if not rule.turns:
        return values
    fixed = len(values) - rule.turns
    return [*values[:fixed], values[fixed + (step - 1) % rule.turns]]


def _decayed(weights: Floats, gradient: Floats, decay: DecaySpec) -> Floats:
    total = gradient.copy()
    if decay.l2:
        total += np.float32(decay.l2) * weights
    if decay.l1:
        total += np.float32(decay.l1) * np.sign(weights)
    return total


def _update(rule: Rule, values: list[Floats], gradient: Floats, h: tuple[Any, ...]) -> None:
    """Apply the rule's functions to one unit, in the order that `Rule` describes."""
    advance, direction = rule.advance(), rule.direction()
    measure, combine = rule.measure(), rule.combine()
    if advance is not None and direction is not None:
        for value, new in zip(
            values[1:], _columns(advance, [values[0], gradient, *values[1:]], h), strict=True
        ):
            value[:] = new
        (gradient,) = _columns(direction, values, h)
        values = values[:1]
    columns = [values[0], gradient, *values[1:]]
    if measure is not None and combine is not None:
        sums = [_sum(column) for column in _columns(measure, columns, h)]
        h = h + tuple(_in_numpy(combine)(*sums, np.float32(len(gradient)), h))
    for value, new in zip(values, _columns(rule.scalar(), columns, h), strict=True):
        value[:] = new


def _columns(
    function: Callable[..., Any], columns: list[Floats], h: tuple[Any, ...]
) -> list[Floats]:
    """Call a function of the rule for each weight, with the weight's value of each column and h.

    Returns:
        An array for each of the function's results, float32 [weights].
    """
    in_numpy = _in_numpy(function)
    results = [in_numpy(*at, h) for at in zip(*columns, strict=True)]
    return [np.array(column, np.float32) for column in zip(*results, strict=True)]


def _sum(terms: Floats) -> np.float32:
    """Return the sum of the terms, in the order that all kernels use (CHUNK and LANES of rule_source.py)."""
    total = np.float64(0)
    for start in range(0, len(terms), CHUNK):
        chunk = terms[start : start + CHUNK]
        lanes = np.zeros(LANES, np.float32)
        for row in range(0, len(chunk), LANES):
            part = chunk[row : row + LANES]
            lanes[: len(part)] += part
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total += np.float64(lanes[0])
    return np.float32(total)


def _in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with float32 versions of `math`, `max`, `min` and `abs` as its only globals."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**_NAMES, "__builtins__": {}}, function.__name__)
