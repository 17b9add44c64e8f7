"""Numerical gradients: central differences in float64 through the real engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet import layers
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable, to_variable

Floats = NDArray[np.float64]


def concrete(array: Any, wants_gradient: bool = False) -> Variable:
    """A concrete variable that keeps float64."""
    array = np.asarray(array)
    return to_variable(array, dtype=array.dtype, stop_gradient=not wants_gradient)


def check_gradient(
    layer: Callable[..., Variable], *inputs: Any, step: float = 1e-6, tolerance: float = 1e-7
) -> None:
    """Assert that a layer's gradients by its float64 inputs are those of central differences.

    The layer's output is weighted by fixed random numbers, so that every element counts differently.
    """
    arrays = [np.array(value) for value in inputs]
    variables = [concrete(a, a.dtype.kind == "f") for a in arrays]
    out = layer(*variables)
    assert out.dtype == np.float64
    weights = np.random.default_rng(7).normal(size=out.numpy().shape)
    layers.reduce_sum(out * concrete(weights)).backward()
    default_main_program().step = 0  # a dropout mask depends on it

    def loss() -> float:
        value = layer(*[concrete(a) for a in arrays]).numpy()
        return float((value * weights).sum())

    for array, variable in zip(arrays, variables, strict=True):
        if array.dtype.kind != "f":
            continue
        assert isinstance(variable.grad, np.ndarray)
        assert variable.grad.shape == array.shape
        np.testing.assert_allclose(
            variable.grad, _differences(loss, array, step), rtol=tolerance, atol=tolerance
        )


def _differences(loss: Callable[[], float], array: Floats, step: float) -> Floats:
    values = np.zeros(array.shape)
    for index in np.ndindex(array.shape):
        at = array[index]
        array[index] = at + step
        above = loss()
        array[index] = at - step
        below = loss()
        array[index] = at
        values[index] = (above - below) / (2 * step)
    return values
