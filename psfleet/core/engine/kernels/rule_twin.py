"""A rule's update in NumPy, in float32: the reference that each kernel must equal bit for bit.

It is slow and simple on purpose. Tests compare kernels with it, and nothing that trains uses it.
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

# The compiled kernels call the C library's power function; NumPy's own differs in the last bit.
_powf = ctypes.CDLL(None).powf
_powf.restype, _powf.argtypes = ctypes.c_float, [ctypes.c_float, ctypes.c_float]

FLOAT32_MATH = SimpleNamespace(
    sqrt=np.sqrt, copysign=np.copysign, pow=lambda x, y: np.float32(_powf(float(x), float(y)))
)
"""Functions of `math` for rules, in float32: Python's own would answer in float64."""

_NAMES: dict[str, Any] = {
    "math": FLOAT32_MATH,
    "max": max,  # Python's own, as compiled: of a number and NaN the first one
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
    """Update `values` in place: weights [n], then each state slot [n].

    Args:
        rule, decay, learning_rate: As for the tables.
        step: Number of this update, from 1.
        values: Slots that a unit shares are repeated for each of its weights.
        gradient: float32 [n].
        width: Number of weights of a unit; used by rules with a unit.
        resting: The weights are of rows that the step does not name.
    """
    scalars = scalars_of(rule, decay, learning_rate, step, resting)
    count = len(rule.scalars(learning_rate, step))
    places = _in_turn(rule, step, values)
    with np.errstate(all="ignore"):
        gradient = _decayed(values[0], gradient, decay)
        for start in range(0, len(gradient), max(width, 1)):
            unit = slice(start, start + width)
            _update(rule, [v[unit] for v in places], gradient[unit], tuple(scalars[:count]))


def _in_turn(rule: Rule, step: int, values: list[Floats]) -> list[Floats]:
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
    """The function of (*columns, h) for each weight: one array per result."""
    in_numpy = _in_numpy(function)
    results = [in_numpy(*at, h) for at in zip(*columns, strict=True)]
    return [np.array(column, np.float32) for column in zip(*results, strict=True)]


def _sum(terms: Floats) -> np.float32:
    """The sum in the one order that all kernels use, see RuleSource."""
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
    """The function with NumPy's float32 arithmetic behind the names it uses."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**_NAMES, "__builtins__": {}}, function.__name__)
