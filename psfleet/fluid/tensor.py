"""Functions that make variables with values (to_tensor, zeros, randn, ...), and DataFeeder for lists of
samples.

Random numbers come from a generator of this module, which `seed` restarts. Dropout masks and initial values
of parameters do not use this generator. They depend only on names and on the program's seed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.validation.annotations import NonNegativeInt, checked
from psfleet.core.graph.program import program
from psfleet.core.graph.program.operation import Array, dtype_of
from psfleet.core.graph.program.program import Program, default_main_program
from psfleet.core.graph.program.variable import Variable, to_variable

__all__ = [
    "DataFeeder",
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


@checked
def seed(value: NonNegativeInt) -> None:
    """Restart the random numbers of this module, and set the seed of the default programs."""
    global _random
    _random = np.random.default_rng(value)
    program.default_main_program().random_seed = value
    program.default_startup_program().random_seed = value


@checked
def to_tensor(
    data: ArrayLike | Variable,
    dtype: DTypeLike | None = None,
    place: object = None,
    stop_gradient: bool = True,
) -> Variable:
    """Return a variable with the values of an array, for eager mode. `place` has no effect."""
    if isinstance(data, Variable):
        return data
    return to_variable(data, dtype=dtype, stop_gradient=stop_gradient)


@checked
def arange(
    start: float, end: float | None = None, step: float = 1, dtype: DTypeLike = "int64"
) -> Variable:
    """Return a variable with the numbers from `start` up to, but not including, `end`. `arange(end)` starts
    at 0."""
    low, high = (0, start) if end is None else (start, end)
    if not step:
        raise ConfigError("arange: step is 0; use another number")
    return to_variable(np.arange(low, high, step), dtype=dtype)


@checked
def uniform(
    shape: Sequence[int],
    dtype: DTypeLike = "float32",
    min: float = -1.0,
    max: float = 1.0,
    seed: NonNegativeInt = 0,
) -> Variable:
    """Return a variable with random numbers in [min, max). The same seed, if not 0, gives the same
    numbers."""
    _check_order("uniform", min, max)
    source = np.random.default_rng(seed) if seed else _random
    return to_variable(source.uniform(min, max, tuple(shape)), dtype=dtype)


@checked
def randn(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """Return a variable with random numbers of the standard normal distribution."""
    return to_variable(_random.normal(size=tuple(shape)), dtype=dtype)


@checked
def randint(
    low: int = 0, high: int | None = None, shape: Sequence[int] = (1,), dtype: DTypeLike = "int64"
) -> Variable:
    """Return a variable with random whole numbers in [low, high), or in [0, low) without `high`."""
    first, last = (0, low) if high is None else (low, high)
    _check_order("randint", first + 1, last)
    return to_variable(_random.integers(first, last, tuple(shape)), dtype=dtype)


@checked
def ones(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """Return a variable filled with ones."""
    return to_variable(np.ones(tuple(shape), dtype_of(dtype)), dtype=dtype)


@checked
def zeros(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """Return a variable filled with zeros."""
    return to_variable(np.zeros(tuple(shape), dtype_of(dtype)), dtype=dtype)


def _check_order(function: str, low: float, high: float) -> None:
    if low > high:
        raise ConfigError(
            f"{function}: the numbers would be from {low} to {high}; name a higher end"
        )


def enable_static() -> None:
    """Do nothing. Accepted for Paddle scripts.

    psfleet needs no switch: operations on symbolic variables are always added to the program, and
    operations on values are always computed at once.
    """


def disable_static() -> None:
    """Do nothing. Accepted for Paddle scripts, as enable_static."""


@checked
class DataFeeder:
    """Converts lists of samples to the feed of a program.

        feeder = DataFeeder([x, label])
        exe.run(feed=feeder.feed([([0.1, 0.2], 1), ([0.3, 0.4], 0)]), fetch_list=[loss])

    Args:
        feed_list: Data variables or their names, in the order of a sample's fields.
        place: Accepted for Paddle scripts, without effect.
        program: Program in which to look up names, or None for the default main program.
    """

    def __init__(
        self, feed_list: Sequence[Variable | str], place: Any = None, program: Program | None = None
    ) -> None:
        program = program or default_main_program()
        self.place = place
        self.variables = [
            program.variable(entry, "feed") if isinstance(entry, str) else entry
            for entry in feed_list
        ]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, Array]:
        """Convert a batch of samples to a feed. A sample is a tuple with one field for each variable.

        Raises:
            ShapeError: A sample has another number of fields, or a field does not fit its variable.
        """
        samples = list(iterable)
        for number, sample in enumerate(samples):
            if not isinstance(sample, Sequence | np.ndarray) or isinstance(sample, str):
                raise ShapeError(f"sample {number} is {sample!r}; it must have a field a variable")
            if len(sample) != len(self.variables):
                raise ShapeError(
                    f"sample {number} has {len(sample)} fields, "
                    f"the feeder has {len(self.variables)} variables"
                )
        return {
            variable.name: _batch(variable, [sample[i] for sample in samples])
            for i, variable in enumerate(self.variables)
        }


def _batch(variable: Variable, fields: list[Any]) -> Array:
    """Stack the same field of all samples to an array. A flat field is reshaped to its variable's shape."""
    shape = [-1 if extent is None else extent for extent in variable.shape]
    try:
        batch = np.array(fields)
        batch = batch.reshape([len(fields), *shape[1:]]) if shape else batch
    except ValueError as error:
        raise ShapeError(
            f"feed {variable.name!r}: the fields do not make an array of shape "
            f"{variable.shape}: {error}"
        ) from None
    # Fractions in a variable of ids are not rounded here, so that the executor can report them.
    fits = batch.dtype.kind == variable.dtype.kind or variable.dtype.kind == "f"
    return batch.astype(variable.dtype) if fits else batch
