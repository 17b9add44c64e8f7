"""Concrete variables made of nothing: the newer half of the older face."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from psfleet.program import program
from psfleet.program.dtypes import dtype_of
from psfleet.program.variable import Variable, to_variable

__all__ = [
    "arange",
    "disable_static",
    "enable_static",
    "ones",
    "randint",
    "randn",
    "seed",
    "to_tensor",
    "uniform",
    "zeros",
]

_random = np.random.default_rng(0)


def seed(value: int) -> None:
    """Start the random numbers of this module anew, and those of the default programs."""
    global _random
    _random = np.random.default_rng(value)
    program.default_main_program().random_seed = value
    program.default_startup_program().random_seed = value


def to_tensor(
    data: ArrayLike | Variable,
    dtype: DTypeLike | None = None,
    place: object = None,
    stop_gradient: bool = True,
) -> Variable:
    """A concrete variable of an array."""
    if isinstance(data, Variable):
        return data
    return to_variable(data, dtype=dtype, stop_gradient=stop_gradient)


def arange(
    start: float, end: float | None = None, step: float = 1, dtype: DTypeLike = "int64"
) -> Variable:
    """Numbers from start (or 0) up to, and without, end."""
    low, high = (0, start) if end is None else (start, end)
    return to_variable(np.arange(low, high, step), dtype=dtype)


def uniform(
    shape: Sequence[int],
    dtype: DTypeLike = "float32",
    min: float = -1.0,
    max: float = 1.0,
    seed: int = 0,
) -> Variable:
    """Random numbers in [min, max); a seed other than 0 makes them repeatable."""
    source = np.random.default_rng(seed) if seed else _random
    return to_variable(source.uniform(min, max, tuple(shape)), dtype=dtype)


def randn(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """Normal random numbers."""
    return to_variable(_random.normal(size=tuple(shape)), dtype=dtype)


def randint(
    low: int = 0, high: int | None = None, shape: Sequence[int] = (1,), dtype: DTypeLike = "int64"
) -> Variable:
    """Random whole numbers in [low, high), or in [0, low)."""
    first, last = (0, low) if high is None else (low, high)
    return to_variable(_random.integers(first, last, tuple(shape)), dtype=dtype)


def ones(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """An array of ones."""
    return to_variable(np.ones(tuple(shape), dtype_of(dtype)), dtype=dtype)


def zeros(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """An array of zeros."""
    return to_variable(np.zeros(tuple(shape), dtype_of(dtype)), dtype=dtype)


def enable_static() -> None:
    """Nothing: what is symbolic is recorded, what has a value is computed, side by side."""


def disable_static() -> None:
    """Nothing, as enable_static."""
